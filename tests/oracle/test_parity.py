"""The grid: class, position embedding, kernel and kind of input against the reference, losses and gradients too."""

from functools import partial

import pytest
import torch

from bertscope.config import ACTIVATIONS, BertConfig
from bertscope.model import CLASSES, BertModel, build
from bertscope.model.encoder import activation
from tests.conftest import kinds

# That sdpa falls back to eager is said once; here it may be said.
pytestmark = pytest.mark.filterwarnings("ignore::bertscope.errors.BertscopeWarning")

B, S, H, LAYERS, HEADS, VOCAB = 3, 8, 32, 2, 4, 60
SIZES = {
    "vocab_size": VOCAB, "hidden_size": H, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": 48, "max_position_embeddings": 24, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
POSITIONS = ("absolute", "relative_key", "relative_key_query")
TOLERANCE = {"eager": 1e-6, "sdpa": 1e-5}


KERNELS = ("eager", "sdpa")
KINDS = ("bare", "padded", "embeds", "mask_3d", "head_mask", "head_mask_per_layer", "outputs")
CASES = [(kernel, kind) for kernel in KERNELS for kind in KINDS]
DECODERS = ("BertModel", "BertLMHeadModel")


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.ones(B, S, dtype=torch.long)
    mask[1, 5:] = 0
    mask[2, 2:] = 0
    encoder_mask = torch.ones(B, 5, dtype=torch.long)
    encoder_mask[0, 3:] = 0
    return {
        "input_ids": torch.randint(1, VOCAB, (B, S), generator=generator),
        "attention_mask": mask,
        "token_type_ids": torch.randint(0, 2, (B, S), generator=generator),
        "position_ids": torch.randint(0, 24, (B, S), generator=generator),
        "inputs_embeds": torch.randn(B, S, H, generator=generator),
        "encoder_hidden_states": torch.randn(B, 5, H, generator=generator),
        "encoder_attention_mask": encoder_mask,
    }


def case(kind: str) -> dict[str, torch.Tensor]:
    """The inputs of one kind."""
    all_of_them = tensors()
    chosen = {"input_ids", "attention_mask", "token_type_ids"}
    inputs = {name: tensor for name, tensor in all_of_them.items() if name in chosen}
    if kind == "bare":
        return {"input_ids": inputs["input_ids"]}
    if kind == "embeds":
        del inputs["input_ids"]
        return {**inputs, "inputs_embeds": all_of_them["inputs_embeds"], "position_ids": all_of_them["position_ids"]}
    if kind == "mask_3d":
        return {**inputs, "attention_mask": torch.ones(B, S, S, dtype=torch.long).tril()}
    if kind == "head_mask":
        return {**inputs, "head_mask": torch.tensor([1.0, 0.0, 1.0, 0.5])}
    if kind == "head_mask_per_layer":
        return {**inputs, "head_mask": torch.tensor([[1.0, 0.0, 1.0, 0.5], [0.0, 1.0, 1.0, 1.0]])}
    if kind == "outputs":
        return {**inputs, "output_attentions": True, "output_hidden_states": True}
    return inputs


def labels(name: str) -> dict[str, torch.Tensor]:
    tokens, sentence = tensors(1)["input_ids"].clone(), torch.tensor([0, 1, 1])
    tokens[0, 3:] = -100
    return {
        "BertModel": {},
        "BertForPreTraining": {"labels": tokens, "next_sentence_label": sentence},
        "BertForMaskedLM": {"labels": tokens},
        "BertLMHeadModel": {"labels": tokens},
        "BertForNextSentencePrediction": {"labels": sentence},
        "BertForSequenceClassification": {"labels": sentence},
        "BertForMultipleChoice": {"labels": torch.tensor([2])},
        "BertForTokenClassification": {"labels": tokens.clamp(max=1)},
        "BertForQuestionAnswering": {"start_positions": sentence, "end_positions": torch.tensor([3, 4, 50])},
    }[name]


def of_choices(name: str, inputs: dict) -> dict:
    """BertForMultipleChoice takes the batch as the choices of one question."""
    wide = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")
    if name != "BertForMultipleChoice":
        return inputs
    return {key: value[None] if key in wide else value for key, value in inputs.items()}


def same_weights(pair, name, attention, **fields):
    both = pair(name, "cpu", attention, **{**SIZES, **fields})
    torch.manual_seed(5)
    for parameter in both.reference.parameters():  # far from the initial values, where many terms vanish
        torch.nn.init.normal_(parameter, std=0.3)
    both.own.load_state_dict(both.reference.state_dict())
    return both.reference, both.own


def flat(value) -> list[torch.Tensor]:
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in flat(item)]
    return [value]


