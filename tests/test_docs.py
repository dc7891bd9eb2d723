"""The pages: what they print is what bertscope prints, what they link exists; the site; the limits of SECURITY.md."""

import importlib
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bertscope
from bertscope.settings.run_config import SETTINGS
from tests.conftest import EVERY_CASE, ROOT, needs_graphviz, shortened
from tests.test_cli import all_commands, examples

DOCS = ROOT / "docs"
QUESTIONS = ("parameters", "fit", "flops", *EVERY_CASE * ("checkpointing",))
# Commands of pages that take seconds, with a smaller one of the same kind that the tests run: `.ci/versions every`
# runs them.
LONG = (
    "plan bert-large-uncased", "run --gpu t4 --fit", "sweep grid.yaml", "check --presets",
    "fit bert-tiny --budget 160MiB --batch-total", "profile bert-tiny --nproc",
)  # fmt: skip


def is_run(command: str) -> bool:
    """Return whether this run of the tests takes the time that the command needs."""
    return EVERY_CASE or not command.removeprefix("bertscope ").startswith(LONG)


BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
FIGURE = re.compile(r"\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)? (?:%|[KMGT]iB)")


README, CHINESE = ((ROOT / f"README{language}.md").read_text() for language in ("", ".zh"))
COOKBOOK, CI, ARCHITECTURE = ((DOCS / f"{name}.md").read_text() for name in ("cookbook", "ci", "architecture"))


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


RUN = [session for session in sessions() if is_run(session[1])]


@pytest.mark.parametrize(("page", "command", "lines"), RUN, ids=[command for _, command, _ in RUN])
def test_every_command_of_a_page_prints_what_stands_under_it(printed, page, command, lines):
    result = printed(command)
    assert result.code == 0
    rest = [line.rstrip() for line in result.out.splitlines()]
    for line in lines:
        if line != "...":
            places = [place for place, got in enumerate(rest) if got.startswith(line)]
            assert places, f"{page}: {command} does not print {line!r} there"
            rest = rest[places[0] + 1 :]


def without_output() -> list[str]:
    """The commands of pages without an output, and those of the help; those with an output are run as they are."""
    pages = "\n".join(path.read_text() for path in sorted(DOCS.glob("*.md")) if path.name != "cli.md")
    found = re.findall(r"`(bertscope [a-z]+ bert-[^`]*)`", pages)
    found += re.findall(r"`(bertscope [a-z][^`]*)`", README + CHINESE + COOKBOOK)
    found += re.findall(r"^```sh\n(bertscope .*)\n```$", COOKBOOK, re.MULTILINE)
    # --interactive needs a terminal, and the others files of the reader.
    foreign = r"[A-Z]{3}|my-bert|models.bertscope|my_package|model\.safetensors|pytorch_model|--interactive"
    named = [*examples(), *(command for command in found if not re.search(foreign, command))]
    return sorted({*named} - {command for _, command, _ in sessions()})


PARSERS = all_commands()


def options_of(command: str) -> set[tuple[object, ...]]:
    """Return the command and each of its options that are given and no settings; those tests/settings tries."""
    _, name, *words = shlex.split(command)
    context = PARSERS[name].make_context(name, words)
    given = [param.name for param in PARSERS[name].params if param.name not in SETTINGS
             and context.get_parameter_source(param.name).name == "COMMANDLINE"]  # fmt: skip
    return {(name, key) for key in given} | {(name,)}


def one_for_each_option() -> list[str]:
    """Return commands until each option of each command that a page has is in one that is run."""
    run = [command for _, command, _ in sessions()]
    run += [f"bertscope {words}" for words in GALLERY.COMMANDS if words.split()[0] not in GALLERY.NOT_COMPARED]
    seen, chosen = set().union(*map(options_of, run)), []
    for command in sorted(without_output(), key=lambda command: -len(options_of(command))):
        if more := options_of(command) - seen:
            seen |= more
            chosen.append(command)
    return chosen


