"""The count report as a table, CSV and Markdown."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

from bertscope.errors import one_line
from bertscope.reports.params import CountReport, CountRow, sum_of_rows
from bertscope.units import bytes_text, count_text, shape_text, share_text
from bertscope.views.columns import Column, copies_text, csv_only, number, values
from bertscope.views.footer import footer, title
from bertscope.views.tree import Line, tensor_columns
from bertscope.views.views import Compared, Table, View, side_by_side

_values, _number = partial(values, of="row"), partial(number, of="row")
_INDENT = "  "
_TOTAL = "total"


def _table(report: CountReport, rows: Sequence[CountRow]) -> tuple[list[Column], list[Line]]:
    """Return the columns, and the rows with their parts indented below them."""
    lines = [line for row in rows for line in (Line(row, ""), *(Line(part, _INDENT) for part in row.parts))]
    columns = [
        Column("path", _label, {"depth": lambda line: int(line.branches == _INDENT)} | _values("name", "path")),
        Column("type", lambda line: " + ".join(dict.fromkeys(line.row.type.split(" + "))),
               _values("type"), detail=True),
        Column("tensors", lambda line: _shapes(line), {"shapes": _shapes}, csv_order=3,
               detail=report.by == "layer", shown=report.by != "group"),
        *tensor_columns([line.row for line in lines], csv_order=3),
        Column("per layer", lambda line: count_text(line.row.each_params) if line.row.copies > 1 else "",
               _values("copies", "each_params"), right=True, shown=any(row.copies > 1 for row in rows)),
        Column("params", lambda line: count_text(line.row.params), _values("params", "distinct_params"), right=True),
        _number("share", "share", share_text, csv_order=2),
        _number("bytes", "bytes", bytes_text, detail=True, csv_order=1),
        _number("trainable", "trainable_params", shown=report.totals.frozen_params > 0),
        Column("tied to", lambda line: line.row.tied_to or "", _values("in_layer_sum", "tied_to"), detail=True,
               csv_order=2, shown=any(row.tied_to or not row.in_layer_sum for row in rows)),
    ]  # fmt: skip
    return columns, lines


def _with_sums(report: CountReport) -> list[CountRow]:
    """Return the rows, those of the layers of one module below their sum, and the total of all rows."""
    rows: list[CountRow] = []
    for parent, group in groupby(report.rows, lambda row: row.path.rpartition(".")[0]):
        parts = list(group)
        below = [row for row in report.rows if row.path.startswith(f"{parent}.")]
        is_nested = any(row.parts or row.copies > 1 for row in parts)
        if report.by == "layer" and parent and 1 < len(parts) == len(below) < len(report.rows) and not is_nested:
            own = [rows.pop()] if rows and rows[-1].path == parent else []  # the tensors of the module itself
            parts = [sum_of_rows(parent, [*own, *parts])]
        rows += parts
    totals = report.totals
    everything = sum_of_rows(_TOTAL, report.rows)
    return [*rows, replace(everything, params=totals.layer_params, share=1.0, bytes=totals.param_bytes, parts=(),
                           trainable_params=totals.trainable_layer_params)]  # fmt: skip


def _headline(report: CountReport) -> str:
    totals = report.totals
    if totals.layer_params == totals.distinct_params:
        return f"{count_text(totals.distinct_params)} parameters"
    return (
        f"{count_text(totals.distinct_params)} unique parameters; {count_text(totals.layer_params)} "
        "with tied tensors counted at each use"
    )


def _label(line: Line) -> str:
    row: CountRow = line.row
    if line.branches:
        return line.branches + row.name
    return (row.path or row.name) + copies_text(row.copies)


def _shapes(line: Line) -> str:
    """Return `4 x [768, 768], 4 x [768]`; more than four kinds are counted instead."""
    kinds = Counter(line.row.shapes)
    if len(kinds) > 4:
        return f"{len(line.row.shapes)} tensors"
    return ", ".join(
        f"{times} x {shape_text(shape)}" if times > 1 else shape_text(shape) for shape, times in kinds.items()
    )


def _compared_totals(report: CountReport) -> Table:
    return Table([
        number("unique parameters", "distinct_params"),
        number("sum over layers", "layer_params"),
        number("trainable", "trainable_params", detail=not report.totals.frozen_params),
        number("bytes", "param_bytes", bytes_text),
    ], [report.totals])  # fmt: skip


def _pivot(reports: Sequence[CountReport]) -> Table | None:
    """Return the groups below each other, and a column for each model."""
    if reports[0].by != "group":
        return None

    def quantity(title: str, params: Callable[[CountReport], int]) -> Column:
        return Column(title, lambda report: count_text(params(report)) if params(report) else "--")

    names = dict.fromkeys(row.name for report in reports for row in report.rows)
    groups = [quantity(name, partial(_group_params, name)) for name in names]
    sums = [quantity("sum over layers", lambda report: report.totals.layer_params),
            quantity("unique parameters", lambda report: report.totals.distinct_params)]  # fmt: skip
    titles = [one_line(report.subject.name, limit=40) for report in reports]
    return side_by_side("group", [*groups, *sums], reports, titles, is_verbose=True)


def _group_params(name: str, report: CountReport) -> int:
    return sum(row.params for row in report.rows if row.name == name)


def _group_records(report: CountReport) -> Table | None:
    names = ("params", "distinct_params", "trainable_params", "bytes")
    group = Column("group", lambda row: row.name, {"group": lambda row: row.name})
    return Table([group, csv_only(values(*names))], report.rows) if report.by == "group" else None


def _compared_notes(reports: Sequence[CountReport]) -> list[str]:
    notes = ["unique parameters: every tensor once; sum over layers: a tied tensor at every layer that uses it"]
    if reports[0].by != "group":
        notes.append(f"bytes: of the unique parameters in {reports[0].subject.dtype}; 1 MiB = 2**20 B")
    return notes


VIEW = View(
    title=title,
    answer=_headline,
    tables=lambda report, target: [
        Table(*_table(report, _with_sums(report)), lambda line: line.row.parts or line.row.name == _TOTAL)
    ],
    lines=lambda report, target: footer(report),
    records=lambda report: Table(*_table(report, report.rows)),  # `depth` 1 marks the parts of the row above
    compared=Compared(table=_compared_totals, notes=_compared_notes, pivot=_pivot, records=_group_records),
)
