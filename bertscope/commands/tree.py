"""`bertscope tree`."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertscope.commands.model_options import Freeze, Inputs, ModelOptions, Shapes, traced_shapes
from bertscope.commands.output import OutputOptions, note
from bertscope.commands.registry import command
from bertscope.commands.run_options import SizeOptions
from bertscope.errors import SelectionError
from bertscope.render import torchinfo
from bertscope.render import tree as renderer
from bertscope.sources.model_source import ModelSource
from bertscope.units import count_text

if TYPE_CHECKING:
    from torch import nn

EXAMPLES = """
  bertscope tree --depth 3
  bertscope tree bert-base-cased --style torchinfo --shapes
  bertscope tree bert-large-zh --depth 4
  bertscope tree bert-base-uncased --shapes --batch 4096 --seq 512
  bertscope tree bert-base-uncased --unfold --format csv
"""
Style = Annotated[
    Literal["bertscope", "torchinfo"],
    typer.Option(
        help="The layout of the table: torchinfo's has its numbering, its totals and by default its depth, 3."
    ),
]


@command(place=20, examples=EXAMPLES)
def tree(
    *,
    depth: Annotated[
        int | None, typer.Option("--depth", "-d", min=0, metavar="N", help="The largest depth; default: all.")
    ] = None,
    style: Style = "bertscope",
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
    is_torchinfo = style == "torchinfo"
    if is_torchinfo:
        check_style(out, {})
    source, built = model.built(freeze)
    found = traced_shapes(source, shapes, sizes.batch, sizes.seq, inputs)
    if is_torchinfo:
        show_as_torchinfo(source, built, depth, out, found)
        return
    from bertscope.analyses.params.tree import tree as analyse

    report = analyse(built, depth=depth, name=source.name, folded=not unfold, shapes=found)
    out.show(report, renderer)


def check_style(out: OutputOptions, options: Mapping[str, bool]) -> None:
    """Raise SelectionError for options that torchinfo's layout has no place for; `options` says which are given."""
    for option, is_given in {f"--format {out.fmt}": out.fmt != "table", **options}.items():
        if is_given:
            raise SelectionError(f"--style torchinfo is a table of types and parameters; leave {option} out")


def show_as_torchinfo(
    source: ModelSource, model: "nn.Module", depth: int | None, out: OutputOptions, shapes: Any = None
) -> None:
    """Show the tree of a model in torchinfo's layout, and in a note the unique parameters if its total differs."""
    from bertscope.analyses.params.tree import tree as analyse

    report = analyse(model, name=source.name, folded=False, shapes=shapes)
    out.show(report, SimpleNamespace(table=torchinfo.table), depth=depth)
    totals = report.totals
    if totals.distinct_params != totals.layer_params:
        note(f"torchinfo counts a tied tensor at each use; the model has {count_text(totals.distinct_params)} unique "
             "parameters")  # fmt: skip
