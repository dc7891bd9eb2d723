"""`bertscope convert`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from bertscope.commands import model_options
from bertscope.commands.output import note, write
from bertscope.commands.registry import command
from bertscope.errors import SelectionError
from bertscope.sources.find import load

EPILOG = """\b
examples:
  bertscope convert bert-base-cased
  bertscope convert my-bert.yaml --output config.json
  bertscope convert config.json
  bertscope convert config.json --output my-bert.yaml
"""
_SUFFIXES = {".json": "json", ".yaml": "yaml", ".yml": "yaml"}


@command(place=160, epilog=EPILOG, short_help="Turn a preset into a config.json, or the other way round.")
def convert(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A preset's name or file (.yaml), a config.json, or a folder with one.",
            autocompletion=model_options.complete_model,
        ),
    ],
    to: Annotated[
        Literal["json", "yaml"] | None,
        typer.Option(help="What to write; a config.json for a preset, and a preset for a config.json."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write to FILE instead of stdout; a preset that exists gets the values and keeps its comments.",
        ),
    ] = None,
    download: model_options.Download = False,
) -> None:
    """Turn a preset into a config.json, or a config.json into a preset, without loss either way.

    What only a preset says stands in the config.json under "bertscope"; members of a config.json that shape
    no BERT stand in the preset under 'extra'.
    """  # fmt: skip
    from bertscope.sources.convert import converted, direction, updated

    source = load(model, download=download)
    wanted = direction(source, to)
    if output is not None and _SUFFIXES.get(output.suffix, wanted) != wanted:
        raise SelectionError(f"{output} has the ending of the other format; what is written is {wanted}")
    if output is not None and wanted == "yaml" and os.path.isfile(output):
        write(updated(source, output), output)
        note(f"{output} was there: its values are those of {source.path} now; comments and 'expected' stay")
    else:
        write(converted(source, wanted), output)
