"""A snapshot's history: its blocks with their stacks, the phases of the steps, and the moment that matters.

The structure is defined in torch/csrc/cuda/memory_snapshot.cpp and torch/cuda/memory.py (`_snapshot`): segments
with their blocks at the end, and for each device the last `max_entries` events. Every value is checked, since a file
may hold anything; sizes are those that were requested.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from bertscope.errors import SourceError
from bertscope.frozen import Record
from bertscope.reports.layer_ranges import without_numbers
from bertscope.reports.memory import BACKWARD, FORWARD, OPTIMIZER
from bertscope.reports.why import BEFORE, END, OOM, PEAK, TENSORS

# ---- the stack of an allocation: the phase in which it ran, its line of the user's code and its module ----
# It is a list of frames, the innermost first, as torch records it: {"filename": ..., "line": ..., "name": ...}. In the
# backward pass on CUDA it has no Python frame, since autograd runs in a thread of C++.

LOAD, USER, NONE = "load", "user", ""  # phases of a stack outside the step: building a model, other code, no frame
EVALUATION, ATTENTION_SCORES, LOGITS, COPIED, KEY_VALUES, FOREACH, BUCKETS, RECOMPUTED = (
    "evaluation", "attention", "logits", "copy", "cache", "foreach", "buckets", "recomputed"
)  # fmt: skip
_MOST_FRAMES = 200  # that are read of a stack; a step of the Trainer has about 60
_MOST_TEXT, _MOST_PATH = 100, 500  # characters of a name, and of the path of a file

# A frame as `filename:name` -> the phase and the part of its allocations. The innermost frame with a rule decides.
_RULES = tuple((re.compile(pattern), phase, part) for pattern, phase, part in (
    (r"cache_utils\.py:(\w+\.)?(update|lazy_init\w*)$", FORWARD, "activations"),
    (r"[/\\]optim\w*[/\\].*:(\w+\.)?(_init_group|init_state\w*|load_state_dict|_process_value\w*|get_state_buffer)$",
     OPTIMIZER, "optimizer_state"),
    (r"[/\\]optim\w*[/\\](?!lr_sched).*:|clip_grad\.py:|grad_scaler\.py:|[/\\]bitsandbytes[/\\]optim", OPTIMIZER, ""),
    (r"torch[/\\]_tensor\.py:(\w+\.)?backward$|autograd[/\\](graph|__init__)\.py:|autograd::\w*:*\w*Engine|"
     r"AccumulateGrad", BACKWARD, ""),
    (r"nn[/\\]parallel[/\\]distributed\.py:(\w+\.)?(__init__|_ddp_init_helper)$", LOAD, "communication"),
    (r"distributed[/\\](fsdp|_composable)[/\\]", FORWARD, "gathered_parameters"),
    (r"module\.py:(\w+\.)?(_apply|convert|to|to_empty|cuda|half|_load_from_state_dict)$|:(\w+\.)?reset_parameters$|"
     r"[/\\]torch[/\\]nn[/\\](init|parameter)\.py:|nn[/\\]modules[/\\]\w+\.py:(\w+\.)?__init__$|__deepcopy__$|"
     r"[/\\]safetensors[/\\]|modeling_utils\.py:|core_model_loading\.py:|[/\\]torch[/\\]serialization\.py:|"
     r"set_module_tensor_to_device$|bitsandbytes[/\\]nn[/\\]\w+\.py:(\w+\.)?(to|cuda|_quantize)$", LOAD, "parameters"),
    (r":(\w+\.)?\w*forward\w*$|module\.py:(\w+\.)?_(wrapped_)?call_impl$|torch[/\\]nn[/\\]functional\.py:",
     FORWARD, ""),
))  # fmt: skip
# What a stack shows too: a pattern of any of its frames.
_MARKS = tuple((mark, re.compile(pattern)) for mark, pattern in (
    (EVALUATION, r":(\w+\.)?\w*(eval|valid|predict|infer|generate|test)\w*$"),
    (ATTENTION_SCORES, r"[/\\]\w*:(\w+\.)?\w*attention\w*forward$|:(\w*[Aa]ttention\w*\.)(forward|_attn)$|"
                       r":(\w+\.)?(_attn|eager_attention\w*|scaled_dot_product_attention_math)$"),
    (LOGITS, r":(\w+\.)?(cross_entropy|\w*loss\w*|log_softmax|\w*lm_head\w*)$"),
    (COPIED, r":(\w+\.)?(__)?deepcopy(__)?$"),
    (KEY_VALUES, r"cache_utils\.py:"),
    (FOREACH, r":_multi_tensor_\w+$|:_?foreach\w*$"),
    (BUCKETS, r"nn[/\\]parallel[/\\]distributed\.py:"),
    (RECOMPUTED, r"checkpoint\.py:(\w+\.)?(unpack_hook|recompute_fn|backward)|autograd[/\\]graph\.py:_engine_run"),
))  # fmt: skip
_NATIVE = r"^<|\.(c|cc|cpp|cu|cuh|h|hpp|o|so)\b|^\?\?$|^$"  # C++, and frames of code that a program has made
_LIBRARY = re.compile(rf"(site|dist)-packages|lib[/\\]python[0-9]|{_NATIVE}")
_TORCH = re.compile(rf"[/\\]torch[/\\]|[/\\]lib[/\\]python[0-9][.0-9]*[/\\]\w+\.py$|{_NATIVE}")
_CALL = re.compile(r"module\.py:(\w+\.)?_(wrapped_)?call_impl$|:(\w+\.)*forward$")
_OWN = re.compile(r"(\w+), (\w[\w ]*)$")  # the third frame of a snapshot of `estimate` or `profile`: part, phase


class StackKind(Record, kw_only=False):
    """The phase, the part, the lines and the module of an allocation, from its frames."""

    phase: str
    part: str = ""  # if the frames decide it
    lines: tuple[str, ...] = ()  # of the user's code, the innermost first
    module: str = ""  # the innermost function of a module that is none of torch's, outside of that line
    caller: str = ""  # the innermost line of the user's code outside the outermost module
    loop: str = ""  # the function outside the outermost module: one loop over batches
    marks: frozenset[str] = frozenset()

    @property
    def line(self) -> str:
        """Return the innermost line of the user's code."""
        return self.lines[0] if self.lines else ""


