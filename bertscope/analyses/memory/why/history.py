"""The history of a snapshot: its blocks with their stacks, the phases of the steps, and the moment that matters.

The structure is that of torch's torch/csrc/cuda/memory_snapshot.cpp and torch/cuda/memory.py (`_snapshot`): segments
with their blocks at the end, and for each device the last `max_entries` events. Every value is checked, since a file
may hold anything; sizes are those that were requested.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from bertscope.analyses.memory.why.stacks import LOAD, NO_STACK, NONE, USER, StackKind, stack_kind
from bertscope.errors import SourceError
from bertscope.reports.memory import BACKWARD, FORWARD, OPTIMIZER
from bertscope.reports.why import BEFORE, END, OOM, PEAK, TENSORS

NEVER = 2**62  # the event that frees a block which lives at the end
MAX_ITEMS = 1 << 23  # a list may occur many times in a pickle; 250 MB have 4,000,000 events of 60 bytes
_LARGEST = 2**50  # bytes of a card: more than any has
_PHASES = (FORWARD, BACKWARD, OPTIMIZER)
_FREED = ("free", "free_completed")
_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class HeldBlock(NamedTuple):
    """A block at the moment."""

    size: int
    kind: StackKind
    stack: int
    born: int
    part: str
    phase: str  # in which it was allocated
    forward_pass: int  # its number; 0 before the first


@dataclass
class History:
    """The blocks of a device in the order of their allocation; those from before the recording come first."""

    sizes: list[int] = field(default_factory=list)
    kinds: list[StackKind] = field(default_factory=list)
    stacks: list[int] = field(default_factory=list)  # equal stacks have equal numbers
    born: list[int] = field(default_factory=list)  # the event that allocates a block; -1 before the recording
    died: list[int] = field(default_factory=list)
    events: int = 0
    peak: int = -1  # the event after which most bytes are allocated
    reserved: list[tuple[int, int]] = field(default_factory=list)  # after each event that changes them
    oom: tuple[int, int, int | None] | None = None  # the event, the bytes tried, those free on the card
    oom_kind: StackKind = NO_STACK
    end_bytes: int = 0  # that torch has reserved at the end
    largest_free_bytes: int = 0
    private_bytes: int = 0  # in pools of CUDA graphs
    waiting_bytes: int = 0  # freed, but another stream may still read them

    def add(self, size: int, kind: StackKind, stack: int, event: int) -> int:
        """Add a block, and return its number."""
        self.sizes.append(size)
        self.kinds.append(kind)
        self.stacks.append(stack)
        self.born.append(event)
        self.died.append(NEVER)
        return len(self.sizes) - 1

    @cached_property
    def moment(self) -> tuple[str, int]:
        """Return which moment matters, and the last event before it."""
        if self.oom is not None:
            return OOM, self.oom[0]
        return (PEAK, self.peak) if self.events else (END, 0)

    @cached_property
    def blocks(self) -> list[HeldBlock]:
        """Return the blocks that exist at the moment."""
        event = self.moment[1]
        return [
            HeldBlock(self.sizes[number], self.kinds[number], self.stacks[number], born, self.parts[number],
                  self.phase(number), self.passes[number])
            for number, born in enumerate(self.born) if born <= event < self.died[number]
        ]  # fmt: skip

    def forward_bytes(self, forward_pass: int) -> int:
        """Return what a forward pass allocates."""
        return sum(size for number, size in enumerate(self.sizes)
                   if self.passes[number] == forward_pass and self.phase(number) == FORWARD)  # fmt: skip

    @property
    def reserved_bytes(self) -> int | None:
        """Return what torch has reserved at the moment; None if the file does not tell."""
        before = [total for event, total in self.reserved if event <= self.moment[1]]
        return before[-1] if before else self.end_bytes or None

    @cached_property
    def has_frames(self) -> bool:
        """Return True if stacks were recorded."""
        return any(kind.phase != NONE for kind in self.kinds)

    def phase(self, number: int) -> str:
        """Return the phase in which a block was allocated; without a frame in a recorded step it is the backward."""
        found = self.kinds[number].phase
        return BACKWARD if found == NONE and self.born[number] >= 0 and self.has_frames else found

    @cached_property
    def phases(self) -> list[tuple[int, str, int]]:
        """Return the phases in order: the first event of each, its name, and the number of its forward pass.

        A pass begins after a backward pass or an update, and where the stack that marks the loop comes again.
        """
        markers, found, passes, seen = self._markers(), [(-1, LOAD, 0)], 0, set()
        for number, event in enumerate(self.born):
            phase, stack = self.phase(number), self.stacks[number]
            if phase not in _PHASES or (phase == found[-1][1] and stack not in seen):
                seen |= {stack} & markers
                continue
            passes += phase == FORWARD
            seen = {stack} & markers
            found.append((event, phase, passes))
        return found

    def _markers(self) -> set[int]:
        """Return a stack of each loop that occurs once in a forward pass: the first of those that repeat least often.

        The layers of a list have one stack, which repeats in a pass; in a loop that ran once others do not repeat.
        """
        counts: dict[str, Counter[int]] = defaultdict(Counter)
        for number, kind in enumerate(self.kinds):
            if self.phase(number) == FORWARD:
                counts[kind.loop][self.stacks[number]] += 1
        found = set()
        for stacks in counts.values():
            once = sum(count == 1 for count in stacks.values())
            if next(iter(stacks.values())) > 1 and 5 * once < len(stacks):
                least = min(count for count in stacks.values() if count > 1)
                found.add(next(stack for stack, count in stacks.items() if count == least))
        return found

    @cached_property
    def _starts(self) -> list[int]:
        return [event for event, _, _ in self.phases]

    def phase_at(self, event: int) -> tuple[int, str, int]:
        """Return the phase at an event: its first event, its name, and the number of its forward pass."""
        return self.phases[bisect_right(self._starts, event) - 1]

    @cached_property
    def passes(self) -> list[int]:
        """Return the number of the forward pass of each block; 0 before the first."""
        return [self.phase_at(event)[2] for event in self.born]

    @cached_property
    def parts(self) -> list[str]:
        """Return the part of each block."""
        weights = {size for size, kind in zip(self.sizes, self.kinds, strict=True) if kind.part == "parameters"}
        return [self._part(number, weights) for number in range(len(self.sizes))]

    def _part(self, number: int, weights: set[int]) -> str:
        """Return the part of a block, from its frames and from the phase in which it is freed."""
        kind, phase = self.kinds[number], self.phase(number)
        if kind.part:
            return kind.part
        if phase not in _PHASES:
            is_gradient = not self.events and self.has_frames and self.sizes[number] in weights
            return TENSORS if phase == USER else "gradients" if is_gradient else BEFORE
        own = self.phase_at(self.born[number])
        is_last = self.died[number] == NEVER and own is self.phases[-1]
        is_freed = self.died[number] != NEVER and self.phase_at(self.died[number]) is own
        if phase == BACKWARD:
            is_gradient = self.sizes[number] in weights if is_last and weights else not is_freed
            return "gradients" if is_gradient else "temporaries"
        return "temporaries" if is_freed else "activations" if phase == FORWARD else "optimizer_state"


def read_history(data: Any, name: str) -> History:
    """Return the history of the device that ran out of memory, or else of the one with the most blocks.

    `data` is what a snapshot holds: a dict, or a list of segments as of `torch.cuda.memory_snapshot()`. Raises
    SourceError for another structure.
    """
    found: dict[str, Any] = {"segments": data} if isinstance(data, list) else data if isinstance(data, dict) else {}
    segments, traces = (found.get(key, []) for key in ("segments", "device_traces"))
    if not isinstance(segments, list) or not isinstance(traces, list) or not (segments or any(traces)):
        raise SourceError("no memory snapshot: it has neither segments nor events", where=name)
    reader = _Reader(name)
    devices: dict[int, list[dict[str, Any]]] = defaultdict(list)
    events = {device: own for device, trace in enumerate(traces) if (own := reader.dicts(trace))}
    for segment in reader.dicts(segments):
        devices[_whole(segment.get("device", 0), name)].append(segment)
    histories = [reader.history(devices[device], events.get(device, [])) for device in sorted({*devices, *events})]
    return max(histories, key=lambda history: (history.oom is not None, sum(history.sizes)))


class _Reader:
    """The reader of a file; a stack is its frames' lines and names, whether or not its frames are the same objects."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.frames: dict[int, int] = {}  # the number of a frame by its object, which is quick, and by its content
        self.numbers: dict[str, int] = {}
        self.known: dict[tuple[int, ...], tuple[StackKind, int]] = {}
        self.left = MAX_ITEMS

    def dicts(self, items: Any) -> list[dict[str, Any]]:
        """Return a list of dicts; raises SourceError for another value, and if the file has too many of them."""
        self.left -= len(items) if isinstance(items, list) else 0
        if self.left < 0:
            raise SourceError(f"more than {MAX_ITEMS:,} segments, blocks and events", where=self.name)
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise SourceError("no memory snapshot: a segment, a block or an event is no dict", where=self.name)
        return items

    def stack(self, frames: Any) -> tuple[StackKind, int]:
        """Return what a stack tells, and its number."""
        key = tuple(map(self._frame, frames)) if isinstance(frames, list) else ()
        if key not in self.known:
            self.known[key] = stack_kind(frames), len(self.known)
        return self.known[key]

    def _frame(self, frame: Any) -> int:
        number = self.frames.get(id(frame))
        if number is None:
            parts = [frame.get(key) for key in ("filename", "line", "name")] if isinstance(frame, dict) else frame
            number = self.numbers.setdefault(repr(parts), len(self.numbers))
            self.frames[id(frame)] = number
        return number

    def history(self, segments: list[dict[str, Any]], trace: list[dict[str, Any]]) -> History:
        """Return the history of a device."""
        found = History(events=len(trace))
        last = self.segments(found, segments)
        frees = {}  # of blocks from before the recording: by address the first free
        seen: set[Any] = set()
        for entry in trace:
            if (action := entry.get("action")) == "alloc" or action in _FREED:
                address = _whole(entry.get("addr"), self.name)
                if action != "alloc" and address not in seen:
                    frees[address] = _whole(entry.get("size"), self.name)
                seen.add(address)
        live = {address: found.add(size, NO_STACK, -1, -1) for address, size in frees.items()}
        for address, (size, kind, stack) in last.items():
            if address not in seen:
                found.add(size, kind, stack, -1)
        self.replay(found, trace, live)
        return found

    def replay(self, found: History, trace: list[dict[str, Any]], live: dict[Any, int]) -> None:
        """Add the blocks of the events to a history."""
        reserved = 0
        total = most = sum(found.sizes)
        for event, entry in enumerate(trace):
            action, address = entry.get("action"), entry.get("addr")
            if action == "alloc":
                size = _whole(entry.get("size"), self.name)
                live[address] = found.add(size, *self.stack(entry.get("frames")), event)
                total += size
                if total > most:
                    most, found.peak = total, event
            elif action in _FREED and address in live:
                number = live.pop(address)
                found.died[number] = event
                total -= found.sizes[number]
            elif action in _RESERVED:
                reserved += _RESERVED[action] * _whole(entry.get("size"), self.name)
                found.reserved.append((event, reserved))
            elif action == "oom":
                free = entry.get("device_free")
                is_size = isinstance(free, int) and 0 <= free < _LARGEST
                found.oom = event, _whole(entry.get("size"), self.name), free if is_size else None
                found.oom_kind = self.stack(entry.get("frames"))[0]
        start = found.end_bytes - reserved  # before the recording
        found.reserved = [(event, total + start) for event, total in found.reserved]

    def segments(self, found: History, segments: list[dict[str, Any]]) -> dict[int, tuple[int, StackKind, int]]:
        """Add what torch has reserved at the end; return the blocks by address: size, stack, its number."""
        blocks = {}
        for segment in segments:
            address = _whole(segment.get("address"), self.name)
            total = _whole(segment.get("total_size"), self.name)
            found.end_bytes += total
            if segment.get("segment_pool_id", (0, 0)) not in ((0, 0), [0, 0]):
                found.private_bytes += total
            for block in self.dicts(segment.get("blocks")):
                size = _whole(block.get("size"), self.name)
                state = block.get("state")
                if state == "active_allocated":
                    wanted = _whole(block.get("requested_size", size), self.name)
                    blocks[address] = wanted, *self.stack(block.get("frames"))
                elif state == "inactive":
                    found.largest_free_bytes = max(found.largest_free_bytes, size)
                else:
                    found.waiting_bytes += size
                address += size
        return blocks


def _whole(value: Any, name: str) -> int:
    """Return a size or an address; raises SourceError for another value."""
    if type(value) is not int or not 0 <= value < 2**64:
        raise SourceError("no memory snapshot: a size or an address is no number", where=name)
    return value
