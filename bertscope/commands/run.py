"""`bertscope run`."""

from typing import Annotated

import typer

from bertscope.commands.output import DetailedOutputOptions, note, progress_shown, write_file
from bertscope.commands.project import WithProjectDefaults
from bertscope.commands.registry import command
from bertscope.commands.run_options import CommandSettings, Takes, ViewOptions
from bertscope.errors import SelectionError
from bertscope.reports.step import NO
from bertscope.settings.run_config import RAN

EXAMPLES = """
  bertscope run train.py
  bertscope run --gpu t4 --timeline run.html train.py --lr 3e-5 --epochs 3
  bertscope run --gpu t4 --fit batch_size=1..512 train.py
  bertscope run --budget 12GiB --format json -m train
exit codes: 0 it fits, 1 it does not, 2 the script failed, 3 the run failed
"""


class _WithArguments(WithProjectDefaults):
    """A command whose words after the script are the script's."""

    allow_interspersed_args = False


@command(examples=EXAMPLES, cls=_WithArguments, context_settings={"ignore_unknown_options": False})
def run(
    *,
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The training script, or with -m the name of a module.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="The arguments of the script.")
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="Run a module, as 'python -m' does.", rich_help_panel="common")
    ] = False,
    fit: Annotated[
        str,
        typer.Option(
            metavar="NAME=LOW..HIGH", rich_help_panel="common",
            help="Find the largest value of an argument of the script that fits.",
        ),
    ] = "",
    settings: Annotated[CommandSettings, Takes(command="run", records=RAN, has_file=False)],
    view: ViewOptions,
    out: DetailedOutputOptions,
) -> int:  # fmt: skip
    """Run a training script, unchanged, on a GPU that is not there: what fits, and which line needs the most memory.

    It executes the script: data, tokenizers and metrics are real, and what is on cuda has no values. What it writes is
    discarded, and it has no network. It ends after --steps optimizer steps and one evaluation.
    """
    view.check_timeline()
    if fit and (view.timeline or view.snapshot or view.rows is not None):
        raise SelectionError("--timeline, --snapshot and --rows show one run; leave them or --fit out")
    from bertscope.api.run import recorded
    from bertscope.reports.run import RunFitReport

    with progress_shown():
        report, picture = recorded(
            script, arguments or (), module=module, fit=fit, wants_snapshot=view.snapshot is not None,
            _layers=settings.layers,
        )  # fmt: skip
    if isinstance(report, RunFitReport):
        out.show(report)
        return 0 if report.largest else 1
    out.show(report, shown_rows=view.rows)
    if view.snapshot is not None and picture is not None:
        write_file(view.snapshot, picture)
    if view.timeline is not None:
        from bertscope.render.run import step_timeline

        write_file(view.timeline, step_timeline(report, view.timeline.suffix))
        note(f"the timeline is in {view.timeline}")
    return 1 if report.answer == NO else 0
