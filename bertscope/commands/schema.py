"""`bertscope schema`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from bertscope.commands.output import output_option, show, write
from bertscope.commands.registry import command
from bertscope.errors import SelectionError
from bertscope.render.tool import schemas as renderer
from bertscope.reports import json as report_json
from bertscope.units import json_text

EXAMPLES = """
  bertscope schema
  bertscope schema count
  bertscope schema memory --output memory.schema.json
"""


@command(place=170, examples=EXAMPLES, short_help="Print the JSON Schema of the output of --format json.")
def schema(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="[KIND]",
            help="A kind of report: count, flops, memory ...; default: list the kinds.",
            autocompletion=lambda: list(report_json.report_classes()),
        ),
    ] = None,
    fmt: Annotated[
        Literal["table", "json", "csv", "markdown"] | None,
        typer.Option("--format", "-f", help="The format of the list; a schema is always JSON."),
    ] = None,
    output: Annotated[Path | None, output_option("JSON (.json) or a table (.txt)")] = None,
) -> None:
    """Print the JSON Schema (draft 2020-12) of the output of --format json, or list the kinds of report.

    It is generated from the classes of the reports, so it matches the installed version.
    """  # fmt: skip
    if kind is None:
        show(report_json.schemas(), renderer, fmt or "table", output)
    elif fmt not in (None, "json"):
        raise SelectionError(f"a schema is JSON; leave --format {fmt} out, or leave KIND out for the list")
    else:
        write(json_text(report_json.schema(kind)), output)
