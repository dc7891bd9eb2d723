"""The report of `sweep` as a table, CSV and Markdown."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from bertscope.errors import SelectionError, named, one_line, suggestion
from bertscope.reports.base import FAILED
from bertscope.reports.memory import COLLECTIVES
from bertscope.reports.step import YES
from bertscope.reports.sweep import REFUSED, SweepReport, SweepRow
from bertscope.settings.rows import rows
from bertscope.settings.run_config import ESTIMATED
from bertscope.units import bytes_text, count_text
from bertscope.views.columns import Column, csv_only, fits_word, number, optional, values
from bertscope.views.console import Target
from bertscope.views.step import by_verdict, cost_columns, parts_csv
from bertscope.views.views import Table, View

_ERRORS = 3  # below the table: a narrow terminal has no column for them
_PHASES = ("forward", "backward", "optimizer")


def columns(report: SweepReport) -> list[Column]:
    """Return the columns: the settings that vary, then the numbers; CSV also has the settings that are constant."""
    names = list(report.rows[0].point) if report.rows else []
    settings = [_setting(name) for name in names if name in report.varied]
    constant = {name: partial(setting_text, name) for name in names if name not in report.varied}
    has_errors = any(row.error for row in report.rows)
    return [
        *settings,
        csv_only(constant),
        *cost_columns(report.rows, missing="--"),
        *(_bytes(phase, f"{phase}_bytes", partial(lambda phase, row: row.phases.get(phase), phase), detail=True)
          for phase in _PHASES),
        parts_csv(lambda row: row.cost and row.cost.peak),
        _bytes("sent", "sent_bytes", attrgetter("sent_bytes"), shown=any(row.sent_bytes for row in report.rows)),
        csv_only({f"{kind.replace('-', '_')}_bytes": partial(lambda kind, row: row.traffic.get(kind), kind)
                  for kind in COLLECTIVES}),
        number("parameters", "parameters", optional(count_text, "--"), detail=True, shown="model" in report.varied),
        Column("error", lambda row: one_line(row.error, limit=60), values("error"), shown=has_errors),
        csv_only(values("outcome", "key")),
    ]  # fmt: skip


def setting_text(name: str, row: SweepRow) -> Any:
    """Return the value of a setting as a cell: a list as one text, nothing for None."""
    value = row.point.get(name)
    return "" if value is None else " ".join(map(str, value)) if isinstance(value, list) else value


def _setting(name: str) -> Column:
    read, own = partial(setting_text, name), rows(*ESTIMATED).get(name)

    def text(row: SweepRow) -> str:
        value = read(row)
        if type(value) is int:
            return bytes_text(value) if own and own.is_size else count_text(value)
        return str(value) or "--"

    return Column(name.replace("_", " "), text, {name: read}, right=bool(own and own.kind is int))


def _bytes(title: str, name: str, read: Callable[[SweepRow], int | None], **options: Any) -> Column:
    return Column(title, lambda row: optional(bytes_text, "--")(read(row)), {name: read}, right=True, **options)


def ordered(report: SweepReport, sort: str | None) -> Sequence[SweepRow]:
    """Return the rows by a column of the CSV, those without a value last; raises SelectionError for another name."""
    if sort is None:
        return report.rows
    getters = {name: read for column in columns(report) for name, read in column.csv.items()}
    if sort not in getters:
        raise SelectionError(f"no column {sort[:60]!r} to sort by; {suggestion(sort, getters)}")
    read = getters[sort]

    def place(row: SweepRow) -> tuple[bool, bool, Any]:
        value = read(row)
        return value in (None, ""), isinstance(value, str), value

    return sorted(report.rows, key=place)


def verdict(report: SweepReport) -> str:
    """Return the numbers of points by outcome, and of those with a budget by the answer."""
    answers = by_verdict(("", row.cost) for row in report.rows)
    parts = [f"{count_text(len(report.rows))} points of {report.grid}"]
    if answers:
        fitting = count_text(len(answers.pop(YES, ())))
        more = "".join(f", {fits_word(answer)} at {count_text(len(rows))}" for answer, rows in answers.items())
        parts = [f"the step fits at {fitting} of {parts[0]}{more}"]
    for outcome, words in ((REFUSED, "cannot be computed"), (FAILED, "failed, the next run computes them again")):
        if number := report.number(outcome):
            parts.append(f"{count_text(number)} {words}")
    return "; ".join(parts)


def _shown(report: SweepReport, target: Target | None, *, rows: int = 0, sort: str | None = None) -> list[Table]:
    found = ordered(report, sort)
    return [Table(columns(report), found[:rows] if rows and target else found)]


def _notes(report: SweepReport, target: Target | None, *, rows: int = 0, sort: str | None = None) -> Iterator[str]:
    if target is None:
        return
    errors = list(dict.fromkeys(row.error for row in report.rows if row.error))
    yield from (one_line(error, limit=200) for error in errors[:_ERRORS])
    if len(errors) > _ERRORS:
        yield f"{count_text(len(errors) - _ERRORS)} more errors: {named('to_csv()')} lists all"
    if rows and rows < len(report.rows):
        yield f"{count_text(len(report.rows) - rows)} more rows: {named('rows')} 0 shows all"


VIEW = View(answer=verdict, tables=_shown, notes=_notes, shows_all_notes=True)
