"""The view of each kind of report: what shows it as a table, CSV, Markdown and in its other forms."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from operator import attrgetter
from typing import Any

from bertscope.errors import SelectionError, name_of, one_line
from bertscope.frozen import Record
from bertscope.units import html_text, json_text, short_count_text, visible_lines
from bertscope.views.columns import Column, Strong, csv_text, markdown_text, table_text
from bertscope.views.console import Target, command_lines, lists_all, painted, stacked, stdout_target, wrapped
from bertscope.views.footer import why_no_time
from bertscope.views.page.templating import filled

# The module in this folder, with `:name` for an object in it; of other kinds the module of that name.
VIEWS = {
    "calibration": "tool:calibration", "check": "tool:check", "checkpoint": "diff:checkpoint",
    "comparison": "views:comparison", "convention": "modules:convention", "count": "modules:count",
    "doctor": "tool:doctor", "flops": "modules:flops", "lengths": "fit:LENGTHS", "operators": "modules:operators",
    "plan_code": "plan:code", "presets": "tool:presets", "print": "tool:print_model", "report": "page.report",
    "run_fit": "run:FIT", "schemas": "tool:schemas", "tree": "modules:tree", "verify": "diff:verify",
}  # fmt: skip


class Heading(str):
    """A note that is the heading of those after it."""

    __slots__ = ()


def sectioned(notes: Iterable[str]) -> list[str]:
    """Return the notes without headings that have none."""
    texts = list(notes)
    pairs = pairwise([*texts, Heading()])
    return [note for note, following in pairs if not (isinstance(note, Heading) and isinstance(following, Heading))]


class Table(Record, kw_only=False):
    """Columns and their rows, those that are `strong` in bold, and a text below them in the terminal.

    A narrow terminal gets several tables, all with the first `names` columns; with `fits_line` it gets no columns that
    are wide, with -v neither.
    """

    columns: Sequence[Column]
    rows: Sequence[Any]
    strong: Strong = None
    names: int = 1
    below: str = ""
    fits_line: bool = False

    def text(self, target: Target) -> str:
        """Return the table for the terminal."""
        target = replace(target, verbose=target.verbose and not self.fits_line)
        return table_text(self.columns, self.rows, target, self.strong, self.names) + self.below


def _whole(settings: str) -> str:
    return settings.replace(lists_all(), "")


def _nothing(*_: Any, **__: Any) -> str:
    return ""


def _no_badge(report: Any) -> int:
    raise SelectionError(f"there is no badge of this report; give another {name_of('form')}")


def _answer(report: Any) -> str:
    return str(getattr(report, "answer", ""))


def about(title: str, path: str, name: str = "", **options: Any) -> Column:
    """Return a column of a comparison: what the report of a row has at a path, by default under its title in CSV."""
    return Column(title, partial(one_line, limit=120), {name or title.lower(): str}, **options).of(f"report.{path}")


def model_columns(reports: Sequence[Any]) -> list[Column]:
    """Return the columns of the model and of its class, which is shown if the models have several."""
    is_one = len({report.subject.architecture for report in reports}) < 2
    return [about("model", "subject.name"), about("class", "subject.architecture", detail=is_one)]


class Compared(Record):
    """A way to show several reports of a kind as one table: the rows of each, after columns that name its subject.

    `table` and `records` take a report, the others all. `records` are other rows, of CSV; with `shows_records` they
    come second in a terminal with -v.
    """

    table: Callable[[Any], Table]
    subject: Callable[[Sequence[Any]], Sequence[Column]] = model_columns
    answer: Callable[[Sequence[Any]], str] = _nothing
    settings: Callable[[Sequence[Any]], str] = _nothing
    tip: Callable[[Sequence[Any]], str] = _nothing
    notes: Callable[[Sequence[Any]], Iterable[str]]
    pivot: Callable[[Sequence[Any]], Table | None] | None = None  # instead of the table
    records: Callable[[Any], Table | None] | None = None
    shows_records: bool = False
    names: int = 0  # how many columns name a row, besides the subject


def common_notes(of_subjects: Iterable[tuple[str, Sequence[str]]]) -> list[str]:
    """Return the common notes of reports, then those that only some have, each with its subject's name."""
    subjects = list(of_subjects)
    common = [note for note in subjects[0][1] if all(note in notes for _, notes in subjects)]
    some = [(name, note) for name, notes in subjects for note in notes if note not in common]
    return common + [note if note.startswith(name) else f"{name}: {note}" for name, note in some]


