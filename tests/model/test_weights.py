"""Weights in and out of a model, also of one on meta."""

from dataclasses import replace

import pytest
import torch

import bertscope
from bertscope.config import ARCHITECTURES


@pytest.fixture
def model(tiny):
    return bertscope.BertForPreTraining(tiny)


def equal(one, other) -> bool:
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


def test_a_model_on_meta_takes_weights_and_ties_them(model, tiny):
    empty = bertscope.build(tiny, "BertForPreTraining")
    empty.load_state_dict(model.state_dict(), assign=True)
    empty.tie_weights()
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
