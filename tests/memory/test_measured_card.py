"""Compare the simulation with an NVIDIA H200: allocator traces, a profiler trace, and measured peaks."""

import csv
import gzip
import json
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers

from bertscope.gpus import find_gpu, gpu_threads
from bertscope.measure.profiler_run import _EventReader
from bertscope.memory.caching_allocator import Allocator
from bertscope.memory.kernel_rules import SUM, Scratch
from bertscope.memory.kernels import cuda_semantics, kernel_for
from bertscope.memory.step import moved_tensors
from bertscope.memory.summary import memory
from bertscope.memory.trace import Block, MemoryEvent, MemoryTrace
from bertscope.reports.step import ByteRange
from bertscope.settings.run_config import RunConfig
from bertscope.torch_access import torch
from tests.conftest import EVERY_CASE

DATA = Path(__file__).parents[1] / "data" / "h200"
ROWS = Path(__file__).parents[2] / "benchmarks" / "h200.csv"
THREADS = gpu_threads(find_gpu("h200"))


def stored(name):
    with gzip.open(DATA / f"{name}.json.gz", "rt") as file:
        return json.load(file)


@pytest.mark.parametrize("name", ["gpt2", "modernbert"])
def test_the_simulated_allocator_reserves_what_torch_reserved_on_a_card_for_the_same_requests(name):
    run, allocator, blocks = stored(name), Allocator(), []
    for number in run["requests"]:  # the bytes of a new block, or the complement of one that is freed
        if number >= 0:
            blocks.append(allocator.malloc(number))
        else:
            allocator.free(blocks[~number])
    assert allocator.peak_reserved_bytes == run["reserved_bytes"]
    assert allocator.peak_allocated_bytes == pytest.approx(run["allocated_bytes"], rel=1e-3)


@pytest.mark.parametrize("name", ["gpt2", "modernbert"])
def test_the_first_requests_on_a_card_are_those_of_the_tensors_in_the_order_of_a_move(name):
    """ModernBERT's rotary buffers come after the modules around them."""
    run = stored(name)
    model_class = getattr(transformers, run["spec"]["cls"])
    with torch.device("meta"):
        model = model_class(model_class.config_class())
    model.tie_weights()
    sizes = [tensor.nbytes for tensor in {id(tensor): tensor for tensor in moved_tensors(model)}.values()]
    assert sizes == run["requests"][: len(sizes)]


def test_a_segment_takes_the_lowest_range_of_32_mib_with_room_and_else_a_range_below_all_others():
    mib, allocator = 2**20, Allocator()
    addresses = [allocator.malloc(size * mib).address for size in (20, 20, 12, 40, 12)]
    assert addresses == [-32 * mib, -64 * mib, -44 * mib, -128 * mib, -88 * mib]


@pytest.mark.parametrize(
    ("outputs", "rows", "measured_bytes"),
    [(768, 4096, 25165824), (3072, 4096, 100663296), (768, 16384, 100663296), (3072, 16384, 138412032)],
)
def test_the_sum_of_a_gradient_over_rows_takes_the_buffer_that_a_card_took(outputs, rows, measured_bytes):
    assert Scratch(SUM, (outputs, rows, 4, THREADS)).size_bytes == measured_bytes


def test_a_sum_of_few_rows_or_on_a_small_card_takes_less():
    # By hand: 64 rows in 4 rows of threads leave each thread 16 values, fewer than the 256 at which blocks share a sum.
    assert Scratch(SUM, (768, 64, 4, THREADS)).size_bytes == 0
    # A T4 runs 40 x 1,024 threads, 320 blocks of 128: 14 for each of the 24 blocks of 3,072 outputs.
    threads = gpu_threads(find_gpu("t4"))
    assert Scratch(SUM, (3072, 4096, 4, threads)).size_bytes == 4 * 3072 * 14 * 32 * 4


def profiled(data):
    """Return a stored event as torch's profiler gives it."""
    device = SimpleNamespace(type=data.get("device", "").partition(":")[0])
    extra = {"alloc_size": data.get("size"), "ptr": data.get("ptr"), "device": device}
    return SimpleNamespace(
        name=data["name"], tag=data["tag"], start_tid=data["tid"], start_time_ns=data["start"],
        end_time_ns=data["end"], children=[profiled(child) for child in data["children"]],
        extra_fields=SimpleNamespace(sequence_number=data.get("seq", -1), **extra),
    )  # fmt: skip


def walked(event):
    yield event
    for child in event.children:
        yield from walked(child)


