"""The memory trace of a step: its allocations and frees in order, each with the block's origin.

Runs on fake tensors, profiler runs and runs on a CUDA device record the same trace, so that the same code
reports an estimate and a measurement. A trace has no addresses: equal blocks are interchangeable.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from itertools import accumulate, groupby, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from bertscope.analyses.parallel.collectives import Collective
from bertscope.reports.layer_ranges import LayerRange
from bertscope.reports.memory import FORWARD, OPTIMIZER, Parts
from bertscope.settings.run_config import LOOPS

if TYPE_CHECKING:
    from bertscope.analyses.modules.repeat import Copies, Unit

_RETURN = "return of forward"
_PREVIOUS, _KEPT = "previous ", "activations"
STACK = "stack"
PARTS = tuple(part.name for part in fields(Parts))
# The allocator rounds sizes up to a multiple of it; CUDA's: kMinBlockSize in c10/core/AllocatorConfig.h.
GRANULE_BYTES = {"cpu": 1, "cuda": 512}


class Block(NamedTuple):
    """A kind of memory block: its part of the total, and the module and operator that allocated it."""

    part: str
    path: str
    operator: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    recomputed: bool = False
    variable: str = ""  # of the loop that refers to it: output, loss, or the previous one
    stream: str = ""  # of CUDA, that of computation without a name


class MemoryEvent(NamedTuple):
    """Bytes allocated (positive) or freed (negative), with the module and operator that run at that time."""

    size_bytes: int
    block: Block
    phase: str
    path: str
    operator: str


@dataclass(frozen=True)
class Moment:
    """The peak of a phase: its event, and the module and operator that run at that time."""

    phase: str
    index: int  # into the events; -1 before the first
    live_bytes: int
    path: str = ""
    operator: str = ""


@dataclass(frozen=True)
class MemoryTrace:
    """The blocks allocated before the step, and the events of the step."""

    state: tuple[tuple[Block, int], ...]
    events: tuple[MemoryEvent, ...]
    granule_bytes: int = 1  # sizes here are not rounded up to a multiple of it
    traced_layers: int | None = None  # number of layers that ran, if their events are repeated for the others
    collectives: tuple[Collective, ...] = ()

    @cached_property
    def sizes(self) -> list[int]:
        """Return the bytes of each event as the allocator rounds them."""
        sizes = [event.size_bytes for event in self.events]
        return sizes if self.granule_bytes == 1 else [rounded(size, self.granule_bytes) for size in sizes]

    @cached_property
    def layout(self) -> Layout:
        """Return what the traces of all batches of a run have in common."""
        return Layout(
            state_parts=[block.part for block, _ in self.state],
            parts=[event.block.part for event in self.events],
            places=[event[2:] for event in self.events],
        )

    @cached_property
    def state_sizes(self) -> list[int]:
        """Return the bytes of each block between steps as the allocator rounds them."""
        return [rounded(size, self.granule_bytes) for _, size in self.state]

    @property
    def state_bytes(self) -> int:
        """Return the bytes allocated between steps."""
        return sum(self.state_sizes)

    def live_bytes(self) -> list[int]:
        """Return the allocated bytes after each event."""
        return list(accumulate(self.sizes, initial=self.state_bytes))[1:]

    @cached_property
    def peak_bytes(self) -> int:
        """Return the peak of the step in bytes."""
        return max(accumulate(self.sizes, initial=self.state_bytes))

    def peaks(self) -> tuple[Moment, ...]:
        """Return the peak of each phase; the bytes allocated when the phase begins count too."""
        found: dict[str, Moment] = {}
        live = self.live_bytes()
        for phase, start, stop in self.layout.phases:
            best = found.setdefault(phase, Moment(phase, start - 1, live[start - 1] if start else self.state_bytes))
            highest = max(live[start:stop])
            if highest > best.live_bytes:
                index = live.index(highest, start, stop)
                found[phase] = Moment(phase, index, highest, *self.layout.places[index][1:])
        return tuple(found.values())

    def parts_after(self, index: int) -> dict[str, int]:
        """Return the allocated bytes by part after the event of that index; -1 is before the first."""
        sums = dict.fromkeys(PARTS, 0)
        layout = self.layout
        for part, size in zip(layout.state_parts, self.state_sizes, strict=True):
            sums[part] += size
        for part, size in zip(layout.parts[: index + 1], self.sizes, strict=False):
            sums[part] += size
        return sums

    def block(self, number: int) -> Block:
        """Return the block of an event."""
        return self.events[number].block

    @property
    def saved_events(self) -> list[int]:
        """Return the numbers of the events of the last forward that allocate what is saved for backward."""
        return [number for number in self.layout.saved if self.sizes[number] > 0]

    @property
    def saved_bytes(self) -> int:
        """Return the bytes that forward saves for backward."""
        return sum(self.sizes[number] for number in self.saved_events)


@dataclass(frozen=True)
class Layout:
    """Parts and places, which the memory traces of a run at all batches have in common, unlike sizes."""

    state_parts: list[str]
    parts: list[str]  # of the events
    places: list[tuple[str, str, str]]  # phase, module and operator of the events

    @cached_property
    def phases(self) -> list[tuple[str, int, int]]:
        """Return each phase with its first event and the one behind its last."""
        found, start = [], 0
        for phase, run in groupby(place[0] for place in self.places):
            stop = start + sum(1 for _ in run)
            found.append((phase, start, stop))
            start = stop
        return found

    @cached_property
    def saved(self) -> list[int]:
        """Return the numbers of the last forward's events of blocks that are saved for backward."""
        last = [range(start, stop) for phase, start, stop in self.phases if phase == FORWARD][-1:]
        return [number for numbers in last for number in numbers if self.parts[number] == _KEPT]


