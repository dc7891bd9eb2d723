"""The memory of a deep model from that of a shallow one, for layers that `modules.repeat` says may be equal.

Only numbers are repeated: those of kinds and places, with those of each copy of a layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import groupby

from bertscope.analyses.memory.events import STACK
from bertscope.analyses.memory.growth import Kind, MemoryGrowth
from bertscope.analyses.modules.repeat import Copies, Unit
from bertscope.analyses.parallel.collectives import Collective
from bertscope.reports.layer_ranges import LayerRange
from bertscope.reports.memory import OPTIMIZER


def deepened(growth: MemoryGrowth, path: str, copies: Copies) -> MemoryGrowth:
    """Return the memory of a model with copies of the layers at `path`, from that of few layers."""
    found = _Deepening(growth, path, copies)
    state: list[int] = []
    units = (found.unit(growth.kinds[number].block.path) for number in growth.state)
    for unit, run in groupby(zip(units, growth.state, strict=True), key=lambda pair: pair[0]):
        numbers = [number for _, number in run]
        for layers in found.shifts(unit):  # in the order of the full model, layer after layer
            state += map(found.kind_table(unit, layers).__getitem__, numbers)
    events, place_of = found.events()
    calls = [(copy, slope) for call, slope in growth.collectives for copy in found.collectives(call)]
    return replace(growth, kinds=found.kinds, state=state, events=events, places=list(found.places), place_of=place_of,
                   collectives=calls, other_state=state, other_events=events)  # fmt: skip


class _Table(dict[int, int]):
    """The number of each kind or place that ran in one copy of its layer, made when it is asked for."""

    def __init__(self, make: Callable[[int], int]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, number: int) -> int:
        found = self[number] = ~self[~number] if number < 0 else self.make(number)
        return found


class _Deepening:
    def __init__(self, growth: MemoryGrowth, path: str, copies: Copies) -> None:
        self.growth, self.copies, self.ranges = growth, copies, dict(copies)
        self.prefix, self.around = f"{path}.", path.rpartition(".")[0]
        self.ran = list(growth.kinds)  # of few layers
        self.grown: dict[tuple[int, int], tuple[int, int]] = {}  # bytes and elements of stacks, with few layers and all
        self.kinds: list[Kind] = []  # of all layers
        self.like: dict[Kind, int] = {}
        self.numbers: dict[tuple[int, str], int] = {}  # of `kinds`, by likeness and path
        self.places: dict[tuple[str, str, str], int] = {}
        # A trace repeats few paths many times.
        self.layers, self.moved, self.likeness = cache(self._layers), cache(self._moved), cache(self._likeness)
        self.kind_table, self.place_table = cache(self._kind_table), cache(self._place_table)

    def unit(self, path: str) -> Unit | None:
        """Return the unit that a path lies in."""
        layers = self.layers(path)
        return self.copies[layers.first][0] if layers else None

    def _layers(self, path: str) -> LayerRange | None:
        inside = path.removeprefix(self.prefix) if path.startswith(self.prefix) else ""
        return LayerRange.parse(inside.partition(".")[0])

    def _moved(self, path: str, layers: int) -> str:
        """Return the path with its layer moved by this number of layers."""
        found = self.layers(path) if layers else None
        return self.moved_to(path, found.first + layers) if found else path

    def moved_to(self, path: str, layer: int) -> str:
        """Return the path with this number as that of its layer."""
        _, dot, rest = path.removeprefix(self.prefix).partition(".")
        return f"{self.prefix}{layer}{dot}{rest}"

    def _kind_table(self, unit: Unit | None, layers: int) -> _Table:
        """Return the kinds of a unit moved by this number of layers; of blocks in another run than the unit less."""

        def make(number: int) -> int:
            kind, by = self.ran[number], layers
            own = self.unit(kind.block.path)
            if own and unit and own[0] != unit[0]:
                by = min(max(layers, self.ranges[own][0]), self.ranges[own][-1])
            path = self.moved(kind.block.path, by)
            key = self.likeness(number), path
            if key not in self.numbers:
                self.numbers[key] = len(self.kinds)
                self.kinds.append(kind._replace(block=kind.block._replace(path=path)))
            return self.numbers[key]

        return _Table(make)

    def _likeness(self, number: int) -> int:
        """Return the number of the first kind that ran and differs in the layer at most."""
        kind = self.ran[number]
        path = kind.block.path if self.unit(kind.block.path) is None else self.moved_to(kind.block.path, 0)
        return self.like.setdefault(kind._replace(block=kind.block._replace(path=path)), number)

    def _place_table(self, layers: int) -> _Table:
        """Return the places moved by this number of layers."""

        def make(number: int) -> int:
            phase, path, operator = self.growth.places[number]
            return self.places.setdefault((phase, self.moved(path, layers), operator), len(self.places))

        return _Table(make)

    def events(self) -> tuple[list[int], list[int]]:
        """Return the events and their places; runs of events in a unit are repeated for each of its copies."""
        ran, places = self._with_all_norms(), self.growth.place_of
        events: list[int] = []
        place_of: list[int] = []
        for _, start, stop in self.growth.layout.phases:
            before = None
            for unit, run in groupby(self._with_units(ran, start, stop), key=lambda pair: pair[0]):
                numbers = [number for _, number in run]
                for layers in self.shifts(unit, before):
                    kinds, moved = self.kind_table(unit, layers), self.place_table(layers)
                    events += [kinds[ran[number]] for number in numbers]
                    place_of += [moved[places[number]] for number in numbers]
                before = unit if unit is not None else before
        return self._with_all_frees(ran, events, place_of)

    def _with_all_norms(self) -> list[int]:
        """Return the events; a stack of one number for each parameter, such as norms to clip, has those of copies too.

        So have the results of operators on it. Events of no bytes before it have the parameters.
        """
        stacked: list[str] = []
        numbers: dict[int, int] = {}
        found = []
        for event in self.growth.events:
            number = max(event, ~event)
            block, size = self.ran[number].block, self.ran[number].size_bytes
            if block.operator == STACK and not size:
                stacked.append(block.path)
            elif block.operator == STACK and stacked:
                count = sum(len(self.shifts(self.unit(path))) for path in stacked)
                self.grown[size, len(stacked)] = size // len(stacked) * count, count
                stacked = []
            if not block.path and block.shape and (size, block.shape[0]) in self.grown:
                many, count = self.grown[size, block.shape[0]]
                if number not in numbers:
                    numbers[number] = len(self.ran)
                    block = block._replace(shape=(count, *block.shape[1:]))
                    self.ran.append(self.ran[number]._replace(size_bytes=many, block=block))
                number = numbers[number]
            found.append(number if event >= 0 else ~number)
        return found

    def _with_units(self, ran: list[int], start: int, stop: int) -> Iterator[tuple[Unit | None, int]]:
        """Yield each event with its unit: the module's; outside the encoder the block's; else that of the event before.

        A block without a unit that is freed outside all modules has none: autocast frees its weights in any order.
        """
        unit = None
        for number in range(start, stop):
            event, path = ran[number], self.growth.places[self.growth.place_of[number]][1]
            found, is_outside = self.unit(path), path != self.around
            if found is None and is_outside:
                found = self.unit(self.ran[max(event, ~event)].block.path)
            if found is None and is_outside and event < 0 and not path:
                yield None, number
                continue
            unit = unit if found is None else found
            yield unit, number

    def _with_all_frees(self, ran: list[int], events: list[int], place_of: list[int]) -> tuple[list[int], list[int]]:
        """Return the repeated events, and the frees that their blocks lack next to an equal one.

        They belong to no layer: reentrant checkpointing frees the random states of all layers after the last one.
        """
        lacking: Counter[int] = Counter()
        for event in events:
            lacking[max(event, ~event)] += 1 if event >= 0 else -1
        for event in ran:
            number = max(event, ~event)
            lacking[self.numbers.get((self.likeness(number), self.ran[number].block.path), -1)] -= 1 if event >= 0 else -1
        lacking = +lacking
        if not lacking:
            return events, place_of
        times = [1 if event >= 0 else 1 + lacking.pop(~event, 0) for event in events]
        return ([event for event, count in zip(events, times, strict=True) for _ in range(count)],
                [place for place, count in zip(place_of, times, strict=True) for _ in range(count)])  # fmt: skip

    def collectives(self, call: Collective) -> Iterator[Collective]:
        """Yield the call with its layer moved, for each copy of its unit."""
        for (few, _), (many, _) in self.grown.items():
            if (call.phase, call.path, call.full_bytes) == (OPTIMIZER, "", few):
                call = call._replace(full_bytes=many)
        for layers in self.shifts(self.unit(call.path)):
            yield call._replace(path=self.moved(call.path, layers))

    def shifts(self, unit: Unit | None, before: Unit | None = None) -> range:
        """Return the layers to move each copy of the events by, in order; in backward the last copy comes first."""
        found = range(1) if unit is None else self.ranges[unit]
        return found[::-1] if unit and before and before > unit else found
