"""Graphs of torch.fx and torch.export: the outputs of the model for every batch and length."""

from __future__ import annotations

import inspect

import pytest
import torch

from bertscope.config import ARCHITECTURES, BertConfig
from bertscope.model import BertPreTrainedModel, build
from bertscope.model.encoder import ModelOutput
from tests.conftest import kinds

SMALL = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 32,
}  # fmt: skip
TEXT = ("input_ids", "attention_mask", "token_type_ids")
LABELS = ("labels", "next_sentence_label", "start_positions", "end_positions")


def model_of(architecture: str, **fields) -> BertPreTrainedModel:
    torch.manual_seed(0)
    config = BertConfig(**SMALL, is_decoder=architecture == "BertLMHeadModel", **fields)
    return build(config, architecture, device="cpu").eval()


def inputs_of(model: BertPreTrainedModel, names: tuple[str, ...], batch: int, seq: int) -> dict[str, torch.Tensor]:
    """Inputs of these names that forward takes; the last token of the first sentence is padding."""
    kind, takes = type(model).__name__, inspect.signature(model.forward).parameters
    shape = (batch, 2, seq) if kind == "BertForMultipleChoice" else (batch, seq)
    mask = torch.ones(shape)
    mask[0, ..., -1] = 0
    per_token = kind in ("BertForPreTraining", "BertForMaskedLM", "BertLMHeadModel", "BertForTokenClassification")
    made = {
        "input_ids": torch.randint(0, 40, shape), "attention_mask": mask, "token_type_ids": torch.randint(0, 2, shape),
        "labels": torch.randint(0, 2, (batch, seq) if per_token else (batch,)),
        "next_sentence_label": torch.randint(0, 2, (batch,)), "start_positions": torch.zeros(batch, dtype=torch.long),
        "end_positions": torch.full((batch,), seq - 1),
    }  # fmt: skip
    return {name: made[name] for name in names if name in takes}


def traced(model: BertPreTrainedModel, names: tuple[str, ...]) -> torch.fx.GraphModule:
    takes = inspect.signature(model.forward).parameters
    return torch.fx.symbolic_trace(model, concrete_args={name: None for name in takes if name not in names})


def assert_equal_outputs(graph: torch.fx.GraphModule, model: BertPreTrainedModel, names: tuple[str, ...]) -> None:
    for size in ((1, 3), (3, 7)):
        inputs = inputs_of(model, names, *size)
        found, expected = graph(**inputs), model(**inputs)
        assert isinstance(found, ModelOutput)
        assert found.keys() == expected.keys()
        for got, wanted in zip(found.to_tuple(), expected.to_tuple(), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@kinds("architecture, attention", ARCHITECTURES, ["eager", "sdpa"])
def test_a_traced_graph_has_the_outputs_of_the_model_at_every_size(architecture, attention):
    model = model_of(architecture, attn_implementation=attention, use_cache=False)
    for names in (TEXT, TEXT + LABELS):
        assert_equal_outputs(traced(model, names), model, names)


@pytest.mark.parametrize(
    "fields",
    [
        {"attn_implementation": "eager"}, {"attn_implementation": "sdpa"}, {"is_decoder": True},
        {"problem_type": "single_label_classification"},
        {"output_attentions": True, "output_hidden_states": True, "attn_implementation": "eager"},
        {"position_embedding_type": "relative_key_query", "attn_implementation": "eager"},
    ],
    ids=str,
)  # fmt: skip
def test_a_graph_of_ids_only_has_the_default_mask_and_types(fields):
    names = ("input_ids", "labels")
    torch.manual_seed(0)
    model = build(BertConfig(**SMALL, **fields), "BertForSequenceClassification", device="cpu").eval()
    assert_equal_outputs(traced(model, names), model, names)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_graph_takes_every_input_but_a_cache(attention):
    torch.manual_seed(0)
    config = BertConfig(**SMALL, is_decoder=True, add_cross_attention=True, attn_implementation=attention)
    model = build(config, device="cpu").eval()
    names = (*TEXT, "position_ids", "encoder_hidden_states", "encoder_attention_mask")
    names += ("head_mask",) if attention == "eager" else ()
    graph = traced(model, names)
    for batch, seq, length in ((1, 3, 4), (3, 7, 2)):
        inputs = inputs_of(model, TEXT, batch, seq) | {
            "position_ids": torch.arange(seq).flip(0)[None],
            "encoder_hidden_states": torch.randn(batch, length, 16),
            "encoder_attention_mask": torch.ones(batch, length).tril(1),
        }
        inputs |= {"head_mask": torch.tensor([1.0, 0.0])} if attention == "eager" else {}
        assert torch.equal(graph(**inputs).last_hidden_state, model(**inputs).last_hidden_state)


def test_a_graph_checks_its_inputs_as_the_model_does():
    graph = traced(model_of("BertModel"), TEXT)
    good = inputs_of(model_of("BertModel"), TEXT, 2, 5)
    for name, wrong, words in (
        ("input_ids", torch.zeros(5, dtype=torch.long), "must be \\(batch, sequence\\)"),
        ("attention_mask", torch.ones(2, 4), "attention_mask has shape \\(2, 4\\)"),
        ("token_type_ids", torch.zeros(2, 4, dtype=torch.long), "token_type_ids has shape"),
        ("input_ids", torch.zeros(2, 33, dtype=torch.long), "33 long and max_position_embeddings is 32"),
    ):
        with pytest.raises(ValueError, match=words):
            graph(**good | {name: wrong})


def test_an_exported_model_has_the_same_outputs_at_every_size():
    model = model_of("BertModel")
    batch, seq = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("seq", min=2, max=32)
    sizes = {name: {0: batch, 1: seq} for name in TEXT}
    exported = torch.export.export(model, (), inputs_of(model, TEXT, 2, 5), dynamic_shapes=sizes, strict=False).module()
    for size in ((3, 4), (4, 9)):
        inputs = inputs_of(model, TEXT, *size)
        torch.testing.assert_close(exported(**inputs).last_hidden_state, model(**inputs).last_hidden_state)
