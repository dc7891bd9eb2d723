"""A column is declared once: the terminal, Markdown and CSV show it."""

from __future__ import annotations

import csv
import io
from dataclasses import fields
from types import SimpleNamespace

import pytest

from bertscope.render import check, checkpoint, count, fit, tree
from bertscope.render.console import Target
from bertscope.render.table import Column, csv_only, csv_text, markdown_text, table_text, values
from bertscope.reports.check import Finding
from bertscope.reports.checkpoint import StoredRow, VerifyRow
from bertscope.reports.memory import FitRow
from bertscope.reports.params import CountRow, TreeRow

ROWS = [SimpleNamespace(name="query", work=SimpleNamespace(flops=1536), note="tied")]
COLUMNS = (
    Column("module", lambda row: row.name, values("name")),
    Column("FLOPs", lambda row: f"{row.work.flops:,}", values("work.flops"), right=True, csv_order=1),
    Column("remark", lambda row: row.note, values("note"), shown=False),
    csv_only(values("flops", of="work")),
)


def test_a_column_is_text_in_a_table_and_a_raw_value_in_csv():
    shown = table_text(COLUMNS, ROWS, Target()).split()
    assert [word for word in shown if "─" not in word] == ["module", "FLOPs", "query", "1,536"]
    assert markdown_text(COLUMNS, ROWS) == "| module | FLOPs |\n| --- | ---: |\n| query | 1,536 |\n"
    assert csv_text(COLUMNS, ROWS) == "name,note,flops,work_flops\nquery,tied,1536,1536\n"


@pytest.mark.parametrize(
    ("renderer", "row", "elsewhere"),
    [
        (count, CountRow, {"parts"}),  # rows of their own, with depth 1
        (tree, TreeRow, {"is_last"}),  # for drawing
        (checkpoint.verify, VerifyRow, set()),
        (checkpoint, StoredRow, set()),
        (check, Finding, set()),
        (fit, FitRow, {"extra_flops"}),  # a ratio of two values of step_flops
    ],
)
def test_csv_holds_every_field_of_a_row(renderer, row, elsewhere):
    report = SimpleNamespace(
        rows=(), findings=(), by="layer", asked_batch=None, run={}, totals=SimpleNamespace(frozen_params=0)
    )
    (header,) = csv.reader(io.StringIO(renderer.csv(report)))
    assert {field.name for field in fields(row)} - elsewhere <= {*header}
