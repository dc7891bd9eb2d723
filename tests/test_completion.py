"""Completion of words by Tab, in real shells on a terminal; smoke.py tries it with the oldest and the newest Typer."""

import os
import pty
import select
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.child_server import loaded
from tests.conftest import cases
from tests.test_cli import ENV, spawn

START_FILES = {"bash": ".bashrc", "zsh": ".zshrc", "fish": ".config/fish/config.fish"}
BEFORE = {"bash": "", "zsh": "autoload -Uz compinit && compinit -D\n", "fish": ""}
PROMPT = {"bash": "PS1='ready> '\n", "zsh": "PS1='ready> '\n", "fish": "function fish_prompt; echo -n 'ready> '; end\n"}
# Without a variable of Tab, the program's stand-in writes its words, which are those that the shell completed.
STAND_IN = """#!/bin/sh
if [ -z "$_BERTSCOPE_COMPLETE" ]; then printf '%s\\n' "$@" >words; exit; fi
{program} "$@" 2>>stderr
code=$?
echo "$_TYPER_COMPLETE_FISH_ACTION $code" >>codes
exit $code
"""


@pytest.fixture
def typed(tmp_path):
    """Return a function that types keys in a shell whose start file has the script, and returns the words it ran."""

    def type_keys(shell: str, keys: str) -> list[str]:
        if shutil.which(shell) is None:
            pytest.skip(f"{shell} is not installed")
        home, work = tmp_path / "home", tmp_path / "work"
        start = home / START_FILES[shell]
        start.parent.mkdir(parents=True)
        work.mkdir()
        (work / "my model.yaml").touch()
        (work / "results.json").touch()
        script = spawn("--show-completion", shell)
        assert (script.returncode, script.stderr) == (0, "")
        start.write_text(BEFORE[shell] + script.stdout + PROMPT[shell])
        stand_in = tmp_path / "bin" / "bertscope"
        stand_in.parent.mkdir()
        stand_in.write_text(STAND_IN.format(program=shlex.join(loaded("bertscope"))))
        stand_in.chmod(0o755)
        data = home / ".local" / "share"
        (data / "fish" / "generated_completions").mkdir(parents=True)  # else fish reads the manual pages of the machine
        variables = {
            "HOME": str(home),
            "XDG_DATA_HOME": str(data),
            "TERM": "xterm",
            "PATH": f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}",
        }
        screen = on_a_terminal([shell, "-i"], keys, work, ENV | variables)
        assert (work / "words").exists(), screen
        assert (work / "stderr").read_text() == ""
        # The second answer for fish is "no" where file names are completed instead.
        assert set((work / "codes").read_text().splitlines()) <= {" 0", "get-args 0", "is-args 0", "is-args 1"}
        return (work / "words").read_text().splitlines()

    return type_keys


def on_a_terminal(command: list[str], keys: str, folder: Path, variables: dict[str, str]) -> str:
    """Run a shell, type keys at its prompt and then `exit`, and return its screen."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, variables)
    screen, unsent, deadline = "", keys + "\nexit\n", time.monotonic() + 300
    try:
        while time.monotonic() < deadline:
            if not select.select([terminal], [], [], 1)[0]:
                continue
            screen += os.read(terminal, 65536).decode(errors="replace")
            if unsent and "ready> " in screen:
                os.write(terminal, unsent.encode())
                unsent = ""
    except OSError:  # Linux ends a closed pty with EIO
        pass
    finally:
        os.close(terminal)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return screen


@pytest.mark.parametrize("shell", START_FILES)
def test_a_shell_completes_a_command_a_model_options_their_values_and_files(typed, shell):
    words = typed(shell, "bertscope cou\tbert-ti\t--form\tjs\t./my\t-o res\t")
    assert words == ["count", "bert-tiny", "--format", "json", "./my model.yaml", "-o", "results.json"]


def tab(shell: str, words: str) -> dict[str, str]:
    """Return the variables that a shell sets for Tab at the end of the words."""
    return {"_BERTSCOPE_COMPLETE": f"complete_{shell}", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")),
            "_TYPER_COMPLETE_ARGS": words, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}  # fmt: skip


@pytest.fixture
def completed(cli, monkeypatch):
    """Return a function that returns what the program answers a shell."""

    def complete(shell: str, words: str) -> str:
        for name, value in tab(shell, words).items():
            monkeypatch.setenv(name, value)
        result = cli()
        assert (result.code, result.err) == (0, ""), (shell, words)
        return result.out

    return complete


@pytest.mark.parametrize(("words", "completion"), cases("completions.yaml", "words"))
@pytest.mark.parametrize("shell", START_FILES)
def test_the_program_completes_words(completed, shell, words, completion):
    assert completion in completed(shell, words)


@pytest.mark.parametrize("shell", [*START_FILES, "powershell"])
def test_strange_words_are_completed_without_a_word_on_stderr(completed, shell):
    for words in (
        "", " ", "'", "bertscope", "bertscope nosuch ", "bertscope count 'bert", 'bertscope count "bert',
        "bertscope count b\\", "bertscope count './my file.yaml' --fo", "bertscope count evil.py:bu",
        "bertscope estimate --input x=Bx", "bertscope count \udcff\udcfe", "bertscope \udcff ", "bertscope count 模",
        "bertscope count \x1b[31m", "bertscope count --batch x --se", "bertscope --debug co",
        f"bertscope count {'x' * 100_000}",
    ):  # fmt: skip
        completed(shell, words)


def test_an_option_that_prints_and_ends_prints_nothing_while_a_later_word_is_completed(completed):
    for words in ("bertscope --version cou", "bertscope --show-completion bash cou"):
        assert completed("bash", words) == "count\n"


def test_a_project_prints_no_note_in_the_line_that_is_completed(completed, tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("[tool.bertscope]\ngpu = 't4'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "version_info", (3, 10))  # without a reader of TOML a note says that the table is ignored
    assert completed("bash", "bertscope cou") == "count\n"


@pytest.mark.parametrize("instruction", ["complete_bash", "evil", "complete_evil", "evil_bash"])
def test_the_variable_of_tab_that_no_script_set_is_one_line_and_exit_code_2(cli, monkeypatch, instruction):
    for name in tab("bash", ""):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("_BERTSCOPE_COMPLETE", instruction)
    result = cli()
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "_BERTSCOPE_COMPLETE" in result.err
    assert "unset it" in result.err


def test_the_script_is_of_the_named_shell(cli):
    scripts = {shell: cli("--show-completion", shell) for shell in (*START_FILES, "powershell")}
    assert {(script.code, script.err) for script in scripts.values()} == {(0, "")}
    assert all(f"complete_{shell}" in script.out for shell, script in scripts.items())
    assert cli("--show-completion", "tcsh").code == 2
