"""torchinfo's layout."""

import pytest
import torch
from torch import nn

import bertscope
from bertscope.analyses.params.tree import tree
from bertscope.errors import SelectionError
from bertscope.render.console import Target
from bertscope.render.torchinfo import table


class Mixed(nn.Module):
    """A frozen layer, one used twice, a parameter of the module itself, and a container."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.own = nn.Parameter(torch.ones(5))
        self.rows = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.nothing = nn.Dropout()
        self.nothing_again = self.nothing


class Again(nn.Module):
    """A module with children that is used twice, and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
        self.again = self.first
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first[0].weight


MIXED = """\
=================================================================
Layer (type:depth-idx)                   Param #
=================================================================
Mixed                                    5
├─Linear: 1-1                            12
├─Linear: 1-2                            (recursive)
├─Linear: 1-3                            (6)
├─ModuleList: 1-4                        --
│    └─Linear: 2-1                       6
│    └─Linear: 2-2                       6
├─Dropout: 1-5                           --
├─Dropout: 1-6                           --
=================================================================
Total params: 35
Trainable params: 29
Non-trainable params: 6
=================================================================
"""


def shown(module: nn.Module, depth: int | None = None, **target) -> str:
    return table(tree(module, folded=False), Target(**target), depth)


def test_parents_show_their_own_parameters_and_frozen_leaves_have_parentheses():
    assert shown(Mixed()) == MIXED


def test_a_module_at_the_largest_depth_shows_the_sum_below_it():
    assert "├─ModuleList: 1-4                        12\n" in shown(Mixed(), depth=1)


def test_the_root_without_its_children_counts_a_tied_parameter_once_and_a_module_used_again_keeps_its_rows():
    assert "Again                                    23\n" in shown(Again(), depth=0)
    assert "├─Sequential: 1-2                        (recursive)\n│    └─Linear: 2-3" in shown(Again(), depth=2)


def test_a_narrow_terminal_gets_shorter_separators_and_ascii_other_branches():
    narrow = shown(Mixed(), width=50, unicode=False)
    assert narrow.startswith("=" * 50 + "\n")
    assert "|    + Linear: 2-1                       6\n" in narrow


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("module", [Mixed, Again, lambda: nn.Transformer(8, 2, 1, 1, 8), lambda: nn.LSTM(3, 4)])
def test_the_text_is_that_of_torchinfo(module, depth):
    torchinfo = pytest.importorskip("torchinfo")  # in the extra dev
    made = module()
    assert shown(made, depth) == f"{torchinfo.summary(made, depth=depth, verbose=0)}\n"


def test_the_table_with_shapes_is_that_of_torchinfo_but_for_the_name_of_the_unit():
    torchinfo = pytest.importorskip("torchinfo")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 5))
    theirs = str(torchinfo.summary(model, input_size=(2, 3, 16, 16), verbose=0))
    ours = bertscope.tree(model, input_size=(2, 3, 16, 16)).to_torchinfo()
    assert ours.replace("(M)", "") == theirs.replace("(Units.MEGABYTES)", "").replace("(M)", "")


def test_the_multiply_adds_of_the_table_have_the_products_of_attention():
    report = bertscope.tree("bert-tiny", shapes=True, batch=2, seq=8, folded=False)
    assert report.matmul_flops == bertscope.flops("bert-tiny", batch=2, seq=8)[""].forward.matmul_flops
    assert f"Total mult-adds (M): {report.matmul_flops / 2e6:.2f}" in report.to_torchinfo()
    with pytest.raises(SelectionError, match="folded=False"):
        bertscope.tree("bert-tiny").to_torchinfo()
