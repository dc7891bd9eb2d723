"""A tape as PyTorch's own memory viewer reads it (pytorch.org/memory_viz, or torch.cuda._memory_viz)."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from bertscope.analyses.tape import Block, Event, Tape

_STEP_BYTES = 512


def snapshot(tape: Tape) -> bytes:
    """The pickle that `torch.cuda.memory._dump_snapshot` would write of such a step; addresses are made up."""
    state = (Event(size, block, "before the step", "", "") for block, size in tape.state)
    entries = list(_entries((*state, *tape.events)))
    return pickle.dumps({"segments": [], "device_traces": [entries]})


def _entries(events: tuple[Event, ...]) -> Iterator[dict[str, Any]]:
    """Comings and goings; of equal blocks the last that came goes first."""
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


def _entry(action: str, address: int, event: Event, number: int) -> dict[str, Any]:
    block = event.block
    names = (block.operator or "(before the step)", block.path or "(model)", f"{block.part}, {event.phase}")
    frames = [{"name": name, "filename": "", "line": 0} for name in names]
    size = abs(event.size_bytes)
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames, "time_us": number}
