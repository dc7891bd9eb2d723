"""`bertscope tree`."""

import os
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertscope.commands.model_options import Freeze, ModelOptions, ShapeOptions
from bertscope.commands.output import DetailedOutputOptions, note, show
from bertscope.commands.registry import command
from bertscope.config import MAX_BUILT_LAYERS
from bertscope.errors import MissingExtraError, SelectionError
from bertscope.frozen import dataclass
from bertscope.render import torchinfo
from bertscope.reports.tool import PrintReport
from bertscope.sources.find import stored_alone
from bertscope.sources.model_source import ModelSource

if TYPE_CHECKING:
    from torch import nn

EXAMPLES = """
  bertscope tree --depth 3
  bertscope tree bert-base-cased --style torchinfo --shapes
  bertscope tree bert-tiny --style torchinfo --columns output_size,num_params,mult_adds
  bertscope tree bert-base-uncased --style torch --architecture BertForSequenceClassification
  bertscope tree bert-large-zh --depth 4
  bertscope tree bert-base-uncased --shapes --batch 4096 --seq 512
  bertscope tree bert-base-uncased --unfold --format csv
  bertscope tree ./my-bert/model.safetensors --depth 2
  bertscope tree bert-large-zh --interactive --shapes
"""
_NEWER = "elementwise_affine=True, bias=True)"  # how a newer torch ends the print of a LayerNorm


@dataclass(frozen=True, kw_only=True)
class StyleOptions:
    """The layout of the table."""

    style: Annotated[
        Literal["bertscope", "torchinfo"],
        typer.Option(
            help="The layout of the table: torchinfo's has its numbering, its totals and by default its depth, 3; with "
            "--shapes a row for each call of a module."
        ),
    ] = "bertscope"
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,...]",
            help=f"The columns of --style torchinfo, by its names: {', '.join(torchinfo.COLUMNS)}.",
        ),
    ] = None

    def chosen(self) -> list[str] | None:
        """Return the names of the columns; None for the usual ones. Raises SelectionError in the other style."""
        if self.columns is None:
            return None
        if self.style != "torchinfo":
            raise SelectionError("--columns are those of --style torchinfo; give it too, or leave --columns out")
        return [name.strip() for name in self.columns.split(",")]

    def needs_run(self) -> bool:
        """Return True if a chosen column needs a forward pass."""
        return not set(self.chosen() or ()).isdisjoint(torchinfo.OF_A_RUN)


@dataclass(frozen=True, kw_only=True)
class TreeStyleOptions(StyleOptions):
    """The layout of the tree, which may be PyTorch's own."""

    style: Annotated[
        Literal["bertscope", "torchinfo", "torch"],
        typer.Option(
            help="The layout: torchinfo's table has its numbering, its totals and by default its depth, 3; with "
            "--shapes a row for each call of a module. torch: the text of print(model) in PyTorch, for a preset with "
            "the attention kernel that it names (printed_attention), unless --attention is given."
        ),
    ] = "bertscope"  # type: ignore[assignment]  # more words


@command(examples=EXAMPLES)
def tree(
    *,
    depth: Annotated[
        int | None, typer.Option("--depth", "-d", min=0, metavar="N", help="The largest depth; default: all.")
    ] = None,
    interactive: Annotated[bool, typer.Option("--interactive", help="Browse the tree on the screen.")] = False,
    layout: TreeStyleOptions,
    model: ModelOptions,
    freeze: Freeze = None,
    unfold: Annotated[bool, typer.Option("--unfold", help="Show equal layers one by one.")] = False,
    run: ShapeOptions,
    out: DetailedOutputOptions,
) -> None:
    """Show the module tree with parameters and shares.

    Every row sums its module and all below it, so the totals are the same at every depth. A number
    such as 3-6 means the sixth module at depth 3, as in torchinfo.
    """
    if interactive:
        check_interactive(layout, out)
    if is_torchinfo := layout.style == "torchinfo":
        check_style(out, {})
    needs_run = layout.needs_run()
    options = {"--freeze": bool(freeze), "--shapes": run.shapes, "--unfold": unfold}
    given = {f"--style {layout.style}": layout.style != "bertscope", **options}
    if checkpoint := stored_alone(model.model, beside_config=False, **given):
        from bertscope.checkpoints.reading import stored_report

        if interactive:
            from bertscope.render.interactive import browse

            browse(stored_report(checkpoint, by="tree"), stored_report(checkpoint), depth)
            return
        out.show(stored_report(checkpoint, by="tree", depth=depth))
        return
    if layout.style == "torch":
        _print_as_torch(model, out, {"--depth": depth is not None, **options})
        return
    source, built = model.built(freeze)
    found = run.traced(source, is_needed=needs_run)
    if is_torchinfo:
        show_as_torchinfo(source, built, depth, layout.chosen(), out, found)
        return
    from bertscope.analyses.params import count
    from bertscope.analyses.params import tree as analyse

    if interactive:
        from bertscope.render.interactive import browse

        of_model: dict[str, Any] = {"name": source.name, "folded": not unfold, "shapes": found}
        browse(analyse(built, **of_model), count(built, by="parameter", **of_model), depth)
        return
    out.show(analyse(built, depth=depth, name=source.name, folded=not unfold, shapes=found))


