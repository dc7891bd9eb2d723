"""The count report as a table, CSV and Markdown."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from bertscope.render.console import Target
from bertscope.render.footer import footer_markdown, footer_text, title
from bertscope.render.table import Column, csv_text, markdown_text, table_text
from bertscope.reports.base import CountReport, CountRow, Shape
from bertscope.units import bytes_text, count_text, shape_text, share_text, tensors_text


@dataclass(frozen=True)
class _Line:
    """A row at its depth: 0 a row, 1 a part of the row above."""

    row: CountRow
    depth: int


def _lines(report: CountReport) -> list[_Line]:
    return [line for row in report.rows for line in (_Line(row, 0), *(_Line(part, 1) for part in row.parts))]


def _columns(report: CountReport, lines: list[_Line]) -> list[Column]:
    columns = [
        Column("path", _label),
        Column("type", lambda line: _type_text(line.row), give_up=4),
        Column("shapes", lambda line: shapes_text(line.row.shapes), give_up=5),
        Column("params", lambda line: count_text(line.row.params), right=True),
        Column("share", lambda line: share_text(line.row.share), right=True, give_up=2),
        Column("bytes", lambda line: bytes_text(line.row.bytes), right=True, give_up=3),
    ]
    if any(line.row.copies > 1 for line in lines):
        columns.insert(3, Column("each", _each_text, right=True, give_up=1))
    if any(line.row.inputs or line.row.outputs for line in lines):
        columns[3:3] = [
            Column("in", lambda line: tensors_text(line.row.inputs), give_up=7),
            Column("out", lambda line: tensors_text(line.row.outputs), give_up=7),
        ]
    if report.totals.frozen_params:
        columns.append(Column("trainable", lambda line: count_text(line.row.trainable_params), right=True))
    if any(line.row.tied_to or not line.row.in_layer_sum for line in lines):
        columns.append(Column("tied to", lambda line: line.row.tied_to or "", give_up=6))
    if report.by == "group":  # a row of dozens of shapes says nothing
        columns = [column for column in columns if column.title != "shapes"]
    return columns


def _label(line: _Line) -> str:
    if line.depth:
        return f"  {line.row.name}"
    copies = f" ({line.row.copies} x)" if line.row.copies > 1 else ""
    return (line.row.path or line.row.name) + copies


def _each_text(line: _Line) -> str:
    return count_text(line.row.each_params) if line.row.copies > 1 else ""


def _type_text(row: CountRow) -> str:
    return " + ".join(dict.fromkeys(row.type.split(" + ")))


def shapes_text(shapes: tuple[Shape, ...]) -> str:
    """`4 x [768, 768], 4 x [768]`; more than four kinds are counted instead."""
    kinds = Counter(shapes)
    if len(kinds) > 4:
        return f"{len(shapes)} tensors"
    return ", ".join(
        f"{times} x {shape_text(shape)}" if times > 1 else shape_text(shape) for shape, times in kinds.items()
    )


def table(report: CountReport, target: Target) -> str:
    """For the terminal: title, rows with their parts, totals."""
    lines = _lines(report)
    body = table_text(_columns(report, lines), lines, target, lambda line: bool(line.row.parts))
    return f"{title(report)}\n{body}{footer_text(report)}"


def markdown(report: CountReport) -> str:
    """For a pull request or a page."""
    lines = _lines(report)
    return f"**{title(report)}**\n\n{markdown_text(_columns(report, lines), lines)}\n{footer_markdown(report)}"


_FIELDS = ("name", "path", "type", "copies", "each_params", "params", "distinct_params", "trainable_params",
           "bytes", "share", "in_layer_sum", "tied_to")  # fmt: skip


def csv(report: CountReport) -> str:
    """For a spreadsheet; `depth` 1 marks the parts of the row above."""
    records = [
        (
            line.depth,
            *(getattr(line.row, field) for field in _FIELDS),
            shapes_text(line.row.shapes),
            tensors_text(line.row.inputs),
            tensors_text(line.row.outputs),
        )
        for line in _lines(report)
    ]
    return csv_text(("depth", *_FIELDS, "shapes", "inputs", "outputs"), records)
