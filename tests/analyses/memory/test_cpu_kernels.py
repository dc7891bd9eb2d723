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
    ATTENTION, f"{ATTENTION}_backward", "aten::_safe_softmax", "aten::native_layer_norm_backward",
    *(f"aten::{name}" for name in PRODUCTS),
)  # fmt: skip
BF16 = pytest.mark.skipif(
    not has_bf16_products(), reason="the law is that of oneDNN's kernels for AVX-512 with bf16 and without AMX"
)


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
