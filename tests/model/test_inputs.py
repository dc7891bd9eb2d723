"""Inputs of the model: with masks, caches and embeddings, on meta, in half precision, traced, exported and compiled."""

from dataclasses import replace

import pytest
import torch

import bertscope
from bertscope.model import build
from tests.conftest import EVERY_CASE

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]])


@pytest.fixture
def decoder(tiny):
    return bertscope.BertModel(replace(tiny, is_decoder=True, add_cross_attention=True)).eval()


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.long)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, "either input_ids or inputs_embeds"),
        ({"input_ids": IDS, "inputs_embeds": torch.ones(2, 4, 8)}, "either input_ids or inputs_embeds"),
        ({"input_ids": ones(1, 13)}, "13 long and max_position_embeddings is 12"),
    ],
)
def test_inputs_that_the_model_cannot_take_are_refused(tiny, inputs, words):
    for positions in ("absolute", "relative_key"):
        with pytest.raises(ValueError, match=words):
            bertscope.BertModel(replace(tiny, position_embedding_type=positions))(**inputs)


def test_encoder_states_need_cross_attention(tiny):
    model = bertscope.BertModel(replace(tiny, is_decoder=True))
    with pytest.raises(ValueError, match="no cross-attention"):
        model(IDS, encoder_hidden_states=torch.ones(2, 3, 8))


def test_chunks_must_divide_the_sequence(tiny):
    model = bertscope.BertModel(replace(tiny, chunk_size_feed_forward=3))
    with pytest.raises(bertscope.BertscopeError, match="seq 4 is not a multiple of the model's chunk_size"):
        bertscope.estimate(model.config, batch=1, seq=4)
    with pytest.raises(ValueError, match="length 4 is not divisible by chunk_size_feed_forward 3"):
        model(IDS)


def test_masks_of_three_and_four_dimensions_say_the_same_as_two(tiny):
    model = bertscope.BertModel(tiny).eval()
    mask = (IDS > 0).long()
    flat = model(IDS, mask)[0]
    torch.testing.assert_close(model(IDS, mask[:, None, :].expand(2, 4, 4))[0], flat)
    torch.testing.assert_close(model(IDS, mask[:, None, None, :])[0], flat)
    torch.testing.assert_close(model(IDS, mask[:, None, None, :].expand(2, 2, 4, 4))[0], flat)
    torch.testing.assert_close(model(IDS, mask.bool())[0], flat)
    torch.testing.assert_close(model(IDS, mask.float())[0], flat)


def test_a_callable_activation_runs(tiny):
    model = bertscope.BertModel(replace(tiny, hidden_act=torch.tanh)).eval()
    named = bertscope.BertModel(replace(tiny, hidden_act="tanh")).eval()
    named.load_state_dict(model.state_dict())
    assert torch.equal(model(IDS)[0], named(IDS)[0])


@pytest.mark.parametrize("positions", ["absolute", "relative_key", "relative_key_query"])
def test_a_decoder_runs_on_meta_with_mask_cache_and_encoder_states(tiny, positions):
    config = replace(
        tiny, is_decoder=True, add_cross_attention=True, position_embedding_type=positions, attn_implementation="eager"
    )
    model = build(config, "BertLMHeadModel")
    states = torch.empty(2, 3, 8, device="meta")
    first = model(ones(2, 4).to("meta"), encoder_hidden_states=states, use_cache=True)
    second = model(
        ones(2, 1).to("meta"),
        ones(2, 5).to("meta"),
        encoder_hidden_states=states,
        past_key_values=first.past_key_values,
    )
    assert second.logits.shape == (2, 1, 32)
    assert second.past_key_values[0][0].shape == (2, 2, 5, 4)


