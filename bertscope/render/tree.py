"""The tree report as a table, CSV and Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bertscope.render.console import Target
from bertscope.render.footer import footer_markdown, footer_text, title
from bertscope.render.table import Column, csv_only, csv_text, markdown_text, table_text, values
from bertscope.reports.layer_ranges import is_run
from bertscope.reports.params import TreeReport, TreeRow
from bertscope.units import count_text, share_text, tensors_text

_values = partial(values, of="row")


@dataclass(frozen=True)
class Line:
    """A row and the branches drawn before it."""

    row: Any
    branches: str


def branches(rows: Sequence[Any], unicode: bool = True) -> Iterator[str]:
    """Draw the branches before each row, by its `depth` and `is_last`."""
    bar, tee, corner = ("│  ", "├─ ", "└─ ") if unicode else ("|  ", "|- ", "`- ")
    trail = ""
    for row in rows:
        if row.depth == 0:
            yield ""
            continue
        trail = trail[: 3 * (row.depth - 1)]
        yield trail + (corner if row.is_last else tee)
        trail += "   " if row.is_last else bar


def lines_of(rows: Sequence[Any], unicode: bool = True) -> list[Line]:
    """Return the rows with the branches drawn before them."""
    return [Line(*pair) for pair in zip(rows, branches(rows, unicode), strict=True)]


def _columns(report: TreeReport) -> list[Column]:
    is_traced = any(row.inputs or row.outputs for row in report.rows)
    return [
        Column("module", _label, _values("depth", "depth_index", "path", "name")),
        Column("type: depth-index", lambda line: _type(line.row), _values("type"), give_up=2),
        Column("each", lambda line: _each(line.row), _values("copies", "each_params"), right=True, give_up=3,
               shown=any(row.copies > 1 for row in report.rows)),
        Column("in", _inputs, {"inputs": _inputs}, give_up=4, csv_order=1, shown=is_traced),
        Column("out", _outputs, {"outputs": _outputs}, give_up=4, csv_order=1, shown=is_traced),
        Column("params", lambda line: _params(line.row), _values("params", "distinct_params", "trainable_params"),
               right=True),
        Column("share", lambda line: share_text(line.row.share) if line.row.params else "", _values("share"),
               right=True, give_up=1),
        csv_only(_values("same_as")),
    ]  # fmt: skip


def _label(line: Line) -> str:
    row = line.row
    folded = f" ({row.copies} x)" if is_run(row.name) else ""
    return f"{line.branches}{row.name or row.type}{folded}"


def _type(row: TreeRow) -> str:
    text = f"{row.type}: {row.depth_index}" if row.depth_index else row.type
    return f"{text} (same module as {row.same_as})" if row.same_as is not None else text


def _params(row: TreeRow) -> str:
    return count_text(row.params) if row.params else "--"


def _each(row: TreeRow) -> str:
    return count_text(row.each_params) if row.copies > 1 and row.params else ""


def _inputs(line: Line) -> str:
    return tensors_text(line.row.inputs)


def _outputs(line: Line) -> str:
    return tensors_text(line.row.outputs)


def tree_table(report: TreeReport) -> tuple[list[Column], list[Line]]:
    """Return the columns and rows for a page."""
    return _columns(report), lines_of(report.rows)


def table(report: TreeReport, target: Target) -> str:
    """Return the report for the terminal."""
    lines = lines_of(report.rows, target.unicode)
    body = table_text(_columns(report), lines, target, lambda line: line.row.depth == 0)
    return f"{title(report)}\n{body}{footer_text(report)}"


def markdown(report: TreeReport) -> str:
    """Return the report for a pull request or a page; depth as indentation."""
    lines = [Line(row, "    " * row.depth) for row in report.rows]
    return f"**{title(report)}**\n\n{markdown_text(_columns(report), lines)}\n{footer_markdown(report)}"


def csv(report: TreeReport) -> str:
    """Return the modules for a spreadsheet."""
    return csv_text(*tree_table(report))