def test_the_backward_pass_of_a_card_which_another_thread_runs_is_read_in_its_own_step():
    """torch makes all events of the autograd thread children of the first step's backward pass."""
    events = [profiled(event) for event in stored("profile")]
    reader = _EventReader("cuda", gradients=[set() for _ in range(6)])
    reader.read_all(events)
    every = [event for root in events for event in walked(root)]
    restart = next(event.start_time_ns for event in every if event.name == "bertscope restart")
    own = [event for event in every if event.name == "[memory]" and event.extra_fields.device.type == "cuda"]
    second = sorted((event for event in own if event.start_time_ns > restart), key=lambda event: event.start_time_ns)
    sizes = [event.extra_fields.alloc_size for event in second]
    trace = reader.log.trace("cuda")
    read = [event.size_bytes for event in trace.events]
    assert sorted(read) == sorted(sizes)  # frees at one place come in the order of their allocations
    assert max(accumulate(read)) == max(accumulate(sizes))
    assert {event.phase for event in trace.events} == {"forward", "backward", "optimizer"}
    made = [
        event.path or event.operator for event in trace.events if event.phase == "backward" and event.size_bytes > 0
    ]
    assert len(made) > 8


def bias_by_heads():
    """Return a bias as T5 makes it: a table of positions and heads, seen as heads and positions."""
    return torch.randn(16, 16, 4).permute(2, 0, 1).unsqueeze(0)


@pytest.mark.parametrize(("is_copied", "kernel"), [(False, "_safe_softmax"), (True, "efficient_attention")])
def test_a_bias_whose_numbers_do_not_lie_side_by_side_takes_the_kernel_that_torch_took_on_a_card(is_copied, kernel):
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            seen.append(operator.name())
            return operator(*args, **(kwargs or {}))

    query, bias = torch.randn(1, 4, 16, 8), bias_by_heads()
    bias = bias.contiguous() if is_copied else bias
    with cuda_semantics(RunConfig(device="cuda")), torch._subclasses.FakeTensorMode() as mode, Watch():
        query, bias = mode.from_tensor(query), mode.from_tensor(bias)
        torch.nn.functional.scaled_dot_product_attention(query, query, query, bias)
    assert any(kernel in name for name in seen)


def test_cudnn_attention_is_not_chosen_for_a_mask_that_is_trained():
    """As measured for Swin, whose bias of positions is a parameter."""
    query, mask = torch.randn(1, 4, 16, 8).bfloat16(), torch.randn(1, 4, 16, 16).bfloat16()
    chosen = [kernel_for(query, query, query, each, "cudnn") for each in (None, mask, mask.clone().requires_grad_())]
    assert chosen == ["cudnn", "cudnn", "efficient"]


def own_rows():
    """Return rows of a BERT that needs no transformers, of which each has another kernel, dtype or recomputation."""
    with ROWS.open() as file:
        rows = [
            row for row in csv.DictReader(file) if row["model"] == "bert-base-uncased" and row["measured by"] == "loop"
        ]
    return [row for row in rows if "eager" not in row["options"] and "--padding" not in row["options"]]


@pytest.mark.parametrize("row", own_rows()[:: 1 if EVERY_CASE else 4], ids=lambda row: row["options"])
def test_a_loop_of_bert_took_on_a_card_what_is_estimated(cli, row):
    options = (*row["options"].split(), "--gpu", "h200", "--no-calibration", "--format", "json")
    device = cli("estimate", row["model"], *options).json["variants"][0]["estimated"]["cost"]
    assert device["max_allocated_bytes"] == pytest.approx(int(row["allocated bytes"]), rel=5e-4)
    assert device["reserved"]["low_bytes"] <= int(row["reserved bytes"]) <= device["reserved"]["high_bytes"]
    assert device["reserved"]["high_bytes"] < 1.03 * device["reserved"]["low_bytes"]


def test_a_measured_peak_above_the_reserved_bytes_counts_as_reserved():
    """The profiler's step and that of the allocator are two, and round differently."""
    product = Block("temporaries", "linear", "mm")
    events = [MemoryEvent(size, product, "forward", "linear", "mm") for size in (8, -8)]
    trace = MemoryTrace.of([(Block("parameters", "linear", ""), 1000)], events)
    cost = memory(
        trace, "measured", {}, reserved=ByteRange(low_bytes=1000, high_bytes=1000), context=ByteRange(high_bytes=500)
    ).cost
    assert (cost.peak_bytes, cost.reserved_bytes, cost.gpu_bytes) == (1008, 1008, 1508)
