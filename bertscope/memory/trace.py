"""A step's memory in columns: its blocks, and their allocations and frees in order.

Runs on fake tensors, profiler runs and runs on a CUDA device record the same trace, so that the same code
reports an estimate and a measurement. A trace has no addresses: equal blocks are interchangeable.

Two recorded batches give the trace at any batch: each size grows with the batch by a fixed number of bytes; a
kernel's scratch follows a rule (kernel_rules.py) whose numbers do, and a matrix of all pairs is the product of its
dimensions. The two batches differ by a large prime: a minimum or a rounded quotient gives no whole number of bytes for
a sequence, or fewer than 0 bytes without any.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate, groupby
from math import prod
from typing import Any, NamedTuple

from bertscope.memory.kernel_rules import RULES, rounded
from bertscope.reports.json import NUMBER, checked
from bertscope.reports.memory import BACKWARD, EVALUATING, FORWARD, OPTIMIZER, RECOMPUTE
from bertscope.reports.step import Parts

SMALLEST, LARGE_BATCH = 2, 2 + 1019  # the recorded batches; some operators treat a batch of 1 differently
TO_HOST, TO_GPU, ON_HOST = "to host", "to GPU", "on host"  # bytes that are copied, or in the host's memory
RETURN, UPDATE, STACK, CAT = "return of forward", "update", "stack", "cat"
PARTS = tuple(part.name for part in fields(Parts))
# The allocator rounds sizes up to a multiple of it; CUDA's: kMinBlockSize in c10/core/AllocatorConfig.h.
GRANULE_BYTES = {"cpu": 1, "cuda": 512}
PREVIOUS = "previous "  # before the name of a variable of the loop: its value of the step before
SAVED = "activations"
Where = tuple[str, str, str]  # phase, module and operator


class Block(NamedTuple):
    """A block's origin: its part of the total, and the module and operator that allocated it."""

    part: str
    path: str
    operator: str
    shape: tuple[int, ...] = ()  # of scratch with a rule: its numbers
    dtype: str = ""  # of scratch with a rule: its rule
    recomputed: bool = False
    variable: str = ""  # of the loop that refers to it: output, loss, or the previous one
    stream: str = ""  # of CUDA; computation has no name


class MemoryEvent(NamedTuple):
    """Bytes allocated (positive) or freed (negative), with the module and operator that run at that time."""

    size_bytes: int
    block: Block
    phase: str
    path: str
    operator: str


@dataclass(frozen=True)
class Moment:
    """A phase's peak: its event, and the module and operator that run at that time."""

    phase: str
    index: int  # into the events; -1 before the first
    live_bytes: int
    path: str = ""
    operator: str = ""


class Collective(NamedTuple):
    """A call of a collective: its phase, kind and module, the bytes of the undivided tensor, the number of ranks."""

    phase: str
    kind: str
    path: str
    full_bytes: int
    ranks: int = 1


class Kind(NamedTuple):
    """A row: blocks of one origin and size, with what a further sequence adds to the bytes and to each dimension."""

    block: Block
    size_bytes: int
    slope: int = 0
    dims: tuple[int, ...] = ()  # empty if none grows

    @property
    def key(self) -> Hashable:
        """Return what decides the bytes at each batch."""
        return self[1:3] if self.is_line else (self.block.dtype, self.block.shape, self.dims, self.size_bytes)

    @property
    def is_line(self) -> bool:
        """Return False for scratch, and for a matrix of which two dimensions grow."""
        return self.block.dtype not in RULES and len(self.dims) - self.dims.count(0) < 2

    def bytes_at(self, more: int) -> int:
        """Return the bytes with `more` sequences, not rounded."""
        if self.is_line:
            return self.size_bytes + more * self.slope
        shape, by_rule = self.block_at(more).shape, RULES.get(self.block.dtype)
        return by_rule(*shape) if by_rule else self.size_bytes * prod(shape) // prod(self.block.shape)

    def block_at(self, more: int) -> Block:
        """Return the block with `more` sequences."""
        if not self.dims:
            return self.block
        shape = tuple(number + more * slope for number, slope in zip(self.block.shape, self.dims, strict=True))
        return self.block._replace(shape=shape)

    def with_slopes(self, large: Kind, span: int, least: int) -> Kind:
        """Return the kind with slopes, from the same one in a larger run; raises ValueError if it does not grow so."""
        block, other = self.block, large.block
        dims: tuple[int, ...] = ()
        if block != other:
            if block != other._replace(shape=block.shape) or len(block.shape) != len(other.shape):
                raise ValueError(f"{block} is not {other}")
            dims = tuple(_slope(*pair, span, least) for pair in zip(block.shape, other.shape, strict=True))
        grown = Kind(block, self.size_bytes, 0, dims if any(dims) else ())
        if grown.is_line:
            # A kernel's scratch may grow in blocks of tokens: less than a byte for each is left out.
            rest = 0 if block.shape or least else (large.size_bytes - self.size_bytes) % span
            return grown._replace(slope=_slope(self.size_bytes, large.size_bytes - rest, span, least))
        if block.dtype not in RULES and self.size_bytes * prod(other.shape) != large.size_bytes * prod(block.shape):
            raise ValueError(f"{block} does not grow with its dimensions")
        return grown


