"""How a model is run: so far, what is recomputed in the backward pass instead of kept."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bertscope.errors import ConfigError

STRATEGIES = "none, full, every-K (every-2), layers:LIST (layers:0-5,8), selective"


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Which encoder layers are recomputed, and how.

    `every` takes layers 0, k, 2k ...; `layers` names them; `selective` recomputes every layer but keeps
    the outputs of its matrix products. Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022.
    """

    every: int = 1
    layers: frozenset[int] | None = None
    selective: bool = False
    use_reentrant: bool = False

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"checkpointing every-{self.every} means nothing; use every-1 or more")
        if self.selective and self.use_reentrant:
            raise ConfigError("selective checkpointing cannot be reentrant; leave use_reentrant false")

    def covers(self, layer: int) -> bool:
        """Whether the layer of that number is recomputed."""
        return layer in self.layers if self.layers is not None else layer % self.every == 0

    def check_layers(self, layers: int) -> None:
        """Raise ConfigError for a named layer that a stack of `layers` does not have."""
        absent = sorted(layer for layer in self.layers or () if layer >= layers)
        if absent:
            shown = ", ".join(map(str, absent[:5]))
            raise ConfigError(f"checkpointing names layers {shown} and the model has {layers} layers, from 0")

    @classmethod
    def parse(cls, strategy: str, *, use_reentrant: bool = False) -> Checkpointing | None:
        """`full`, `every-2`, `layers:0-5,8` or `selective`; None for `none`. Raises ConfigError otherwise."""
        if strategy == "none":
            return None
        if strategy in ("full", "selective"):
            return cls(selective=strategy == "selective", use_reentrant=use_reentrant)
        if match := re.fullmatch(r"every-(\d{1,4})", strategy):
            return cls(every=int(match[1]), use_reentrant=use_reentrant)
        if match := re.fullmatch(r"layers:(\d{1,4}(?:-\d{1,4})?(?:,\d{1,4}(?:-\d{1,4})?)*)", strategy):
            return cls(layers=_numbers(match[1]), use_reentrant=use_reentrant)
        raise ConfigError(f"unknown checkpointing strategy {strategy[:40]!r}; allowed: {STRATEGIES}")


def _numbers(text: str) -> frozenset[int]:
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
