"""`bertscope schema`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from bertscope.commands.output import Output, show, write
from bertscope.commands.registry import command
from bertscope.errors import SelectionError
from bertscope.render.tool import schemas as renderer
from bertscope.units import json_text

EPILOG = """\b
examples:
  bertscope schema
  bertscope schema count
  bertscope schema memory --output memory.schema.json
"""


def complete_kind(incomplete: str) -> list[str]:
    """Return the kinds of report that begin with the typed text."""
    from bertscope.reports.json import report_classes

    return [kind for kind in report_classes() if kind.startswith(incomplete)]


@command(place=170, epilog=EPILOG, short_help="Print the JSON Schema of the output of --format json.")
def schema(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="[KIND]",
            help="A kind of report: count, flops, memory ...; the list without one.",
            autocompletion=complete_kind,
        ),
    ] = None,
    fmt: Annotated[
        Literal["table", "json", "csv", "markdown"] | None,
        typer.Option("--format", "-f", help="The format of the list; a schema is always JSON."),
    ] = None,
    output: Output = None,
) -> None:
    """Print the JSON Schema (draft 2020-12) of the output of --format json, or list the kinds of report.

    It is generated from the classes of the reports, so it matches the installed version.
    """  # fmt: skip
    from bertscope.reports.json import schema as made
    from bertscope.reports.json import schemas

    if kind is None:
        show(schemas(), renderer, fmt or "table", output)
        return
    if fmt not in (None, "json"):
        raise SelectionError(f"a schema is JSON; leave --format {fmt} out, or leave KIND out for the list")
    write(json_text(made(kind)), output)
