"""The tree report as a table, CSV and Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bertscope.render.console import Target
from bertscope.render.footer import footer_markdown, footer_text, title
from bertscope.render.table import Column, csv_text, markdown_text, table_text
from bertscope.reports.base import TreeReport, TreeRow
from bertscope.reports.layer_ranges import is_run
from bertscope.units import count_text, share_text, tensors_text


@dataclass(frozen=True)
class _Line:
    """A row and the branches drawn before it."""

    row: TreeRow
    branches: str


def branches(rows: Sequence[Any], unicode: bool = True) -> Iterator[str]:
    """What is drawn before each row, by its `depth` and `is_last`."""
    bar, tee, corner = ("│  ", "├─ ", "└─ ") if unicode else ("|  ", "|- ", "`- ")
    trail = ""
    for row in rows:
        if row.depth == 0:
            yield ""
            continue
        trail = trail[: 3 * (row.depth - 1)]
        yield trail + (corner if row.is_last else tee)
        trail += "   " if row.is_last else bar


def _lines(report: TreeReport, unicode: bool = True) -> list[_Line]:
    return [_Line(*pair) for pair in zip(report.rows, branches(report.rows, unicode), strict=True)]


def _columns(lines: list[_Line]) -> list[Column]:
    columns = [
        Column("module", _label),
        Column("type: depth-index", lambda line: _type(line.row), give_up=2),
        Column("params", lambda line: _params(line.row), right=True),
        Column("share", lambda line: share_text(line.row.share) if line.row.params else "", right=True, give_up=1),
    ]
    if any(line.row.inputs or line.row.outputs for line in lines):
        columns[2:2] = [
            Column("in", lambda line: tensors_text(line.row.inputs), give_up=4),
            Column("out", lambda line: tensors_text(line.row.outputs), give_up=4),
        ]
    if any(line.row.copies > 1 for line in lines):
        columns.insert(2, Column("each", lambda line: _each(line.row), right=True, give_up=3))
    return columns


def _label(line: _Line) -> str:
    row = line.row
    folded = f" ({row.copies} x)" if is_run(row.name) else ""
    return line.branches + (row.name or row.type) + folded


def _type(row: TreeRow) -> str:
    text = f"{row.type}: {row.depth_index}" if row.depth_index else row.type
    return f"{text} (same module as {row.same_as})" if row.same_as is not None else text


def _params(row: TreeRow) -> str:
    return count_text(row.params) if row.params else "--"


def _each(row: TreeRow) -> str:
    return count_text(row.each_params) if row.copies > 1 and row.params else ""


def tree_table(report: TreeReport) -> tuple[list[Column], list[Any]]:
    """Columns and rows, for a page."""
    lines = _lines(report)
    return _columns(lines), lines


def table(report: TreeReport, target: Target) -> str:
    """For the terminal."""
    lines = _lines(report, target.unicode)
    body = table_text(_columns(lines), lines, target, lambda line: line.row.depth == 0)
    return f"{title(report)}\n{body}{footer_text(report)}"


def markdown(report: TreeReport) -> str:
    """For a pull request or a page; depth as indentation."""
    lines = [_Line(line.row, "    " * line.row.depth) for line in _lines(report)]
    return f"**{title(report)}**\n\n{markdown_text(_columns(lines), lines)}\n{footer_markdown(report)}"


_FIELDS = ("depth", "depth_index", "path", "name", "type", "copies", "each_params", "params", "distinct_params",
           "trainable_params", "share", "same_as")  # fmt: skip


def csv(report: TreeReport) -> str:
    """For a spreadsheet."""
    records = [
        [*(getattr(row, field) for field in _FIELDS), tensors_text(row.inputs), tensors_text(row.outputs)]
        for row in report.rows
    ]
    return csv_text((*_FIELDS, "inputs", "outputs"), records)
