"""The trace of a deep model from that of a shallow one, for layers that `modules.repeat` says may be equal.

The events of the middle layer are repeated for each further layer. The caller verifies this first: the repetition
must turn one trace into that of a model with one layer more.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import groupby, repeat

from bertscope.analyses.memory.events import Block, MemoryEvent, MemoryTrace, ordered_frees
from bertscope.analyses.parallel.collectives import Collective
from bertscope.reports.layer_ranges import LayerRange

_MIDDLE = 1  # the first unit is next to the embeddings, the last next to the head


def repeated_events(trace: MemoryTrace, path: str, ran: int, wanted: int, period: int = 1) -> MemoryTrace:
    """Return the trace for `wanted` units of layers at `path`, from one of `ran` units; a unit is `period` layers."""
    repeater = _Repeater(path, ran, wanted, period)
    runs = [(unit, list(run)) for unit, run in groupby(trace.state, key=lambda item: repeater.unit(item[0].path))]
    state = [
        (repeater.moved_block(block, units), size)
        for unit, run in runs
        for units in repeater.shifts(unit, 0)
        for block, size in run
    ]  # in the order of the full model, layer after layer
    phases = groupby(trace.events, key=lambda event: event.phase)
    events = [event for _, events in phases for event in repeater.events(events)]
    collectives = (copy for call in trace.collectives for copy in repeater.collectives(call))
    return replace(trace, state=tuple(state), events=tuple(_with_all_frees(events, trace.events)),
                   collectives=tuple(collectives))  # fmt: skip


def _with_all_frees(events: list[MemoryEvent], ran: tuple[MemoryEvent, ...]) -> Iterator[MemoryEvent]:
    """Yield the repeated events, and the frees that their blocks lack next to an equal one.

    They belong to no layer: reentrant checkpointing frees the random states of all layers after the last one.
    """
    if sum(event.size_bytes for event in events) == sum(event.size_bytes for event in ran):
        yield from events
        return
    lacking: Counter[tuple[Block, int]] = Counter()
    for given, sign in ((events, 1), (ran, -1)):
        for event in given:
            lacking[event.block, abs(event.size_bytes)] += sign if event.size_bytes > 0 else -sign
    for event in events:
        yield event
        if event.size_bytes < 0:
            yield from repeat(event, max(lacking.pop((event.block, -event.size_bytes), 0), 0))


def same_events(one: MemoryTrace, other: MemoryTrace) -> bool:
    """Compare two traces, ignoring the order of consecutive frees and that of collectives."""
    are_equal = sorted(one.state) == sorted(other.state) and sorted(one.collectives) == sorted(other.collectives)
    return are_equal and ordered_frees(one.events) == ordered_frees(other.events)


class _Repeater:
    def __init__(self, path: str, ran: int, wanted: int, period: int) -> None:
        self.prefix, self.around = f"{path}.", path.rpartition(".")[0]
        self.more, self.period = wanted - ran, period
        # A trace repeats few paths and blocks many times.
        self.layers, self.moved, self.moved_block = cache(self._layers), cache(self._moved), cache(self._moved_block)

    def unit(self, path: str) -> int | None:
        """Return the unit that a path lies in."""
        layers = self.layers(path)
        return layers.first // self.period if layers else None

    def _layers(self, path: str) -> LayerRange | None:
        inside = path.removeprefix(self.prefix) if path.startswith(self.prefix) else ""
        return LayerRange.parse(inside.partition(".")[0])

    def _moved(self, path: str, units: int) -> str:
        """Return the path with its layer moved by this number of units."""
        layers = self.layers(path) if units else None
        if layers is None:
            return path
        _, dot, rest = path.removeprefix(self.prefix).partition(".")
        return f"{self.prefix}{layers.first + units * self.period}{dot}{rest}"

    def events(self, phase: Iterable[MemoryEvent]) -> Iterator[MemoryEvent]:
        """Yield the events of one phase; runs of events in the middle unit are repeated for every further unit."""
        before = 0
        for unit, run in groupby(self._numbered(phase), key=lambda pair: pair[0]):
            events = [event for _, event in run]
            for units in self.shifts(unit, before):
                yield from (self._shifted(event, units) for event in events)
            before = unit if unit is not None else before

    def collectives(self, call: Collective) -> Iterator[Collective]:
        """Yield the call with its layer moved, for each unit that repeats it."""
        for units in self.shifts(self.unit(call.path), 0):
            yield call._replace(path=self.moved(call.path, units))

    def _numbered(self, events: Iterable[MemoryEvent]) -> Iterator[tuple[int | None, MemoryEvent]]:
        """Yield each event with its unit: the module's; outside the encoder the block's; else that of the event before.

        A block without a unit that is freed outside all modules has none: autocast frees its weights in any order.
        """
        unit = None
        for event in events:
            found, is_outside = self.unit(event.path), event.path != self.around
            if found is None and is_outside:
                found = self.unit(event.block.path)
            if found is None and is_outside and event.size_bytes < 0 and not event.path:
                yield None, event
                continue
            unit = unit if found is None else found
            yield unit, event

    def shifts(self, unit: int | None, before: int) -> range:
        """Return the number of units to move each copy of the events by, in order; in backward the last comes first."""
        if unit is None or unit < _MIDDLE:
            return range(1)
        if unit > _MIDDLE:
            return range(self.more, self.more + 1)
        return range(self.more, -1, -1) if before > unit else range(self.more + 1)

    def _moved_block(self, block: Block, units: int) -> Block:
        """Return the block with its layer moved by this number of units."""
        return Block(block.part, self.moved(block.path, units), *block[2:])  # _replace takes ten times as long

    def _shifted(self, event: MemoryEvent, units: int) -> MemoryEvent:
        """Return the event and its block, moved by this number of units."""
        block, path = self.moved_block(event.block, units), self.moved(event.path, units)
        return MemoryEvent(event.size_bytes, block, event.phase, path, event.operator) if units else event
