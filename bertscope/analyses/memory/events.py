"""The memory trace of a step: its allocations and frees in order, each with the block's origin.

Runs on fake tensors, profiler runs and runs on a CUDA device record the same trace, so that the same code
reports an estimate and a measurement. A trace has no addresses: equal blocks are interchangeable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

PARTS = ("parameters", "buffers", "optimizer_state", "inputs", "gradients", "activations", "temporaries")


class Block(NamedTuple):
    """A kind of memory block: its part of the total, and the module and operator that allocated it."""

    part: str
    path: str
    operator: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    recomputed: bool = False


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
    granule_bytes: int = 1  # the allocator rounds sizes up to a multiple of it; sizes here are not rounded

    def taken(self, size_bytes: int) -> int:
        """Return a size as the allocator rounds it."""
        return rounded(size_bytes, self.granule_bytes)

    @property
    def state_bytes(self) -> int:
        """Return the bytes allocated between steps."""
        return sum(self.taken(size) for _, size in self.state)

    def live_bytes(self) -> list[int]:
        """Return the allocated bytes after each event."""
        return list(accumulate((self.taken(event.size_bytes) for event in self.events), initial=self.state_bytes))[1:]

    @property
    def peak_bytes(self) -> int:
        """Return the peak of the step in bytes."""
        return max(self.live_bytes(), default=self.state_bytes)

    @property
    def phases(self) -> tuple[str, ...]:
        """Return the names of the phases in their order."""
        return tuple(dict.fromkeys(event.phase for event in self.events))

    def peaks(self) -> tuple[Moment, ...]:
        """Return the peak of each phase; the bytes allocated when the phase begins count too."""
        found: dict[str, Moment] = {}
        before = self.state_bytes
        for index, (event, live) in enumerate(zip(self.events, self.live_bytes(), strict=True)):
            best = found.setdefault(event.phase, Moment(event.phase, index - 1, before))
            if live > best.live_bytes:
                found[event.phase] = Moment(event.phase, index, live, event.path, event.operator)
            before = live
        return tuple(found.values())

    def at(self, moment: Moment) -> Counter[Block]:
        """Return the allocated bytes of each kind of block at that moment."""
        found: Counter[Block] = Counter()
        for block, size in self.state:
            found[block] += self.taken(size)
        for event in self.events[: moment.index + 1]:
            found[event.block] += self.taken(event.size_bytes)
        return Counter({block: size for block, size in found.items() if size})


def rounded(size_bytes: int, granule_bytes: int) -> int:
    """Return a size, or the negative size of a free, rounded away from 0 to a multiple of the granule."""
    granules = -(-size_bytes // granule_bytes) if size_bytes > 0 else size_bytes // granule_bytes
    return granules * granule_bytes


def parts(blocks: Counter[Block]) -> dict[str, int]:
    """Return the bytes by part, in the order of PARTS, with zeros."""
    sums = dict.fromkeys(PARTS, 0)
    for block, size in blocks.items():
        sums[block.part] += size
    return sums


@dataclass
class Allocation:
    """A storage while its trace is recorded, with the operator that allocated it."""

    size_bytes: int
    phase: str
    path: str
    operator: str
    recompute: int  # the number of the recomputation that allocated it; 0 for none
    shape: tuple[int, ...] = ()
    dtype: str = ""
    part: str = ""
    is_saved: bool = False  # freed after the forward pass or the recomputation that allocated it

    def block(self) -> Block:
        """Return its kind of block."""
        part = self.part or ("activations" if self.is_saved else "temporaries")
        return Block(part, self.path, self.operator, self.shape, self.dtype, self.recompute > 0)


@dataclass
class MemoryTraceRecorder:
    """A recorder of allocations and frees; the kind of a block is known when it is freed."""

    state: list[tuple[Block, int]] = field(default_factory=list)
    log: list[tuple[int, Allocation, str, str, str]] = field(default_factory=list)
    living: dict[int, Allocation] = field(default_factory=dict)  # by key; only storages that the step allocated

    def allocate(self, key: int, made: Allocation, path: str, operator: str, phase: str) -> None:
        """Record an allocation."""
        self.living[key] = made
        self.log.append((made.size_bytes, made, phase, path, operator))

    def free(self, key: int, path: str, operator: str, phase: str, recompute: int) -> None:
        """Record a free; ignore a key that was allocated before the step."""
        made = self.living.pop(key, None)
        if made is None:
            return
        if made.recompute and recompute != made.recompute:
            made.is_saved = True
        self.log.append((-made.size_bytes, made, phase, path, operator))

    def end_forward(self) -> None:
        """Mark every allocated block as saved for backward."""
        for made in self.living.values():
            made.is_saved = True

    def name(self, keys: Iterable[int], part: str) -> None:
        """Assign allocated blocks to a part."""
        for key in keys:
            if key in self.living:
                self.living[key].part = part

    def trace(self, granule_bytes: int = 1) -> MemoryTrace:
        """Return the trace."""
        return MemoryTrace(tuple(self.state), tuple(self._events()), granule_bytes)

    def _events(self) -> Iterator[MemoryEvent]:
        blocks: dict[int, Block] = {}
        for size, made, phase, path, operator in self.log:
            if id(made) not in blocks:
                blocks[id(made)] = made.block()
            yield MemoryEvent(size, blocks[id(made)], phase, path, operator)
