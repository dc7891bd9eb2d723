"""Few layers for many: up to 10,000 equal layers are counted from two or three, by one test that layers are alike."""

from __future__ import annotations

import pytest
from torch import nn

import bertscope
from bertscope.analyses.params import counts, tree
from bertscope.config import ARCHITECTURES, MAX_BUILT_LAYERS, MAX_LAYERS
from bertscope.errors import BertscopeError, ConfigError, SelectionError
from bertscope.model import BertModel, encoder
from bertscope.sources.find import source_of
from bertscope.sources.model_source import built_for_counting
from bertscope.tracing.repeat import LayerStack, equal_runs, layer_stacks
from tests.memory.steps import small

SIZES = {
    "hidden_size": 4, "num_attention_heads": 2, "intermediate_size": 6, "vocab_size": 30, "type_vocab_size": 2,
    "max_position_embeddings": 16,
}  # fmt: skip
# By hand: four 4 x 4 matrices with biases, 4 x 6 and 6 x 4 with biases, two LayerNorms.
LAYER = 4 * (4 * 4 + 4) + (4 * 6 + 6) + (6 * 4 + 4) + 2 * (4 + 4)
REST = (30 + 2 + 16) * 4 + (4 + 4) + (4 * 4 + 4)  # embeddings, their LayerNorm, the pooler


def config(layers: int, **fields) -> bertscope.BertConfig:
    return bertscope.BertConfig(num_hidden_layers=layers, **SIZES, **fields)


@pytest.mark.parametrize(
    ("architecture", "fields", "lora"),
    [
        *((name, {}, lora) for name in ARCHITECTURES for lora in (None, "r=2,target=all-linear")),
        *(("BertForMaskedLM", fields, lora)
          for fields in ({"position_embedding_type": "relative_key"}, {"is_decoder": True, "add_cross_attention": True})
          for lora in (None, "r=2,target=all-linear", "r=2,target=query,bias=all")),
    ],
)  # fmt: skip
def test_two_layers_repeated_give_the_reports_of_the_real_modules(architecture, fields, lora):
    source = source_of(config(7, **fields)).with_options(architecture=architecture, lora=lora)
    real, short = source.build(), built_for_counting(source, most=2)
    assert len(short.get_submodule(source.layer_path)) == 2
    assert counts(short, ("group", "layer", "module")) == counts(real, ("group", "layer", "module"))
    assert counts(short, ("parameter",), folded=True) == counts(real, ("parameter",), folded=True)
    assert tree(short) == tree(real)


def test_ten_thousand_layers_are_counted_from_two_as_by_hand_in_as_small_a_report_as_twelve(monkeypatch):
    built, layer = [], encoder.BertLayer
    monkeypatch.setattr(encoder, "BertLayer", lambda config: built.append(config) or layer(config))
    found = bertscope.count(config(MAX_LAYERS), by="parameter")
    assert len(built) == 2
    assert found.totals.distinct_params == REST + MAX_LAYERS * LAYER
    row = found["encoder.layer.0-9999.attention.self.query.weight"]
    assert (row.copies, row.each_params, row.params) == (10_000, 16, 160_000)
    assert bertscope.tree(config(MAX_LAYERS))["encoder.layer.0-9999"].params == MAX_LAYERS * LAYER
    many, twelve = (len(bertscope.to_json(bertscope.count(config(layers), by="module"))) for layers in (MAX_LAYERS, 12))
    assert many < 1.1 * twelve


def test_up_to_256_layers_the_real_modules_are_built_as_before():
    source = source_of(config(MAX_BUILT_LAYERS))
    assert len(built_for_counting(source).encoder.layer) == MAX_BUILT_LAYERS
    assert source.notice == ""
    more = source_of(config(MAX_BUILT_LAYERS + 1))
    assert len(built_for_counting(more).encoder.layer) == 2
    assert more.notice.startswith("257 equal layers: counted from two or three of them")


@pytest.mark.parametrize("run", [{}, {"mode": "training"}, {"mode": "training", "checkpointing": "full"}])
def test_the_flops_of_many_layers_grow_as_those_of_few(run):
    of = {layers: bertscope.flops(config(layers), batch=1, seq=8, **run)[""] for layers in (4, 5, 1_000)}
    for phase in ("forward", "backward", "recompute"):
        four, five, thousand = (getattr(of[layers], phase).matmul_flops for layers in (4, 5, 1_000))
        assert thousand == four + 996 * (five - four)