NO_STACK = StackKind(NONE)


class _Frame(NamedTuple):
    text: str  # `train.py:31 (main)`
    key: str  # `/home/me/train.py:main`
    rule: tuple[str, str] | None  # the phase and the part
    marks: frozenset[str]
    is_own: bool  # code of the user
    is_other: bool  # code outside torch
    is_call: bool  # of a module
    is_forward: bool


@lru_cache(maxsize=2**16)
def _frame(file: str, line: int, name: str) -> _Frame:
    """Return what a frame tells; a few hundred frames occur in all stacks of a run."""
    key = f"{file}:{name}"
    location = re.split(r"[/\\]", file)[-1][-_MOST_TEXT:] + (f":{line}" if line else "")
    return _Frame(
        f"{location} ({name.rpartition('::')[2] or name})", key,
        next(((phase, part) for pattern, phase, part in _RULES if pattern.search(key)), None),
        frozenset() if re.search(_NATIVE, file) else frozenset(mark for mark, pattern in _MARKS if pattern.search(key)),
        is_own=not _LIBRARY.search(file), is_other=not _TORCH.search(file), is_call=bool(_CALL.search(key)),
        is_forward=name.rpartition(".")[2].endswith("forward"),
    )  # fmt: skip


def stack_kind(frames: Any) -> StackKind:
    """Return what a stack tells; NO_STACK for one without frames or of another structure."""
    if not isinstance(frames, list) or not frames:
        return NO_STACK
    dicts = [frame for frame in frames[:_MOST_FRAMES] if isinstance(frame, dict)]
    if len(dicts) == 3 and not any(frame.get("filename") for frame in dicts):
        operator, path, last = (str(frame.get("name", ""))[:_MOST_TEXT] for frame in dicts)
        return _own_kind(operator, without_numbers(path), last)
    read = []
    for frame in dicts:  # without its values of another type
        file, line, name = (frame.get(key) for key in ("filename", "line", "name"))
        number = line if isinstance(line, int) and 0 < line < 2**31 else 0
        path, function = (text if isinstance(text, str) else "" for text in (file, name))
        read.append(_frame(path[-_MOST_PATH:], number, function[-_MOST_TEXT:]))
    marks = frozenset(chain.from_iterable(frame.marks for frame in read))
    phase, part = next((frame.rule for frame in read if frame.rule), (USER, TENSORS))
    if any(frame.key.endswith("linear.py:forward") for frame in read):
        marks -= {ATTENTION_SCORES}  # a projection
    if phase == FORWARD and RECOMPUTED in marks:
        phase, part = BACKWARD, "activations"
    outside = read[max((number for number, frame in enumerate(read) if frame.is_call), default=-1) + 1 :]
    user_frames = [frame for frame in read if frame.is_own] or [frame for frame in read if frame.is_other]
    modules = [frame for frame in read if frame.is_forward]
    return StackKind(
        phase, part,
        lines=tuple(frame.text for frame in user_frames),
        module=next((frame.text for frame in modules if frame.is_other and frame not in user_frames[:1]),
                    modules[0].text if modules else ""),
        caller=next((frame.text for frame in outside if frame.is_own), user_frames[0].text if user_frames else ""),
        loop=next((frame.key for frame in outside if frame.is_other), ""), marks=marks,
    )  # fmt: skip


