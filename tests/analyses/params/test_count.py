"""The laws of counting, on any module; repeated layers as written sums."""

import copy
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bertscope
from bertscope.analyses.explain_modules import value_of
from bertscope.analyses.params import BY, count
from bertscope.errors import SelectionError
from bertscope.tracing.module_tree import freeze
from tests.models import TRAPS, Tied, shared


def numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@st.composite
def modules(draw, depth: int = 3) -> nn.Module:
    """Random trees of layers, lists and containers, some layers tied, shared or frozen."""
    sizes = st.integers(1, 4)
    if depth == 0 or draw(st.booleans()):
        leaf = draw(st.sampled_from(["linear", "embedding", "norm", "dropout", "list"]))
        if leaf == "linear":
            return nn.Linear(draw(sizes), draw(sizes), bias=draw(st.booleans()))
        if leaf == "embedding":
            return nn.Embedding(draw(sizes), draw(sizes))
        if leaf == "norm":
            return nn.BatchNorm1d(draw(sizes))
        return nn.Dropout() if leaf == "dropout" else nn.ParameterList([torch.ones(draw(sizes))])
    children = draw(st.lists(modules(depth=depth - 1), min_size=1, max_size=3))
    if draw(st.booleans()):
        children += [copy.deepcopy(children[-1])] * draw(st.integers(0, 2))  # equal, or the same, neighbours
    container = nn.ModuleList(children) if draw(st.booleans()) else nn.Sequential(*children)
    if draw(st.booleans()):
        container.own = nn.Parameter(torch.ones(draw(sizes)))
    return container


@st.composite
def models(draw) -> nn.Module:
    model = nn.Sequential(draw(modules()), draw(modules()))
    parameters = [(module, name) for module in model.modules() for name in module._parameters]
    for _ in range(draw(st.integers(0, 3)) if parameters else 0):
        module, name = draw(st.sampled_from(parameters))
        other, other_name = draw(st.sampled_from(parameters))
        module._parameters[name] = other._parameters[other_name]
    for parameter in model.parameters():
        parameter.requires_grad_(draw(st.booleans()))
    return model


@settings(max_examples=30, deadline=None)
@given(model=models(), folded=st.booleans())
def test_rows_sum_to_the_totals_however_they_are_cut(model, folded):
    for by in BY:
        report = bertscope.count(model, by=by, folded=folded)
        rows = [row for row in report.rows if row.in_layer_sum]
        assert sum(row.params for row in rows) == report.totals.layer_params
        assert sum(row.distinct_params for row in report.rows) == report.totals.distinct_params == numel(model)
        for row in report.rows:
            assert row.params == row.copies * row.each_params
            if row.parts:
                assert sum(part.params for part in row.parts) == row.params
                assert sum(part.distinct_params for part in row.parts) == row.distinct_params


@settings(max_examples=25, deadline=None)
@given(model=models())
def test_the_tree_has_torchs_own_sums_at_every_depth_folded_or_not(model):
    whole, plain = bertscope.tree(model), bertscope.tree(model, folded=False)
    totals = whole.totals
    assert totals == plain.totals == bertscope.count(model).totals
    assert totals.trainable_params == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert totals.trainable_params + totals.frozen_params == totals.distinct_params
    assert totals.trainable_layer_params + totals.frozen_layer_params == totals.layer_params
    assert totals.buffer_params == sum(buffer.numel() for buffer in model.buffers())
    for depth in {row.depth for row in plain.rows}:
        sums = [sum(row.params for row in report.rows if row.depth == depth) for report in (whole, plain)]
        assert sums[0] == sums[1]
        report = bertscope.tree(model, depth=depth)
        assert report.totals == totals
        assert report.rows == tuple(row for row in whole.rows if row.depth <= depth)
    assert whole.rows[0].params == totals.layer_params


def test_the_rows_of_two_equal_layers_and_another_add_up_to_figures_found_by_hand():
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 3), nn.Linear(2, 3)]), nn.Linear(3, 1, bias=False))
    each = 2 * 3 + 3
    for folded, rows in ((True, [("0.0-1", 2 * each), ("1", 3)]), (False, [("0.0", each), ("0.1", each), ("1", 3)])):
        assert [(row.path, row.params) for row in bertscope.count(model, folded=folded).rows] == rows
    by_depth = {depth: [row.params for row in bertscope.tree(model, depth=depth).rows] for depth in (0, 1, 2)}
    assert by_depth == {0: [21], 1: [21, 18, 3], 2: [21, 18, 18, 3]}


@pytest.mark.parametrize("name", TRAPS)
def test_a_module_that_misleads_naive_counters_has_the_figures_found_by_hand(name):
    trap = TRAPS[name]
    report = bertscope.count(trap.make())
    totals = report.totals
    assert (totals.distinct_params, totals.layer_params) == (trap.unique, trap.over_layers)
    assert (totals.frozen_params, totals.buffer_params) == (trap.frozen, trap.buffers)
    assert totals.param_bytes == trap.param_bytes
    assert report.unknown == trap.unknown
    assert bertscope.tree(trap.make()).totals == totals


