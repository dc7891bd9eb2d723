"""The file of a sweep: rows as lines of JSON, appended when they are computed and put in order at the end.

A row is appended as soon as it is there, in the order of completion, so that no end of the process loses one. When all
are there, the file is replaced by one with the rows in the order of the grid, so that its content does not depend on
the number of workers, nor on how often the sweep was interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bertscope.commands.output import note, write_file
from bertscope.errors import BertscopeError, SourceError
from bertscope.reports.base import FAILED
from bertscope.reports.sweep import SweepRow

MAX_LINE_BYTES = 2**20  # a row has 1.5 KB
_START = b'{"key":"'


class ResultsFile:
    """The rows of a file by their keys, and the descriptor to which rows are appended."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor
        self.lines: dict[str, bytes] = {}
        self.rows: dict[str, SweepRow] = {}
        self.content = b""

    def append(self, row: SweepRow) -> None:
        """Add a row; one write of a whole line."""
        self._know(row, row.to_line().encode() + b"\n")
        written = os.write(self.descriptor, self.lines[row.key])
        if written != len(self.lines[row.key]):
            raise SourceError(f"{self.path} cannot be written: the disk is full; free some space, and run it again")

    def finish(self, keys: Sequence[str]) -> None:
        """Put the rows in the order of the keys, and behind them the rows of other grids and versions."""
        others = self.lines.keys() - set(keys)
        content = b"".join(self.lines[key] for key in (*keys, *(key for key in self.lines if key in others)))
        if content != self.path.read_bytes():
            write_file(self.path, content)

    def _know(self, row: SweepRow, line: bytes) -> None:
        self.lines[row.key], self.rows[row.key] = line, row

    def read(self) -> None:
        """Read the rows, and remove what an interrupted run has left of a line at the end.

        Raises SourceError for a file with other content.
        """
        with self.path.open("rb") as file:
            for number, line in enumerate(_lines(file.readline), 1):
                if line.endswith(b"\n"):
                    self._know(self._row(line, number), line)
                elif line[: len(_START)] == _START[: len(line)]:
                    os.ftruncate(self.descriptor, file.tell() - len(line))
                    note(f"{self.path}:{number} was not written to its end; its point is computed again")
                else:
                    raise self._not_a_row(number)

    def _row(self, line: bytes, number: int) -> SweepRow:
        try:
            return SweepRow.from_line(line)
        except (BertscopeError, ValueError, RecursionError):
            raise self._not_a_row(number) from None

    def _not_a_row(self, number: int) -> SourceError:
        return SourceError("no row of a sweep; name another file", where=f"{self.path}:{number}")

    def done(self) -> set[str]:
        """Return the keys of the rows that need not be computed again: all but those that failed."""
        return {key for key, row in self.rows.items() if row.outcome != FAILED}


def _lines(readline: Callable[[int], bytes]) -> Iterator[bytes]:
    while line := readline(MAX_LINE_BYTES):
        yield line


@contextmanager
def results_file(path: Path) -> Iterator[ResultsFile]:
    """Open or create a file of rows, which no other sweep may write to at the same time.

    Raises SourceError for a file with other content, and while another sweep writes to it.
    """
    if path.exists() and not path.is_file():
        raise SourceError(f"{path} is no regular file, which a sweep needs to go on from; name a file")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise SourceError(f"{path} cannot be written: {error.strerror}; name a file in a folder that exists") from None
    try:
        _lock(descriptor, path)
        found = ResultsFile(path, descriptor)
        found.read()
        yield found
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    """Lock the file until this process ends; raises SourceError if another process has locked or replaced it."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_same = os.path.samestat(os.fstat(descriptor), path.stat())
    except BlockingIOError:
        is_same = False
    except OSError:  # a file system without locks
        return
    if not is_same:
        raise SourceError(f"another sweep writes to {path}; wait for its end, or name another file")
