"""`bertscope presets`."""

from pathlib import Path
from typing import Annotated

import typer

from bertscope.commands.output import DetailedOutputOptions, note, write
from bertscope.commands.registry import command
from bertscope.errors import SelectionError, suggestion
from bertscope.reports.tool import PresetRow, PresetsReport
from bertscope.sources.presets import config_members, config_paths, member_of, preset_paths, read_preset
from bertscope.text_files import read_mapping
from bertscope.units import json_text

EXAMPLES = """
  bertscope presets
  bertscope presets --format json
  bertscope presets bert-base-cased --config
  bertscope presets bert-base-cased --config --output config.json
"""


@command(examples=EXAMPLES)
def presets(
    *,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="The only preset to list.",
            autocompletion=lambda: [*preset_paths(), *config_paths()],
        ),
    ] = None,
    config: Annotated[
        bool, typer.Option("--config", help="Print the config.json of preset NAME, as transformers reads it.")
    ] = False,
    out: DetailedOutputOptions,
) -> None:
    """List the presets with their counts, without importing torch."""
    paths = preset_paths() | config_paths()
    if name is not None and name not in paths:
        raise SelectionError(f"no preset {name[:60]!r}; {suggestion(name, paths)}")
    if config:
        if name is None:
            raise SelectionError(
                "--config prints the config.json of one preset; type 'bertscope presets NAME --config'"
            )
        _print_config(paths[name], out)
        return
    out.show(PresetsReport(rows=tuple(_row(path) for known, path in paths.items() if name in (None, known))))


def _print_config(path: Path, out: DetailedOutputOptions) -> None:
    """Write the config.json of a preset; a note says what it cannot express."""
    if out.fmt not in ("table", "json"):
        raise SelectionError(f"a config.json is JSON; leave --format {out.fmt} out")
    if out.output is not None and out.output.suffix not in ("", ".json"):
        raise SelectionError(f"{out.output.name}: --config writes .json")
    write(json_text(config_members(path)), out.output)
    if path.suffix != ".json" and not read_preset(path).add_pooling_layer:
        note("a config.json has no member for add_pooling_layer: false, so it describes the model with its pooler")


def _row(path: Path) -> PresetRow:
    """Return the row of a preset of bertscope, or of one that transformers builds."""
    if path.suffix != ".json":
        source = read_preset(path)
        return PresetRow(
            name=source.name,
            architecture=source.architecture,
            distinct_params=source.expected_params("distinct_params"),
            layer_params=source.expected_params("layer_params"),
            description=source.description,
            hub_names=source.hub_names,
            path=str(source.path),
        )
    entries = read_mapping(path)
    own = member_of(entries)
    counts = {item.key: item.value for item in own["expected"]}
    return PresetRow(
        name=path.stem, architecture=entries["architectures"].value[0], distinct_params=counts["distinct_params"],
        layer_params=counts["layer_params"], description=own["description"], hub_names=own["hub_names"], path=str(path),
    )  # fmt: skip
