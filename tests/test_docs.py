"""The pages under docs/ say what the tool prints; the reference of the command line is what the commands say."""

from __future__ import annotations

import importlib.util
import re
import shlex

import pytest
import torch

import bertscope
from tests.conftest import ROOT
from tests.test_cli import all_commands

DOCS = ROOT / "docs"
QUESTIONS = ("parameters", "fit", "checkpointing", "flops")
BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
FIGURE = re.compile(r"\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)? (?:%|[KMGT]iB)")


def script(name: str):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ACCURACY, GALLERY = script("make_accuracy"), script("make_gallery")


def sessions() -> list[tuple[str, str, tuple[str, ...]]]:
    """Page, command and the lines expected, from every `$ bertscope ...` of every page."""
    found = []
    for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        for block in BLOCK.findall(path.read_text()):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, *lines = part.splitlines()
                if command.startswith("bertscope "):
                    found.append((path.name, command, tuple(line for line in lines if line.strip())))
    return found


@pytest.mark.parametrize(("page", "command", "lines"), sessions(), ids=[command for _, command, _ in sessions()])
def test_every_command_of_a_page_prints_what_stands_under_it(printed, page, command, lines):
    result = printed(command)
    assert result.code == 0
    rest = [line.rstrip() for line in result.out.splitlines()]
    for line in lines:
        if line != "...":
            places = [place for place, got in enumerate(rest) if got.startswith(line)]
            assert places, f"{page}: {command} does not print {line!r} there"
            rest = rest[places[0] + 1 :]


def in_words() -> list[str]:
    """The commands with a model that stand inside the sentences and tables of the pages."""
    pages = [path.read_text() for path in sorted(DOCS.glob("*.md")) if path.name != "cli.md"]
    found = dict.fromkeys(re.findall(r"`(bertscope [a-z]+ bert-[^`]*)`", "\n".join(pages)))
    return [command for command in found if "--interactive" not in command]  # that needs a terminal


@pytest.mark.parametrize("command", in_words())
def test_every_command_in_the_words_of_a_page_runs(printed, command):
    result = printed(command)
    assert (result.code, bool(result.out)) == (0, True)


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_figure_of_a_page_is_printed_by_a_command_of_it(printed, name):
    text = (DOCS / f"{name}.md").read_text()
    commands = [command for page, command, _ in sessions() if page == f"{name}.md"]
    out = "\n".join(printed(command).out for command in commands)
    config = printed("bertscope diff bert-base-cased bert-base-uncased").out.replace(",", "")
    for figure in set(FIGURE.findall(BLOCK.sub("", text))) - {"16 GiB"}:  # the budget that is asked about
        assert figure in out or figure.replace(",", "") in config, figure


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_page_answers_first_and_ends_with_a_conclusion(name):
    title, answer, *_ = (DOCS / f"{name}.md").read_text().split("\n\n")
    assert re.fullmatch(r"# .*\?", title)
    assert re.search(r"\d|One more", answer)
    assert "**Conclusion.**" in (DOCS / f"{name}.md").read_text()
    assert f"docs/{name}.md" in (ROOT / "README.md").read_text()


def test_the_index_links_every_page():
    linked = re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "index.md").read_text())
    assert sorted([*linked, "index.md"]) == sorted(path.name for path in DOCS.glob("*.md"))


def measured_rows() -> dict[tuple[str, str, str], dict[str, tuple[int, int]]]:
    """Attention, precision and strategy in the file of accuracy: phases with measured and estimated bytes."""
    found: dict[tuple[str, str, str], dict[str, tuple[int, int]]] = {}
    for row in ACCURACY.read():
        if (row["loop"], row["model"], row["batch"], row["peaks"]) == ("profiler", "bert-base-uncased", "8", "1"):
            key = row["attention"], row["precision"], row["checkpointing"]
            found.setdefault(key, {})[row["phase"]] = int(row["measured_bytes"]), int(row["estimated_bytes"])
    return found


