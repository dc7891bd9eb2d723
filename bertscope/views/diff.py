"""The diff report as a table, CSV and Markdown."""

import shlex

from bertscope.reports.base import Shape
from bertscope.reports.page import DiffReport
from bertscope.units import count_text, shape_text, signed_text
from bertscope.views.columns import Column, copies_text, csv_only, optional, values
from bertscope.views.views import Table, View

_value, _count, _shape = optional(str, "--"), optional(count_text, "--"), optional(shape_text, "--")
_FIELDS = (
    Column("setting", lambda change: change.field),
    Column("a", lambda change: _value(change.a)),
    Column("b", lambda change: _value(change.b)),
)
_ROWS = (
    Column("parameter", lambda row: row.path + copies_text(row.copies), values("path")),
    Column("change", lambda row: row.status, values("status")),
    csv_only(values("copies")),
    Column("shape", lambda row: _shapes(row.shape_a, row.shape_b), below=1,
           csv={"shape_a": lambda row: _shape(row.shape_a), "shape_b": lambda row: _shape(row.shape_b)}),
    Column("difference", lambda row: signed_text(row.params_b - row.params_a), values("params_a", "params_b"),
           right=True),
)  # fmt: skip
_TOTALS = (
    Column("total", lambda item: item[0]),
    Column("a", lambda item: _count(item[1]), right=True),
    Column("b", lambda item: _count(item[2]), right=True),
    Column("difference", lambda item: "--" if None in item else signed_text(item[2] - item[1]), right=True),
)


def _shapes(a: Shape, b: Shape) -> str:
    return f"{shape_text(a)} -> {shape_text(b)}" if a and b and a != b else _shape(a or b)


def parts(report: DiffReport) -> list[Table]:
    """Return the tables: settings, parameters, totals."""
    a, b = report.totals_a, report.totals_b
    totals = [
        ("unique parameters", a.distinct_params, b.distinct_params),
        ("sum over layers", a.layer_params, b.layer_params),
        (
            "forward FLOPs" if report.inputs_given else f"forward FLOPs at {report.batch} x {report.seq}",
            report.forward_flops_a,
            report.forward_flops_b,
        ),
    ]
    tables = [(_FIELDS, report.fields), (_ROWS, report.rows), (_TOTALS, totals)]
    return [Table(columns, rows) for columns, rows in tables if rows]


def notes(report: DiffReport) -> list[str]:
    """Return how FLOPs are counted, the models that have none, and that nothing differs."""
    sides = ((report.a, report.forward_flops_a), (report.b, report.forward_flops_b))
    found = {side.name: flops for side, flops in sides if side.obtained == "computed"}  # not a file with tensors
    sizes = f"; bertscope flops {{}} --batch {report.batch} --seq {report.seq} says why" * (not report.inputs_given)
    return [
        "FLOPs: matrix products only, a multiply-add is 2",
        *(
            f"no FLOPs of {name}: its forward pass did not run{sizes.format(shlex.quote(name))}"
            for name, flops in found.items()
            if flops is None
        ),
        *["the two do not differ"] * report.is_empty,
    ]


VIEW = View(
    title=lambda report: "\n".join(
        f"{side}: {model.name} ({model.architecture})" for side, model in (("a", report.a), ("b", report.b))
    ),
    tables=lambda report, target: parts(report),
    notes=lambda report, target: notes(report),
    shows_all_notes=True,
    records=lambda report: Table(_ROWS, report.rows),
)
