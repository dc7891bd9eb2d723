"""Reports on a model's modules: `count`, `tree` and `flops`. Plain data in base units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from bertscope.frozen import Record
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


class NodeRow(Record):
    """One module, or several equal ones in one row."""

    name: str
    path: str
    type: str
    copies: int


class ParamsRow(NodeRow):
    """The parameters of a row of `count` or `tree`."""

    each_params: int
    params: int
    distinct_params: int
    trainable_params: int
    bytes: int = 0
    share: float  # of the sum over layers, with tied tensors at each use
    inputs: tuple[TensorShape, ...] = ()  # of one copy, with --shapes
    outputs: tuple[TensorShape, ...] = ()


# ---- count ----


class CountRow(ParamsRow):
    """One row of the table; `params` is the sum over layers of all copies, `each_params` counts one copy.

    `in_layer_sum` is False for a name whose tensor a layer below it counts (only in rows by parameter).
    """

    shapes: tuple[Shape, ...]
    in_layer_sum: bool = True
    tied_to: str | None = None
    parts: tuple[CountRow, ...] = ()


def sum_of_rows(path: str, rows: Sequence[CountRow]) -> CountRow:
    """Return a row of this path with the sums of the others, which are its parts."""
    names = ("each_params", "params", "distinct_params", "trainable_params", "bytes", "share")
    sums = {name: sum(getattr(row, name) for row in rows) for name in names}
    parts = tuple(replace(row, name="(own)" if row.path == path else row.path.rpartition(".")[2]) for row in rows)
    return CountRow(name=path, path=path, type="", shapes=(), copies=1, parts=parts, **sums)


class WrittenSum(Record):
    """A number of parameters as a sum: `22,163,456 + 24 x 12,596,224`.

    `name` is "total" (the sum over layers), "layer" (one of the repeated layers at `path`) or a part of such a layer.
    """

    name: str
    path: str
    terms: str
    params: int


class CountReport(TableReport[CountRow], kind="count"):
    """The parameters in rows. The rows sum to `totals.layer_params`, the parts of a row to the row.

    A key may also name a module around rows, such as `report["encoder"]`: the result is the sum of these rows.
    """

    subject: Subject
    by: str
    totals: Totals
    rows: tuple[CountRow, ...]
    ties: tuple[Tie, ...]
    unknown: tuple[str, ...] = ()
    sums: tuple[WrittenSum, ...] = ()  # of a model with repeated layers

    @property
    def total(self) -> int:
        """Return the unique parameters: every tensor once."""
        return self.totals.distinct_params

    def _found(self, key: str) -> list[CountRow]:
        """Return a key's rows; without any, the sum of the rows below a module of this path or end of path."""
        matches = super()._found(key)
        if matches and (key or len(self.rows) == 1):
            return matches
        rows = [row for row in self.rows if row.in_layer_sum]
        if not key:
            return [sum_of_rows("", rows)]
        around = dict.fromkeys(path for row in rows for path in accumulate(row.path.split(".")[:-1], "{}.{}".format))
        paths = [path for path in around if path == key] or [path for path in around if path.endswith(f".{key}")]
        return [sum_of_rows(path, [row for row in rows if row.path.startswith(f"{path}.")]) for path in paths]


# ---- tree ----


class TreeRow(ParamsRow):
    """One module: `params` is the sum over layers of the module with all modules below it, over all copies."""

    depth: int
    depth_index: str  # torchinfo's numbering, "3-6": the sixth module at depth 3
    is_last: bool  # the last child of its parent, for the lines of the tree
    same_as: str | None = None  # the first path of a module that is used again here
    kernel_size: int | tuple[int, ...] | None = None  # of a convolution or pooling


class ModuleCall(Record):
    """One call of a module, with its first path and the FLOPs of the products outside the modules below it."""

    path: str
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    matmul_flops: int


