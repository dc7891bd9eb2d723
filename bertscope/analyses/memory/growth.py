"""The growth of a step's memory with the batch, and the batch from which one variant needs less than another.

Each block of a memory trace grows with the batch by a fixed number of bytes, which two traces give. The scratchpads of
bf16 products on the CPU do not; they are left out.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate

from bertscope.analyses.memory.caching_allocator import Requests, requests
from bertscope.analyses.memory.events import MemoryEvent, MemoryTrace, is_scratchpad, ordered_frees, rounded
from bertscope.reports.memory import BreakEven, BreakEvenPoint
from bertscope.settings.run_config import RunConfig

LARGEST_BATCH = 2**20
SMALLEST = 2  # batch of which the growth is taken: some operators treat a batch of 1 differently
_SHOWN_BATCHES = (8, 32)
TraceOf = Callable[[RunConfig], MemoryTrace]


@dataclass
class MemoryGrowth:
    """The peak of a step as a function of the batch, from traces of two batches."""

    granule_bytes: int
    state: list[tuple[int, int]]  # bytes at batch 0, and bytes for each sequence
    events: list[tuple[int, int]]
    trace: MemoryTrace  # one of the two

    @property
    def is_whole(self) -> bool:
        """Return True if no block is left out."""
        return len(self.events) == len(self.trace.events)

    def peak_bytes(self, batch: int) -> int:
        """Return the peak at a batch."""

        state, events = _sizes(self.state, batch), _sizes(self.events, batch)
        if self.granule_bytes != 1:
            state, events = ([rounded(size, self.granule_bytes) for size in sizes] for sizes in (state, events))
        return max(accumulate(events, initial=sum(state)))

    def gives(self, trace: MemoryTrace, batch: int) -> bool:
        """Return True if the trace of a batch is what the growth says, event by event."""
        own, others = (ordered_frees(growing(each.events), _free_order) for each in (self.trace, trace))
        if len(trace.state) != len(self.state) or len(others) != len(self.events):
            return False
        sizes = _sizes(self.events, batch)
        expected = [
            MemoryEvent(size, event.block, event.phase, event.path, event.operator)
            for event, size in zip(own, sizes, strict=True)
        ]
        pairs = zip(ordered_frees(expected, _free_order), others, strict=True)
        are_equal = all(_kind(one) == _kind(other) and one.size_bytes == other.size_bytes for one, other in pairs)
        return are_equal and _sizes(self.state, batch) == [size for _, size in trace.state]

    def requests(self, batch: int, workspaces: tuple[int, ...]) -> Requests:
        """Return the requests to the allocator at a batch; the workspaces are those of forward and backward."""
        lines = (*self.state, *self.events)
        sizes = [*(max(size, 0) for size in _sizes(lines, batch)), *workspaces]
        return replace(self._requests(workspaces), sizes=sizes)

    @cached_property
    def _requests(self) -> Callable[[tuple[int, ...]], Requests]:
        """Return the function from the workspaces to the requests at the traced batch."""
        return cache(partial(requests, self.trace))


def memory_growth(one: MemoryTrace, other: MemoryTrace, batch: int = SMALLEST) -> MemoryGrowth | None:
    """Return the growth from the traces of a batch and the next, block by block; None if their events differ."""
    first, second = (ordered_frees(growing(trace.events), _free_order) for trace in (one, other))
    paths = [[event.block.path for event in events] for events in (first, second)]
    if paths[0] != paths[1] or len(one.state) != len(other.state):
        return None
    state = [_line(a, b, batch) for (_, a), (_, b) in zip(one.state, other.state, strict=True)]
    events = [_line(a.size_bytes, b.size_bytes, batch) for a, b in zip(first, second, strict=True)]
    return MemoryGrowth(one.granule_bytes, state, events, one)


def growing(events: Iterable[MemoryEvent]) -> list[MemoryEvent]:
    """Return the events of blocks that grow evenly with the batch: all but those of oneDNN's scratchpads."""
    return [event for event in events if not is_scratchpad(event.block)]


def _free_order(event: MemoryEvent) -> tuple[str, str, str, int]:
    """Return a key whose order the batch does not change."""
    block = event.block
    return block.path, block.operator, block.dtype, event.size_bytes


def _kind(event: MemoryEvent) -> tuple[str, str, str, str, str]:
    """Return what the events of all batches have in common."""
    block = event.block
    return event.phase, block.part, block.path, block.operator, block.dtype


def _sizes(lines: Iterable[tuple[int, int]], batch: int) -> list[int]:
    return [start + slope * batch for start, slope in lines]


def _line(one: int, other: int, batch: int) -> tuple[int, int]:
    """Return the bytes at batch 0, and the bytes for each sequence, from those of `batch` and the next."""
    slope = other - one
    return one - slope * batch, slope


def growth_of(trace_of: TraceOf, run_config: RunConfig, batch: int = SMALLEST) -> MemoryGrowth | None:
    """Return the growth of a run's step at a batch; None if its events change with the batch."""
    one, other = (trace_of(replace(run_config, batch=size)) for size in (batch, batch + 1))
    return memory_growth(one, other, batch)


def break_even(trace_of: TraceOf, plain: RunConfig, other: RunConfig) -> BreakEven | None:
    """Return the least batch at which `other` has the lower peak, and both peaks at larger ones; None if unknown."""
    first, second = growth_of(trace_of, plain), growth_of(trace_of, other)
    if first is None or second is None:
        return None
    behind = largest(lambda batch: second.peak_bytes(batch) >= first.peak_bytes(batch))
    if behind >= LARGEST_BATCH // 2:
        return None
    points = tuple(
        BreakEvenPoint(batch=batch, first_bytes=first.peak_bytes(batch), peak_bytes=second.peak_bytes(batch))
        for batch in _SHOWN_BATCHES
        if batch > max(plain.batch, behind)
    )
    return BreakEven(pays_from_batch=behind + 1, points=points)


def largest(fits: Callable[[int], bool], most: int = LARGEST_BATCH) -> int:
    """Return the largest batch up to `most` that fits, 0 for none; every smaller batch fits too."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
