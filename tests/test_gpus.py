"""The table of GPUs."""

from dataclasses import replace

import pytest

from bertscope import gpus
from bertscope.errors import SelectionError
from bertscope.gpus import CONTEXT_BYTES, GPUS, Gpu, capability, find_gpu, gpu_threads, sdpa_kernel


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
    monkeypatch.setitem(gpus._ROWS, "new", gpus._Row(1, "", (6, 1), 1))
    assert sdpa_kernel(new, "bf16") == "math"


def test_a_gpu_without_a_published_context_has_the_range_of_its_compute_capability():
    """The L4 has capability 8.9: published are 106 MiB of an RTX 4060 and 507 MiB of an L40."""
    card = find_gpu("l4")
    assert (card.context_low_bytes, card.context_high_bytes) == (106 * 2**20, 507 * 2**20)
    assert "rtx-4060" in card.context_source
    assert "l40, " in card.context_source


def test_a_gpu_whose_compute_capability_has_no_range_has_that_of_all():
    for name in ("b200", "titan-x-12gb"):  # of 6.1 there is one figure, which is no range
        card = find_gpu(name)
        assert (card.context_low_bytes, card.context_high_bytes) == CONTEXT_BYTES
        assert card.context_source == ""


def test_a_published_context_of_the_gpu_itself_comes_first():
    card = find_gpu("a100-40gb")
    assert (card.context_low_bytes >> 20, card.context_high_bytes >> 20) == (501, 1451)
    assert "GPUs of its compute capability" not in card.context_source


SPELLINGS = {
    "Tesla T4": "t4", "NVIDIA A100-SXM4-80GB": "a100-80gb", "RTX 6000 Ada Generation": "rtx-6000-ada",
    "3090": "rtx-3090",
"rtx4070ti": "rtx-4070-ti", "rtx 3080": "rtx-3080-10gb", "g5.xlarge": "a10g", "Standard_NC4as_T4_v3": "t4",
    "rtx 4070 laptop": "rtx-4070-laptop", "RTX 4070 Laptop GPU": "rtx-4070-laptop", "rtx4070-laptop": "rtx-4070-laptop",
    "NVIDIA GeForce RTX 3070 Mobile": "rtx-3070-laptop", "Tesla P4": "p4", "L40": "l40", "ml.g5.xlarge": "a10g",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000", "RTX PRO 6000": "rtx-pro-6000",
    "a2-highgpu-1g": "a100-40gb", "p3.2xlarge": "v100-16gb", "g6e.12xlarge": "l40s", "TITAN X (Pascal)": "titan-x-12gb",
    "NVIDIA H100 80GB HBM3": "h100-80gb", "nvidia-h100-mega-80gb": "h100-80gb", "Colab T4": "t4", "l40sx1": "l40s",
    "a10g-large": "a10g", "gpu_1x_a10": "a10", "Standard_NC24rs_v3": "v100-16gb", "g7e.2xlarge": "rtx-pro-6000",
}  # fmt: skip


@pytest.mark.parametrize(("spelling", "name"), SPELLINGS.items())
def test_a_gpu_has_the_names_of_torch_and_of_clouds_too(spelling, name):
    assert find_gpu(spelling).name == name


@pytest.mark.parametrize(("name", "remedy"), [
    ("rtx 4060 ti", "rtx-4060-ti-16gb"), ("a100", "a100-40gb"), ("rtx-4091", "rtx-4090"), ("MI300X", "budget"),
    ("Apple M3 Max", "budget"), ("rtx-4091", "budget 16GiB with device cuda"),
    *((name, "not modelled") for name in ("AMD Instinct MI300X", "mps", "trn1.2xlarge", "g4ad.xlarge")),
    ("l41", r"did you mean 'l4' or 'l40'\? Or give"),
    ("rtx 4080 laptop", "did you mean 'rtx-4070-laptop' or 'rtx-3070-laptop'.*budget"),
])  # fmt: skip
def test_a_gpu_that_is_not_clear_or_not_modelled_names_what_to_say(name, remedy):
    with pytest.raises(SelectionError, match=remedy):
        find_gpu(name)


@pytest.mark.parametrize("card", gpus._INSTANCES.values())
def test_an_instance_has_a_gpu_of_the_table(card):
    assert card in GPUS


@pytest.mark.parametrize("name", GPUS)
def test_the_context_of_a_gpu_lies_between_those_of_all(name):
    card = GPUS[name]
    assert CONTEXT_BYTES[0] <= card.context_low_bytes <= card.context_high_bytes <= CONTEXT_BYTES[1]


def test_torch_chooses_cudnn_attention_on_hopper_and_blackwell_of_data_centres_only():
    assert [name for name in GPUS if sdpa_kernel(GPUS[name], "bf16") == "cudnn"] == ["h100-80gb", "h200", "b200"]


def test_a_card_runs_threads_by_its_processors_and_its_compute_capability():
    # T4: 40 x 1,024; A100: 108 x 2,048; RTX 4090: 128 x 1,536 (NVIDIA, CUDA C++ Programming Guide).
    found = {name: gpu_threads(GPUS[name]) for name in ("t4", "a100-80gb", "rtx-4090")}
    assert found == {"t4": 40960, "a100-80gb": 221184, "rtx-4090": 196608}
    assert gpu_threads(replace(GPUS["t4"], name="my card")) is None
