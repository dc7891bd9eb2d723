"""The tree report as a table, CSV and Markdown."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bertscope.reports.layer_ranges import is_run
from bertscope.reports.params import TreeReport, TreeRow
from bertscope.units import count_text, shape_text, share_text, tensors_text
from bertscope.views.columns import Column, csv_only, values
from bertscope.views.console import Target
from bertscope.views.footer import footer, title
from bertscope.views.views import Table, View

_values = partial(values, of="row")


@dataclass(frozen=True)
class Line:
    """A row and the branches, or the indentation, before its name."""

    row: Any
    branches: str


def lines_of(rows: Sequence[Any], target: Target | None) -> list[Line]:
    """Return the rows with the branches drawn before them, by their `depth` and `is_last`; for Markdown indented."""
    if target is None:
        return [Line(row, "    " * row.depth) for row in rows]
    bar, tee, corner = ("│  ", "├─ ", "└─ ") if target.unicode else ("|  ", "|- ", "`- ")
    lines, trail = [], ""
    for row in rows:
        if row.depth == 0:
            lines.append(Line(row, ""))
            continue
        trail = trail[: 3 * (row.depth - 1)]
        lines.append(Line(row, trail + (corner if row.is_last else tee)))
        trail += "   " if row.is_last else bar
    return lines


def row_name(row: Any) -> str:
    """Return the name of a module, with its copies if it represents several: `0-11 (12 x)`."""
    copies = f" ({row.copies} x)" if is_run(row.name) else ""
    return f"{row.name or row.type}{copies}"


def tensor_columns(rows: Iterable[Any], *, csv_order: int) -> list[Column]:
    """Return the columns of the shapes and dtypes that go into each module and come out; shown if any row has them."""
    is_traced = any(row.inputs or row.outputs for row in rows)

    def column(title: str, name: str) -> Column:
        def text(line: Any) -> str:
            return tensors_text(getattr(line.row, name))

        return Column(title, text, {name: text}, below=2, csv_order=csv_order, shown=is_traced)

    return [column("in", "inputs"), column("out", "outputs")]


def _columns(report: TreeReport) -> list[Column]:
    return [
        Column("module", lambda line: line.branches + row_name(line.row),
               _values("depth", "depth_index", "path", "name")),
        Column("type: depth-index", lambda line: _type(line.row), _values("type")),
        Column("per layer",
               lambda line: count_text(line.row.each_params) if line.row.copies > 1 and line.row.params else "",
               _values("copies", "each_params"), right=True, detail=True,
               shown=any(row.copies > 1 for row in report.rows)),
        *tensor_columns(report.rows, csv_order=1),
        Column("params", lambda line: count_text(line.row.params) if line.row.params else "--",
               _values("params", "distinct_params", "trainable_params"), right=True),
        Column("share", lambda line: share_text(line.row.share) if line.row.params else "", _values("share"),
               right=True),
        csv_only(_values("same_as")),
        Column("", str, _values("bytes") | {"kernel_size": lambda line: (
            shape_text(size) if isinstance(size := line.row.kernel_size, tuple) else str(size or ""))},
               csv_order=2, shown=False),
    ]  # fmt: skip


def _type(row: TreeRow) -> str:
    text = f"{row.type}: {row.depth_index}" if row.depth_index else row.type
    return f"{text} (same module as {row.same_as})" if row.same_as is not None else text


def tree_table(report: TreeReport, target: Target | None = Target()) -> Table:  # noqa: B008  it is frozen
    """Return the modules, for a page or a target."""
    return Table(_columns(report), lines_of(report.rows, target), lambda line: line.row.depth == 0)


VIEW = View(
    title=title,
    tables=lambda report, target: [tree_table(report, target)],
    lines=lambda report, target: footer(report),
    records=tree_table,
)
