"""`bertscope profile`."""

from pathlib import Path
from typing import Annotated

import typer

from bertscope.calibrations import with_saved
from bertscope.commands.model_options import ModelOptions
from bertscope.commands.output import DetailedOutputOptions, note, print_notes, progress_shown, write_file
from bertscope.commands.process import INTERRUPT
from bertscope.commands.registry import command
from bertscope.commands.run_options import CommandSettings, Takes, ViewOptions, WithBareCheckpointing
from bertscope.settings.run_config import MEASURED

EXAMPLES = """
  bertscope profile
  bertscope profile --checkpointing
  bertscope profile bert-tiny --batch 8 --checkpointing none,full,selective
  bertscope profile bert-tiny --seq 512 --checkpointing --timeline step.html
  bertscope profile bert-tiny --mode inference --memory-limit 2GiB
  bertscope profile bert-tiny --nproc 2 --strategy fsdp
"""


@command(examples=EXAMPLES, cls=WithBareCheckpointing)
def profile(
    *,
    run: Annotated[
        CommandSettings,
        Takes(command="profile", records=MEASURED, compared=("checkpointing",),
              without=("world_size",)),
    ],
    model: ModelOptions,
    view: ViewOptions,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", rich_help_panel="output",
            help="With --device cuda: write a calibration (.json) for estimate, fit and plan. What FILE has of the "
            "same card and versions stays.",
        ),
    ] = None,
    out: DetailedOutputOptions,
) -> int:  # fmt: skip
    """Run the real step and measure its memory and time, each strategy in a separate process, next to the estimate.

    torch's profiler records the allocator's peak; separate steps without it give the times. With --nproc real
    ranks run the step, on gloo or with CUDA on NCCL; ranks that agree are one row. --save also measures the rates of
    the card, from which estimate, fit and plan predict times. Exit code 3 if the memory of a run could not be measured:
    out of memory, killed, too slow; 130 if it was interrupted.
    """
    view.check_timeline()
    source = model.found()
    from bertscope.analyses.memory.profile import INTERRUPTED
    from bertscope.api.asked import Asked
    from bertscope.api.memory import profile_source

    asked = Asked.of({}, records=MEASURED, compared=("checkpointing",), **run.keywords)
    with progress_shown():
        report, pictures, calibration = profile_source(
            source, asked, wants_snapshot=view.snapshot is not None, wants_card=save is not None
        )
    print_notes(report)
    is_shown = out.fmt != "table" or any(variant.measured for variant in report.variants)
    failures = [variant.failure for variant in report.variants if variant.failure]
    try:  # the table first; an output that fails does not prevent the others
        if is_shown:
            out.show(report, shown_rows=view.rows)
        for variant in report.variants:
            if variant.failure:
                what = "timed, its memory is measured" if variant.measured else "measured"
                note(f"{variant.checkpointing} could not be {what}: {variant.failure}")
    finally:
        try:
            if view.snapshot is not None and pictures[-1] is not None:
                write_file(view.snapshot, pictures[-1])
        finally:
            try:
                if is_shown:
                    view.write_timeline(report)
            finally:
                if save is not None and calibration is not None:
                    write_file(save, with_saved(calibration, save).to_json())
                    note(f"the calibration is in {save}")
    if any(INTERRUPTED[1] in failure for failure in failures):
        return INTERRUPT
    needs_times = save is not None  # a calibration has the times and the rates of the GPU
    failed = any(variant.failure and (needs_times or variant.measured is None) for variant in report.variants)
    return 3 if failed else 0
