"""Few layers for many: up to 10,000 equal layers are counted from two or three, by one test that layers are alike."""

import gc
import json
import weakref
from itertools import cycle

import pytest
from torch import nn

import bertscope
from bertscope.analyses import check as checks
from bertscope.analyses.params import counts, tree
from bertscope.config import ARCHITECTURES, MAX_BUILT_LAYERS, MAX_LAYERS, MAX_TRACED_LAYERS
from bertscope.errors import BertscopeError, ConfigError
from bertscope.model import BertModel, encoder
from bertscope.sources.find import source_of
from bertscope.sources.model_source import GivenModule, built_for_counting
from bertscope.tracing.flops import shapes_of, source_shapes
from bertscope.tracing.module_tree import fold, read
from bertscope.tracing.repeat import LayerStack, layer_stacks, repeated, shortened
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
        *((name, {}, lora) for name, lora in zip(ARCHITECTURES, cycle((None, "r=2,target=all-linear")))),
        ("BertForMaskedLM", {"position_embedding_type": "relative_key"}, "r=2,target=query,bias=all"),
        ("BertForMaskedLM", {"is_decoder": True, "add_cross_attention": True}, None),
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
    monkeypatch.setattr(encoder, "BertLayer", lambda config, *pruned: built.append(config) or layer(config, *pruned))
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


def test_the_flops_next_to_shapes_are_those_of_all_layers():
    found = source_shapes(source_of(config(1_000)), 1, 8)
    assert found.matmul_flops == bertscope.flops(config(1_000), batch=1, seq=8)[""].forward.matmul_flops
    twelve = source_of(config(12)).build()
    given = {"input_ids": bertscope.BertModel(config(1)).embeddings.position_ids[:, :8].to("meta")}
    assert shapes_of(twelve.eval(), given).matmul_flops == bertscope.flops(config(12), seq=8)[""].forward.matmul_flops


def test_a_difference_names_the_layers_that_only_one_model_has():
    rows = bertscope.diff(config(1_000), config(998), seq=8).rows
    assert {row.path.removeprefix("encoder.layer.").partition(".")[0] for row in rows} == {"998-999"}
    assert sum(row.params_a for row in rows) == 2 * LAYER
    assert {(row.status, row.copies) for row in rows} == {("removed", 2)}


def test_a_printed_model_has_the_number_of_all_layers(cli, tmp_path):
    printed = {}
    for layers in (12, 1_000):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **config(layers).to_dict()}))
        printed[layers] = cli("tree", tmp_path, "--style", "torch")
    assert printed[1_000].out == printed[12].out.replace("(0-11): 12 x", "(0-999): 1000 x")
    assert "note: 1,000 equal layers: counted from two or three of them" in printed[1_000].err
    assert "equal layers" not in printed[12].err


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


def test_a_step_with_more_layers_than_a_trace_repeats_is_refused():
    with pytest.raises(ConfigError, match="at most 400 layers, and this model has 401"):
        bertscope.estimate(config(MAX_TRACED_LAYERS + 1), batch=1, seq=8)


def test_layers_that_a_pattern_makes_differ_are_refused(cli, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **config(300).to_dict()}))
    assert cli("count", tmp_path, "--freeze", "LayerNorm").code == 0
    done = cli("count", tmp_path, "--freeze", "encoder.layer.0")
    assert (done.code, done.out) == (2, "")
    assert "error: 300 layers are counted from two equal ones, and those of encoder.layer differ" in done.err
    assert cli("count", tmp_path, "--freeze", "encoder.layer.299").code == 2
    assert "has a line for each of 300 layers" in cli("tree", tmp_path, "--style", "torchinfo").err
    assert cli("count", tmp_path).err.startswith("note: 300 equal layers: ")


@pytest.fixture
def files(tmp_path):
    """Return 3 files of models with different vocabularies, the last with 10,000 layers."""
    for number, layers in enumerate((3, 12, MAX_LAYERS)):
        fields = SIZES | {"vocab_size": 30 + number, "num_hidden_layers": layers}
        (tmp_path / f"m{number}.bertscope.yaml").write_text(
            f"architecture: BertModel\nconfig: {json.dumps(fields)}\n"
            f"expected: {{distinct_params: {REST + 4 * number + layers * LAYER}, layers: {{layer: {LAYER}}}}}\n"
        )
    return tmp_path


