"""The module tree in the layout of torchinfo 1.8.0 without input data, in plain text.

A parent shows only the parameters that it holds itself, or `--`. A module at the largest depth or without children
shows the sum over layers, in parentheses if all of it is frozen. The column of names is as wide as the longest
name at any depth, 5 columns for each depth, rounded up to a multiple of 5.
"""

from collections.abc import Mapping

from bertscope.render.console import Target
from bertscope.reports.params import TreeReport, TreeRow
from bertscope.units import count_text

DEPTH = 3
_INDENT = 5
_MIN_NAME_WIDTH, _PARAM_WIDTH = 40, 25


def table(report: TreeReport, target: Target, depth: int | None = None) -> str:
    """Return the rows down to `depth` (default: 3) of a report on all unfolded modules."""
    names = [_type(row) for row in report.rows]
    needed = max(_INDENT * row.depth + 1 + len(name) for row, name in zip(report.rows, names, strict=True))
    width = max(_MIN_NAME_WIDTH, -(-needed // _INDENT) * _INDENT)
    total = width + _PARAM_WIDTH
    divider = "=" * min(total, target.width or total) + "\n"
    shown = [row for row in report.rows if row.depth <= (DEPTH if depth is None else depth)]
    params = {row.path: row.params for row in shown}
    below: dict[str, int] = {}  # the sum over the children that are shown, by the path of their parent
    for row in shown:
        if row.depth:
            parent = row.path.rpartition(".")[0]
            below[parent] = below.get(parent, 0) + row.params
    rows = "".join(
        f"{_branches(row.depth, target) + _type(row):<{width}} {_params(row, params, below)}\n" for row in shown
    )
    totals = report.totals
    return (
        f"{divider}{'Layer (type:depth-idx)':<{width}} Param #\n{divider}{rows}{divider}"
        f"Total params: {count_text(totals.layer_params)}\n"
        f"Trainable params: {count_text(totals.trainable_layer_params)}\n"
        f"Non-trainable params: {count_text(totals.frozen_layer_params)}\n{divider}"
    )


def _params(row: TreeRow, params: Mapping[str, int], below: Mapping[str, int]) -> str:
    if row.same_as is not None:
        return "(recursive)" if params.get(row.same_as) else "--"
    own = row.params - below.get(row.path, 0)
    if not own:
        return "--"
    return count_text(own) if row.trainable_params or row.path in below else f"({count_text(own)})"


def _type(row: TreeRow) -> str:
    return f"{row.type}: {row.depth_index}" if row.depth else row.type


def _branches(depth: int, target: Target) -> str:
    """Return the lines before a name; each module below the first level is drawn as the last one."""
    bar, first, other = ("│", "├─", "└─") if target.unicode else ("|", "+ ", "+ ")
    return "" if not depth else first if depth == 1 else f"{bar:<{_INDENT}}" * (depth - 1) + other
