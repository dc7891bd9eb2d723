"""Adapters in a plain loop, of `--lora` and of the installed peft, whose models are counted too."""

from __future__ import annotations

import pytest
import torch
import transformers

import bertscope
from bertscope.config import BertConfig, Lora
from bertscope.memory.estimate import MemoryTraces
from bertscope.model import PeftModel, build
from bertscope.settings.run_config import RunConfig
from bertscope.settings.training import OPTIMIZERS
from bertscope.sources.bert import BertSource
from bertscope.tracing.flops import FlopsRun
from bertscope.tracing.module_tree import freeze
from tests.memory.plain_loop import peak_bytes, tokenized

SIZES = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 20,
}  # fmt: skip
WIDE = SIZES | {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 256, "max_position_embeddings": 32}
LOOPS = [
    {},
    {"checkpointing": "full"},
    {"checkpointing": "full", "reentrant": True},
    {"optimizer": "sgd"},
    {"accumulate": 2},
    {"accumulate": 2, "checkpointing": "full", "optimizer": "sgd"},
]
BATCH, SEQ = 3, 24


def measured(make, run_config: RunConfig) -> int:
    """The peak of a plain training loop."""

    def inputs(model):
        ids = torch.randint(0, 500, (BATCH, SEQ))
        return {"input_ids": ids, "labels": torch.zeros(BATCH, dtype=torch.long)}

    kind = getattr(torch.optim, OPTIMIZERS[run_config.optimizer].class_name)
    return peak_bytes(make, inputs, lambda params: kind(params, lr=0.0), accumulate=run_config.accumulate)


TEXTS = ["r=8,alpha=16,dropout=0.05", "r=4,target=all-linear,save=LayerNorm,bias=all"]


@pytest.mark.parametrize(("text", "loop"), [*((TEXTS[0], loop) for loop in LOOPS[2:5]), (TEXTS[1], LOOPS[5])], ids=str)
def test_the_estimate_of_our_model_is_the_peak_of_a_plain_loop(text, loop):
    run_config = RunConfig(batch=BATCH, seq=SEQ, **loop)
    name, config, lora = "BertForSequenceClassification", BertConfig(**WIDE), Lora.parse(text)
    source = BertSource(name="own", config=config, architecture=name, lora=lora)

    def make():
        model = PeftModel(build(config, name, device="cpu"), lora)
        if run_config.checkpointing != "none":
            model.gradient_checkpointing_enable({"use_reentrant": run_config.reentrant})
        return model

    assert MemoryTraces(source).trace(run_config).peak_bytes == pytest.approx(measured(make, run_config), rel=1e-3)


@pytest.mark.parametrize("patterns", [("embeddings", "encoder.layer.0"), ("*.bias", "LayerNorm")])
def test_the_estimate_of_a_frozen_model_is_the_peak_of_a_plain_loop(patterns):
    run_config = RunConfig(batch=BATCH, seq=SEQ, freeze=patterns)
    name, config = "BertForSequenceClassification", BertConfig(**WIDE)

    def make():
        model = build(config, name, device="cpu")
        freeze(model, patterns)
        return model

    found = MemoryTraces(BertSource(name="own", config=config, architecture=name)).trace(run_config).peak_bytes
    assert found == pytest.approx(measured(make, run_config), rel=1e-3)


@pytest.mark.parametrize("loop", [LOOPS[2], LOOPS[5]], ids=str)
def test_the_estimate_of_pefts_model_is_the_peak_of_a_plain_loop(loop):
    import peft  # here, since it takes seconds: the other workers of the tests need none

    run_config = RunConfig(batch=BATCH, seq=SEQ, **loop)

    def make():
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**WIDE))
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1))
        if run_config.checkpointing != "none":
            base = model.get_base_model()
            base.gradient_checkpointing_enable({"use_reentrant": run_config.reentrant})
            base.enable_input_require_grads() if run_config.reentrant else None
        return model

    given = {"input_ids": torch.ones(BATCH, SEQ, dtype=torch.long), "labels": torch.zeros(BATCH, dtype=torch.long)}
    run = {field: getattr(run_config, field) for field in ("optimizer", "accumulate")}
    (variant,) = bertscope.estimate(make(), given, **run).variants
    found = max(phase.peak_bytes for phase in variant.estimated.phases)
    assert found == pytest.approx(measured(make, run_config), rel=1e-3)


FACTORY = """
import transformers
from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model

def base():
    sizes = dict(vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, max_position_embeddings=40))

def lora():
    return get_peft_model(base(), LoraConfig(task_type="SEQ_CLS", r=4, lora_dropout=0.1))

def dora():
    return get_peft_model(base(), LoraConfig(r=4, target_modules=["query"], use_dora=True))

def ia3():
    return get_peft_model(base(), IA3Config(task_type="SEQ_CLS"))

def prefix():
    return get_peft_model(base(), PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3))
"""


@pytest.mark.parametrize("name", ["dora", "ia3", "prefix"])
def test_any_model_of_peft_is_counted_and_estimated_from_the_users_code(cli, tmp_path, monkeypatch, name):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapted_berts.py").write_text(FACTORY)
    model = f"adapted_berts:{name}"
    counted = cli("count", model, "--format", "json").json["totals"]
    import adapted_berts

    theirs = getattr(adapted_berts, name)()
    trained, total = theirs.get_nb_trainable_parameters()
    assert (counted["trainable_params"], counted["distinct_params"]) == (trained, total)
    assert cli("tree", model, "--format", "json").json["totals"] == counted
    estimated = cli("estimate", model, "--batch", "2", "--seq", "8", "--format", "json").json["variants"][0][
        "estimated"
    ]
    found = max(phase["peak_bytes"] for phase in estimated["phases"])
    ids = torch.ones(2, 8, dtype=torch.long)
    given = tokenized(ids) | {"labels": torch.zeros(2, dtype=torch.long)}
    real = peak_bytes(
        getattr(adapted_berts, name), lambda model: given, lambda params: torch.optim.AdamW(params, lr=0.0)
    )
    of_inputs = sum(tensor.numel() * tensor.element_size() for tensor in given.values())  # they exist before the window
    assert found == pytest.approx(real + of_inputs, rel=1e-3)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_the_flops_of_pefts_model_are_those_of_ours(cli, tmp_path, monkeypatch, mode):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapted_berts.py").write_text(FACTORY)
    theirs = cli("flops", "adapted_berts:lora", "--seq", "8", "--mode", mode, "--format", "json").json["rows"][0]
    config = BertConfig(**SIZES | {"vocab_size": 99, "max_position_embeddings": 40})
    lora = Lora(r=4, dropout=0.1, save=("classifier",))
    source = BertSource(name="own", config=config, architecture="BertForSequenceClassification", lora=lora)
    ours = FlopsRun(source=source, run=RunConfig(mode=mode)).at(1, 8).rows[0]
    for phase in ("forward", "backward"):
        assert theirs[phase]["matmul_flops"] == getattr(ours, phase).matmul_flops
