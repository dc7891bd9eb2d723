"""The command `sweep`: its file, its exit codes, its table, page and Parquet."""

import json
import re

import pytest

from bertscope.analyses.sweep.pool import results_file
from bertscope.errors import BertscopeWarning, SelectionError, SourceError
from bertscope.reports.base import SCHEMA
from tests.conftest import GRID, run_cli


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
    assert first.out.startswith("3 of 4 points of grid.yaml fit, 1 does not.\n")
    content = (folder / "results.jsonl").read_bytes()
    rows = [json.loads(line) for line in content.splitlines()]
    assert [(row["point"]["model"], row["point"]["batch"]) for row in rows] == [
        ("bert-tiny", 8), ("bert-tiny", 32), ("bert-mini", 8), ("bert-mini", 32)
    ]  # fmt: skip
    lines = content.splitlines(keepends=True)
    (folder / "results.jsonl").write_bytes(lines[2] + lines[0][:-1])  # killed while it wrote
    second = cli(*sweep)
    assert "note: results.jsonl:2 is incomplete; its point is computed again\n" in second.err
    assert "note: results.jsonl has 1 of 4 points; 3 are left\n" in second.err
    assert ((folder / "results.jsonl").read_bytes(), second.out) == (content, first.out)
    third = cli(*sweep, "--sort", "peak_bytes", "--rows", "1")
    assert "note: results.jsonl has 4 of 4 points; none is left\n" in third.err
    assert re.search(r"\n bert-tiny +8 +97.08 MiB +yes", third.out)
    assert "3 more rows: --rows 0 shows all\n" in third.out
    # rows of another grid stay, behind those of this one
    (folder / "grid.yaml").write_text(GRID.replace("[8, 32]", "32"))
    assert cli(*sweep).code == 0
    assert (folder / "results.jsonl").read_bytes().splitlines(keepends=True) == [lines[1], lines[3], lines[0], lines[2]]


def test_a_point_without_an_estimate_is_a_row_and_exit_code_1(cli, folder):
    (folder / "grid.yaml").write_text("model: bert-tiny\nstrategy: none\nworld_size: 2\n")
    result = cli("sweep", "grid.yaml", "-o", "results.jsonl", "--format", "csv")
    assert result.code == 1
    assert "2 ranks need strategy" in result.out
    assert json.loads((folder / "results.jsonl").read_text())["outcome"] == "refused"


def test_two_sweeps_do_not_write_to_one_file(tmp_path):
    path = tmp_path / "results.jsonl"
    with (
        results_file(path, {}),
        pytest.raises(SourceError, match="another sweep is writing to"),
        results_file(path, {}),
    ):
        pass


SMALL = "model: bert-tiny\noptimizer: none\nbatch: 1\nseq: [8, 16]\n"


@pytest.mark.parametrize("words", [[], ["--address", "local"]])
def test_no_engine_starts_a_cluster(monkeypatch, words):
    from bertscope.analyses.sweep.pool import cluster_address

    monkeypatch.delenv("DASK_SCHEDULER_ADDRESS", raising=False)
    with pytest.raises(SelectionError, match="engine dask needs a running cluster; give its addr"):
        cluster_address(words[-1] if words else None)
    assert cluster_address("tcp://127.0.0.1:1") == "tcp://127.0.0.1:1"
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tcp://127.0.0.1:2")
    assert cluster_address(None) == "tcp://127.0.0.1:2"