@lru_cache(10_000)  # one kind for equal layers, as they are one stack of torch
def _own_kind(operator: str, path: str, last: str) -> StackKind:
    match = _OWN.match(last)
    if match is None:
        return NO_STACK
    phase = match[2] if match[2] in (FORWARD, BACKWARD, OPTIMIZER) else BACKWARD if match[2] == "recompute" else LOAD
    marks = frozenset({FOREACH} if operator.startswith("_foreach") else ())
    return StackKind(phase, match[1], lines=(operator,), module=path, caller=operator, loop="a step", marks=marks)


# ---- the blocks of a device ----

NEVER = 2**62  # the event that frees a block which lives at the end
MAX_ITEMS = 1 << 23  # a list may occur many times in a pickle; 250 MB have 4,000,000 events of 60 bytes
_LARGEST = 2**50  # bytes of a GPU: more than any has
_PHASES = (FORWARD, BACKWARD, OPTIMIZER)
_FREED = ("free", "free_completed")
_RESERVED = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


@dataclass(slots=True, eq=False)
class HeldBlock:
    """A block of a device; `History.complete` sets the last three fields."""

    size: int
    kind: StackKind  # one object for equal stacks
    born: int = -1  # the event that allocates it; -1 before the recording
    died: int = NEVER
    phase: str = NONE  # in which it was allocated
    forward_pass: int = 0  # its number; 0 before the first
    part: str = BEFORE


class StepPhase(NamedTuple):
    """A phase of a step: its first event, its name, and the number of its forward pass."""

    start: int
    name: str
    forward_pass: int


