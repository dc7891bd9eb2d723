"""The table of GPUs."""

from __future__ import annotations

import pytest

from bertscope import gpus
from bertscope.gpus import GPUS, Gpu, capability, find_gpu, sdpa_kernel


@pytest.mark.parametrize("name", GPUS)
def test_each_figure_has_a_source(name):
    row = gpus._ROWS[name]
    assert row.memory_source
    assert bool(row.rates_source) == bool(row.fp32_tflops and row.bandwidth_gb_per_second)
    assert row.half_tflops == 0 or row.half_tflops > row.fp32_tflops


def test_the_kernel_follows_from_the_compute_capability(monkeypatch):
    assert [sdpa_kernel(find_gpu("t4"), dtype) for dtype in ("fp32", "fp16", "bf16")] == [
        "efficient", "efficient", "math",
    ]  # fmt: skip
    assert sdpa_kernel(find_gpu("a100-80gb"), "bf16") == "auto"
    new = Gpu(name="new", memory_bytes=1, source="")
    assert capability(new) is None
    assert sdpa_kernel(new, "bf16") == "auto"  # as on most GPUs
    monkeypatch.setitem(gpus._ROWS, "new", gpus._Row(1, "", (6, 1)))
    assert sdpa_kernel(new, "bf16") == "math"