@pytest.fixture(scope="module")
def rows_of_small(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("small") / "grid.yaml"
    path.write_text(SMALL)
    assert run_cli("sweep", path, "-o", path.with_name("done.jsonl")).code == 0
    return path.with_name("done.jsonl").read_bytes()


@pytest.fixture
def done(folder, rows_of_small) -> bytes:
    """A complete file of the grid, which is in the working directory."""
    (folder / "grid.yaml").write_text(SMALL)
    return rows_of_small


OF_SCHEMA = f'"schema":{SCHEMA}'.encode()
FOREIGN = {
    "notes that begin like a row": b'{"schema":2,"key":"my secret notes","other":[1,2,3]}',
    "one character of a row": b"{",
    "the beginning of another key": b'{"schema":2,"key":"0123',
    "3 MB without a line break": b'{"schema":2,"key":"' + b"a" * 3_000_000,
    "text": b"hello",
    "a line break": b"\n",
    "a NUL": b"\0",
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("is_behind", [False, True], ids=["alone", "behind rows"])
def test_a_file_with_anything_else_in_it_keeps_every_byte(cli, folder, done, content, is_behind):
    if is_behind and content == b"{":
        content = b"{ "  # one brace behind rows of this grid is the beginning of a row
    whole = done * is_behind + content
    (folder / "results.jsonl").write_bytes(whole)
    result = cli("sweep", "grid.yaml", "-o", "results.jsonl")
    assert result.code == 2
    assert result.err == f"error: results.jsonl:{3 if is_behind else 1}: not a row of a sweep; name another file\n"
    assert (folder / "results.jsonl").read_bytes() == whole


def test_a_sweep_that_ended_at_any_byte_goes_on_to_the_same_file(cli, folder, done):
    first = done.index(b"\n") + 1
    for size in (53, first - 1, first, first + 1, first + 8, len(done) - 1):
        (folder / "results.jsonl").write_bytes(done[:size])
        assert cli("sweep", "grid.yaml", "-o", "results.jsonl").code == 0
        assert (folder / "results.jsonl").read_bytes() == done


IMPOSSIBLE = {
    "negative bytes": (rb'"peak_bytes":\d+', b'"peak_bytes":-5'),
    "a number of 4,001 digits": (rb'"parameters":\d+', b'"parameters":' + b"9" * 4001),
    "a number that is none": (rb'"step_flops":\d+', b'"step_flops":NaN'),
    "an empty point": (rb'"point":\{.*?\}', b'"point":{}'),
    "another point under the key": (rb'"seq":8', b'"seq":9'),
    "another key": (rb'"key":"\w', b'"key":"X'),
    "an unknown outcome": (rb'"outcome":"\w+"', b'"outcome":"fine"'),
    "an error of a computed point": (rb'"error":""', b'"error":"no"'),
}


@pytest.mark.parametrize(("pattern", "text"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_row_that_no_sweep_writes_is_refused_with_its_line(cli, folder, done, pattern, text):
    first, second = done.splitlines(keepends=True)
    changed = re.sub(pattern, text, first, count=1)
    assert changed != first
    (folder / "results.jsonl").write_bytes(second + changed)
    result = cli("sweep", "grid.yaml", "-o", "results.jsonl")
    assert (result.code, result.err) == (2, "error: results.jsonl:2: not a row of a sweep; name another file\n")
    assert (folder / "results.jsonl").read_bytes() == second + changed


def test_rows_of_another_schema_are_refused_by_name(cli, folder, done):
    for old, schema in ((done.replace(OF_SCHEMA + b",", b""), 1), (done.replace(OF_SCHEMA, b'"schema":2'), 2)):
        for content in (done + old, done + old[:99]):  # the second ends inside a row
            (folder / "results.jsonl").write_bytes(content)
            result = cli("sweep", "grid.yaml", "-o", "results.jsonl")
            message = f"a row of schema {schema}; this version resumes from {SCHEMA}; name another file"
            assert (result.code, result.err) == (2, f"error: results.jsonl:3: {message}\n")
            assert (folder / "results.jsonl").read_bytes() == content


def test_a_file_that_another_program_changed_is_not_replaced(folder):
    path = folder / "results.jsonl"
    with results_file(path, {}) as file:
        path.write_bytes(b"a line of an editor\n")
        with pytest.warns(BertscopeWarning, match="was changed by another program"):
            file.finish([])
    assert path.read_bytes() == b"a line of an editor\n"


def test_init_prints_a_sample_that_sweep_reads_and_replaces_no_file(cli, tmp_path, monkeypatch):
    from bertscope.analyses.sweep.grid import read_grid, tasks_of

    monkeypatch.chdir(tmp_path)
    printed = cli("sweep", "--init").out
    assert "model: [" in printed
    assert list(tmp_path.iterdir()) == []
    for words in (("--init", "new.yaml"), ("--init", "-o", "other.yaml")):
        done = cli("sweep", *words)
        assert (done.code, done.out, done.err) == (0, "", f"note: wrote the sample to {words[-1]}\n")
        assert (tmp_path / words[-1]).read_text() == printed
    assert cli("sweep", "one.yaml", "--init", "-o", "two.yaml").code == 2
    assert len(tasks_of(read_grid("new.yaml"))) == 2 * 2 * 2 * 2 * 2  # models, batches, lengths, precisions, strategies
    text = (tmp_path / "new.yaml").read_text()
    for line in re.findall(r"^# (\w+: .*)", text, re.MULTILINE):  # what is commented out is valid too
        other = "strategy: fsdp\n" if line.startswith("world_size") else ""
        more = "world_size: 2\n" if line.startswith("strategy") else other
        (tmp_path / "more.yaml").write_text(f"{text}{line}\n{more}")
        assert tasks_of(read_grid("more.yaml"))
    (tmp_path / "new.yaml").write_text("mine")
    again = cli("sweep", "new.yaml", "--init")
    assert (again.code, again.err) == (2, "error: new.yaml exists; name a new file for the sample\n")
    assert (tmp_path / "new.yaml").read_text() == "mine"
