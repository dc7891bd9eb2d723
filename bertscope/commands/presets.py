"""`bertscope presets`."""

from bertscope.commands.output import DetailedOutputOptions
from bertscope.commands.registry import command
from bertscope.reports.tool import PresetRow, PresetsReport
from bertscope.sources.presets import preset_paths, read_preset

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
    out.show(PresetsReport(rows=rows))
