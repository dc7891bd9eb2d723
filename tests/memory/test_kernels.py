"""The temporary memory of CPU kernels next to the allocator's events, and which CUDA kernels are taken."""

import re
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import bertscope
from bertscope.errors import SelectionError
from bertscope.memory import kernels
from bertscope.memory.extension_kernels import flash_scratch
from bertscope.memory.kernel_rules import Scratch
from bertscope.memory.kernels import cpu_scratch, kernel_for
from bertscope.memory.simulator import Simulator
from bertscope.settings.run_config import RunConfig
from bertscope.torch_access import fake_tensor_mode, has_bf16_products
from bertscope.transformers_access import _operators
from tests.conftest import kinds
from tests.memory.steps import small

ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
CALLS = (
    ATTENTION, f"{ATTENTION}_backward", "aten::_safe_softmax", "aten::native_layer_norm_backward",
    "aten::mul_", *(f"aten::{name}" for name in PRODUCTS),
)  # fmt: skip
NEEDS_BF16 = pytest.mark.skipif(
    not has_bf16_products(), reason="the law is that of oneDNN's kernels for AVX-512 with bf16 and without AMX"
)


@pytest.fixture
def threads(request):
    """The threads of torch during the test: 2, or what `kinds` says."""
    number, before = getattr(request, "param", 2), torch.get_num_threads()
    torch.set_num_threads(number)
    yield number
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


@kinds("sizes, is_copied, dtype, threads", ATTENTIONS, [False, True], [torch.float32, torch.bfloat16], [1, 2],
       indirect=["threads"])  # fmt: skip
