"""The temporary memory of CPU kernels by its law, next to the allocator's events of the kernel."""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from bertscope.analyses.memory.kernels import cpu_products
from bertscope.analyses.memory.kernels.cpu_scratch import cpu_scratch
from bertscope.analyses.memory.kernels.scratch_rules import Scratch
from bertscope.torch_access import fake_tensor_mode, has_bf16_products

ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
CALLS = (
    "aten::convolution", "aten::convolution_backward", ATTENTION, f"{ATTENTION}_backward", "aten::_safe_softmax",
    "aten::native_layer_norm_backward", *(f"aten::{name}" for name in PRODUCTS),
)  # fmt: skip
BF16 = pytest.mark.skipif(
    not has_bf16_products(), reason="the law is that of oneDNN's kernels for AVX-512 with bf16 and without AMX"
)
# A class, its arguments, and the sizes of an input after the batch; the last says channels last.
CASES = [
    (torch.nn.Conv2d, {"in_channels": 3, "out_channels": 8, "kernel_size": 7, "stride": 2, "padding": 3}, (64, 64), 0),
    (torch.nn.Conv2d, {"in_channels": 20, "out_channels": 24, "kernel_size": 3, "padding": 1}, (16, 16), 0),
    (torch.nn.Conv2d, {"in_channels": 64, "out_channels": 64, "kernel_size": 3, "bias": False}, (12, 12), 0),
    (torch.nn.Conv2d, {"in_channels": 64, "out_channels": 128, "kernel_size": 3, "stride": 2}, (16, 16), 0),
    (torch.nn.Conv2d, {"in_channels": 64, "out_channels": 128, "kernel_size": 1, "stride": 2}, (16, 16), 0),
    (torch.nn.Conv2d, {"in_channels": 3, "out_channels": 64, "kernel_size": 8, "stride": 8}, (32, 32), 0),
    (torch.nn.Conv2d, {"in_channels": 16, "out_channels": 16, "kernel_size": 7, "groups": 16, "padding": 3}, (8, 8), 0),
    (torch.nn.Conv2d, {"in_channels": 32, "out_channels": 32, "kernel_size": 3, "groups": 32}, (16, 16), 0),
    (torch.nn.Conv2d, {"in_channels": 64, "out_channels": 64, "kernel_size": 7, "groups": 64, "padding": 3}, (9, 9), 1),
    (torch.nn.Conv2d, {"in_channels": 64, "out_channels": 128, "kernel_size": 2, "stride": 2}, (16, 16), 1),
    (torch.nn.Conv1d, {"in_channels": 1, "out_channels": 16, "kernel_size": 10, "stride": 5}, (325,), 0),
    (torch.nn.Conv1d, {"in_channels": 80, "out_channels": 64, "kernel_size": 3, "padding": 1}, (40,), 0),
    (torch.nn.Conv1d, {"in_channels": 32, "out_channels": 64, "kernel_size": 16, "padding": 8}, (50,), 0),
    (torch.nn.Conv3d, {"in_channels": 4, "out_channels": 8, "kernel_size": 3, "padding": 1}, (8, 8, 8), 0),
]


IMAGES = [case for case in CASES if case[1]["in_channels"] <= 3] + [
    (torch.nn.Conv2d, {"in_channels": 3, "out_channels": 40, "kernel_size": 16, "stride": 16}, (64, 64), 0),
    (torch.nn.Conv2d, {"in_channels": 3, "out_channels": 192, "kernel_size": 16, "stride": 16}, (48, 48), 0),
]


