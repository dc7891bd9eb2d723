"""The memory trace of a step: its allocations and frees in order, each with the block's origin.

Runs on fake tensors, profiler runs and runs on a CUDA device record the same trace, so that the same code
reports an estimate and a measurement. A trace has no addresses: equal blocks are interchangeable.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate, groupby, repeat
from typing import NamedTuple

from bertscope.analyses.parallel.collectives import Collective
from bertscope.reports.memory import FORWARD
from bertscope.reports.step import Parts

RETURN, UPDATE = "return of forward", "update"
_KEPT = "activations"
STACK, CAT = "stack", "cat"
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
        for part, numbers in layout.events_of.items():
            sums[part] += sum(map(self.sizes.__getitem__, numbers[: bisect_right(numbers, index)]))
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
    def events_of(self) -> dict[str, list[int]]:
        """Return the numbers of the events of each part."""
        found: dict[str, list[int]] = defaultdict(list)
        for number, part in enumerate(self.parts):
            found[part].append(number)
        return found

    @cached_property
    def saved(self) -> list[int]:
        """Return the numbers of the last forward's events of blocks that are saved for backward."""
        last = [range(start, stop) for phase, start, stop in self.phases if phase == FORWARD][-1:]
        return [number for numbers in last for number in numbers if self.parts[number] == _KEPT]


def ordered_frees(events: Iterable[MemoryEvent]) -> list[MemoryEvent]:
    """Return the events with consecutive frees, whose order has no meaning, sorted."""
    runs = groupby(events, key=lambda event: event.size_bytes < 0)
    return [event for are_frees, run in runs for event in (sorted(run) if are_frees else run)]


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

    def mark(self, place: Place, paths: Iterable[str], counts: Iterable[int] = repeat(1)) -> None:
        """Mark a place by an event of no bytes for each path, with a number of elements.

        That is the return of the model's forward; the parameters with a gradient, before their update; and the tensors
        that are stacked or concatenated, by their parameters or buffers.
        """
        for path, count in zip(paths, counts, strict=False):
            self.log.append((0, Allocation(0, place._replace(path=path), (count,)), place))

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


def same_events(one: MemoryTrace, other: MemoryTrace) -> bool:
    """Compare two traces, ignoring the order of consecutive frees and that of collectives."""
    are_equal = sorted(one.state) == sorted(other.state) and sorted(one.collectives) == sorted(other.collectives)
    return are_equal and ordered_frees(one.events) == ordered_frees(other.events)