def test_a_tied_weight_counts_once_as_distinct_and_once_at_every_layer_also_on_meta():
    report = bertscope.count(Tied())
    assert [(tie.path, tie.is_path, tie.params) for tie in report.ties] == [
        ("decoder.weight", "embedding.weight", 15),  # the largest first
        ("bias", "decoder.bias", 5),
    ]
    assert {row.path: row.tied_to for row in report.rows} == {"embedding": None, "decoder": "embedding.weight"}
    with torch.device("meta"):  # where there is no storage
        assert bertscope.count(Tied()).rows == report.rows
    assert bertscope.count(Tied(), dtype="bf16").totals.param_bytes == 2 * 20


def test_a_module_under_two_names_counts_once_and_is_named():
    assert [(tie.path, tie.is_path) for tie in bertscope.count(shared()).ties] == [("b", "a")]
    same = [row.same_as for row in bertscope.tree(shared()).rows]
    assert same == [None, None, "a"]


def test_a_module_with_nothing_in_it_has_zero_everywhere():
    report = bertscope.count(nn.ReLU())
    assert (report.rows, report.totals.distinct_params) == ((), 0)
    assert bertscope.tree(nn.ReLU()).rows[0].share == 0


def test_equal_layers_fold_and_a_frozen_one_splits_the_fold(tiny):
    model = bertscope.build(tiny.__class__(**{**tiny.to_dict(), "num_hidden_layers": 4}))
    freeze(model, ["encoder.layer.1"])
    report = bertscope.count(model)
    assert [(row.path, row.copies, row.trainable_params > 0) for row in report.rows if row.name == "layer"] == [
        ("encoder.layer.0", 1, True),
        ("encoder.layer.1", 1, False),
        ("encoder.layer.2-3", 2, True),
    ]


def test_cross_attention_and_distances_have_their_place_in_the_layer(tiny):
    config = tiny.__class__(
        **{**tiny.to_dict(), "is_decoder": True, "add_cross_attention": True, "position_embedding_type": "relative_key"}
    )
    (layer,) = [row for row in bertscope.count(bertscope.build(config)).rows if row.name == "layer"]
    square, distances = 4 * (8 * 8 + 8), 23 * 4
    assert {part.name: part.each_params for part in layer.parts} == {
        "self_attention": square + distances,
        "attention_LayerNorm": 16,
        "cross_attention": square,
        "cross_attention_LayerNorm": 16,
        "feed_forward": 8 * 16 + 16 + 16 * 8 + 8,
        "LayerNorm": 16,
    }


@pytest.mark.parametrize(
    ("pattern", "frozen"),
    [
        ("embeddings", 32 * 8 + 12 * 8 + 2 * 8 + 16), ("bert.embeddings.word_embeddings.weight", 32 * 8),
        ("encoder.layer.0", 600), ("*.bias", None), ("LayerNorm", 16 * 6), ("layer.1", 600),
    ],
)  # fmt: skip
def test_freeze_takes_globs_and_whole_parts_of_a_path(tiny, pattern, frozen):
    model = bertscope.build(tiny, "BertForMaskedLM")
    freeze(model, [pattern])
    expected = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert bertscope.count(model).totals.frozen_params == expected > 0
    assert frozen in (None, expected)
    with pytest.raises(SelectionError, match="matches no parameter"):
        freeze(model, ["encoder.layer.00"])


def test_sorting_by_params_is_descending_and_keeps_the_rows(tiny):
    model = bertscope.build(tiny)
    by_size = bertscope.count(model, sort="params").rows
    assert [row.params for row in by_size] == sorted((row.params for row in by_size), reverse=True)
    assert set(by_size) == set(bertscope.count(model).rows)
    paths = [row.path for row in bertscope.count(model, sort="path").rows]
    assert paths == sorted(paths)


def closed_form(c, *, pooler: bool) -> int:
    """The second witness: the formula of Devlin et al.'s model."""
    h, i = c.hidden_size, c.intermediate_size
    embeddings = (c.vocab_size + c.max_position_embeddings + c.type_vocab_size) * h + 2 * h
    layer = 4 * (h * h + h) + 2 * h + (h * i + i) + (i * h + h) + 2 * h
    return embeddings + c.num_hidden_layers * layer + (h * h + h if pooler else 0)


