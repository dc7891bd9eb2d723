"""`bertscope report`."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from bertscope.commands.model_options import Inputs, ModelOptions, complete_model
from bertscope.commands.output import Progress, note, show
from bertscope.commands.registry import command, size
from bertscope.errors import MissingExtraError, SelectionError

EXAMPLES = """
  bertscope report bert-large-zh -o report.html
  bertscope report bert-base-uncased --compare bert-base-cased -o two.html
  bertscope report bert-tiny --batch 32 --seq 512 --budget 8GiB -o tiny.html
  bertscope report bert-tiny --format json --no-fit
"""


@command(place=70, examples=EXAMPLES, short_help="Write everything about a model on one page.")
def report(
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The page, such as report.html.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A second model to show.", autocompletion=complete_model),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", "-b", metavar="N", min=1, help="The batch size.")] = 8,
    seq: Annotated[int, typer.Option("--seq", "-s", metavar="N", min=1, help="The sequence length.")] = 128,
    budget: Annotated[str, typer.Option(metavar="SIZE", help="The memory budget of the fit table.")] = "16GiB",
    fit: Annotated[bool, typer.Option("--fit/--no-fit", help="With or without the fit table.")] = True,
    inputs: Inputs = None,
    model: ModelOptions,
    fmt: Annotated[
        Literal["html", "json"], typer.Option("--format", "-f", help="The page, or the numbers on it.")
    ] = "html",
) -> None:  # fmt: skip
    """Write everything about a model on one page that works offline: parameters, FLOPs, memory, fit, diagram.

    The page is one file with light and dark colours, for screen, print and phone; its tables can be sorted and
    searched. Each section names the command that gives its numbers.
    """
    if fmt == "html":
        if output is None:
            raise SelectionError("the page goes into a file; name it with -o report.html")
        if find_spec("plotly") is None:
            raise MissingExtraError("report", "plot", otherwise="; --format json needs nothing")
    sources = [replace(model, model=name).found() for name in (model.model, compare) if name]
    from bertscope.analyses.page.report import page_report
    from bertscope.render.page import report as renderer

    limit = size("--budget", budget) if fit else None
    with Progress() as progress:
        found = page_report(sources, batch, seq, limit, progress, tuple(inputs or ()))
    show(found, renderer, fmt, output)
    if fmt == "html":
        note(f"the page is in {output}")
