"""The memory of transformers' BERT: its class estimated, and the built-in model in its place."""

from __future__ import annotations

import dataclasses
import functools
import random

import pytest
import torch

import bertscope
from bertscope.analyses.memory.estimate import module_trace
from bertscope.analyses.memory.fit import fit_report
from bertscope.analyses.memory.step import meta_inputs
from bertscope.settings.run_config import RunConfig
from tests.analyses.memory.plain_loop import peak_bytes, tokenized
from tests.analyses.memory.steps import estimated_trace, small


@pytest.mark.parametrize("mode", ["inference", "forward", "training"])
@pytest.mark.parametrize("strategy", ["none", "full", "reentrant"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_transformers_own_bert_is_estimated_to_the_byte(attention, strategy, mode):
    import transformers

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
    "rotary": ("LlamaForCausalLM", "LlamaConfig", words, WORDS | {"num_key_value_heads": 2}),
    "pictures": ("ViTForImageClassification", "ViTConfig", pictures, SIZES | {"image_size": 32, "patch_size": 8}),
    "no loss": ("BertModel", "BertConfig", lambda model: {"input_ids": words(model)["input_ids"]}, WORDS),
}  # fmt: skip


@pytest.mark.parametrize("loop", [{"loop": "plain", "accumulate": 2}, {"loop": "plain"}, {"loop": "trainer"}], ids=str)
@pytest.mark.parametrize("name", OF_OTHERS)
def test_each_loop_around_a_model_of_another_family_is_estimated(name, loop):
    """Every tensor of an output lives until the next forward has returned, or is freed before backward."""
    import transformers

    kind, config, inputs, fields = OF_OTHERS[name]

    def model():
        return getattr(transformers, kind)(getattr(transformers, config)(**fields))

    real = peak_bytes(model, inputs, lambda params: torch.optim.AdamW(params, lr=0.0), **loop)
    (variant,) = bertscope.estimate(model().train(), inputs(None), **loop).variants
    assert variant.estimated.peak.peak_bytes == pytest.approx(real, rel=1e-4)


def built(source, implementation):
    """The model on meta; the reference would ask fake ids if they contain padding."""
    model = source.implemented_by(implementation).build()
    if implementation == "transformers-installed":
        model.config.pad_token_id = None
    return model.train()


@pytest.mark.parametrize(
    ("attention", "device", "padding", "autocast"),
    [("eager", "cpu", 0.0, None), ("sdpa", "cuda", 0.2, "bf16"), ("eager", "cuda", 0.2, "bf16")],
)
def test_the_built_in_model_uses_the_memory_of_transformers(name, attention, device, autocast, padding):
    run_config = RunConfig(
        batch=2, seq=16, precision=f"autocast-{autocast}" if autocast else "fp32", device=device, padding=padding
    )
    layers = 2 if name == "BertModel" else 1  # the body is the same in all
    source = small(name, attention, is_decoder=name == "BertLMHeadModel", pad_token_id=0, num_hidden_layers=layers)
    inputs = meta_inputs(built(source, "transformers"), run_config)
    reference, own = (
        {peak.phase: peak.live_bytes for peak in module_trace(built(source, which), inputs, run_config, None).peaks()}
        for which in ("transformers-installed", "transformers")
    )
    assert own == reference


WIDE = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "vocab_size": 3000,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    ("architecture", "attention", "padding", "autocast"),
    [
        ("BertForMaskedLM", "eager", 0.0, None),
        ("BertForMaskedLM", "sdpa", 0.0, "bf16"),
        ("BertForMaskedLM", "sdpa", 0.25, "bf16"),
        ("BertForSequenceClassification", "sdpa", 0.0, None),
        ("BertForSequenceClassification", "eager", 0.25, "bf16"),
    ],
)
def test_the_default_estimate_is_the_peak_of_a_plain_loop_of_transformers(architecture, attention, padding, autocast):
    import transformers

    source, run_config = (
        small(architecture, attention, **WIDE),
        RunConfig(batch=4, seq=32, precision=f"autocast-{autocast}" if autocast else "fp32"),
    )
    by_token = architecture == "BertForMaskedLM"

    def model():
        config = transformers.BertConfig(**source.config.to_dict())
        return getattr(transformers, architecture)._from_config(config, attn_implementation=attention)

    def inputs(built):
        ids = torch.randint(1, source.config.vocab_size, (4, 32))
        given = tokenized(ids) | {"labels": ids.clone() if by_token else torch.zeros(4, dtype=torch.long)}
        if padding:
            given["attention_mask"][:, 24:] = 0
        return given

    measured = peak_bytes(
        model, inputs, lambda params: torch.optim.AdamW(params, lr=0.0), autocast=autocast and torch.bfloat16
    )
    estimated = estimated_trace(source, dataclasses.replace(run_config, padding=padding)).peak_bytes
    assert estimated == pytest.approx(measured, rel=0.001)


def test_the_installed_class_is_a_choice_of_every_command_on_memory_and_flops(cli):
    asked = ("bert-tiny", "-a", "BertForQuestionAnswering", "--implementation", "transformers-installed")
    fit = ("fit", "--budget", "1GiB", "--checkpointing", "none", "--precision", "fp32")
    for command in (fit, ("flops", "--depth", "0")):
        name, *options = command
        text = cli(name, *asked, *options).out
        assert "bert-tiny: BertForQuestionAnswering, sdpa attention, transformers 4.43.4" in text.partition("\n\n")[0]
    measured = cli("profile", *asked, "--steps", "1", "--batch", "2", "--seq", "16", "--format", "json").json
    (variant,) = measured["variants"]
    estimated, peak = (
        max(phase["peak_bytes"] for phase in variant[key]["phases"]) for key in ("estimated", "measured")
    )
    assert estimated == pytest.approx(peak, rel=0.001)


def test_fit_is_right_at_its_batch_and_the_next_by_a_plain_loop_of_transformers():
    import transformers

    source = small("BertForSequenceClassification", hidden_size=64, intermediate_size=256, vocab_size=500)

    def model():
        config = transformers.BertConfig(**source.config.to_dict())
        return transformers.BertForSequenceClassification._from_config(config, attn_implementation="sdpa")

    @functools.cache
    def measured(batch):
        def inputs(built):
            ids = torch.randint(1, source.config.vocab_size, (batch, 32))
            return tokenized(ids) | {"labels": torch.zeros(batch, dtype=torch.long)}

        return peak_bytes(model, inputs, lambda params: torch.optim.AdamW(params, lr=0.0))

    budgets = random.Random(14).sample(range(measured(1), measured(16)), 5)
    for budget in budgets:
        (row,) = fit_report(source, [RunConfig()], [32], budget).rows
        assert measured(row.batch) <= budget < measured(row.batch + 1)