@pytest.mark.parametrize(
    "run", [{"checkpointing": "full", "device": "cuda"}, {"strategy": "zero1", "world_size": 8, "optimizer": "adamw"}]
)
def test_the_memory_of_many_layers_grows_as_that_of_few(run):
    of = {}
    for layers in (4, 5, 257):
        report = bertscope.estimate(config(layers), batch=2, seq=8, **{"optimizer": "sgd", **run})
        of[layers] = report[run.get("checkpointing", "none")].memory
        assert report.subject.config["num_hidden_layers"] == layers
    for value in (lambda memory: memory.cost.saved_bytes, lambda memory: memory.phases[0].parts.parameters):
        four, five, many = (value(of[layers]) for layers in (4, 5, 257))
        assert many == four + 253 * (five - four)


def test_of_many_layers_the_batch_that_fit_finds_fits_and_the_weights_are_as_by_hand():
    row = bertscope.fit(config(300), "1GiB", seq=8, checkpointing="none", precision="fp32")["none, fp32, seq 8"]
    assert row.peak_bytes <= 2**30 < row.next_peak_bytes
    report = bertscope.estimate(config(300), batch=2, seq=8, optimizer="sgd", optimizer_implementation="fused")
    memory = report.variants[0].estimated
    assert memory.peak.parts.parameters == 4 * (REST + 300 * LAYER)
    assert memory.traced_layers == 3


def test_a_difference_names_the_layers_that_only_one_model_has():
    rows = bertscope.diff(config(1_000), config(998), seq=8).rows
    assert {row.path.removeprefix("encoder.layer.").partition(".")[0] for row in rows} == {"998-999"}
    assert sum(row.params_a for row in rows) == 2 * LAYER
    assert {(row.status, row.copies) for row in rows} == {("removed", 2)}


@pytest.mark.parametrize("make", [
    lambda: BertModel(config(257)), lambda: bertscope.build(config(257)), lambda: source_of(config(257)).build(),
    lambda: bertscope.count(config(257, pruned_heads={3: [0]})),
])  # fmt: skip
def test_a_question_that_needs_every_layer_is_refused_with_what_to_do(make):
    words = r"this builds every layer, and 25[78] are more than 256; .* lower num_hidden_layers"
    with pytest.raises(ConfigError, match=words):
        make()
    with pytest.raises(BertscopeError, match="at most 10,000"):
        config(MAX_LAYERS + 1)


# ---- check ----


def test_layers_that_differ_are_an_error_of_a_count_from_two():
    model = built_for_counting(source_of(config(300)))
    model.encoder.layer[1].output.dense = model.encoder.layer[1].intermediate.dense
    with pytest.raises(SelectionError, match="300 layers are counted from two equal ones"):
        bertscope.count(model)


def stack(*widths: int) -> nn.Module:
    return nn.ModuleDict({"body": nn.Sequential(*(nn.Linear(4, width) for width in widths)), "head": nn.Linear(4, 2)})


def copies(layers: int, kinds: str = "a", ran: int = 3) -> dict:
    return {"body": LayerStack.of("body", "", (kinds * layers)[:layers]).copies(ran)}


@pytest.mark.parametrize(
    ("kinds", "runs"),
    [("aaaaaaa", [(1, 7)]), ("abababab", [(2, 4)]), ("gllgllgllgllg", [(3, 4), (1, 1)]),
     ("ccccccnnnnnn", [(1, 6), (1, 6)]), ("xabbabbabbabb", [(1, 1), (3, 4)]), ("aab", [(1, 1)] * 3), ("", [])],
)  # fmt: skip
def test_a_sequence_of_layers_is_divided_into_runs_of_equal_units(kinds, runs):
    assert list(equal_runs(kinds)) == runs


@pytest.mark.parametrize(
    ("run", "runs"),
    [({}, [(1, 8)]), ({"checkpointing": "full"}, [(1, 8)]), ({"checkpointing": "every-2"}, [(2, 4)]),
     ({"checkpointing": "layers:0"}, [(1, 1), (1, 7)]), ({"frozen": ("embeddings", "*.bias")}, [(1, 8)]),
     ({"frozen": ("encoder.layer.1",)}, [(1, 1), (1, 1), (1, 6)]),
     ({"frozen": ("encoder.layer.7",)}, [])],
)  # fmt: skip
def test_what_tells_layers_apart_divides_their_run_or_ends_the_repetition(run, runs):
    assert [tuple(found) for stack in layer_stacks(small(num_hidden_layers=8), **run) for found in stack.runs] == runs
