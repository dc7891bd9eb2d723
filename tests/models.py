"""Small modules that mislead naive counters, each with its true figures, calculated by hand."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

ROWS = 4  # of every input


class Tied(nn.Module):
    """An embedding and a decoder that share a weight; the decoder's bias has a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.decoder = nn.Linear(3, 5)
        self.decoder.weight = self.embedding.weight
        self.bias = self.decoder.bias

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.embedding(ids))


class InOrder(nn.ModuleDict):
    """A dictionary of modules that run one after the other, except those whose names begin with "unused"."""

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        for name, module in self.items():
            if not name.startswith("unused"):
                given = module(given.to(next(module.parameters()).dtype))
        return given


class Twice(nn.Module):
    """A layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(given))


def shared() -> nn.Module:
    layer = nn.Linear(2, 2)
    return InOrder({"a": layer, "b": layer})


def frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3).requires_grad_(False), nn.Linear(3, 1))


def nested() -> nn.Module:
    """Return containers that hold parameters themselves."""
    model = InOrder({"inner": nn.Linear(2, 2)})
    model.scale = nn.Parameter(torch.ones(3))
    model.inner.extra = nn.ParameterList([torch.ones(4)])
    return model


def cycle() -> nn.Module:
    """Return a parent whose child holds it."""
    parent = nn.Module()
    parent.weight = nn.Parameter(torch.ones(3))
    parent.child = nn.Linear(2, 2)
    parent.child.parent = parent
    return parent


@dataclass(frozen=True, kw_only=True)
class Trap:
    """A module with its true figures; without `inputs` it cannot run."""

    make: Callable[[], nn.Module]
    unique: int
    over_layers: int
    param_bytes: int
    frozen: int = 0
    buffers: int = 0
    unknown: tuple[str, ...] = ()
    inputs: torch.Tensor | None = None
    forward_flops: int = 0  # of matrix products, a multiply-add counts as 2


WIDE_2, WIDE_3, IDS = torch.ones(ROWS, 2), torch.ones(ROWS, 3), torch.arange(ROWS)
# A linear layer of 2 x 2 has 4 + 2 = 6 parameters and takes 2 * 4 rows * 2 * 2 = 32 FLOPs.
TRAPS = {
    "tied": Trap(make=Tied, unique=5 * 3 + 5, over_layers=5 * 3 + 3 * 5 + 5, param_bytes=4 * 20,
                 inputs=IDS, forward_flops=2 * 4 * 3 * 5),
    "a module under two names": Trap(make=shared, unique=6, over_layers=6, param_bytes=4 * 6,
                                     inputs=WIDE_2, forward_flops=32 + 32),
    "a module that runs twice": Trap(make=Twice, unique=6, over_layers=6, param_bytes=4 * 6,
                                     inputs=WIDE_2, forward_flops=32 + 32),
    "frozen": Trap(make=frozen, unique=(6 + 3) + (3 + 1), over_layers=9 + 4, param_bytes=4 * 13, frozen=9,
                   inputs=WIDE_2, forward_flops=2 * 4 * 2 * 3 + 2 * 4 * 3 * 1),
    "buffers": Trap(make=lambda: nn.BatchNorm1d(3), unique=3 + 3, over_layers=6, param_bytes=4 * 6,
                    buffers=3 + 3 + 1, inputs=WIDE_3),
    "lazy": Trap(make=lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1)), unique=3 + 1, over_layers=4,
                 param_bytes=4 * 4, unknown=("0.weight", "0.bias")),
    "parameters of containers": Trap(make=nested, unique=6 + 3 + 4, over_layers=13, param_bytes=4 * 13,
                                     inputs=WIDE_2, forward_flops=32),
    "parametrized": Trap(make=lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)),
                         unique=3 * 1 + 3 * 2 + 3, over_layers=12, param_bytes=4 * 12,
                         inputs=WIDE_2, forward_flops=2 * 4 * 2 * 3),
    "two dtypes": Trap(make=lambda: InOrder({"small": nn.Linear(2, 2).half(), "large": nn.Linear(2, 2).double()}),
                       unique=6 + 6, over_layers=12, param_bytes=2 * 6 + 8 * 6,
                       inputs=WIDE_2, forward_flops=32 + 32),
    "unused": Trap(make=lambda: InOrder({"used": nn.Linear(2, 2), "unused": nn.Linear(3, 4)}),
                   unique=6 + (12 + 4), over_layers=22, param_bytes=4 * 22, inputs=WIDE_2, forward_flops=32),
    "a dictionary": Trap(make=lambda: InOrder({"up": nn.Linear(2, 3), "down": nn.Linear(3, 2)}),
                         unique=(6 + 3) + (6 + 2), over_layers=17, param_bytes=4 * 17,
                         inputs=WIDE_2, forward_flops=2 * 4 * 2 * 3 + 2 * 4 * 3 * 2),
    "a cycle": Trap(make=cycle, unique=3 + 6, over_layers=9, param_bytes=4 * 9),
}  # fmt: skip
RUNNING = {name: trap for name, trap in TRAPS.items() if trap.inputs is not None}
