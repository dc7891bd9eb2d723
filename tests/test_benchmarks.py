"""The folder benchmarks: published figures, `speed.py`, and the table beside the peers."""

import csv
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from benchmarks import speed
from benchmarks.measured_runs import measured_runs
from bertscope.reports.step import YES
from tests.conftest import EVERY_CASE, ROOT, run_python


def loaded():
    spec = importlib.util.spec_from_file_location("published", ROOT / "benchmarks" / "published.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


PUBLISHED = loaded()
ROWS = PUBLISHED.published()
RUNS = [row for row in ROWS if row.program == PUBLISHED.TORCH and row.quantity in (PUBLISHED.RAN, PUBLISHED.FAILED)]
# The setups with both a run and a failure, which are the sharpest.
SETUPS = [{row.source + row.run_text for row in RUNS if row.quantity == what} for what in ("ran", "failed")]
RESERVED = [row for row in ROWS if row.quantity == PUBLISHED.RESERVED]
CHOSEN = [row for row in RUNS if row.source + row.run_text in SETUPS[0] & SETUPS[1]]


def test_a_bracket_of_a_t4_is_answered_on_its_near_side():
    """bert-base-cased, 128 tokens, AdamW: 104 ran, 120 ran out of memory."""
    found = {row.batch: row.answer() for row in CHOSEN if row.batch in (104, 120)}
    assert found[104] == YES
    assert found[120] != YES


def test_every_published_row_has_a_source_and_every_figure_a_value():
    for row in ROWS:
        assert row.source
        assert (row.value_bytes > 0) == (
            row.quantity in (PUBLISHED.NVIDIA_SMI, PUBLISHED.ALLOCATED, PUBLISHED.RESERVED)
        )
        assert (row.value_seconds > 0) == (row.quantity == PUBLISHED.SECONDS)


FORKED = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if not os.fork():
    while time.process_time() < 0.3: pass
    os._exit(0)
try: os.wait()
except ChildProcessError: pass
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is needed")
def test_the_time_of_a_process_that_nobody_waits_for_is_counted():
    code = (
        "import sys, pathlib, tempfile\nfrom benchmarks import speed\nspeed.adopt_orphans()\n"
        "print(speed.measured([sys.executable, '-S', '-c', sys.argv[1]], pathlib.Path(tempfile.mkdtemp())).cpu_seconds)"
    )
    done = run_python(code, FORKED, cwd=ROOT, check=True)
    assert float(done.stdout) > 0.25


def test_the_code_of_every_peer_is_valid_and_every_target_is_used():
    found = [*speed.works(10)]
    for work in found:
        if work.command[1] == "-c":
            compile(work.command[2], work.tool, "exec")
    assert {work.target for work in found} - {""} == set(speed.TARGETS)


def test_the_files_that_check_gets_are_right(cli, tmp_path):
    for number in (0, 9):
        (tmp_path / f"{number}.bertscope.yaml").write_text(speed.expectation(30522 + number))
    assert cli("check", tmp_path).code == 0


def test_the_page_shows_the_tables_of_its_file():
    found = json.loads((ROOT / "docs" / "speed.json").read_text())
    page = (ROOT / "docs" / "speed.md").read_text()
    assert f"## Appendix: measurements\n\n{speed.rendered(found, 'markdown')}\n\n## Appendix: method\n" in page


README = ROOT / "README.md"
DOCUMENT = ROOT / "docs" / "comparison.md"
NOTHING = "\N{EN DASH}"
NAMED_BY_MACHINE = {"measured"}  # what an allocator does differs with the processor's kernels
LARGE = set() if EVERY_CASE else {"frozen", "recomputed", "cuda"}  # steps of large models


def _peers() -> ModuleType:
    run_config = importlib.util.spec_from_file_location("peers", ROOT / "benchmarks" / "peers.py")
    assert run_config
    assert run_config.loader
    module = importlib.util.module_from_spec(run_config)
    run_config.loader.exec_module(module)
    return module


PEERS = _peers()


def _section(path: Path, title: str) -> str:
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    return text


def _cells(text: str) -> dict[tuple[str, str], str]:
    """(row, column) -> cell, of every Markdown table in `text`."""
    found: dict[tuple[str, str], str] = {}
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table.splitlines()]
        for row in rows:
            assert len(row) == len(head), row
            for column, cell in zip(head[1:], row[1:], strict=True):
                assert found.setdefault((row[0], column), cell) == cell, (row[0], column)
    return found