@pytest.mark.parametrize("command", one_for_each_option())
def test_a_documented_command_of_each_option_runs(printed, command):
    """All of them are parsed before; `.ci/versions every` runs all, by tests/products.py."""
    runs(printed, command)


def runs(printed, command: str) -> None:
    if ".svg" in command:
        needs_graphviz()
    result = printed(shortened(command))
    assert result.code in (0, 1), result.err  # 1: the answer is no
    assert result.out or re.search(r" -o | --output | --write | --init", command)


@pytest.mark.parametrize("name", QUESTIONS)
def test_every_figure_of_a_page_is_printed_by_a_command_of_it(printed, name):
    text = (DOCS / f"{name}.md").read_text()
    commands = [command for page, command, _ in sessions() if page == f"{name}.md"]
    out = "\n".join(printed(command).out for command in commands)
    config = printed("bertscope diff bert-base-cased bert-base-uncased").out.replace(",", "")
    for figure in set(FIGURE.findall(BLOCK.sub("", text))) - {"16 GiB"}:  # the budget that is asked about
        assert figure in out or figure.replace(",", "") in config, figure


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
    ("attention", "precision", "strategy"),
    [
        ("eager", "autocast-bf16", "full"),
        ("sdpa", "fp32", "selective"),
        *EVERY_CASE * (("eager", "autocast-bf16", "none"), ("sdpa", "fp32", "every-2")),
    ],
)
def test_the_estimates_in_the_file_of_accuracy_are_those_of_today(attention, precision, strategy):
    """Of the built-in model as a module, which adds no masks."""
    rows = measured_rows()
    config = bertscope.load("bert-base-uncased", attention=attention).config
    ids = torch.zeros(8, 128, dtype=torch.long, device="meta")
    model = bertscope.build(config, "BertForMaskedLM").train()
    if strategy != "none":
        model.gradient_checkpointing_enable(strategy=strategy)
    inputs = {"input_ids": ids, "token_type_ids": ids.clone(), "labels": ids.clone()}
    (variant,) = bertscope.estimate(model, inputs, precision="stored" if precision == "fp32" else precision).variants
    told = rows[attention, precision, strategy]
    got = {phase.phase: phase.peak_bytes for phase in variant.estimated.phases}
    assert got == {phase: estimated for phase, (_, estimated) in told.items()}
    assert all(abs(estimated / measured - 1) < 1e-3 for measured, estimated in told.values())


def test_the_summary_and_the_picture_of_accuracy_are_those_of_the_file():
    page, rows = (DOCS / "accuracy.md").read_text(), ACCURACY.read()
    assert [line for line in ACCURACY.summary(rows) if line not in page] == []
    assert (DOCS / "accuracy.svg").read_text() == ACCURACY.picture(rows), "run: python docs/make_accuracy.py"
    exact = [row for row in rows if row["loop"] == "plain" and row["error"] == "0"]
    assert f"{len(exact)} of 34 step peaks are exact" in page
    for row in rows:
        if row["measured_bytes"]:
            measured, estimated = int(row["measured_bytes"]), int(row["estimated_bytes"])
            assert float(row["error"]) == pytest.approx((estimated - measured) / measured, rel=0.06)
            assert row["loop"] != "plain" or estimated == measured or row["attention"] == "eager"


@pytest.mark.parametrize(
    "command", [word for word in GALLERY.COMMANDS if word.split()[0] not in GALLERY.NOT_COMPARED and is_run(word)]
)
def test_the_gallery_has_the_output_of_today(cli, user_folder, tmp_path, monkeypatch, command):
    for path in user_folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    result = cli(*shlex.split(command))
    notes = "".join(line for line in result.err.splitlines(keepends=True) if line.startswith("note:"))
    told = GALLERY.read((DOCS / "gallery.md").read_text())[command]
    assert GALLERY.cut(result.out or notes) == told, f"run: python docs/make_gallery.py {command.split()[0]}"


def test_the_gallery_has_every_command_once():
    told = [command.split()[0] for command in GALLERY.read((DOCS / "gallery.md").read_text())]
    assert sorted(told) == sorted(all_commands().keys() - {"mcp"})  # which serves