def _slope(one: int, large: int, span: int, least: int) -> int:
    """Return what one of `span` more adds; raises ValueError if they are on no line, or below 0 at `least` fewer."""
    slope, rest = divmod(large - one, span)
    if rest or one < slope * least or slope < 0:
        raise ValueError(f"{one} and {large} are on no line")
    return slope


@dataclass(frozen=True)
class MemoryTrace:
    """One step's memory; `scaled` gives it at another batch, derived_traces.py at other depths and loops."""

    kinds: list[Kind]
    held: list[int]  # the kinds that are allocated before the step
    changes: list[int]  # the kind that is allocated, the complement of one that is freed
    places: list[Where]
    place_of: list[int]  # of each change
    granule_bytes: int = 1  # sizes here are not rounded up to a multiple of it
    traced_layers: int | None = None  # number of layers that ran, if their events are repeated for the others
    calls: list[tuple[Collective, int]] = field(default_factory=list)  # with what a further sequence adds to the bytes
    # The same step in another loop, of which only the peak is asked, in kinds of these sizes.
    other_held: list[int] = field(default_factory=list)
    other_changes: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # on kernels whose rules no test holds
    more: int = 0  # sequences than were recorded

    @classmethod
    def of(
        cls, state: Iterable[tuple[Block, int]], events: Iterable[MemoryEvent], granule_bytes: int = 1,
        calls: Iterable[Collective] = (),
    ) -> MemoryTrace:  # fmt: skip
        """Return the trace of recorded rows: the blocks before the step with their bytes, and its events."""
        kinds: dict[tuple[Block, int], int] = {}
        places: dict[Where, int] = {}
        held = [kinds.setdefault(row, len(kinds)) for row in state]
        changes: list[int] = []
        place_of = []
        for event in events:
            number = kinds.setdefault((event.block, abs(event.size_bytes)), len(kinds))
            is_free = event.size_bytes < 0
            if event.block.dtype in RULES:  # maybe of 0 bytes; scratch is freed before anything else is allocated
                is_free = changes[-1:] == [number]
            changes.append(~number if is_free else number)
            place_of.append(places.setdefault(event[2:], len(places)))
        rows = [Kind(*row) for row in kinds]
        return cls(rows, held, changes, list(places), place_of, granule_bytes, calls=[(call, 0) for call in calls])

    # ---- at one batch ----

    def scaled(self, batch: int) -> MemoryTrace:
        """Return the trace at another batch than SMALLEST, which was recorded, from slopes."""
        return self.with_more(batch - SMALLEST)

    def with_more(self, more: int) -> MemoryTrace:
        """Return the trace with more sequences, or tokens of each, than were recorded."""
        trace = replace(self, more=more)
        vars(trace)["layout"] = self.layout
        return trace

    def fixed(self) -> MemoryTrace:
        """Return the trace at this batch only, from which nothing is scaled."""
        kinds = [Kind(kind.block_at(self.more), size) for kind, size in zip(self.kinds, self.kind_bytes, strict=True)]
        return replace(self, kinds=kinds, calls=[(call, 0) for call in self.collectives], more=0)

    @cached_property
    def layout(self) -> Layout:
        """Return what the traces of all batches of a run have in common."""
        return Layout(self)

    @cached_property
    def kind_bytes(self) -> list[int]:
        """Return the bytes of each kind, not rounded."""
        firsts, classes = self.layout.classes
        sizes = [kind.bytes_at(self.more) for kind in firsts]
        return [sizes[number] for number in classes]

    @cached_property
    def _changed_bytes(self) -> list[int]:
        """Return the rounded bytes of each kind, and behind them of their frees, the last first."""
        firsts, classes = self.layout.classes  # few, so that a batch of a search takes little time
        sizes = [rounded(kind.bytes_at(self.more), self.granule_bytes) for kind in firsts]
        freed = [-size for size in sizes]
        return [sizes[number] for number in classes] + [freed[number] for number in reversed(classes)]

    @cached_property
    def sizes(self) -> list[int]:
        """Return each event's bytes as the allocator rounds them."""
        sizes = self._changed_bytes
        return [sizes[number] for number in self.changes]

    @cached_property
    def state_sizes(self) -> list[int]:
        """Return the bytes of each block between steps as the allocator rounds them."""
        sizes = self._changed_bytes
        return [sizes[number] for number in self.held]

    @property
    def state(self) -> tuple[tuple[Block, int], ...]:
        """Return the blocks that are allocated before the step, with their bytes."""
        return tuple((self.kinds[number].block_at(self.more), self.kind_bytes[number]) for number in self.held)

    @cached_property
    def events(self) -> tuple[MemoryEvent, ...]:
        """Return the events as rows."""
        sizes, blocks = self.kind_bytes, [kind.block_at(self.more) for kind in self.kinds]
        sizes, blocks = sizes + [-size for size in reversed(sizes)], blocks + blocks[::-1]
        return tuple(
            MemoryEvent(sizes[number], blocks[number], *where)
            for number, where in zip(self.changes, self.layout.places, strict=True)
        )

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Return the calls of collectives."""
        return tuple(call._replace(full_bytes=call.full_bytes + self.more * slope) for call, slope in self.calls)

    @property
    def state_bytes(self) -> int:
        """Return the bytes allocated between steps."""
        return sum(self.state_sizes)

    def live_bytes(self) -> list[int]:
        """Return the allocated bytes after each event."""
        return list(accumulate(self.sizes, initial=self.state_bytes))[1:]

    @cached_property
    def peak_bytes(self) -> int:
        """Return the step's peak in bytes."""
        return max(accumulate(self.sizes, initial=self.state_bytes))

    @property
    def other_peak_bytes(self) -> int:
        """Return the peak of the same step in the other loop."""
        sizes = self._changed_bytes
        before = sum(sizes[number] for number in self.other_held)
        return max(accumulate((sizes[number] for number in self.other_changes), initial=before))

    def peaks(self) -> tuple[Moment, ...]:
        """Return each phase's peak; the bytes allocated when the phase begins count too."""
        moments: dict[str, Moment] = {}
        live = self.live_bytes()
        for phase, start, stop in self.layout.phases:
            best = moments.setdefault(phase, Moment(phase, start - 1, live[start - 1] if start else self.state_bytes))
            highest = max(live[start:stop])
            if highest > best.live_bytes:
                index = live.index(highest, start, stop)
                moments[phase] = Moment(phase, index, highest, *self.layout.places[index][1:])
        return tuple(moments.values())

    def parts_after(self, index: int) -> dict[str, int]:
        """Return the allocated bytes by part after the event of that index; -1 is before the first."""
        sums = dict.fromkeys(PARTS, 0)
        for number, size in zip(self.held, self.state_sizes, strict=True):
            sums[self.kinds[number].block.part] += size
        for part, numbers in self.layout.events_of.items():
            sums[part] += sum(map(self.sizes.__getitem__, numbers[: bisect_right(numbers, index)]))
        return sums

    def block(self, number: int) -> Block:
        """Return an event's block."""
        kind = self.changes[number]
        return self.kinds[max(kind, ~kind)].block_at(self.more)

    @property
    def saved_events(self) -> list[int]:
        """Return the numbers of the events of the last forward that allocate what is saved for backward."""
        return [number for number in self.layout.saved if self.sizes[number] > 0]

    @property
    def saved_bytes(self) -> int:
        """Return the bytes that forward saves for backward."""
        return sum(self.sizes[number] for number in self.saved_events)

    # ---- blocks and their order ----

    def matched(self) -> Iterator[tuple[int, int]]:
        """Yield each event's number with its block's number, or the complement where the block is freed.

        The blocks before the step have the first numbers. A trace does not say which of several equal blocks is freed:
        it is assumed to be the newest.
        """
        living: dict[int, list[int]] = defaultdict(list)
        for number, kind in enumerate(self.held):
            living[kind].append(number)
        for event, kind in enumerate(self.changes):
            if kind >= 0:
                living[kind].append(event + len(self.held))
                yield event, event + len(self.held)
            elif living[~kind]:
                yield event, ~living[~kind].pop()

    # ---- at another batch ----

    def with_slopes(
        self, large: MemoryTrace, span: int = LARGE_BATCH - SMALLEST, least: int = SMALLEST
    ) -> MemoryTrace | None:
        """Return the trace with slopes, from a larger run; None if events differ or a size grows unevenly.

        By default that is the run at LARGE_BATCH; with another `span` it may have longer sequences.
        """
        numbers: dict[tuple[int, int], int] = {}  # of the rows, by the kinds in both runs
        rows: list[Kind] = []

        def number(one: int, other: int) -> int:
            if (one < 0) != (other < 0):
                raise ValueError("an allocation is no free")
            if one < 0:
                return ~number(~one, ~other)
            if (one, other) not in numbers:
                rows.append(self.kinds[one].with_slopes(large.kinds[other], span, least))
                numbers[one, other] = len(numbers)
            return numbers[one, other]

        if self.layout.places != large.layout.places:
            return None
        with suppress(ValueError):
            held, changes = (
                [number(*pair) for pair in zip(one, other, strict=True)]
                for one, other in ((self.held, large.held), (self.changes, large.changes))
            )
            calls = {}
            for one_call, large_call in zip(sorted(self.collectives), sorted(large.collectives), strict=True):
                if one_call != large_call._replace(full_bytes=one_call.full_bytes):
                    raise ValueError(f"{one_call} is not {large_call}")
                calls[one_call] = _slope(one_call.full_bytes, large_call.full_bytes, span, least)
            pairs = [(call, calls[call]) for call in self.collectives]
            return replace(self, kinds=rows, held=held, changes=changes, calls=pairs, traced_layers=large.traced_layers)
        return None

    # ---- the cache ----

    def data(self) -> list[Any]:
        """Return the trace as JSON data; raises OverflowError for one that is too long for a file of the cache."""
        if len(self.changes) > _MOST_SAVED:
            raise OverflowError("too long")
        kinds = [(*kind.block, *kind[1:]) for kind in self.kinds]
        layers = [] if self.traced_layers is None else [self.traced_layers]
        return [kinds, self.held, self.changes, self.places, self.place_of, self.granule_bytes, layers, self.calls,
                self.other_held, self.other_changes, self.notes]  # fmt: skip

    @classmethod
    def read(cls, data: Any) -> MemoryTrace:
        """Return the trace that `data` wrote; raises ValueError and others for data that no step has.

        At the smallest and at a large batch no block is negative; what is freed was allocated; a step can be repeated.
        """
        kinds, held, changes, places, place_of, granule_bytes, layers, calls, *loop, notes = checked(data, _FORM)
        other_held, other_changes = loop
        trace = cls(
            [Kind(Block(part, path, operator, tuple(shape), *more), size, slope, tuple(dims))
             for part, path, operator, shape, *more, size, slope, dims in kinds],
            held, changes, [(phase, path, operator) for phase, path, operator in places], place_of,
            granule_bytes, layers[0] if layers else None, [(Collective(*call), slope) for call, slope in calls],
            other_held, other_changes, notes,
        )  # fmt: skip
        if len(place_of) != len(changes) or not changes or len(layers) > 1 or max(place_of) >= len(places):
            raise ValueError("no trace")
        if any(len(kind.dims) not in (0, len(kind.block.shape)) for kind in trace.kinds):
            raise ValueError("a shape without its slopes")
        sizes = [[kind.bytes_at(more) for kind in trace.kinds] for more in (0, LARGE_BATCH - SMALLEST)]
        if any(not 0 <= size < NUMBER.stop for of_batch in sizes for size in of_batch) or any(
            call.full_bytes + slope * (LARGE_BATCH - SMALLEST) < 0 for call, slope in trace.calls
        ):
            raise ValueError("negative bytes")
        for first, then in ((held, changes), (other_held, other_changes)):
            alive = Counter(first)
            for number in then:
                alive[max(number, ~number)] += 1 if number >= 0 else -1
                if alive[max(number, ~number)] < 0:
                    raise ValueError("freed twice")
            blocks = [
                [trace.kinds[number].block for number in ends]
                for ends in (Counter(first) - alive, alive - Counter(first))
            ]
            before, after = (sorted(block.variable for block in ends if block.variable) for ends in blocks)
            if before != [f"previous {name}" for name in after] or any(block.part in _LASTING for block in blocks[0]):
                raise ValueError("the next step would begin with other blocks")
            for of_batch in sizes:
                moved = (of_batch[number] if number >= 0 else -of_batch[~number] for number in then)
                if max(accumulate(moved, initial=sum(of_batch[number] for number in first))) >= NUMBER.stop:
                    raise ValueError("more bytes than there are")
        return trace


