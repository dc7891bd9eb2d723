"""Names that differ in one number alone, as those of equal layers do, folded into runs: `encoder.layer.0-11.x`."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
_NUMBER = re.compile(r"(?<=\.)\d{1,9}(?=\.)")


def runs(items: Iterable[tuple[str, Key, Item]]) -> Iterator[tuple[str, Key, list[Item]]]:
    """The items whose names are alike but for their first number, and whose keys are equal, as one.

    Gives a name with the span of numbers, the key, and the items in the order of theirs; a run has no gap.
    """
    alike: dict[tuple[str, str, Key], list[tuple[int, Item]]] = {}
    for name, key, item in items:
        number = _NUMBER.search(name)
        before, after = (name[: number.start()], name[number.end() :]) if number else (name, "")
        alike.setdefault((before, after, key), []).append((int(number[0]) if number else -1, item))
    for (before, after, key), members in alike.items():
        for run in _consecutive(members):
            yield before + _span(run[0][0], run[-1][0]) + after, key, [item for _, item in run]


def _consecutive(members: list[tuple[int, Item]]) -> Iterator[list[tuple[int, Item]]]:
    run: list[tuple[int, Item]] = []
    for member in sorted(members, key=lambda member: member[0]):
        if run and member[0] != run[-1][0] + 1:
            yield run
            run = []
        run.append(member)
    yield run


def _span(first: int, last: int) -> str:
    if first < 0:
        return ""
    return str(first) if first == last else f"{first}-{last}"
