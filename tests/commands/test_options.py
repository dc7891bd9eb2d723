"""Options in bundles, and the rule of `--checkpointing`."""

import json
import re
import time

import pytest

import bertscope
from bertscope.commands.call import Progress
from bertscope.commands.registry import TableCommand
from bertscope.settings.checkpointing import COMPARED
from bertscope.views import memory as renderer
from bertscope.views.console import progress_bar


def parsed(*words: str) -> dict[str, object]:
    """Return what `bertscope estimate` takes these words for."""
    from typer.main import get_command

    from bertscope.cli import app

    command = get_command(app).get_command(None, "estimate")
    assert isinstance(command, TableCommand)
    return command.make_context("estimate", list(words)).params


@pytest.mark.parametrize(
    ("words", "model", "value"),
    [
        (["bert-tiny", "--checkpointing", "full"], "bert-tiny", "full"),
        (["--checkpointing", "full", "bert-tiny"], "bert-tiny", "full"),
        (["--checkpointing", "bert-tiny"], "bert-tiny", COMPARED),
        (["bert-tiny", "--checkpointing"], "bert-tiny", COMPARED),
        (["bert-tiny", "--checkpointing", "--batch", "4"], "bert-tiny", COMPARED),
        (["bert-tiny", "--checkpointing", "-b", "4"], "bert-tiny", COMPARED),
        (["bert-tiny", "--checkpointing", "none,full"], "bert-tiny", "none,full"),
        (["bert-tiny", "--checkpointing", "layers:0-5,8"], "bert-tiny", "layers:0-5,8"),
        (["bert-tiny", "--checkpointing", "layers:0-5,8,selective"], "bert-tiny", "layers:0-5,8,selective"),
        (["bert-tiny", "--checkpointing=full"], "bert-tiny", "full"),
        (["--checkpointing", "full,bert-tiny"], "full,bert-tiny", COMPARED),
        (["--checkpointing", "./full"], "./full", COMPARED),
    ],
)
def test_the_word_after_checkpointing_is_its_value_when_each_part_is_a_strategy(words, model, value):
    found = parsed(*words)
    assert (found["model"], ",".join(found["checkpointing"])) == (model, value)


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_the_bar_of_progress_is_one_line(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    bar = progress_bar()
    bar.add_task("bert-large-uncased, fit: full, autocast-fp16, seq 128", total=5, completed=1)
    with bar.console.capture() as shown:
        bar.console.print(bar.get_renderable())
    (line,) = shown.get().splitlines()
    assert re.match(r"bert-large-uncased, fit: full.* 1/5 \d:\d\d:\d\d -:--:--", line)


@pytest.mark.parametrize(
    ("debug", "lines"),
    [
        ("0", ["none (1 of 4, 1 s)", "full (2 of 4, 10 s)", "timing step 2: none (4 of 4, 16 s)"]),
        ("1", ["none: loading torch (1 of 4, 0 s)", "none: timing (1 of 4, 1 s)", "full: loading torch (2 of 4, 10 s)",
               "timing step 1: none (3 of 4, 11 s)", "timing step 2: none (4 of 4, 16 s)"]),
    ],
)  # fmt: skip
def test_progress_outside_a_terminal_has_a_line_for_each_stage_and_details_in_long_work(
    capsys, monkeypatch, debug, lines
):
    monkeypatch.setenv("BERTSCOPE_DEBUG", debug)
    progress = Progress(total=4)
    stages = (("none", "loading torch"), ("none", "timing"), ("none", "timing"), ("full", "loading torch"),
              ("timing step 1", "none"), ("timing step 2", "none"))  # fmt: skip
    for seconds, stage in zip((0, 1, 8, 1, 1, 5), stages, strict=True):
        progress.started -= seconds
        progress(": ".join(stage))
    assert capsys.readouterr().err.splitlines() == lines


def test_a_stage_of_minutes_says_what_it_does_and_what_is_left_in_few_lines(capsys, monkeypatch):
    progress = Progress()
    for seconds in range(600):
        monkeypatch.setattr(time, "monotonic", lambda now=progress.started + seconds: now)
        left = f", about {800 - seconds} s left" if seconds > 40 else ""
        progress(f"full{left}: in the forward phase of the first steps, micro-batch {seconds // 40 + 1} of 8")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == ["full (1 s)", "full: in the forward phase of the first steps, micro-batch 1 of 8 (15 s)",
                         "full: in the forward phase of the first steps, micro-batch 1 of 8 (30 s)"]  # fmt: skip
    assert lines[3:5] == [
        "full, about 759 s left (41 s)",
        "full, about 740 s left: in the forward phase of the first steps, micro-batch 2 of 8 (60 s)",
    ]
    assert len(lines) == 8  # at 120, 240 and 480 s too


def test_notes_are_hidden_in_a_table_and_whole_in_json(cli):
    asked = ("estimate", "bert-tiny", "--seq", "16", "--batch", "1")
    notes = list(renderer.notes(bertscope.from_json(cli(*asked, "--format", "json").out)))
    short, long = cli(*asked).out, cli(*asked, "-v").out
    assert all(note in long for note in notes)
    assert sum(note in short for note in notes) < len(notes)


def test_an_option_that_takes_a_list_may_be_repeated(cli):
    lists = cli("flops", "bert-tiny", "--batch", "1,2", "--seq", "17,8", "--format", "csv").out
    repeated = cli("flops", "bert-tiny", "--batch", "1", "-b", "2", "--seq=17", "--format", "csv", "-s", "8").out
    assert len(lists.splitlines()) > 4
    assert repeated == lists


@pytest.mark.parametrize(("words", "error"), [
    (("count", "no-such", "--format", "json"), {"code": 2, "message": "no preset or file named 'no-such'",
                                               "file": None, "line": None}),
    (("fit", "--format=json"), {"code": 2, "message": "give either --budget, such as 16GiB, or --gpu, such as t4",
                                "file": None, "line": None, "remedy": None}),
    (("count", "--nosuch", "-f", "json"), {"code": 2, "remedy": "bertscope count --help-all lists the options"}),
    (("nosuch", "-f", "json"), {"code": 2, "message": "no command 'nosuch'"}),
    (("count", "--attention", "egaer", "-fjson"), {"code": 2, "remedy": "did you mean 'eager'?"}),
    (("fit", "--format", "json", "--budget", "3"), {"code": 2, "message": "--budget 3 has no unit"}),
])  # fmt: skip
def test_an_error_is_json_for_a_program_that_asks_for_json(cli, words, error):
    done = cli(*words)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    found = json.loads(done.err)["error"]
    assert list(found) == ["code", "message", "file", "line", "remedy"]
    assert found | error == found, found


def test_the_json_of_an_error_has_file_and_line_and_the_text_is_that_of_the_table(cli, tmp_path):
    (tmp_path / "config.json").write_text('{\n"model_type": "bert",\n"hidden_size": "wide"}')
    found = json.loads(cli("count", tmp_path / "config.json", "-f", "json").err)["error"]
    assert (found["file"], found["line"]) == (str(tmp_path / "config.json"), 3)
    line = cli("count", tmp_path / "config.json").err
    assert line == f"error: {found['file']}:3: {found['message']}" + (
        f"; {found['remedy']}\n" if found["remedy"] else "\n"
    )


def test_each_option_that_takes_a_number_reads_digits_of_ascii_only():
    from typer.main import get_command

    from bertscope.cli import app

    for command in get_command(app).commands.values():
        for option in command.params:
            if option.type.name in ("integer", "float", "integer range", "number"):
                with pytest.raises(Exception, match="is not a valid integer"):
                    option.type.convert("\u0663", option, None)
