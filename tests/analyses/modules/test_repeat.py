"""A few layers computed for many: the one test that layers are alike, and the repetition in a module tree."""

from __future__ import annotations

import pytest
from torch import nn

import bertscope
from bertscope.analyses.modules.module_tree import fold, read
from bertscope.analyses.modules.repeat import equal_layers, period, repeated
from bertscope.sources.other_models import GivenModule
from tests.analyses.memory.steps import small


def stack(*widths: int) -> nn.Module:
    return nn.ModuleDict({"body": nn.Sequential(*(nn.Linear(4, width) for width in widths)), "head": nn.Linear(4, 2)})


def test_a_repeated_tree_has_the_parameters_of_the_deep_module():
    tree = repeated(fold(read(stack(4, 4, 4))), "body", 10)
    assert tree is not None
    assert sum(held.numel for held in tree.root.params) == 10 * (4 * 4 + 4) + 4 * 2 + 2
    assert [node.path for node in tree.root.walk()] == ["", "body", "body.0-9", "head"]
    paths = ("body.0", "body.1", "body.2", "head", "bodyguard")
    assert [tree.scaled(path, 6) for path in paths] == [6, (10 - 2) * 6, 6, 6, 6]


def test_layers_that_alternate_repeat_in_pairs():
    ran = nn.ModuleDict({"body": nn.Sequential(*(nn.Linear(4, 4, bias=n % 2 == 0) for n in range(6)))})
    tree = repeated(fold(read(ran)), "body", 10, 2)
    assert tree is not None
    assert sum(held.numel for held in tree.root.params) == 5 * (4 * 4 + 4) + 5 * 4 * 4
    assert [node.path for node in tree.root.walk()] == ["", "body", *(f"body.{n}" for n in range(10))]
    assert sum(tree.scaled(f"body.{n}", 1) for n in range(6)) == 10
    assert repeated(fold(read(ran)), "body", 9, 2) is None
    assert repeated(fold(read(ran)), "body", 10) is None


def test_a_tree_whose_layers_differ_is_not_repeated():
    assert repeated(fold(read(stack(4, 4, 5))), "body", 10) is None
    assert repeated(fold(read(stack(4, 4))), "no.such.path", 10) is None
    assert [node.name for node in equal_layers(fold(read(stack(4, 4, 5))), "body")] == ["0-1", "2"]


@pytest.mark.parametrize(
    ("run", "layers"),
    [({}, 1), ({"checkpointing": "full"}, 1), ({"checkpointing": "every-3"}, 3), ({"checkpointing": "layers:0"}, 0),
     ({"frozen": ("embeddings", "*.bias")}, 1), ({"frozen": ("encoder.layer.1*",)}, 0),
     ({"frozen": tuple(f"encoder.layer.{number}.output" for number in range(8))}, 0)],
)  # fmt: skip
def test_what_tells_layers_apart_ends_the_repetition(run, layers):
    assert period(small(num_hidden_layers=8), **run) == layers
    assert period(small(pruned_heads={0: (1,)}), **run) == 0
    assert period(GivenModule(name="linear", module=nn.Linear(2, 3)), **run) == 0


def test_the_layers_of_every_class_lie_at_the_path_of_its_source():
    for architecture in bertscope.config.ARCHITECTURES:
        source = small(architecture, num_hidden_layers=2)
        assert len(source.build().get_submodule(source.layer_path)) == source.layers == 2
