"""The memory of a step as data for the cache, and its reader, which refuses what no step has."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from itertools import accumulate
from typing import Any

from bertscope.analyses.memory.events import Block
from bertscope.analyses.memory.growth import FAR, SMALLEST, Kind, MemoryGrowth
from bertscope.analyses.parallel.collectives import Collective
from bertscope.analyses.saved import NUMBER, checked
from bertscope.reports.memory import BACKWARD, FORWARD, OPTIMIZER, RECOMPUTE
from bertscope.reports.step import Parts

_MOST_SAVED = 500_000  # events; saved.py writes at most 64 MiB of JSON, of which 2,500 layers have about as much
_PHASES = frozenset((FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER))
_SLOPE, _PLACE, _EVENT = range(-(2**62), 2**62), range(2**31), range(-(2**31), 2**31)
_BLOCK = (frozenset(field.name for field in fields(Parts)), str, str, [NUMBER], str, bool, str, str)
_FORM = (
    [(*_BLOCK, NUMBER, _SLOPE, [_SLOPE])], [_PLACE], [_EVENT], [(_PHASES, str, str)], [_PLACE], range(1, 2**20),
    [range(1, 2**31)], [((_PHASES, str, str, NUMBER, range(1, 2**31)), _SLOPE)], [_PLACE], [_EVENT],
)  # fmt: skip


def growth_data(growth: MemoryGrowth) -> list[Any]:
    """Return the growth as JSON data; raises OverflowError for one that is too long for a file of the cache."""
    if len(growth.events) > _MOST_SAVED:
        raise OverflowError("too long")
    kinds = [(*kind.block, kind.size_bytes, kind.slope, kind.dims) for kind in growth.kinds]
    layers = [] if growth.traced_layers is None else [growth.traced_layers]
    return [kinds, growth.state, growth.events, growth.places, growth.place_of, growth.granule_bytes, layers,
            growth.collectives, growth.other_state, growth.other_events]  # fmt: skip


def read_growth(data: Any) -> MemoryGrowth:
    """Return the growth that `growth_data` wrote; raises ValueError and others for data that no step has.

    At the smallest and at a large batch no block is negative, and what is freed was allocated.
    """
    kinds, state, events, places, place_of, granule_bytes, layers, calls, *others = checked(data, _FORM)
    found = MemoryGrowth(
        [Kind(Block(part, path, operator, tuple(shape), *more), size, slope, tuple(dims))
         for part, path, operator, shape, *more, size, slope, dims in kinds],
        state, events, [(phase, path, operator) for phase, path, operator in places], place_of,
        granule_bytes, layers[0] if layers else None, [(Collective(*call), slope) for call, slope in calls], *others,
    )  # fmt: skip
    if len(place_of) != len(events) or not events or len(layers) > 1:
        raise ValueError("no growth")
    sizes = [[kind.bytes_at(more) for kind in found.kinds] for more in (0, FAR - SMALLEST)]
    if any(not 0 <= size < NUMBER.stop for own in sizes for size in own) or any(
        call.full_bytes + slope * (FAR - SMALLEST) < 0 for call, slope in found.collectives
    ):
        raise ValueError("negative bytes")
    for first, then in ((state, events), others):
        alive = Counter(first)
        for number in then:
            alive[max(number, ~number)] += 1 if number >= 0 else -1
            if alive[max(number, ~number)] < 0:
                raise ValueError("freed twice")
        for own in sizes:
            moved = (own[number] if number >= 0 else -own[~number] for number in then)
            if max(accumulate(moved, initial=sum(own[number] for number in first))) >= NUMBER.stop:
                raise ValueError("more bytes than there are")
    found.layout  # noqa: B018  # raises IndexError for a number of a place or a kind that is not there
    return found
