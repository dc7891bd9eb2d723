"""Shapes of every module, from a forward pass on meta."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import bertscope
from bertscope.analyses.tracing.trace import shapes
from bertscope.errors import SelectionError
from bertscope.model import CLASSES, build
from bertscope.reports.base import TensorShape


@pytest.mark.parametrize("name", CLASSES)
def test_the_output_of_a_layer_is_the_input_of_the_next(tiny, name):
    config = replace(tiny, num_hidden_layers=3)
    found = shapes(build(config, name), batch=2, seq=5)
    prefix = "" if name == "BertModel" else "bert."
    hidden = found[f"{prefix}embeddings"][1][0]
    for number in range(3):
        given, returned = found[f"{prefix}encoder.layer.{number}"]
        assert given[0] == hidden
        hidden = returned[0]
    assert hidden.shape[-2:] == (5, 8)


def test_shapes_on_meta_are_those_of_a_real_run(tiny):
    seen = {}
    model = bertscope.BertForMaskedLM(tiny).eval()

    def remember(path):
        def hook(module, given, out):
            seen.setdefault(path, tuple(getattr(out, "shape", ())))

        return hook

    for path, module in model.named_modules():
        module.register_forward_hook(remember(path))
    model(torch.ones(3, 7, dtype=torch.long))
    found = shapes(build(tiny, "BertForMaskedLM"), batch=3, seq=7)
    for path, shape in seen.items():
        if shape:
            assert found[path][1][0].shape == shape, path


def test_batch_and_sequence_appear_where_they_must(tiny):
    found = shapes(build(tiny), batch=4096, seq=11)
    assert found[""][0][0] == TensorShape(shape=(4096, 11), dtype="int64")
    assert found["pooler"][1][0].shape == (4096, 8)
    assert found["encoder.layer.0.intermediate"][1][0].shape == (4096, 11, 16)


def test_folded_layers_stay_folded_and_sums_do_not_change(tiny):
    model = build(tiny, "BertForMaskedLM")
    found = shapes(model, 2, 5)
    for analyse in (bertscope.count, bertscope.tree):
        plain, shaped = analyse(model), analyse(model, shapes=found)
        assert [(row.path, row.params, row.copies) for row in plain.rows] == [
            (row.path, row.params, row.copies) for row in shaped.rows
        ]
        assert plain.totals == shaped.totals


def test_parts_of_a_layer_show_what_goes_in_and_comes_out(tiny):
    model = build(tiny)
    (layer,) = [row for row in bertscope.count(model, shapes=shapes(model, 2, 5)).rows if row.name == "layer"]
    parts = {part.name: part for part in layer.parts}
    assert parts["feed_forward"].inputs[0].shape == parts["feed_forward"].outputs[0].shape == (2, 5, 8)
    assert parts["self_attention"].outputs[0].shape == (2, 5, 8)


def test_the_commands_show_shapes(cli):
    for command in ("tree", "count"):
        out = cli(command, "bert-large-zh", "--shapes", "--batch", "4096", "--seq", "512").out
        assert "[4096, 512] int64" in out
        assert "[4096, 512, 1024]" in out
        assert "(24 x)" in out
    data = cli("tree", "bert-tiny", "--shapes", "--format", "json").json
    assert data["rows"][0]["inputs"] == [{"shape": [1, 128], "dtype": "int64"}]
    assert "[1, 128, 128]" in cli("count", "bert-tiny", "--shapes", "--format", "csv").out


def test_sizes_that_do_not_fit_are_refused(cli, tiny):
    with pytest.raises(SelectionError, match="at most max_position_embeddings 12"):
        shapes(build(tiny), 1, 13)
    result = cli("tree", "bert-tiny", "--shapes", "--seq", "513")
    assert (result.code, result.err.count("\n")) == (2, 1)
