"""The snapshot for PyTorch's memory viewer: a pickle that this package writes without the pickle module."""

from __future__ import annotations

import io
import pickle
import pickletools

import pytest

from bertscope.memory.caching_allocator import pickled, snapshot
from bertscope.memory.trace import Block, MemoryEvent, MemoryTrace

# The instructions that the viewer's own reader knows (pytorch, torch/utils/viz/MemoryViz.js, unpickleData).
VIEWER = {"PROTO", "EMPTY_DICT", "EMPTY_LIST", "MARK", "SETITEMS", "APPENDS", "BINUNICODE", "MEMOIZE", "LONG_BINGET",
          "LONG1", "STOP"}  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        {"segments": [], "device_traces": [[{"addr": 512, "frames": [{"name": "add", "filename": "", "line": 0}]}]]},
        [0, 1, -1, 127, 128, 255, 256, -128, -129, 2**31, -(2**31), 2**62, 2**63, -(2**63), 2**200],
        ["", "a", "a", "é", "\ud800", "\n\x00", "x" * 70_000, {"a": [0]}],
        [{"n": number, "name": f"name {number % 300}"} for number in range(2500)],
        {str(number): [number] for number in range(2500)},
        [],
        {},
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_pickle_gives_the_same_value_and_uses_what_the_viewer_reads(value):
    written = pickled(value)
    assert pickle.loads(written) == value
    assert {instruction.name for instruction, _, _ in pickletools.genops(written)} <= VIEWER
    assert pickle.loads(pickletools.optimize(written)) == value
    pickletools.dis(written, out=io.StringIO())  # raises where the stack does not fit


@pytest.mark.parametrize("value", [True, None, 1.5, (1,), b"x", object()], ids=lambda value: type(value).__name__)
def test_what_no_snapshot_holds_is_refused(value):
    with pytest.raises(TypeError, match="a snapshot holds no"):
        pickled([value])


def test_a_step_of_three_events_has_the_entries_that_a_reader_can_count():
    weight, product = Block("parameters", "linear", ""), Block("activations", "linear", "mm")
    events = (MemoryEvent(8, product, "forward", "linear", "mm"), MemoryEvent(-8, product, "backward", "linear", "mm"))
    found = pickle.loads(snapshot(MemoryTrace.of([(weight, 100)], events)))
    entries = found["device_traces"][0]
    assert [(entry["action"], entry["addr"], entry["size"]) for entry in entries] == [
        ("alloc", 512, 100), ("alloc", 1124, 8), ("free_requested", 1124, 8), ("free_completed", 1124, 8),
    ]  # fmt: skip
    assert [frame["name"] for frame in entries[1]["frames"]] == ["mm", "linear", "activations, forward"]
