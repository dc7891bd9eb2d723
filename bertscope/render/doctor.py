"""The doctor's report as text, CSV and Markdown."""

from __future__ import annotations

from bertscope.errors import one_line
from bertscope.render.console import Target
from bertscope.render.table import Column, csv_text, markdown_text, table_text
from bertscope.reports.tool import DeviceRow, DoctorReport, PackageRow
from bertscope.units import bytes_text

_PACKAGES = (
    Column("package", lambda row: row.name),
    Column("version", lambda row: row.version or "missing"),
    Column("extra", lambda row: row.extra or "(needed)", give_up=1),
    Column("for", lambda row: row.purpose, give_up=2),
    Column("to install", lambda row: row.remedy),
)
_DEVICES = (
    Column("device", lambda row: row.name),
    Column("is", lambda row: row.description),
    Column("threads", lambda row: "" if row.threads is None else str(row.threads), right=True),
    Column("memory", lambda row: "" if row.memory_bytes is None else bytes_text(row.memory_bytes), right=True),
)


def _head(report: DoctorReport) -> list[tuple[str, str]]:
    torch = report.torch_version or "does not load"
    lines = [
        ("bertscope", f"{report.bertscope_version}, {report.bertscope_path}"),
        ("python", f"{report.python_version}, {report.python_path}"),
        ("torch", torch),
        ("platform", report.platform),
        ("presets", f"{report.presets} in {report.preset_path}"),
    ]
    return [(name, one_line(text)) for name, text in lines]


def _packages(report: DoctorReport) -> tuple[tuple[Column, ...], tuple[PackageRow, ...]]:
    """The last column goes where nothing is missing."""
    return (_PACKAGES if any(row.remedy for row in report.packages) else _PACKAGES[:-1]), report.packages


def _verdict(report: DoctorReport) -> str:
    return "".join(f"problem: {one_line(problem)}\n" for problem in report.problems) or "no problem found\n"


def table(report: DoctorReport, target: Target) -> str:
    """For the terminal."""
    head = "".join(f"{name:<12}{text}\n" for name, text in _head(report))
    tables = [
        table_text(columns, rows, target, lambda row: False)
        for columns, rows in (_packages(report), (_DEVICES, report.devices))
    ]
    return head + "".join(tables) + _verdict(report)


def markdown(report: DoctorReport) -> str:
    """For an issue."""
    head = "".join(f"- {name}: `{text}`\n" for name, text in _head(report))
    return "\n".join(
        [head, markdown_text(*_packages(report)), markdown_text(_DEVICES, report.devices), _verdict(report)]
    )


def csv(report: DoctorReport) -> str:
    """For a spreadsheet: what, its name, its value."""
    records = [("about", name, text) for name, text in _head(report)]
    records += [("package", row.name, row.version or "") for row in report.packages]
    records += [("device", row.name, _memory(row)) for row in report.devices]
    return csv_text(("what", "name", "value"), [*records, *(("problem", "", text) for text in report.problems)])


def _memory(row: DeviceRow) -> str:
    return "" if row.memory_bytes is None else str(row.memory_bytes)
