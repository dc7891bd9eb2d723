"""LoRA against peft 0.12.0: names, what is trained, outputs, files of adapters, and memory in a plain loop."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import peft

from peft.utils import get_peft_model_state_dict

import bertscope
from bertscope.analyses.flops import FlopsRun
from bertscope.analyses.memory.estimate import MemoryTraces
from bertscope.analyses.modules.totals import freeze
from bertscope.config import ALL_LINEAR, BertConfig, Lora
from bertscope.model import CLASSES, PeftModel, build
from bertscope.settings.optimizers import OPTIMIZERS
from bertscope.settings.run_config import RunConfig
from bertscope.sources.bert import BertSource
from tests.analyses.memory.plain_loop import peak_bytes, tokenized

SIZES = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 20,
}  # fmt: skip
WIDE = SIZES | {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 256, "max_position_embeddings": 32}
SETTINGS = [
    "r=4",
    "r=2,alpha=16,dropout=0.1,target=query+key+value+dense,rslora=true",
    "r=3,bias=all,target=output.dense+layer.0.attention.self.key",
    "r=3,bias=lora_only,save=LayerNorm",
    "r=1,target=all-linear,bias=all",
    "r=2,target=attention.output.dense,save=word_embeddings+token_type_embeddings",
    "r=2,target=key,save=pooler+classifier+qa_outputs+cls",
]


def reference(
    name: str, lora: Lora, attention: str = "eager", enable_first: dict[str, Any] | None = None, **fields
) -> torch.nn.Module:
    """The model of transformers with the adapters of peft; checkpointing is enabled before them, if at all."""
    config = transformers.BertConfig(**fields)
    model = getattr(transformers, name)._from_config(config, attn_implementation=attention)
    if enable_first is not None:
        model.gradient_checkpointing_enable(**enable_first)
    return peft.get_peft_model(model, adapter_config(lora))


def adapter_config(lora: Lora) -> peft.LoraConfig:
    target = ALL_LINEAR if lora.target == (ALL_LINEAR,) else list(lora.target)
    return peft.LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=target, bias=lora.bias,
        use_rslora=lora.rslora, modules_to_save=list(lora.save) or None,
    )  # fmt: skip


def settings_for(name: str, text: str) -> Lora:
    """The settings without the saved modules that this class does not have; peft ignores them."""
    lora = Lora.parse(text)
    plain = build(BertConfig(**SIZES), name)
    paths = [path for path, _ in plain.named_modules()]
    save = [part for part in lora.save if any(path.endswith(part) for path in paths)]
    return replace(lora, save=tuple(save))


def own(name: str, lora: Lora, attention: str = "eager", **fields) -> torch.nn.Module:
    return PeftModel(build(BertConfig(**fields, attn_implementation=attention), name, device="cpu"), lora)


def described(model: torch.nn.Module) -> list[tuple]:
    return [(path, tuple(param.shape), param.requires_grad) for path, param in model.named_parameters()]


@pytest.mark.parametrize("text", SETTINGS)
@pytest.mark.parametrize("name", CLASSES)
def test_names_shapes_and_what_is_trained_equal_pefts(name, text):
    lora = settings_for(name, text)
    theirs, ours = reference(name, lora, **SIZES), own(name, lora, **SIZES)
    assert described(ours) == described(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    trained, total = theirs.get_nb_trainable_parameters()
    totals = bertscope.count(ours).totals
    assert (totals.trainable_params, totals.distinct_params) == (trained, total)
    assert bertscope.count(ours, by="parameter").rows == bertscope.count(theirs, by="parameter").rows


@pytest.mark.parametrize("text", SETTINGS)
@pytest.mark.parametrize("name", CLASSES)
def test_outputs_and_gradients_equal_pefts_with_the_same_weights(name, text):
    lora = settings_for(name, text.replace("dropout=0.1", "dropout=0"))
    theirs, ours = (
        make(name, lora, **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        for make in (reference, own)
    )
    state = theirs.state_dict()
    for path, tensor in state.items():
        if "lora_B" in path:  # zero before training
            torch.nn.init.normal_(tensor)
    ours.load_state_dict(state)
    ids = torch.randint(0, 50, (2, 3, 7) if name == "BertForMultipleChoice" else (2, 7))
    mask = torch.ones_like(ids)
    both = [model.train()(input_ids=ids, attention_mask=mask)[0] for model in (theirs, ours)]
    torch.testing.assert_close(both[1], both[0])
    for output in both:
        output.square().sum().backward()
    gradients = dict(theirs.named_parameters())
    for path, param in ours.named_parameters():
        expected = gradients[path].grad
        assert (param.grad is None) == (expected is None), path
        if expected is not None:
            torch.testing.assert_close(param.grad, expected, msg=path)


@pytest.mark.parametrize("text", SETTINGS)
def test_the_tensors_of_a_file_are_those_that_peft_saves(text):
    name = "BertForSequenceClassification"
    lora = settings_for(name, text)
    theirs = reference(name, lora, **SIZES)
    saved = get_peft_model_state_dict(theirs, save_embedding_layers=False)
    stored = own(name, lora, **SIZES).stored()
    assert {path: tensor.shape for path, tensor in stored.items()} == {
        path: value.shape for path, value in saved.items()
    }


# ---- memory ----

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


@pytest.mark.parametrize(("text", "loop"), [*((TEXTS[0], loop) for loop in LOOPS[1:5]), (TEXTS[1], LOOPS[5])], ids=str)
def test_the_estimate_of_our_model_is_the_peak_of_a_plain_loop(text, loop):
    run_config = RunConfig(batch=BATCH, seq=SEQ, **loop)
    name, config, lora = "BertForSequenceClassification", BertConfig(**WIDE), Lora.parse(text)
    source = BertSource(name="own", config=config, architecture=name, lora=lora)

    def make():
        model = own(name, lora, "sdpa", **WIDE)
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


@pytest.mark.parametrize("loop", [LOOPS[0], LOOPS[2], LOOPS[5]], ids=str)
def test_the_estimate_of_pefts_model_is_the_peak_of_a_plain_loop(loop):
    run_config = RunConfig(batch=BATCH, seq=SEQ, **loop)

    def make():
        model = reference("BertForSequenceClassification", Lora(r=8, alpha=16, dropout=0.1), "sdpa", **WIDE)
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


@pytest.mark.parametrize(("text", "reentrant"), [(TEXTS[0], False), (TEXTS[0], True), (TEXTS[1], False)])
def test_checkpointing_before_get_peft_model_is_the_estimate_and_after_it_needs_no_more(text, reentrant):
    name, lora, config = "BertForSequenceClassification", Lora.parse(text), BertConfig(**WIDE)
    run_config = RunConfig(batch=BATCH, seq=SEQ, checkpointing="full", reentrant=reentrant)
    source = BertSource(name="own", config=config, architecture=name, lora=lora)

    def make(is_first: bool) -> torch.nn.Module:
        enable = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
        return reference(name, lora, "sdpa", enable_first=enable if is_first else None, **WIDE)

    def after() -> torch.nn.Module:
        model = make(False)
        model.get_base_model().gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.get_base_model().enable_input_require_grads() if reentrant else None
        return model

    found = MemoryTraces(source).trace(run_config).peak_bytes
    assert found == pytest.approx(measured(lambda: make(True), run_config), rel=1e-3)
    assert measured(after, run_config) <= 1.001 * found


FACTORY = """
import transformers
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model

def base():
    sizes = dict(vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, max_position_embeddings=40))

def lora():
    return get_peft_model(base(), LoraConfig(task_type="SEQ_CLS", r=4, lora_dropout=0.1))

def without_task():
    return get_peft_model(base(), LoraConfig(r=4, target_modules=["word_embeddings", "dense"]))

def dora():
    return get_peft_model(base(), LoraConfig(r=4, target_modules=["query"], use_dora=True))

def ia3():
    return get_peft_model(base(), IA3Config(task_type="SEQ_CLS"))

def prompt():
    return get_peft_model(base(), PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3))

def prefix():
    return get_peft_model(base(), PrefixTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3))
"""


@pytest.mark.parametrize("name", ["lora", "dora", "ia3", "prefix"])
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
