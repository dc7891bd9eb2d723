"""Damaged files and names with a fixed seed, and hostile inputs of several files.

`python benchmarks/fuzz.py` is the long run with damaged files.
"""

from __future__ import annotations

import importlib.util
import io
import pickle
import socket
import subprocess
import sys
import threading
from itertools import islice
from pathlib import Path

import pytest

from tests import fuzzing
from tests.child_server import loaded
from tests.conftest import ROOT, Result
from tests.corpus import BAIT, CODE, FAMILIES, RAN, baits, cases, filled, kinds, prepared
from tests.fuzzing import judged, listening
from tests.hostile import FOLDERS

SEED, RUNS = 20261121, 6
REFUSED = ("deflated", "bzip2", "lzma")  # whose good file is refused
FILES = ("preset", "expectations", "config", "page", "adapter", "safetensors", "index", "zip", "legacy", "verified",
         "gguf", "onnx", "modules",
         "grid", "results", "project", "training", "accelerate", "calibration", "report",
         "snapshot", "log", *FAMILIES)  # fmt: skip
SETTINGS = ("grid of settings", "run of settings", "model of settings", "project of settings", "plan of settings",
            "training of settings")  # fmt: skip
KINDS = (*FILES, *SETTINGS, *REFUSED, "name", "input", "option", "profiled", "ranks")


@pytest.fixture(scope="module")
def made():
    loaded("")  # the server of children, which is no child of a command
    return kinds()


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_and_words_are_one_line(made, tmp_path, kind, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if kind not in made:
        pytest.skip("this kind needs transformers")
    home = prepared(made[kind], tmp_path)
    for arguments in islice(cases(kind, made[kind], SEED, home), RUNS // made[kind].rounds):
        verdict = judged(list(arguments), home)
        assert not verdict.faults, (ascii(arguments), made[kind].name and (home / made[kind].name).read_bytes()[:2000],
                                    verdict)  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in FILES if kind not in (*FAMILIES, "page", "verified")])
def test_no_reader_runs_code_that_a_file_names_or_changes_a_foreign_file(made, tmp_path, kind):
    home = prepared(made[kind], tmp_path)
    for arguments in baits(made[kind], home):
        verdict = judged(list(arguments), home)
        assert not verdict.faults, (ascii(arguments), (home / made[kind].name).read_bytes()[:2000], verdict)


@pytest.mark.parametrize("kind", SETTINGS)
def test_no_key_of_a_file_of_settings_runs_code_that_it_names(made, tmp_path, kind):
    home = prepared(made[kind], tmp_path)
    for key, value in ((key, value) for key, values in made[kind].keys.items() for value in values):
        if str(value).endswith(CODE):
            verdict = judged(list(filled(made[kind], home, {key: value})), home)
            assert not verdict.faults, (key, value, verdict)


# Kind of file -> the keys whose values may be code; no other file of settings has an --allow-code.
ALLOWED = {"grid of settings": ("model", "loss"), "run of settings": ("loss",), "model of settings": ("model",)}


@pytest.mark.parametrize("kind", ALLOWED)
def test_allow_code_imports_what_a_file_names(made, tmp_path, kind):
    """Else the test above would pass for names that nothing imports."""
    home = prepared(made[kind], tmp_path)
    for key in ALLOWED[kind]:
        for value in (value for value in made[kind].keys[key] if str(value).endswith(CODE)):
            faults = judged([*filled(made[kind], home, {key: value}), "--allow-code"], home).faults
            assert "code ran" in faults, value


def test_every_kind_of_input_is_tried(made):
    assert made.keys() <= set(KINDS)


@pytest.mark.parametrize("kind", [*FILES, *SETTINGS])
def test_the_files_that_are_damaged_are_good_before(made, tmp_path, kind):
    """Else every damage would be refused for another reason."""
    if kind not in made:
        pytest.skip("this kind needs transformers")
    home, path = prepared(made[kind], tmp_path), tmp_path / made[kind].name
    path.write_bytes(made[kind].good)
    for command in dict.fromkeys(made[kind].commands):
        verdict = judged([word.replace("{}", str(path)) for word in command.split()], home)
        assert (verdict.code in (0, 1), verdict.faults) == (True, ()), (command, verdict)


