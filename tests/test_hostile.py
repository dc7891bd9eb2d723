"""Hostile files: each is one line and exit code 2, or is shown with escapes; soon, small and without a traceback."""

import csv
import io
import json
import lzma
import os
import unicodedata
import zipfile
from pathlib import Path

import pytest
from rich.cells import cell_len

from bertscope.checkpoints.files import LIMITS, Budget
from bertscope.errors import SourceError, one_line
from bertscope.files import open_file, readable
from bertscope.units import html_text, json_text, visible
from bertscope.views.columns import Column, csv_only, csv_text, table_text
from bertscope.views.console import Target
from tests import hostile
from tests.fuzzing import judged


def made(folder: Path, name: str, files: dict[str, hostile.Made]) -> Path:
    path = folder / name
    path.write_bytes(files[name]())
    assert path.stat().st_size < 1 << 20
    return path


MOST_BYTES = 400 << 20  # above the memory before


@pytest.mark.parametrize("name", hostile.REFUSED)
def test_a_hostile_file_is_one_line_soon_and_small(tmp_path, name):
    path = made(tmp_path, name, hostile.REFUSED)
    verdict = judged(["check" if ".bertscope." in name else "count", path], tmp_path)
    assert (verdict.code, verdict.faults, verdict.err.count("\n")) == (2, (), 1), verdict
    assert verdict.err.startswith("error: ")
    assert name in verdict.err
    assert hostile.WORDS.get(name, "") in verdict.err
    assert verdict.grown < MOST_BYTES


@pytest.mark.parametrize("name", ["pipe", "/dev/zero"])
def test_what_has_no_end_is_refused_and_is_empty_where_it_takes_the_place_of_a_file(tmp_path, monkeypatch, name):
    path = tmp_path / name  # an absolute name is a path by itself
    if name == "pipe":
        os.mkfifo(path)
    with pytest.raises(SourceError, match="is not a regular file; name one"):
        open_file(path, "name one")
    monkeypatch.setattr("bertscope.files.os.stat", lambda _: os.lstat(__file__))  # the first look saw a file
    with open_file(path, "name one") as file:
        assert file.read() == b""


def test_a_file_of_the_system_without_a_size_reads_as_empty(tmp_path):
    (tmp_path / "link").symlink_to("/proc/self/status")  # as /proc/kmsg, which only root may open, and which has no end
    with open_file(tmp_path / "link", "name one") as file:
        assert file.read() == b""


SHOWN = [*((name, "table") for name in hostile.ACCEPTED), *(
    ("unfoldable-names.safetensors", fmt) for fmt in ("json", "csv", "markdown")
)]  # fmt: skip


@pytest.mark.parametrize(("name", "fmt"), SHOWN)
def test_a_well_formed_file_is_shown_soon_and_small(tmp_path, name, fmt):
    path = made(tmp_path, name, hostile.ACCEPTED)
    verdict = judged(["count", path, "--by", "parameter", "--format", fmt], tmp_path)
    assert (verdict.code, verdict.faults, verdict.err) == (0, (), "")
    assert verdict.grown < MOST_BYTES


def test_limits_hold_over_all_files_of_a_checkpoint():
    budget = Budget(Path("x"))
    budget.spend("tensors", 100_000)  # as many as the largest published checkpoints have
    with pytest.raises(SourceError, match="more than 262,144 tensors in all"):
        budget.spend("tensors", LIMITS["tensors"])


