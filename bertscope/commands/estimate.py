"""`bertscope estimate`."""

from typing import Annotated

from bertscope.commands.model_options import ModelOptions, ModelsOptions
from bertscope.commands.output import DetailedOutputOptions, print_notes, progress_shown, write_file
from bertscope.commands.registry import command
from bertscope.commands.run_options import CommandSettings, LengthOptions, Takes, ViewOptions, WithBareCheckpointing
from bertscope.reports.memory import MemoryReport

EXAMPLES = """
  bertscope estimate bert-large-zh --batch 32 --seq 512 --precision autocast-bf16
  bertscope estimate --checkpointing --batch 8 --seq 512
  bertscope estimate bert-large-uncased --gpu t4 --batch 16 --seq 512 --checkpointing
  bertscope estimate --device cuda --precision autocast-bf16 --attention sdpa
  bertscope estimate bert-tiny --checkpointing none,full,selective --format json
  bertscope estimate bert-tiny bert-mini --seq 512 --format markdown
  bertscope estimate bert-large-uncased --world-size 8 --strategy fsdp --checkpointing
  bertscope estimate bert-base-uncased --lengths normal:128,64,16,512 --batch 32
  bertscope estimate bert-base-uncased --lora r=8,alpha=16,dropout=0.05,target=query+value
"""


@command(examples=EXAMPLES, cls=WithBareCheckpointing)
def estimate(
    *,
    run: Annotated[CommandSettings, Takes(command="estimate", compared=("checkpointing",))],
    model: ModelsOptions,
    view: ViewOptions,
    data: LengthOptions,
    out: DetailedOutputOptions,
) -> None:
    """Estimate the memory of a step: the peak, its parts and the operator that runs there. It allocates nothing.

    torch dispatches forward, backward, recomputation and the optimizer step on tensors without memory. The
    peak on a CPU is exact or nearly exact. CUDA's kernels and allocator are simulated. Several models are one row
    each.
    """
    model.only_one({"--timeline": view.timeline is not None, "--snapshot": view.snapshot is not None})
    view.check_timeline()
    others = {"--timeline": view.timeline, "--snapshot": view.snapshot, "--rows": view.rows,
              "a second MODEL": model.others}  # fmt: skip
    if (found := data.report(model, others, **run.keywords)) is not None:
        out.show(found)
        return

    def report_of(one: ModelOptions) -> MemoryReport:
        """Return the report of one model."""
        source = one.found()
        if view.snapshot is not None:
            source.require("--snapshot")
        from bertscope.api import memory

        with progress_shown():
            return memory.estimate(source, **run.keywords)

    reports = model.each(report_of)
    print_notes(reports[0])
    out.show_all(reports, **({} if model.others else {"shown_rows": view.rows}))
    if not model.others:
        view.write_timeline(reports[0])
    if view.snapshot is not None:
        from bertscope.api.memory import snapshot

        write_file(view.snapshot, snapshot(model.found(), _layers=run.layers))
