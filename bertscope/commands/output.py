"""Output of reports: as text in the chosen format, to stdout or to a file, whole or not at all."""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bertscope.commands.process import is_debug
from bertscope.errors import SelectionError, SourceError, one_line
from bertscope.frozen import dataclass
from bertscope.processes.signals import uninterrupted
from bertscope.progress import listening
from bertscope.render.console import Target, message, progress_bar, stdout_target

Format = Annotated[
    Literal["table", "json", "csv", "markdown"],
    typer.Option("--format", "-f", help="The format.", rich_help_panel="common"),
]
_OTHER_FORMATS = re.compile(r"\.(pdf|docx?|odt|xlsx?|ods|png|jpe?g|gif|webp|svg|html?)", re.IGNORECASE)


def output_option(
    written: str,
    *suffixes: str,
    text: str = "Write to FILE, whole or not at all.",
) -> Any:
    """Return the option --output of a command that writes the `written` formats, among them files with these suffixes.

    `text` is its help. A name with the suffix of another known format is an error.
    """

    def checked(path: Path | None) -> Path | None:
        """Return the path; raise SelectionError for a name that claims a format that is not written."""
        if path is not None and _OTHER_FORMATS.fullmatch(path.suffix) and path.suffix.lower() not in suffixes:
            raise SelectionError(f"{path.name}: this command writes no {path.suffix}; it writes {written}")
        return path

    return typer.Option("--output", "-o", metavar="FILE", callback=checked, help=text, rich_help_panel="common")


Output = Annotated[Path | None, output_option("--format table (.txt), json, csv and markdown (.md)")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Show all columns, rows, notes and details.", rich_help_panel="output")
]


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """The format of a report, and the file for it."""

    fmt: Format = "table"
    output: Output = None

    def show(self, report: Any, **options: Any) -> None:
        """Write the report in this format."""
        show(report, self.fmt, self.output, **options)

    def show_all(self, reports: Sequence[Any], **options: Any) -> None:
        """Write the only report as `show` does, and several reports of one kind as one comparison."""
        if len(reports) == 1:
            self.show(reports[0], **options)
        else:
            from bertscope.reports.page import ComparisonReport

            self.show(ComparisonReport(of=reports[0].kind, reports=tuple(reports)))


@dataclass(frozen=True, kw_only=True)
class DetailedOutputOptions(OutputOptions):
    """The output of a report with columns or notes that only -v shows; JSON and Markdown contain all of them."""

    verbose: Verbose = False

    def show(self, report: Any, **options: Any) -> None:
        """Write the report in this format."""
        super().show(report, verbose=self.verbose, **options)


def print_notes(report: Any) -> None:
    """Print on stderr the effects of the keys of a training file, and what the report could not give."""
    from bertscope.render.footer import note_text, training_file_notes
    from bertscope.reports.base import UNCOUNTED

    file = getattr(report, "training_file", None)
    if file is not None:
        for line in training_file_notes(file, report.run.device):
            note(line)
    for found in getattr(report, "notes", ()):
        if found.key != UNCOUNTED:  # which the answer says
            note(note_text(found))


def show(
    report: Any,
    fmt: str,
    output: Path | None,
    *,
    verbose: bool = False,
    view: str = "",
    lang: str = "",
    **table_options: Any,
) -> None:
    """Write the report as a table (with the options), or in another form of its view, or as JSON.

    `lang` is the language of a view that has several.
    """
    if fmt == "json":
        from bertscope.reports.base import to_json

        write(to_json(report), output)
        return
    from bertscope.render.views import display

    options: dict[str, Any] = {"lang": lang} if lang else {}
    if fmt == "table":
        target = replace(Target() if output else stdout_target(), verbose=verbose)
        options |= {"target": target, **table_options}
    write(display(report, fmt, view=view, **options), output)


def write(text: str, output: Path | None) -> None:
    """Write the text to stdout, or to a file that is replaced whole."""
    if output is not None:
        write_file(output, text)
    else:
        sys.stdout.write(text)
        sys.stdout.flush()


