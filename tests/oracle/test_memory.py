"""The memory of transformers' BERT and optimizers: the built-in model and implementations in their place."""

from __future__ import annotations

import dataclasses
import functools
import json
import random

import pytest
import torch
import transformers
from transformers.optimization import Adafactor, AdamW

import bertscope
from bertscope.memory.estimate import MemoryTraces, module_trace
from bertscope.memory.step import meta_inputs
from bertscope.model import CLASSES
from bertscope.settings.parallelism import Parallelism
from bertscope.settings.run_config import RunConfig
from bertscope.sources.find import source_of
from tests.conftest import kinds
from tests.memory.plain_loop import peak_bytes, tokenized
from tests.memory.steps import estimated_trace, fit_report, small


def of_transformers(source, attention):
    """The same model of transformers on meta; with a padding token it would ask fake ids if they contain it."""
    config = transformers.BertConfig(**source.config.to_dict())
    with torch.device("meta"):
        model = getattr(transformers, source.architecture)._from_config(config, attn_implementation=attention)
    model.config.pad_token_id = None
    return model.train()


@kinds(
    "name, case", CLASSES, [("eager", "cpu", 0.0, None), ("sdpa", "cuda", 0.2, "bf16"), ("eager", "cuda", 0.2, "bf16")]
)
def test_the_built_in_model_uses_the_memory_of_transformers(name, case):
    attention, device, padding, autocast = case
    run_config = RunConfig(
        batch=2, seq=16, precision=f"autocast-{autocast}" if autocast else "fp32", device=device, padding=padding
    )
    layers = 2 if name == "BertModel" else 1  # the body is the same in all
    source = small(name, attention, is_decoder=name == "BertLMHeadModel", pad_token_id=0, num_hidden_layers=layers)
    built_in = source.for_run().build().train()
    inputs = meta_inputs(built_in, run_config)
    reference, own = (
        {peak.phase: peak.live_bytes for peak in module_trace(model, inputs, run_config, None).peaks()}
        for model in (of_transformers(source, attention), built_in)
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


def test_fit_is_right_at_its_batch_and_the_next_by_a_plain_loop_of_transformers():
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


@pytest.mark.parametrize(
    ("optimizer", "theirs"),
    [
        ("adamw-transformers", lambda params: AdamW(params, lr=0.0, no_deprecation_warning=True)),
        (
            "adafactor-transformers",
            lambda params: Adafactor(params, lr=0.0, scale_parameter=False, relative_step=False),
        ),
    ],
    ids=["adamw_hf", "adafactor"],
)
def test_the_optimizers_of_transformers_have_the_estimated_peak(optimizer, theirs):
    """Few tokens and a large vocabulary: the temporaries of the optimizer decide the peak."""
    ids = torch.randint(0, 5000, (1, 24))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros(1, dtype=torch.long)}

    def model():
        config = transformers.BertConfig(
            vocab_size=5000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
            max_position_embeddings=32,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config)

    (variant,) = bertscope.estimate(model(), inputs, optimizer=optimizer).variants
    real = peak_bytes(model, lambda built: {k: v.clone() for k, v in inputs.items()}, theirs)
    assert variant.estimated.peak.phase == "optimizer"
    assert variant.estimated.peak.peak_bytes == pytest.approx(real, rel=0.001)


def test_the_buffers_that_ddp_broadcasts_are_those_of_all_layers(tmp_path):
    fields = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 8, "n_head": 2, "vocab_size": 30}
    (tmp_path / "config.json").write_text(json.dumps(fields | {"n_layer": 9, "n_positions": 16}))
    run_config = RunConfig(batch=2, seq=4, parallelism=Parallelism(strategy="ddp", world_size=2))
    trace = MemoryTraces(source_of(tmp_path)).trace(run_config)
    assert trace.traced_layers == 3
    # In each layer, bytes: a causal mask of 16 x 16 booleans, and the fp32 number in place of masked scores.
    sizes = [call.full_bytes for call in trace.collectives if (call.phase, call.kind) == ("forward", "broadcast")]
    assert sum(sizes) == 9 * (16 * 16 + 4)
