"""The snapshot for PyTorch's memory viewer."""

import pickle

from bertscope.memory.caching_allocator import snapshot
from bertscope.memory.trace import Block, MemoryEvent, MemoryTrace


def test_a_step_of_three_events_has_the_entries_that_a_reader_can_count():
    weight, product = Block("parameters", "linear", ""), Block("activations", "linear", "mm")
    events = (MemoryEvent(8, product, "forward", "linear", "mm"), MemoryEvent(-8, product, "backward", "linear", "mm"))
    found = pickle.loads(snapshot(MemoryTrace.of([(weight, 100)], events)))
    entries = found["device_traces"][0]
    assert [(entry["action"], entry["addr"], entry["size"]) for entry in entries] == [
        ("alloc", 512, 100), ("alloc", 1124, 8), ("free_requested", 1124, 8), ("free_completed", 1124, 8),
    ]  # fmt: skip
    assert [frame["name"] for frame in entries[1]["frames"]] == ["mm", "linear", "activations, forward"]