@pytest.mark.parametrize(
    ("attention", "precision", "strategies"),
    [("eager", "autocast-bf16", "none,full,selective"), ("sdpa", "fp32", "every-2,selective")],
)
def test_the_estimates_in_the_file_of_accuracy_are_those_of_today(attention, precision, strategies):
    """Of the built-in model as a module, which adds no masks."""
    rows = measured_rows()
    config = bertscope.load("bert-base-uncased", attention=attention).config
    ids = torch.zeros(8, 128, dtype=torch.long, device="meta")
    for strategy in strategies.split(","):
        model = bertscope.build(config, "BertForMaskedLM").train()
        if strategy != "none":
            model.gradient_checkpointing_enable(strategy=strategy)
        inputs = {"input_ids": ids, "token_type_ids": ids.clone(), "labels": ids.clone()}
        (variant,) = bertscope.estimate(
            model, inputs, precision="stored" if precision == "fp32" else precision
        ).variants
        told = rows[attention, precision, strategy]
        got = {phase.phase: phase.peak_bytes for phase in variant.estimated.phases}
        assert got == {phase: estimated for phase, (_, estimated) in told.items()}
        assert all(abs(estimated / measured - 1) < 1e-3 for measured, estimated in told.values())


def test_the_summary_and_the_picture_of_accuracy_are_those_of_the_file():
    page, rows = (DOCS / "accuracy.md").read_text(), ACCURACY.read()
    assert [line for line in ACCURACY.summary(rows) if line not in page] == []
    assert (DOCS / "accuracy.svg").read_text() == ACCURACY.picture(rows), "run: python docs/make_accuracy.py"
    exact = [row for row in rows if row["loop"] == "plain" and row["error"] == "0"]
    assert f"{len(exact)} of 34 peaks of whole steps are exact" in page
    for row in rows:
        if row["measured_bytes"]:
            measured, estimated = int(row["measured_bytes"]), int(row["estimated_bytes"])
            assert float(row["error"]) == pytest.approx((estimated - measured) / measured, rel=0.06)
            assert row["loop"] != "plain" or estimated == measured or row["attention"] == "eager"


@pytest.mark.parametrize("command", [word for word in GALLERY.COMMANDS if word.split()[0] not in GALLERY.NOT_COMPARED])
def test_the_gallery_has_the_output_of_today(cli, user_folder, tmp_path, monkeypatch, command):
    for path in user_folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    result = cli(*shlex.split(command))
    notes = "".join(line for line in result.err.splitlines(keepends=True) if line.startswith("note:"))
    told = GALLERY.read((DOCS / "gallery.md").read_text())[command]
    assert GALLERY.cut(result.out or notes) == told, f"run: python docs/make_gallery.py {command.split()[0]}"


def test_the_gallery_has_every_command():
    told = GALLERY.read((DOCS / "gallery.md").read_text())
    assert [command.split()[0] for command in told] == list(dict.fromkeys(command.split()[0] for command in told))
    assert {command.split()[0] for command in told} == set(all_commands())


def test_the_reference_of_the_command_line_is_fresh():
    assert (DOCS / "cli.md").read_text() == script("make_cli").page(), "run: python docs/make_cli.py"


def test_the_reference_knows_no_width_of_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERMINAL_WIDTH", "50")
    text = script("make_cli").page()
    assert text == (DOCS / "cli.md").read_text()
    assert max(map(len, re.findall(r"^  .*$", text, flags=re.MULTILINE))) > 80


def test_the_reference_has_every_command_with_its_options_and_examples():
    sections = re.split(r"^## bertscope (?=\w)", (DOCS / "cli.md").read_text(), flags=re.MULTILINE)[1:]
    assert len(sections) == len(all_commands())
    assert all("--help-all" in section and "examples:" in section for section in sections)


def headings_of_tables() -> set[str]:
    """Return the headings of the tables in the gallery, and the names of the rows at the peak."""
    text = (DOCS / "gallery.md").read_text()
    above = re.findall(r"^ (.+)\n ─+$", text, re.MULTILINE)
    found = {word for line in above for word in re.split(r" {2,}", line)}
    parts = re.findall(r"^ at the peak \(.*\n ─+\n((?: .*\n)+)", text, re.MULTILINE)
    return found | {re.split(r" {2,}", line.strip())[0] for part in parts for line in part.splitlines()}


def test_the_glossary_has_the_headings_of_the_tables():
    plain = {"path", "type", "tensors", "bytes", "module", "a", "b", "parameter", "change", "difference", "total",
             "shape", "class", "description", "package", "version", "to install", "purpose",
             "device", "threads", "memory", "at the peak"}  # fmt: skip
    told = (DOCS / "glossary.md").read_text().lower()
    names = {re.sub(r" \((?:estimated|measured)\)|^type: |^in |^step, | of \d+$|:.*", "", name)
             for name in headings_of_tables()}  # fmt: skip
    assert len(names) > 40
    assert sorted(name for name in names - plain if name.lower() not in told) == []
