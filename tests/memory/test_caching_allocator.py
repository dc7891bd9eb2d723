"""CUDA's semantics and its caching allocator, replayed: laws, and figures of other programs."""

import functools
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bertscope import load
from bertscope.errors import SelectionError
from bertscope.gpus import find_gpu
from bertscope.memory.caching_allocator import Allocator, SegmentBlock, replayed, requests, snapshot
from bertscope.memory.estimate import MemoryTraces
from bertscope.memory.kernel_rules import by_thread, overhead, workspace_bytes
from bertscope.memory.kernels import cuda_semantics
from bertscope.memory.simulator import Simulator
from bertscope.memory.step import moved_tensors
from bertscope.memory.summary import device_cost, step_cost
from bertscope.memory.trace import Block, MemoryEvent, MemoryTrace
from bertscope.settings.run_config import RunConfig
from tests.conftest import EVERY_CASE
from tests.memory.steps import estimated_trace, small

MIB, GIB = 2**20, 2**30
SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(1, 64 * MIB))


def rounded(size: int) -> int:
    return -(-size // 512) * 512


DEFAULT, EXPANDABLE = False, True  # expandable_segments


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 10**6)), max_size=60), st.booleans())
def test_the_allocator_reserves_what_is_used_and_in_the_end_has_whole_segments_free(moves, conf):
    allocator, used = Allocator(expandable_segments=conf), []
    for takes, size, choice in moves:
        if takes or not used:
            block = allocator.malloc(size, ("", "gather")[choice % 2])
            assert block.size >= rounded(size)
            used.append((block, block.size))
        else:
            allocator.free(used.pop(choice % len(used))[0])
        assert all(block.size == size and not block.is_free for block, size in used)
        free = sum(size for pool in allocator.free_blocks.values() for size, _, _ in pool)
        assert free + sum(size for _, size in used) == allocator.reserved_bytes <= allocator.peak_reserved_bytes
    while used:
        allocator.free(used.pop()[0])
    blocks = [block for pool in allocator.free_blocks.values() for _, _, block in pool]
    assert all(block.is_free for block in blocks)
    assert all(block.before is block.after is None or is_all_that_is_mapped(block) for block in blocks)
    assert sum(block.size for block in blocks) == allocator.reserved_bytes
    allocator.release_free_memory()
    assert allocator.reserved_bytes == 0


@pytest.mark.parametrize("conf", [DEFAULT, EXPANDABLE])
def test_a_free_block_serves_only_requests_its_stream(conf):
    """40 MiB that are free in the stream of computation do not serve that of FSDP2's all-gather."""
    allocator = Allocator(expandable_segments=conf)
    allocator.free(allocator.malloc(40 * MIB))
    gathered = allocator.malloc(40 * MIB, "gather")
    assert allocator.reserved_bytes == 80 * MIB
    allocator.free(gathered)
    allocator.malloc(40 * MIB, "gather")
    allocator.malloc(40 * MIB)
    assert allocator.reserved_bytes == 80 * MIB


def is_all_that_is_mapped(block: SegmentBlock) -> bool:
    return block.before is None and block.after is not None and not block.after.is_mapped


@settings(max_examples=40, deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=40), st.integers(1, 200), st.booleans())
def test_a_limit_is_obeyed_or_what_is_missing_is_told(sizes, limit_mib, conf):
    allocator = Allocator(limit_bytes=limit_mib * MIB, expandable_segments=conf)
    for size in sizes:
        allocator.malloc(size)
    assert (allocator.peak_reserved_bytes > limit_mib * MIB) == (allocator.missing_bytes > 0)


@pytest.mark.parametrize(
    ("sizes", "reserved"),
    [([1], 2), ([MIB], 2), ([MIB + 1], 20), ([10 * MIB - 512], 20), ([10 * MIB], 10), ([11 * MIB], 12),
     ([MIB, MIB, MIB], 4), ([6 * MIB, 6 * MIB, 6 * MIB], 20), ([6 * MIB] * 4, 40)],
)  # fmt: skip
def test_segments_are_of_2_and_20_mib_or_their_own(sizes, reserved):
    allocator = Allocator()
    for size in sizes:
        allocator.malloc(size)
    assert allocator.reserved_bytes == reserved * MIB


