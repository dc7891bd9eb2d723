"""A table's target: its width and its colours. A piped table takes its natural width."""

import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any, Literal

from bertscope.errors import assigned, named
from bertscope.frozen import Record
from bertscope.settings.rows import TypedName
from bertscope.units import decimal, visible

_NARROWEST = 30  # below it a number would lose digits; the terminal wraps instead
_NUMBER_AND_UNIT = re.compile(r"(?<=[0-9]) (?=(?:[KMGTPE]?i?B|x)\b|%)|(?<=%) (?=margin)|(?<=batch) (?=[0-9])")
_WHOLE = re.compile(r"\(\w+ x [\w x+]{1,50}\)|\[[\w, ]{1,50}\]")  # `(1024 x 4096 + 4096)`, `[1, 128]`
_WIDE = "\u2e80-\u9fff\uf900-\ufaff\uff00-\uff60"  # CJK and fullwidth punctuation, between which lines may break
_OPENING = "\uff08\u300a"  # ends no line
_CLOSING = "\uff0c\u3002\uff1b\uff1a\u3001\uff09\u300b\uff01\uff1f"  # begins no line
# A word, or a wide character, with the blanks around it: a text, which `re` compiles on first use.
_UNIT = f" *[{_OPENING}]*(?:[^{_WIDE} ]+|[{_WIDE}])[{_CLOSING}]* *"


class Target(Record, kw_only=False):
    """A place for text: `width` in columns, None for as wide as it gets; `verbose` asks for all rows and columns."""

    width: int | None = None
    color: bool = False
    unicode: bool = True
    verbose: bool = False


Color = Literal["auto", "always", "never"]
_chosen: list[Color] = ["auto"]


def choose_color(choice: Color) -> None:
    """Set the value of `--color` for the rest of this run; `auto` leaves it to the terminal and the environment."""
    _chosen[0] = choice


def program_folders() -> str:
    """Return PATH without empty and relative folders, in which programs of the working directory would run."""
    return os.pathsep.join(filter(os.path.isabs, os.environ.get("PATH", os.defpath).split(os.pathsep)))


def stdout_target() -> Target:
    """Return the target for standard output, by --color, NO_COLOR, FORCE_COLOR, TERM, COLUMNS and the terminal."""
    return _target_of(sys.stdout)


def _target_of(stream: Any) -> Target:
    wants = stream.isatty() and os.environ.get("TERM") != "dumb"
    color = (wants or bool(os.environ.get("FORCE_COLOR"))) and not os.environ.get("NO_COLOR")
    if _chosen[0] != "auto":
        color = _chosen[0] == "always"
    encoding = (getattr(stream, "encoding", None) or "ascii").lower().replace("-", "")
    return Target(width=_width_of(stream), color=color, unicode=encoding.startswith("utf"))


CommandOf = Callable[[str, Mapping[str, Any]], str]
_command_of: ContextVar[CommandOf | None] = ContextVar("command_of", default=None)


def asked_by(command_of: CommandOf) -> AbstractContextManager[None]:
    """Have reports inside the block name further commands as a command line does: with its model and options."""
    return assigned(_command_of, command_of)


class Placeholder(str):
    """A name in a further command, such as N, for a value that only the user knows."""

    __slots__ = ()


def command_text(
    name: str, changes: Mapping[str, Any], keywords: Mapping[str, Any], python: str = "", model: str = ""
) -> str:
    """Return a further command with the options that were typed and changes; in Python a call with the keywords.

    A change to None leaves an option out. `python` is other code than the call; `model` is the name in a report.
    """
    if (command_of := _command_of.get()) is not None:
        return visible(command_of(name, changes))  # a name in it cannot add a line to paste
    if python:
        return python
    settings = (f"{key}={value!r}" for key, value in {**keywords, **changes}.items() if value is not None)
    return f"bertscope.{name}({', '.join([model_code(model), *settings])})"


def model_code(name: str) -> str:
    """Return a report's model for a call: its name if a call gave that, else a variable."""
    return repr(name) if isinstance(name, TypedName) else "model"


def lists_all() -> str:
    """Return what a line of settings ends with where not all are below it."""
    return f"; {named('to_markdown()')} lists all"


def _width_of(stream: Any) -> int | None:
    """Return the columns that COLUMNS or the terminal gives; None for a file or a pipe."""
    columns = os.environ.get("COLUMNS", "")
    if width := decimal(columns, 5):
        return max(width, _NARROWEST)
    return max(os.get_terminal_size(stream.fileno()).columns, _NARROWEST) if stream.isatty() else None


def wrapped(text: str, target: Target, indent: int = 0) -> str:
    """Return the text in lines of the target's width, further lines indented; no word, size or shape is broken."""
    if target.width is None or text_width(text) <= target.width:
        return f"{text}\n"
    lines, columns = [""], 0
    for unit in re.findall(_UNIT, _joined(text)):
        if columns + text_width(unit.rstrip(" ")) > target.width:
            if lines[-1].strip():
                lines.append(" " * indent)
                columns = indent
            else:
                unit = unit.lstrip(" ")  # of the first line, for which the word is too long
        lines[-1] += unit
        columns += text_width(unit)
    return "\n".join(line.rstrip(" ") for line in lines).replace("\u00a0", " ") + "\n"


