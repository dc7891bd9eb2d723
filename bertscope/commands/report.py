"""`bertscope report`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from bertscope.commands.model_options import ModelOptions, complete_model
from bertscope.commands.output import note, output_option, print_notes, progress_shown, show
from bertscope.commands.registry import command
from bertscope.commands.run_options import CommandSettings, Takes, WithBareCheckpointing
from bertscope.errors import SelectionError
from bertscope.settings.checkpointing import COMPARED

EXAMPLES = """
  bertscope report bert-large-zh -o report.html
  bertscope report bert-tiny --gpu t4 --precision autocast-fp16 -o t4.html
  bertscope report bert-base-uncased --compare bert-base-cased -o two.html
  bertscope report bert-tiny --batch 32 --seq 512 --budget 8GiB -o tiny.html
  bertscope report bert-tiny --format json --no-fit
"""


@command(examples=EXAMPLES, cls=WithBareCheckpointing)
def report(
    *,
    output: Annotated[
        Path | None, output_option("the page (.html) and json", ".html", text="The page, such as report.html.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A second model to show.", autocompletion=complete_model),
    ] = None,
    fit: Annotated[bool, typer.Option("--fit/--no-fit", help="With or without the fit table.")] = True,
    run: Annotated[
        CommandSettings,
        Takes(
            command="report",
            compared=("precision", "checkpointing"),
            usual={"checkpointing": f"{COMPARED}, or those that the model takes"},
        ),
    ],
    model: ModelOptions,
    fmt: Annotated[
        Literal["html", "json"],
        typer.Option("--format", "-f", help="The page, or the numbers on it.", rich_help_panel="common"),
    ] = "html",
) -> None:
    """Write everything about a model on one page that works offline: fit, parameters, FLOPs, memory, diagram.

    The page begins with the answer: if the step fits in the budget or on the GPU. It is one file with light and dark
    colours, for screen, print and phone; its tables can be sorted and searched. Each section names the command that
    gives its numbers.
    """
    if fmt == "html" and output is None:
        raise SelectionError("the page goes into a file; name it with -o report.html")
    sources = [replace(model, model=name).found() for name in (model.model, compare) if name]
    from bertscope.api import page

    with progress_shown():
        found = page.report(*sources, fit=fit, **run.keywords)
    print_notes(found.models[0].memory)
    show(found, fmt, output)
    if fmt == "html":
        note(f"the page is in {output}")