_MOST_SAVED = 500_000  # events; cache.py writes at most 64 MiB of JSON, of which 2,500 layers have about as much
_LASTING = frozenset(("parameters", "buffers", "optimizer_state", "inputs"))  # which no step frees
_PHASES = frozenset((FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER, EVALUATING))
_SLOPES, _NUMBERS, _CHANGES = range(-(2**62), 2**62), range(2**31), range(-(2**31), 2**31)
_FORM = (
    [(frozenset(PARTS), str, str, [NUMBER], str, bool, str, str, NUMBER, _SLOPES, [_SLOPES])],
    [_NUMBERS], [_CHANGES], [(_PHASES, str, str)], [_NUMBERS], range(1, 2**20),
    [range(1, 2**31)], [((_PHASES, str, str, NUMBER, range(1, 2**31)), _SLOPES)], [_NUMBERS], [_CHANGES], [str],
)  # fmt: skip


class Layout:
    """Facts that the traces of all batches of a run share, unlike sizes; each is computed once."""

    def __init__(self, trace: MemoryTrace) -> None:
        self.trace = trace

    @cached_property
    def parts(self) -> list[str]:
        """Return the part of each event's block."""
        parts = [kind.block.part for kind in self.trace.kinds]
        of_all = parts + parts[::-1]  # a complement counts from the end
        return [of_all[number] for number in self.trace.changes]

    @cached_property
    def places(self) -> list[Where]:
        """Return the phase, module and operator of each event."""
        return [self.trace.places[number] for number in self.trace.place_of]

    @cached_property
    def phases(self) -> list[tuple[str, int, int]]:
        """Return each phase with its first event and the one behind its last."""
        phases, start = [], 0
        for phase, run in groupby(where[0] for where in self.places):
            stop = start + sum(1 for _ in run)
            phases.append((phase, start, stop))
            start = stop
        return phases

    @cached_property
    def events_of(self) -> dict[str, list[int]]:
        """Return the numbers of the events of each part."""
        numbers_of: dict[str, list[int]] = defaultdict(list)
        for number, part in enumerate(self.parts):
            numbers_of[part].append(number)
        return numbers_of

    @cached_property
    def saved(self) -> list[int]:
        """Return the numbers of the last forward's events of blocks that are saved for backward."""
        last = [range(start, stop) for phase, start, stop in self.phases if phase == FORWARD][-1:]
        return [number for numbers in last for number in numbers if self.parts[number] == SAVED]

    @cached_property
    def classes(self) -> tuple[list[Kind], list[int]]:
        """Return the first kind of each class that has the same bytes at all batches, and the class of each kind."""
        numbers: dict[Hashable, int] = {}
        firsts: list[Kind] = []
        classes = []
        for kind in self.trace.kinds:
            number = numbers.setdefault(kind.key, len(firsts))
            if number == len(firsts):
                firsts.append(kind)
            classes.append(number)
        return firsts, classes