class View(Record):
    """A view of the reports of a kind: what it shows, for the terminal, Markdown and CSV alike.

    Each function takes a report; `tables` and `notes` also the target, None for Markdown and CSV, and the options of
    the command. The title is bold in Markdown, the answer a sentence; `lines` are names with values, notes sentences.
    A view of one table has the `columns` of it, the name of the field with its `rows`, and those that are `strong`, or
    the name of the field that says it. `records` may be columns of these rows too.
    """

    columns: Callable[[Any], Sequence[Column]] | Sequence[Column] = ()
    rows: str = "rows"
    names: int = 1  # of the columns that name a row: a narrow terminal gets several tables
    strong: Callable[[Any, Any], object] | str = _nothing
    tables: Callable[..., Sequence[Table]] = _nothing  # type: ignore[assignment]
    title: Callable[[Any], str] = _nothing
    answer: Callable[[Any], str] = _nothing
    verdict: Callable[[Any], str] = _answer  # of the answer, for its colour: yes, uncertain, no or nothing
    settings: Callable[[Any], str] = _nothing  # that the answer depends on: a dim line below it
    tip: Callable[[Any], str] = _nothing  # the last line of the terminal: what to do next, and the command below it
    lines: Callable[[Any, Target | None], Iterable[tuple[str, str]]] = _nothing  # type: ignore[assignment]
    name_width: int = 24  # of the names of lines
    notes: Callable[..., Iterable[str]] = _nothing
    shows_all_notes: bool = False  # without -v too
    records: Callable[[Any], Table] | Sequence[Column] = ()  # of CSV; by default the first table
    compared: Compared | None = None  # several reports of this kind
    params: Callable[[Any], int] = _no_badge  # of the badge

    def tables_of(self, report: Any, target: Target | None, **options: Any) -> Sequence[Table]:
        """Return the tables of a report that have rows."""
        return [table for table in self._all_tables(report, target, **options) if table.rows]

    def _all_tables(self, report: Any, target: Target | None, **options: Any) -> Sequence[Table]:
        if not self.columns:
            return self.tables(report, target, **options)
        columns = self.columns(report) if callable(self.columns) else self.columns
        strong = attrgetter(self.strong) if isinstance(self.strong, str) else partial(self.strong, report)
        return [Table(columns, getattr(report, self.rows), strong, self.names)]

    def table(self, report: Any, target: Target, *, has_tip: bool = True, **options: Any) -> str:
        """Return the report for the terminal."""
        notes = sectioned(self.notes(report, target, **options)) if target.verbose or self.shows_all_notes else []
        settings = "" if notes[:1] == ["Settings"] else self.settings(report)
        if target.width and max(map(len, settings.splitlines()), default=0) > target.width:
            settings = _whole(settings)
        style = self.verdict(report) or ("strong" if settings or self.settings(report) else "")
        heading = [(self.title(report), ""), (self.answer(report), style), (settings, "dim")]
        tip, has_command, command = self.tip(report).partition("\n") if has_tip else ("", "", "")
        if has_command and not command.strip():
            tip = command = ""
        command = command_lines(command, target.width or sys.maxsize)
        tables = stacked(*(table.text(target) for table in self.tables_of(report, target, **options)))
        lines = [f"{name:<{self.name_width}}{value}" for name, value in self.lines(report, target)]
        sections: list[list[str]] = [[]]
        for note in notes:
            if isinstance(note, Heading):
                sections.append([painted(wrapped(note, target), "strong", target)])
            else:
                sections[-1].append(wrapped("  " * (len(sections) > 1) + note, target, 2 + 2 * (len(sections) > 1)))
        shown = (
            "".join(painted(wrapped(line, target), how, target) for text, how in heading for line in text.splitlines())
            + tables
            + "".join(wrapped(line, target, self.name_width) for line in lines)
            + "\n".join(map("".join, filter(None, sections)))
        )
        blank = "\n" * (not shown.endswith("\n\n"))
        return shown + f"{blank}Next: {tip}\n" * bool(tip) + f"{command}\n" * bool(command)

    def markdown(self, report: Any) -> str:
        """Return the report for a pull request or a page."""
        title, answer = self.title(report).replace("\n", ", "), self.answer(report)
        parts = [f"**{title}**\n"] if title else []
        parts += [f"{text}\n".replace("_", "\\_") for text in (answer, _whole(self.settings(report))) if text]
        parts += [markdown_text(table.columns, table.rows) for table in self.tables_of(report, None)]
        # A value without a name belongs to the line above.
        items = [f"- {name}: {value}\n" if name else f"  - {value}\n" for name, value in self.lines(report, None)]
        notes = sectioned(self.notes(report, None))
        items += [f"\n{note}:\n\n" if isinstance(note, Heading) else f"- {note}\n" for note in notes]
        under = "".join(items).replace("_", "\\_").replace("*", "\\*")
        return "\n".join([*parts, *([under] if under else ())])

    def notebook(self, report: Any) -> str:
        """Return the report as HTML for a notebook."""
        tables, facts = self.tables_of(report, None), list(self.lines(report, None))
        about = {"title": self.title(report), "answer": self.answer(report), "settings": _whole(self.settings(report))}
        notes = sectioned(self.notes(report, None))
        return filled("notebook.html", **about, tables=tables, facts=facts, notes=notes)

    def badge(self, report: Any) -> str:
        """Return a badge as JSON of shields' endpoint (shields.io/badges/endpoint-badge)."""
        message = short_count_text(self.params(report))
        return json_text({"schemaVersion": 1, "label": "parameters", "message": message, "color": "blue"})

    def csv(self, report: Any) -> str:
        """Return the records in base units, for a spreadsheet."""
        if callable(self.records):
            tables: Sequence[Table] = [self.records(report)]
        elif self.records:
            tables = [Table(self.records, getattr(report, self.rows))]
        else:
            tables = self._all_tables(report, None)
        table = next((table for table in tables if table.rows), tables[0])
        return csv_text(table.columns, table.rows)