def test_the_smallest_free_block_that_fits_is_taken_and_small_sizes_never_take_from_large():
    allocator = Allocator()
    blocks = [allocator.malloc(size * MIB) for size in (40, 12, 30)]
    for block in blocks:
        allocator.free(block)
    assert allocator.malloc(25 * MIB) is blocks[2]
    allocator.malloc(512)
    assert allocator.reserved_bytes == 84 * MIB


def test_where_memory_runs_out_free_segments_go_back_first():
    allocator = Allocator(limit_bytes=50 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    allocator.malloc(40 * MIB)
    assert (allocator.reserved_bytes, allocator.missing_bytes) == (40 * MIB, 0)


# Settings of the allocator, by hand and by torch's own comment.


def test_an_expandable_segment_grows_by_pages_where_others_take_new_segments():
    sizes = (30, 40, 50)  # each does not fit where the one before was
    reserved = {}
    for conf in (DEFAULT, EXPANDABLE):
        allocator = Allocator(expandable_segments=conf)
        for size in sizes:
            allocator.free(allocator.malloc(size * MIB))
        allocator.malloc(512)
        reserved[conf] = allocator.reserved_bytes // MIB
    assert reserved == {DEFAULT: 30 + 40 + 50 + 2, EXPANDABLE: 60 + 2}


def test_free_pages_between_used_ones_are_returned_at_the_limit_and_mapped_again():
    allocator = Allocator(limit_bytes=100 * MIB, expandable_segments=True)
    _, second, third = (allocator.malloc(20 * MIB) for _ in range(3))
    allocator.free(second)
    large = allocator.malloc(60 * MIB)
    assert (allocator.reserved_bytes, allocator.missing_bytes) == (100 * MIB, 0)
    assert large.address > third.address
    allocator.free(large)
    assert allocator.malloc(15 * MIB).address > third.address
    assert allocator.malloc(50 * MIB).size == 50 * MIB
    assert allocator.reserved_bytes <= 120 * MIB


# The order of a run.


def made(part: str, path: str, size: int, phase: str = "") -> MemoryEvent:
    return MemoryEvent(size, Block(part, path, ""), phase, path, "")


def test_tensors_lie_in_the_order_in_which_a_model_is_moved():
    """Those of children before a module's, buffers between: where the rests of segments lie depends on it."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.ones(7))
            self.scale = nn.Parameter(torch.ones(5))
            self.inner = nn.Linear(3, 2)

    model = nn.Sequential(nn.Embedding(11, 3), Part(), nn.BatchNorm1d(4), nn.Linear(3, 11, bias=False))
    model[3].weight = model[0].weight
    order = []

    class Moves(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            order.extend([id(args[0])] * (operator is torch.ops.aten._to_copy.default))
            return operator(*args, **(kwargs or {}))

    known = list(dict.fromkeys(map(id, moved_tensors(model))))
    with Moves():
        model.to("meta")
    assert list(dict.fromkeys(order)) == known
    assert known != list(map(id, (*model.parameters(), *model.buffers())))


def test_a_run_begins_with_the_parameters_and_lays_down_the_state_in_the_first_optimizer_step():
    state = [("parameters", "a.weight"), ("parameters", "b.weight"), ("optimizer_state", "a.weight.exp_avg"),
             ("optimizer_state", "b.weight.exp_avg")]  # fmt: skip
    events = (
        made("activations", "a", 100, "forward"), made("gradients", "a", 10, "backward"),
        made("activations", "a", -100, "backward"), made("temporaries", "a", 5, "optimizer"),
        made("temporaries", "a", -5, "optimizer"), made("gradients", "a", -10, "optimizer"),
    )  # fmt: skip
    trace = MemoryTrace.of(tuple((Block(part, path, ""), 10) for part, path in state), events)
    run = requests(trace)
    assert run.start == [0, 1]
    assert run.first == [4, 5, ~4, 2, 3, 7, ~7, ~5]  # the activation is free when the state comes, the gradient is not
    assert run.step == [4, 5, ~4, 7, ~7, ~5]
    assert [run.sizes[number] for number in (0, 2, 4, 5, 7)] == [10, 10, 100, 10, 5]


def test_gradients_that_stay_are_laid_down_where_the_first_backward_pass_reaches_their_module():
    trace = MemoryTrace.of(
        ((Block("parameters", "a.weight", ""), 10), (Block("gradients", "a.weight", ""), 10)),
        (made("activations", "a", 100, "forward"), made("temporaries", "a", 7, "backward"),
         made("temporaries", "a", -7, "backward"), made("activations", "a", -100, "backward")),
    )  # fmt: skip
    run = requests(trace)
    assert (run.start, run.step) == ([0], [2, 3, ~3, ~2])
    assert run.first == [2, 1, 3, ~3, ~2, *run.step]


def test_whole_gradients_that_the_last_micro_batch_reduces_are_laid_down_by_one_that_reduces_nothing():
    trace = MemoryTrace.of(
        ((Block("parameters", "a.weight", ""), 10), (Block("gradients", "a.weight", ""), 10)),
        (made("activations", "a", 100, "forward"), made("activations", "a", -100, "backward"),
         MemoryEvent(5, Block("gradients", "a", "empty"), "backward", "a", "empty"),
         MemoryEvent(-10, Block("gradients", "a.weight", ""), "backward", "a", "chunk_cat"),
         MemoryEvent(-5, Block("gradients", "a", "empty"), "optimizer", "", "")),
    )  # fmt: skip
    run = requests(trace)
    assert run.step == run.first == [2, 1, ~2, 2, ~2, 4, ~1, ~4]
    sharded = {"strategy": "fsdp", "world_size": 2, "accumulate": 2, "sync_each_batch": False}
    for more in ({}, {"keep_gradients": True}):
        found = estimated_trace(small(), RunConfig.of({"batch": 4, "seq": 32, "device": "cuda", **sharded, **more}))
        assert replayed(requests(found)).peak_reserved_bytes >= found.peak_bytes


@pytest.mark.parametrize(
    "fields",
    [{}, {"checkpointing": "full"}, {"keep_gradients": True}, {"accumulate": 2}, {"optimizer": "sgd"},
     {"ema": True, "accumulate": 3, "keep_gradients": True}, {"mode": "inference"},
     {"optimizer_implementation": "loop"}],
    ids=str,
)  # fmt: skip
def test_each_loop_reserves_at_least_its_peak_and_leaves_only_its_state(fields):
    run_config = RunConfig(batch=4, seq=32, device="cuda", **fields)
    trace = estimated_trace(small(), run_config)
    for conf in (DEFAULT, EXPANDABLE):
        allocator, more = (replayed(requests(trace), expandable_segments=conf, steps=steps) for steps in (4, 6))
        peak = allocator.peak_reserved_bytes
        assert peak >= trace.peak_bytes
        assert more.peak_reserved_bytes == peak  # three steps with the state are enough
        free = sum(size for pool in allocator.free_blocks.values() for size, _, _ in pool)
        if fields != {"accumulate": 2}:  # zero_grad frees the gradients of the micro-batch before
            assert allocator.reserved_bytes - free == trace.state_bytes
        assert replayed(requests(trace), peak, expandable_segments=conf).missing_bytes == 0
        assert replayed(requests(trace), trace.state_bytes, expandable_segments=conf).missing_bytes > 0
        terms = step_cost(trace, {}, **device_cost(trace, replace(run_config, expandable_segments=conf)))
        tails = terms.max_allocated_bytes - trace.peak_bytes - terms.workspace_bytes  # the rests of blocks above 1 MiB
        assert 0 <= tails < MIB * len(trace.events)
        asked = requests(trace, by_thread(run_config, terms.workspace_bytes))
        assert terms.reserved_bytes == replayed(asked, expandable_segments=conf).peak_reserved_bytes


@pytest.mark.parametrize(("checkpointing", "more"), [("full", 1.15), ("none", 1.03)][: 1 + EVERY_CASE])
def test_a_large_run_needs_no_more_with_expandable_segments(checkpointing, more):
    run_config = RunConfig(batch=6, seq=512, device="cuda", checkpointing=checkpointing)
    trace = traces("bert-base-uncased", "BertForMaskedLM").trace(run_config)
    default, expandable = (
        replayed(requests(trace), expandable_segments=conf).peak_reserved_bytes for conf in (DEFAULT, EXPANDABLE)
    )
    assert trace.peak_bytes <= expandable <= min(default, more * trace.peak_bytes)


def test_equal_blocks_of_a_tape_are_given_back_last_come_first():
    block = Block("temporaries", "", "add")
    sizes = (30 * MIB, 30 * MIB, -30 * MIB, 20 * MIB, -20 * MIB, -30 * MIB)
    trace = MemoryTrace.of((), tuple(MemoryEvent(size, block, "forward", "", "add") for size in sizes), 512)
    assert replayed(requests(trace), steps=1).peak_reserved_bytes == 60 * MIB


# What independent programs found for a masked language model with AdamW, none of it on a card: phase, GiB. The first
# ran a training loop on fake tensors of the device cuda, with the AutocastCUDA kernels of torch 2.13.
BASE, LARGE = "bert-base-uncased", "bert-large-uncased"
INDEPENDENT = [
    (BASE, {"precision": "autocast-fp16", "grad_scaler": True, "batch": 32, "seq": 128}, "forward", 3987.3 / 1024),
    *EVERY_CASE * (
        (BASE, {"precision": "autocast-bf16", "batch": 32, "seq": 128}, "backward", 4213.5 / 1024),
        (BASE, {"precision": "autocast-bf16", "batch": 16, "seq": 512, "checkpointing": "full"}, "forward",
         3771.3 / 1024),
    ),
    (LARGE, {"precision": "fp32", "batch": 32, "seq": 512}, "backward", 34.4),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "phase", "gib"), INDEPENDENT)
def test_the_figures_of_an_independent_program_come_out(name, settings, phase, gib):
    source = load(name, architecture="BertForMaskedLM", attention="sdpa")
    found = Simulator(source).memory(RunConfig(device="cuda", loop="freed", **settings))
    peaks = {found.phase: found.peak_bytes / GIB for found in found.phases}
    assert peaks[phase] == pytest.approx(gib, rel=1e-4 if name == BASE else 0.01)
    assert found.cost.reserved_bytes >= found.cost.max_allocated_bytes > found.cost.peak_bytes


def test_torch_is_as_it_was_after_cuda_has_been_imitated():
    functional = torch.nn.functional
    before = dict(vars(functional))
    with cuda_semantics(RunConfig(device="cuda")):
        assert functional.dropout is not before["dropout"]
    with pytest.raises(SelectionError):
        Simulator(small()).memory(RunConfig(seq=4096, device="cuda"))
    assert dict(vars(functional)) == before


@pytest.mark.parametrize(("mode", "threads"), [("inference", 1), ("forward", 1), ("training", 2)])
def test_cublas_takes_a_workspace_for_each_thread_that_multiplies(mode, threads, monkeypatch):
    run_config = RunConfig(mode=mode, device="cuda")
    assert (
        workspace_bytes(run_config, (8, 0)) == threads * (2 * 4096 + 8 * 16) * 1024 + MIB
    )  # :4096:2:16:8, in KiB; cuBLASLt's
    assert workspace_bytes(run_config, (9, 0)) == threads * 32 * MIB + MIB
    for capability in ((9, 0), (8, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr("bertscope.memory.kernel_rules.may_have_cuda", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda now=capability: now)
        assert workspace_bytes(run_config) == workspace_bytes(run_config, capability)
    for name, size in (("h200", 32 * MIB), ("a100-80gb", 8_519_680)):
        assert overhead(run_config, 0, find_gpu(name)).highest_bytes == threads * size + MIB


@functools.cache
def traces(preset: str, architecture: str) -> MemoryTraces:
    """The traces of a preset with eager attention, with one proof for all batches and lengths."""
    return MemoryTraces(load(preset, architecture=architecture, attention="eager"))


@pytest.mark.parametrize(("model", "seq", "batch"), [("large", 320, 1), ("base", 512, 6)][: 1 + EVERY_CASE])
def test_what_ran_on_a_titan_x_of_12_gb_is_not_estimated_as_out_of_memory(model, seq, batch):
    """README of google-research/bert: Adam, fp32, fine-tuning with TensorFlow."""
    run_config = RunConfig(batch=batch, seq=seq, optimizer="adam", device="cuda")
    trace = traces(f"bert-{model}-uncased", "BertForSequenceClassification").trace(run_config)
    terms = step_cost(trace, {}, **device_cost(trace, run_config))
    assert terms.max_allocated_bytes + terms.context.high_bytes <= 12e9
    assert terms.reserved_bytes + terms.context.low_bytes <= 12 * GIB


# Published one-sided: what is known to run must not be estimated as out of memory.


def test_the_reformer_posts_slope_is_what_a_layer_keeps():
    """Hugging Face, "The Reformer": bert-base's sizes, batch 8 x 512, forward and backward, MiB by layers.

    Their 414 MiB a layer are 66 h + 9 a s for every token, what a layer keeps in fp32 with dropout. The peak
    that is estimated grows by the layer's 27 MiB of parameters more.
    """
    published = {4: 4103, 8: 5759, 12: 7415}
    assert {published[8] - published[4], published[12] - published[8]} == {4 * 414}
    source = load("bert-base-uncased", architecture="BertForMaskedLM", attention="eager")
    run_config = RunConfig(batch=8, seq=512, optimizer="none", device="cuda")
    four, eight = (
        Simulator(replace(source, config=replace(source.config, num_hidden_layers=layers))).memory(run_config)
        for layers in (4, 8)
    )
    assert (eight.cost.saved_bytes - four.cost.saved_bytes) / 4 == 8 * 512 * (66 * 768 + 9 * 12 * 512 + 16)
    assert (eight.cost.saved_bytes - four.cost.saved_bytes) / 4 / MIB == pytest.approx(414, abs=0.1)
    assert (eight.peak.peak_bytes - four.peak.peak_bytes) / 4 / MIB == pytest.approx(414 + 27, abs=0.2)


def test_a_workspace_of_backward_splits_a_free_block_that_the_next_step_needs_whole():
    """cuBLAS's workspace is laid down by the first product of a thread, and stays (torch's CublasHandlePool.cpp)."""
    scores, gradient = Block("activations", "scores", ""), Block("gradients", "weight", "")
    events = (
        MemoryEvent(100 * MIB, scores, "forward", "", "addmm"),
        MemoryEvent(-100 * MIB, scores, "backward", "", "mm"),
        MemoryEvent(12 * MIB, gradient, "backward", "", "mm"),
        MemoryEvent(-12 * MIB, gradient, "optimizer", "", ""),
    )
    trace = MemoryTrace.of((), events, 512)
    assert replayed(requests(trace)).peak_reserved_bytes == 100 * MIB
    run = requests(trace, (("forward", 32 * MIB), ("backward", 32 * MIB)))
    assert run.first == [0, 4, ~0, 2, 5, ~2]
    assert run.step == [0, ~0, 2, ~2]
    assert replayed(run, steps=1).peak_reserved_bytes == 132 * MIB  # the second lies in the block of the scores
    assert replayed(run).peak_reserved_bytes == 232 * MIB  # not 164: the scores need another block
    without = MemoryTrace.of((), tuple(event._replace(operator="add") for event in events), 512)
    assert requests(without, (("forward", MIB),)).first[0] == 4  # a step without products: first of all


def test_the_step_counters_of_a_fused_optimizer_are_on_the_card():
    source = small()

    def state(implementation: str) -> int:
        run_config = RunConfig(batch=1, seq=4, device="cuda", optimizer_implementation=implementation)
        return sum(size for block, size in estimated_trace(source, run_config).state if block.path.endswith(".step"))

    trained = sum(param.requires_grad for path, param in source.build().named_parameters() if "pooler" not in path)
    assert (state("default"), state("fused")) == (0, 4 * trained)  # torch's scalars of float32


def test_a_step_of_three_events_has_the_entries_that_a_reader_can_count():
    weight, product = Block("parameters", "linear", ""), Block("activations", "linear", "mm")
    events = (MemoryEvent(8, product, "forward", "linear", "mm"), MemoryEvent(-8, product, "backward", "linear", "mm"))
    found = pickle.loads(snapshot(MemoryTrace.of([(weight, 100)], events)))
    entries = found["device_traces"][0]
    assert [(entry["action"], entry["addr"], entry["size"]) for entry in entries] == [
        ("alloc", 512, 100), ("alloc", 1124, 8), ("free_requested", 1124, 8), ("free_completed", 1124, 8),
    ]  # fmt: skip
    assert [frame["name"] for frame in entries[1]["frames"]] == ["mm", "linear", "activations, forward"]
