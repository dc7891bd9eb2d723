"""`bertscope convert`."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from bertscope.commands.model_options import Download, complete_model
from bertscope.commands.output import note, output_option, write
from bertscope.commands.registry import command
from bertscope.errors import SelectionError
from bertscope.sources.find import load

EXAMPLES = """
  bertscope convert bert-base-cased
  bertscope convert my-bert.yaml --lossless --output config.json
  bertscope convert config.json
  bertscope convert config.json --output my-bert.yaml
"""
_SUFFIXES = {".json": "json", ".yaml": "yaml", ".yml": "yaml"}


@command(examples=EXAMPLES)
def convert(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A preset's name or file (.yaml), a config.json, or a folder with one.",
            autocompletion=complete_model,
        ),
    ],
    to: Annotated[
        Literal["json", "yaml"] | None,
        typer.Option(help="The format to write; by default json for a preset, yaml for a config.json."),
    ] = None,
    output: Annotated[
        Path | None,
        output_option(
            "json (.json) and yaml (.yaml)",
            text="Write to FILE instead of stdout; a preset that exists gets the values and keeps its comments.",
        ),
    ] = None,
    lossless: Annotated[
        bool,
        typer.Option("--lossless", help='Add to a config.json, under "bertscope", the keys that only a preset has.'),
    ] = False,
    download: Download = False,
) -> None:
    """Convert a preset to a config.json, or a config.json to a preset.

    Members of a config.json that do not affect a BERT are in the preset under 'extra'. A config.json that is written
    with --lossless has the keys that only a preset has too (description, hub_names, add_pooling_layer, expected).
    """
    from bertscope.sources.convert import converted, direction, left_out, updated

    source = load(model, download=download)
    wanted = direction(source, to)
    if output is not None and _SUFFIXES.get(output.suffix, wanted) != wanted:
        raise SelectionError(f"{output} has the ending of the other format; what is written is {wanted}")
    if output is not None and wanted == "yaml" and os.path.isfile(output):
        write(updated(source, output), output)
        note(f"{output} was there: its values are those of {source.path} now; comments and 'expected' stay")
    else:
        write(converted(source, wanted, lossless=lossless), output)
        if wanted == "json" and not lossless and not source.add_pooling_layer:
            note("a config.json has no member for add_pooling_layer: false, so it describes the model with its pooler; "
                 "--lossless adds it")  # fmt: skip
        elif wanted == "json" and not lossless and (keys := left_out(source)):
            note(f"the config.json leaves out {', '.join(keys)} of the preset; --lossless adds them")
