"""`bertscope tree`."""

from typing import Annotated

import typer

from bertscope.commands.model_options import Freeze, Inputs, ModelOptions, Shapes, traced_shapes
from bertscope.commands.output import OutputOptions
from bertscope.commands.registry import command
from bertscope.commands.run_options import SizeOptions
from bertscope.render import tree as renderer

EXAMPLES = """
  bertscope tree --depth 3
  bertscope tree bert-large-zh --depth 4
  bertscope tree bert-base-uncased --shapes --batch 4096 --seq 512
  bertscope tree bert-base-uncased --unfold --format csv
"""


@command(place=20, examples=EXAMPLES)
def tree(
    *,
    depth: Annotated[
        int | None, typer.Option("--depth", "-d", min=0, metavar="N", help="The largest depth; default: all.")
    ] = None,
    model: ModelOptions,
    freeze: Freeze = None,
    unfold: Annotated[bool, typer.Option("--unfold", help="Show equal layers one by one.")] = False,
    shapes: Shapes = False,
    sizes: SizeOptions,
    inputs: Inputs = None,
    out: OutputOptions,
) -> None:
    """Show the module tree with parameters and shares.

    Every row sums its module and all below it, so the totals are the same at every depth. A number
    such as 3-6 means the sixth module at depth 3, as in torchinfo.
    """
    source, built = model.built(freeze)
    from bertscope.analyses.params.tree import tree as analyse

    found = traced_shapes(source, shapes, sizes.batch, sizes.seq, inputs)
    report = analyse(built, depth=depth, name=source.name, folded=not unfold, shapes=found)
    out.show(report, renderer)