@pytest.fixture(params=[1, 2])
def threads(request):
    """The threads of torch during the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def cpu_scratch_bytes(operator, args) -> int:
    found = cpu_scratch(operator, args)
    return found.size_bytes if isinstance(found, Scratch) else found


class Estimated(TorchDispatchMode):
    """A mode that notes the peak of each call: its results, and its temporary memory by the law."""

    def __init__(self):
        super().__init__()
        self.peaks = {}

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        out = operator(*args, **(kwargs or {}))
        if operator.name() in CALLS:
            results = [out] if isinstance(out, torch.Tensor) else [result for result in out if result is not None]
            made = sum(result.untyped_storage().nbytes() for result in results)
            self.peaks[operator.name()] = made + cpu_scratch_bytes(operator, args)
        return out


def made(case):
    """The module of a case, and its input."""
    layer, arguments, sizes, is_last = case
    given = torch.rand(3, arguments["in_channels"], *sizes)
    return layer(**arguments), (given.to(memory_format=torch.channels_last) if is_last else given).requires_grad_()


def measured(case):
    """The peaks of the allocator inside forward and backward of a convolution, after a first run."""
    module, given = made(case)
    module(given).sum().backward()

    def run():
        result = module(given)
        result.backward(torch.ones_like(result))

    return peaks_of(run)


def peaks_of(run):
    """The peaks of the allocator inside each call, in all threads."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    calls = [event for event in events if event.name() in CALLS]
    found = {}
    for call in calls:
        sizes = [
            event.nbytes() for event in events
            if event.name() == "[memory]" and call.start_ns() <= event.start_ns() <= call.end_ns()
        ]  # fmt: skip
        found[call.name()] = max(accumulate(sizes), default=0)
    return found


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="the law is exact for oneDNN's kernels for AVX-512"
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{'-'.join(map(str, case[1].values()))}")
def test_a_convolution_allocates_what_the_law_says(case, threads):
    with fake_tensor_mode():
        module, given = made(case)
        with Estimated() as estimated:
            result = module(given)
            result.backward(torch.empty_like(result))
    assert estimated.peaks == measured(case)


@BF16
@pytest.mark.parametrize("case", IMAGES, ids=lambda case: f"{case[0].__name__}-{'-'.join(map(str, case[1].values()))}")
def test_a_convolution_of_images_in_bf16_allocates_what_the_law_says(case, threads):
    def step():
        layer, arguments, sizes, _ = case
        given = torch.zeros(3, arguments["in_channels"], *sizes, dtype=torch.bfloat16)
        result = layer(**arguments, dtype=torch.bfloat16)(given)
        result.backward(torch.empty_like(result))

    with fake_tensor_mode(), Estimated() as estimated:
        step()
    assert estimated.peaks == peaks_of(step)


def test_no_images_need_no_copies():
    with fake_tensor_mode(), Estimated() as estimated:
        torch.nn.Conv2d(3, 8, 3)(torch.empty(0, 3, 8, 8))
    assert estimated.peaks == {"aten::convolution": 0}


# Batch, heads, queries, keys, size of a head.
ATTENTIONS = [(2, 4, 16, 16, 8), (3, 2, 200, 200, 32), (1, 2, 800, 800, 16), (2, 4, 40, 600, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=BF16)], ids=str)
@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("sizes", ATTENTIONS, ids=str)
def test_fused_attention_allocates_what_the_law_says(sizes, is_copied, dtype, threads):
    batch, heads, queries, keys, width = sizes

    def step():
        """Run attention, and its backward pass from a gradient whose heads may lie apart."""
        operands = [torch.rand(batch, heads, length, width) for length in (queries, keys, keys)]
        operands = [operand.to(dtype).requires_grad_() for operand in operands]
        result = torch.nn.functional.scaled_dot_product_attention(*operands)
        gradient = torch.empty(batch, queries, heads, width, dtype=dtype).transpose(1, 2)
        result.backward(gradient.contiguous() if is_copied else gradient)

    with fake_tensor_mode(), Estimated() as estimated:
        step()
    assert estimated.peaks == peaks_of(step)


def test_fused_attention_of_few_positions_has_the_scratch_that_a_hand_computes(threads):
    query = torch.empty(1, 2, 7, 12, device="meta")
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    # A thread has 7 x 7 scores, 7 maxima, 7 sums and a result of 7 x 12: 147 numbers of 4 bytes.
    assert cpu_scratch_bytes(operator, (query, query, query)) == threads * 588


