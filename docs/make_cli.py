"""Write docs/cli.md, the reference of the command line, from the commands' own help, and the stub of the package.

    python docs/make_cli.py

A test fails when a file is not what this writes.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import typer

import bertscope
from bertscope.cli import app
from bertscope.commands.exit_codes import EXIT_CODES
from bertscope.settings.rows import Settings, rows
from bertscope.settings.run_config import MEASURED

PAGE = Path(__file__).parent / "cli.md"
STUB = Path(bertscope.__file__).with_suffix(".pyi")
WIDTH = 100  # of every block, whatever the terminal
EXAMPLES = 1  # of each command; --help has more
STEP = "estimate"  # its settings describe a step; those of other commands are shown as a difference
HEAD = """# Command line

<!-- Written by `python docs/make_cli.py` from the commands' own help; do not edit. -->

Data goes to stdout, everything else to stderr. `NO_COLOR` and `COLUMNS` are honoured. `--help` shows at most 25
lines of options and more examples; `--help-all` shows every option in full.

## Exit codes

| code | meaning |
|---:|---|
{codes}
`fit`, `plan`, `run`, `check` and `diff` with a checkpoint answer a question: a no has code 1. `estimate`, `profile`,
`report` and `why` answer with numbers and have code 0 also for a step that does not fit: `fit --batch N` asks that.

An error is one line on stderr, never a traceback. With `--format json` the last line is JSON, with null for what does
not apply: `{{"error": {{"code": 2, "message": ..., "file": ..., "line": ..., "remedy": ...}}}}`. `--debug`, before or
after the command, or `BERTSCOPE_DEBUG=1` also shows the traceback and all progress; add it when you report an error
with code 70. After a signal bertscope ends its child processes, restores the terminal and leaves no partial file.

bertscope checks that output files can be written before the work begins, and prints the table before it draws a
picture. Start it as `bertscope` or `python -I -m bertscope`: a plain `python -m` imports modules from the working
directory first.

## Results in the cache

bertscope keeps what it traced for a model in the user's cache folder (`XDG_CACHE_HOME`, by default `~/.cache`, on
Windows `LOCALAPPDATA`; there `bertscope`). A further `estimate`, `fit` or `sweep` at any batch, budget and GPU then
imports no torch: `fit bert-large-zh --gpu t4` takes 0.7 s, down from 4. The answers are the same, byte for byte.

- An entry is used only for the same configuration, settings without batch, and versions of bertscope, torch,
  transformers and peft; for a step on a CPU also only with the same processor and number of threads. Models in your own
  code are traced every time. A calibration is applied afterwards.
- `--no-cache` or an empty `BERTSCOPE_CACHE` turns the cache off; `BERTSCOPE_CACHE=FOLDER` moves it. `check` never uses
  it.
- It has at most 64 MiB and 2,000 files, each used within 30 days. `bertscope doctor` shows folder and size. You may
  delete it at any time.
- Nothing is cached if another user owns the folder or may write into it or above it, if it is a link, if the disk is
  full or read-only, or if the user has no home. No command fails because of it. A damaged entry is computed anew.

## Defaults of a project

The nearest pyproject.toml, in the working directory or above, may set defaults for the command line. Options override
them, a note on stderr names those in use, and Python functions ignore them. Python 3.10 has no TOML reader, ignores the
table and says so.

```toml
[tool.bertscope]
gpu = "t4"                         # any setting of a run, in each command that takes it
precision = ["fp32", "autocast-bf16"]  # several values only where they are compared
architecture = "BertForSequenceClassification"  # the class of a BERT in estimate, profile, fit, flops and report
check = ["models.bertscope.yaml"]  # the files of check, relative to pyproject.toml
```

## Settings of a run

A setting is an option of each command that takes it (`--clip-grad-norm`), a keyword in Python (`clip_grad_norm=True`),
and a key in a grid, in the runs of an expectation file and in `[tool.bertscope]`. A setting without any effect is an
error, except among defaults.

{settings}

## Other options

{options}
## Commands