def test_fused_attention_allocates_what_the_law_says(sizes, is_copied, dtype, threads):
    if dtype == torch.bfloat16 and not has_bf16_products():
        pytest.skip(NEEDS_BF16.kwargs["reason"])
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(3, 5, 8), (8,)])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, ids: torch.ops.aten.gather.default(x, 0, ids),  # DeBERTa's relative positions
        lambda x, ids: torch.ops.aten.scatter_add_.default(x, 0, ids, x.clone()),
        lambda x, ids: torch.ops.aten.scatter_reduce.two(x, 0, ids, x.clone(), "amax"),
        lambda x, ids: torch.ops.aten.logsumexp.default(x, [-1]),
    ],
    ids=["gather", "scatter_add_", "scatter_reduce", "logsumexp"],
)
def test_a_kernel_that_adds_in_fp32_has_a_result_in_fp32(call, sizes, dtype):
    class Last(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            self.operator, self.args = operator, args
            return operator(*args, **(kwargs or {}))

    with Last() as last:
        call(torch.rand(sizes).to(dtype), torch.zeros(sizes, dtype=torch.int64))
    operator, args = last.operator, last.args
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = operator(*args)
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    peak = max(accumulate([event.nbytes() for event in events if event.name() == "[memory]"]), default=0)
    made = 0 if result is args[0] else result.nbytes
    assert cpu_scratch_bytes(operator, args) == peak - made


@pytest.mark.parametrize("left", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("right", [torch.bfloat16, torch.float32, torch.int64])
def test_a_result_in_place_is_copied_to_the_common_dtype_as_its_operands_are(left, right):
    weight, scales = torch.ones(64, 32, dtype=left), torch.ones(64, 1, dtype=right)  # as int8 weights of bitsandbytes
    expected = cpu_scratch_bytes(torch.ops.aten.mul_.Tensor, (weight, scales))
    assert peaks_of(lambda: weight.mul_(scales))["aten::mul_"] == expected


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


@NEEDS_BF16
@kinds("sizes, product, threads", MATRICES, ["mm", "bmm", "addmm", "mm", "baddbmm"], [1, 2, 2],
       indirect=["threads"])  # fmt: skip
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


@NEEDS_BF16
def test_a_batch_whose_rows_have_gaps_is_copied_before_a_product():
    operands = matrices(32, 64, "gaps", 3), matrices(64, 32, "rows", 3)
    compact = operands[0].contiguous(), operands[1]
    more = cpu_scratch_bytes(torch.ops.aten.bmm.default, operands) - cpu_scratch_bytes(
        torch.ops.aten.bmm.default, compact
    )
    assert more == 3 * 32 * 64 * 2


@NEEDS_BF16
def test_a_product_of_64_has_the_scratchpad_that_a_hand_computes(threads):
    operands = matrices(64, 64, "rows"), matrices(64, 64, "rows")
    # A thread has 16 pointers of 40 bytes, 64 x 64 numbers of the right matrix, and its share of the 64 rows in fp32;
    # each of the three parts is aligned to 128 bytes.
    expected = threads * (16 * 40 + 64 * 64 * 2 + 64 // threads * 64 * 4) + 3 * 128
    assert cpu_scratch_bytes(torch.ops.aten.mm.default, operands) == expected


def test_a_product_of_16_bits_has_no_scratchpad_without_kernels_of_bf16(monkeypatch):
    monkeypatch.setattr(kernels, "has_bf16_products", lambda: False)
    operands = matrices(64, 64, "rows"), matrices(64, 64, "columns")
    assert cpu_scratch_bytes(torch.ops.aten.mm.default, operands) == 0


@kinds("dtype, threads", [torch.float32, torch.bfloat16], [1, 2], indirect=["threads"])
def test_a_softmax_with_masked_rows_and_the_backward_of_a_layer_norm_allocate_what_the_law_says(dtype, threads):
    def step():
        torch.ops.aten._safe_softmax(torch.zeros(2, 3, 5, 7, dtype=dtype), -1)
        layer = torch.nn.LayerNorm(24, dtype=dtype)
        layer(torch.zeros(3, 4, 24, dtype=dtype, requires_grad=True)).backward(torch.zeros(3, 4, 24, dtype=dtype))

    with fake_tensor_mode(), Estimated() as estimated:
        step()
    assert estimated.peaks == peaks_of(step)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Attention(nn.Module):
    """Fused attention of 4 heads 16 wide, or as told."""

    def __init__(self, *, heads=4, keys=None, width=16, masked=False, flat=False, p=0.0):
        super().__init__()
        self.project = nn.Linear(heads * width, heads * width)
        self.shape, self.keys, self.masked, self.flat, self.p = (heads, width), keys, masked, flat, p

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        query = self.project(given).unflatten(-1, self.shape).transpose(1, 2)
        key = query[:, : self.keys]
        if self.flat:
            query, key = query.flatten(0, 1), key.flatten(0, 1)
        mask = torch.ones(given.shape[1], given.shape[1], dtype=torch.bool) if self.masked else None
        is_grouped = self.keys is not None
        return nn.functional.scaled_dot_product_attention(query, key, key, mask, self.p, enable_gqa=is_grouped)


def on_cuda(module: nn.Module, *shape: int, **run) -> bertscope.reports.memory.Memory:
    run = {"mode": "forward", "device": "cuda"} | run
    return bertscope.estimate(module, torch.empty(*shape, device="meta"), **run).variants[0].estimated


@pytest.mark.parametrize(("macro", "own"), [("FP32", kernels._IN_FLOAT), ("FP32_SET_OPT_DTYPE", kernels._TO_FLOAT)])
def test_the_lists_are_those_of_torchs_header_without_what_the_host_lists_too(macro, own):
    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    (rows,) = re.findall(rf"define AT_FORALL_{macro}\(_\) *\\\n((?:.*\\\n)*.*)", header)
    names = {".".join(row.split(", ")) for row in re.findall(r"_\(([\w, ]+)\)", rows)}
    of_host = {name for name in names if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU")}
    assert set(own.split() if isinstance(own, str) else own) == names - of_host


@pytest.mark.parametrize("lower", [BF16, FP16])
def test_cudas_autocast_computes_in_fp32_what_the_hosts_does_not(lower):
    def dtypes() -> dict[str, torch.dtype]:
        given = torch.ones(4, 8, dtype=lower)
        weight = torch.ones(8)
        with torch.autocast("cpu", dtype=lower):
            return {
                "pow": torch.pow(given, 3.0).dtype,
                "**": (given**3).dtype,
                "softmax": given.softmax(-1).dtype,
                "sum": given.sum().dtype,
                "layer_norm": nn.functional.layer_norm(given, (8,), weight, weight).dtype,
                "linear": nn.functional.linear(given, torch.ones(2, 8)).dtype,
                "add": (given + given).dtype,
            }

    before = dtypes()
    with FakeTensorMode(), kernels.cuda_semantics(RunConfig(device="cuda")):
        inside = dtypes()
    assert inside == dict.fromkeys(inside, FP32) | {"linear": lower, "add": lower}
    assert dtypes() == before == dict.fromkeys(before, lower)


@pytest.mark.parametrize(("precision", "copied"), [("autocast-fp16", 0), ("autocast-bf16", 4)])
def test_a_softmax_reads_fp16_as_it_is_and_bf16_from_a_copy(precision, copied):
    module = nn.Sequential(nn.Linear(8, 1000, bias=False), nn.Softmax(-1))
    found = on_cuda(module, 128, 8, loop="freed", precision=precision)
    state = 4 * 8 * 1000 + 4 * 128 * 8
    casts = 2 * 8 * 1000 + 2 * 128 * 8
    scores = 128 * 1000 * (2 + copied + 4)
    assert found.peak.peak_bytes == pytest.approx(state + casts + scores + 8 * 128, abs=2048)


# What CUDA's own kernels of autocast kept for each form of the loss, in the order of the graph: torch 2.13 and fake
# tensors on cuda.
KEPT_BY_LOSS = {
    "": ["float32", "LOWER"], "label_smoothing": ["float32", "LOWER", "LOWER"], "weight": ["float32", "LOWER"],
}  # fmt: skip


@pytest.mark.parametrize("lower", [BF16, FP16])
@pytest.mark.parametrize("form", KEPT_BY_LOSS)
def test_each_form_of_cross_entropy_keeps_what_cudas_autocast_keeps(form, lower):
    with FakeTensorMode(), kernels.cuda_semantics(RunConfig(device="cuda")), torch.autocast("cpu", dtype=lower):
        options = {"": {}, "label_smoothing": {"label_smoothing": 0.1}, "weight": {"weight": torch.ones(50)}}[form]
        given = torch.ones(4, 50, dtype=lower, requires_grad=True)
        loss = nn.functional.cross_entropy(given, torch.zeros(4, dtype=torch.long), **options)
    nodes, kept = [loss.grad_fn], []
    for node in nodes:
        nodes += [following for following, _ in node.next_functions if following is not None]
        name = {"NllLossBackward0": "_saved_self", "LogSoftmaxBackward0": "_saved_result"}.get(node.name())
        kept += [str(getattr(node, name).dtype).removeprefix("torch.")] if name else []
    assert kept == [name.replace("LOWER", str(lower).removeprefix("torch.")) for name in KEPT_BY_LOSS[form]]


@pytest.mark.parametrize(
    ("dtype", "has_mask", "more", "kernel"),
    [(BF16, False, {"head_size": 256}, "flash"), (BF16, False, {"head_size": 264}, "efficient"),
     (BF16, True, {"head_size": 12}, "math"), (FP32, False, {"head_size": 12}, "efficient"),
     (FP32, False, {"head_size": 6}, "math"), (FP16, False, {"is_plain": False}, "flash"),
     (FP16, True, {"is_plain": False}, "math"), (torch.float64, False, {}, "math"), (BF16, False, {}, "flash"),
     (BF16, True, {}, "efficient"), (FP32, False, {}, "efficient"), (FP32, False, {"asked": "math"}, "math"),
     (FP32, False, {"asked": "efficient"}, "efficient"), (FP16, False, {"asked": "efficient", "head_size": 12}, "math"),
     (FP32, False, {"asked": "efficient", "is_plain": False}, "math")],
)  # fmt: skip
def test_the_kernel_follows_dtype_mask_and_heads(dtype, has_mask, more, kernel):
    width, keys = more.get("head_size", 64), 4 if more.get("is_plain", True) else 2
    query, key = (torch.empty(1, heads, 8, width, dtype=dtype, device="meta") for heads in (4, keys))
    mask = torch.empty(8, 8, device="meta") if has_mask else None
    assert kernel_for(query, key, key, mask, more.get("asked", "auto")) == kernel


@pytest.mark.parametrize(
    ("kernel", "fields"),
    [("flash", {}), ("flash", {"precision": "autocast-bf16", "padding": 0.5})],
    ids=["fp32", "mask"],
)
def test_a_kernel_that_cannot_compute_it_is_refused(kernel, fields):
    with pytest.raises(SelectionError, match="sdpa_kernel auto"):
        Simulator(small()).memory(RunConfig(batch=2, seq=16, device="cuda", sdpa_kernel=kernel, **fields))


@pytest.mark.parametrize(
    ("told", "operator"),
    [({"keys": 2}, "flash"), ({"keys": 2, "masked": True}, "_safe_softmax"), ({"flat": True}, "_safe_softmax"),
     ({"heads": 16, "width": 4}, "flash")], ids=str,
)  # fmt: skip
def test_attention_of_any_form_is_estimated(told, operator):
    kept = on_cuda(Attention(**told), 2, 30, 64, precision="autocast-bf16", mode="training").saved
    assert any(operator in row.operator for row in kept)


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_the_math_kernel_keeps_the_scores_with_and_without_dropout_and_masks_of_a_byte(p):
    kept = on_cuda(Attention(p=p), 2, 32, 64, sdpa_kernel="math").saved
    scores = sorted((row.dtype, row.total_bytes) for row in kept if row.shape == (2, 4, 32, 32))
    size = 2 * 4 * 32 * 32
    assert scores == ([("bool", size), ("float32", 4 * size), ("float32", 4 * size)] if p else [("float32", 4 * size)])


@pytest.mark.parametrize(("version", "is_packed"), [("2.1", True), ("2.2", False)])
def test_flash_attention_packs_its_result_by_tokens_before_torch_2_2(version, is_packed):
    with FakeTensorMode(), kernels.cuda_semantics(RunConfig(device="cuda", torch=version)):
        query = torch.empty(30, 2, 4, 16, dtype=torch.bfloat16).permute(1, 2, 0, 3)  # (batch, heads, seq, head size)
        out = nn.functional.scaled_dot_product_attention(query, query, query)
    assert (out.transpose(1, 2).is_contiguous(), out.stride() == query.stride()) == (is_packed, not is_packed)


def test_a_mask_whose_rows_are_not_aligned_is_filled_up_for_the_efficient_kernel():
    aligned, odd = (on_cuda(Attention(masked=True), 1, length, 64).saved for length in (32, 30))
    assert (30, 32) in {row.shape for row in odd}
    assert not any(row.operator == "constant_pad_nd" for row in aligned)


@pytest.mark.parametrize(("ids", "rows", "scratch"), [(3072, 5000, False), (4096, 5000, True), (4096, 2, False)])
def test_an_embedding_sums_the_rows_of_many_ids_in_fp32_before_it_adds_them(ids, rows, scratch):
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(rows, 64)

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return self.table(torch.zeros(ids, dtype=torch.long)) * given

    backward = on_cuda(Table(), ids, 1, mode="training", optimizer="none", loop="freed").phases[-1]
    gradient, table, given = 4 * ids * 64, 4 * rows * 64, 4 * ids + 8 * ids
    sums = 4 * 64 * (ids // 10 + min(ids, rows)) if scratch else 0
    numbers = 0 if ids <= 3072 else 8 * (3 * ids + 3 * min(ids, rows) + ids // 10)
    assert backward.peak_bytes == pytest.approx(2 * table + gradient + given + sums + numbers, abs=8 * ids)


def test_dropout_in_place_has_no_fused_kernel():
    dtypes = {}
    for inplace in (False, True):
        module = nn.Sequential(nn.Linear(8, 1000), nn.Dropout(inplace=inplace))
        dtypes[inplace] = {row.dtype for row in on_cuda(module, 16, 8).saved}
    assert "bool" in dtypes[False]
    assert "bool" not in dtypes[True]


def test_flash_attns_backward_sums_gradients_in_fp32():
    """Of 20 tokens in 2 sequences, 4 heads of 8: each sequence has 128 more rows, of 32 + 1 numbers for a head."""
    q, ends = torch.empty(20, 4, 8, dtype=torch.bfloat16), torch.empty(3, dtype=torch.int32)
    saved = (q, q, q, q, q, torch.empty(4, 20), torch.empty(2), q, q, q, ends, ends, 10, 10, False, -1, -1)
    operators = _operators()[1]
    packed, plain = operators._flash_attn_varlen_backward.default, operators._flash_attn_backward.default
    assert flash_scratch(packed, (*saved, 2)) == 4 * (20 + 2 * 128) * 4 * 33
    # Version 3 rounds a head up to 64, and the tokens to blocks of 128; it has two sums for a row.
    third = flash_scratch(packed, (*saved, 3))
    assert third.size_bytes == 4 * 384 * 4 * (64 + 2)
    fixed, few = torch.empty(2, 10, 4, 8, dtype=torch.bfloat16), torch.empty(2, 10, 2, 8, dtype=torch.bfloat16)
    args = (fixed, fixed, few, few, fixed, torch.empty(2, 4, 10), torch.empty(2), fixed, few, few, False, -1, -1)
    # Keys of 2 heads are repeated for 4 in bf16, twice: of keys and of values.
    assert flash_scratch(plain, (*args, 2)) == 4 * 2 * 128 * 4 * 33 + 2 * 20 * 4 * 8 * 2
