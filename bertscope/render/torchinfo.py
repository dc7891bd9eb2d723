"""The module tree in the layout of torchinfo 1.8.0, with or without output shapes, in plain text.

A parent shows only the parameters that it holds itself, or `--`. A module at the largest depth or without children
shows the sum over layers, in parentheses if all of it is frozen. The column of names is as wide as the longest
name at any depth, 5 columns for each depth, rounded up to a multiple of 5. A module that is used again has its rows
again, which are `(recursive)`; unlike torchinfo, no total counts it twice.

The totals below the shapes are those of torchinfo, except the multiply-adds: all matrix products of the forward pass,
those of attention too. With shapes, torchinfo has a row for each call in the order of the calls; here each module has
one row.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

from bertscope.render.console import Target
from bertscope.reports.base import TensorShape
from bertscope.reports.params import TreeReport, TreeRow
from bertscope.units import count_text

DEPTH = 3
_INDENT = 5
_MIN_NAME_WIDTH, _COLUMN_WIDTH = 40, 25
_ITEM_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "int64": 8, "float64": 8}  # others: 4
_UNITS = ((10**12, "T"), (10**9, "G"), (10**6, "M"))


def table(report: TreeReport, target: Target, depth: int | None = None) -> str:
    """Return the rows down to `depth` (default: 3) of a report on all unfolded modules."""
    rows = list(_with_repeated(report.rows))
    needed = max(_INDENT * row.depth + 1 + len(_type(row)) for row in rows)
    width = max(_MIN_NAME_WIDTH, -(-needed // _INDENT) * _INDENT)
    has_shapes = report.matmul_flops is not None
    total = width + _COLUMN_WIDTH * (1 + has_shapes)
    divider = "=" * min(total, target.width or total) + "\n"
    shown = [row for row in rows if row.depth <= (DEPTH if depth is None else depth)]
    tied = _tied_params(report)
    params = {row.path: row.params - tied.get(row.path, 0) for row in report.rows}
    below: dict[str, int] = {}  # the sum over the children that are shown, by the path of their parent
    for row in shown:
        if row.depth:
            parent = row.path.rpartition(".")[0]
            below[parent] = below.get(parent, 0) + row.params

    def line(name: str, shape: str, count: str) -> str:
        """Return a line of the table."""
        return f"{name:<{width}} " + (f"{shape:<{_COLUMN_WIDTH}} " if has_shapes else "") + f"{count}\n"

    body = "".join(
        line(_branches(row.depth, target) + _type(row), _shape(row), _params(row, params, below)) for row in shown
    )
    totals = report.totals
    return (
        f"{divider}{line('Layer (type:depth-idx)', 'Output Shape', 'Param #')}{divider}{body}{divider}"
        f"Total params: {count_text(totals.layer_params)}\n"
        f"Trainable params: {count_text(totals.trainable_layer_params)}\n"
        f"Non-trainable params: {count_text(totals.frozen_layer_params)}\n"
        f"{_sizes(report, divider) if has_shapes else ''}{divider}"
    )


def _with_repeated(rows: Sequence[TreeRow]) -> Iterator[TreeRow]:
    """Yield the rows, below a module that is used again those of its children again, all numbered anew."""
    seen: Counter[int] = Counter()

    def numbered(row: TreeRow) -> TreeRow:
        seen[row.depth] += 1
        return replace(row, depth_index=f"{row.depth}-{seen[row.depth]}")

    for row in rows:
        yield numbered(row)
        above = f"{row.same_as}."
        for child in rows if row.same_as is not None else ():
            if child.path.startswith(above):
                path = f"{row.path}.{child.path.removeprefix(above)}"
                depth = row.depth + path.count(".") - row.path.count(".")
                same_as = child.same_as or child.path
                yield numbered(replace(child, path=path, depth=depth, params=0, same_as=same_as))


def _tied_params(report: TreeReport) -> dict[str, int]:
    """Return the parameters that the sum over layers of a module counts again, by the path of the module."""
    modules = {row.path for row in report.rows if row.same_as is not None}
    ties = [tie for tie in report.ties if tie.path not in modules]
    tied: dict[str, int] = {}
    for row in report.rows if ties else ():
        above = f"{row.path}." if row.path else ""
        inside = [tie for tie in ties if tie.path.startswith(above) and tie.is_path.startswith(above)]
        tied[row.path] = sum(tie.params for tie in inside)
    return tied


def _sizes(report: TreeReport, divider: str) -> str:
    """Return the multiply-adds of the forward pass and the sizes of tensors, those of outputs with their gradients."""
    macs = (report.matmul_flops or 0) // 2
    factor, unit = next(((factor, unit) for factor, unit in _UNITS if macs >= factor), _UNITS[-1])
    above = {row.path.rpartition(".")[0] for row in report.rows if row.depth}
    outputs = sum(2 * _bytes(row.outputs[:1]) for row in report.rows if row.params and row.path not in above)
    inputs, params = _bytes(report.rows[0].inputs), report.totals.param_bytes
    return (
        f"Total mult-adds ({unit}): {macs / factor:,.2f}\n{divider}"
        f"Input size (MB): {inputs / 1e6:.2f}\n"
        f"Forward/backward pass size (MB): {outputs / 1e6:.2f}\n"
        f"Params size (MB): {params / 1e6:.2f}\n"
        f"Estimated Total Size (MB): {(inputs + outputs + params) / 1e6:.2f}\n"
    )


def _bytes(tensors: Iterable[TensorShape]) -> int:
    return sum(prod(tensor.shape) * _ITEM_BYTES.get(tensor.dtype, 4) for tensor in tensors)


def _shape(row: TreeRow) -> str:
    return str(list(row.outputs[0].shape)) if row.outputs else "--"


def _params(row: TreeRow, params: Mapping[str, int], below: Mapping[str, int]) -> str:
    if row.same_as is not None:
        return "(recursive)" if params.get(row.same_as) else "--"
    own = row.params - below[row.path] if row.path in below else params[row.path]
    if not own:
        return "--"
    return count_text(own) if row.trainable_params or row.path in below else f"({count_text(own)})"


def _type(row: TreeRow) -> str:
    return f"{row.type}: {row.depth_index}" if row.depth else row.type


def _branches(depth: int, target: Target) -> str:
    """Return the lines before a name; each module below the first level is drawn as the last one."""
    bar, first, other = ("│", "├─", "└─") if target.unicode else ("|", "+ ", "+ ")
    return "" if not depth else first if depth == 1 else f"{bar:<{_INDENT}}" * (depth - 1) + other
