"""The report of `sweep` as a table, CSV and Markdown."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from bertscope.errors import SelectionError, named, one_line, suggestion
from bertscope.render.columns import Column, csv_only, number, optional, values
from bertscope.render.console import PARTS, Target
from bertscope.render.views import Table, View
from bertscope.reports.base import FAILED
from bertscope.reports.memory import COLLECTIVES, NO, UNCERTAIN, YES
from bertscope.reports.sweep import REFUSED, SweepReport, SweepRow
from bertscope.settings.rows import rows
from bertscope.settings.run_config import ESTIMATED
from bertscope.units import bytes_text, count_text, short_count_text

_ERRORS = 3  # below the table: a narrow terminal has no column for them
_ANSWERS = {YES: "fits", UNCERTAIN: "may fit", NO: "does not fit"}
_PHASES = ("forward", "backward", "optimizer")


def columns(report: SweepReport) -> list[Column]:
    """Return the columns: the settings that vary, then the numbers; CSV also has the settings that are constant."""
    names = list(report.rows[0].point) if report.rows else []
    settings = [_setting(name) for name in names if name in report.varied]
    constant = {name: partial(setting_text, name) for name in names if name not in report.varied}
    has_fits = any(row.fits for row in report.rows)
    on_cuda = any(row.reserved_bytes for row in report.rows)
    has_errors = any(row.error for row in report.rows)
    return [
        *settings,
        csv_only(constant),
        Column("fits", lambda row: row.fits or "", values("fits"), shown=has_fits),
        _bytes("peak", "peak_bytes"),
        *(_bytes(phase, f"{phase}_bytes", partial(lambda phase, row: row.phases.get(phase), phase), detail=True)
          for phase in _PHASES),
        csv_only({f"{part}_bytes": partial(lambda part, row: getattr(row.parts, part, None), part) for part in PARTS}),
        _bytes("saved", "saved_bytes", detail=True),
        _bytes("reserved", "reserved_bytes", detail=True, shown=on_cuda),
        _bytes("on the card", "card_bytes", shown=on_cuda),
        _bytes("sent", "sent_bytes", shown=any(row.sent_bytes for row in report.rows)),
        csv_only({f"{kind.replace('-', '_')}_bytes": partial(lambda kind, row: row.traffic.get(kind), kind)
                  for kind in COLLECTIVES}),
        number("parameters", "parameters", optional(count_text, "--"), detail=True, shown="model" in report.varied),
        number("FLOPs", "flops", optional(short_count_text, "--"), detail=True),
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


def _bytes(title: str, name: str, read: Callable[[SweepRow], int | None] | None = None, **options: Any) -> Column:
    found = read or attrgetter(name)
    return Column(title, lambda row: optional(bytes_text, "--")(found(row)), {name: found}, right=True, **options)


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
    answers = [row.fits for row in report.rows]
    parts = [f"{count_text(len(report.rows))} points of {report.grid}"]
    if any(answers):
        first, *others = ((words, count_text(answers.count(answer))) for answer, words in _ANSWERS.items())
        more = "".join(f", {words} at {number}" for words, number in others if number != "0")
        parts = [f"the step {first[0]} at {first[1]} of {parts[0]}{more}"]
    for outcome, words in ((REFUSED, "cannot be computed"), (FAILED, "failed, the next run computes them again")):
        if number := report.number(outcome):
            parts.append(f"{count_text(number)} {words}")
    return "; ".join(parts)


def _shown(report: SweepReport, target: Target | None, *, rows: int = 0, sort: str | None = None) -> list[Table]:
    """Return the first rows by a column; 0: all."""
    found = ordered(report, sort)
    return [Table(columns(report), found[:rows] if rows and target else found)]


def _notes(report: SweepReport, target: Target | None, *, rows: int = 0, sort: str | None = None) -> Iterator[str]:
    """Yield the first errors, and what the terminal does not show."""
    if target is None:
        return
    errors = list(dict.fromkeys(row.error for row in report.rows if row.error))
    yield from (one_line(error, limit=200) for error in errors[:_ERRORS])
    if len(errors) > _ERRORS:
        yield f"{count_text(len(errors) - _ERRORS)} more errors: {named('to_csv()')} lists all"
    if rows and rows < len(report.rows):
        yield f"{count_text(len(report.rows) - rows)} more rows: {named('rows')} 0 shows all"


VIEW = View(answer=verdict, tables=_shown, notes=_notes, shows_all_notes=True)
