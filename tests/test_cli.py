"""The command line as its users meet it: help, exit codes, pipes, files, terminals."""

import csv
import io
import json
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

import pytest

import bertscope
from bertscope.commands.table import COMMANDS, REMOVED
from bertscope.errors import SelectionError
from bertscope.reports.base import SCHEMA
from tests.child_server import loaded
from tests.conftest import ROOT, data, default_signals, kinds, run_python

PROGRAM = (sys.executable, "-m", "bertscope")
ENV = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}


def spawn(*args: str, **options) -> subprocess.CompletedProcess:
    """`python -m bertscope ARGS` in a process of its own."""
    options = {"capture_output": True, "text": True, "env": ENV, "timeout": 120, "check": False,
               "preexec_fn": default_signals, **options}  # fmt: skip
    return subprocess.run([*PROGRAM, *args], **options)


def test_version_is_the_packages(cli):
    assert cli("--version").out == f"bertscope {bertscope.__version__}\n"


def all_commands() -> dict[str, object]:
    """Return all commands by name."""
    from typer.main import get_command

    from bertscope.cli import app

    group = get_command(app)
    return {name: group.get_command(None, name) for name in group.list_commands(None)}


def examples() -> list[str]:
    lines = [line.strip() for command in all_commands().values() for line in (command.epilog or "").splitlines()]
    # these want a terminal, or a client; tests/views/test_interactive.py and tests/commands/test_agents.py run them
    return [line for line in lines if line.startswith("bertscope ") and not re.search("--interactive| mcp$", line)]


def test_every_command_is_known_to_these_tests_and_every_option_says_what_it_does(cli):
    assert [*all_commands()] == [*COMMANDS]
    for name, command in all_commands().items():
        for option in command.params:
            assert option.help, f"{name}: {option.name}"
            assert len(option.help.split()) > 1, f"{name}: {option.name}: {option.help}"


HUB, SHOWN = "torch numpy huggingface_hub requests asyncio", "bertscope.views.views bertscope.reports.base yaml"
# What is not imported, by the words of a command line and its exit code.
UNLOADED = {
    "": (0, "torch numpy sympy rich pydantic"), "--version": (0, f"{HUB} {SHOWN}"), "--help": (0, f"{HUB} {SHOWN}"),
    "count --help": (0, f"{HUB} rich pydantic"), "presets --format json": (0, f"{HUB} rich pydantic"),
    "presets modernbert-base --config": (0, f"{HUB} rich transformers"),
    "count bert-bse": (2, HUB), "check .": (2, HUB), "cuont": (2, f"{HUB} {SHOWN}"),
    "tab": (0, f"{HUB} bertscope.commands.model bertscope.commands.memory"),
}  # fmt: skip