# Rows, columns and depth: next to multiples of blocks, of a single row, column or line, and deep ones.
MATRICES = [
    (64, 64, 64), (33, 17, 65), (528, 384, 384), (528, 2, 384), (384, 1536, 528), (100, 100, 1), (1, 768, 1100),
    (768, 1, 768), (257, 300, 1025), (1500, 640, 96), (40, 64, 4096), (1024, 33, 4096), (2, 2, 16), (16, 16, 16),
]  # fmt: skip


def matrices(rows, columns, layout, *batch):
    """A bf16 matrix or a batch of them: its rows side by side, or its columns, or rows with gaps, or one number."""
    if layout == "columns":
        return torch.zeros(*batch, columns, rows, dtype=torch.bfloat16).mT
    if layout == "gaps":
        return torch.zeros(*batch, rows, columns + 3, dtype=torch.bfloat16)[..., :columns]
    if layout == "one":
        return torch.zeros((), dtype=torch.bfloat16).expand(*batch, rows, columns)
    return torch.zeros(*batch, rows, columns, dtype=torch.bfloat16)


@BF16
@pytest.mark.parametrize("sizes", MATRICES, ids=str)
@pytest.mark.parametrize("product", PRODUCTS)
def test_a_product_in_bf16_allocates_what_the_law_says(product, sizes, threads):
    rows, columns, depth = sizes
    batch = (2,) if "bmm" in product else ()

    def step(layouts):
        operands = [matrices(rows, depth, layouts[0], *batch), matrices(depth, columns, layouts[1], *batch)]
        added = [torch.zeros(columns, dtype=torch.bfloat16)] if "add" in product else []
        getattr(torch, product)(*added, *operands)

    for layouts in (("rows", "rows"), ("rows", "columns"), ("columns", "rows"), ("one", "rows")):
        if product in ("mm", "addmm") and depth == 1 and layouts[0] == "columns":
            continue  # oneDNN's cache may have the kernel of a contiguous column, whose blocks differ
        with fake_tensor_mode(), Estimated() as estimated:
            step(layouts)
        assert estimated.peaks == peaks_of(partial(step, layouts)), layouts


@BF16
def test_a_batch_whose_rows_have_gaps_is_copied_before_a_product():
    operands = matrices(32, 64, "gaps", 3), matrices(64, 32, "rows", 3)
    compact = operands[0].contiguous(), operands[1]
    more = cpu_scratch_bytes(torch.ops.aten.bmm.default, operands) - cpu_scratch_bytes(
        torch.ops.aten.bmm.default, compact
    )
    assert more == 3 * 32 * 64 * 2


@BF16
def test_a_product_of_64_has_the_scratchpad_that_a_hand_computes(threads):
    operands = matrices(64, 64, "rows"), matrices(64, 64, "rows")
    # A thread has 16 pointers of 40 bytes, 64 x 64 numbers of the right matrix, and its share of the 64 rows in fp32;
    # each of the three parts is aligned to 128 bytes.
    expected = threads * (16 * 40 + 64 * 64 * 2 + 64 // threads * 64 * 4) + 3 * 128
    assert cpu_scratch_bytes(torch.ops.aten.mm.default, operands) == expected


def test_a_product_of_16_bits_has_no_scratchpad_without_kernels_of_bf16(monkeypatch):
    monkeypatch.setattr(cpu_products, "has_bf16_products", lambda: False)
    operands = matrices(64, 64, "rows"), matrices(64, 64, "columns")
    assert cpu_scratch_bytes(torch.ops.aten.mm.default, operands) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_softmax_with_masked_rows_and_the_backward_of_a_layer_norm_allocate_what_the_law_says(dtype, threads):
    def step():
        torch.ops.aten._safe_softmax(torch.zeros(2, 3, 5, 7, dtype=dtype), -1)
        layer = torch.nn.LayerNorm(24, dtype=dtype)
        layer(torch.zeros(3, 4, 24, dtype=dtype, requires_grad=True)).backward(torch.zeros(3, 4, 24, dtype=dtype))

    with fake_tensor_mode(), Estimated() as estimated:
        step()
    assert estimated.peaks == peaks_of(step)
