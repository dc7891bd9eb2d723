"""The list of presets as a table, CSV and Markdown."""

from __future__ import annotations

from bertscope.render.console import Target
from bertscope.render.table import Column, csv_text, markdown_text, table_text
from bertscope.reports.tool import PresetsReport
from bertscope.units import count_text

_NOTE = (
    "unique params: every tensor once; sum over layers: a tied tensor at every layer that uses it.\n"
    "Recorded in the presets; 'bertscope check' verifies them against the built models.\n"
)


def _count(value: int | None) -> str:
    return "" if value is None else count_text(value)


_COLUMNS = (
    Column("preset", lambda row: row.name),
    Column("class", lambda row: row.architecture, give_up=2),
    Column("unique params", lambda row: _count(row.distinct_params), right=True),
    Column("sum over layers", lambda row: _count(row.layer_params), right=True, give_up=3),
    Column("description", lambda row: row.description, give_up=1),
)


def table(report: PresetsReport, target: Target) -> str:
    """For the terminal."""
    return table_text(_COLUMNS, report.rows, target, lambda row: False) + _NOTE


def markdown(report: PresetsReport) -> str:
    """For a pull request or a page."""
    return markdown_text(_COLUMNS, report.rows) + "\n" + _NOTE


_FIELDS = ("name", "architecture", "distinct_params", "layer_params", "description", "path")


def csv(report: PresetsReport) -> str:
    """For a spreadsheet."""
    return csv_text(_FIELDS, [[getattr(row, field) for field in _FIELDS] for row in report.rows])
