"""CUDA's caching allocator, replayed over a trace: what it would reserve, and whether it would fit.

Its rules and constants, from torch's c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp at
default settings: sizes in steps of 512 bytes; up to 1 MiB from segments of 2 MiB, below 10 MiB from
segments of 20 MiB, else a segment of its own in steps of 2 MiB; the smallest free block that fits is
taken and split; neighbours that are free are joined; where memory runs out, whole free segments go back.
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
    """A stretch of a segment, used or free, between its neighbours."""

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
    """One stream's pools; `limit_bytes` is what may be reserved in all."""

    limit_bytes: int | None = None
    reserved_bytes: int = 0
    peak_reserved_bytes: int = 0
    missing_bytes: int = 0  # the first request that could not be met; 0 if all were
    made: int = 0
    free_pieces: dict[bool, list[tuple[int, int, _Piece]]] = field(default_factory=lambda: {True: [], False: []})

    def take(self, size_bytes: int) -> _Piece:
        """A piece for a size; where nothing fits, from a new segment."""
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
        """Free a piece; it joins free neighbours."""
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
        self.made += 1  # of equal sizes the one that has been free longest is taken
        insort(self.free_pieces[piece.is_small], (piece.size, self.made, piece))

    def _remove(self, piece: _Piece) -> None:
        pool = self.free_pieces[piece.is_small]
        del pool[next(number for number, (_, _, other) in enumerate(pool) if other is piece)]

    def _give_back(self) -> None:
        for is_small, pool in self.free_pieces.items():
            self.reserved_bytes -= sum(size for size, _, piece in pool if piece.is_whole)
            self.free_pieces[is_small] = [item for item in pool if not item[2].is_whole]


def replayed(trace: MemoryTrace, limit_bytes: int | None = None, steps: int = 2) -> Allocator:
    """The allocator after so many steps of the trace, from an empty start."""
    allocator = Allocator(limit_bytes)
    for _, size in trace.state:
        allocator.take(size)
    for _ in range(steps):
        held: dict[tuple[Block, int], list[_Piece]] = defaultdict(list)
        for event in trace.events:
            # Of equal blocks the last that came goes first: which one, a trace does not know.
            pieces = held[event.block, abs(event.size_bytes)]
            if event.size_bytes > 0:
                pieces.append(allocator.take(event.size_bytes))
            elif pieces:
                allocator.give(pieces.pop())
        for pieces in held.values():
            for piece in pieces:
                allocator.give(piece)
    return allocator
