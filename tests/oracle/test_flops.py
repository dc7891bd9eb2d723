"""Forward FLOPs equal torch's FlopCounterMode on the reference on meta, for every class and kind of attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import bertscope
from bertscope.analyses.tracing.inputs import example_inputs
from tests.oracle.test_counts import fields as shapes


def counted(model, inputs: dict) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    return counter.get_total_flops()


@pytest.mark.filterwarnings("ignore::bertscope.errors.BertscopeWarning")
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=shapes(), batch=st.integers(1, 4), attention=st.sampled_from(["eager", "sdpa"]), data=st.data())
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
