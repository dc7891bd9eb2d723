"""`bertscope sweep`."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertscope.commands.model_options import AllowCode
from bertscope.commands.output import Format, Progress, Verbose, note, output_option, show, write_file
from bertscope.commands.registry import command
from bertscope.commands.run_options import PLAN
from bertscope.errors import BertscopeError, MissingExtraError, SelectionError, SourceError
from bertscope.frozen import dataclass
from bertscope.render.sweep import ordered
from bertscope.reports.base import FAILED, SCHEMA
from bertscope.reports.sweep import COMPUTED, REFUSED, SweepReport, SweepRow

if TYPE_CHECKING:
    from bertscope.analyses.sweep.grid import Task

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
            note(f"{self.path} was changed by another program; its rows are not put in order")
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
                    note(f"{self.path}:{number} was not written to its end; its point is computed again")
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


EXAMPLES = """
  bertscope sweep new-grid.yaml --init
  bertscope sweep grid.yaml -o results.jsonl
  bertscope sweep grid.yaml -o results.jsonl --workers 2 --sort peak_bytes --format csv
  bertscope sweep grid.yaml -o results.jsonl --sort peak_bytes
"""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options for the place where the points are computed."""

    engine: Annotated[
        Literal["local", "dask"],
        typer.Option(help="Where the points are computed: processes of this machine, or your cluster of dask."),
    ] = "local"
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="The number of processes on this machine; default: its usable cores."),
    ] = None
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="The cluster of dask, which runs already; default: DASK_SCHEDULER_ADDRESS.",
        ),
    ] = None


@command(examples=EXAMPLES)
def sweep(
    *,
    grid: Annotated[
        str,
        typer.Argument(
            metavar="[GRID]",
            help="A YAML file: a value or a list for each setting (docs/sweep.md); default: grid.yaml.",
        ),
    ] = "grid.yaml",
    output: Annotated[
        Path | None,
        output_option("JSON lines", ".jsonl", text="Append a row for each point to FILE, and leave out those it has."),
    ] = None,
    init: Annotated[bool, typer.Option("--init", help="Write a sample with comments to GRID, a new file.")] = False,
    on: EngineOptions,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help=PLAN)] = None,
    allow_code: AllowCode = False,
    fmt: Format = "table",
    rows: Annotated[int, typer.Option(metavar="N", min=0, help="Show N rows of the table; 0: all.")] = 20,
    sort: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="Sort the rows by a column of the CSV, such as peak_bytes."),
    ] = None,
    verbose: Verbose = False,
) -> int:
    """Estimate memory and FLOPs of every point of a grid: models x batches x lengths x precisions x strategies ...

    A row is in FILE as soon as its point is computed: the same command goes on after an interruption and computes no
    point twice. At the end the rows are in the order of the grid. Exit code 1 if a point has no estimate.
    """
    if init:
        return _write_sample(Path(grid))
    if output is None:
        raise SelectionError("--output is missing: the file of the results, such as --output results.jsonl")
    from bertscope.analyses.sweep.grid import read_grid, tasks_of

    address = _check(on)
    found = read_grid(grid, allow_code=allow_code)
    if plan is not None:
        found = found.with_plan(plan, allow_code=allow_code)
    points = tasks_of(found)
    blank = [point if isinstance(point, SweepRow) else point.row() for point in points]
    report = SweepReport(grid=Path(grid).name, varied=found.varied, rows=tuple(blank))
    ordered(report, sort)  # an error before the work begins
    with results_file(output, {point.key: point.point for point in points}) as file:
        _compute(points, file, on, address)
        file.finish([row.key for row in blank])
        report = replace(report, rows=tuple(file.rows[row.key] for row in blank))
    show(report, fmt, None, verbose=verbose, rows=rows, sort=sort)
    return 0 if report.number(COMPUTED) == len(blank) else 1


def _write_sample(path: Path) -> int:
    """Write the sample of a grid; raises SourceError for a file that exists."""
    if path.exists():
        raise SourceError(f"{path} exists; name a new file for the sample")
    write_file(path, Path(__file__).with_name("sample_grid.yaml").read_text(encoding="utf-8"))
    note(f"the sample is in {path}")
    return 0


def _compute(points: Sequence[Task | SweepRow], file: ResultsFile, on: EngineOptions, address: str) -> None:
    """Add the rows of the points that the file does not have."""
    from bertscope.analyses.saved import usable_cores

    done = file.done()
    left = [point for point in points if point.key not in done]
    if len(left) < len(points):
        rest = f"{len(left):,} {'is' if len(left) == 1 else 'are'} left" if left else "none is left"
        note(f"{file.path} has {len(points) - len(left):,} of {len(points):,} points; {rest}")
    with Progress(len(left)) as progress:
        progress("point 1: starting the workers")
        for number, row in enumerate(_rows(left, on.engine, on.workers or usable_cores(), address), 1):
            file.append(row)
            if number < len(left):
                progress(f"point {number + 1:,}: {row.point['model']}")


def _check(on: EngineOptions) -> str:
    """Return the address of the cluster, if one computes the points.

    Raises an error before the work begins for options that exclude each other, and for a missing package.
    """
    if on.address is not None and on.engine == "local":
        raise SelectionError("--address names a cluster; give --engine dask too")
    if on.engine != "local" and on.workers is not None:
        raise SelectionError("the cluster has its own workers; leave --workers out")
    if on.engine == "local":
        return ""
    if find_spec("distributed") is None:
        raise MissingExtraError("--engine dask", "dask")
    from bertscope.analyses.sweep.pool import cluster_address

    return cluster_address(on.address)


def _rows(points: Sequence[Task | SweepRow], engine: str, workers: int, address: str) -> Iterator[SweepRow]:
    """Yield the rows of points: at once those that have no task, then the others in the order of their completion."""
    from bertscope.analyses.sweep.pool import dask_rows, local_rows

    yield from (point for point in points if isinstance(point, SweepRow))
    tasks = [point for point in points if not isinstance(point, SweepRow)]
    if not tasks:
        return
    if engine == "local":
        yield from local_rows(tasks, workers)
    else:
        yield from dask_rows(tasks, address)