def check_outputs(paths: Sequence[Path]) -> None:
    """Raise SourceError before the work begins if a file cannot be written, or if two outputs name the same file."""
    try:
        os.getcwd()
    except OSError:
        raise SourceError("the working directory was deleted; change to a folder that exists") from None
    files = []
    for path in paths:
        with _explained(path):
            if not _is_device(path):
                import tempfile  # 4 ms, for those who name a file

                with tempfile.TemporaryFile(dir=path.resolve().parent) as file:
                    file.write(b"\0")  # on a full disk the file can be created and the byte cannot be written
                files.append(path.resolve())
            elif not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    for path in files:
        if files.count(path) > 1:
            raise SourceError(f"two outputs name {path.name}; give each its own file")


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all; raises SourceError if it cannot be written.

    A device or a pipe, such as /dev/stdout, is written to directly.
    """
    if isinstance(content, str):  # file names and JSON keys may contain lone surrogates
        content = content.encode("utf-8", errors="backslashreplace")
    with _explained(path):
        if _is_device(path):
            path.write_bytes(content)
        else:
            with uninterrupted():
                _replace(path, content)


def _is_device(path: Path) -> bool:
    """Return True for a device or pipe, False for a file, existing or not; raises SourceError for a folder."""
    if path.is_dir():
        raise SourceError(f"{path} is a folder; name a file to write")
    return path.exists() and not path.is_file()


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise SourceError instead of the system's error about writing this file."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SourceError(f"{path} cannot be written: {reason}; name a file in a folder that exists") from None


def _replace(path: Path, content: bytes) -> None:
    import tempfile

    target = path.resolve()
    if target.is_symlink():  # a loop of links, which resolve() leaves as it is since Python 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".bertscope-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
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
    """Print a note for the user on stderr."""
    print(message(f"note: {one_line(text, limit=2000)}"), file=sys.stderr)


_LINE_SECONDS = 5.0  # between two lines of progress in a log


class Progress:
    """Display of progress on stderr after the first second: a bar in a terminal, a few lines elsewhere.

    `total` is the number of stages; a text names its stage before a colon, if it has one. A stage has at most one line,
    and two lines are _LINE_SECONDS apart; with --debug each text is a line.
    """

    def __init__(self, total: int = 0) -> None:
        self.total = total
        self.started = time.monotonic()
        self.begun: list[str] = []  # the stages, in order
        self.done_seconds = 0.0  # until the current stage began
        self.shown = ""
        self.next_seconds = 1.0  # of the next line
        self.bar: Any = None
        self.is_terminal = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        """Show the text, or outside a terminal its stage."""
        stage = text.partition(": ")[0]
        seconds = time.monotonic() - self.started
        if [stage] != self.begun[-1:]:
            self.begun.append(stage)
            self.done_seconds = seconds
        if self.is_terminal and seconds >= 1:
            self._draw(one_line(text, limit=60))
            return
        words = text if is_debug() else stage
        if words != self.shown and (seconds >= self.next_seconds or is_debug()):
            self.shown, self.next_seconds = words, seconds + _LINE_SECONDS
            place = f"{len(self.begun)} of {max(self.total, len(self.begun))}, " if self.total else ""
            shown = one_line(words, limit=60)
            print(f"{shown} ({place}{seconds:.0f} s)", file=sys.stderr, flush=True)

    def _draw(self, words: str) -> None:
        if self.bar is None:
            self.bar = progress_bar()
            self.bar.add_task(words, total=self.total or None, done_seconds=self.done_seconds)
            self.bar.tasks[0].start_time = self.started
            self.bar.start()
        self.bar.update(self.bar.task_ids[0], description=words, completed=len(self.begun) - 1,
                        done_seconds=self.done_seconds)  # fmt: skip

    def expect(self, stages: int) -> None:
        """Add to the number of stages."""
        self.total += stages

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()


@contextmanager
def progress_shown() -> Iterator[None]:
    """Show the progress of the work inside the block."""
    with Progress() as shown, listening(shown):
        yield