@pytest.mark.parametrize(
    "error",
    [lzma.LZMAError("corrupt"), zipfile.BadZipFile("bad"), EOFError(), MemoryError(), RecursionError("deep"),
     NotImplementedError("method 99"), OSError(5, "Input/output error"), KeyError("x")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
def test_whatever_a_library_raises_while_it_reads_is_one_line(error):
    with pytest.raises(SourceError, match=r"x\.bin cannot be read: .*; check the path") as found, readable("x.bin"):
        raise error
    assert "\n" not in str(found.value)
    assert found.value.__cause__ is error


# ---- folders ----


@pytest.fixture
def locked(tmp_path, monkeypatch):
    """A folder in which `locked` may not be listed or searched, also for root."""
    (tmp_path / "locked").mkdir()
    (tmp_path / "holds.bertscope.yaml").write_text("model: bert-tiny\nexpected:\n  distinct_params: 4385920\n")
    scandir, stat = os.scandir, os.stat

    def refuse(real):
        def call(path=".", *args, **options):
            if "locked" in Path(os.fsdecode(path)).parts[:-1] or (real is scandir and str(path).endswith("locked")):
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *args, **options)

        return call

    monkeypatch.setattr(os, "scandir", refuse(scandir))
    monkeypatch.setattr(os, "stat", refuse(stat))
    return tmp_path


def test_a_folder_that_may_not_be_searched_could_not_be_checked(cli, locked):
    result = cli("check", locked)
    assert (result.code, "1 expectation passed, 0 failed, 1 could not be checked" in result.out) == (2, True)
    assert f"error: {locked / 'locked'} cannot be read: Permission denied" in result.err
    result = cli("check", locked / "locked")  # which is named
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "locked cannot be read: Permission denied" in result.err


def test_links_pipes_and_loops_with_an_expectation_files_name_are_one_line_each(cli, tmp_path):
    (tmp_path / "dangling.bertscope.yaml").symlink_to("nowhere")
    (tmp_path / "loop.bertscope.yaml").symlink_to("loop.bertscope.yaml")
    (tmp_path / "zero.bertscope.yaml").symlink_to("/dev/zero")
    (tmp_path / "above").symlink_to("..")
    os.mkfifo(tmp_path / "pipe.bertscope.yaml")
    result = cli("check", tmp_path)
    assert (result.code, result.err.count("\n")) == (2, 4)
    assert result.err.count("error: ") == 4
    (tmp_path / "loop.py").symlink_to("loop.py")
    for words in (["check", tmp_path / "loop.py"], ["count", f"{tmp_path / 'loop.py'}:build"]):
        result = cli(*words)
        errors = [line for line in result.err.splitlines() if not line.startswith("note: ")]
        assert (result.code, result.out, len(errors)) == (2, "", 1)


def test_a_place_that_may_not_be_searched_is_one_line(cli, tmp_path, monkeypatch):
    def is_file(path):
        if path.name.endswith("b.py"):  # as without the right to search a folder above it
            raise PermissionError(13, "Permission denied", str(path))
        return os.path.isfile(path)

    monkeypatch.setattr("pathlib.Path.is_file", is_file)
    result = cli("run", tmp_path / "a\nb.py")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "b.py: Permission denied; check its permissions" in result.err


# ---- text that is shown ----


def is_safe(text: str) -> bool:
    """Return whether a text has no control, format, surrogate or separator character but line breaks."""
    return not {unicodedata.category(character) for character in set(text) - {"\n"}} & {"Cc", "Cf", "Cs", "Zl", "Zp"}


@pytest.mark.parametrize("fmt", ["table", "json", "csv", "markdown"])
def test_no_format_shows_what_a_terminal_acts_upon(cli, tmp_path, fmt):
    path = made(tmp_path, "names.safetensors", hostile.ACCEPTED)
    for by in ("parameter", "module", "layer"):
        result = cli("count", path, "--by", by, "--format", fmt)
        assert (result.code, result.err) == (0, "")
        assert is_safe(result.out)
        assert by == "module" or "a\\u202eb" in result.out.replace("\\\\", "\\")
    result = cli("diff", "bert-tiny", path, "--format", fmt)
    assert result.code == 1
    assert is_safe(result.out)


def test_json_with_escapes_is_the_same_data():
    data = {"names": [*hostile.NAMES, "\U000e0001", "é", "😀"]}
    text = json_text(data)
    assert is_safe(text)
    assert json.loads(text) == data
    assert "é" in text


def test_a_cell_of_csv_is_no_formula_and_a_number_stays_one():
    text = csv_text([csv_only({"a": lambda cell: cell})], ["=1+1", "+1", "-1,000", "-cmd", "@x", -5, "a\nb"])
    rows = [row[0] for row in csv.reader(io.StringIO(text))]
    assert rows == ["a", "'=1+1", "+1", "-1,000", "'-cmd", "'@x", "-5", "a\\nb"]


def test_a_command_to_paste_has_names_of_files_in_quotes(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "a;touch RAN"
    text = ("CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 10.00 GiB total capacity; 9.50 GiB already "
            "allocated; 16.00 MiB free; 9.60 GiB reserved in total by PyTorch)")  # fmt: skip
    for suffix, content in ((".log", text), (".bertscope.yaml", "model: bert-tiny\n"), (".safetensors", "")):
        Path(f"{name}{suffix}").write_text(content)
    why, check = cli("why", f"{name}.log"), cli("check", f"{name}.bertscope.yaml")
    assert f"bertscope why '{name}.log' MODEL" in why.out
    assert f"bertscope check --write '{name}.bertscope.yaml'" in check.out + check.err
    assert f"bertscope count '{name}.safetensors'" in cli("estimate", f"{name}.safetensors").err
    (folder := Path("a\n  touch RAN\n")).mkdir()
    (folder / "config.json").write_text('{"model_type": "bert"}')
    assert r"bertscope estimate 'a\n  touch RAN\n'" in cli("count", folder).out


@pytest.mark.parametrize("name", hostile.NAMES)
def test_text_for_pages_and_errors_is_escaped(name):
    assert is_safe(visible(name))
    assert is_safe(html_text(name))
    assert is_safe(one_line(name))
    assert "<" not in html_text(name)


@pytest.mark.parametrize("width", [None, 30, 200])
def test_wide_and_combining_letters_leave_the_columns_of_a_table_in_line(width):
    shown = [Column("tensor", lambda row: row[0]), Column("n", lambda row: row[1], right=True)]
    rows = [("a", "1"), ("日本", "22,000"), ("", ""), ("e\u0301", "3")]
    head, rule, *lines = table_text(shown, rows, Target(width=width)).strip("\n").splitlines()
    assert {cell_len(line) for line in (head, rule, *lines) if line} == {len(" tensor   22,000")}
    assert len(lines) == len(rows)
