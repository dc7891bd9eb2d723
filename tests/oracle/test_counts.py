"""Names, shapes, totals and forward FLOPs equal those of transformers, for many configurations of every class."""

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import bertscope
from bertscope.model import CLASSES
from bertscope.tracing.inputs import example_inputs
from tests.conftest import kinds


@st.composite
def fields(draw) -> dict:
    heads = draw(st.integers(1, 4))
    is_decoder = draw(st.booleans())
    vocab_size = draw(st.integers(2, 60))
    return {
        "vocab_size": vocab_size,
        "num_attention_heads": heads,
        "hidden_size": heads * draw(st.integers(1, 6)),
        "num_hidden_layers": draw(st.integers(0, 3)),
        "intermediate_size": draw(st.integers(1, 20)),
        "max_position_embeddings": draw(st.integers(1, 30)),
        "type_vocab_size": draw(st.integers(1, 3)),
        "hidden_act": draw(st.sampled_from(["gelu", "relu", "silu", "gelu_new"])),
        "position_embedding_type": draw(st.sampled_from(["absolute", "relative_key", "relative_key_query"])),
        "is_decoder": is_decoder,
        "add_cross_attention": is_decoder and draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "num_labels": draw(st.integers(1, 5)),
        "pad_token_id": draw(st.sampled_from([None, 0, 1])),
    }


def described(tensors) -> list[tuple]:
    return [(path, tuple(tensor.shape), tensor.dtype) for path, tensor in tensors]


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=fields())
def test_names_shapes_and_totals_equal_the_references(pair, name, fields):
    both = pair(name, "meta", **fields)
    assert described(both.own.named_parameters()) == described(both.reference.named_parameters())
    assert described(both.own.named_buffers()) == described(both.reference.named_buffers())
    assert described(both.own.state_dict().items()) == described(both.reference.state_dict().items())
    assert bertscope.count(both.own).totals == bertscope.count(both.reference).totals


@kinds("name, by", CLASSES, ["group", "layer", "module", "parameter"])
def test_a_report_on_the_references_model_equals_ours_row_by_row(pair, name, by):
    both = pair(name, "meta", "sdpa", num_hidden_layers=3, hidden_size=24, vocab_size=50, intermediate_size=20)
    own, reference = bertscope.count(both.own, by=by), bertscope.count(both.reference, by=by)
    assert own.rows == reference.rows
    assert own.ties == reference.ties
    assert bertscope.tree(both.own).rows == bertscope.tree(both.reference).rows


def test_torchscript_frees_the_decoder_as_in_the_reference(pair):
    both = pair("BertForMaskedLM", "meta", vocab_size=40, hidden_size=24, num_hidden_layers=1, torchscript=True)
    assert bertscope.count(both.own).totals == bertscope.count(both.reference).totals
    assert both.own.config.ignored.count("torchscript") == 0


def test_every_presets_expected_counts_are_the_references(pair):
    from bertscope.sources.bert import preset_paths

    for preset in preset_paths(".yaml"):
        source = bertscope.load(preset)
        shape = {name: value for name, value in source.config.to_dict().items() if name != "attn_implementation"}
        reference = pair(source.architecture, "meta", **shape).reference
        if not source.add_pooling_layer:
            reference.pooler = None
        expected = {item.key: item.value for item in source.expected}
        assert expected["distinct_params"] == sum(p.numel() for p in reference.parameters()), preset
        over_layers = sum(
            parameter.numel()
            for module in reference.modules()
            if not list(module.children())
            for parameter in module.parameters()
        )
        assert expected["layer_params"] == over_layers, preset
        sums = Counter({"embeddings": 0, "encoder": 0})
        for path, parameter in reference.named_parameters():
            sums[path.removeprefix("bert.").split(".")[0]] += parameter.numel()
        assert expected["groups.embeddings"] == sums["embeddings"], preset
        assert expected["groups.encoder"] == sums["encoder"], preset


def counted(model, inputs: dict) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    return counter.get_total_flops()


@pytest.mark.filterwarnings("ignore::bertscope.errors.BertscopeWarning")
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=fields(), batch=st.integers(1, 4), attention=st.sampled_from(["eager", "sdpa"]), data=st.data())
def test_forward_flops_equal_flop_counter_mode_on_the_reference(pair, name, fields, batch, attention, data):
    fields |= {"num_labels": 2}  # the reference's question answering can run with no other number
    seq = data.draw(st.integers(1, fields["max_position_embeddings"]))
    both = pair(name, "meta", attention, **fields)
    both.own.eval(), both.reference.eval()
    inputs = example_inputs(both.own, batch, seq)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])  # without one the reference looks for padding
    eager = pair(name, "meta", "eager", **fields).reference.eval()  # the reference's sdpa looks at values, not on meta
    report = bertscope.flops(both.own, inputs)
    assert report.rows[0].forward.matmul_flops == counted(eager, inputs)
    assert report.unknown_operators == ()


def test_any_module_of_the_reference_can_be_counted(pair, name):
    both = pair(name, "cpu", "eager", num_hidden_layers=2, hidden_size=24, vocab_size=50, intermediate_size=20)
    shape = (2, 3, 7) if name == "BertForMultipleChoice" else (2, 7)
    inputs = {"input_ids": torch.ones(shape, dtype=torch.long)}
    for mode in ("inference", "training"):
        own = bertscope.flops(both.own, inputs, mode=mode)
        reference = bertscope.flops(both.reference, inputs, mode=mode)
        assert own.rows[0].total.matmul_flops == reference.rows[0].total.matmul_flops > 0
