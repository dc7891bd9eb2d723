"""`bertscope sweep`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from bertscope.commands.model_options import AllowCode
from bertscope.commands.output import Format, Progress, Verbose, note, output_option, show
from bertscope.commands.registry import command
from bertscope.commands.results_file import results_file
from bertscope.errors import MissingExtraError, SelectionError
from bertscope.render.sweep import ordered
from bertscope.reports.sweep import COMPUTED, SweepReport, SweepRow

if TYPE_CHECKING:
    from bertscope.analyses.sweep.tasks import Task

EXAMPLES = """
  bertscope sweep grid.yaml -o results.jsonl
  bertscope sweep grid.yaml -o results.jsonl --workers 2 --sort peak_bytes --format csv
  bertscope sweep grid.yaml -o results.jsonl --sort peak_bytes
"""
ENGINES = ("local", "ray", "dask")


@command(place=65, examples=EXAMPLES, short_help="Estimate every point of a grid, and go on after an interruption.")
def sweep(
    *,
    grid: Annotated[
        str,
        typer.Argument(metavar="GRID", help="A YAML file: a value or a list for each setting (docs/sweep.md)."),
    ],
    output: Annotated[
        Path,
        output_option("JSON lines", ".jsonl", text="Append a row for each point to FILE, and leave out those it has."),
    ],
    engine: Annotated[
        Literal["local", "ray", "dask"],
        typer.Option(help="Where the points are computed: processes of this machine, or your cluster of ray or dask."),
    ] = "local",
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="The number of processes on this machine; default: its usable cores."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="The cluster of ray or dask, which runs already; default: RAY_ADDRESS or DASK_SCHEDULER_ADDRESS.",
        ),
    ] = None,
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
    from bertscope.analyses.sweep.grid import read_grid
    from bertscope.analyses.sweep.tasks import tasks_of, usable_cores

    address = _check(engine, workers, address)
    found = read_grid(grid, allow_code=allow_code)
    points = tasks_of(found)
    blank = [point if isinstance(point, SweepRow) else point.row() for point in points]
    report = SweepReport(grid=Path(grid).name, varied=found.varied, rows=tuple(blank))
    ordered(report, sort)  # an error before the work begins
    with results_file(output, {point.key: point.point for point in points}) as file:
        done = file.done()
        left = [point for point in points if point.key not in done]
        if len(left) < len(points):
            rest = f"{len(left):,} {'is' if len(left) == 1 else 'are'} left" if left else "none is left"
            note(f"{output} has {len(points) - len(left):,} of {len(points):,} points; {rest}")
        with Progress(len(left)) as progress:
            progress("point 1: starting the workers")
            for number, row in enumerate(_rows(left, engine, workers or usable_cores(), address), 1):
                file.append(row)
                if number < len(left):
                    progress(f"point {number + 1:,}: {row.point['model']}")
        file.finish([row.key for row in blank])
        report = replace(report, rows=tuple(file.rows[row.key] for row in blank))
    show(report, fmt, None, verbose=verbose, rows=rows, sort=sort)
    return 0 if report.number(COMPUTED) == len(blank) else 1


def _check(engine: str, workers: int | None, address: str | None) -> str:
    """Return the address of the cluster, if one computes the points.

    Raises an error before the work begins for options that exclude each other, and for a missing package.
    """
    if address is not None and engine == "local":
        raise SelectionError("--address names a cluster; give --engine ray or --engine dask too")
    if engine != "local" and workers is not None:
        raise SelectionError("the cluster has its own workers; leave --workers out")
    if engine == "local":
        return ""
    if find_spec({"ray": "ray", "dask": "distributed"}[engine]) is None:
        raise MissingExtraError(f"--engine {engine}", engine)
    from bertscope.analyses.sweep.engines import cluster_address

    return cluster_address(engine, address)


def _rows(points: Sequence[Task | SweepRow], engine: str, workers: int, address: str) -> Iterator[SweepRow]:
    """Yield the rows of points: at once those that have no task, then the others in the order of their completion."""
    from bertscope.analyses.sweep.engines import dask_rows, local_rows, ray_rows

    yield from (point for point in points if isinstance(point, SweepRow))
    tasks = [point for point in points if not isinstance(point, SweepRow)]
    if not tasks:
        return
    if engine == "local":
        yield from local_rows(tasks, workers)
    else:
        yield from (ray_rows if engine == "ray" else dask_rows)(tasks, address)
