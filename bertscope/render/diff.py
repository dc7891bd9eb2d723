"""The diff report as a table, CSV and Markdown."""

from __future__ import annotations

from typing import Any

from bertscope.render.console import Target
from bertscope.render.table import Column, csv_text, markdown_text, table_text
from bertscope.reports.base import Shape
from bertscope.reports.page import DiffReport
from bertscope.units import count_text, shape_text, signed_text

_FIELDS = (
    Column("setting", lambda change: change.field),
    Column("a", lambda change: _value(change.a)),
    Column("b", lambda change: _value(change.b)),
)
_ROWS = (
    Column("parameter", lambda row: row.path + (f" ({row.copies} x)" if row.copies > 1 else "")),
    Column("is", lambda row: row.status),
    Column("shape in a", lambda row: _shape(row.shape_a), give_up=2),
    Column("shape in b", lambda row: _shape(row.shape_b), give_up=2),
    Column("difference", lambda row: signed_text(row.params_b - row.params_a), right=True),
)
_TOTALS = (
    Column("total", lambda item: item[0]),
    Column("a", lambda item: count_text(item[1]), right=True),
    Column("b", lambda item: count_text(item[2]), right=True),
    Column("difference", lambda item: signed_text(item[2] - item[1]), right=True),
)


def _value(value: object) -> str:
    return "--" if value is None else str(value)


def _shape(shape: Shape) -> str:
    return "--" if shape is None else shape_text(shape)


def parts(report: DiffReport) -> list[tuple[tuple[Column, ...], Any]]:
    """Columns and rows of each table: settings, parameters, totals."""
    a, b = report.totals_a, report.totals_b
    totals = [
        ("unique parameters", a.distinct_params, b.distinct_params),
        ("sum over layers", a.layer_params, b.layer_params),
        (f"forward FLOPs at {report.batch} x {report.seq}", report.forward_flops_a, report.forward_flops_b),
    ]
    parts = [(_FIELDS, report.fields), (_ROWS, report.rows), (_TOTALS, totals)]
    return [(columns, rows) for columns, rows in parts if rows]


def table(report: DiffReport, target: Target) -> str:
    """For the terminal: settings, parameters, totals; what does not differ is not shown."""
    heading = f"a: {report.a.name} ({report.a.architecture})\nb: {report.b.name} ({report.b.architecture})\n"
    body = "".join(table_text(columns, rows, target, lambda row: False) for columns, rows in parts(report))
    note = "FLOPs: matrix products alone, a multiply-add is 2\n"
    return heading + body + note + ("the two do not differ\n" if report.is_empty else "")


def markdown(report: DiffReport) -> str:
    """For a pull request."""
    heading = f"**a: {report.a.name}, b: {report.b.name}**\n"
    return "\n".join([heading, *(markdown_text(columns, rows) for columns, rows in parts(report))])


def csv(report: DiffReport) -> str:
    """The parameters that differ, for a spreadsheet."""
    titles = ("path", "status", "copies", "shape_a", "shape_b", "params_a", "params_b")
    records = [
        (row.path, row.status, row.copies, _shape(row.shape_a), _shape(row.shape_b), row.params_a, row.params_b)
        for row in report.rows
    ]
    return csv_text(titles, records)