IN_DOCUMENT = _cells(_section(DOCUMENT, "The table"))
IN_README = _cells(_section(README, "Compared with other tools"))
ASKED = {cell.strip("`"): row for (row, column), cell in IN_DOCUMENT.items() if column == "asked" and cell != "by hand"}


def in_a_word(cell: str) -> str:
    """A cell of the document as yes, partly or no."""
    words = cell.partition(":")[0]
    if words.split(",")[0] in ("yes", "equal"):
        return "yes"
    return "no" if words.startswith(("no", NOTHING)) or "wrong" in words else "partly"


def test_every_cell_of_the_readme_is_that_of_the_document_in_a_word():
    assert len(IN_README) >= 40
    assert {key: cell for key, cell in IN_README.items() if in_a_word(IN_DOCUMENT[key]) != cell} == {}


def test_every_question_of_the_script_has_its_row_and_every_row_its_question():
    assert set(ASKED) == set(PEERS.QUESTIONS)


@pytest.mark.parametrize("question", sorted(set(PEERS.QUESTIONS) - NAMED_BY_MACHINE - LARGE))
def test_what_bertscope_says_in_the_table_is_what_it_prints(question, cli, monkeypatch):
    monkeypatch.setattr(PEERS, "bertscope", lambda *arguments: cli(*arguments, "--format", "json").json)
    in_this_process = SimpleNamespace(run=lambda command, **_: SimpleNamespace(returncode=cli(*command[3:]).code))
    monkeypatch.setattr(PEERS, "subprocess", in_this_process)
    answer = PEERS.PROBES[question, "bertscope"]()
    assert answer in IN_DOCUMENT[ASKED[question], "bertscope"]


def test_a_peer_that_was_asked_has_a_cell_with_an_answer_and_one_that_was_not_has_none():
    for (question, tool), _ in PEERS.PROBES.items():
        assert IN_DOCUMENT[ASKED[question], tool] != NOTHING, (question, tool)


def test_every_peer_of_the_script_has_its_version_in_the_document():
    versions = _section(DOCUMENT, "Versions")
    assert [tool for tool in PEERS.PACKAGES if f"| {tool} |" not in versions] == []
    pinned = dict(pin.split("==") for pin in PEERS.PINNED)
    assert [tool for tool in PEERS.PACKAGES if tool in pinned and f"| {tool} | {pinned[tool]}" not in versions] == []


MEASURED = measured_runs()


def test_a_run_that_others_measured_has_a_configuration_a_source_and_bytes():
    assert len(MEASURED) == 83
    for run in MEASURED:
        assert run.source
        assert run.measured_bytes > 0 or run.ran_out
        path = run.words.split()[0]
        assert not path.startswith("configs/") or (ROOT / "benchmarks" / path / "config.json").is_file(), run.id


@pytest.mark.parametrize("name", ["x028"])
def test_the_reserved_bytes_of_a_run_are_those_that_others_measured(name):
    (run,) = (run for run in MEASURED if run.id == name)
    own = run.predictions["bertscope"]
    assert own == pytest.approx(run.measured_bytes, rel=0.005)
    assert abs(own - run.measured_bytes) < abs(run.predictions["xMem"] - run.measured_bytes)


with (ROOT / "benchmarks" / "published_kernels.csv").open(newline="") as _file:
    LAYERS = [(row["kernel"], row["size"], row["gpu"], float(row["mib"])) for row in csv.DictReader(_file)]
FIRST = {row[0]: row for row in LAYERS}


@pytest.mark.parametrize("row", LAYERS if EVERY_CASE else [FIRST["rms_norm"], FIRST["geglu"]], ids=lambda row: row[0])
def test_a_dry_run_of_a_layer_allocates_what_was_published_for_an_a100(row):
    kernel, size, gpu, mib = row
    script = ROOT / "tests" / "data" / "scripts" / "published_kernels.py"
    words = [sys.executable, "-m", "bertscope", "run", script, kernel, size, "--gpu", gpu]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stderr  # what a script prints
    (line,) = (line for line in out.splitlines() if line.startswith("MIB "))
    assert float(line.split()[1]) == pytest.approx(mib, rel=1e-5)
