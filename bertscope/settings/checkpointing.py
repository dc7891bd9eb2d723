"""Checkpointing: the strategies, and the layers that each recomputes in backward."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from bertscope.errors import ConfigError
from bertscope.frozen import Record


class Saved(Record):
    """The operators of each layer of a list that are not recomputed, such as `addmm.0`, the first addmm of a layer.

    `path` is that of the list, empty for every list of layers; layers outside `layers` save everything.
    """

    path: str = ""
    operators: frozenset[str] = frozenset()
    layers: frozenset[int] | None = None

    @property
    def text(self) -> str:
        """Return the text in a strategy, such as `encoder.layer=addmm.0-3+addmm.5@0-11`."""
        numbers: dict[str, list[int]] = {}
        for operator in self.operators:
            name, _, number = operator.rpartition(".")
            numbers.setdefault(name, []).append(int(number))
        shown = [f"{name}.{part}" for name in sorted(numbers) for part in ranges_text(numbers[name]).split(",")]
        layers = "" if self.layers is None else f"@{ranges_text(self.layers)}"
        return f"{self.path}{'=' if self.path else ''}{'+'.join(shown) or NONE}{layers}"

    def is_of(self, path: str) -> bool:
        """Return True if the list at this path is meant: one path may be the end of the other."""
        end, other = f".{self.path}", f".{path}"
        return not self.path or end.endswith(other) or other.endswith(end)

    @classmethod
    def parse(cls, text: str) -> Saved:
        """Return what a text with a strategy's syntax means."""
        path, _, rest = text.rpartition("=")
        names, _, layers = rest.partition("@")
        operators = frozenset(
            f"{name}.{number}" for part in names.split("+") if part != NONE
            for name, _, listed in [part.rpartition(".")] for number in _numbers(listed)
        )  # fmt: skip
        return cls(path=path, operators=operators, layers=_numbers(layers) if layers else None)


class Checkpointing(Record):
    """The encoder layers that are recomputed.

    `every` takes layers 0, k, 2k ...; `layers` names them; `selective` recomputes every layer except its
    matrix products; `saved` says for each list of layers which operators are saved. Chen et al. 2016, arXiv:1604.06174;
    Korthikanti et al. 2022.
    """

    every: int = 1
    layers: frozenset[int] | None = None
    selective: bool = False
    saved: tuple[Saved, ...] = ()
    use_reentrant: bool = False

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"checkpointing every-{self.every} means nothing; use every-1 or more")
        if (self.selective or self.saved) and self.use_reentrant:
            kind = "selective checkpointing" if self.selective else "checkpointing that saves operators"
            raise ConfigError(f"{kind} cannot be reentrant; leave use_reentrant false")

    def saved_in(self, path: str, layers: int) -> list[frozenset[str] | None]:
        """Return for each layer of the list at this path the operators that it saves; None if it is not recomputed."""
        if not self.saved:
            covered = range(0, layers, self.every) if self.layers is None else self.layers
            return [frozenset() if layer in covered else None for layer in range(layers)]
        groups = [saved for saved in reversed(self.saved) if saved.is_of(path)]
        return [next((saved.operators for saved in groups if saved.layers is None or layer in saved.layers), None)
                for layer in range(layers)]  # fmt: skip

    def check_lists(self, lists: Collection[str]) -> None:
        """Raise ConfigError for a list that a model with these lists of layers does not have."""
        for saved in self.saved:
            if not any(map(saved.is_of, lists)):
                names = ", ".join(lists) or "no lists of layers"
                raise ConfigError(f"checkpointing names the layers {saved.path} and the model has {names}")

    def check_layers(self, path: str, layers: int) -> None:
        """Raise ConfigError for a named layer that the list at this path, of `layers` layers, does not have."""
        named = [self.layers, *(saved.layers for saved in self.saved if saved.is_of(path))]
        absent = sorted(layer for numbers in named for layer in numbers or () if layer >= layers)
        if absent:
            shown = ", ".join(map(str, absent[:5]))
            raise ConfigError(f"checkpointing names layers {shown} and the model has {layers} layers, from 0")

    @classmethod
    def parse(cls, text: str, *, use_reentrant: bool = False) -> Checkpointing | None:
        """Return the Checkpointing for a strategy such as `layers:0-5,8`; None for `none`. Raises ConfigError."""
        strategy, match = _strategy(text)
        settings = strategy.settings(*match.groups())
        return None if settings is None else cls(**settings, use_reentrant=use_reentrant)


def saved_text(groups: Iterable[Saved]) -> str:
    """Return the strategy of these groups; `none` without any."""
    text = ";".join(group.text for group in groups)
    return f"{SAVE}{text}" if text else NONE


def with_eager_attention(strategy: str) -> str:
    """Return the strategy that saves the two products of eager attention too where a fused kernel's output is saved."""
    chosen = Checkpointing.parse(strategy)
    if chosen is None or not chosen.saved:
        return strategy
    groups = []
    for group in chosen.saved:
        names = (operator.rpartition(".") for operator in group.operators)
        numbers = (2 * int(number) for name, _, number in names if name == ATTENTION)
        products = {f"bmm.{number + part}" for number in numbers for part in (0, 1)}
        groups.append(replace(group, operators=group.operators | products))
    return saved_text(groups)


