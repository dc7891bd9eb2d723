"""From the options of a command to a model on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bertscope.commands.output import note
from bertscope.errors import SelectionError
from bertscope.sources.find import AnyModel, find
from bertscope.sources.other_models import ForeignSource
from bertscope.sources.presets import Source

if TYPE_CHECKING:
    from torch import nn


def found_model(
    model: str,
    architecture: str | None,
    attention: str | None = None,
    pooler: bool | None = None,
    download: bool = False,
) -> AnyModel:
    """What MODEL names, with notes on what is passed over and whose code will run."""
    source = find(model, architecture=architecture, attention=attention, add_pooling_layer=pooler, download=download)
    if isinstance(source, ForeignSource):
        if source.origin == "factory":
            note(f"runs your code: imports {source.address.partition(':')[0]} and takes {source.address} from it")
    else:
        note_ignored(source)
    return source


def note_ignored(source: Source) -> None:
    """Says which fields of a configuration are passed over."""
    if source.config.ignored:
        note(f"ignored, since it does not shape a BERT: {', '.join(source.config.ignored)}")


def build_model(
    model: str,
    architecture: str | None,
    attention: str | None,
    pooler: bool | None,
    freeze_patterns: list[str] | None = None,
    changes: Mapping[str, object] | None = None,
    download: bool = False,
) -> tuple[AnyModel, nn.Module]:
    """The source that MODEL names and its model on meta, with what the options change; `changes` are its fields."""
    source = found_model(model, architecture, attention, pooler, download)
    if not isinstance(source, ForeignSource):
        source = replace(source, config=replace(source.config, **(changes or {})))  # type: ignore[arg-type]
    elif settings := [name for name in changes or () if name != "attn_implementation"]:
        raise SelectionError(f"{source.name} is {source.family}; {', '.join(settings)} can be set for a BERT alone")
    from bertscope.analyses.modules.build import build_any
    from bertscope.analyses.params.count import freeze  # torch is imported from here on

    built = build_any(source)
    freeze(built, freeze_patterns or ())
    return source, built


def traced_shapes(source: AnyModel, built: nn.Module, wanted: bool, batch: int, seq: int) -> dict[str, Any] | None:
    """The shapes of a forward pass on meta, if they are wanted."""
    if not wanted:
        return None
    from bertscope.analyses.flops.other import shapes_any

    return shapes_any(source, built, batch, seq)
