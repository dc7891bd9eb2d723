"""Damaged files and names with a fixed seed, and hostile inputs of several files.

`python benchmarks/fuzz.py` is the long run with damaged files.
"""

import io
import sys
from itertools import islice

import pytest

from tests.child_server import loaded
from tests.conftest import EVERY_CASE
from tests.corpus import CODE, FAMILIES, baits, cases, filled, kinds, prepared
from tests.fuzzing import judged
from tests.hostile import FOLDERS

SEED, RUNS = 20261121, 4 if EVERY_CASE else 2
REFUSED = ("deflated", "bzip2", "lzma")  # whose good file is refused
FILES = ("preset", "expectations", "config", "page", "adapter", "safetensors", "index", "zip", "legacy", "verified",
         "gguf", "onnx", "modules",
         "grid", "results", "project", "training", "accelerate", "calibration", "report", "lengths", "prices",
         "snapshot", "log", *FAMILIES)  # fmt: skip
SETTINGS = ("grid of settings", "run of settings", "model of settings", "project of settings", "plan of settings",
            "training of settings", "adapter of settings", "preset of settings")  # fmt: skip
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
