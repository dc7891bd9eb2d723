"""Weights in and out: the names of checkpoints of all ages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import bertscope
from bertscope.config import ARCHITECTURES


@pytest.fixture
def model(tiny):
    return bertscope.BertForPreTraining(tiny)


@pytest.fixture
def other(tiny):
    """The same class with other weights."""
    return bertscope.BertForPreTraining(tiny)


def equal(one, other) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


def without(state, words):
    return {name: tensor for name, tensor in state.items() if words not in name}


OF_ALL_AGES = {
    "names of TensorFlow": lambda state: {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in state.items()
    },
    "position ids": lambda state: state | {"bert.embeddings.position_ids": torch.arange(12)[None]},
    "no decoder": lambda state: without(state, "cls.predictions.decoder"),
    "no word embeddings": lambda state: without(state, "word_embeddings"),  # tied to the decoder
}


@pytest.mark.parametrize("age", OF_ALL_AGES)
def test_checkpoints_of_all_ages_load(model, other, age):
    other.load_state_dict(OF_ALL_AGES[age](model.state_dict()))
    assert equal(model, other)


def test_the_body_loads_with_and_without_its_prefix(model, tiny):
    state = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("bert.")}
    body = bertscope.BertModel(tiny)
    body.load_state_dict(state)
    assert equal(body, model.bert)
    head = bertscope.BertForPreTraining(tiny)
    missing = head.load_state_dict(body.state_dict(), strict=False).missing_keys
    assert equal(head.bert, model.bert)
    assert all(name.startswith("cls.") for name in missing)


def test_a_missing_and_an_unexpected_name_are_told(model, other):
    state = model.state_dict()
    state["bert.surprise"] = state.pop("bert.pooler.dense.bias")
    with pytest.raises(RuntimeError, match=r"(?s)bert.pooler.dense.bias.*bert.surprise"):
        other.load_state_dict(state)


def test_tensorflow_names_are_refused_with_a_word_on_what_to_do(model):
    with pytest.raises(ValueError, match="TensorFlow name; convert"):
        model.load_state_dict({"bert/encoder/layer_0/attention/self/query/kernel": torch.zeros(1)})


def test_assigning_to_a_model_on_meta_keeps_the_ties(model, tiny):
    empty = bertscope.build(tiny, "BertForPreTraining")
    empty.load_state_dict(model.state_dict(), assign=True)
    assert equal(empty, model)
    assert empty.cls.predictions.decoder.weight is empty.bert.embeddings.word_embeddings.weight
    assert empty.cls.predictions.decoder.bias is empty.cls.predictions.bias


def test_pruned_heads_are_in_the_configuration_and_not_in_the_model(tiny):
    model = bertscope.BertModel(replace(tiny, num_attention_heads=4, pruned_heads={0: [1, 3], -1: [0]}))
    attention = model.encoder.layer[0].attention
    assert attention.pruned_heads == {1, 3}
    assert (attention.self.num_attention_heads, attention.self.all_head_size) == (2, 4)
    assert model.config.pruned_heads == {0: (1, 3), 1: (0,)}
    again = bertscope.BertModel(bertscope.BertConfig.from_dict(model.config.to_dict()))
    again.load_state_dict(model.state_dict())
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(again.eval()(ids)[0], model.eval()(ids)[0])


IDS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 0]])


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "inside"])
@pytest.mark.parametrize("assign", [False, True], ids=["to_empty", "assign"])
def test_a_model_that_leaves_meta_computes_what_the_other_computes(model, tiny, assign, wrapped):
    empty = bertscope.build(tiny, "BertForPreTraining")
    outer = torch.nn.Sequential(empty) if wrapped else empty
    if not assign:
        outer.to_empty(device="cpu")
    state = {f"0.{name}" if wrapped else name: tensor for name, tensor in model.state_dict().items()}
    outer.load_state_dict(state, assign=assign)
    assert torch.equal(empty.eval()(IDS)[0], model.eval()(IDS)[0])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_safetensors_saves_and_loads_the_model(tiny, tmp_path, name):
    safetensors = pytest.importorskip("safetensors.torch", reason="comes with transformers, the oracle")
    one, other = bertscope.build(tiny, name, device="cpu"), bertscope.build(tiny, name, device="cpu")
    safetensors.save_model(one, tmp_path / "x")
    assert safetensors.load_model(other, tmp_path / "x") == (set(), [])
    assert equal(one, other)
