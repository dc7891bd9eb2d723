"""LoRA against peft 0.12.0: names, what is trained, outputs, files of adapters, and memory of checkpointing."""

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
from bertscope.config import ALL_LINEAR, BertConfig, Lora
from bertscope.memory.estimate import MemoryTraces
from bertscope.model import CLASSES, PeftModel, build
from bertscope.settings.run_config import RunConfig
from bertscope.sources.bert import BertSource
from tests.conftest import kinds
from tests.sources.test_peft import BATCH, SEQ, SIZES, TEXTS, WIDE, measured

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
    target = ALL_LINEAR if lora.target == (ALL_LINEAR,) else lora.target and list(lora.target)  # None: of the family
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


@kinds("name, text", CLASSES, SETTINGS)
def test_names_shapes_and_what_is_trained_equal_pefts(name, text):
    lora = settings_for(name, text)
    theirs, ours = reference(name, lora, **SIZES), own(name, lora, **SIZES)
    assert described(ours) == described(theirs)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    trained, total = theirs.get_nb_trainable_parameters()
    totals = bertscope.count(ours).totals
    assert (totals.trainable_params, totals.distinct_params) == (trained, total)
    assert bertscope.count(ours, by="parameter").rows == bertscope.count(theirs, by="parameter").rows


@kinds("name, text", CLASSES, SETTINGS)
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
