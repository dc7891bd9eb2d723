"""Weights in 4 and 8 bits: their bytes, the product that makes a weight and frees it, and bitsandbytes' real loops."""

import json

import pytest
import torch

import bertscope
from bertscope.config import Quantization
from bertscope.errors import ConfigError, SelectionError
from bertscope.model.quantized import QuantizedLinear
from bertscope.sources.find import source_of
from bertscope.torch_access import has_bf16_products
from bertscope.units import QUANTIZED
from tests.conftest import cases

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000,
}  # fmt: skip
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}


def quantized(kind: str, size: tuple[int, int] = (64, 256), device: str = "cpu") -> QuantizedLinear:
    linear = torch.nn.Linear(size[1], size[0], device=device)
    return QuantizedLinear(linear, Quantization(kind=kind), torch.bfloat16, on_cuda=False)


@pytest.mark.parametrize(
    ("kind", "weight", "scales"),
    [  # 64 x 256 weights: 8,192 bytes and 256 scales, which double quantization stores in one byte each
        ("nf4", 8192, 256 * 4 + 16 * 4),
        ("nf4-dq", 8192, 256 + 16 * 4 + 4 + 256 * 4 + 4),
        ("int8", 16384, 64 * 4),
    ],
)
def test_a_quantized_weight_has_the_bytes_of_its_numbers_and_their_scales(kind, weight, scales):
    layer = quantized(kind)
    assert layer.weight.nbytes == weight
    assert sum(buffer.nbytes for buffer in layer.buffers()) == scales


@pytest.mark.parametrize("kind", ["nf4", "nf4-dq", "int8"])
def test_a_product_makes_the_weight_of_its_numbers_forward_and_backward(kind):
    layer = quantized(kind, (3, 100))  # the last block is not full
    x = torch.randn(2, 5, 100, dtype=torch.bfloat16, requires_grad=True)
    wide = layer.wide(torch.bfloat16)
    if kind == "nf4":
        numbers = torch.stack((layer.weight.view(-1) >> 4, layer.weight.view(-1) & 15), 1).view(-1).long()
        scales = layer.absmax.repeat_interleave(64)[:300]
        assert torch.equal(wide, (layer.code[numbers] * scales).bfloat16().view(3, 100))
    layer(x).sum().backward()
    assert torch.equal(x.grad[0, 0], wide.sum(0))
    assert torch.allclose(layer(x), torch.nn.functional.linear(x, wide, layer.bias.bfloat16()))
    assert layer.weight.grad is None


@pytest.mark.parametrize("kind", QUANTIZED)
def test_count_and_estimate_agree_on_the_bytes_of_weights(kind):
    count = bertscope.count(source_of(LLAMA), quantize=kind)
    assert count.totals.distinct_params == bertscope.count(source_of(LLAMA)).totals.distinct_params
    memory = bertscope.estimate(source_of(LLAMA), quantize=kind, mode="inference", batch=1, seq=8)
    parts = memory.variants[0].estimated.cost.peak.parts
    assert (parts.parameters, parts.buffers) == (count.totals.param_bytes, count.totals.buffer_bytes)


@pytest.mark.parametrize(("settings", "blas_bytes", "onednn_bytes"), cases("quantized.yaml", "loops"))
def test_an_estimate_is_the_peak_of_a_real_loop_with_bitsandbytes_and_peft(settings, blas_bytes, onednn_bytes):
    real_bytes = onednn_bytes if has_bf16_products() else blas_bytes
    model = source_of(LLAMA).with_options(lora="r=8,alpha=16")
    report = bertscope.estimate(model, batch=4, seq=64, **settings)
    assert report.variants[0].estimated.cost.peak_bytes == pytest.approx(real_bytes, rel=1e-4)


@pytest.mark.parametrize(("precision", "real_bytes"), cases("quantized.yaml", "dora"))
def test_dora_takes_the_norm_of_a_weight_that_it_unpacks(precision, real_bytes, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "use_dora": True, "lora_alpha": 16}))
    model = bertscope.load(tmp_path / "config.json", lora=str(tmp_path))
    report = bertscope.estimate(model, quantize="nf4", precision=precision, batch=4, seq=64)
    assert report.peak_bytes == pytest.approx(real_bytes, rel=1e-4)


@pytest.mark.parametrize(("sizes", "low_gb", "high_gb"), cases("quantized.yaml", "published"))
def test_double_quantization_frees_what_was_published(sizes, low_gb, high_gb):
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, **sizes}
    plain, double = (bertscope.count(source_of(llama), quantize=kind).totals for kind in ("nf4", "nf4-dq"))
    assert plain.param_bytes == double.param_bytes
    assert 0.98 * low_gb - 0.01 <= (plain.buffer_bytes - double.buffer_bytes) / 1e9 <= 1.02 * high_gb + 0.01


def test_a_configuration_file_says_how_its_weights_are_stored():
    source = source_of({**LLAMA, "quantization_config": {**NF4, "bnb_4bit_use_double_quant": True}})
    assert bertscope.count(source).totals == bertscope.count(source_of(LLAMA), quantize="nf4-dq").totals
    assert bertscope.count(source, quantize="none").totals == bertscope.count(source_of(LLAMA)).totals
    assert "nf4-dq" in source.notice
    kept = {**NF4, "llm_int8_skip_modules": ["self_attn", "lm_head"]}
    paths = [row.path for row in bertscope.count(source_of({**LLAMA, "quantization_config": kept}), by="module").rows]
    assert paths  # rows of layers that stay fold as before
    tied = bertscope.count(source_of({**LLAMA, "tie_word_embeddings": True}), quantize="nf4").totals
    assert tied.param_bytes == 4 * (1000 * 256 + 9 * 256) + 4 * 589_824 // 2


@pytest.mark.parametrize("method", ["gptq", "awq", "fp8"])
def test_another_method_is_refused_by_its_name_and_counted_as_before(method):
    source = source_of({**LLAMA, "quantization_config": {"quant_method": method, "bits": 4}})
    assert method in source.notice
    assert bertscope.count(source).totals == bertscope.count(source_of(LLAMA)).totals
    with pytest.raises(ConfigError, match=method):
        bertscope.estimate(source, seq=8)


def test_a_quantized_model_without_adapters_is_frozen():
    with pytest.raises(SelectionError, match="lora"):
        bertscope.estimate("bert-tiny", quantize="nf4", seq=8)
    with pytest.raises(SelectionError, match="average of quantized weights"):
        bertscope.estimate("bert-tiny", quantize="nf4", ema=True, seq=8)


def test_the_adapters_of_a_model_in_16_bits_are_fp32_as_peft_makes_them():
    model = source_of(LLAMA).with_options(lora="r=8,target=q_proj+v_proj")
    parts = bertscope.estimate(model, precision="bf16", batch=1, seq=8).variants[0].estimated.cost.peak.parts
    adapters = 4 * 8 * (256 + 256 + 256 + 128)  # of four layers: A and B of query and value
    assert parts.parameters == 2 * 2_873_600 + 4 * adapters


@pytest.mark.parametrize(("precision", "real_bytes"), cases("quantized.yaml", "optimizers"))
def test_an_8_bit_optimizer_on_a_cpu_has_the_copies_that_bitsandbytes_makes(precision, real_bytes):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 4000}
    report = bertscope.estimate(source_of(LLAMA | sizes), batch=1, seq=16, precision=precision, optimizer="adamw-8bit")
    assert report.variants[0].estimated.cost.peak_bytes == pytest.approx(real_bytes, rel=2e-4)
    assert report.variants[0].estimated.cost.peak.phase == "optimizer"
