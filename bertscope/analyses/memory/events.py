"""The trace of a step: every byte that comes and goes, in order, each with what it is.

Fake tensors, the profiler and a CUDA device all end up here, so that an estimate and a measurement are
told by the same code. A trace knows no addresses: equal blocks are interchangeable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

PARTS = ("parameters", "buffers", "optimizer_state", "inputs", "gradients", "activations", "temporaries")


class Block(NamedTuple):
    """What a piece of memory is: its part, and the module and operator that it came from."""

    part: str
    path: str
    operator: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    recomputed: bool = False


class MemoryEvent(NamedTuple):
    """Bytes that come (positive) or go, and where the run is just then."""

    size_bytes: int
    block: Block
    phase: str
    path: str
    operator: str


@dataclass(frozen=True)
class Moment:
    """The highest point of a phase: its place on the trace, and what stands there."""

    phase: str
    index: int  # into the events; -1 before the first
    live_bytes: int
    path: str = ""
    operator: str = ""


@dataclass(frozen=True)
class MemoryTrace:
    """What is there before the step, and what then comes and goes."""

    state: tuple[tuple[Block, int], ...]
    events: tuple[MemoryEvent, ...]
    granule_bytes: int = 1  # what the allocator rounds a size up to; sizes here are as asked for

    def taken(self, size_bytes: int) -> int:
        """Return a size as the allocator rounds it."""
        return rounded(size_bytes, self.granule_bytes)

    @property
    def state_bytes(self) -> int:
        """What lives between steps."""
        return sum(self.taken(size) for _, size in self.state)

    def live_bytes(self) -> list[int]:
        """After each event, all that is there."""
        return list(accumulate((self.taken(event.size_bytes) for event in self.events), initial=self.state_bytes))[1:]

    @property
    def peak_bytes(self) -> int:
        """The highest point of the step."""
        return max(self.live_bytes(), default=self.state_bytes)

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases in their order."""
        return tuple(dict.fromkeys(event.phase for event in self.events))

    def peaks(self) -> tuple[Moment, ...]:
        """The highest point of each phase; what was there when the phase began counts too."""
        found: dict[str, Moment] = {}
        before = self.state_bytes
        for index, (event, live) in enumerate(zip(self.events, self.live_bytes(), strict=True)):
            best = found.setdefault(event.phase, Moment(event.phase, index - 1, before))
            if live > best.live_bytes:
                found[event.phase] = Moment(event.phase, index, live, event.path, event.operator)
            before = live
        return tuple(found.values())

    def at(self, moment: Moment) -> Counter[Block]:
        """Bytes of each kind of block that are there at that moment."""
        there: Counter[Block] = Counter()
        for block, size in self.state:
            there[block] += self.taken(size)
        for event in self.events[: moment.index + 1]:
            there[event.block] += self.taken(event.size_bytes)
        return Counter({block: size for block, size in there.items() if size})


def rounded(size_bytes: int, granule_bytes: int) -> int:
    """Return a size, or the negative size of a free, rounded away from 0 to a multiple of the granule."""
    granules = -(-size_bytes // granule_bytes) if size_bytes > 0 else size_bytes // granule_bytes
    return granules * granule_bytes


def parts(blocks: Counter[Block]) -> dict[str, int]:
    """Bytes by part, in the order of PARTS, zeros too."""
    sums = dict.fromkeys(PARTS, 0)
    for block, size in blocks.items():
        sums[block.part] += size
    return sums


@dataclass
class Allocation:
    """One storage while its trace is written: what made it, and when it came and went."""

    size_bytes: int
    phase: str
    path: str
    operator: str
    recompute: int  # which stretch of recomputation it was allocate in; 0 for none
    shape: tuple[int, ...] = ()
    dtype: str = ""
    part: str = ""
    is_saved: bool = False  # beyond the forward pass, or beyond the recomputation, that made it

    def block(self) -> Block:
        """What it turned out to be."""
        part = self.part or ("activations" if self.is_saved else "temporaries")
        return Block(part, self.path, self.operator, self.shape, self.dtype, self.recompute > 0)


@dataclass
class MemoryTraceRecorder:
    """Writes a trace as things happen; what a block is, is known when it has free."""

    state: list[tuple[Block, int]] = field(default_factory=list)
    log: list[tuple[int, Allocation, str, str, str]] = field(default_factory=list)
    living: dict[int, Allocation] = field(default_factory=dict)  # by key, only those of the step itself

    def allocate(self, key: int, made: Allocation, path: str, operator: str, phase: str) -> None:
        """A block comes."""
        self.living[key] = made
        self.log.append((made.size_bytes, made, phase, path, operator))

    def free(self, key: int, path: str, operator: str, phase: str, recompute: int) -> None:
        """A block goes; a key that is not known is of before the step."""
        made = self.living.pop(key, None)
        if made is None:
            return
        if made.recompute and recompute != made.recompute:
            made.is_saved = True
        self.log.append((-made.size_bytes, made, phase, path, operator))

    def end_forward(self) -> None:
        """What is there now was saved for backward."""
        for made in self.living.values():
            made.is_saved = True

    def name(self, keys: Iterable[int], part: str) -> None:
        """Say what living blocks are."""
        for key in keys:
            if key in self.living:
                self.living[key].part = part

    def trace(self, granule_bytes: int = 1) -> MemoryTrace:
        """The trace, every block named."""
        return MemoryTrace(tuple(self.state), tuple(self._events()), granule_bytes)

    def _events(self) -> Iterator[MemoryEvent]:
        blocks: dict[int, Block] = {}
        for size, made, phase, path, operator in self.log:
            if id(made) not in blocks:
                blocks[id(made)] = made.block()
            yield MemoryEvent(size, blocks[id(made)], phase, path, operator)
