"""The file of a sweep: its rows by their keys, from which an interrupted sweep goes on."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from bertscope.errors import BertscopeError, SourceError
from bertscope.progress import notify
from bertscope.reports.base import FAILED, SCHEMA
from bertscope.reports.sweep import COMPUTED, REFUSED, SweepRow
from bertscope.text_files import write_file

MAX_LINE_BYTES = 2**20  # a row has 1.5 KB
_LARGEST = 2**63  # bytes, FLOPs: no point has more
_START = f'{{"schema":{SCHEMA},"key":"'.encode()
_OTHER_SCHEMA = re.compile(rb'\{(?:"schema":([0-9]{1,9}),)?"key":"[0-9a-f]{32}"')  # rows of schema 1 do not name it
_KEY = re.compile(r"[0-9a-f]{32}", re.ASCII)


class ResultsFile:
    """The rows of a file by their keys, and the descriptor to which rows are appended.

    `points` are the settings of the points of the grid by their keys.
    """

    def __init__(self, path: Path, descriptor: int, points: Mapping[str, Mapping[str, Any]]) -> None:
        self.path, self.descriptor, self.points = path, descriptor, points
        self.lines: dict[str, bytes] = {}
        self.rows: dict[str, SweepRow] = {}
        self.size_bytes = 0  # of the whole file, as far as this process knows

    def append(self, row: SweepRow) -> None:
        """Add a row; one write of a whole line."""
        self._know(row, row.to_line().encode() + b"\n")
        written = os.write(self.descriptor, self.lines[row.key])
        if written != len(self.lines[row.key]):
            raise SourceError(f"{self.path} cannot be written: the disk is full; free some space, and run it again")

    def finish(self, keys: Sequence[str]) -> None:
        """Put the rows in the order of the keys, and behind them the rows of other grids and versions.

        A file that another program has changed stays as it is.
        """
        others = self.lines.keys() - set(keys)
        content = b"".join(self.lines[key] for key in (*keys, *(key for key in self.lines if key in others)))
        found = self.path.read_bytes()
        if len(found) != self.size_bytes:
            notify(f"{self.path} was changed by another program; its rows are not put in order")
        elif content != found:
            write_file(self.path, content)

    def _know(self, row: SweepRow, line: bytes) -> None:
        self.lines[row.key], self.rows[row.key] = line, row
        self.size_bytes += len(line)

    def read(self) -> None:
        """Read the rows, and remove what an interrupted run of this grid has left of a line at the end.

        Raises SourceError for a file with other content, which is not changed.
        """
        with self.path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
                if line.endswith(b"\n"):
                    self._know(self._row(line, number), line)
                elif not file.read(1) and self._is_begun(line):
                    os.ftruncate(self.descriptor, self.size_bytes)
                    notify(f"{self.path}:{number} was not written to its end; its point is computed again")
                else:
                    raise self._not_a_row(line, number)

    def _is_begun(self, line: bytes) -> bool:
        """Return True for the beginning of a row of this grid, in a file whose first line is such a row.

        A line with the whole key of a point proves by itself whose it is.
        """
        starts = [_START + key.encode() + b'"' for key in self.points]
        if any(line.startswith(start) for start in starts):
            return True
        is_own = next(iter(self.lines), "") in self.points
        return is_own and any(start.startswith(line) for start in starts)

    def _row(self, line: bytes, number: int) -> SweepRow:
        with suppress(BertscopeError, ValueError, RecursionError, OverflowError):
            row = SweepRow.from_line(line)
            point = json.loads(json.dumps(self.points.get(row.key, row.point)))
            if _is_possible(row, json.loads(line)) and row.point == point:
                return row
        raise self._not_a_row(line, number)

    def _not_a_row(self, line: bytes, number: int) -> SourceError:
        found = _OTHER_SCHEMA.match(line)
        given = int(found[1] or 1) if found else SCHEMA
        what = (
            f"a row of schema {given}; this version goes on from {SCHEMA}" if given != SCHEMA else "no row of a sweep"
        )
        return SourceError(f"{what}; name another file", where=f"{self.path}:{number}")

    def done(self) -> set[str]:
        """Return the keys of the rows that need not be computed again: all but those that failed."""
        return {key for key, row in self.rows.items() if row.outcome != FAILED}


def _is_possible(row: SweepRow, data: Any) -> bool:
    """Return True if a sweep could have written the row."""
    is_computed = row.outcome == COMPUTED
    return (
        bool(_KEY.fullmatch(row.key))
        and bool(row.point)
        and row.outcome in (COMPUTED, REFUSED, FAILED)
        and (row.cost is not None) == is_computed
        and bool(row.error) != is_computed
        and all(0 <= number < _LARGEST for number in _numbers(data))
    )


def _numbers(data: Any) -> Iterator[float]:
    """Yield the numbers in JSON data; one that is not finite as -1."""
    if isinstance(data, (dict, list)):
        for item in data.values() if isinstance(data, dict) else data:
            yield from _numbers(item)
    elif isinstance(data, (int, float)):
        yield data if math.isfinite(data) else -1


@contextmanager
def results_file(path: Path, points: Mapping[str, Mapping[str, Any]]) -> Iterator[ResultsFile]:
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
        found = ResultsFile(path, descriptor, points)
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
