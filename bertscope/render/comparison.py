"""The reports of several models, or of one model on several GPUs, as one table, CSV and Markdown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from bertscope.errors import one_line
from bertscope.render import fit
from bertscope.render.columns import Column, answer_word, number, values
from bertscope.render.console import Target
from bertscope.render.footer import uncounted
from bertscope.render.memory import PARTS, footnotes, range_columns
from bertscope.render.timeline.panels import part_name, run_text, strategy_name, variant_name
from bertscope.render.views import Table, View
from bertscope.reports.flops import FlopsReport
from bertscope.reports.memory import FitReport, MemoryReport
from bertscope.reports.page import ComparisonReport
from bertscope.reports.params import CountReport
from bertscope.units import bytes_text, count_text

SCREEN_LINES = 22  # of 24 lines of a terminal; the others are the command and the next prompt


@dataclass(frozen=True)
class _ModelRow:
    """A row, and the report that it belongs to."""

    report: Any
    row: Any


@dataclass(frozen=True)
class _Comparison:
    """The table of a comparison, the notes below it and the heading above it."""

    table: Table
    notes: Sequence[str]
    heading: str = ""
    records: Table | None = None  # of CSV, if they are others
    shows_records: bool = False  # they come second, in a terminal if both fit or with -v


_number = partial(number, of="row")


def _names(reports: Sequence[Any] = ()) -> tuple[Column, Column]:
    """Return the columns of the model and its class, which is shown if the models have several."""
    is_one = len({report.subject.architecture for report in reports}) < 2
    return (
        Column("model", lambda line: one_line(line.report.subject.name, limit=120),
               {"model": lambda line: line.report.subject.name}),
        Column("class", lambda line: line.report.subject.architecture,
               {"class": lambda line: line.report.subject.architecture}, detail=is_one),
    )  # fmt: skip


_GROUP_RECORDS = (
    *_names(),
    Column("group", lambda line: line.row.name, {"group": lambda line: line.row.name}),
    _number("params", "params"),
    _number("unique parameters", "distinct_params"),
    _number("trainable", "trainable_params"),
    _number("bytes", "bytes"),
)


def _totals(reports: Sequence[CountReport]) -> list[Column]:
    """Return the columns of the totals of each model."""
    has_frozen = any(report.totals.frozen_params for report in reports)
    return [
        *_names(reports),
        _number("unique parameters", "distinct_params"),
        _number("sum over layers", "layer_params"),
        _number("trainable", "trainable_params", detail=not has_frozen),
        _number("bytes", "param_bytes", bytes_text),
    ]


def _count_table(reports: Sequence[CountReport]) -> _Comparison:
    """Return a row for each model, or by group a row for each group and a column for each model."""
    notes = ["unique parameters: every tensor once; sum over layers: a tied tensor at every layer that uses it"]
    if reports[0].by != "group":
        notes.append(f"bytes: of the unique parameters in {reports[0].subject.dtype}; 1 MiB = 2**20 B")
        lines = [_ModelRow(report, report.totals) for report in reports]
        return _Comparison(Table(_totals(reports), lines), notes)
    names = dict.fromkeys(row.name for report in reports for row in report.rows)
    rows = [
        *((name, [sum(row.params for row in report.rows if row.name == name) for report in reports]) for name in names),
        ("sum over layers", [report.totals.layer_params for report in reports]),
        ("unique parameters", [report.totals.distinct_params for report in reports]),
    ]
    columns = [Column("group", itemgetter(0)), *(_params_of(place, report) for place, report in enumerate(reports))]
    records = [_ModelRow(report, row) for report in reports for row in report.rows]
    return _Comparison(Table(columns, rows, names=1), notes, records=Table(_GROUP_RECORDS, records))


def _params_of(place: int, report: CountReport) -> Column:
    """Return the column of the parameters of one model."""
    title = one_line(report.subject.name, limit=40)
    return Column(title, lambda row: count_text(row[1][place]) if row[1][place] else "--", right=True)


def _flops_table(reports: Sequence[FlopsReport]) -> _Comparison:
    """Return a row for each model, batch size and sequence length."""
    is_training = reports[0].mode == "training"
    phase = partial(_number, shown=is_training)
    columns = [
        *_names(reports),
        _number("batch", "batch"),
        _number("seq", "seq"),
        _number("forward FLOPs", "forward_flops"),
        phase("backward", "backward_flops"),
        phase("recomputed", "recompute_flops", shown=is_training and reports[0].checkpointing != "none"),
        _number("total FLOPs", "total_flops", shown=is_training),
        Column("MACs", lambda line: count_text(line.row.total_flops // 2),
               {"macs": lambda line: line.row.total_flops // 2}, right=True, detail=True),
    ]  # fmt: skip
    notes = [
        *(f"{report.subject.name}: not counted: {', '.join(report.unknown_operators)}"
          for report in reports if report.unknown_operators),
        (f"{reports[0].mode}; FLOPs: matrix products only, a multiply-add is 2; from the operators "
"dispatched by torch"),
    ]  # fmt: skip
    rows = [_ModelRow(report, point) for report in reports for point in report.sweep]
    return _Comparison(Table(columns, rows), notes)


def _memory_table(reports: Sequence[MemoryReport]) -> _Comparison:
    """Return a row for each model and checkpointing choice: the peak, its moment and its parts."""
    lines = [_ModelRow(report, variant) for report in reports for variant in report.variants]
    parts = [name for name in PARTS if any(getattr(line.row.memory.peak.parts, name) for line in lines)]
    precisions = {report.run.precision for report in reports}
    columns = [
        *_names(reports),
        Column("parameters in", lambda line: line.report.run.precision,
               {"precision": lambda line: line.report.run.precision}, shown=len(precisions) > 1),
        Column("checkpointing", lambda line: strategy_name(variant_name(line.row)),
               values("checkpointing", "reentrant", of="row")),
        number("peak", "peak_bytes", bytes_text, of="row.memory.peak"),
        Column("in", lambda line: line.row.memory.peak.phase,
               values("phase", "path", "operator", of="row.memory.peak")),
        *(_part(name, shown=name in parts) for name in PARTS),
        number("saved for backward", "kept_bytes", bytes_text, of="row.memory", detail=True),
        *(_of_device(name, title, lines) for name, title in
          (("reserved_bytes", "reserved"), ("card_bytes", "on the card"))),
        Column("fits", lambda line: line.row.answer and answer_word(line.row.answer),
               values("answer", of="row"), shown=any(line.row.answer for line in lines)),
        *range_columns(lines, "row"),
    ]  # fmt: skip
    notes = _notes(
        [(one_line(report.subject.name, limit=120), [*uncounted(report), *footnotes(report)]) for report in reports]
    )
    return _Comparison(Table(columns, lines), notes, run_text(reports[0].run, precision=len(precisions) == 1))


def _part(name: str, *, shown: bool) -> Column:
    """Return the column of one part of the peak."""
    read = attrgetter(f"row.memory.peak.parts.{name}")
    return Column(part_name(name), lambda line: bytes_text(read(line)), {f"{name}_bytes": read}, right=True,
                  detail=True, shown=shown)  # fmt: skip


def _of_device(name: str, title: str, lines: Sequence[_ModelRow]) -> Column:
    """Return a column of bytes on a GPU; it is empty, and not shown, if a model has none."""

    def read(line: _ModelRow) -> int | None:
        return getattr(line.row.memory.device, name, None)

    return Column(title, lambda line: bytes_text(read(line) or 0), {name: read}, right=True,
                  detail=name == "reserved_bytes", shown=all(map(read, lines)))  # fmt: skip


def _fit_table(reports: Sequence[FitReport]) -> _Comparison:
    """Return the answer for each GPU and sequence length with its best setting, and a table of all settings."""
    columns = fit.columns(reports[0])
    of_setting = [_fit_column(place, column) for place, column in enumerate(columns)]
    records = [_ModelRow(report, row) for report in reports for row in report.rows]
    best = [
        _ModelRow(report, fit.best_row(report, seq))
        for report in reports
        for seq in dict.fromkeys(row.seq for row in report.rows)
    ]
    gpu = _gpu_columns()
    # The answer says it; of a number of ranks the batch of each does.
    of_gpu = [
        *(gpu if reports[0].batch_total is None else (gpu[0], gpu[2])),
        *(column for column in of_setting if column.title != "fits"),
    ]
    notes = _notes([(report.card.name, list(fit.notes(report))) for report in reports if report.card])
    asked, seqs = reports[0].asked_batch, ",".join(map(str, dict.fromkeys(row.seq for row in reports[0].rows)))
    sizes = (f"batch {count_text(asked)}" if asked else "", "" if reports[0].length_given else f"sequence {seqs}")
    settings = fit.settings_text(reports[0], *sizes)
    verdict = f"{fit.common_verdict(reports)}; assumed: {settings}"
    return _Comparison(Table(of_gpu, best), notes, verdict, Table([gpu[0], *of_setting], records), shows_records=True)


def _gpu_columns() -> list[Column]:
    """Return the columns of the GPU, its answer and its memory."""
    return [
        Column("GPU", lambda line: line.report.card.name, {"gpu": lambda line: line.report.card.name}),
        Column("answer", lambda line: fit.answer_text(line.report, line.row)),
        Column("memory", lambda line: bytes_text(line.report.budget_bytes), right=True, below=3),
    ]


def _fit_column(place: int, column: Column) -> Column:
    """Return a column of `fit` for lines of several reports: each cell by the columns of its own report."""
    return replace(
        column,
        text=lambda line: fit.columns(line.report)[place].text(line.row),
        csv={
            name: partial(lambda name, line: fit.columns(line.report)[place].csv[name](line.row), name)
            for name in column.csv
        },
    )


def _notes(notes: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Return the common notes, then those that only some reports have, each with the name of its model or GPU."""
    common = [note for note in notes[0][1] if all(note in others for _, others in notes)]
    own = [(name, note) for name, found in notes for note in found if note not in common]
    return common + [note if note.startswith(name) else f"{name}: {note}" for name, note in own]


_OF_KIND: dict[str, Callable[[Any], _Comparison]] = {
    "count": _count_table,
    "flops": _flops_table,
    "memory": _memory_table,
    "fit": _fit_table,
}


def _compared(report: ComparisonReport) -> _Comparison:
    return _OF_KIND[report.of](report.reports)


def _tables(report: ComparisonReport, target: Target | None) -> list[Table]:
    """Return the table, and that of the records where it is shown: in a terminal with -v or if both fit on a screen."""
    found = _compared(report)
    is_shown = found.records is not None and found.shows_records and not _hidden_rows(report, target)
    return [found.table, *([found.records] if found.records and is_shown else [])]


def _hidden_rows(report: ComparisonReport, target: Target | None) -> int:
    found = _compared(report)
    if not (found.records and found.shows_records and target and target.width) or target.verbose:
        return 0
    lines = (found.table.text(target) + found.records.text(target)).count("\n") + 3
    return len(found.records.rows) if lines > SCREEN_LINES else 0


VIEW = View(
    answer=lambda report: _compared(report).heading,
    tables=_tables,
    notes=lambda report, target: _compared(report).notes,
    hidden_rows=_hidden_rows,
    records=lambda report: _compared(report).records or _compared(report).table,
)