def ordered_frees(events: Iterable[MemoryEvent], key: Callable[[MemoryEvent], Any] | None = None) -> list[MemoryEvent]:
    """Return the events with consecutive frees, whose order has no meaning, sorted by `key`."""
    runs = groupby(events, key=lambda event: event.size_bytes < 0)
    return [event for are_frees, run in runs for event in (sorted(run, key=key) if are_frees else run)]


def matched(events: Iterable[MemoryEvent]) -> Iterator[tuple[MemoryEvent, int]]:
    """Yield each event with the number of its block.

    A trace does not say which of several equal blocks is freed: it is assumed to be the newest.
    """
    allocated: dict[tuple[Block, int], list[int]] = defaultdict(list)
    for number, event in enumerate(events):
        equal = allocated[event.block, abs(event.size_bytes)]
        if event.size_bytes > 0:
            equal.append(number)
            yield event, number
        elif equal:
            yield event, equal.pop()


def rounded(size_bytes: int, granule_bytes: int) -> int:
    """Return a size, or the negative size of a free, rounded away from 0 to a multiple of the granule."""
    granules = -(-size_bytes // granule_bytes) if size_bytes > 0 else size_bytes // granule_bytes
    return granules * granule_bytes


def in_loop(trace: MemoryTrace, loop: str) -> MemoryTrace:
    """Return the trace of a step in this loop, from one in which outputs and loss are freed as soon as possible.

    The blocks that a variable of the loop refers to are freed when the next forward has returned, not before. So
    those of the step before are state, until then.
    """
    kept = LOOPS[loop]
    last = _end_of_forward(trace.events)
    blocks = [(event.block, event.size_bytes) for event in trace.events
              if event.block.variable in kept and event.size_bytes > 0]  # fmt: skip
    previous = [(block._replace(part=_KEPT, variable=_PREVIOUS + block.variable), size) for block, size in blocks]
    events: list[MemoryEvent] = []
    begun = 0  # events before it are done
    changed = [number for number, event in enumerate(trace.events) if event.block.variable or not event.size_bytes]
    for number in sorted({*changed, last} if trace.events else ()):
        events += trace.events[begun:number]
        event, begun = trace.events[number], number + 1
        block = event.block
        if block.variable in kept and event.size_bytes > 0:
            events.append(event._replace(block=block._replace(part=_KEPT)))
        elif block.variable not in kept and (event.size_bytes or block.dtype):  # a mark has no dtype
            events.append(event._replace(block=block._replace(variable="")) if block.variable else event)
        if number == last:
            events += (MemoryEvent(-size, block, FORWARD, "", "") for block, size in previous)
    events += trace.events[begun:]
    return replace(trace, state=(*trace.state, *previous), events=tuple(events))


def _end_of_forward(events: Sequence[MemoryEvent]) -> int:
    """Return the number of the event at which forward returns: its mark, else its last allocation."""
    returns = [number for number, event in enumerate(events) if event.operator == _RETURN]
    ends = [number for number, event in enumerate(events) if event.phase == FORWARD and event.size_bytes > 0]
    return (returns or ends or [0])[-1]


class Place(NamedTuple):
    """The phase, module and operator that run at one time."""

    phase: str = ""
    path: str = ""
    operator: str = ""
    recompute: int = 0  # the number of the recomputation; 0 for none


@dataclass
class Allocation:
    """A storage while its trace is recorded, with the place that allocated it."""

    size_bytes: int
    place: Place
    shape: tuple[int, ...] = ()
    dtype: str = ""
    part: str = ""
    is_saved: bool = False  # freed after the forward pass or the recomputation that allocated it
    variable: str = ""  # that refers to it
    stream: str = ""

    @cached_property
    def block(self) -> Block:
        """Return its kind of block, which is known at the end of the step."""
        part = self.part or ("activations" if self.is_saved else "temporaries")
        is_recomputed = self.place.recompute > 0
        return Block(part, *self.place[1:3], self.shape, self.dtype, is_recomputed, self.variable, self.stream)


@dataclass
class MemoryTraceRecorder:
    """A recorder of allocations and frees."""

    state: list[tuple[Block, int]] = field(default_factory=list)
    log: list[tuple[int, Allocation, Place]] = field(default_factory=list)
    living: dict[int, Allocation] = field(default_factory=dict)  # by key; only storages that the step allocated
    left: int = 0  # last entries of the state, which the step before allocated

    def allocate(self, key: int, made: Allocation, place: Place) -> None:
        """Record an allocation."""
        self.living[key] = made
        self.log.append((made.size_bytes, made, place))

    def free(self, key: int, place: Place) -> None:
        """Record a free; ignore a key that was allocated before the step."""
        made = self.living.pop(key, None)
        if made is None:
            return
        if made.place.recompute and place.recompute != made.place.recompute:
            made.is_saved = True
        self.log.append((-made.size_bytes, made, place))

    def end_forward(self) -> None:
        """Mark every allocated block as saved for backward."""
        for made in self.living.values():
            made.is_saved = True

    def refer(self, keys: Iterable[int], variable: str) -> None:
        """Note the variable of the loop that refers to allocated blocks; the first output of several calls counts."""
        for key in keys:
            if key in self.living:
                self.living[key].variable = self.living[key].variable or variable

    def end_call(self, place: Place) -> None:
        """Mark the return of the model's forward by an event of no bytes."""
        place = place._replace(operator=_RETURN)
        self.log.append((0, Allocation(0, place), place))

    def stack(self, place: Place, paths: Iterable[str]) -> None:
        """Mark the parameters of the tensors that the optimizer step stacks by events of no bytes."""
        self.log += ((0, Allocation(0, place._replace(path=path)), place) for path in paths)

    def restart(self, known: Collection[int] = ()) -> None:
        """Begin a step: the blocks that the one before leaves are its state, with those that were state `known`."""
        left = [(made.block, made.size_bytes) for key, made in self.living.items() if key not in known]
        del self.state[len(self.state) - self.left :]
        self.state += left
        self.left = len(left)
        self.log.clear()

    def name(self, keys: Iterable[int], part: str) -> None:
        """Assign allocated blocks to a part."""
        for key in keys:
            if key in self.living:
                self.living[key].part = part

    def trace(self, device: str) -> MemoryTrace:
        """Return the trace, with the sizes of the device's allocator."""
        events = (MemoryEvent(size, made.block, *place[:3]) for size, made, place in self.log)
        return MemoryTrace(tuple(self.state), tuple(events), GRANULE_BYTES[device])


# ---- the trace of a deep model from that of a shallow one, for layers that `modules.repeat` says may be equal ----


def repeated_events(trace: MemoryTrace, path: str, copies: Copies) -> MemoryTrace:
    """Return the trace of a model with copies of the layers at `path`, from that of few layers."""
    repeater = _Repeater(path, copies)
    runs = [(unit, list(run)) for unit, run in groupby(trace.state, key=lambda item: repeater.unit(item[0].path))]
    state = [
        (repeater.moved_block(block, moved, unit), size)
        for unit, run in runs
        for moved in repeater.shifts(unit)
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


_made = tuple.__new__  # a call of the class of a named tuple takes twice as long, its _replace ten times


class _Repeater:
    def __init__(self, path: str, copies: Copies) -> None:
        self.prefix, self.around, self.copies = f"{path}.", path.rpartition(".")[0], copies
        self.ranges = dict(copies)
        self.grown: dict[tuple[int, int], tuple[int, int]] = {}  # bytes and elements of stacks, with few layers and all
        # A trace repeats few paths and blocks many times.
        self.layers, self.moved, self.moved_block = cache(self._layers), cache(self._moved), cache(self._moved_block)

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
        if found is None:
            return path
        _, dot, rest = path.removeprefix(self.prefix).partition(".")
        return f"{self.prefix}{found.first + layers}{dot}{rest}"

    def events(self, phase: Iterable[MemoryEvent]) -> Iterator[MemoryEvent]:
        """Yield the events of one phase; runs of events in a unit are repeated for each of its copies."""
        before = None
        for unit, run in groupby(self._numbered(self._grown(phase)), key=lambda pair: pair[0]):
            events = [event for _, event in run]
            for layers in self.shifts(unit, before):
                yield from (self._shifted(event, layers, unit) for event in events)
            before = unit if unit is not None else before

    def _grown(self, phase: Iterable[MemoryEvent]) -> Iterator[MemoryEvent]:
        """Yield the events; a stack of one number for each parameter, such as norms to clip, has those of copies too.

        So have the results of operators on it. Events of no bytes before it have the parameters.
        """
        stacked: list[str] = []
        for event in phase:
            block, size = event.block, event.size_bytes
            if block.operator == STACK and not size:
                stacked.append(block.path)
            elif block.operator == STACK and stacked:
                number = sum(len(self.shifts(self.unit(path))) for path in stacked)
                self.grown[size, len(stacked)] = size // len(stacked) * number, number
                stacked = []
            if not block.path and block.shape and (abs(size), block.shape[0]) in self.grown:
                many, number = self.grown[abs(size), block.shape[0]]
                block = block._replace(shape=(number, *block.shape[1:]))
                event = event._replace(size_bytes=many if size > 0 else -many, block=block)
            yield event

    def collectives(self, call: Collective) -> Iterator[Collective]:
        """Yield the call with its layer moved, for each copy of its unit."""
        for (few, _), (many, _) in self.grown.items():
            if (call.phase, call.path, call.full_bytes) == (OPTIMIZER, "", few):
                call = call._replace(full_bytes=many)
        for layers in self.shifts(self.unit(call.path)):
            yield call._replace(path=self.moved(call.path, layers))

    def _numbered(self, events: Iterable[MemoryEvent]) -> Iterator[tuple[Unit | None, MemoryEvent]]:
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

    def shifts(self, unit: Unit | None, before: Unit | None = None) -> range:
        """Return the layers to move each copy of the events by, in order; in backward the last copy comes first."""
        found = range(1) if unit is None else self.ranges[unit]
        return found[::-1] if unit and before and before > unit else found

    def _moved_block(self, block: Block, layers: int, unit: Unit | None) -> Block:
        """Return the block with its layer moved by this number of layers; in another run than that of the unit less."""
        own = self.unit(block.path)
        if own and unit and own[0] != unit[0]:
            layers = min(max(layers, self.ranges[own][0]), self.ranges[own][-1])
        return _made(Block, (block.part, self.moved(block.path, layers), *block[2:]))

    def _shifted(self, event: MemoryEvent, layers: int, unit: Unit | None) -> MemoryEvent:
        """Return the event of a unit and its block, moved by this number of layers."""
        if unit is None:
            return event
        size, block, phase, path, operator = event
        moved = self.moved_block(block, layers, unit)
        return _made(MemoryEvent, (size, moved, phase, self.moved(path, layers), operator))
