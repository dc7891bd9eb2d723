"""Output of reports: as text in the chosen format, to stdout or to a file, whole or not at all."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertscope.commands.process import is_debug
from bertscope.errors import SelectionError, SourceError, one_line
from bertscope.progress import listening
from bertscope.views.console import Target, message, progress_bar, stdout_target

_OTHER_FORMATS = re.compile(r"\.(pdf|docx?|odt|xlsx?|ods|png|jpe?g|gif|webp|svg|html?)", re.IGNORECASE)


def checked_output(path: Path | None, *, written: str, suffixes: Sequence[str]) -> Path | None:
    """Return the path of --output; raise SelectionError for a name that claims a format that is not written."""
    if path is not None and _OTHER_FORMATS.fullmatch(path.suffix) and path.suffix.lower() not in suffixes:
        raise SelectionError(f"{path.name}: this command writes no {path.suffix}; it writes {written}")
    return path


def print_notes(report: Any, *, has_file: bool = True) -> None:
    """Print on stderr the effects of the keys of a training file, and what the report could not give."""
    from bertscope.reports.base import UNCOUNTED
    from bertscope.views.footer import note_text, training_file_notes

    file = getattr(report, "training_file", None)
    if has_file and file is not None:
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
    from bertscope.views.views import display

    options: dict[str, Any] = {"lang": lang} if lang else {}
    if fmt == "table":
        target = replace(Target() if output else stdout_target(), verbose=verbose)
        options |= {"target": target, **table_options}
    write(display(report, fmt, view=view, **options), output)


def write(text: str, output: Path | None) -> None:
    """Write the text to stdout, or to a file that is replaced whole."""
    if output is not None:
        from bertscope.text_files import write_file

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
    if not paths:
        return
    from bertscope.text_files import check_writable

    files = [found for path in paths if (found := check_writable(path))]
    for path in files:
        if files.count(path) > 1:
            raise SourceError(f"two outputs name {path.name}; give each its own file")


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

    def note(self, text: str) -> None:
        """Print a note for the user."""
        note(text)

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
