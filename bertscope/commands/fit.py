"""`bertscope fit`."""

from dataclasses import replace
from typing import Annotated

import typer

from bertscope.commands.model_options import ModelOptions
from bertscope.commands.output import DetailedOutputOptions, print_notes, progress_shown
from bertscope.commands.registry import command
from bertscope.commands.run_options import CommandSettings, LengthOptions, Takes, WithBareCheckpointing
from bertscope.settings.checkpointing import CHEAPEST_FIRST
from bertscope.settings.parallelism import SEARCHED, WORLD_SIZES

EXAMPLES = """
  bertscope fit bert-large-uncased --gpu a100-40gb --world-size 8 --strategy fsdp --checkpointing full
  bertscope fit bert-large-uncased --gpu t4 --batch-total 64 --seq 128 --precision autocast-fp16
  bertscope fit bert-large-uncased --budget 16GiB --seq 512
  bertscope fit bert-base-uncased --budget 8GiB --lengths normal:128,64,16,512
  bertscope fit bert-base-uncased --gpu t4 --seq 512 --mode inference --precision fp16
"""


@command(examples=EXAMPLES, cls=WithBareCheckpointing)
def fit(
    *,
    batch: Annotated[
        int | None,
        typer.Option("--batch", "-b", metavar="N", min=1, help="Find the settings with which this batch fits.",
                     rich_help_panel="common"),
    ] = None,
    batch_total: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Find the fewest GPUs on which this batch of all ranks together fits, by "
                     f"{', '.join(SEARCHED)}, or by --strategy; at most {max(WORLD_SIZES):,}.")
    ] = None,
    run: Annotated[
        CommandSettings,
        Takes(command="fit", compared=("seq", "precision", "checkpointing", "gpu"), without=("batch",),
              usual={"precision": "fp32 and autocast-bf16, on GPUs before Ampere autocast-fp16",
                     "checkpointing": f"{CHEAPEST_FIRST}, or those that the model takes"}),
    ],
    data: LengthOptions,
    model: ModelOptions,
    out: DetailedOutputOptions,
) -> int:  # fmt: skip
    """Find the largest batch that fits in a memory budget, for each checkpointing strategy and precision.

    On a GPU the allocator is simulated, with the largest CUDA context that was published for it or that a calibration
    measured. With --batch, find the strategies and precisions with which it fits, cheapest first. Exit code 1 if
    nothing fits for certain. Several GPUs are in one table with the answer for each GPU first. With --world-size the
    batch is that of one rank of a job; with --batch-total find the number of ranks.
    """
    own = {} if batch is None else {"batch": batch}
    found = data.report(model, {"--batch-total": batch_total}, search=batch is None, **own, **run.keywords)
    if found is not None:
        out.show(found)
        return 0 if found.fits else 1
    source = model.found()
    from bertscope.api.memory import fits

    with progress_shown():
        reports = fits(source, batch=batch, batch_total=batch_total, **run.keywords)
    for number, report in enumerate(reports):
        print_notes(report if not number else replace(report, training_file=None))
    out.show_all(reports)
    return 0 if any(report.fits for report in reports) else 1
