"""Checkpointing: the strategies, and the layers that each of them recomputes in backward."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from bertscope.errors import ConfigError
from bertscope.frozen import dataclass


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """The encoder layers that are recomputed.

    `every` takes layers 0, k, 2k ...; `layers` names them; `selective` recomputes every layer except its
    matrix products. Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022.
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

    @property
    def period(self) -> int | None:
        """Return the period, in layers, of the pattern of recomputed layers; None if it has none."""
        return self.every if self.layers is None else None

    def covers(self, layer: int) -> bool:
        """Return True if the layer of that number is recomputed."""
        return layer in self.layers if self.layers is not None else layer % self.every == 0

    def check_layers(self, layers: int) -> None:
        """Raise ConfigError for a named layer that a stack of `layers` does not have."""
        absent = sorted(layer for layer in self.layers or () if layer >= layers)
        if absent:
            shown = ", ".join(map(str, absent[:5]))
            raise ConfigError("checkpointing names layers {layers} and the model has {count} layers, from 0",
                              layers=shown, count=layers)  # fmt: skip

    @classmethod
    def parse(cls, text: str, *, use_reentrant: bool = False) -> Checkpointing | None:
        """Return the Checkpointing of a strategy such as `layers:0-5,8`; None for `none`. Raises ConfigError."""
        strategy, match = _strategy(text)
        settings = strategy.settings(*match.groups())
        return None if settings is None else cls(**settings, use_reentrant=use_reentrant)


def _numbers(text: str) -> frozenset[int]:
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A strategy of checkpointing: its syntax, and the fields of Checkpointing that it sets."""

    form: str
    example: str
    pattern: str
    settings: Callable[..., dict[str, Any] | None]  # of the groups of `pattern`; None: nothing is recomputed
    reentrant: bool = True  # torch's reentrant implementation supports it


NONE, FULL, SELECTIVE, EVERY = "none", "full", "selective", "every-{}"
_RANGES = r"\d{1,4}(?:-\d{1,4})?(?:,\d{1,4}(?:-\d{1,4})?)*"
_STRATEGIES = (
    Strategy(form=NONE, example=NONE, pattern=NONE, settings=lambda: None, reentrant=False),
    Strategy(form=FULL, example=FULL, pattern=FULL, settings=dict),
    Strategy(form="every-K", example="every-2", pattern=r"every-(\d{1,4})",
             settings=lambda number: {"every": int(number)}),
    Strategy(form="layers:LIST", example="layers:0-5,8", pattern=f"layers:({_RANGES})",
             settings=lambda text: {"layers": _numbers(text)}),
    Strategy(form=SELECTIVE, example=SELECTIVE, pattern=SELECTIVE,
             settings=lambda: {"selective": True}, reentrant=False),
)  # fmt: skip
STRATEGIES = ", ".join(
    item.form if item.form == item.example else f"{item.form} ({item.example})" for item in _STRATEGIES
)
EXAMPLE_STRATEGIES = tuple(item.example for item in _STRATEGIES)
COMPARED = f"{NONE},{FULL}"  # without and with
CHEAPEST_FIRST = f"{NONE},{SELECTIVE},{FULL}"


def _strategy(text: str) -> tuple[Strategy, re.Match[str]]:
    """Return the strategy with the syntax of the text, and the match; raises ConfigError for other text."""
    for strategy in _STRATEGIES:
        if match := re.fullmatch(strategy.pattern, text, re.ASCII):
            return strategy, match
    raise ConfigError("unknown checkpointing strategy {name!r}; allowed: {names}", name=text[:40], names=STRATEGIES)


def parse_strategies(text: str) -> tuple[str, ...]:
    """Return the strategies of `none,full,layers:0-5,8`, each once; raises ConfigError for an unknown one."""
    found = split_strategies(text)
    for strategy in found:
        Checkpointing.parse(strategy)
    return tuple(dict.fromkeys(found))


def are_strategies(text: str) -> bool:
    """Return True if each comma-separated part of the text has the syntax of a strategy."""
    return all(any(re.fullmatch(row.pattern, part, re.ASCII) for row in _STRATEGIES) for part in split_strategies(text))


def split_strategies(text: str) -> list[str]:
    """Return the comma-separated parts; a number belongs to the part before it, as in `layers:0-5,8`."""
    found: list[str] = []
    for part in text.split(","):
        if found and re.fullmatch(r"\d+(-\d+)?", part, re.ASCII):
            found[-1] += f",{part}"
        else:
            found.append(part.strip())
    return found


def takes_reentrant(strategy: str) -> bool:
    """Return True if torch's reentrant implementation supports the strategy."""
    return _strategy(strategy)[0].reentrant
