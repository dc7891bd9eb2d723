"""One way out: a report becomes text in the format asked for, on stdout or in a file, whole or not at all."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import typer

from bertscope.errors import SourceError, one_line
from bertscope.render.console import Target, stdout_target
from bertscope.reports import to_json_data
from bertscope.texts import json_text, visible_lines

_MARKUP = ("html", "svg")  # hold scripts and style sheets of their own; `html_text` escapes what goes in


def show(report: Any, renderer: ModuleType | SimpleNamespace, fmt: str, output: Path | None) -> None:
    """Write the report by `renderer.table`, `.csv`, `.markdown`, `.text` ..., or as JSON."""
    write(_text(report, renderer, fmt, Target() if output else stdout_target()), output)


def _text(report: Any, renderer: ModuleType | SimpleNamespace, fmt: str, target: Target) -> str:
    if fmt == "json":
        return json_text(to_json_data(report))
    if fmt == "table":
        return visible_lines(renderer.table(report, target), color=target.color)
    render: Callable[[Any], str] = getattr(renderer, fmt)
    return render(report) if fmt in _MARKUP else visible_lines(render(report))


def write(text: str, output: Path | None) -> None:
    """The text to stdout, or to a file that is replaced whole."""
    if output is not None:
        write_file(output, text)
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone (`| head`): say nothing, and let nothing fail again when Python flushes at exit.
        _discard_stdout()
        raise typer.Exit(141) from None  # as the shell reports SIGPIPE
    except OSError as error:
        _discard_stdout()
        raise SourceError(
            f"standard output cannot be written: {error.strerror}; write to a file with --output"
        ) from None


def _discard_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a binary file, as `write_file` does."""
    write_file(path, content)


def write_file(path: Path, text: str | bytes) -> None:
    """Write a file whole or not at all; raises SourceError where that cannot be done.

    A device or a pipe, such as /dev/stdout, is written to as it is.
    """
    try:
        if path.is_dir():
            raise SourceError(f"{path} is a folder; name a file to write")
        if path.exists() and not path.is_file():
            path.write_bytes(_encoded(text))
        else:
            _replace(path, text)
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, SourceError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise SourceError(f"{path} cannot be written: {reason}; name a file in a folder that exists") from None


def _encoded(text: str | bytes) -> bytes:
    """Half a surrogate pair, which a file name or a JSON key may hold, is no UTF-8: hence backslashreplace."""
    return text if isinstance(text, bytes) else text.encode("utf-8", errors="backslashreplace")


def _replace(path: Path, text: str | bytes) -> None:
    target = path.resolve()
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".bertscope-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_encoded(text))
        os.chmod(temporary, mode)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def note(text: str) -> None:
    """A line for the person, on stderr."""
    print(f"note: {one_line(text, limit=2000)}", file=sys.stderr)