def test_the_reference_of_the_command_line_is_fresh_and_knows_no_width_of_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERMINAL_WIDTH", "50")
    made = script("make_cli")
    assert made.stub() == made.STUB.read_text(), "run: python docs/make_cli.py"
    text = made.page()
    assert text == (DOCS / "cli.md").read_text(), "run: python docs/make_cli.py"
    assert max(map(len, re.findall(r"^  .*$", text, flags=re.MULTILINE))) > 80
    sections = re.split(r"^### bertscope (?=\w)", text, flags=re.MULTILINE)[1:]
    assert len(sections) == len(all_commands())
    assert all("Usage: bertscope" in section and section.count("  bertscope ") >= 1 for section in sections)


PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Return the targets of the links and pictures of a page, without those in blocks of code."""
    return re.findall(r"\]\(([^)\s]+)", FENCED.sub("", page.read_text()))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_every_link_of_a_page_leads_to_a_file_and_a_heading_in_it(page):
    for link in links(page):
        if not link.startswith("http"):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_site_has_every_page_and_loads_nothing_from_a_network(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    for name in ("docs", "mkdocs.yml", *(page.name for page in ROOT.glob("*.md"))):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", "site"]  # --quiet would hide warnings from strict
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").glob("*.html"))
    assert {page.stem.lower() for page in PAGES} <= {page.stem for page in pages}
    for page in pages:
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"([^\"]+)\"", page.read_text())
        assert len(loaded) > 5
        assert [place for place in loaded if re.match(r"(?:https?:)?//", place)] == [], page.name


def test_the_chinese_readme_has_the_same_blocks_commands_and_links_in_the_same_order():
    for pattern in (r"^```.*?^```", r"`(bertscope [^`]*)`", r"\]\(([^)]+)\)", r"^(#+) ", r"^(\|)", r"[\d.]+ GiB"):
        english, chinese = (re.findall(pattern, page, re.MULTILINE | re.DOTALL) for page in (README, CHINESE))
        names = {"README.zh.md": "README.md"}
        assert chinese == [names.get(found, found) for found in english]
    assert [code for code in "0123" if f"{code} " in CHINESE.partition("退出码")[2].partition("\n")[0]] == list("0123")


def test_the_cells_of_the_comparison_are_the_same_in_chinese():
    words = {"yes": "是", "partly": "部分", "no": "否"}
    english, chinese = (re.findall(r"\| (yes|partly|no|是|部分|否)(?= \|)", page) for page in (README, CHINESE))
    assert chinese == [words[word] for word in english]
    assert len(chinese) > 40


def test_the_picture_in_the_readme_is_what_its_command_draws(cli, tmp_path):
    (command,) = re.findall(r"```sh\n(bertscope estimate .*?)\n```", README)
    assert README.index("](docs/step.svg)") < README.index("\n## ")
    path = tmp_path / "step.svg"
    assert cli(*shlex.split(command)[1:-1], path).code == 0
    old, new = (re.findall(r"<text[^>]*>(.*?)</text>", text) for text in
                 ((ROOT / "docs" / "step.svg").read_text(), path.read_text()))  # fmt: skip
    assert len(old) > 20
    assert new == old, "draw it anew: the command above it, into docs/step.svg"
    (words,) = re.findall(r"!\[(.*?)\]\(docs/step.svg\)", README)
    assert all(f"peak {size}" in old for size in re.findall(r"[\d.]+ GiB", words))


def block(page: str, language: str, begins: str) -> str:
    """The block of a page in that language that begins so."""
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL) if text.startswith(begins)]
    return found


@pytest.mark.parametrize(("old", "new", "code"), [("108340804", "108340805", 1), ("adamw", "adamwx", 2)])
def test_the_lines_of_the_ci_page_are_what_check_prints(cli, tmp_path, monkeypatch, old, new, code):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.bertscope.yaml").write_text(block(CI, "yaml", "model:").replace(old, new))
    result = cli("check", "models.bertscope.yaml")
    assert result.code == code
    assert f"```text\n{result.out if code == 1 else result.err}```" in CI


def test_the_library_example_of_the_cookbook_runs(capsys):
    exec(block(COOKBOOK, "python", "import torch\n\nimport bertscope"), {})
    shown = capsys.readouterr()
    assert shown.err == ""
    distinct, over_layers = map(int, shown.out.split())
    assert over_layers - distinct == 30522 * 384


def test_the_examples_of_the_models_page_run(capsys):
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "model.md").read_text(), flags=re.DOTALL):
        exec(code, {})
    assert capsys.readouterr() == ("torch.Size([2, 16, 30522])\n", "")


def test_the_step_of_the_architecture_page_has_the_peak_that_its_sum_says():
    exec(block(ARCHITECTURE, "python", "memory = "), {"bertscope": bertscope, "torch": torch})


def test_the_install_of_the_readme_has_the_extras_of_its_commands():
    setup = r"^python3 -m venv .venv && .*-e '\.\[([a-z,]+)\]' && \.venv/bin/bertscope count bert-large-zh$"
    (extras,) = re.findall(setup, README, re.MULTILINE)
    needed = {"--timeline": "plot", "bertscope report": "plot", "--interactive": "interactive"}
    assert all(words in README and extra in extras.split(",") for words, extra in needed.items())


def test_the_readme_has_an_install_with_pip_and_one_with_uv_of_the_same_extras():
    extras = re.findall(
        r"^(python3 -m venv|uv venv) .*-e '\.\[([a-z,]+)\]' && \.venv/bin/bertscope", README, re.MULTILINE
    )
    assert [tool for tool, _ in extras] == ["python3 -m venv", "uv venv"]
    assert extras[0][1] == extras[1][1]


def test_ci_runs_the_readmes_test_command():
    assert len(re.findall(r"^python3 -m venv .*pytest$", README, re.MULTILINE)) == 1
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


def test_the_figures_of_the_conventions_are_the_tools(cli):
    text = re.sub(r"\s+", " ", (DOCS / "conventions.md").read_text())
    totals = cli("count", "--format", "json").json["totals"]
    assert f"{totals['distinct_params']:,} unique parameters" in text
    assert f"the sum over layers is {totals['layer_params']:,}." in text
    flops = cli("flops", "bert-base-chinese", "-a", "BertModel", "--format", "json").json
    values = {item["name"]: f"{item['value']:,}" for item in flops["conventions"]}
    assert all(values[name] in text for name in ("torch", "macs", "calflops"))


def test_every_dependency_has_its_line_in_contributing():
    declared = re.search(
        r"dependencies = \[(.*?)\n\[project.scripts\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL
    )
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for name in re.findall(r'"([a-z]+)[>=<\[]', declared[1]):
        assert name in text or name == "bertscope", name


PAGE = (ROOT / "SECURITY.md").read_text()
LIMITS = re.findall(r"^\| ([\d,]+) \| (.+) \| `([\w.]+)` \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("figure", "what", "name"), LIMITS, ids=[f"{what} {name}" for _, what, name in LIMITS])
def test_a_limit_of_the_page_is_that_of_the_code(figure, what, name):
    module, _, constant = name.rpartition(".")
    value = getattr(importlib.import_module(module), constant)
    if isinstance(value, dict):
        value = value[what.partition(" over all")[0]]
    assert int(figure.replace(",", "")) == value


def test_every_limit_over_all_files_is_on_the_page_which_is_linked_and_short():
    from bertscope.checkpoints.files import LIMITS as over_all

    assert {what.partition(" over all")[0] for _, what, name in LIMITS if name.endswith(".LIMITS")} == set(over_all)
    assert "(SECURITY.md)" in README
    assert len(PAGE.splitlines()) <= 110


def test_every_test_of_the_page_exists():
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", PAGE)
    assert len(named) > 8
    assert [name for name in named if f"def {name}(" not in tests] == []
