"""`bertscope tree`."""

from __future__ import annotations

from typing import Annotated

import typer

from bertscope.commands import model_options, run_options
from bertscope.commands.model_options import ModelOptions, traced_shapes
from bertscope.commands.output import Format, Output, show
from bertscope.commands.registry import command

EPILOG = """\b
examples:
  bertscope tree --depth 3
  bertscope tree bert-large-zh --depth 4
  bertscope tree bert-base-uncased --shapes --batch 4096 --seq 512
  bertscope tree bert-base-uncased --unfold --format csv
"""


@command(place=20, epilog=EPILOG)
def tree(
    *,
    depth: Annotated[
        int | None, typer.Option("--depth", "-d", min=0, metavar="N", help="The largest depth; default: all.")
    ] = None,
    model: ModelOptions,
    freeze: model_options.Freeze = None,
    unfold: Annotated[bool, typer.Option("--unfold", help="Show equal layers one by one.")] = False,
    shapes: model_options.Shapes = False,
    batch: run_options.Batch = 1,
    seq: run_options.Seq = 128,
    fmt: Format = "table",
    output: Output = None,
) -> None:
    """Show the module tree with parameters and shares.

    Every row sums its module and all below it, so the totals are the same at every depth. Numbers
    such as 3-6 are torchinfo's: the sixth module at depth 3.
    """
    source, built = model.built(freeze)
    from bertscope.analyses.params.tree import tree as analyse
    from bertscope.render import tree as renderer

    found = traced_shapes(source, shapes, batch, seq)
    report = analyse(built, depth=depth, name=source.name, folded=not unfold, shapes=found)
    show(report, renderer, fmt, output)
