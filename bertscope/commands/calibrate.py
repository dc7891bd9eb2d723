"""`bertscope calibrate`."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from bertscope.calibrations import paths_for, read_calibration
from bertscope.commands.output import Format, Progress, note, output_option, show, write_file
from bertscope.commands.registry import command
from bertscope.errors import SelectionError, SourceError
from bertscope.gpus import may_have_cuda
from bertscope.reports.calibration import PLANNED, CalibrationReport

EXAMPLES = """
  bertscope calibrate --dry-run
  bertscope calibrate --dry-run --format json
"""


@command(examples=EXAMPLES)
def calibrate(
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the points and measure nothing.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Measure all points, also those of an interrupted run.")
    ] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="The time limit of each point.")] = 60,
    fmt: Format = "table",
    output: Annotated[
        Path | None,
        output_option("JSON (.json)", text="Write the measurements to FILE too, and the table next to it as .md."),
    ] = None,
) -> int:
    """Measure the first CUDA card, each point in a new process: context, workspaces, steps, limits and rates.

    The result is stored for the user, and later `estimate` and `fit` for this card use it. An interrupted run is
    continued by the next one. Exit code 2 without a card, 3 if a point could not be measured.
    """
    if dry_run:
        from bertscope.analyses.calibrate.session import planned_report

        show(planned_report(), fmt, output)
        return 0
    if not may_have_cuda():
        raise SelectionError("no CUDA driver and torch for CUDA are here; --dry-run lists what would be measured")
    from bertscope.analyses.calibrate.session import Session

    with Session(timeout_seconds=timeout) as session:
        path, unfinished = paths_for(session.machine.card)
        with suppress(OSError):  # `write_file` says why it cannot be written
            path.parent.mkdir(parents=True, exist_ok=True)
        report = session.begun(None if again else _earlier(unfinished))
        left = [row for row in report.rows if row.outcome == PLANNED]
        if len(left) < len(report.rows):
            note(f"{len(report.rows) - len(left)} points of an interrupted run are kept; --again measures them too")
        with Progress(len(left)) as progress:
            for found in session.results(report, progress):
                report = found
                write_file(unfinished, report.to_json())
    write_file(path, report.to_json())
    note(f"the calibration is in {path}; estimate and fit for this card use it")
    for row in report.failed:
        note(f"{row.name} could not be measured: {row.reason}")
    if not report.failed:  # else the next run measures the failed points only
        unfinished.unlink(missing_ok=True)
    if output is not None:
        write_file(output, report.to_json())
        write_file(output.with_suffix(".md"), report.to_markdown())
    show(report, fmt, None)
    return 3 if report.failed else 0


def _earlier(path: Path) -> CalibrationReport | None:
    """Return the measurements of an interrupted run; None without a file that can be read."""
    with suppress(SourceError):
        return read_calibration(path)
    return None
