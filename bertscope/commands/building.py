"""From the options of a command to a model on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bertscope.commands.output import note
from bertscope.sources import Source, load

if TYPE_CHECKING:
    from bertscope.model import BertPreTrainedModel


def build_model(
    model: str,
    architecture: str | None,
    attention: str | None,
    pooler: bool | None,
    freeze_patterns: list[str] | None = None,
    changes: Mapping[str, object] | None = None,
) -> tuple[Source, BertPreTrainedModel]:
    """The source that MODEL names and its model on meta, with what the options change; `changes` are its fields."""
    source = load(model, architecture=architecture, attention=attention, add_pooling_layer=pooler)
    source = replace(source, config=replace(source.config, **(changes or {})))  # type: ignore[arg-type]
    if source.config.ignored:
        ignored = source.config.ignored
        note(f"ignored, since it does not shape a BERT: {', '.join(ignored)}")
    from bertscope.analyses.count import freeze  # torch is imported from here on
    from bertscope.model import build

    built = build(source.config, source.architecture, add_pooling_layer=source.add_pooling_layer)
    freeze(built, freeze_patterns or ())
    return source, built


def traced_shapes(built: BertPreTrainedModel, wanted: bool, batch: int, seq: int) -> dict[str, Any] | None:
    """The shapes of a forward pass on meta, if they are wanted."""
    if not wanted:
        return None
    from bertscope.analyses.shapes import shapes

    return shapes(built.eval(), batch, seq)