@pytest.mark.parametrize("make", FOLDERS, ids=lambda make: make.__name__)
def test_an_input_of_several_files_is_answered_soon_and_small(tmp_path, monkeypatch, make):
    code, words = FOLDERS[make]
    folder = tmp_path / "input"
    folder.mkdir()
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(folder)
    arguments = make(folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    verdict = judged(arguments, folder)
    assert (verdict.code, verdict.faults) == (code, ()), verdict
    assert words in verdict.err
    assert verdict.seconds < 5
    assert verdict.grown < 300 << 20
    assert all(path.read_bytes() == content for path, content in before.items())


CHILDREN: list[subprocess.Popen] = []


def _leave_a_child() -> None:
    CHILDREN.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))


def _work() -> None:
    while True:
        pass


SEEN = threading.Event()  # after a look at the sockets that found one


def _listen() -> None:
    with socket.create_server(("", 0)):
        SEEN.wait(10)


def _looked(pids: set[str]) -> set[str]:
    if found := listening(pids):
        SEEN.set()
    return found


# Fault -> exit code, stdout, stderr, and what else the command does.
FAULTS = {
    "exit code 70": (70, "", "error: x\n", None),
    "a traceback": (0, "Traceback (most recent call last)\n", "", None),
    "2 lines on stderr": (2, "", "error: x\nerror: y\n", None),
    "text on stdout and an error": (2, "half", "error: x\n", None),
    "unprintable characters": (0, "\x1b[2J\n", "", None),
    "files are left: {'left'}": (0, "", "", lambda: Path("left").touch()),
    "an output file in spite of an error: {'out'}": (2, "", "error: x\n", lambda: Path("out").touch()),
    "a child is left": (0, "", "", _leave_a_child),
    "of the processor": (0, "", "", _work),
    "MiB of memory": (0, "", "", lambda: b"x" * (128 << 20)),
    "code ran": (0, "", "", lambda: Path(RAN).touch()),
    "files of the user are changed: {'notes.txt'}": (0, "", "", lambda: Path("notes.txt").unlink()),
    "files of the user are changed: {'mine'}": (2, "", "error: x\n", lambda: Path("mine").write_text("")),
    "lines of mine are lost": (0, "", "", lambda: Path("mine").write_text("second\n")),
    "it listens to the network": (0, "", "", _listen),
}


@pytest.mark.skipif(sys.platform != "linux", reason="only there children and the peak of memory are read")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(tmp_path, monkeypatch, fault):
    code, out, err, action = FAULTS[fault]
    monkeypatch.setattr(fuzzing, "SECONDS", 0.3)
    monkeypatch.setattr(fuzzing, "MEMORY_BYTES", 64 << 20)
    monkeypatch.setattr(fuzzing, "GONE_SECONDS", 0)
    monkeypatch.setattr(fuzzing, "listening", _looked)
    (tmp_path / "mine").write_text("first\nsecond\n")
    (tmp_path / "notes.txt").write_text("notes")

    def run(*_: object) -> Result:
        if action is not None:
            action()
        return Result(code, out, err)

    monkeypatch.setattr(fuzzing, "run_cli", run)
    faults = judged(["profile", "--output", "out", "-o", "mine"], tmp_path).faults
    for child in CHILDREN:
        child.communicate(timeout=10)
    CHILDREN.clear()
    assert fault in "; ".join(faults)


def test_the_long_run_says_what_happened(monkeypatch, capsys):
    run_config = importlib.util.spec_from_file_location("fuzz", ROOT / "benchmarks" / "fuzz.py")
    fuzz = importlib.util.module_from_spec(run_config)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["fuzz.py", "--runs=4", "--signals=1", "--seed=7", "--only", "preset", "name"])
    run_config.loader.exec_module(fuzz)
    assert fuzz.main() == 0
    out = capsys.readouterr().out
    assert "4 runs, 0 failures" in out
    assert "1 signals, 0 failures" in out


def test_a_file_that_runs_code_is_among_the_files_for_all_readers(tmp_path, monkeypatch):
    """Else no reader is tried with one."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(BAIT[0]())
    assert Path(RAN).exists()