def with_checkpointing(strategy: str) -> str:
    """Return a strategy in words: `without checkpointing`, `with full checkpointing`."""
    if strategy == NONE:
        return "without checkpointing"
    return f"with checkpointing {strategy}" if ":" in strategy or " " in strategy else f"with {strategy} checkpointing"


def ranges_text(numbers: Iterable[int]) -> str:
    """Return numbers as ranges, such as `0-5,8`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] + 1 == number:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def _numbers(text: str) -> frozenset[int]:
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


class Strategy(Record):
    """A checkpointing strategy: its syntax, and the Checkpointing fields that it sets."""

    form: str
    example: str
    pattern: str
    settings: Callable[..., dict[str, Any] | None]  # of the groups of `pattern`; None: nothing is recomputed
    reentrant: bool = True  # torch's reentrant implementation supports it
    is_shown: bool = True  # in help; a plan needs less memory and fewer FLOPs than every-K


NONE, FULL, SELECTIVE, EVERY = "none", "full", "selective", "every-{}"
SAVE = "save:"
ATTENTION = "scaled_dot_product_attention"  # in a plan: any of torch's fused kernels
_RANGES = r"[0-9]{1,4}(?:-[0-9]{1,4})?(?:,[0-9]{1,4}(?:-[0-9]{1,4})?)*"
_OPERATOR = r"\w{1,80}(?:::\w{1,80})?\.[0-9]{1,4}(?:-[0-9]{1,4})?"
_SAVED = rf"(?:[\w.]{{1,200}}=)?(?:none|{_OPERATOR}(?:\+{_OPERATOR}){{0,99}})(?:@{_RANGES})?"
_STRATEGIES = (
    Strategy(form=NONE, example=NONE, pattern=NONE, settings=lambda: None, reentrant=False),
    Strategy(form=FULL, example=FULL, pattern=FULL, settings=dict),
    Strategy(form="every-K", example="every-2", pattern=r"every-([0-9]{1,4})",
             settings=lambda number: {"every": int(number)}, is_shown=False),
    Strategy(form="layers:LIST", example="layers:0-5,8", pattern=f"layers:({_RANGES})",
             settings=lambda text: {"layers": _numbers(text)}),
    Strategy(form=SELECTIVE, example=SELECTIVE, pattern=SELECTIVE,
             settings=lambda: {"selective": True}, reentrant=False),
    Strategy(form=f"{SAVE}OPERATORS", example="save:addmm.0-3+addmm.5",
             pattern=rf"{SAVE}({_SAVED}(?:;{_SAVED}){{0,9}})",
             settings=lambda text: {"saved": tuple(map(Saved.parse, text.split(";")))}, reentrant=False),
)  # fmt: skip
STRATEGIES = ", ".join(
    item.form if item.form == item.example else f"{item.form} ({item.example})" for item in _STRATEGIES if item.is_shown
)
EXAMPLE_STRATEGIES = tuple(item.example for item in _STRATEGIES if item.is_shown)
COMPARED = f"{NONE},{FULL}"  # without and with
CHEAPEST_FIRST = f"{NONE},{SELECTIVE},{FULL}"


def _strategy(text: str) -> tuple[Strategy, re.Match[str]]:
    """Return the strategy with the syntax of the text, and the match; raises ConfigError for other text."""
    for strategy in _STRATEGIES:
        if match := re.fullmatch(strategy.pattern, text, re.ASCII):
            return strategy, match
    if text.startswith("keep:"):  # before schema 6
        raise ConfigError(f"checkpointing keep: is called {SAVE} now; make the plan again, or write {SAVE}")
    raise ConfigError(f"unknown checkpointing strategy {text[:40]!r}; allowed: {STRATEGIES}")


def parse_strategies(text: str) -> tuple[str, ...]:
    """Return the strategies of `none,full,layers:0-5,8`, each once; raises ConfigError for an unknown one."""
    strategies = split_strategies(text)
    for strategy in strategies:
        Checkpointing.parse(strategy)
    return tuple(dict.fromkeys(strategies))


def are_strategies(text: str) -> bool:
    """Return True if each comma-separated part of the text has a strategy's syntax."""
    return all(any(re.fullmatch(row.pattern, part, re.ASCII) for row in _STRATEGIES) for part in split_strategies(text))


def split_strategies(text: str) -> list[str]:
    """Return the comma-separated parts; a number belongs to the part before it, as in `layers:0-5,8`."""
    strategies: list[str] = []
    for part in text.split(","):
        if strategies and re.match(r"[0-9]+(-[0-9]+)?(;|$)", part, re.ASCII):
            strategies[-1] += f",{part}"
        else:
            strategies.append(part.strip())
    return strategies


def takes_reentrant(strategy: str) -> bool:
    """Return True if torch's reentrant implementation supports the strategy."""
    return _strategy(strategy)[0].reentrant
