"""With the reference's weights, outputs equal the reference's."""

from __future__ import annotations

import pytest
import torch

SIZES = {
    "vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 40,
}  # fmt: skip
TOLERANCE = 1e-5


@pytest.fixture
def inputs(name):
    """Ids of three sequences, the second and third padded, on the last positions."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 60, (3, 12), generator=generator)
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, 7:] = 0
    mask[2, 1:] = 0
    types = torch.zeros_like(ids)
    types[:, 6:] = 1
    tensors = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
    return {key: value[None] if name == "BertForMultipleChoice" else value for key, value in tensors.items()}


def same_weights(pair, name, attention, **fields):
    labels = 2 if name == "BertForQuestionAnswering" else 3  # a start and an end
    both = pair(name, "cpu", attention, **SIZES, num_labels=labels, **fields)
    both.own.load_state_dict(both.reference.state_dict())
    return both.reference.eval(), both.own.eval()


def assert_close(own, reference):
    assert list(own.keys()) == list(reference.keys())
    for key, expected in reference.items():
        got = own[key]
        pairs = zip(got, expected, strict=True) if isinstance(expected, tuple) else [(got, expected)]
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "padded"])
def test_outputs_equal_the_references_with_and_without_padding(pair, name, inputs, attention, masked):
    reference, own = same_weights(pair, name, attention)
    given = inputs if masked else {key: value for key, value in inputs.items() if key != "attention_mask"}
    with torch.no_grad():
        assert_close(own(**given), reference(**given))


@pytest.mark.parametrize("hidden_act", ["gelu", "relu", "silu", "gelu_new"])
def test_every_activation_of_the_api_document_equals_the_references(pair, hidden_act):
    reference, own = same_weights(pair, "BertModel", "eager", hidden_act=hidden_act)
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert_close(own(ids), reference(ids))


def test_the_other_activations_equal_the_references(pair):
    from transformers.activations import ACT2FN

    from bertscope.config import ACTIVATIONS
    from bertscope.model.activations import activation

    values = torch.linspace(-6, 6, 101)
    for hidden_act in ACTIVATIONS:
        torch.testing.assert_close(activation(hidden_act)(values), ACT2FN[hidden_act](values), msg=hidden_act)


def test_eager_and_sdpa_agree_on_padded_input(pair, inputs, name):
    _, eager = same_weights(pair, name, "eager")
    _, sdpa = same_weights(pair, name, "sdpa")
    sdpa.load_state_dict(eager.state_dict())
    with torch.no_grad():
        assert_close(sdpa(**inputs), eager(**inputs))


def test_a_model_without_pooler_gives_the_same_hidden_states(pair):
    from bertscope import BertModel

    reference, own = same_weights(pair, "BertModel", "eager")
    bare = BertModel(own.config, add_pooling_layer=False).eval()
    bare.load_state_dict({key: value for key, value in own.state_dict().items() if not key.startswith("pooler")})
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        output = bare(ids)
        torch.testing.assert_close(output[0], reference(ids)[0], rtol=TOLERANCE, atol=TOLERANCE)
    assert output.pooler_output is None
    assert bare(ids, return_dict=False)[1] is None


def test_losses_equal_the_references(pair, name, inputs):
    reference, own = same_weights(pair, name, "eager")
    tokens, sentence = inputs["input_ids"], torch.tensor([0, 1, 1])
    labels = {
        "BertForPreTraining": {"labels": tokens, "next_sentence_label": sentence},
        "BertForMaskedLM": {"labels": tokens},
        "BertLMHeadModel": {"labels": tokens},
        "BertForNextSentencePrediction": {"labels": sentence},
        "BertForSequenceClassification": {"labels": sentence},
        "BertForMultipleChoice": {"labels": torch.tensor([2])},
        "BertForTokenClassification": {"labels": tokens % 3},
        "BertForQuestionAnswering": {"start_positions": sentence, "end_positions": torch.tensor([3, 4, 50])},
    }.get(name)
    if labels is None:
        with pytest.raises(TypeError, match="labels"):
            own(**inputs, labels=tokens)
        return
    with torch.no_grad():
        torch.testing.assert_close(own(**inputs, **labels).loss, reference(**inputs, **labels).loss)
