"""The report of `sweep` as a table, CSV and Markdown."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bertscope.errors import SelectionError, named, one_line, suggestion
from bertscope.reports.base import FAILED
from bertscope.reports.memory import COLLECTIVES, COMPUTED, REFUSED, SweepReport, SweepRow
from bertscope.reports.step import NO, UNCERTAIN, YES, ByteRange
from bertscope.settings.rows import rows
from bertscope.settings.run_config import CPU, ESTIMATED, SWEPT, RunConfig
from bertscope.units import bytes_text, count_text, counted
from bertscope.views import step
from bertscope.views.columns import Column, attribute, csv_only, number, reader, values
from bertscope.views.console import Target, command_text
from bertscope.views.step import by_verdict, cost_columns, line_of, parts_csv, span_text
from bertscope.views.views import Table, View

_ERRORS = 3  # below the table: a narrow terminal has no column for them
_PHASES = ("forward", "backward", "optimizer")


def columns(report: SweepReport) -> list[Column]:
    """Return the columns: the settings that vary, then the numbers; CSV also has the settings that are constant."""
    names = list(report.rows[0].point) if report.rows else []
    return [
        *(_setting(name) for name in names if name in report.varied),
        csv_only({name: partial(_setting_text, name) for name in names if name not in report.varied}),
        *cost_columns(missing="--", has_gpu=any(row.cost is not None and row.cost.reserved for row in report.rows)),
        *(_bytes(phase, f"phases.{phase}", f"{phase}_bytes", detail=True) for phase in _PHASES),
        parts_csv(),
        _bytes("sent", "sent_bytes", "sent_bytes", shown=any(row.sent_bytes for row in report.rows)),
        csv_only({f"{kind.replace('-', '_')}_bytes": reader(f"traffic.{kind}") for kind in COLLECTIVES}),
        number("parameters", "parameters", detail=True, missing="--", shown="model" in report.varied),
        attribute("error", "error", text=partial(one_line, limit=60)),
        csv_only(values("outcome", "key")),
    ]


def _setting_text(name: str, row: SweepRow) -> Any:
    value = row.point.get(name)
    return "" if value is None else " ".join(map(str, value)) if isinstance(value, list) else value


def _setting(name: str) -> Column:
    read, known = partial(_setting_text, name), rows(*ESTIMATED).get(name)

    def text(row: SweepRow) -> str:
        value = read(row)
        if type(value) is int:
            return bytes_text(value) if known and known.is_size else count_text(value)
        return str(value) or "--"

    return Column(name.replace("_", " "), text, {name: read}, right=bool(known and known.kind is int))


def _bytes(title: str, path: str, name: str, **options: Any) -> Column:
    return replace(number(title, path, bytes_text, missing="--", **options), csv={name: reader(path)})


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
    refused, failed = (report.number(outcome) for outcome in (REFUSED, FAILED))
    points = f"{counted(len(report.rows), 'point')} of {one_line(report.grid, limit=30)}"
    facts = [f"{points} {'is' if len(report.rows) == 1 else 'are'} computed"]
    if sizes := [row.cost.peak_bytes for row in report.rows if row.cost is not None]:
        facts = [f"peak {span_text(ByteRange(low_bytes=min(sizes), high_bytes=max(sizes)))} at {points}"]
    if answers:
        fitting = len(answers.pop(YES, ()))
        verbs = {UNCERTAIN: "may fit", NO: f"do{'es' * (len(answers.get(NO, ())) == 1)} not"}
        facts = [f"{count_text(fitting)} of {points} fit{'s' * (fitting == 1)}"]
        facts += [f"{count_text(len(rows))} {verbs[answer]}" for answer, rows in answers.items()]
    elif refused + failed:
        facts = [f"{count_text(report.number(COMPUTED))} of {points} are computed"]
    facts += [f"{count_text(refused)} cannot be computed"] * bool(refused)
    return line_of(", ".join([*facts, *[f"{count_text(failed)} failed"] * bool(failed)]))


def _settings(report: SweepReport) -> str:
    """Return what all points have: the model, the sizes, the precision, and what else differs from the defaults."""
    row = report.rows[0] if report.rows else SweepRow(key="", point={})
    usual = {name: known.default for name, known in rows(*SWEPT).items()} | RunConfig().flat()
    point = {name: value for name, value in row.point.items() if name not in (*report.varied, "threads")}
    facts = [
        str(value) if name in ("model", "precision") else f"{name.replace('_', ' ')} {_setting(name).text(row)}"
        for name, value in point.items()
        if name != "device" and (name in ("batch", "seq", "precision") or value not in (usual.get(name), []))
    ]
    first, *rest = [one_line(word, limit=40) for word in facts] or [""]
    return step.listed_facts(first, rest, ["CPU (gpu: t4 for a GPU)"] * (point.get("device") == CPU))


def _tip(report: SweepReport) -> str:
    if not report.number(FAILED):
        return ""
    return f"retry the failed points\n  {command_text('sweep', {}, {})}"


def _shown(report: SweepReport, target: Target | None, *, rows: int = 0, sort: str | None = None) -> list[Table]:
    points = ordered(report, sort)
    shown = columns(report)
    names = sum(column.shown for column in shown[: len(report.varied)])
    return [Table(shown, points[:rows] if rows and target else points, names=names)]


def _notes(report: SweepReport, target: Target | None, *, rows: int = 0, sort: str | None = None) -> Iterator[str]:
    if target is None:
        return
    errors = list(dict.fromkeys(row.error for row in report.rows if row.error))
    yield from (one_line(error, limit=200) for error in errors[:_ERRORS])
    if len(errors) > _ERRORS:
        yield f"{count_text(len(errors) - _ERRORS)} more errors: {named('to_csv()')} lists all"
    if rows and rows < len(report.rows):
        yield f"{count_text(len(report.rows) - rows)} more rows: {named('rows')} 0 shows all"


VIEW = View(answer=verdict, settings=_settings, tip=_tip, tables=_shown, notes=_notes, shows_all_notes=True)
