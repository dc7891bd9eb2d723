"""A simulation of CUDA's caching allocator over a memory trace: the bytes it reserves, and if they fit in a limit.

Rules and constants are those of torch's c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp at
default settings. Sizes are rounded up to 512 bytes. Blocks of up to 1 MiB come from segments of 2 MiB, below
10 MiB from segments of 20 MiB; a larger block gets a separate segment, rounded up to 2 MiB. The allocator splits
the smallest free block that fits, merges free neighbours, and releases entirely free segments at the limit.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from bertscope.analyses.memory.events import MemoryTrace, matched

_MIB = 2**20
_STEP, _SMALL = 512, _MIB
_SMALL_SEGMENT, _LARGE_SEGMENT, _OWN_FROM, _OWN_STEP = 2 * _MIB, 20 * _MIB, 10 * _MIB, 2 * _MIB


@dataclass(eq=False)
class SegmentBlock:
    """A used or free block of a segment, with its neighbours."""

    size: int
    is_small: bool
    is_free: bool = False
    before: SegmentBlock | None = None
    after: SegmentBlock | None = None

    @property
    def is_whole(self) -> bool:
        """Return True if the block is a whole segment."""
        return self.before is None and self.after is None

    def absorb_next(self) -> None:
        """Take over the memory of the block behind this one, if there is one."""
        if self.after is not None:
            self.size += self.after.size
            self.after = self.after.after
        if self.after is not None:
            self.after.before = self


class Allocator:
    """The memory pools of one stream; `limit_bytes` limits the reserved bytes."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.missing_bytes = 0  # above the limit, at the first request that exceeded it; 0 if none did
        self.frees = 0
        self.free_blocks: dict[bool, list[tuple[int, int, SegmentBlock]]] = {True: [], False: []}  # smallest first

    def malloc(self, size_bytes: int) -> SegmentBlock:
        """Return a block of this size, from a new segment if no free block fits."""
        size = max(-(-size_bytes // _STEP) * _STEP, _STEP)
        is_small = size <= _SMALL
        pool = self.free_blocks[is_small]
        index = next((index for index, (free, _, _) in enumerate(pool) if free >= size), None)
        block = pool.pop(index)[2] if index is not None else self._new_segment(size, is_small)
        block.is_free = False
        self._split(block, size)
        return block

    def _new_segment(self, size: int, is_small: bool) -> SegmentBlock:
        own = -(-size // _OWN_STEP) * _OWN_STEP
        whole = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT if size < _OWN_FROM else own
        if self.limit_bytes is not None and self.reserved_bytes + whole > self.limit_bytes:
            self.release_free_segments()
            if self.reserved_bytes + whole > self.limit_bytes:
                self.missing_bytes = self.missing_bytes or self.reserved_bytes + whole - self.limit_bytes
        self.reserved_bytes += whole
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return SegmentBlock(whole, is_small)

    def _split(self, block: SegmentBlock, size: int) -> None:
        rest = block.size - size
        if rest >= _STEP if block.is_small else rest > _SMALL:
            other = SegmentBlock(rest, block.is_small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = other
            block.after, block.size = other, size
            self._set_free(other)

    def free(self, block: SegmentBlock) -> None:
        """Free a block and merge it with free neighbours."""
        if block.after is not None and block.after.is_free:
            self._remove(block.after)
            block.absorb_next()
        if block.before is not None and block.before.is_free:
            block = block.before
            self._remove(block)
            block.absorb_next()
        self._set_free(block)

    def _set_free(self, block: SegmentBlock) -> None:
        block.is_free = True
        self.frees += 1  # of equal blocks `malloc` chooses the one freed first
        insort(self.free_blocks[block.is_small], (block.size, self.frees, block))

    def _remove(self, block: SegmentBlock) -> None:
        pool = self.free_blocks[block.is_small]
        del pool[next(index for index, (_, _, other) in enumerate(pool) if other is block)]

    def release_free_segments(self) -> None:
        """Return the segments that are entirely free to the device."""
        for is_small, pool in self.free_blocks.items():
            self.reserved_bytes -= sum(size for size, _, block in pool if block.is_whole)
            self.free_blocks[is_small] = [item for item in pool if not item[2].is_whole]


def replayed(trace: MemoryTrace, limit_bytes: int | None = None, steps: int = 2) -> Allocator:
    """Return the allocator, empty at first, after this number of steps of the trace."""
    allocator = Allocator(limit_bytes)
    for _, size in trace.state:
        allocator.malloc(size)
    for _ in range(steps):
        used: dict[int, SegmentBlock] = {}
        for event, number in matched(trace.events):
            if event.size_bytes > 0:
                used[number] = allocator.malloc(event.size_bytes)
            else:
                allocator.free(used.pop(number))
        for block in used.values():
            allocator.free(block)
    return allocator
