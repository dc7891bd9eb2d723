"""`bertscope flops`."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Literal

import typer

from bertscope.commands.model_options import Freeze, Inputs, ModelOptions, ModelsOptions
from bertscope.commands.output import DetailedOutputOptions
from bertscope.commands.registry import command, numbers
from bertscope.commands.run_options import ModelImplementation, Strategy
from bertscope.errors import SelectionError
from bertscope.render import flops as renderer
from bertscope.reports.flops import FlopsReport
from bertscope.run_config import NONE, RunConfig

EXAMPLES = """
  bertscope flops bert-large-zh --seq 512
  bertscope flops bert-base-uncased --mode training --checkpointing full
  bertscope flops bert-base-chinese --convention calflops --attention eager
  bertscope flops --seq 128,256,512 --batch 1,8,32 --depth 1
  bertscope flops bert-tiny --operators
  bertscope flops bert-tiny bert-mini --seq 128,512 --format csv
"""
_COMBINED = "if several, one row for each combination"


@command(place=30, examples=EXAMPLES, short_help="Count the FLOPs of a forward pass or a training step.")
def flops(
    *,
    batch: Annotated[str, typer.Option("--batch", "-b", metavar="N[,N...]", help=f"Batch sizes; {_COMBINED}.")] = "1",
    seq: Annotated[
        str, typer.Option("--seq", "-s", metavar="N[,N...]", help=f"Sequence lengths; {_COMBINED}.")
    ] = "128",
    mode: Annotated[
        Literal["inference", "training"],
        typer.Option(help="A forward pass, or a forward and a backward pass; the optimizer step is not counted."),
    ] = "inference",
    checkpointing: Strategy = RunConfig.checkpointing,
    model: ModelsOptions,
    implementation: ModelImplementation = RunConfig.model_implementation,
    freeze: Freeze = None,
    inputs: Inputs = None,
    depth: Annotated[
        int | None, typer.Option("--depth", "-d", min=0, metavar="N", help="The largest depth of the rows.")
    ] = None,
    operators: Annotated[bool, typer.Option("--operators", help="List every operator instead of the modules.")] = False,
    convention: Annotated[
        Literal["torch", "macs", "calflops", "fvcore", "electra", "palm"] | None,
        typer.Option(help="Show the total under every convention, this one first."),
    ] = None,
    out: DetailedOutputOptions,
) -> None:
    """Count the FLOPs of a forward pass or a training step, per module.

    The operators are those that torch dispatches on the meta device, for backward and recomputation too.
    One multiply-add is 2 FLOPs; matrix products and elementwise work have separate columns. Several models are one
    row each.
    """
    batches, seqs = numbers("--batch", batch), numbers("--seq", seq)
    if checkpointing != NONE and mode != "training":
        raise SelectionError("--checkpointing concerns the backward pass; add --mode training")
    model.only_one({"--operators": operators, "--convention": convention is not None})

    def report_of(one: ModelOptions) -> FlopsReport:
        """Return the report of one model."""
        source = one.found()
        from bertscope.analyses.flops.sweep import FlopsRun, flops_model

        run = FlopsRun(
            source=source, mode=mode, checkpointing=checkpointing, freeze=tuple(freeze or ()),
            model_implementation=implementation, inputs=tuple(inputs or ()),
        )  # fmt: skip
        report = flops_model(run, batches, seqs)
        if depth is None:
            return report
        return replace(report, rows=tuple(row for row in report.rows if row.depth <= depth))

    reports = model.each(report_of)
    if convention is not None and out.fmt == "table":
        (report,) = reports
        if convention not in {item.name for item in report.conventions}:
            raise SelectionError(f"the convention {convention} does not apply to this model in this mode")
        out.show(report, SimpleNamespace(table=partial(renderer.convention, name=convention)))
    else:
        out.show_all(reports, renderer.operators if operators else renderer)