class TreeReport(TableReport[TreeRow], kind="tree"):
    """The module tree down to a depth; the root's `params` is `totals.layer_params` at every depth."""

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

        The arguments are as for `torchinfo.summary`. Raises SelectionError for a column that it does not have, and
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


# ---- flops ----


class Work(Record):
    """A computation's cost. A multiply-add counts as 2 FLOPs; `macs` counts it as one."""

    matmul_flops: int = 0
    elementwise_flops: int = 0
    bytes_moved: int = 0  # read and written by each operator; views move no bytes
    # The matmul FLOPs without the pairs of tokens that attention windows hide, and in such a model causal masks.
    needed_flops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __mul__(self, times: int) -> Work:
        return Work(**{name: value * times for name, value in vars(self).items()})

    def __floordiv__(self, parts: int) -> Work:
        return Work(**{name: value // parts for name, value in vars(self).items()})

    @property
    def macs(self) -> int:
        """Return the matrix products' multiply-adds."""
        return self.matmul_flops // 2

    @property
    def intensity(self) -> float:
        """Return the arithmetic intensity: FLOPs for each byte moved."""
        flops = self.matmul_flops + self.elementwise_flops
        return flops / self.bytes_moved if self.bytes_moved else 0.0


class OperatorRow(Record):
    """One operator in one phase: number of calls, cost, and `role`, the way in which it is counted."""

    operator: str
    phase: str
    calls: int
    role: str  # matmul, elementwise, movement, or unknown (not counted)
    elements: int  # of its output, over all calls
    work: Work


class FlopsRow(NodeRow):
    """One module: the module's work with all modules below it in each phase, over all copies."""

    depth: int
    is_last: bool
    forward: Work
    backward: Work
    recompute: Work
    total: Work
    macs: int
    intensity: float
    share: float  # of the matmul FLOPs


class SweepPoint(Record):
    """The matmul FLOPs at one batch size and sequence length, with a checkpointing strategy."""

    batch: int
    seq: int
    checkpointing: str = "none"
    forward_flops: int
    backward_flops: int
    total_flops: int  # with recomputation

    @property
    def recompute_flops(self) -> int:
        """Return the FLOPs that checkpointing adds."""
        return self.total_flops - self.forward_flops - self.backward_flops

    @property
    def macs(self) -> int:
        """Return the matrix products' multiply-adds."""
        return self.total_flops // 2


class Polynomial(Record):
    """Total matmul FLOPs = batch * (constant + linear * seq + quadratic * seq**2), verified at a further point."""

    constant: int
    linear: int
    quadratic: int
    verified_at: tuple[int, int]


class Convention(Record):
    """The FLOPs of the same computation under another convention, with the rules of that convention."""

    name: str
    value: int
    unit: str
    how: str
    source: str


class FlopsReport(TableReport[FlopsRow], kind="flops"):
    """Each module's work. `matmul_flops` of the root row equals torch's FlopCounterMode."""

    subject: Subject
    mode: str
    checkpointing: str
    batch: int | None
    seq: int | None
    rows: tuple[FlopsRow, ...]
    operators: tuple[OperatorRow, ...]
    sweep: tuple[SweepPoint, ...] = ()
    polynomial: Polynomial | None = None
    conventions: tuple[Convention, ...] = ()
    loss: str = ""
    encoder_seq: int | None = None  # the length of the encoder's input or states, if cross-attention reads them
    traced_layers: int | None = None  # number of layers that ran; the others are equal and multiplied

    @property
    def total(self) -> int:
        """Return the matmul FLOPs of the run; a multiply-add counts as 2."""
        return self.rows[0].total.matmul_flops

    @property
    def is_local(self) -> bool:
        """Return True if windows of attention, or causal masks next to them, hide pairs of tokens."""
        return self.rows[0].total.needed_flops < self.rows[0].total.matmul_flops

    @property
    def unknown_operators(self) -> tuple[str, ...]:
        """Return the operators that ran and were not counted."""
        return tuple(dict.fromkeys(row.operator for row in self.operators if row.role == "unknown"))
