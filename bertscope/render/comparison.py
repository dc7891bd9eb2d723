"""The reports of several models, or of one model on several GPUs, as one table, CSV and Markdown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

from bertscope.errors import one_line
from bertscope.render.console import Target
from bertscope.render.table import Column, csv_text, markdown_text, number, table_text, tables_text
from bertscope.reports.flops import FlopsReport
from bertscope.reports.page import ComparisonReport
from bertscope.reports.params import CountReport
from bertscope.units import bytes_text, count_text


@dataclass(frozen=True)
class _Line:
    """A row, and the report that it belongs to."""

    report: Any
    row: Any


@dataclass(frozen=True)
class _Table:
    """The table of a comparison, the heading above it and the notes below it."""

    columns: Sequence[Column]
    rows: Sequence[Any]
    notes: Sequence[str]
    heading: str = ""
    names: int = 0  # if not 0, a narrow terminal gets several tables, each with this number of first columns
    csv: tuple[Sequence[Column], Sequence[Any]] | None = None  # the columns and rows of CSV, if they are others


_number = partial(number, of="row")
_NAMES = (
    Column("model", lambda line: one_line(line.report.subject.name, limit=120),
           {"model": lambda line: line.report.subject.name}),
    Column("class", lambda line: line.report.subject.architecture,
           {"class": lambda line: line.report.subject.architecture}, give_up=3),
)  # fmt: skip
_TOTALS = (
    *_NAMES,
    _number("unique parameters", "distinct_params"),
    _number("sum over layers", "layer_params"),
    _number("trainable", "trainable_params", give_up=2),
    _number("bytes", "param_bytes", bytes_text, give_up=1),
)
_GROUP_RECORDS = (
    *_NAMES,
    Column("group", lambda line: line.row.name, {"group": lambda line: line.row.name}),
    _number("params", "params"),
    _number("unique parameters", "distinct_params"),
    _number("trainable", "trainable_params"),
    _number("bytes", "bytes"),
)


def _count_table(reports: Sequence[CountReport]) -> _Table:
    """Return a row for each model, or by group a row for each group and a column for each model."""
    notes = ["unique parameters: every tensor once; sum over layers: a tied tensor at every layer that uses it"]
    if reports[0].by != "group":
        notes.append(f"bytes: of the unique parameters in {reports[0].subject.dtype}; 1 MiB = 2**20 B")
        return _Table(_TOTALS, [_Line(report, report.totals) for report in reports], notes)
    names = dict.fromkeys(row.name for report in reports for row in report.rows)
    rows = [
        *((name, [sum(row.params for row in report.rows if row.name == name) for report in reports]) for name in names),
        ("sum over layers", [report.totals.layer_params for report in reports]),
        ("unique parameters", [report.totals.distinct_params for report in reports]),
    ]
    columns = [Column("group", itemgetter(0)), *(_params_of(place, report) for place, report in enumerate(reports))]
    records = [_Line(report, row) for report in reports for row in report.rows]
    return _Table(columns, rows, notes, names=1, csv=(_GROUP_RECORDS, records))


def _params_of(place: int, report: CountReport) -> Column:
    """Return the column of the parameters of one model."""
    title = one_line(report.subject.name, limit=40)
    return Column(title, lambda row: count_text(row[1][place]) if row[1][place] else "--", right=True)


def _flops_table(reports: Sequence[FlopsReport]) -> _Table:
    """Return a row for each model, batch size and sequence length."""
    is_training = reports[0].mode == "training"
    phase = partial(_number, give_up=1, shown=is_training)
    columns = [
        *_NAMES,
        _number("batch", "batch"),
        _number("seq", "seq"),
        _number("forward FLOPs", "forward_flops"),
        phase("backward", "backward_flops"),
        phase("recomputed", "recompute_flops", shown=is_training and reports[0].checkpointing != "none"),
        _number("total FLOPs", "total_flops", shown=is_training),
        Column("MACs", lambda line: count_text(line.row.total_flops // 2),
               {"macs": lambda line: line.row.total_flops // 2}, right=True, give_up=2),
    ]  # fmt: skip
    notes = [
        f"{reports[0].mode}; FLOPs: matrix products only, a multiply-add is 2; from the operators dispatched on meta",
        *(f"{report.subject.name}: not counted: {', '.join(report.unknown_operators)}"
          for report in reports if report.unknown_operators),
    ]  # fmt: skip
    return _Table(columns, [_Line(report, point) for report in reports for point in report.sweep], notes)


# The table of each kind of report.
_TABLES: dict[str, Callable[[Any], _Table]] = {"count": _count_table, "flops": _flops_table}


def table(report: ComparisonReport, target: Target) -> str:
    """Return the comparison for the terminal."""
    made = _TABLES[report.of](report.reports)
    if made.names:
        body = tables_text(made.columns, made.names, made.rows, target)
    else:
        body = table_text(made.columns, made.rows, target)
    return made.heading + body + "".join(f"{note}\n" for note in made.notes)


def markdown(report: ComparisonReport) -> str:
    """Return the comparison as a GitHub table, for a paper or a pull request."""
    made = _TABLES[report.of](report.reports)
    heading = f"{made.heading}\n".replace("_", "\\_") if made.heading else ""
    notes = "".join(f"- {note}\n" for note in made.notes).replace("_", "\\_").replace("*", "\\*")
    return f"{heading}{markdown_text(made.columns, made.rows)}\n{notes}"


def csv(report: ComparisonReport) -> str:
    """Return one record for each row, in base units."""
    made = _TABLES[report.of](report.reports)
    return csv_text(*(made.csv or (made.columns, made.rows)))
