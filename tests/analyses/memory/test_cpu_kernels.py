"""The temporary memory of CPU kernels by its law, next to the allocator's events of the kernel."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from bertscope.analyses.memory.kernels.cpu_scratch import cpu_scratch_bytes
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


@pytest.fixture(params=[1, 2])
def threads(request):
    """The threads of torch during the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


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


def test_no_images_need_no_copies():
    with fake_tensor_mode(), Estimated() as estimated:
        torch.nn.Conv2d(3, 8, 3)(torch.empty(0, 3, 8, 8))
    assert estimated.peaks == {"aten::convolution": 0}


# Batch, heads, queries, keys, size of a head.
ATTENTIONS = [(2, 4, 16, 16, 8), (3, 2, 200, 200, 32), (1, 2, 800, 800, 16), (2, 4, 40, 600, 16)]


@pytest.mark.parametrize("is_copied", [False, True])
@pytest.mark.parametrize("sizes", ATTENTIONS, ids=str)
def test_fused_attention_allocates_what_the_law_says(sizes, is_copied, threads):
    batch, heads, queries, keys, width = sizes

    def step():
        """Run attention, and its backward pass from a gradient whose heads may lie apart."""
        operands = [torch.rand(batch, heads, length, width, requires_grad=True) for length in (queries, keys, keys)]
        result = torch.nn.functional.scaled_dot_product_attention(*operands)
        gradient = torch.empty(batch, queries, heads, width).transpose(1, 2)
        result.backward(gradient.contiguous() if is_copied else gradient)

    with fake_tensor_mode(), Estimated() as estimated:
        step()
    assert estimated.peaks == peaks_of(step)


def test_fused_attention_of_few_positions_has_the_scratch_that_a_hand_computes(threads):
    query = torch.empty(1, 2, 7, 12, device="meta")
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    # A thread has 7 x 7 scores, 7 maxima, 7 sums and a result of 7 x 12: 147 numbers of 4 bytes.
    assert cpu_scratch_bytes(operator, (query, query, query)) == threads * 588
