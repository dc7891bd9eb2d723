"""`bertscope flops`."""

from dataclasses import replace
from typing import Annotated, Literal

import typer

from bertscope.commands.model_options import ModelOptions, ModelsOptions
from bertscope.commands.output import DetailedOutputOptions
from bertscope.commands.registry import command
from bertscope.commands.run_options import CommandSettings, Takes
from bertscope.errors import SelectionError
from bertscope.reports.flops import FlopsReport

EXAMPLES = """
  bertscope flops bert-large-zh --seq 512
  bertscope flops bert-base-uncased --mode training --checkpointing full
  bertscope flops bert-base-chinese --convention calflops --attention eager
  bertscope flops --seq 128,256,512 --batch 1,8,32 --depth 1
  bertscope flops bert-tiny --operators
  bertscope flops bert-tiny bert-mini --seq 128,512 --format csv
"""


@command(examples=EXAMPLES)
def flops(
    *,
    run: Annotated[CommandSettings, Takes(command="flops", compared=("batch", "seq"), has_file=False)],
    model: ModelsOptions,
    depth: Annotated[
        int | None, typer.Option("--depth", "-d", min=0, metavar="N", help="The largest depth of the rows.")
    ] = None,
    operators: Annotated[bool, typer.Option("--operators", help="List every operator instead of the modules.")] = False,
    convention: Annotated[
        Literal["torch", "macs", "calflops", "fvcore", "palm"] | None,
        typer.Option(help="Show the total under every convention, this one first."),
    ] = None,
    out: DetailedOutputOptions,
) -> None:
    """Count the FLOPs of a forward pass or a training step, per module.

    The operators are those that torch dispatches on the meta device, for backward and recomputation too.
    One multiply-add is 2 FLOPs; matrix products and elementwise work have separate columns. Several batches and lengths
    are one row for each combination, and several models one row each.
    """
    model.only_one({"--operators": operators, "--convention": convention is not None})

    def report_of(one: ModelOptions) -> FlopsReport:
        """Return the report of one model."""
        source = one.found()
        from bertscope.api import counts as counting

        report = counting.flops(source, _layers=run.layers)
        if depth is None:
            return report
        return replace(report, rows=tuple(row for row in report.rows if row.depth <= depth))

    reports = model.each(report_of)
    if convention is not None and out.fmt == "table":
        (report,) = reports
        if convention not in {item.name for item in report.conventions}:
            raise SelectionError(f"the convention {convention} does not apply to this model in this mode")
        out.show(report, view="convention", name=convention)
    else:
        out.show_all(reports, view="operators" if operators and not model.others else "")
