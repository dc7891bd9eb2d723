"""torchinfo's layout."""

import pytest
import torch
from torch import nn

import bertscope
from bertscope.analyses.params import tree
from bertscope.views.console import Target
from bertscope.views.torchinfo import table
from tests.conftest import GOLDEN


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


def shown(module: nn.Module, depth: int | None = None, **target) -> str:
    return table(tree(module, folded=False), Target(**target), depth)


@pytest.mark.parametrize("depth", [0, 1, 2, 3])
@pytest.mark.parametrize("module", [Mixed, Again, lambda: nn.Transformer(8, 2, 1, 1, 8), lambda: nn.LSTM(3, 4)])
def test_the_text_is_that_of_torchinfo(module, depth):
    torchinfo = pytest.importorskip("torchinfo")  # in the extra dev
    made = module()
    assert shown(made, depth) == f"{torchinfo.summary(made, depth=depth, verbose=0)}\n"


class Reused(nn.Module):
    """A convolution net with a block that runs twice, a list, a frozen layer that runs twice, and one that never runs.

    It has no biases, whose additions torchinfo counts as multiply-adds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.ReLU())
        self.pool = nn.MaxPool2d(2)
        heads = nn.Linear(8 * 8 * 8, 5, bias=False), nn.Linear(5, 5, bias=False).requires_grad_(False)
        self.heads = nn.ModuleList(heads)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.block(self.block(self.stem(x)))).flatten(1)
        for head in (*self.heads, self.heads[1]):
            x = head(x)
        return x


def nested() -> nn.Module:
    """A Sequential with others in it."""
    inner = nn.Sequential(nn.Tanh(), nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU()))
    return nn.Sequential(nn.Linear(6, 8, bias=False), inner, nn.Linear(8, 2, bias=False))


def without(table: str, column: str) -> str:
    """The table without a column and its total."""
    lines = [line for line in table.split("\n") if not line.startswith(f"Total {column.lower()}")]
    start = next(line.index(column) for line in lines if column in line)
    return "\n".join(
        line[:start] + line[start + 26 :] if line[:5] not in ("=====", "Total") else line for line in lines
    )


# torchinfo's own text, written by the command in its first lines.
CALLS = (GOLDEN / "torchinfo-calls.txt").read_text().split("\n# ")[1:]


@pytest.mark.parametrize(("model", "given", "is_exact"), [
    (Reused, {"input_size": (2, 3, 16, 16)}, True),
    (nested, {"input_size": (4, 6)}, True),
    (lambda: bertscope.load("bert-tiny").build(), {"inputs": torch.zeros(2, 16, dtype=torch.long)}, False),
], ids=["reused", "nested", "bert-tiny"])  # fmt: skip
def test_each_call_has_the_row_of_torchinfo(request, model, given, is_exact):
    name = request.node.callspec.id
    theirs = next(part for part in CALLS if part.startswith(f"{name}\n")).partition("\n")[2].rstrip("\n")
    columns = ("input_size", "output_size", "num_params", "kernel_size", "mult_adds", "trainable")
    ours = bertscope.tree(model(), **given).to_torchinfo(9, columns)
    assert ours == theirs if is_exact else without(ours, "Mult-Adds") == without(theirs, "Mult-Adds")


def test_a_module_called_inside_another_counts_where_torchinfo_counts_it():
    shown = bertscope.tree(Reused(), depth=1, input_size=(2, 3, 16, 16)).to_torchinfo(1, ("num_params", "mult_adds"))
    rows = [line.split() for line in shown.split("\n") if line.startswith("├─")]
    assert rows[1:3] == [["├─Sequential:", "1-2", "576", "294,912"], ["├─Sequential:", "1-3", "(recursive)", "294,912"]]
    assert rows[4][-2:] == ["2,585", "5,220"]  # 2 x (512 x 5 + 5 x 5 + 5 x 5), the sum of a list too


def test_the_multiply_adds_of_the_table_have_the_products_of_attention():
    report = bertscope.tree("bert-tiny", shapes=True, batch=2, seq=8, folded=False)
    assert report.matmul_flops == bertscope.flops("bert-tiny", batch=2, seq=8)[""].forward.matmul_flops
    assert f"Total mult-adds (M): {report.matmul_flops / 2e6:.2f}" in report.to_torchinfo()
    folded = bertscope.tree("bert-tiny", shapes=True, batch=2, seq=8)
    assert folded.to_torchinfo(9) == report.to_torchinfo(9)