@dataclass
class History:
    """A device's blocks in allocation order; those from before the recording come first."""

    all_blocks: list[HeldBlock] = field(default_factory=list)
    events: int = 0
    peak: int = -1  # the event after which most bytes are allocated
    reserved: list[tuple[int, int]] = field(default_factory=list)  # after each event that changes them
    oom: tuple[int, int, int | None] | None = None  # the event, the bytes tried, and free on the GPU
    oom_kind: StackKind = NO_STACK
    end_bytes: int = 0  # that torch has reserved at the end
    largest_free_bytes: int = 0
    private_bytes: int = 0  # in pools of CUDA graphs
    waiting_bytes: int = 0  # freed, but another stream may still read them

    def complete(self) -> History:
        """Set the phases and the parts of all blocks, and what exists at the moment that matters; return self."""
        self.has_frames = any(block.kind.phase != NONE for block in self.all_blocks)
        for block in self.all_blocks:  # without a frame in a recorded step it is the backward pass
            is_backward = block.kind.phase == NONE and block.born >= 0 and self.has_frames
            block.phase = BACKWARD if is_backward else block.kind.phase
        self.phases = self._phases()
        self._starts = [phase.start for phase in self.phases]
        weights = {block.size for block in self.all_blocks if block.kind.part == "parameters"}
        for block in self.all_blocks:
            phase = self.phase_at(block.born)
            block.forward_pass, block.part = phase.forward_pass, self._part(block, phase, weights)
        self.moment = OOM if self.oom else PEAK if self.events else END
        event = self.oom[0] if self.oom else self.peak if self.events else 0
        self.blocks = [block for block in self.all_blocks if block.born <= event < block.died]
        self.total = max(size_of(self.blocks), 1)
        self.tried = self.oom[1] if self.oom else 0
        before = [total for at, total in self.reserved if at <= event]
        self.reserved_bytes = before[-1] if before else self.end_bytes or None  # None if the file does not tell
        self.running = self.oom_kind
        if self.running is NO_STACK:
            self.running = next((block.kind for block in self.all_blocks if block.born == event), NO_STACK)
        _, self.phase, self.last_pass = self.phase_at(event)
        updates = (phase.start for phase in self.phases if phase.name == OPTIMIZER and phase.start <= event)
        self.last_update = max(updates, default=-1)
        return self

    def _phases(self) -> list[StepPhase]:
        # A pass begins after a backward pass or an update, and where the stack that marks the loop comes again.
        markers, phases, seen = self._markers(), [StepPhase(-1, LOAD, 0)], set[int]()
        for block in self.all_blocks:
            last, stack = phases[-1], id(block.kind)
            if block.phase in _PHASES and (block.phase != last.name or stack in seen):
                phases.append(StepPhase(block.born, block.phase, last.forward_pass + (block.phase == FORWARD)))
                seen = set()
            seen |= {stack} & markers
        return phases

    def _markers(self) -> set[int]:
        # A stack of each loop that occurs once in a forward pass: the first of those that repeat least often. The
        # layers of a list have one stack, which repeats in a pass; in a loop that ran once others do not repeat.
        counts: dict[str, Counter[int]] = defaultdict(Counter)
        for block in self.all_blocks:
            if block.phase == FORWARD:
                counts[block.kind.loop][id(block.kind)] += 1
        markers = set()
        for stacks in counts.values():
            once = sum(count == 1 for count in stacks.values())
            if next(iter(stacks.values())) > 1 and 5 * once < len(stacks):
                least = min(count for count in stacks.values() if count > 1)
                markers.add(next(stack for stack, count in stacks.items() if count == least))
        return markers

    def phase_at(self, event: int) -> StepPhase:
        """Return the phase at an event."""
        return self.phases[bisect_right(self._starts, event) - 1]

    def _part(self, block: HeldBlock, phase: StepPhase, weights: set[int]) -> str:
        if block.kind.part:
            return block.kind.part
        is_weight = block.size in weights
        if block.phase not in _PHASES:
            is_gradient = not self.events and self.has_frames and is_weight
            return TENSORS if block.phase == USER else "gradients" if is_gradient else BEFORE
        is_freed = block.died != NEVER and self.phase_at(block.died) is phase
        if block.phase == BACKWARD:
            is_last = block.died == NEVER and phase is self.phases[-1]
            return "gradients" if (is_weight if is_last and weights else not is_freed) else "temporaries"
        return "temporaries" if is_freed else "activations" if block.phase == FORWARD else "optimizer_state"

    def of(self, part: str = "", mark: str = "") -> list[HeldBlock]:
        """Return a part's blocks at the moment, with a mark of their stacks."""
        return [b for b in self.blocks if part in ("", b.part) and (not mark or mark in b.kind.marks)]

    def is_evaluation(self, blocks: list[HeldBlock]) -> bool:
        """Return True if the blocks are of forward passes after which no backward pass comes."""
        has_backward = any(phase.name == BACKWARD for phase in self.phases)
        is_first = self.moment == OOM and self.last_pass == 1  # of a training, maybe
        marked = [block for block in blocks if EVALUATION in block.kind.marks]
        return not (has_backward or is_first) or size_of(marked) > size_of(blocks) / 2


def size_of(blocks: list[HeldBlock]) -> int:
    """Return the bytes of blocks."""
    return sum(block.size for block in blocks)


def read_history(data: Any) -> History:
    """Return the history of the device that ran out of memory, or else of the one with the most blocks.

    `data` is what a snapshot holds: a dict, or a list of segments as of `torch.cuda.memory_snapshot()`. Raises
    SourceError for another structure.
    """
    snapshot: dict[str, Any] = {"segments": data} if isinstance(data, list) else data if isinstance(data, dict) else {}
    segments, traces = (snapshot.get(key, []) for key in ("segments", "device_traces"))
    if not isinstance(segments, list) or not isinstance(traces, list) or not (segments or any(traces)):
        raise SourceError("not a memory snapshot: it has neither segments nor events")
    reader = _Reader()
    devices: dict[int, list[dict[str, Any]]] = defaultdict(list)
    events = {device: trace_events for device, trace in enumerate(traces) if (trace_events := reader.dicts(trace))}
    for segment in reader.dicts(segments):
        devices[_whole(segment.get("device", 0))].append(segment)
    histories = [reader.history(devices[device], events.get(device, [])) for device in sorted({*devices, *events})]
    return max(histories, key=lambda history: (history.oom is not None, size_of(history.all_blocks))).complete()


