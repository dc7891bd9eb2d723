"""The reports of `presets`, `schema`, `print` and `doctor`, each with a renderer of its name."""

from collections.abc import Callable, Sequence
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

from bertscope.errors import one_line
from bertscope.render.console import Target, wrapped
from bertscope.render.footer import lines_text
from bertscope.render.table import Column, csv_only, csv_text, markdown_text, number, table_text, values
from bertscope.render.texts import phrase, say
from bertscope.reports.tool import DoctorReport
from bertscope.units import bytes_text, count_text


def _listing(columns: tuple[Column, ...], *notes: str) -> SimpleNamespace:
    """Return the renderer of a report that is one table with notes under it."""
    return SimpleNamespace(
        table=lambda report, target: (
            table_text(columns, report.rows, target) + "".join(wrapped(phrase(note), target, 2) for note in notes)
        ),
        markdown=lambda report: "\n".join([markdown_text(columns, report.rows), *map(phrase, notes), ""]),
        csv=lambda report: csv_text(columns, report.rows),
    )


def _optional(text: Callable[[int], str]) -> Callable[[int | None], str]:
    """Return the function that writes None as nothing."""
    return lambda value: "" if value is None else text(value)


presets = _listing(
    (
        Column("preset", lambda row: row.name, values("name")),
        Column("class", lambda row: row.architecture, values("architecture"), give_up=2),
        number("unique params", "distinct_params", _optional(count_text)),
        number("sum over layers", "layer_params", _optional(count_text), give_up=3),
        Column("description", lambda row: row.description, values("description"), give_up=1),
        csv_only(values("path")),
    ),
    "unique params: every tensor once; sum over layers: a tied tensor at every layer that uses it",
    "recorded in the presets; 'bertscope check' verifies them against the built models",
)
schemas = _listing(
    (
        Column("kind", lambda row: row.report, values("report")),
        Column("report", lambda row: ", ".join(row.classes), {"classes": lambda row: " ".join(row.classes)}, give_up=1),
        Column("content", lambda row: row.description, values("description")),
    ),
    "'bertscope schema KIND' prints the JSON Schema of one",
)
print_model = SimpleNamespace(
    text=lambda report: report.text,
    markdown=lambda report: f"```text\n{report.text}```\n",
)

_PACKAGES = (
    Column("package", lambda row: row.name),
    Column("version", lambda row: row.version or phrase("missing")),
    Column("extra", lambda row: row.extra or phrase("(needed)"), give_up=1),
    Column("purpose", lambda row: phrase(row.purpose), give_up=2),
    Column("to install", lambda row: row.remedy),
)
_DEVICES = (
    Column("device", lambda row: row.name),
    Column("type", lambda row: row.description),
    number("threads", "threads", _optional(str)),
    number("memory", "memory_bytes", _optional(bytes_text)),
)


def _head(report: DoctorReport) -> list[tuple[str, str]]:
    lines = [
        ("bertscope", f"{report.bertscope_version}, {report.bertscope_path}"),
        ("python", f"{report.python_version}, {report.python_path}"),
        ("torch", report.torch_version or phrase("does not load")),
        ("platform", report.platform),
        ("presets", say("count_in", count=report.presets, path=report.preset_path)),
    ]
    return [(phrase(name), one_line(text)) for name, text in lines]


def _tables(report: DoctorReport) -> list[tuple[tuple[Column, ...], Sequence[Any]]]:
    """Return the columns and rows of the packages and the devices; remedies only where a package is missing."""
    packages = _PACKAGES if any(row.remedy for row in report.packages) else _PACKAGES[:-1]
    return [(packages, report.packages), (_DEVICES, report.devices)]


def _verdict(report: DoctorReport) -> str:
    lines = [phrase(f"problem: {one_line(problem)}") for problem in report.problems]
    return "\n".join(lines or [phrase("no problem found")]) + "\n"


def _doctor_table(report: DoctorReport, target: Target) -> str:
    tables = "".join(table_text(columns, rows, target) for columns, rows in _tables(report))
    return lines_text(_head(report), 12) + tables + _verdict(report)


def _doctor_markdown(report: DoctorReport) -> str:
    head = "".join(f"- {name}: `{text}`\n" for name, text in _head(report))
    return "\n".join([head, *(markdown_text(*table) for table in _tables(report)), _verdict(report)])


_RECORDS = (csv_only({name: itemgetter(place) for place, name in enumerate(("what", "name", "value"))}),)


def _doctor_csv(report: DoctorReport) -> str:
    return csv_text(_RECORDS, [
        *(("about", name, text) for name, text in _head(report)),
        *(("package", row.name, row.version or "") for row in report.packages),
        *(("device", row.name, row.memory_bytes) for row in report.devices),
        *(("problem", "", text) for text in report.problems),
    ])  # fmt: skip


doctor = SimpleNamespace(table=_doctor_table, markdown=_doctor_markdown, csv=_doctor_csv)
