"""The table beside the peers: what bertscope says there is what it prints, and both tables say the same."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.conftest import ROOT

README = ROOT / "README.md"
DOCUMENT = ROOT / "docs" / "comparison.md"
NOTHING = "\N{EN DASH}"
NAMED_BY_MACHINE = {"measured"}  # what an allocator does differs with the processor's kernels


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
IN_README = _cells(_section(README, "Beside other tools"))
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


@pytest.mark.parametrize("question", sorted(set(PEERS.QUESTIONS) - NAMED_BY_MACHINE))
def test_what_bertscope_says_in_the_table_is_what_it_prints(question, cli, monkeypatch):
    monkeypatch.setattr(PEERS, "bertscope", lambda *arguments: cli(*arguments, "--format", "json").json)
    in_this_process = SimpleNamespace(run=lambda command, **_: SimpleNamespace(returncode=cli(*command[3:]).code))
    monkeypatch.setattr(PEERS, "subprocess", in_this_process)
    answer = PEERS.PROBES[question, "bertscope"]()
    assert answer in IN_DOCUMENT[ASKED[question], "bertscope"]


def test_a_peer_that_was_asked_has_a_cell_with_an_answer_and_one_that_was_not_has_none():
    for (question, tool), _ in PEERS.PROBES.items():
        assert IN_DOCUMENT[ASKED[question], tool] != NOTHING, (question, tool)


def test_a_peer_that_is_not_installed_is_said_so(monkeypatch, capsys):
    monkeypatch.setitem(PEERS.PACKAGES, "thop", "no_such_package")
    monkeypatch.setattr("sys.argv", ["peers.py", "--here", "--tool", "thop", "--question", "flops"])
    PEERS.main()
    out = capsys.readouterr().out
    assert "thop: not installed\n" in out
    assert "MACs" not in out


def test_every_peer_of_the_script_has_its_version_in_the_document():
    versions = _section(DOCUMENT, "Versions")
    assert [tool for tool in PEERS.PACKAGES if f"| {tool} |" not in versions] == []
    pinned = dict(pin.split("==") for pin in PEERS.PINNED)
    assert [tool for tool in PEERS.PACKAGES if tool in pinned and f"| {tool} | {pinned[tool]}" not in versions] == []
