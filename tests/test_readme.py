"""README and docs, compared with the tool."""

from __future__ import annotations

import re
import shlex
import subprocess

import pytest

from tests.conftest import ROOT, shortened
from tests.test_docs import sessions

README = (ROOT / "README.md").read_text()
COOKBOOK = (ROOT / "docs" / "cookbook.md").read_text()
CI = (ROOT / "docs" / "ci.md").read_text()
CHINESE = (ROOT / "README.zh.md").read_text()


def commands() -> list[str]:
    found = re.findall(r"`(bertscope [a-z][^`]*)`", README + CHINESE + COOKBOOK)
    found += re.findall(r"^```sh\n(bertscope .*)\n```$", COOKBOOK, re.MULTILINE)
    return [
        command
        for command in dict.fromkeys(found)
        if not re.search(r"[A-Z]{3}|my-bert|models.bertscope|my_package|model\.safetensors|pytorch_model", command)
    ]


def test_there_are_commands_in_the_readme():
    assert len(commands()) >= 10


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


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_readme_runs(printed, command):
    is_on_a_page = command in {shown for _, shown, _ in sessions()}  # whose test runs it as it is
    result = printed(command if is_on_a_page else shortened(command))
    assert result.code == 0, result.err
    assert result.out or " -o " in command


def test_the_readme_is_short_and_every_task_of_the_cookbook_has_one_command():
    assert len(README.splitlines()) <= 90
    tasks = re.split(r"^### .*\n", COOKBOOK, flags=re.MULTILINE)[1:]
    assert len(tasks) >= 30
    assert all("bertscope " in task for task in tasks)
    assert [task for task in tasks if task.count("```sh") > 1] == []


def test_the_picture_in_the_readme_is_what_its_command_draws(cli, tmp_path):
    (command,) = re.findall(r"```sh\n(bertscope estimate .*?)\n```", README)
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


def test_the_expectation_file_of_the_ci_page_holds(cli, tmp_path):
    path = tmp_path / "models.bertscope.yaml"
    path.write_text(block(CI, "yaml", "model:"))
    result = cli("check", path)
    assert (result.code, result.out) == (0, "1 file: 6 expectations passed, 0 failed\n"), result.out


@pytest.mark.parametrize(("old", "new", "code"), [("108340804", "108340805", 1), ("adamw", "adamx", 2)])
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
    assert capsys.readouterr() == ("torch.Size([2, 16, 30522])\ntorch.Size([2, 768])\n", "")


def test_the_install_of_the_readme_has_the_extras_of_its_commands():
    setup = r"^python3 -m venv .venv && .*-e '\.\[([a-z,]+)\]' && \.venv/bin/bertscope count bert-large-zh$"
    (extras,) = re.findall(setup, README, re.MULTILINE)
    needed = {"--timeline": "plot", "bertscope report": "plot", "--interactive": "interactive"}
    assert all(words in README and extra in extras.split(",") for words, extra in needed.items())


def test_ci_runs_the_readmes_test_command():
    done = subprocess.run(
        ["grep", "-cE", "^python3 -m venv .*pytest$", ROOT / "README.md"], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


def test_the_figures_of_the_conventions_are_the_tools(cli):
    text = re.sub(r"\s+", " ", (ROOT / "docs" / "conventions.md").read_text())
    totals = cli("count", "--format", "json").json["totals"]
    assert f"{totals['distinct_params']:,} unique parameters" in text
    assert f"the sum over layers is {totals['layer_params']:,}." in text


def test_the_flops_of_the_conventions_are_the_tools(cli):
    text = (ROOT / "docs" / "conventions.md").read_text()
    data = cli("flops", "bert-base-chinese", "-a", "BertModel", "--format", "json").json
    values = {item["name"]: f"{item['value']:,}" for item in data["conventions"]}
    assert all(values[name] in text for name in ("torch", "macs", "calflops"))


def test_every_dependency_has_its_line_in_contributing():
    declared = re.search(
        r"dependencies = \[(.*?)\n\[project.scripts\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL
    )
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for name in re.findall(r'"([a-z]+)[>=<\[]', declared[1]):
        assert name in text or name == "bertscope", name