def test_check_builds_two_layers_and_frees_each_model_after_its_file(files, monkeypatch):
    models = []

    def built(source, **options):
        models.append(weakref.ref(model := built_for_counting(source, **options)))
        assert len(model.encoder.layer) == 2
        assert sum(found() is not None for found in models) == 1
        return model

    monkeypatch.setattr(checks, "built_for_counting", built)
    gc.disable()  # as on the command line: a cycle would keep a model
    try:
        report = checks.check(files)
        assert [found() for found in models] == [None] * 3
    finally:
        gc.enable()
    assert len(report.having("passed")) == len(report.findings) == 6


# ---- check ----


def stack(*widths: int) -> nn.Module:
    return nn.ModuleDict({"body": nn.Sequential(*(nn.Linear(4, width) for width in widths)), "head": nn.Linear(4, 2)})


def copies(layers: int, kinds: str = "a", ran: int = 3) -> dict:
    return {"body": LayerStack.of("body", "", (kinds * layers)[:layers]).copies(ran)}


def test_a_repeated_tree_has_the_parameters_of_the_deep_module():
    tree = repeated(fold(read(stack(4, 4, 4))), copies(10))
    assert tree is not None
    assert sum(held.numel for held in tree.root.params) == 10 * (4 * 4 + 4) + 4 * 2 + 2
    assert [node.path for node in tree.root.walk()] == ["", "body", "body.0-9", "head"]
    paths = ("body.0", "body.1", "body.2", "head", "bodyguard")
    assert [tree.scaled(path, 6) for path in paths] == [6, (10 - 2) * 6, 6, 6, 6]


def test_layers_that_alternate_repeat_in_pairs():
    ran = nn.ModuleDict({"body": nn.Sequential(*(nn.Linear(4, 4, bias=n % 2 == 0) for n in range(6)))})
    tree = repeated(fold(read(ran)), copies(10, "ab"))
    assert tree is not None
    assert sum(held.numel for held in tree.root.params) == 5 * (4 * 4 + 4) + 5 * 4 * 4
    assert [node.path for node in tree.root.walk()] == ["", "body", *(f"body.{n}" for n in range(10))]
    assert sum(tree.scaled(f"body.{n}", 1) for n in range(6)) == 10
    assert repeated(fold(read(ran)), copies(10)) is None
    assert repeated(fold(read(ran)), copies(10, "ab", 4)) is None


def test_a_tree_whose_layers_differ_is_not_repeated():
    assert repeated(fold(read(stack(4, 4, 5))), copies(10)) is None
    assert repeated(fold(read(stack(4, 4))), {"no.such.path": copies(10)["body"]}) is None
    assert [node.name for node in fold(read(stack(4, 4, 5))).descend("body").children] == ["0-1", "2"]


def test_the_middle_of_each_run_is_copied_to_the_layers_that_did_not_run():
    stack = LayerStack.of("body", "", "ccccccnnnnn")  # 0-5 and 6-10; of each run the first, the second and the last run
    assert stack.few(3) == tuple("cccnnn")
    placed = [[number + distance for distance in distances] for number, (_, distances) in enumerate(stack.copies(3))]
    assert placed == [[0], [1, 2, 3, 4], [5], [6], [7, 8, 9], [10]]
    assert (
        shortened("layers:0-5", {"layer": [(frozenset() if kind == "c" else None,) for kind in stack.few(3)]})
        == "layers:0-2"
    )


@pytest.mark.parametrize(
    ("run", "runs"),
    [({}, [(1, 8)]), ({"checkpointing": "full"}, [(1, 8)]), ({"checkpointing": "every-2"}, [(2, 4)]),
     ({"checkpointing": "layers:0"}, [(1, 1), (1, 7)]), ({"frozen": ("embeddings", "*.bias")}, [(1, 8)]),
     ({"frozen": ("encoder.layer.1",)}, [(1, 1), (1, 1), (1, 6)]),
     ({"frozen": ("encoder.layer.7",)}, [])],
)  # fmt: skip
def test_what_tells_layers_apart_divides_their_run_or_ends_the_repetition(run, runs):
    assert [tuple(found) for stack in layer_stacks(small(num_hidden_layers=8), **run) for found in stack.runs] == runs


def test_a_pruned_layer_is_a_run_of_its_own_and_a_module_without_a_configuration_has_no_runs():
    (pruned,) = layer_stacks(small(num_hidden_layers=8, pruned_heads={0: (1,)}))
    assert [tuple(run) for run in pruned.runs] == [(1, 1), (1, 7)]
    assert layer_stacks(small(num_hidden_layers=8, pruned_heads={7: (1,)})) == ()  # the few have no such layer
    assert layer_stacks(GivenModule(name="linear", module=nn.Linear(2, 3))) == ()