@pytest.mark.parametrize("words", UNLOADED)
def test_a_command_line_that_computes_nothing_imports_only_what_it_needs(tmp_path, words):
    code = (
        "import sys; from bertscope import cli; sys.argv = ['bertscope', *sys.argv[1:]];"
        "unwanted = sys.argv.pop(1).split(); code = cli._run(); print(*{*unwanted} & {*sys.modules}); sys.exit(code)"
    )
    expected, unwanted = UNLOADED[words]
    typed = {"": "bertscope count bert-large-z", "tab": "bertscope p"}.get(words, "")
    tab = {"_BERTSCOPE_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = run_python(code, unwanted, *("" if typed else words).split(), env=ENV | tab if typed else ENV, cwd=tmp_path)
    assert (done.returncode, (done.stdout.splitlines() or [""])[-1]) == (expected, ""), done.stderr
    if typed:
        assert done.stdout.split() == (["plan", "profile", "presets"] if words else ["bert-large-zh"])


def test_an_interrupt_while_the_program_is_still_being_loaded_is_quiet(tmp_path):
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    done = spawn("presets", env=ENV | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize(("words", "said"), data("refusals.yaml").items())
def test_a_wrong_question_is_one_line_and_exit_code_2(cli, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    result = cli(*shlex.split(words))
    assert (result.code, result.out) == (2, "")
    *_, last = result.err.splitlines()
    assert last.startswith("error: ")
    assert said in last


WRONG = [(row["command"], row["file"], *case) for row in data("wrong_files.yaml") for case in row["texts"]]


@pytest.mark.parametrize(("command", "name", "text", "said"), WRONG, ids=[case[-1] for case in WRONG])
def test_what_is_wrong_in_a_file_is_one_line_and_changes_nothing(cli, tmp_path, monkeypatch, command, name, text, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    result = cli(*command.split())
    assert (result.code, result.err.count("\n")) == (2, 1), result.err
    assert result.err[:-1].isprintable()
    assert all(words in result.err for words in said.split("|")), result.err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: text}


def test_nothing_asked_shows_the_help_and_is_exit_code_2(cli):
    result = cli()
    assert (result.code, result.out) == (2, "")
    assert "Model:" in result.err


@pytest.mark.parametrize("number", ["108340804", "108,340,804", "130_609_732"])
def test_expect_passes_on_the_number_of_either_convention_and_names_it(cli, number):
    result = cli("count", "--expect", number)
    assert result.code == 0
    name = "unique parameters" if number.startswith("108") else "sum over layers"
    assert f"as expected: {name} {int(number.replace(',', '')):,}" in result.err


def test_a_badge_is_the_json_of_shields_endpoint(cli):
    badge = {"schemaVersion": 1, "label": "parameters", "message": "4.39 M", "color": "blue"}
    assert cli("count", "bert-tiny", "--format", "badge").json == badge
    with pytest.raises(bertscope.BertscopeError, match="there is no badge of this report"):
        bertscope.tree("bert-tiny").shown("badge")


def test_expect_fails_with_the_difference(cli):
    result = cli("count", "bert-base-uncased", "--expect", "109482241")
    assert result.code == 1
    assert "expected 109,482,241, got 109,482,240 unique parameters (difference -1)" in result.err


def test_an_ascii_pipe_gets_ascii():
    done = spawn("tree", "bert-tiny", "--depth", "2", env=ENV | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "|- embeddings" in done.stdout


def on_a_terminal(*args: str, columns: int = 80, program: Sequence[str] = (), **variables: str) -> str:
    """Return the output for a terminal of that width; `program` is by default one that has torch loaded."""
    master, slave = pty.openpty()
    environment = ENV | {"COLUMNS": str(columns), "TERM": "xterm-256color"} | variables
    process = subprocess.Popen(
        [*(program or loaded("bertscope")), *args], stdout=slave, stderr=slave, stdin=slave, env=environment
    )
    os.close(slave)
    chunks = []
    try:
        while chunk := os.read(master, 65536):
            chunks.append(chunk)
    except OSError:  # Linux ends a closed pty with EIO
        pass
    process.wait(timeout=300)
    return b"".join(chunks).decode().replace("\r\n", "\n")


@pytest.mark.parametrize(("words", "kind"), [
    (("count", "bert-base-uncasd"), "error"), (("count", "bert-tiny", "--untie", "-a", "BertForPreTraining"), "note"),
])  # fmt: skip
def test_a_terminal_gets_an_error_and_a_note_in_lines_of_its_width_and_a_pipe_in_one(cli, words, kind):
    (one,) = (line for line in cli(*words).err.splitlines() if line.startswith(f"{kind}: "))
    for columns, lines in ((40, 2), (1000, 1)):
        shown = on_a_terminal(*words, columns=columns, NO_COLOR="1")
        found = re.search(rf"^{kind}: .*\n(?:  .*\n)*", shown, re.MULTILINE)[0]
        assert " ".join(found.split()) == one
        assert len(found.splitlines()) >= lines
        assert max(map(len, found.splitlines())) <= columns
    assert ("\x1b[31merror:" in on_a_terminal(*words)) == (kind == "error")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_of_the_help_is_longer_than_80_columns_and_its_examples_stay_whole(cli, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    text = cli(command, "--help").out
    assert max(map(len, text.splitlines())) <= 80
    own = [line for line in examples() if line.split()[1] == command]
    shown = re.sub(r" \\\n +", " ", text)
    assert own or command == "mcp"  # which serves
    assert [line for line in own if f"    {line}\n" not in shown] == []


def option_lines(text: str) -> list[str]:
    """The lines of a help after the text and the examples."""
    return re.split(r"^(?:Arguments|Common options|Options|Output):\n", text, maxsplit=1, flags=re.M)[1].splitlines()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_has_few_lines_of_options_and_its_last_line_says_how_to_see_all(cli, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    short, whole = option_lines(cli(command, "--help").out), cli(command, "--help-all").out
    params = all_commands()[command].params
    names = {param.metavar if param.param_type_name == "argument" else max(param.opts, key=len)[2:] for param in params}
    if not all(name in "\n".join(short) for name in names):
        options = [param for param in params if param.param_type_name == "option"]
        *short, empty, last = short
        assert (empty, last) == ("", f"All {len(options) + 1} options: bertscope {command} --help-all")
    assert len([line for line in short if line.startswith(" ")]) <= 25
    assert [name for name in names if name not in whole] == []


def test_the_list_of_commands_has_one_line_for_each_in_its_group(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = cli("--help").out
    assert [name for name, row in COMMANDS.items() if f"  {name.ljust(8)}  {row.line}\n" not in text] == []
    groups = [*dict.fromkeys(row.group for row in COMMANDS.values()), "Options"]
    assert re.findall(r"^(\w.*):$", text, re.MULTILINE) == groups
    assert all(row.line.endswith(".") for row in COMMANDS.values())


def test_no_color_is_honoured_and_a_terminal_gets_colour_without_it():
    assert "\x1b[" in on_a_terminal("presets", columns=200)
    assert "\x1b[" not in on_a_terminal("presets", columns=200, NO_COLOR="1")
    assert "\x1b[" not in on_a_terminal("presets", columns=200, TERM="dumb")
    assert "\x1b[" not in spawn("presets").stdout
    assert "\x1b[" in spawn("presets", env=ENV | {"FORCE_COLOR": "1"}).stdout


def test_the_option_color_is_above_terminal_and_environment(cli, monkeypatch):
    assert "\x1b[" in cli("--color", "always", "presets").out
    assert "\x1b[" in cli("--color", "never", "presets", "--color", "always").out
    assert "\x1b[" in cli("count", "bert-tiny", "--color=always").out
    assert "\x1b[" not in cli("presets").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" not in cli("--color", "never", "presets").out
    assert "\x1b[" not in on_a_terminal("--color", "never", "presets", columns=200)
    assert "\x1b[" in on_a_terminal("--color", "always", "presets", columns=200, NO_COLOR="1")
    assert cli("--color", "sometimes", "presets").code == 2


TABLES = {
    "count": (), "tree": (), "flops": ("bert-tiny",), "explain": ("bert-tiny",), "diff": ("bert-tiny", "bert-mini"),
    "presets": (), "check": ("bert-tiny",), "schema": (), "doctor": (),
}  # fmt: skip


@pytest.mark.parametrize("command", TABLES)
def test_every_command_that_gives_data_speaks_four_formats(cli, command, tmp_path):
    shown = {}
    for fmt in ("table", "json", "csv", "markdown"):
        path = tmp_path / fmt
        result = cli(command, *TABLES[command], "--format", fmt, "--output", path)
        assert (result.code, result.out) == (0, ""), result.err
        shown[fmt] = path.read_text()
    assert json.loads(shown["json"])["schema"] == SCHEMA
    widths = {len(record) for record in csv.reader(io.StringIO(shown["csv"]))}
    assert len(widths) == 1
    assert "| --- |" in shown["markdown"] or "---: |" in shown["markdown"]
    assert len(set(shown.values())) == 4


def test_output_goes_into_a_pipe_and_a_device_as_they_are(cli, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert cli("presets", "--format", "csv", "--output", pipe).code == 0
    assert os.read(reader, 20).startswith(b"name,architecture")
    os.close(reader)
    assert pipe.is_fifo()


def test_output_through_a_link_writes_its_target_and_keeps_its_mode(cli, tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    assert cli("presets", "--output", link).code == 0
    assert link.is_symlink()
    assert "bert-tiny" in target.read_text()
    assert target.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    "name", ["n" * 300 + ".yaml", "~nobody-of-that-name/config.json", "loop/config.json", "x/y/z.json"]
)
def test_a_path_that_is_none_is_one_line(cli, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "config.json").symlink_to("config.json")
    (tmp_path / "s").symlink_to("s")
    for result in (cli("count", name), cli("presets", "--output", "s")):
        assert result.code == 2
        assert result.err.startswith("error: ")
        assert result.err.count("\n") == 1


def test_text_from_a_file_cannot_break_a_line_or_reach_the_terminal(cli, tmp_path):
    path = tmp_path / "a\nb[red]\x1b[31m.json"
    path.write_text('{"model_type": "bert", "a\\nb\\u001b[31m": 1, "\\ud800": 2, "num_hidden_layers": 1}')
    result = cli("count", path)
    assert result.code == 0
    assert "\x1b" not in result.out + result.err
    assert result.err.count("\n") == 1
    output = tmp_path / "out.json"
    assert cli("count", path, "--format", "json", "--output", output).code == 0
    assert json.loads(output.read_text())["subject"]["ignored_fields"][0] == "a\nb\x1b[31m"
    long = tmp_path / "long.json"
    long.write_text(json.dumps({"k" * 900_000: 1, "vocab_size": -1}))
    assert len(cli("count", long).err) < 700


def test_a_file_at_its_largest_is_answered_soon(cli, tmp_path):
    many = tmp_path / "many.json"
    many.write_text(json.dumps({f"key{number}": 1 for number in range(60_000)}))
    assert "more than 1,000 fields" in cli("count", many).err
    wide = tmp_path / "wide.yaml"
    wide.write_text("a: [" + "[]," * 43_000 + "]")
    assert cli("count", wide).code == 2


def test_markdown_escapes_what_it_would_take_for_markup():
    from bertscope.views.columns import Column, markdown_text

    text = markdown_text([Column("a|b", str)], ["*x* _y_ [z](u) <b> | \\"])
    assert text.splitlines()[-1] == r"| \*x\* \_y\_ \[z\](u) \<b> \| \\ |"


def test_every_golden_file_belongs_to_a_test():
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert all(path.name in tests for path in (ROOT / "tests" / "golden").iterdir())


# A word of another tool -> the option, and a command that has it.
WORDS = {
    "--fp16": "--precision autocast-fp16", "--bf16": "--precision autocast-bf16", "--amp": "--precision",
    "--train": "--mode training", "--attn": "--attention", "--max-length": "--seq", "--max_seq_length": "--seq",
    "--batch-size": "--batch", "--per-device-train-batch-size": "--batch", "--grad-accum": "--accumulate",
    "--gradient-checkpointing": "--checkpointing full", "--8bit": "--optimizer adamw-8bit", "--json": "--format json",
    "--memory": "--budget", "--vram": "--budget", "--num-gpus": "--world-size", "--use-lora": "--lora",
    "--lr": "it changes no result", "--fp8": "not modelled", "--int8": "--quantize int8", "--devices": "--world-size",
    "--kv-cache": "--mode inference", "--num-hidden-layers": "config.json", "--offload": "--offload-optimizer",
}  # fmt: skip


@kinds("word, command", WORDS, ["estimate", "count"])
def test_a_word_of_another_tool_is_answered_with_the_own_one(cli, command, word):
    result = cli(command, "bert-tiny", word + "=4" * (command == "count"))
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert WORDS[word] in result.err


@pytest.mark.parametrize("word", REMOVED)
def test_a_command_of_another_tool_is_answered_with_the_own_one(cli, word):
    result = cli(word, "bert-tiny")
    assert (result.code, result.out) == (2, "")
    assert result.err == f"error: no command {word!r}; type 'bertscope {REMOVED[word]}'\n"


def test_a_keyword_of_another_tool_is_answered_with_the_own_one():
    with pytest.raises(SelectionError, match="precision autocast-fp16"):
        bertscope.estimate("bert-tiny", fp16=True)