def check_interactive(layout: StyleOptions, out: DetailedOutputOptions) -> None:
    """Raise an error if the tree cannot be browsed: other options of the output, no Textual, no terminal."""
    given = {"style": layout.style != "bertscope", "columns": layout.columns, "output": out.output}
    given |= {"format": out.fmt != "table", "verbose": out.verbose}
    for option in filter(given.get, given):
        raise SelectionError(f"--interactive shows the tree on the screen; leave --{option} out, or --interactive")
    if find_spec("textual") is None:
        raise MissingExtraError("--interactive", "interactive")
    if os.environ.get("TERM") == "dumb" or not all(map(os.isatty, range(3))):
        raise SelectionError("--interactive needs a terminal; 'bertscope tree' without it writes to a pipe")


def check_style(out: DetailedOutputOptions, options: Mapping[str, bool]) -> None:
    """Raise SelectionError for options that torchinfo's layout has no place for; `options` says which are given."""
    for option, is_given in {f"--format {out.fmt}": out.fmt != "table", **options}.items():
        if is_given:
            raise SelectionError(f"--style torchinfo is a table of types and parameters; leave {option} out")


def show_as_torchinfo(
    source: ModelSource,
    model: "nn.Module",
    depth: int | None,
    columns: list[str] | None,
    out: DetailedOutputOptions,
    shapes: Any = None,
) -> None:
    """Show the tree of a model in torchinfo's layout, and in a note the unique parameters if its total differs."""
    if source.layers > MAX_BUILT_LAYERS:
        raise SelectionError(f"--style torchinfo has a line for each of {source.layers:,} layers; leave it out")
    from bertscope.analyses.params import tree as analyse

    report = analyse(model, name=source.name, folded=False, shapes=shapes)
    out.show(report, view="torchinfo", columns=columns, depth=depth)
    totals = report.totals
    if totals.distinct_params != totals.layer_params:
        note(
            f"torchinfo counts a tied tensor at each use; the model has {totals.distinct_params:,} "
            f"unique parameters, {totals.param_bytes / 1e6:.2f} MB"
        )


def _print_as_torch(model: ModelOptions, out: DetailedOutputOptions, options: Mapping[str, bool]) -> None:
    """Show a model as PyTorch prints it; raises SelectionError for options that are given."""
    for option, is_given in options.items():
        if is_given:
            raise SelectionError(f"--style torch is the complete text of print(model); leave {option} out")
    printed = getattr(model.found(), "printed_attention", None)
    source, built = replace(model, attention=model.attention or printed).built()
    from bertscope.analyses.modules.totals import subject

    text = f"{built}\n"
    if source.layers > MAX_BUILT_LAYERS:  # two are built
        text = text.replace("(0-1): 2 x", f"(0-{source.layers - 1}): {source.layers} x", 1)
    report = PrintReport(subject=subject(built, source.name), text=text)
    show(report, "text" if out.fmt == "table" else out.fmt, out.output)
    if source.bert_config and _NEWER in report.text:
        version = report.subject.torch_version
        note(
            f"torch {version} ends the line of each LayerNorm with ', bias=True', which older versions of torch do not"
        )