def assert_same(own, reference, tolerance: float) -> None:
    assert list(own.keys()) == list(reference.keys())
    for key in reference:
        for got, expected in zip(flat(own[key]), flat(reference[key]), strict=True):
            scale = max(1.0, expected.abs().max().item())  # single precision has seven digits
            torch.testing.assert_close(
                got, expected, rtol=tolerance, atol=tolerance * scale, msg=partial("{}: {}".format, key)
            )


def assert_same_gradients(own, reference) -> None:
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    # Softmax does not see a shift of its scores, so the true gradient of key.bias is zero and what is there
    # is rounding: the largest gradient of the model sets the scale below which nothing is compared.
    largest = max(gradient.abs().max().item() for gradient in expected.values() if gradient is not None)
    assert set(expected) == {name for name, _ in own.named_parameters()}
    for name, parameter in own.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None, name
            continue
        scale = max(expected[name].abs().max().item(), largest / 10)
        named = partial("{}: {}".format, name)
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-5 * scale, msg=named)


@kinds("given, name, positions", CASES, CLASSES, POSITIONS)
def test_outputs_losses_and_gradients_equal_the_references(pair, name, given, positions):
    attention, kind = given
    if name == "BertForMultipleChoice" and kind == "mask_3d":
        pytest.skip("the reference flattens a mask of choices to two dimensions")
    # transformers' own mask for sdpa is two-dimensional alone: there its eager kernel is the witness.
    witness = "eager" if kind == "mask_3d" else attention
    reference, own = same_weights(pair, name, witness, position_embedding_type=positions)
    if witness != attention:
        _, own = same_weights(pair, name, attention, position_embedding_type=positions)
        own.load_state_dict(reference.state_dict())
    inputs = of_choices(name, case(kind))
    wanted = labels(name)
    got, expected = own(**inputs, **wanted), reference(**inputs, **wanted)
    assert_same(got, expected, TOLERANCE[attention])
    for output in (got, expected):
        # The loss, or the last hidden state weighted, since LayerNorm makes the gradient of its plain sum zero.
        (output[0] * torch.linspace(-1, 1, output[0].numel()).view_as(output[0])).sum().backward()
    assert_same_gradients(own, reference)


@kinds("name, positions, attention, kind", CLASSES, POSITIONS, KERNELS, ["bare", "padded"])
def test_chunking_the_feed_forward_equals_the_references(pair, name, attention, kind, positions):
    reference, own = same_weights(pair, name, attention, position_embedding_type=positions, chunk_size_feed_forward=4)
    inputs = of_choices(name, case(kind))
    assert_same(own(**inputs), reference(**inputs), TOLERANCE[attention])


@kinds("given, positions, decoder", CASES, POSITIONS, DECODERS)
def test_a_decoder_with_cross_attention_equals_the_references(pair, decoder, positions, given):
    attention, kind = given
    witness = "eager" if kind == "mask_3d" else attention
    fields = {"position_embedding_type": positions, "is_decoder": True, "add_cross_attention": True}
    reference, _ = same_weights(pair, decoder, witness, **fields)
    _, own = same_weights(pair, decoder, attention, **fields)
    own.load_state_dict(reference.state_dict())
    inputs = case(kind)
    for encoder in ((), ("encoder_hidden_states",), ("encoder_hidden_states", "encoder_attention_mask")):
        everything = inputs | {key: tensors()[key] for key in encoder}
        got, expected = own(**everything), reference(**everything)
        if not encoder and kind == "outputs":
            # Without encoder states the reference puts its caches where cross-attentions belong; ours are empty.
            assert got.cross_attentions == ()
            assert all(torch.is_tensor(item) for cache in expected.cross_attentions for item in cache)
            got.cross_attentions = None
            expected = {key: value for key, value in expected.items() if key != "cross_attentions"}
        assert_same(got, expected, TOLERANCE[attention])


