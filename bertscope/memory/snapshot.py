"""The file of a trace for PyTorch's memory viewer (pytorch.org/memory_viz, or torch.cuda._memory_viz)."""

import struct
from collections.abc import Iterator
from itertools import chain
from typing import Any

from bertscope.memory.trace import MemoryEvent, MemoryTrace

_STEP_BYTES = 512
_BATCH = 1000  # items for one instruction, as in the standard library


def snapshot(trace: MemoryTrace) -> bytes:
    """Return the pickle that `torch.cuda.memory._dump_snapshot` would write for the step, with invented addresses."""
    entries = list(_entries(trace))
    return pickled({"segments": [], "device_traces": [entries]})


def _entries(trace: MemoryTrace) -> Iterator[dict[str, Any]]:
    addresses: dict[int, int] = {}  # of the blocks by number
    next_address = _STEP_BYTES
    before = [MemoryEvent(size, block, "before the step", "", "") for block, size in trace.state]
    events = (*before, *trace.events)
    steps = [*enumerate(range(len(before))), *((event + len(before), number) for event, number in trace.matched())]
    for time, (event, number) in enumerate(steps):
        size, block, phase, *_ = events[event]
        if number >= 0:
            addresses[number] = next_address
            next_address += size + _STEP_BYTES
        names = (block.operator or "(before the step)", block.path or "(model)", f"{block.part}, {phase}")
        frames = [{"name": name, "filename": "", "line": 0} for name in names]
        for action in ("alloc",) if number >= 0 else ("free_requested", "free_completed"):
            yield {"action": action, "addr": addresses[max(number, ~number)], "size": abs(size), "stream": 0,
                   "frames": frames, "time_us": time}  # fmt: skip


def pickled(value: Any) -> bytes:
    """Return the pickle, protocol 4, of dicts, lists, text and integers, which are all that a snapshot needs."""
    return b"".join((b"\x80\x04", *_instructions(value, {}), b"."))


def _instructions(value: Any, memo: dict[str, int]) -> Iterator[bytes]:
    """Yield the instructions that push a value; a repeated text comes from the memo."""
    if isinstance(value, (dict, list)):
        is_dict = isinstance(value, dict)
        yield b"}" if is_dict else b"]"
        items = list(value.items()) if isinstance(value, dict) else [(item,) for item in value]
        for start in range(0, len(items), _BATCH):
            yield b"("
            for item in chain.from_iterable(items[start : start + _BATCH]):
                yield from _instructions(item, memo)
            yield b"u" if is_dict else b"e"
    elif isinstance(value, str) and value in memo:
        yield struct.pack("<cI", b"j", memo[value])
    elif isinstance(value, str):
        memo[value] = len(memo)
        text = value.encode("utf-8", "surrogatepass")
        yield struct.pack("<cI", b"X", len(text)) + text + b"\x94"
    elif type(value) is int:
        size = value.bit_length() // 8 + 1
        yield struct.pack("<BB", 0x8A, size) + value.to_bytes(size, "little", signed=True)
    else:
        raise TypeError(f"a snapshot holds no {type(value).__name__}")