def _below_each_other(report: Any, table_of: Callable[[Any], Table | None]) -> Table:
    how, reports = view_of(report.of).compared, report.reports
    tables = [(one, table) for one in reports if (table := table_of(one))]
    alike = zip(*(table.columns for _, table in tables), strict=False)
    columns = [replace(several[0].of("row"), shown=any(column.shown for column in several)) for several in alike]
    rows = [{"report": one, "row": row} for one, table in tables for row in table.rows]
    subject = how.subject(reports)
    return Table([*subject, *columns], rows, names=len(subject) + how.names)


def _compared_tables(report: Any, target: Target | None) -> list[Table]:
    how = view_of(report.of).compared
    pivot = how.pivot(report.reports) if how.pivot else None
    has_records = how.shows_records and (target is None or target.verbose)
    records = [_below_each_other(report, how.records)] if how.records and has_records else []
    return [pivot or _below_each_other(report, how.table), *records]


def _compared_records(report: Any) -> Table:
    how = view_of(report.of).compared
    records = _below_each_other(report, how.records) if how.records else None
    return records if records and records.rows else _compared_tables(report, None)[0]


def _of_all(part: str, report: Any, *_: Any) -> Any:
    return getattr(view_of(report.of).compared, part)(report.reports)


comparison = View(
    answer=partial(_of_all, "answer"),
    settings=partial(_of_all, "settings"),
    tip=partial(_of_all, "tip"),
    notes=partial(_of_all, "notes"),
    tables=_compared_tables,
    records=_compared_records,
)
_MARKUP = ("html", "svg", "notebook")  # with scripts and style sheets; the templates escape every value


def view_of(kind: str) -> Any:
    """Return the view of a kind of report: a View, or a module with a function for each form, such as `table`."""
    name, _, attribute = VIEWS.get(kind, kind).partition(":")
    module = import_module(f"{__package__}.{name}")
    return getattr(module, attribute or "VIEW", module)


def display(report: Any, form: str, *, view: str = "", target: Target | None = None, **options: Any) -> Any:
    """Return a report in a form of its view: printed, notebook, table, csv, markdown, html ...

    `printed` is what `print` shows, and `notebook` HTML. `view` is another view than that of the kind.
    """
    shown = view_of(view or report.kind)
    if form == "notebook" and not hasattr(shown, form):
        lines = "\n".join(map(html_text, visible_lines(_text(shown, report, Target())).split("\n")))
        style = "white-space: pre; overflow-x: auto; line-height: 1.2; font-family: monospace"
        return f'<pre style="{style}">{lines}</pre>'
    if form == "printed":
        to = stdout_target()
        unicode = to.unicode or not getattr(sys.stdout, "encoding", None)  # a stream of text, such as StringIO
        return visible_lines(_text(shown, report, replace(to, color=False, unicode=unicode), **options))
    written = getattr(shown, form, None)
    if form in ("table", "text") and written is not None:
        wanted = target or Target()
        return visible_lines(written(report, wanted, **options), color=wanted.color)
    if written is None:
        raise SelectionError(f"there is no {form} of this report; give another {name_of('form')}")
    text = written(report, **options)
    return visible_lines(text) if isinstance(text, str) and form not in _MARKUP else text


def _text(view: Any, report: Any, target: Target, **options: Any) -> str:
    text = view.table(report, target, **options) if hasattr(view, "table") else view.mermaid(report)
    return f"{text}{why_no_time(report)}"
