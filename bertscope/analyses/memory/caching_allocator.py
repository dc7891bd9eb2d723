"""A simulation of CUDA's caching allocator over a memory trace: the bytes it reserves, and if they fit in a limit.

Rules and constants are those of torch's c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp at
default settings. Sizes are rounded up to 512 bytes. Blocks of up to 1 MiB come from segments of 2 MiB, below
10 MiB from segments of 20 MiB; a larger block gets a separate segment, rounded up to 2 MiB. The allocator splits
the smallest free block that fits, merges free neighbours, and releases entirely free segments at the limit.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from dataclasses import dataclass, field

from bertscope.analyses.memory.events import Block, MemoryTrace

_MIB = 2**20
_STEP, _SMALL = 512, _MIB
_SMALL_SEGMENT, _LARGE_SEGMENT, _OWN_FROM, _OWN_STEP = 2 * _MIB, 20 * _MIB, 10 * _MIB, 2 * _MIB


@dataclass(eq=False)
class _Piece:
    """A used or free block of a segment, with its neighbours."""

    size: int
    is_small: bool
    is_free: bool = False
    before: _Piece | None = None
    after: _Piece | None = None

    @property
    def is_whole(self) -> bool:
        return self.before is None and self.after is None


@dataclass
class Allocator:
    """The memory pools of one stream; `limit_bytes` limits the reserved bytes."""

    limit_bytes: int | None = None
    reserved_bytes: int = 0
    peak_reserved_bytes: int = 0
    missing_bytes: int = 0  # above the limit, at the first request that exceeded it; 0 if none did
    made: int = 0
    free_pieces: dict[bool, list[tuple[int, int, _Piece]]] = field(default_factory=lambda: {True: [], False: []})

    def take(self, size_bytes: int) -> _Piece:
        """Return a block of this size, from a new segment if no free block fits."""
        size = max(-(-size_bytes // _STEP) * _STEP, _STEP)
        is_small = size <= _SMALL
        pool = self.free_pieces[is_small]
        place = next((number for number, (free, _, _) in enumerate(pool) if free >= size), None)
        piece = pool.pop(place)[2] if place is not None else self._segment(size, is_small)
        piece.is_free = False
        self._split(piece, size)
        return piece

    def _segment(self, size: int, is_small: bool) -> _Piece:
        own = -(-size // _OWN_STEP) * _OWN_STEP
        whole = _SMALL_SEGMENT if is_small else _LARGE_SEGMENT if size < _OWN_FROM else own
        if self.limit_bytes is not None and self.reserved_bytes + whole > self.limit_bytes:
            self._give_back()
            if self.reserved_bytes + whole > self.limit_bytes:
                self.missing_bytes = self.missing_bytes or self.reserved_bytes + whole - self.limit_bytes
        self.reserved_bytes += whole
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return _Piece(whole, is_small)

    def _split(self, piece: _Piece, size: int) -> None:
        rest = piece.size - size
        if rest >= _STEP if piece.is_small else rest > _SMALL:
            other = _Piece(rest, piece.is_small, before=piece, after=piece.after)
            if piece.after is not None:
                piece.after.before = other
            piece.after, piece.size = other, size
            self._set_free(other)

    def give(self, piece: _Piece) -> None:
        """Free a block and merge it with free neighbours."""
        for other in (piece.before, piece.after):
            if other is not None and other.is_free:
                self._remove(other)
                piece.size += other.size
                if other is piece.before:
                    piece.before = other.before
                    if piece.before is not None:
                        piece.before.after = piece
                else:
                    piece.after = other.after
                    if piece.after is not None:
                        piece.after.before = piece
        self._set_free(piece)

    def _set_free(self, piece: _Piece) -> None:
        piece.is_free = True
        self.made += 1  # of equal blocks `take` chooses the one freed first
        insort(self.free_pieces[piece.is_small], (piece.size, self.made, piece))

    def _remove(self, piece: _Piece) -> None:
        pool = self.free_pieces[piece.is_small]
        del pool[next(number for number, (_, _, other) in enumerate(pool) if other is piece)]

    def _give_back(self) -> None:
        for is_small, pool in self.free_pieces.items():
            self.reserved_bytes -= sum(size for size, _, piece in pool if piece.is_whole)
            self.free_pieces[is_small] = [item for item in pool if not item[2].is_whole]


def replayed(trace: MemoryTrace, limit_bytes: int | None = None, steps: int = 2) -> Allocator:
    """Return the allocator, empty at first, after this number of steps of the trace."""
    allocator = Allocator(limit_bytes)
    for _, size in trace.state:
        allocator.take(size)
    for _ in range(steps):
        held: dict[tuple[Block, int], list[_Piece]] = defaultdict(list)
        for event in trace.events:
            # A trace does not say which of several equal blocks is freed: assume the newest.
            pieces = held[event.block, abs(event.size_bytes)]
            if event.size_bytes > 0:
                pieces.append(allocator.take(event.size_bytes))
            elif pieces:
                allocator.give(pieces.pop())
        for pieces in held.values():
            for piece in pieces:
                allocator.give(piece)
    return allocator