def test_autocast_computes_in_bf16_and_stays_near(tiny):
    for attention in ("eager", "sdpa"):
        model = bertscope.BertForMaskedLM(replace(tiny, attn_implementation=attention)).eval()
        mask = (IDS > 0).long()
        exact = model(IDS, mask).logits
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(IDS, mask, labels=IDS)
        assert output.logits.dtype == torch.bfloat16
        assert output.loss.isfinite()
        torch.testing.assert_close(output.logits.float(), exact, atol=0.02, rtol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_with_padding(tiny, dtype):
    model = bertscope.BertModel(tiny).eval().to(dtype)
    output = model(IDS, (IDS > 0).long())[0]
    assert output.dtype == dtype
    assert output.isfinite().all()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertLMHeadModel"])
def test_a_model_can_be_traced_with_tuples(tiny, name):
    is_decoder = name == "BertLMHeadModel"
    model = build(replace(tiny, return_dict=False, is_decoder=is_decoder, use_cache=False), name, device="cpu").eval()
    given = (IDS,) if is_decoder else (IDS, (IDS > 0).long())
    torch.testing.assert_close(torch.jit.trace(model, given)(*given)[0], model(*given)[0])


def test_gradients_reach_hidden_states_and_attentions(tiny):
    model = bertscope.BertModel(replace(tiny, attn_implementation="eager"))
    output = model(IDS, output_hidden_states=True, output_attentions=True)
    for tensor in (output.hidden_states[0], output.attentions[0]):
        tensor.retain_grad()
    output[0].flatten()[0].backward()
    assert output.hidden_states[0].grad is not None
    assert output.attentions[0].grad is not None


def test_a_cache_without_encoder_states_continues_with_them(decoder):
    past = decoder(IDS[:, :3]).past_key_values
    outputs = [
        decoder(IDS[:, 3:], past_key_values=past, encoder_hidden_states=scale * torch.ones(2, 3, 8).cumsum(1))[0]
        for scale in (1.0, -3.0)
    ]
    assert not torch.allclose(*outputs)
    assert decoder.encoder.layer[0](torch.ones(2, 1, 8), past_key_value=past[0])[0].shape == (2, 1, 8)


@pytest.mark.parametrize("decodes", [True, False][: 1 + EVERY_CASE])
def test_a_model_compiles_without_a_graph_break_and_takes_a_second_length(tiny, decodes):
    torch._dynamo.reset()
    kernel = "sdpa" if decodes else "eager"
    config = replace(tiny, is_decoder=decodes, use_cache=False, num_hidden_layers=1, attn_implementation=kernel)
    model = bertscope.BertLMHeadModel(config).eval() if decodes else bertscope.BertModel(config).eval()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for length in (4, 3):
        ids = IDS[:, :length].clone()
        given = (ids,) if decodes else (ids, torch.ones_like(ids))
        torch.testing.assert_close(compiled(*given)[0], model(*given)[0])


def test_positions_may_be_one_row_for_all(tiny):
    model = bertscope.BertModel(tiny).eval()
    torch.testing.assert_close(model(IDS, position_ids=torch.arange(4))[0], model(IDS)[0])
    choice = bertscope.BertForMultipleChoice(tiny).eval()
    torch.testing.assert_close(choice(IDS[None], position_ids=torch.arange(4)[None])[0], choice(IDS[None])[0])


def test_the_model_maps_over_samples(tiny):
    model = bertscope.BertModel(replace(tiny, attn_implementation="eager")).eval()
    weights = dict(model.named_parameters())
    mapped = torch.func.vmap(lambda row: torch.func.functional_call(model, weights, (row[None],)).pooler_output[0])(IDS)
    torch.testing.assert_close(mapped, model(IDS).pooler_output)


def test_an_exported_model_has_the_same_outputs_at_every_size(tiny):
    model = bertscope.BertModel(tiny).eval()
    sizes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("seq", min=2, max=12)}

    def inputs(batch: int, seq: int) -> dict[str, torch.Tensor]:
        mask = torch.ones(batch, seq)
        mask[0, -1] = 0
        return {"input_ids": torch.arange(batch * seq).reshape(batch, seq) % 32, "attention_mask": mask}

    shapes = dict.fromkeys(inputs(2, 5), sizes)
    exported = torch.export.export(model, (), inputs(2, 5), dynamic_shapes=shapes, strict=False).module()
    for size in ((3, 4), (4, 9)):
        torch.testing.assert_close(exported(**inputs(*size))[0], model(**inputs(*size))[0])
