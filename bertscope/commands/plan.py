"""`bertscope plan`."""

from pathlib import Path
from typing import Annotated

import typer

from bertscope.commands.model_options import ModelOptions
from bertscope.commands.output import DetailedOutputOptions, note, print_notes, progress_shown, write, write_file
from bertscope.commands.registry import OneOf, command
from bertscope.commands.run_options import CommandSettings, Takes
from bertscope.errors import SelectionError
from bertscope.render.plan import verdict
from bertscope.render.plan_code import FORMS, emitted

EXAMPLES = """
  bertscope plan bert-large-uncased --gpu t4 --batch 24 --seq 512 --precision autocast-fp16
  bertscope plan bert-large-uncased --budget 11GiB --batch-total 64 --seq 512 --precision autocast-bf16
  bertscope plan bert-mini --budget 450MiB --batch 64 --may-change 8bit
  bertscope plan bert-mini --budget 450MiB --batch 64 --emit torch
  bertscope plan bert-mini --budget 450MiB --batch 64 --emit json --output plan.json
exit codes: 0 a plan fits, 1 none does, 2 the question is wrong
"""


@command(examples=EXAMPLES)
def plan(
    *,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch", "-b", metavar="N", min=1, help="The micro-batch. [default: 8]", rich_help_panel="common"
        ),
    ] = None,
    batch_total: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="The batch of an optimizer step; the micro-batch is chosen."),
    ] = None,
    may_change: Annotated[
        str, typer.Option(metavar="WORDS", help="What else may change: lora, freeze, 8bit, precision, sgd.")
    ] = "",
    emit: Annotated[
        str | None, OneOf(FORMS), typer.Option(metavar="FORM", help=f"Print the answer to paste: {', '.join(FORMS)}.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw the memory of each plan against its FLOPs again.")
    ] = None,
    run: Annotated[CommandSettings, Takes(command="plan", without=("batch",))],
    model: ModelOptions,
    out: DetailedOutputOptions,
) -> int:
    """Find which operators to keep for backward so that a step fits with the fewest FLOPs again.

    Layers keep the outputs of some matrix products and compute the rest again. Each plan of the table was run on
    tensors without memory, with the kernels and the allocator of the card. --emit prints what to paste; estimate,
    profile, fit, report and sweep take the file of --emit json by --plan.
    """
    if plot is not None and plot.suffix.lower() != ".svg":
        raise SelectionError(f"{plot.name}: the chart of plans is an .svg file")
    source = model.found()
    from bertscope.api.plan import plan as find

    with progress_shown():
        report = find(source, batch=batch, batch_total=batch_total, may_change=may_change, **run.keywords)
    print_notes(report)
    if emit is None:
        out.show(report)
    else:
        if not report.fits and emit != "json":
            note(verdict(report))
            return 1
        write(emitted(report, emit), out.output)
    if plot is not None:
        from bertscope.render.plan import plan_svg

        write_file(plot, plan_svg(report))
        note(f"the plans are in {plot}")
    return 0 if report.fits else 1
