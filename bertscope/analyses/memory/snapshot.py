"""The file of a trace for PyTorch's memory viewer (pytorch.org/memory_viz, or torch.cuda._memory_viz)."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from typing import Any

from bertscope.analyses.memory.events import Block, MemoryEvent, MemoryTrace

_STEP_BYTES = 512
_BATCH = 1000  # items for one instruction, as in the standard library


def snapshot(trace: MemoryTrace) -> bytes:
    """Return the pickle that `torch.cuda.memory._dump_snapshot` would write for the step, with invented addresses."""
    state = (MemoryEvent(size, block, "before the step", "", "") for block, size in trace.state)
    entries = list(_entries((*state, *trace.events)))
    return pickled({"segments": [], "device_traces": [entries]})


def _entries(events: tuple[MemoryEvent, ...]) -> Iterator[dict[str, Any]]:
    """Yield allocations and frees; of equal blocks the newest is freed first."""
    held: dict[tuple[Block, int], list[int]] = defaultdict(list)
    address = _STEP_BYTES
    for number, event in enumerate(events):
        same = held[event.block, abs(event.size_bytes)]
        if event.size_bytes > 0:
            same.append(address)
            yield _entry("alloc", address, event, number)
            address += event.size_bytes + _STEP_BYTES
        elif same:
            place = same.pop()
            yield _entry("free_requested", place, event, number)
            yield _entry("free_completed", place, event, number)


def _entry(action: str, address: int, event: MemoryEvent, number: int) -> dict[str, Any]:
    block = event.block
    names = (block.operator or "(before the step)", block.path or "(model)", f"{block.part}, {event.phase}")
    frames = [{"name": name, "filename": "", "line": 0} for name in names]
    size = abs(event.size_bytes)
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames, "time_us": number}


def pickled(value: Any) -> bytes:
    """Return the pickle, protocol 4, of dicts, lists, text, integers and None, which are all that a snapshot needs."""
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
    elif value is None:
        yield b"N"
    elif type(value) is int:
        size = value.bit_length() // 8 + 1
        yield struct.pack("<BB", 0x8A, size) + value.to_bytes(size, "little", signed=True)
    else:
        raise TypeError(f"a snapshot holds no {type(value).__name__}")
