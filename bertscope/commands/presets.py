"""`bertscope presets`."""

from pathlib import Path

from bertscope.commands.output import DetailedOutputOptions
from bertscope.commands.registry import command
from bertscope.reports.tool import PresetRow, PresetsReport
from bertscope.sources.presets import config_paths, member_of, preset_paths, read_preset
from bertscope.text_files import read_mapping

EXAMPLES = """
  bertscope presets
  bertscope presets --format json
"""


@command(examples=EXAMPLES)
def presets(*, out: DetailedOutputOptions) -> None:
    """List the presets with their counts, without importing torch."""
    rows = tuple(
        PresetRow(
            name=source.name,
            architecture=source.architecture,
            distinct_params=source.expected_params("distinct_params"),
            layer_params=source.expected_params("layer_params"),
            description=source.description,
            hub_names=source.hub_names,
            path=str(source.path),
        )
        for source in map(read_preset, preset_paths().values())
    )
    out.show(PresetsReport(rows=(*rows, *map(_other, config_paths().values()))))


def _other(path: Path) -> PresetRow:
    """Return the row of a preset that transformers builds."""
    entries = read_mapping(path)
    own = member_of(entries)
    counts = {item.key: item.value for item in own["expected"]}
    return PresetRow(
        name=path.stem, architecture=entries["architectures"].value[0], distinct_params=counts["distinct_params"],
        layer_params=counts["layer_params"], description=own["description"], hub_names=own["hub_names"], path=str(path),
    )  # fmt: skip
