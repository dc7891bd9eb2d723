"""The one door to torch: imported fast here, and what building on the meta device needs."""

from __future__ import annotations

import gc
import warnings

# The import makes about a million objects that all live on: a collector that walks them over and
# over costs a third of the time.
_collecting = gc.isenabled()
gc.disable()
try:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # torch without numpy is fine
        import torch
finally:
    if _collecting:
        gc.enable()

from torch import nn  # noqa: E402

__all__ = ["Embedding", "index_row", "nn", "torch"]


class Embedding(nn.Embedding):
    """torch's Embedding without values on meta: there `normal_()` would import torch._dynamo (1.4 s)."""

    def reset_parameters(self) -> None:
        """Values for a real weight, nothing for one on meta."""
        if not self.weight.is_meta:
            super().reset_parameters()


def index_row(length: int, *, counting: bool) -> torch.Tensor:
    """0, 1 ... length-1, or zeros, of shape (1, length); on meta a stand-in, since `arange` costs 0.4 s there."""
    row = torch.zeros(1, length, dtype=torch.long)
    return torch.arange(length).unsqueeze(0) if counting and not row.is_meta else row
