"""The growth of a step's memory with the batch, and the batch from which one variant needs less than another.

Each block of a memory trace grows with the batch by a fixed number of bytes, which two traces give.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

from bertscope.analyses.memory.events import MemoryEvent, MemoryTrace, ordered_frees, rounded
from bertscope.reports.memory import BreakEven, BreakEvenPoint
from bertscope.run_config import RunConfig

LARGEST_BATCH = 2**20
_BATCHES = (2, 3)  # of the two traces
_SHOWN_BATCHES = (8, 32)
TraceOf = Callable[[RunConfig], MemoryTrace]


@dataclass
class MemoryGrowth:
    """The peak of a step as a function of the batch, from traces of two batches."""

    granule_bytes: int
    state: list[tuple[int, int]]  # bytes at batch 0, and bytes for each sequence
    events: list[tuple[int, int]]

    def peak_bytes(self, batch: int) -> int:
        """Return the peak at a batch."""

        def size(line: tuple[int, int]) -> int:
            return rounded(line[0] + line[1] * batch, self.granule_bytes)

        return max(accumulate(map(size, self.events), initial=sum(map(size, self.state))))


def memory_growth(one: MemoryTrace, other: MemoryTrace) -> MemoryGrowth | None:
    """Return the growth from traces at batch 2 and 3, block by block; None if their events differ in kind."""
    first, second = (ordered_frees(trace.events, _free_order) for trace in (one, other))
    if [event.block.path for event in first] != [event.block.path for event in second]:
        return None
    state = [_line(a, b) for (_, a), (_, b) in zip(one.state, other.state, strict=True)]
    events = [_line(a.size_bytes, b.size_bytes) for a, b in zip(first, second, strict=True)]
    return MemoryGrowth(one.granule_bytes, state, events)


def _free_order(event: MemoryEvent) -> tuple[str, str, str, int]:
    """Return a key whose order the batch does not change."""
    block = event.block
    return block.path, block.operator, block.dtype, event.size_bytes


def _line(one: int, other: int) -> tuple[int, int]:
    """Return the bytes at batch 0, and the bytes for each sequence."""
    slope = other - one
    return one - slope * _BATCHES[0], slope


def growth_of(trace_of: TraceOf, run_config: RunConfig) -> MemoryGrowth | None:
    """Return the growth of a run's step; None if its events change with the batch."""
    one, other = (trace_of(replace(run_config, batch=batch)) for batch in _BATCHES)
    return memory_growth(one, other)


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


def largest(fits: Callable[[int], bool]) -> int:
    """Return the largest batch that fits, 0 for none; every smaller batch fits too."""
    low, high = 0, 1
    while high < LARGEST_BATCH and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
