"""The memory of a deep model from that of a shallow one, for layers that `modules.repeat` says may be equal.

Only numbers are repeated: the kinds of a block in all layers have consecutive numbers, and so have places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from typing import Any

from bertscope.analyses.memory.events import CAT, STACK, Block
from bertscope.analyses.memory.growth import Kind, MemoryGrowth
from bertscope.analyses.modules.repeat import Copies, Unit
from bertscope.analyses.parallel.collectives import Collective
from bertscope.reports.layer_ranges import LayerRange
from bertscope.reports.memory import ALL_GATHER, ALL_REDUCE, BROADCAST, FORWARD, OPTIMIZER

_STACKED = ((OPTIMIZER, ALL_REDUCE), (OPTIMIZER, ALL_GATHER), (FORWARD, BROADCAST))  # norms, and DDP's buffers
_Common = tuple[bool, Any]  # of a kind or place in all layers: True outside all, and it without its layer
_Run = tuple[Unit | None, range, list[int]]  # of events: their unit, how far its copies are moved, and their numbers


def deepened(growth: MemoryGrowth, path: str, copies: Copies) -> MemoryGrowth:
    """Return the memory of a model with copies of the layers at `path`, from that of few layers."""
    return _Deepening(growth, path, copies).deepened()


_made = tuple.__new__  # a call of the class of a named tuple takes twice as long


class _Numbers:
    """The numbers of kinds, or of places, in all layers, from those in few.

    `layer_of` returns the layer of one of few, None outside all, and what it has in common with that of another layer.
    """

    def __init__(self, layer_of: Callable[[int], tuple[int | None, _Common]]) -> None:
        self.layer_of = cache(layer_of)
        self.spans: dict[_Common, tuple[int, int]] = {}  # the first and the last layer
        self.firsts: dict[_Common, int] = {}

    def add(self, number: int, moved: range) -> None:
        """Include a kind of few layers, moved by these numbers of layers."""
        layer, common = self.layer_of(number)
        first, last = (0, 0) if layer is None else sorted((layer + moved[0], layer + moved[-1]))
        low, high = self.spans.get(common, (first, last))
        self.spans[common] = min(first, low), max(last, high)

    def count(self) -> None:
        """Number all that are included."""
        total = 0
        for common, (first, last) in self.spans.items():
            self.firsts[common] = total - first
            total += last - first + 1

    def line(self, number: int) -> tuple[int, int]:
        """Return the number of one of few layers where it is, and what it grows by if moved by one layer."""
        if number < 0:
            found, step = self.line(~number)
            return ~found, -step
        layer, common = self.layer_of(number)
        return self.firsts[common] + (layer or 0), int(layer is not None)


class _Deepening:
    def __init__(self, growth: MemoryGrowth, path: str, copies: Copies) -> None:
        self.growth, self.copies, self.ranges = growth, copies, dict(copies)
        self.prefix, self.around = f"{path}.", path.rpartition(".")[0]
        self.ran = list(growth.kinds)  # of few layers
        self.grown: dict[tuple[int, int], tuple[int, int]] = {}  # bytes and elements of stacks, with few layers and all
        self.split = cache(self._split)  # a trace repeats few paths many times
        self.kinds, self.places = _Numbers(self._layer_of_kind), _Numbers(self._layer_of_place)

    def deepened(self) -> MemoryGrowth:
        """Return the memory with all copies."""
        ran, place_of = self._with_all_norms(), self.growth.place_of
        of_state, of_events = list(self._runs_of_state()), list(self._runs(ran))
        for unit, moved, numbers in of_state:
            for number in numbers:
                self.kinds.add(number, self._clamped(number, unit, moved))
        for unit, moved, numbers in of_events:
            for number in numbers:
                kind = max(ran[number], ~ran[number])
                self.kinds.add(kind, self._clamped(kind, unit, moved))
                self.places.add(place_of[number], moved)
        self.kinds.count()
        self.places.count()
        state = self._repeated(of_state, range(len(self.ran)))
        events, places = self._repeated(of_events, ran), list(self._repeated_places(of_events))
        if self._lacks_frees(of_events, ran):
            events, places = self._with_all_frees(ran, events, places)
        calls = [(copy, slope) for call, slope in self.growth.collectives for copy in self.collectives(call)]
        return replace(self.growth, kinds=self._all_kinds(), state=state, events=events, places=self._all_places(),
                       place_of=places, collectives=calls, other_state=state, other_events=events)  # fmt: skip

    def _split(self, path: str) -> tuple[int | None, str]:
        """Return the layer of a path, None outside all, and the path without it."""
        name, dot, rest = path.removeprefix(self.prefix).partition(".")
        layers = LayerRange.parse(name) if path.startswith(self.prefix) else None
        return (layers.first, dot + rest) if layers else (None, path)

    def unit(self, path: str) -> Unit | None:
        """Return the unit that a path lies in."""
        layer, _ = self.split(path)
        return None if layer is None else self.copies[layer][0]

    def _layer_of_kind(self, number: int) -> tuple[int | None, _Common]:
        kind = self.ran[number]
        layer, rest = self.split(kind.block.path)
        return layer, (layer is None, kind._replace(block=kind.block._replace(path=rest)))

    def _layer_of_place(self, number: int) -> tuple[int | None, _Common]:
        phase, path, operator = self.growth.places[number]
        layer, rest = self.split(path)
        return layer, (layer is None, (phase, rest, operator))

    def _paths(self, is_outside: bool, rest: str, first: int, last: int) -> list[str]:
        return [rest] if is_outside else [f"{self.prefix}{layer}{rest}" for layer in range(first, last + 1)]

    def _all_kinds(self) -> list[Kind]:
        paths = cache(self._paths)
        found: list[Kind] = []
        for (is_outside, kind), span in self.kinds.spans.items():
            part, rest, *more = kind.block
            blocks = (_made(Block, (part, path, *more)) for path in paths(is_outside, rest, *span))
            found += [_made(Kind, (block, *kind[1:])) for block in blocks]
        return found

    def _all_places(self) -> list[tuple[str, str, str]]:
        return [(phase, path, operator)
                for (is_outside, (phase, rest, operator)), span in self.places.spans.items()
                for path in self._paths(is_outside, rest, *span)]  # fmt: skip

    def _clamped(self, number: int, unit: Unit | None, moved: range) -> range:
        """Return how far a kind is moved: as its unit, less if it is in another run."""
        own = self.unit(self.ran[number].block.path)
        if not own or not unit or own[0] == unit[0]:
            return moved
        low, high = self.ranges[own][0], self.ranges[own][-1]
        first, last = (min(max(layers, low), high) for layers in sorted((moved[0], moved[-1])))
        return range(first, last + 1)

    def _repeated(self, runs: Iterable[_Run], ran: Sequence[int]) -> list[int]:
        """Return the numbers of kinds in all layers; those in `ran` are of few."""
        found: list[int] = []
        for unit, moved, numbers in runs:
            lines = [self.kinds.line(ran[number]) for number in numbers]
            clamped = [self._clamped(max(ran[number], ~ran[number]), unit, moved) for number in numbers]
            if all(span is moved for span in clamped):
                for layers in moved:
                    found += [first + layers * step for first, step in lines]
            else:
                for layers in moved:
                    found += [first + (layers if span is moved else min(max(layers, span[0]), span[-1])) * step
                              for (first, step), span in zip(lines, clamped, strict=True)]  # fmt: skip
        return found

    def _repeated_places(self, runs: Iterable[_Run]) -> Iterator[int]:
        for _, moved, numbers in runs:
            lines = [self.places.line(self.growth.place_of[number]) for number in numbers]
            for layers in moved:
                yield from [first + layers * step for first, step in lines]

    def _runs_of_state(self) -> Iterator[_Run]:
        """Yield the state in the order of the full model, layer after layer."""
        for unit, run in groupby(self.growth.state, key=lambda number: self.unit(self.ran[number].block.path)):
            yield unit, self.shifts(unit), list(run)

    def _runs(self, ran: list[int]) -> Iterator[_Run]:
        """Yield the events; those in a unit are repeated for each of its copies."""
        for _, start, stop in self.growth.layout.phases:
            before = None
            for unit, run in groupby(self._with_units(ran, start, stop), key=lambda pair: pair[0]):
                yield unit, self.shifts(unit, before), [number for _, number in run]
                before = unit if unit is not None else before

    def _with_all_norms(self) -> list[int]:
        """Return the events; a stack of one number for each parameter, such as norms to clip, has those of copies too.

        So have DDP's buffers in one tensor, and the results of operators on either. Events of no bytes before it have
        the parameters or buffers.
        """
        stacked: list[Block] = []
        numbers: dict[int, int] = {}
        found = []
        for event in self.growth.events:
            number = max(event, ~event)
            block, size = self.ran[number].block, self.ran[number].size_bytes
            if block.operator in (STACK, CAT) and not size:
                stacked.append(block)
            elif block.operator in (STACK, CAT) and stacked:
                few = sum(part.shape[0] for part in stacked)
                many = sum(part.shape[0] * len(self.shifts(self.unit(part.path))) for part in stacked)
                if many != few and not block.path and block.shape == (few,):
                    self.grown[size, few] = size // few * many, many
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

    def _lacks_frees(self, runs: Iterable[_Run], ran: Sequence[int]) -> bool:
        """Return True if copies of the events leave other bytes than those of few layers do."""
        sizes = [kind.size_bytes for kind in self.ran]
        left = 0
        for _, moved, numbers in runs:
            events = (ran[number] for number in numbers)
            left += (len(moved) - 1) * sum(sizes[event] if event >= 0 else -sizes[~event] for event in events)
        return left != 0

    def _with_all_frees(self, ran: list[int], events: list[int], places: list[int]) -> tuple[list[int], list[int]]:
        """Return the repeated events, and the frees that their blocks lack next to an equal one.

        They belong to no layer: reentrant checkpointing frees the random states of all layers after the last one.
        """
        lacking: Counter[int] = Counter()
        for event in events:
            lacking[max(event, ~event)] += 1 if event >= 0 else -1
        for event in ran:
            lacking[self.kinds.line(max(event, ~event))[0]] -= 1 if event >= 0 else -1
        lacking = +lacking
        times = [1 if event >= 0 else 1 + lacking.pop(~event, 0) for event in events]
        return ([event for event, count in zip(events, times, strict=True) for _ in range(count)],
                [place for place, count in zip(places, times, strict=True) for _ in range(count)])  # fmt: skip

    def collectives(self, call: Collective) -> Iterator[Collective]:
        """Yield the call with its layer moved, for each copy of its unit."""
        for (few, _), (many, _) in self.grown.items():
            if (call.path, call.full_bytes) == ("", few) and (call.phase, call.kind) in _STACKED:
                call = call._replace(full_bytes=many)
                break
        layer, rest = self.split(call.path)
        for moved in self.shifts(self.unit(call.path)):
            yield call if layer is None else call._replace(path=f"{self.prefix}{layer + moved}{rest}")

    def shifts(self, unit: Unit | None, before: Unit | None = None) -> range:
        """Return the layers to move each copy of the events by, in order; in backward the last copy comes first."""
        found = range(1) if unit is None else self.ranges[unit]
        return found[::-1] if unit and before and before > unit else found
