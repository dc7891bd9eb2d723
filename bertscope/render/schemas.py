"""The list of JSON Schemas as a table, CSV and Markdown."""

from __future__ import annotations

from bertscope.render.console import Target
from bertscope.render.table import Column, csv_text, markdown_text, table_text
from bertscope.reports.tool import SchemasReport

_COLUMNS = (
    Column("kind", lambda row: row.report),
    Column("report", lambda row: ", ".join(row.classes), give_up=1),
    Column("what it says", lambda row: row.description),
)
_NOTE = "'bertscope schema KIND' prints the JSON Schema of one.\n"


def table(report: SchemasReport, target: Target) -> str:
    """For the terminal."""
    return table_text(_COLUMNS, report.rows, target, lambda row: False) + _NOTE


def markdown(report: SchemasReport) -> str:
    """For a page."""
    return f"{markdown_text(_COLUMNS, report.rows)}\n{_NOTE}"


def csv(report: SchemasReport) -> str:
    """For a spreadsheet."""
    return csv_text(
        ("report", "classes", "description"),
        [(row.report, " ".join(row.classes), row.description) for row in report.rows],
    )