def command_lines(command: str, width: int) -> str:
    """Return a command, if it is wider than that, in several lines of a shell that end before an option."""
    if len(command) <= width:
        return command
    rows = [""]
    for part in re.split(r" (?=-(?:[^']*'[^']*')*[^']*$)", command):
        if rows[-1].strip() and len(f"{rows[-1]} {part} \\") > width:
            rows.append("     ")
        rows[-1] += f" {part}" if rows[-1] else part
    return " \\\n".join(rows)


def text_width(text: str) -> int:
    """Return the columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


_STYLES = {"yes": 32, "uncertain": 33, "no": 31, "strong": 1, "dim": 2}
_NUMBER = re.compile(
    r"(?<![\w.:-])[0-9][0-9,]*(?:\.[0-9]+)?(?: (?:[KMGTPE]?i?B|[KMGTPE]?FLOPs?|%|ms|s|min|h)(?!\w))?(?![\w-])"
)


def painted(lines: str, style: str, target: Target) -> str:
    """Return lines in a style: that of a verdict (yes, uncertain or no) with bold numbers, strong or dim; else plain.

    Without colour they are plain too.
    """
    if not target.color or style not in _STYLES:
        return lines
    bold = "\x1b[1m\\g<0>\x1b[22m" if style in ("yes", "uncertain", "no") else "\\g<0>"
    start = f"\x1b[{_STYLES[style]}m"
    return "".join(f"{start}{_NUMBER.sub(bold, visible(line))}\x1b[0m\n" for line in lines.splitlines())


def verdict_cell(text: str) -> str:
    """Return a table's cell in its verdict's colour, by its first word; the weight of the row stays."""
    first = text.strip().partition(" ")[0].rstrip(":,")
    style = {"yes": "yes", "may": "uncertain", "not": "uncertain", "no": "no", "lacks": "no"}.get(first, "")
    return f"\x1b[{_STYLES[style]}m{text}\x1b[39m" if style else text


def stacked(*tables: str) -> str:
    """Return the tables one below the other, with one empty line between two."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(tables))


def message(text: str) -> str:
    """Return a line for standard error; if it is a terminal in lines of its width, and `error:` in red."""
    if not sys.stderr.isatty():
        return text
    target = _target_of(sys.stderr)
    lines = wrapped(text, target, 2).removesuffix("\n")
    return re.sub(r"\Aerror:", "\x1b[31m\\g<0>\x1b[39m", lines) if target.color else lines


def unbroken(text: str) -> list[str]:
    """Return the parts of the text that `wrapped` leaves in one line."""
    return [part.strip(" ").replace("\u00a0", " ") for part in re.findall(_UNIT, _joined(text))]


def _joined(text: str) -> str:
    """Return the text with unbreakable blanks inside shapes, products, and numbers with units."""
    whole = _WHOLE.sub(lambda match: match[0].replace(" ", "\u00a0"), text)
    return _NUMBER_AND_UNIT.sub("\u00a0", whole)


def progress_bar() -> Any:
    """Return a bar that disappears when it stops, with the stages done, the elapsed and the remaining time."""
    from rich import progress
    from rich.console import Console
    from rich.table import Column

    console = Console(stderr=True, markup=False, highlight=False)
    bar_width = 20 if console.width >= 100 else 10
    stage = Column(no_wrap=True, overflow="ellipsis", width=max(min(console.width - bar_width - 26, 60), 10))
    columns = progress.TextColumn("{task.description}", markup=False, table_column=stage), progress.BarColumn(bar_width)
    numbers = progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
    # The speed is the mean since the start: a stage may take minutes.
    options: Any = {"redirect_stdout": False, "redirect_stderr": False, "speed_estimate_period": 1e9}
    return progress.Progress(*columns, *numbers, console=console, transient=True, **options)


# ---- the colours of the charts: one for each meaning, for light and for dark pages ----


# Meaning -> the colour on a light page and on a dark one. The parts are in their order from the ground up: what is
# there all the time, then what comes and goes.
PARTS = {
    "parameters": ("#0072B2", "#3D95D6"),
    "buffers": ("#999999", "#8A9199"),
    "optimizer_state": ("#56B4E9", "#8CCFF5"),
    "inputs": ("#F0E442", "#DCD24A"),
    "gradients": ("#E69F00", "#E8A93A"),
    "activations": ("#009E73", "#2BB38B"),
    "temporaries": ("#CC79A7", "#D58BB4"),
    "gathered_parameters": ("#7A4B9C", "#A983C9"),
    "communication": ("#8C5A2B", "#B98A5A"),
}
ROLES = {
    "embeddings": ("#C3BDEB", "#544D93"),
    "attention": ("#F2B8AC", "#8A4339"),
    "feed-forward": ("#DAD48F", "#635F22"),
    "LayerNorm": ("#CDB09C", "#6B503E"),
    "pooler and heads": ("#A9CCD3", "#33626C"),
}


def variable(kind: str, name: str) -> str:
    """Return the reference of a style sheet to the colour of a `part` or a `role`."""
    return f"var(--{kind}-{name.replace(' ', '-').replace('_', '-').lower()})"


def declarations(mode: int) -> str:
    """Return the variables of all colours: of light pages (0) or of dark ones (1)."""
    named = [*(("part", *item) for item in PARTS.items()), *(("role", *item) for item in ROLES.items())]
    return " ".join(f"{variable(kind, name)[4:-1]}: {both[mode]};" for kind, name, both in named)
