"""The installed classes of transformers: their memory in each loop, and that of its BERT to the byte."""

from __future__ import annotations

import pytest
import torch
import transformers

import bertscope
from tests.analyses.memory.plain_loop import peak_bytes


@pytest.mark.parametrize("mode", ["inference", "forward", "training"])
@pytest.mark.parametrize("strategy", ["none", "full", "reentrant"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_transformers_own_bert_is_estimated_to_the_byte(attention, strategy, mode):
    config = transformers.BertConfig(
        vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40,
        max_position_embeddings=32, attn_implementation=attention, pad_token_id=None,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config)
    if strategy != "none":
        model.gradient_checkpointing_enable({"use_reentrant": strategy == "reentrant"})
    ids = torch.randint(0, 99, (3, 24))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    (variant,) = bertscope.profile(model, given, mode=mode, steps=0).variants
    for guess, truth in zip(variant.estimated.phases, variant.measured.phases, strict=True):
        assert abs(guess.peak_bytes - truth.peak_bytes) <= 64, (guess, truth)


SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
WORDS = SIZES | {"vocab_size": 500, "max_position_embeddings": 64}


def words(model):
    """Ids of words, which are labels too."""
    ids = torch.randint(1, 500, (3, 24))
    return {"input_ids": ids, "labels": ids.clone()}


def masked(model):
    """Words with a mask that hides none."""
    return words(model) | {"attention_mask": torch.ones(3, 24, dtype=torch.long)}


def pictures(model):
    """Pictures with labels."""
    return {"pixel_values": torch.rand(3, 3, 32, 32), "labels": torch.zeros(3, dtype=torch.long)}


OF_OTHERS = {
    "hidden states and attentions": ("BertForMaskedLM", "BertConfig", words, WORDS | {
        "output_hidden_states": True, "output_attentions": True, "attn_implementation": "eager"}),
    "past keys and values": ("GPT2LMHeadModel", "GPT2Config", words, {
        "vocab_size": 500, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "encoder and decoder": ("BartForConditionalGeneration", "BartConfig", words, {
        "vocab_size": 500, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 64}),
    "rotary": ("LlamaForCausalLM", "LlamaConfig", masked, WORDS | {"num_key_value_heads": 2}),
    "pictures": ("ViTForImageClassification", "ViTConfig", pictures, SIZES | {"image_size": 32, "patch_size": 8}),
    "no loss": ("BertModel", "BertConfig", lambda model: {"input_ids": words(model)["input_ids"]}, WORDS),
}  # fmt: skip


@pytest.mark.parametrize("loop", [{"loop": "plain", "accumulate": 2}, {"loop": "plain"}, {"loop": "trainer"}], ids=str)
@pytest.mark.parametrize("name", OF_OTHERS)
def test_each_loop_around_a_model_of_another_family_is_estimated(name, loop):
    """Every tensor of an output lives until the next forward has returned, or is freed before backward."""
    kind, config, inputs, fields = OF_OTHERS[name]

    def model():
        return getattr(transformers, kind)(getattr(transformers, config)(**fields))

    real = peak_bytes(model, inputs, lambda params: torch.optim.AdamW(params, lr=0.0), **loop)
    (variant,) = bertscope.estimate(model().train(), inputs(None), **loop).variants
    assert variant.estimated.peak.peak_bytes == pytest.approx(real, rel=1e-4)
