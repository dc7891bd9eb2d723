"""Reports of parameters: count and tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import ClassVar

from bertscope.frozen import dataclass
from bertscope.reports.base import Shape, Subject, TableReport, TensorShape, Tie, Totals

# The columns of torchinfo's table, and those that need a forward pass.
TORCHINFO_COLUMNS = {
    "input_size": "Input Shape",
    "output_size": "Output Shape",
    "num_params": "Param #",
    "params_percent": "Param %",
    "kernel_size": "Kernel Shape",
    "mult_adds": "Mult-Adds",
    "trainable": "Trainable",
}
TORCHINFO_OF_A_RUN = ("input_size", "output_size", "mult_adds")


@dataclass(frozen=True, kw_only=True)
class CountRow:
    """One row of the table; `params` is the sum over layers of all copies, `each_params` that of one copy.

    `in_layer_sum` is False for a name whose tensor a layer below it counts (only in rows by parameter).
    """

    name: str
    path: str
    type: str
    shapes: tuple[Shape, ...]
    copies: int
    each_params: int
    params: int
    distinct_params: int
    trainable_params: int
    bytes: int
    share: float
    in_layer_sum: bool = True
    tied_to: str | None = None
    inputs: tuple[TensorShape, ...] = ()  # of one copy, with --shapes
    outputs: tuple[TensorShape, ...] = ()
    parts: tuple[CountRow, ...] = ()


def sum_of_rows(path: str, rows: Sequence[CountRow]) -> CountRow:
    """Return a row of this path with the sums of the others, which are its parts."""
    sums = {name: sum(getattr(row, name) for row in rows)
            for name in ("each_params", "params", "distinct_params", "trainable_params", "bytes", "share")}  # fmt: skip
    parts = tuple(replace(row, name="(own)" if row.path == path else row.path.rpartition(".")[2]) for row in rows)
    return CountRow(name=path, path=path, type="", shapes=(), copies=1, parts=parts, **sums)


@dataclass(frozen=True, kw_only=True)
class WrittenSum:
    """A number of parameters as a sum: `22,163,456 + 24 x 12,596,224`.

    `name` is "total" (the sum over layers), "layer" (one of the repeated layers at `path`) or a part of such a layer.
    """

    name: str
    path: str
    terms: str
    params: int


@dataclass(frozen=True, kw_only=True, repr=False)
class CountReport(TableReport[CountRow]):
    """The parameters in rows. The rows sum to `totals.layer_params`, the parts of a row to the row.

    A key may also name a module around rows, such as `report["encoder"]`: the result is the sum of these rows.
    """

    kind: ClassVar[str] = "count"
    subject: Subject
    by: str
    totals: Totals
    rows: tuple[CountRow, ...]
    ties: tuple[Tie, ...]
    unknown: tuple[str, ...] = ()
    sums: tuple[WrittenSum, ...] = ()  # of a model with repeated layers

    def _found(self, key: str) -> list[CountRow]:
        """Return the rows of a key; without any, the sum of the rows below a module of this path or end of path."""
        found = super()._found(key)
        if found and (key or len(self.rows) == 1):
            return found
        rows = [row for row in self.rows if row.in_layer_sum]
        if not key:
            return [sum_of_rows("", rows)]
        around = dict.fromkeys(path for row in rows for path in accumulate(row.path.split(".")[:-1], "{}.{}".format))
        paths = [path for path in around if path == key] or [path for path in around if path.endswith(f".{key}")]
        return [sum_of_rows(path, [row for row in rows if row.path.startswith(f"{path}.")]) for path in paths]


@dataclass(frozen=True, kw_only=True)
class TreeRow:
    """One module: `params` is the sum over layers of the module with all modules below it, over all copies."""

    name: str
    path: str
    type: str
    depth: int
    depth_index: str  # torchinfo's numbering, "3-6": the sixth module at depth 3
    copies: int
    is_last: bool  # the last child of its parent, for the lines of the tree
    each_params: int
    params: int
    distinct_params: int
    trainable_params: int
    share: float
    same_as: str | None = None  # the first path of a module that is used again here
    inputs: tuple[TensorShape, ...] = ()  # of one copy, with --shapes
    outputs: tuple[TensorShape, ...] = ()
    bytes: int = 0
    kernel_size: int | tuple[int, ...] | None = None  # of a convolution or pooling


@dataclass(frozen=True, kw_only=True)
class ModuleCall:
    """One call of a module, with its first path and the FLOPs of the products outside the modules below it."""

    path: str
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    matmul_flops: int


@dataclass(frozen=True, kw_only=True, repr=False)
class TreeReport(TableReport[TreeRow]):
    """The module tree down to a depth; the root's `params` is `totals.layer_params` at every depth."""

    kind: ClassVar[str] = "tree"
    subject: Subject
    max_depth: int | None
    totals: Totals
    rows: tuple[TreeRow, ...]
    ties: tuple[Tie, ...]
    unknown: tuple[str, ...] = ()
    matmul_flops: int | None = None  # of the forward pass that gave the shapes
    calls: tuple[ModuleCall, ...] = ()  # of that pass, in the order of their beginnings

    def to_torchinfo(self, depth: int = 3, col_names: Sequence[str] | None = None) -> str:
        """Return the table in the layout of torchinfo, with a row for each call if the report has shapes.

        The arguments are those of `torchinfo.summary`. Raises SelectionError for a column that it does not have, and
        for one that needs a run if the report has no shapes.

        >>> report = bertscope.tree(torch.nn.Linear(3, 4), input_size=(2, 3))
        >>> print(report.to_torchinfo(col_names=("output_size", "mult_adds")))
        ===========================================================================================
        Layer (type:depth-idx)                   Output Shape              Mult-Adds
        ===========================================================================================
        Linear                                   [2, 4]                    24
        ===========================================================================================
        ...
        """
        return self.shown("table", view="torchinfo", depth=depth, columns=col_names).rstrip("\n")
