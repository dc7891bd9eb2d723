"""The command `sweep`: its file, its exit codes, its table, page and Parquet."""

from __future__ import annotations

import io
import json
import re
from importlib.util import find_spec

import pytest

from bertscope.commands.results_file import results_file
from bertscope.errors import SourceError
from tests.conftest import GRID


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with a grid of four points."""
    (tmp_path / "grid.yaml").write_text(GRID)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_sweep_goes_on_from_its_file_and_puts_the_rows_in_order(cli, folder):
    sweep = ("sweep", "grid.yaml", "-o", "results.jsonl", "--workers", "2")
    first = cli(*sweep)
    assert first.code == 0
    assert first.out.startswith("4 points of grid.yaml; fits: 3 yes, 1 no\n")
    content = (folder / "results.jsonl").read_bytes()
    rows = [json.loads(line) for line in content.splitlines()]
    assert [(row["point"]["model"], row["point"]["batch"]) for row in rows] == [
        ("bert-tiny", 8), ("bert-tiny", 32), ("bert-mini", 8), ("bert-mini", 32)
    ]  # fmt: skip
    lines = content.splitlines(keepends=True)
    (folder / "results.jsonl").write_bytes(lines[2] + lines[0][:-1])  # killed while it wrote
    second = cli(*sweep)
    assert "note: results.jsonl:2 was not written to its end; its point is computed again\n" in second.err
    assert "note: results.jsonl has 1 of 4 points; 3 are left\n" in second.err
    assert ((folder / "results.jsonl").read_bytes(), second.out) == (content, first.out)
    third = cli(*sweep, "--sort", "peak_bytes", "--rows", "1", "--plot", "page.html")
    assert "note: results.jsonl has 4 of 4 points; none is left\n" in third.err
    assert re.search(r"\n bert-tiny +8 +yes +96.56 MiB", third.out)
    assert "3 more rows: --rows 0 shows all\n" in third.out
    page = (folder / "page.html").read_text()
    figures = [json.loads(text) for text in re.findall(r'class="figure">(.*?)</script>', page, re.DOTALL)]
    assert [[line["name"], line["x"]] for line in figures[0][0]] == [["bert-tiny", [8, 32]], ["bert-mini", [8, 32]]]
    if find_spec("pyarrow"):
        from pyarrow import parquet

        cli(*sweep, "--parquet", "rows.parquet")
        found = parquet.read_table(io.BytesIO((folder / "rows.parquet").read_bytes())).to_pylist()
        assert [row["peak_bytes"] for row in found] == [row["peak_bytes"] for row in rows]
    # rows of another grid stay, behind those of this one
    (folder / "grid.yaml").write_text(GRID.replace("[8, 32]", "32"))
    assert cli(*sweep).code == 0
    assert (folder / "results.jsonl").read_bytes().splitlines(keepends=True) == [lines[1], lines[3], lines[0], lines[2]]


def test_a_point_without_an_estimate_is_a_row_and_exit_code_1(cli, folder):
    (folder / "grid.yaml").write_text("model: bert-tiny\nstrategy: none\nworld_size: 2\n")
    result = cli("sweep", "grid.yaml", "-o", "results.jsonl", "--format", "csv")
    assert result.code == 1
    assert "2 ranks need a strategy" in result.out
    assert json.loads((folder / "results.jsonl").read_text())["outcome"] == "refused"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("grid.yaml -o notes.txt", "notes.txt:1: no row of a sweep; name another file"),
        ("grid.yaml -o results.jsonl --address tcp://a:1", "--address names a cluster; give --engine ray or"),
        ("grid.yaml -o results.jsonl --plot a.png", "--plot writes a page; name a file such as a.html"),
        (
            "grid.yaml -o results.jsonl --sort peek_bytes",
            "no column 'peek_bytes' to sort by; did you mean 'peak_byte",
        ),
        ("absent.yaml -o results.jsonl", "absent.yaml does not exist; a grid is lines of"),
        ("grid.yaml -o /dev/null", "/dev/null is no regular file, which a sweep needs to go on from"),
    ],
)
def test_a_mistake_is_an_error_before_the_work_and_changes_no_file(cli, folder, words, message):
    (folder / "notes.txt").write_text("my notes, without a line break at the end")
    result = cli("sweep", *words.split())
    assert result.code == 2
    assert message in result.err
    assert (folder / "notes.txt").read_text() == "my notes, without a line break at the end"
    assert not (folder / "results.jsonl").exists()


def test_two_sweeps_do_not_write_to_one_file(tmp_path):
    path = tmp_path / "results.jsonl"
    with results_file(path), pytest.raises(SourceError, match="another sweep writes to"), results_file(path):
        pass