@settings(max_examples=25, deadline=None)
@given(
    heads=st.integers(1, 8), size=st.integers(1, 16), layers=st.integers(0, 5), intermediate=st.integers(1, 64),
    vocab=st.integers(1, 100), positions=st.integers(1, 64), types=st.integers(1, 4), pooler=st.booleans(),
)  # fmt: skip
def test_the_count_is_the_closed_form(heads, size, layers, intermediate, vocab, positions, types, pooler):
    config = bertscope.BertConfig(
        vocab_size=vocab, hidden_size=heads * size, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=intermediate, max_position_embeddings=positions, type_vocab_size=types,
    )  # fmt: skip
    report = bertscope.count(bertscope.build(config, add_pooling_layer=pooler))
    assert report.totals.distinct_params == report.totals.layer_params == closed_form(config, pooler=pooler)


def pair_of_tied_linears() -> nn.Module:
    block = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    block.b.weight = block.a.weight
    return block


def test_a_tie_within_each_copy_keeps_its_name_when_folded():
    model = nn.ModuleList([pair_of_tied_linears(), pair_of_tied_linears()])
    (row,) = bertscope.count(model).rows
    assert row.copies == 2
    assert [part.tied_to for part in row.parts] == [None, "0-1.a.weight"]
    assert row.tied_to is None  # the repeated tensor lies inside the row itself
    tied = {row.path: row.tied_to for row in bertscope.count(model, by="parameter", folded=True).rows}
    assert tied["0-1.b.weight"] == "0-1.a.weight"


def test_layers_tied_each_to_another_are_not_folded():
    model = nn.ModuleDict({key: nn.ModuleList([nn.Linear(2, 2) for _ in range(3)]) for key in "ed"})
    for encoder, decoder in zip(model.e, model.d, strict=True):
        decoder.weight = encoder.weight
    rows = {row.path: row for row in bertscope.count(model).rows}
    assert rows["e.0-2"].copies == 3
    assert [rows[f"d.{number}"].tied_to for number in range(3)] == ["e.0.weight", "e.1.weight", "e.2.weight"]


def test_layers_of_another_dtype_are_not_folded():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).half()])
    assert [row.copies for row in bertscope.count(model).rows] == [1, 1]


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_bytes_follow_the_dtype_and_shares_of_folded_parameters_add_up(tiny, dtype, size):
    report = bertscope.count(bertscope.build(tiny), by="parameter", folded=True, dtype=dtype)
    totals = report.totals
    assert totals.param_bytes == size * totals.distinct_params
    assert (totals.fp32_bytes, totals.bf16_bytes) == (4 * totals.distinct_params, 2 * totals.distinct_params)
    assert any(row.copies == 2 for row in report.rows)
    assert sum(row.share for row in report.rows) == pytest.approx(1)
    cased = bertscope.count("bert-base-cased")  # whose decoder is tied to the embeddings
    assert (cased["encoder"].share, cased["decoder"].share) == (85_054_464 / 130_609_732, 22_297_924 / 130_609_732)


def test_numbers_at_a_depth_go_on_after_a_fold():
    model = nn.Sequential(nn.ModuleList([nn.ReLU(), nn.ReLU(), nn.ReLU()]), nn.ModuleList([nn.Tanh()]))
    assert [row.depth_index for row in bertscope.tree(model).rows] == ["", "1-1", "2-1", "1-2", "2-4"]


def written(model: nn.Module) -> dict[str, str]:
    return {item.name: f"{item.terms} = {item.params:,}" for item in count(model).sums}


@pytest.mark.parametrize("by", ["group", "layer", "module", "parameter"])
@pytest.mark.parametrize("fields", [{}, {"add_cross_attention": True, "is_decoder": True},
                                    {"position_embedding_type": "relative_key"}])  # fmt: skip
def test_every_sum_has_the_value_that_a_reader_computes(by, fields):
    config = bertscope.BertConfig(hidden_size=8, num_hidden_layers=3, num_attention_heads=2, vocab_size=20, **fields)
    report = bertscope.count(bertscope.BertForMaskedLM(config), by=by)
    for item in report.sums:
        for side in item.terms.split(" = "):
            assert value_of(re.sub(",", "", side).replace(" x ", " * ")) == item.params
    assert report.sums[0].params == report.totals.layer_params


class Stacked(nn.Module):
    """Two layers of two dense layers without bias and one with, after a table."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.ModuleDict() for _ in range(2))
        for layer in self.layers:
            layer.update({"a": nn.Linear(4, 3, bias=False), "b": nn.Linear(4, 3, bias=False), "c": nn.Linear(4, 2)})


def test_equal_neighbours_are_one_term_and_a_weight_without_bias_is_written_as_stored():
    assert written(Stacked()) == {
        "total": "20 + 2 x 34 = 88",
        "layer": "2 x 12 + 10 = 34",
        "a": "3 x 4 = 12",
        "b": "3 x 4 = 12",
        "c": "4 x 2 + 2 = 10",
    }


@pytest.mark.parametrize("model", [nn.Linear(3, 4), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))])
def test_a_model_without_repeated_layers_has_no_sums(model):
    assert written(model) == {}
