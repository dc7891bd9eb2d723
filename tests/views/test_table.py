"""A column is declared once: the terminal, Markdown and CSV show it."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

import bertscope
from bertscope.reports.checkpoint import StoredRow, VerifyRow
from bertscope.reports.memory import FitRow
from bertscope.reports.modules import CountRow, TreeRow
from bertscope.reports.tool import Finding
from bertscope.settings.run_config import RunConfig
from bertscope.views import views
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
            is_bar = set(word) <= {*"─PbOiGAt"}
            assert is_bar or re.search(start + re.escape(word) + end, wide), f"{word} at {width} columns"


@pytest.mark.parametrize("command", [("tree", "bert-tiny", "--shapes"), ("count", "bert-tiny", "--shapes")])
@pytest.mark.parametrize("width", WIDTHS)
def test_shapes_that_were_asked_for_are_shown_at_any_width(cli, monkeypatch, command, width):
    monkeypatch.setenv("COLUMNS", str(width))
    out = cli(*command, "--seq", "17").out
    assert "[1, 17] int64" in out
    assert "[1, 17, 128]" in out


def test_count_has_a_row_for_the_embeddings_and_one_for_the_total(cli):
    lines = [line.split() for line in cli("count", "bert-base-cased").out.splitlines()]
    embeddings = bertscope.load("bert-base-cased").config.vocab_size + 512 + 2 + 2
    rows = {line[0]: line for line in lines if line}
    assert f"{768 * embeddings:,}" in rows["bert.embeddings"]
    assert "130,609,732" in rows["total"]
    assert lines[1][0] == "108,340,804"
    assert "130,609,732" in lines[1]


def test_the_answer_and_the_table_are_on_one_screen(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    out = cli("estimate", "bert-tiny", "--checkpointing", "none,full,every-2,selective", "--seq", "512", "--device",
              "cuda", "--clip-grad-norm", "--keep-gradients").out  # fmt: skip
    assert len(out.splitlines()) <= 24 - len(("two lines", "of command", "the prompt"))
    assert out.count(" peak  ") == 1
    assert re.match(r"the lowest of 4 peaks is [\d.]+ MiB with checkpointing \w+;\s+freeing\s+the\s+output\s", out)
    assert "extrapolated" not in out
    report = bertscope.from_json(cli("fit", "bert-tiny", "--gpu", "t4", "--seq", "8", "--batch", "4", "--checkpointing",
                                     "none", "--precision", "fp32", "--format", "json").out)  # fmt: skip
    for asked_batch in (4, None):
        out = view_of("fit").table(replace(report, asked_batch=asked_batch, rows=12 * report.rows), Target(width=80))
        assert len(out.splitlines()) <= views.SCREEN_LINES
        assert re.match(r"yes: batch [\d,]+ fits on t4 at seq 8 with fp32 without checkpointing: peak\s", out)


def test_the_settings_on_several_gpus_are_shown_if_they_fit_on_the_screen_or_with_v(printed):
    words = f"fit bert-tiny --gpu t4,h100 -b 550000 --precision autocast-fp16 {FIT} --format json"
    reports = bertscope.from_json(printed(f"bertscope {words}").out)
    many = replace(reports, reports=tuple(replace(one, rows=6 * one.rows) for one in reports.reports))
    screen = Target(width=80)
    few, cut, full = (view_of("comparison").table(given, replace(screen, verbose=verbose)).splitlines()
                      for given, verbose in ((reports, False), (many, False), (many, True)))  # fmt: skip
    count = 6 * sum(len(one.rows) for one in reports.reports)
    assert sum(line.startswith(" t4") for line in few) == 1 + len(reports.reports[0].rows)
    assert sum(line.startswith(" t4") for line in cut) == 1
    assert len(cut) <= views.SCREEN_LINES
    assert f"{count} more rows" in " ".join(" ".join(cut).split())
    assert sum(line.startswith(" t4") for line in full) == 1 + 6 * len(reports.reports[0].rows)


DRAWN_AT_80 = {f"{words} -v" if verbose else words: (words, verbose) for words in DRAWN for verbose in (False, True)}


@pytest.mark.parametrize("command", DRAWN_AT_80)
def test_every_column_is_shown_in_80_columns(printed, command):
    """The headings of the table without a limit stand above the narrow one, or before a value below a name."""
    words, verbose = DRAWN_AT_80[command]
    report = bertscope.from_json(printed(f"bertscope {words} --format json").out)
    wide, narrow = (DRAWN[words](report, Target(width=width, verbose=verbose)) for width in (None, 80))
    for head in re.findall(r"^ (.+)\n ─+$", wide, re.MULTILINE):
        for heading in re.split(r" {3,}", head):
            assert {*heading.split()} <= {*narrow.split()}, heading
    assert [line for line in narrow.splitlines() if len(line) > 80] == []


EXAMPLE = (
    Column("module", lambda row: row[0]),
    Column("kind", lambda row: row[1]),
    Column("shape", lambda row: row[2], below=1),
    Column("matmul FLOPs", lambda row: row[3], right=True),
    Column("bytes", lambda row: "4 B", right=True, detail=True),
)
EXAMPLE_ROWS = [
    ("encoder", "Linear and LayerNorm", "[2, 3]", "1,536"),
    ("├─ layer.attention.output", "--", "[12, 12]", "9"),
]


@pytest.mark.parametrize("name", ["table-70.txt", "table-54.txt", "table-50.txt", "table-30.txt"])
def test_a_narrow_table_breaks_headings_then_moves_columns_then_breaks_cells_and_names(name):
    drawn = table_text(EXAMPLE, EXAMPLE_ROWS, Target(width=int(name[6:8])))
    assert drawn.strip("\n") == (GOLDEN / name).read_text().strip("\n")


def test_a_detail_is_shown_with_v_only_and_always_in_markdown():
    assert "bytes" not in table_text(EXAMPLE, EXAMPLE_ROWS, Target())
    assert "bytes" in table_text(EXAMPLE, EXAMPLE_ROWS, Target(verbose=True))
    assert "bytes" in markdown_text(EXAMPLE, EXAMPLE_ROWS)
