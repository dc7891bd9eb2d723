"""The memory of transformers' BERT and optimizers: the built-in model and implementations in their place."""

import json

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
from tests.memory.plain_loop import peak_bytes
from tests.memory.steps import small


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