@kinds("positions, decoder, attention, crossed", POSITIONS, DECODERS, KERNELS, [True, False])
def test_each_step_with_a_cache_equals_the_references(pair, decoder, positions, attention, crossed):
    fields = {"position_embedding_type": positions, "is_decoder": True, "add_cross_attention": crossed}
    reference, own = same_weights(pair, decoder, attention, **fields)
    given = {key: tensors()[key] for key in ("encoder_hidden_states", "encoder_attention_mask")} if crossed else {}
    ids, mask = tensors()["input_ids"], torch.ones(B, S, dtype=torch.long)
    with torch.no_grad():
        got = expected = None
        for step in range(S):
            one = {
                "input_ids": ids[:, step : step + 1],
                "attention_mask": mask[:, : step + 1],
                "use_cache": True,
                **given,
            }
            got = own(**one, past_key_values=got.past_key_values if got else None)
            expected = reference(**one, past_key_values=expected.past_key_values if expected else None)
            assert_same(got, expected, TOLERANCE[attention])


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"num_labels": 1}, torch.tensor([0.5, -1.0, 2.0])),
        ({"num_labels": 1}, torch.tensor([[0.5], [-1.0], [2.0]])),
        ({"num_labels": 4}, torch.tensor([0, 3, 1])),
        ({"num_labels": 4}, torch.tensor([[1.0, 0, 0, 1]] * 3)),
        ({"num_labels": 3, "problem_type": "regression"}, torch.tensor([[0.1, 0.2, 0.3]] * 3)),
        ({"num_labels": 3, "problem_type": "single_label_classification"}, torch.tensor([0, 2, 1])),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.tensor([[1.0, 0.0, 1.0]] * 3)),
        ({"num_labels": 3, "classifier_dropout": 0.0}, torch.tensor([0, 2, 1])),
    ],
)
def test_sequence_classification_has_the_references_loss_by_problem_type(pair, fields, wanted):
    reference, own = same_weights(pair, "BertForSequenceClassification", "eager", **fields)
    got, expected = own(**case("padded"), labels=wanted), reference(**case("padded"), labels=wanted)
    assert_same(got, expected, 1e-6)


def assert_same_tuple(got, expected) -> None:
    assert isinstance(got, tuple)
    assert [type(item) for item in got] == [type(item) for item in expected]
    for one, other in zip(flat(got), flat(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


CROSSED = {"is_decoder": True, "add_cross_attention": True}
TUPLES = [
    *((name, {}, "outputs") for name in CLASSES), *((name, CROSSED, "outputs") for name in DECODERS),
    *((f"BertFor{task}", {"is_decoder": True}, "bare")
      for task in ("MaskedLM", "TokenClassification", "QuestionAnswering")),  # a cache in the tuple of every head
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "kind"), TUPLES, ids=str)
def test_without_return_dict_the_tuple_is_the_references(pair, name, fields, kind):
    reference, own = same_weights(pair, name, "eager", **fields)
    given = of_choices(name, case(kind)) | {"return_dict": False} | (labels(name) if not fields else {})
    given |= {"encoder_hidden_states": tensors()["encoder_hidden_states"]} if fields == CROSSED else {}
    assert_same_tuple(own(**given), reference(**given))


@kinds("name, positions", CLASSES, POSITIONS)
def test_pruned_heads_give_the_references_weights_and_outputs(pair, name, positions):
    reference, _ = same_weights(pair, name, "eager", position_embedding_type=positions)
    reference.prune_heads({0: [1, 3], 1: [0]})
    reference.prune_heads({1: [2]})
    config = BertConfig.from_dict({**reference.config.to_dict(), "attn_implementation": "eager"})
    own = build(config, name, device="cpu").eval()
    assert [(n, p.shape) for n, p in own.named_parameters()] == [(n, p.shape) for n, p in reference.named_parameters()]
    own.load_state_dict(reference.state_dict())
    inputs = of_choices(name, case("padded"))
    assert_same(own(**inputs), reference(**inputs), 1e-6)


@kinds("name, attention, positions", CLASSES, KERNELS, POSITIONS)
def test_in_train_mode_the_same_seed_drops_the_same(pair, name, attention, positions):
    rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.3, "classifier_dropout": 0.5}
    reference, own = same_weights(pair, name, attention, position_embedding_type=positions, **rates)
    inputs = of_choices(name, case("padded"))
    outputs = []
    for model in (own, reference):
        torch.manual_seed(11)
        outputs.append(model.train()(**inputs))
    assert_same(*outputs, 1e-5)


def test_every_forward_has_the_references_parameters_in_its_order(pair, name):
    import inspect

    both = pair(name, "meta", **SIZES)
    own, reference = (list(inspect.signature(model.forward).parameters) for model in (both.own, both.reference))
    assert own == [parameter for parameter in reference if parameter != "kwargs"]


def test_every_activation_equals_the_references():
    from transformers.activations import ACT2FN

    values = torch.linspace(-6, 6, 101)
    for hidden_act in ACTIVATIONS:
        torch.testing.assert_close(activation(hidden_act)(values), ACT2FN[hidden_act](values), msg=hidden_act)


def test_a_model_without_pooler_gives_the_same_hidden_states(pair):
    reference, own = same_weights(pair, "BertModel", "eager")
    bare = BertModel(own.config, add_pooling_layer=False).eval()
    bare.load_state_dict({key: value for key, value in own.state_dict().items() if not key.startswith("pooler")})
    ids = tensors()["input_ids"]
    output = bare(ids)
    torch.testing.assert_close(output[0], reference(ids)[0], rtol=1e-6, atol=1e-5)
    assert output.pooler_output is None
    assert bare(ids, return_dict=False)[1] is None
