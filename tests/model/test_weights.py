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


def test_pruned_heads_stand_in_the_configuration_and_build_again(tiny):
    model = bertscope.BertModel(replace(tiny, num_attention_heads=4))
    model.prune_heads({0: [1], 1: [0, 2]})
    model.prune_heads({0: [1, 3]})
    attention = model.encoder.layer[0].attention
    assert attention.pruned_heads == {1, 3}
    assert (attention.self.num_attention_heads, attention.self.all_head_size) == (2, 4)
    again = bertscope.BertModel(bertscope.BertConfig.from_dict(model.config.to_dict()))
    again.load_state_dict(model.state_dict())
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(again.eval()(ids)[0], model.eval()(ids)[0])


def test_pruning_a_head_is_masking_it(tiny):
    config = replace(tiny, attn_implementation="eager", initializer_range=0.5)
    model = bertscope.BertModel(config).eval()
    ids = torch.tensor([[1, 2, 3]])
    masked = model(ids, head_mask=torch.tensor([[1.0, 0.0], [0.0, 1.0]]))[0]
    model.prune_heads({0: [1], 1: [0]})
    torch.testing.assert_close(model(ids)[0], masked)


def test_pruning_works_on_meta_and_keeps_what_is_frozen(tiny):
    model = bertscope.build(tiny).requires_grad_(False)
    model.prune_heads({0: [0]})
    query = model.encoder.layer[0].attention.self.query.weight
    assert (query.is_meta, query.requires_grad, tuple(query.shape)) == (True, False, (4, 8))


@pytest.mark.parametrize("heads", [{0: [0, 1]}, {2: [0]}, {0: [2]}, {0: [-1]}])
def test_heads_that_cannot_be_pruned_are_refused_and_nothing_changes(tiny, heads):
    model = bertscope.BertModel(tiny)
    with pytest.raises(ValueError, match="pruned_heads"):
        model.prune_heads(heads)
    assert bertscope.count(model).totals == bertscope.count(bertscope.build(tiny)).totals


def test_input_embeddings_can_be_exchanged_and_the_decoder_follows(tiny):
    model = bertscope.BertForMaskedLM(tiny)
    new = torch.nn.Embedding(40, 8)
    model.set_input_embeddings(new)
    assert model.get_input_embeddings() is model.bert.embeddings.word_embeddings is new
    assert model.get_output_embeddings().weight is new.weight
    assert (model(torch.ones(1, 4, dtype=torch.long)).logits.shape, model.config.vocab_size) == ((1, 4, 40), 40)


def test_the_output_embeddings_can_be_exchanged(tiny):
    model = bertscope.BertForMaskedLM(replace(tiny, tie_word_embeddings=False))
    new = torch.nn.Linear(8, 32)
    model.set_output_embeddings(new)
    assert model.get_output_embeddings() is new
    assert model.cls.predictions.bias is new.bias


def test_resizing_to_a_multiple_pads_and_resizing_to_nothing_changes_nothing(tiny):
    model = bertscope.BertForMaskedLM(tiny)
    before = model.get_input_embeddings().weight
    assert model.resize_token_embeddings().weight is before
    assert model.resize_token_embeddings(33, pad_to_multiple_of=8).num_embeddings == 40
    assert model.config.vocab_size == model.bert.config.vocab_size == 40
    assert model(torch.tensor([[39]])).logits.shape == (1, 1, 40)
    assert len(list(bertscope.build(tiny, "BertForMaskedLM").parameters())) == len(list(model.parameters()))


def test_a_frozen_embedding_stays_frozen_when_resized(tiny):
    model = bertscope.BertForMaskedLM(tiny).requires_grad_(False)
    model.resize_token_embeddings(50)
    assert not any(parameter.requires_grad for parameter in model.parameters())


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


def test_pruning_one_layer_leaves_the_parameters_of_another_in_place(tiny):
    model = bertscope.BertModel(tiny)
    model.prune_heads({0: [0]})
    before = list(model.encoder.layer[0].parameters())
    model.prune_heads({1: [0]})
    assert all(one is other for one, other in zip(before, model.encoder.layer[0].parameters(), strict=True))


def test_layers_may_be_counted_from_the_last(tiny):
    model = bertscope.BertModel(tiny)
    model.prune_heads({-1: [0]})
    assert model.config.pruned_heads == {1: (0,)}
    assert bertscope.BertModel(replace(tiny, pruned_heads={-1: [0]})).config.pruned_heads == {1: (0,)}


def test_a_block_refuses_heads_that_it_does_not_have(tiny):
    block = bertscope.BertModel(tiny).encoder.layer[0].attention
    for heads in ([99], [-1], [0, 1]):
        with pytest.raises(ValueError, match="cannot be pruned"):
            block.prune_heads(heads)
    assert block.self.num_attention_heads == 2


def test_a_multiple_that_is_no_integer_is_refused(tiny):
    with pytest.raises(ValueError, match=r"integer; got 1\.3"):
        bertscope.BertModel(tiny).resize_token_embeddings(40, pad_to_multiple_of=1.3)
