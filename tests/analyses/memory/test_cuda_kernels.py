"""CUDA's kernels, imitated: which are taken, what they keep, and what autocast computes in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import bertscope
from bertscope.analyses.memory.kernels import cuda_kernels as cuda
from bertscope.analyses.memory.kernels.cuda_kernels import _flash_attn_scratch, kernel_for
from bertscope.analyses.memory.steps import estimate_memory
from bertscope.errors import SelectionError
from bertscope.settings.run_config import RunConfig
from tests.analyses.memory.steps import small

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


@pytest.mark.parametrize("name", [*cuda._IN_FLOAT, *cuda._TO_FLOAT])
def test_every_name_in_the_lists_is_in_torchs_own(name):
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCUDA")


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
    with FakeTensorMode(), cuda.cuda_semantics(RunConfig(device="cuda")):
        inside = dtypes()
    assert inside == dict.fromkeys(inside, FP32) | {"linear": lower, "add": lower}
    assert dtypes() == before == dict.fromkeys(before, lower)


@pytest.mark.parametrize(("precision", "copied"), [("autocast-fp16", 0), ("autocast-bf16", 4)])
def test_a_softmax_reads_fp16_as_it_is_and_bf16_from_a_copy(precision, copied):
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 1000, bias=False)

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            target = torch.zeros(128, dtype=torch.long)
            return nn.functional.cross_entropy(self.head(given), target)

    found = on_cuda(Loss(), 128, 8, precision=precision, loop="freed")
    state = 4 * 8 * 1000 + 4 * 128 * 8
    casts = 2 * 8 * 1000 + 2 * 128 * 8
    logits = 128 * 1000 * (2 + copied + 4)
    assert found.peak.peak_bytes == pytest.approx(state + casts + logits + 8 * 128, abs=2048)


@pytest.mark.parametrize(
    ("dtype", "has_mask", "more", "kernel"),
    [(BF16, False, {"head_size": 256}, "flash"), (BF16, False, {"head_size": 264}, "efficient"),
     (BF16, True, {"head_size": 12}, "math"), (FP32, False, {"head_size": 12}, "efficient"),
     (FP32, False, {"head_size": 6}, "math"), (FP16, False, {"is_plain": False}, "flash"),
     (FP16, True, {"is_plain": False}, "math"), (torch.float64, False, {}, "math")],
)  # fmt: skip
def test_the_kernel_follows_the_width_of_a_head_too(dtype, has_mask, more, kernel):
    assert kernel_for(dtype, has_mask, **more) == kernel


@pytest.mark.parametrize(
    ("kernel", "fields"),
    [("flash", {}), ("flash", {"precision": "autocast-bf16", "padding": 0.5})],
    ids=["fp32", "mask"],
)
def test_a_kernel_that_cannot_compute_it_is_refused(kernel, fields):
    with pytest.raises(SelectionError, match="--sdpa-kernel auto"):
        estimate_memory(small(), RunConfig(batch=2, seq=16, device="cuda", sdpa_kernel=kernel, **fields))


@pytest.mark.parametrize("precision", ["stored", "autocast-bf16", "autocast-fp16"])
@pytest.mark.parametrize(
    "told", [{"keys": 2}, {"keys": 2, "masked": True}, {"flat": True}, {"heads": 16, "width": 4}], ids=str
)
def test_attention_of_any_form_is_estimated(told, precision):
    assert on_cuda(Attention(**told), 2, 30, 64, precision=precision, mode="training").peak.peak_bytes > 0


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_the_math_kernel_keeps_the_scores_with_and_without_dropout_and_masks_of_a_byte(p):
    kept = on_cuda(Attention(p=p), 2, 32, 64, sdpa_kernel="math").kept
    scores = sorted((row.dtype, row.kept_bytes) for row in kept if row.shape == (2, 4, 32, 32))
    size = 2 * 4 * 32 * 32
    assert scores == ([("bool", size), ("float32", 4 * size), ("float32", 4 * size)] if p else [("float32", 4 * size)])


def test_a_mask_whose_rows_are_not_aligned_is_filled_up_for_the_efficient_kernel():
    aligned, odd = (on_cuda(Attention(masked=True), 1, length, 64).kept for length in (32, 30))
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
        dtypes[inplace] = {row.dtype for row in on_cuda(module, 16, 8).kept}
    assert "bool" in dtypes[False]
    assert "bool" not in dtypes[True]


def test_flash_attns_backward_sums_gradients_in_fp32():
    """Of 20 tokens in 2 sequences, 4 heads of 8: each sequence has 128 more rows, of 32 + 1 numbers for a head."""
    q, ends = torch.empty(20, 4, 8, dtype=torch.bfloat16), torch.empty(3, dtype=torch.int32)
    saved = (q, q, q, q, q, torch.empty(4, 20), torch.empty(2), q, q, q, ends, ends, 10, 10, False, -1, -1)
    assert _flash_attn_scratch("_flash_attn_varlen_backward", (*saved, 2)) == 4 * (20 + 2 * 128) * 4 * 33
    # Version 3 rounds a head up to 64, and the tokens to blocks of 128; it has two sums for a row.
    third = _flash_attn_scratch("_flash_attn_varlen_backward", (*saved, 3))
    assert third.size_bytes == 4 * 384 * 4 * (64 + 2)
    fixed, few = torch.empty(2, 10, 4, 8, dtype=torch.bfloat16), torch.empty(2, 10, 2, 8, dtype=torch.bfloat16)
    args = (fixed, fixed, few, few, fixed, torch.empty(2, 4, 10), torch.empty(2), fixed, few, few, False, -1, -1)
    # Keys of 2 heads are repeated for 4 in bf16, twice: of keys and of values.
    assert _flash_attn_scratch("_flash_attn_backward", (*args, 2)) == 4 * 2 * 128 * 4 * 33 + 2 * 20 * 4 * 8 * 2
