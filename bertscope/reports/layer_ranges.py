"""Numbers in module paths, the only place that reads them: `encoder.layer.0-11.output` is a path in twelve layers.

A name that reads as a range although it is one module's own name is written with an apostrophe: `0-3'`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

from bertscope.units import decimal

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
Unit = tuple[int, int]  # numbers of the run of equal units, and of the unit in it
Copies = Sequence[tuple[Unit, range]]  # for each layer that ran its unit, and how far each of its copies is moved
_NUMBER = re.compile(r"(?<![^.])(?:0|[1-9][0-9]{0,8})(?![^.])")
_RANGE = re.compile(r"(0|[1-9][0-9]{0,8})(?:-([1-9][0-9]{0,8}))?")
_LIKE_A_RANGE = re.compile(r"(?<![^.])([0-9]+-[0-9]+)('*)(?![^.])")
# `encoder.layer.3`, and in the names of TensorFlow and Keras `layer_3` and `Transformer-3-MultiHeadSelfAttention`.
_IN_STACK = re.compile(r"\b(layer[._]|Transformer-)([0-9]{1,9}(?:-[0-9]{1,9})?)(?!\w|-[0-9])")


@dataclass(frozen=True, order=True)
class LayerRange:
    """The numbers of consecutive layers from `first` to `last`, both included; as text `0-11`, one layer `3`."""

    first: int
    last: int

    @classmethod
    def parse(cls, name: str) -> LayerRange | None:
        """Return the layers that one part of a path numbers; None for other names (`03`, `3-1`, `dense`)."""
        match = _RANGE.fullmatch(name)
        if match is None:
            return None
        layers = cls(int(match[1]), int(match[2] or match[1]))
        return layers if match[2] is None or layers.is_run else None

    @property
    def is_run(self) -> bool:
        """Return True for more than one layer."""
        return self.first < self.last

    def __str__(self) -> str:
        return f"{self.first}-{self.last}" if self.is_run else str(self.first)

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.first, self.last + 1))

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and self.first <= number <= self.last


def number_of(name: str) -> int | None:
    """Return the number that a module's name is, of nine digits at most; None for any other name."""
    return decimal(name) if name == "0" or name[:1] != "0" else None


def is_run(name: str) -> bool:
    """Return True for a name of several layers, such as `0-11`."""
    layers = LayerRange.parse(name)
    return layers is not None and layers.is_run


def written_apart(path: str) -> str:
    """Return the name or path of one module as it is among ranges: `a.0-3` becomes `a.0-3'`."""
    if "-" not in path:  # the pattern takes ten times as long
        return path
    return _LIKE_A_RANGE.sub(lambda match: f"{match[0]}'" if is_run(match[1]) else match[0], path)


def in_order(path: str) -> list[Any]:
    """Return a key to sort paths by, numbers by their size: a number and a text for each part of the path."""
    key: list[Any] = []
    for name in path.split("."):
        number = number_of(name)
        key += (-1, name) if number is None else (number, "")
    return key


def expand(path: str) -> Iterator[str]:
    """Yield every single path that `path` represents; the last range varies fastest."""
    match = next((match for match in _LIKE_A_RANGE.finditer(path) if is_run(match[1])), None)
    if match is None:
        yield path
        return
    layers, rests = LayerRange.parse(match[0]), [*expand(path[match.end() :])]
    for name in layers or [match[0][:-1]]:
        for rest in rests:
            yield f"{path[: match.start()]}{name}{rest}"


def collapse(items: Iterable[tuple[str, Key, Item]]) -> Iterator[tuple[str, Key, list[Item]]]:
    """Merge items with equal keys whose paths differ in their first number, where the numbers are consecutive.

    Yield the path with the range, the key, and the items in the order of their numbers.
    """
    alike: dict[tuple[str, str | None, Key], list[tuple[int, Item]]] = {}
    for name, key, item in items:
        path = written_apart(name)
        match = _NUMBER.search(path)
        likeness = (path[: match.start()], path[match.end() :], key) if match else (path, None, key)
        alike.setdefault(likeness, []).append((int(match[0]) if match else 0, item))
    for (before, after, key), members in alike.items():
        if len(members) == 1:  # as in a file of many different names
            (number, item), *_ = members
            yield before if after is None else f"{before}{number}{after}", key, [item]
            continue
        ordered = enumerate(sorted(members, key=itemgetter(0)))
        # Consecutive numbers have the same distance from their places in the order.
        for _, group in groupby(ordered, key=lambda placed: placed[1][0] - placed[0]):
            run = [member for _, member in group]
            path = before if after is None else f"{before}{LayerRange(run[0][0], run[-1][0])}{after}"
            yield path, key, [item for _, item in run]


# ---- the stack of layers of a BERT ----


@lru_cache(maxsize=4096)
def layers_in(path: str) -> LayerRange | None:
    """Return the layers of the stack that a path lies in; None outside."""
    match = _IN_STACK.search(path)
    return LayerRange.parse(match[2]) if match else None


def with_layers(path: str, name: Callable[[LayerRange], object]) -> str:
    """Return the path with the layers of the stack under the name that `name` gives them."""

    def renamed(match: re.Match[str]) -> str:
        layers = LayerRange.parse(match[2])
        return match[0] if layers is None else f"{match[1]}{name(layers)}"

    return _IN_STACK.sub(renamed, path)


def without_numbers(text: str) -> str:
    """Return the text with every number inside a path as `*`, for a comparison."""
    return re.sub(r"(?<=\.)[0-9]+(?=\.)", "*", text)