"""


def page() -> str:
    """Return the page: each option once, then the commands with the names of theirs."""
    group = typer.main.get_command(app)
    top = group.make_context("bertscope", [], resilient_parsing=True, terminal_width=WIDTH)
    commands = {name: group.get_command(top, name) for name in group.list_commands(top)}
    contexts = {
        name: command.make_context(name, [], parent=top, resilient_parsing=True, terminal_width=WIDTH)
        for name, command in commands.items()
    }
    settings = rows(*MEASURED)
    meanings: dict[tuple[str, str], list[str]] = defaultdict(list)  # option and meaning -> commands
    for name, context in contexts.items():
        for param in commands[name].get_params(context):
            if param.name not in settings and (record := param.get_help_record(context)):
                meanings[record[0], " ".join(record[1].split())].append(name)
    options = "| option | meaning | commands |\n|---|---|---|\n"
    for (option, meaning), names in meanings.items():
        others = [name for name in commands if name not in names]
        most = f"all but {', '.join(others)}" if others else "all"
        where = most if len(others) < len(names) else ", ".join(names)
        options += f"| `{_cell(option)}` | {_cell(meaning)} | {where} |\n"
    codes = "".join(f"| {code} | {meaning} |\n" for code, meaning in EXIT_CODES.items())
    taken_by = {
        name: [param.name for param in command.get_params(contexts[name]) if param.name in settings]
        for name, command in commands.items()
    }
    step = taken_by[STEP]
    blocks = [f"```text\n{_text(group, top)}```\n"]
    for name, command in commands.items():
        taken = taken_by[name]
        summary, _, more = command.help.partition("\n\n")
        blocks.append(f"### bertscope {name}\n\n{' '.join(summary.split())}\n\n")
        blocks += [f"{paragraph.strip()}\n\n" for paragraph in more.split("\n\n") if paragraph.strip()]
        if taken:
            known = f"as for `{STEP}`", step
            blocks.append(f"Settings: {_difference(taken, *(('all', list(settings)) if name == STEP else known))}.\n\n")
        examples, title, codes_of = (command.epilog or "").partition("examples:\n")[2].partition("exit codes: ")
        first = examples.splitlines()[:EXAMPLES]
        shown = "\n".join([command.get_usage(contexts[name]), "", *first, *(title + codes_of).splitlines()])
        blocks.append(f"```text\n{shown}\n```\n\n")
    head = HEAD.format(codes=codes, settings=markdown(*MEASURED).strip(), options=options)
    return head + "".join(blocks).rstrip("\n") + "\n"


def _difference(taken: list[str], name: str, known: list[str]) -> str:
    """Return the settings of a command, as a difference from known ones where that is shorter."""
    more, fewer = ([one for one in first if one not in second] for first, second in ((taken, known), (known, taken)))
    if len(more) + len(fewer) >= len(taken):
        return _names(taken)
    parts = [f"{word} {_names(names)}" for word, names in (("plus", more), ("without", fewer)) if names]
    return ", ".join([name, *parts])


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def markdown(*records: type[Settings]) -> str:
    """Return the table of settings."""
    lines = ["| setting | takes | default | meaning |", "|---|---|---|---|"]
    for name, row in rows(*records).items():
        default = "" if row.default in (None, (), "") else f"`{str(row.default).lower()}`"
        lines.append(f"| `{name}` | {row.takes} | {default} | {row.help} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _text(group, top) -> str:
    return "\n".join(line.rstrip() for line in group.get_help(top).strip().splitlines()) + "\n"


def stub() -> str:
    """Return the text of `bertscope/__init__.pyi`, in which type checkers and editors read the public names."""
    homes = bertscope.public_names()
    lines = [
        f"from {homes[name]} import {name} as {name}\n" for name in sorted(homes, key=lambda name: (homes[name], name))
    ]
    return f'"""The public names. Written by docs/make_cli.py; do not edit."""\n\n{"".join(lines)}\n__version__: str\n'


if __name__ == "__main__":
    STUB.write_text(stub(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
