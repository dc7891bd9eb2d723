"""Layers that are recomputed in the backward pass instead of keeping what they computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bertscope.run_config import Checkpointing


def recomputed(layer: nn.Module, how: Checkpointing) -> Callable[..., Any]:
    """The layer as a function of its positional inputs that keeps these alone; dropout replays its masks."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    options: dict[str, Any] = {"use_reentrant": how.use_reentrant}
    if how.selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_matrix_products)
        return partial(checkpoint, partial(_without_weight_cache, layer), **options)
    return partial(checkpoint, layer, **options)


def _without_weight_cache(layer: nn.Module, hidden: Tensor, *others: Any) -> Any:
    """Autocast keeps the weights that it has cast; recomputation would then see fewer operators than the forward."""
    kind = hidden.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return layer(hidden, *others)
    with torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False):
        return layer(hidden, *others)


def _keep_matrix_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    return CheckpointPolicy.MUST_SAVE if operator in _matrix_products() else CheckpointPolicy.PREFER_RECOMPUTE


def _matrix_products() -> frozenset[Any]:
    """What costs most to compute again: products, and the fused attention kernels that consist of them."""
    aten = torch.ops.aten
    names = (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    )
    return frozenset(getattr(aten, name).default for name in names if hasattr(aten, name))
