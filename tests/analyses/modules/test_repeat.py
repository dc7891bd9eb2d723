"""A few layers computed for many: the one test that layers are alike, and the repetition in a module tree."""

from __future__ import annotations

import pytest
from torch import nn

import bertscope
from bertscope.analyses.modules.module_tree import fold, read
from bertscope.analyses.modules.repeat import LayerStack, equal_layers, equal_runs, layer_stacks, repeated, shortened
from bertscope.sources.other_models import GivenModule
from tests.analyses.memory.steps import small


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
    assert [node.name for node in equal_layers(fold(read(stack(4, 4, 5))), "body")] == ["0-1", "2"]


@pytest.mark.parametrize(
    ("kinds", "runs"),
    [("aaaaaaa", [(1, 7)]), ("abababab", [(2, 4)]), ("gllgllgllgllg", [(3, 4), (1, 1)]),
     ("ccccccnnnnnn", [(1, 6), (1, 6)]), ("xabbabbabbabb", [(1, 1), (3, 4)]), ("aab", [(1, 1)] * 3), ("", [])],
)  # fmt: skip
def test_a_sequence_of_layers_is_divided_into_runs_of_equal_units(kinds, runs):
    assert list(equal_runs(kinds)) == runs


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


def test_the_layers_of_every_class_lie_at_the_path_of_its_source():
    for architecture in bertscope.config.ARCHITECTURES:
        source = small(architecture, num_hidden_layers=2)
        assert len(source.build().get_submodule(source.layer_path)) == source.layers == 2