class _Reader:
    """A file's reader; a stack is its frames' lines and names, whether or not its frames are the same objects."""

    def __init__(self) -> None:
        self.frames: dict[int, int] = {}  # the number of a frame by its object, which is quick, and by its content
        self.numbers: dict[str, int] = {}
        self.known: dict[tuple[int, ...], StackKind] = {}
        self.left = MAX_ITEMS

    def dicts(self, items: Any) -> list[dict[str, Any]]:
        self.left -= len(items) if isinstance(items, list) else 0
        if self.left < 0:
            raise SourceError(f"more than {MAX_ITEMS:,} segments, blocks and events")
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise SourceError("not a memory snapshot: a segment, a block or an event is not a dict")
        return items

    def stack(self, frames: Any) -> StackKind:
        key = tuple(map(self._frame, frames)) if isinstance(frames, list) else ()
        if key not in self.known:
            self.known[key] = stack_kind(frames)
        return self.known[key]

    def _frame(self, frame: Any) -> int:
        number = self.frames.get(id(frame))
        if number is None:
            parts = [frame.get(key) for key in ("filename", "line", "name")] if isinstance(frame, dict) else frame
            number = self.numbers.setdefault(repr(parts), len(self.numbers))
            self.frames[id(frame)] = number
        return number

    def history(self, segments: list[dict[str, Any]], trace: list[dict[str, Any]]) -> History:
        history = History(events=len(trace))
        at_end = self.segments(history, segments)
        seen: set[int] = set()  # addresses; one that is freed first has a block from before the recording
        live, freed, allocated = dict[int, HeldBlock](), list[HeldBlock](), list[HeldBlock]()
        reserved = total = most = 0  # since the recording began
        for event, entry in enumerate(trace):
            action = entry.get("action")
            if action == "alloc":
                address, size = _whole(entry.get("addr")), _whole(entry.get("size"))
                live[address] = block = HeldBlock(size, self.stack(entry.get("frames")), event)
                allocated.append(block)
                seen.add(address)
                total += size
                if total > most:
                    most, history.peak = total, event
            elif action in _FREED:
                address = _whole(entry.get("addr"))
                if address not in seen:
                    freed.append(live.setdefault(address, HeldBlock(_whole(entry.get("size")), NO_STACK)))
                    seen.add(address)
                if address in live:
                    live[address].died = event
                    total -= live.pop(address).size
            elif action in _RESERVED:
                reserved += _RESERVED[action] * _whole(entry.get("size"))
                history.reserved.append((event, reserved))
            elif action == "oom":
                free = entry.get("device_free")
                is_size = isinstance(free, int) and 0 <= free < _LARGEST
                history.oom = event, _whole(entry.get("size")), free if is_size else None
                history.oom_kind = self.stack(entry.get("frames"))
        history.all_blocks = [*freed, *(block for address, block in at_end.items() if address not in seen), *allocated]
        before = history.end_bytes - reserved
        history.reserved = [(event, size + before) for event, size in history.reserved]
        return history

    def segments(self, history: History, segments: list[dict[str, Any]]) -> dict[int, HeldBlock]:
        blocks = {}
        for segment in segments:
            address, total = _whole(segment.get("address")), _whole(segment.get("total_size"))
            history.end_bytes += total
            if segment.get("segment_pool_id", (0, 0)) not in ((0, 0), [0, 0]):
                history.private_bytes += total
            for block in self.dicts(segment.get("blocks")):
                size, state = _whole(block.get("size")), block.get("state")
                if state == "active_allocated":
                    wanted = _whole(block.get("requested_size", size))
                    blocks[address] = HeldBlock(wanted, self.stack(block.get("frames")))
                elif state == "inactive":
                    history.largest_free_bytes = max(history.largest_free_bytes, size)
                else:
                    history.waiting_bytes += size
                address += size
        return blocks


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        raise SourceError("not a memory snapshot: a size or an address is not a number")
    return value
