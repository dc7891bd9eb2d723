"""A column is declared once: the terminal, Markdown and CSV show it."""

import csv
import io
import re
from dataclasses import fields
from types import SimpleNamespace

import pytest

import bertscope
from bertscope.reports.checkpoint import StoredRow, VerifyRow
from bertscope.reports.memory import FitRow
from bertscope.reports.modules import CountRow, TreeRow
from bertscope.reports.tool import Finding
from bertscope.settings.run_config import RunConfig
from bertscope.views.columns import Column, csv_only, csv_text, markdown_text, table_text, values
from bertscope.views.console import Target
from bertscope.views.views import view_of
from tests.conftest import GOLDEN

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
    ("kind", "row", "elsewhere"),
    [
        ("count", CountRow, {"parts"}),  # rows of their own, with depth 1
        ("tree", TreeRow, {"is_last"}),  # for drawing
        ("verify", VerifyRow, set()),
        ("checkpoint", StoredRow, set()),
        ("check", Finding, set()),
        ("fit", FitRow, {"cost"}),
    ],
)
def test_csv_holds_every_field_of_a_row(kind, row, elsewhere):
    report = SimpleNamespace(
        rows=(),
        findings=(),
        by="layer",
        asked_batch=None,
        length_given=False,
        batch_total=None,
        run=RunConfig(),
        totals=SimpleNamespace(frozen_params=0),
    )
    (header,) = csv.reader(io.StringIO(view_of(kind).csv(report)))
    assert {field.name for field in fields(row)} - elsewhere <= {*header}


WIDTHS = (60, 80, 100, 120, 200)
FIT = "-s 8 --checkpointing none --optimizer sgd"
DRAWN = {
    "count bert-tiny -a BertForMaskedLM": view_of("count").table,
    "count bert-tiny --by parameter": view_of("count").table,
    "count bert-tiny --shapes": view_of("count").table,
    "count bert-tiny bert-mini": view_of("comparison").table,
    "tree bert-tiny --shapes": view_of("tree").table,
    "flops bert-tiny --mode training": view_of("flops").table,
    "flops bert-tiny": view_of("operators").table,
    "estimate bert-tiny -s 512 --checkpointing": view_of("memory").table,
    f"fit bert-tiny --budget 1GiB --precision fp32 {FIT}": view_of("fit").table,
    f"fit bert-tiny --gpu t4,h100 -b 550000 --precision autocast-fp16 {FIT}": view_of("comparison").table,
    "diff bert-tiny bert-mini": view_of("diff").table,
}


@pytest.mark.parametrize("command", DRAWN)
def test_no_width_breaks_a_word_or_cuts_a_number(printed, command):
    """Each word of a narrow output is a word of the wide one, or a part of it that ends at a mark."""
    report = bertscope.from_json(printed(f"bertscope {command} --format json").out)
    wide = DRAWN[command](report, Target(verbose=True))
    for width in WIDTHS[1:] if "t4,h100" in command else WIDTHS:  # seven columns of words do not fit into 60
        narrow = DRAWN[command](report, Target(width=width, verbose=True))
        assert not re.search(r"\(\d+(  | *$)", narrow, re.MULTILINE), "a cell ends inside `(12 x)`"
        for word in {word.rstrip(";") for word in narrow.split()} - {""}:
            end = r"(?![\w,]*\d)(?!\w)" if word[-1].isalnum() else ""
            start = r"(?<![\w,])" if word[0].isalnum() else ""
            is_rule = set(word) == {"─"}
            assert is_rule or re.search(start + re.escape(word) + end, wide), f"{word} at {width} columns"


EXAMPLE = (
    Column("module", lambda row: row[0]),
    Column("kind", lambda row: row[1]),
    Column("shape", lambda row: row[2]),
    Column("matmul FLOPs", lambda row: row[3], right=True),
    Column("bytes", lambda row: "4 B", right=True, detail=True),
)
EXAMPLE_ROWS = [
    ("encoder", "Linear and LayerNorm", "[2, 3]", "1,536"),
    ("├─ layer.attention.output", "--", "[12, 12]", "9"),
]


@pytest.mark.parametrize("name", ["table-70.txt", "table-54.txt", "table-50.txt", "table-30.txt"])
def test_a_narrow_table_breaks_headings_then_becomes_several_then_breaks_cells_and_names(name):
    drawn = table_text(EXAMPLE, EXAMPLE_ROWS, Target(width=int(name[6:8])))
    assert drawn.strip("\n") == (GOLDEN / name).read_text().strip("\n")


def test_a_detail_is_shown_with_v_only_and_always_in_markdown():
    assert "bytes" not in table_text(EXAMPLE, EXAMPLE_ROWS, Target())
    assert "bytes" in table_text(EXAMPLE, EXAMPLE_ROWS, Target(verbose=True))
    assert "bytes" in markdown_text(EXAMPLE, EXAMPLE_ROWS)
