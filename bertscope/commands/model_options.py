"""The options that name a model and change it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertscope.commands.output import note
from bertscope.config import ARCHITECTURES
from bertscope.errors import SelectionError
from bertscope.sources.find import DEFAULT_MODEL, ModelSource, find, load
from bertscope.sources.other_models import OtherSource
from bertscope.sources.presets import Source, preset_paths

if TYPE_CHECKING:
    from torch import nn


def complete_model(incomplete: str) -> list[str]:
    """Preset names that begin with what is typed."""
    return [name for name in preset_paths() if name.startswith(incomplete)]


def complete_architecture(incomplete: str) -> list[str]:
    """Class names that begin with what is typed."""
    return [name for name in ARCHITECTURES if name.startswith(incomplete)]


# The shell completes file names by itself where no preset fits.
Model = Annotated[
    str,
    typer.Argument(
        metavar="[MODEL]",
        help="A preset's name, its name on the Hugging Face hub, a preset file (.yaml), a config.json, a folder or a "
        "checkpoint with one, a model in the Hugging Face cache, or module:attribute in your own code.",
        autocompletion=complete_model,
    ),
]
Architecture = Annotated[
    str | None,
    typer.Option(
        "--architecture",
        "-a",
        metavar="CLASS",
        help=f"The class to build instead of the model's own: {', '.join(ARCHITECTURES)}.",
        autocompletion=complete_architecture,
    ),
]
Attention = Annotated[
    Literal["eager", "sdpa"] | None, typer.Option(help="The attention kernel instead of the model's own.")
]
Pooler = Annotated[bool | None, typer.Option("--pooler/--no-pooler", help="BertModel with or without its pooler.")]
Freeze = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Freeze parameters: a glob ('*.bias') or whole parts of a path ('embeddings', 'encoder.layer.0'). "
        "Repeatable.",
    ),
]
Shapes = Annotated[bool, typer.Option("--shapes", help="Show what goes in and comes out, at --batch and --seq.")]
Download = Annotated[bool, typer.Option("--download", help="Fetch a model that is not here from the Hugging Face hub.")]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """MODEL and what the options change of it."""

    model: Model = DEFAULT_MODEL
    architecture: Architecture = None
    attention: Attention = None
    pooler: Pooler = None
    download: Download = False

    def found(self) -> ModelSource:
        """Return what MODEL names."""
        return found_model(self.model, self.architecture, self.attention, self.pooler, self.download)

    def loaded(self) -> Source:
        """Return the BERT that MODEL names; raises SourceError for another model."""
        return load(
            self.model, architecture=self.architecture, attention=self.attention, add_pooling_layer=self.pooler,
            download=self.download,
        )  # fmt: skip

    def built(self, freeze_patterns: list[str] | None = None) -> tuple[ModelSource, nn.Module]:
        """Return what MODEL names and its model on meta."""
        return build_model(
            self.model, self.architecture, self.attention, self.pooler, freeze_patterns, download=self.download
        )


def found_model(
    model: str,
    architecture: str | None,
    attention: str | None = None,
    pooler: bool | None = None,
    download: bool = False,
) -> ModelSource:
    """What MODEL names, with notes on what is passed over and whose code will run."""
    source = find(model, architecture=architecture, attention=attention, add_pooling_layer=pooler, download=download)
    if isinstance(source, OtherSource):
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
) -> tuple[ModelSource, nn.Module]:
    """The source that MODEL names and its model on meta, with what the options change; `changes` are its fields."""
    source = found_model(model, architecture, attention, pooler, download)
    if not isinstance(source, OtherSource):
        source = replace(source, config=replace(source.config, **(changes or {})))  # type: ignore[arg-type]
    elif settings := [name for name in changes or () if name != "attn_implementation"]:
        raise SelectionError(f"{source.name} is {source.family}; {', '.join(settings)} can be set for a BERT alone")
    from bertscope.analyses.modules.build import build_any
    from bertscope.analyses.modules.freeze import freeze  # torch is imported from here on

    built = build_any(source)
    freeze(built, freeze_patterns or ())
    return source, built


def traced_shapes(source: ModelSource, built: nn.Module, wanted: bool, batch: int, seq: int) -> dict[str, Any] | None:
    """The shapes of a forward pass on meta, if they are wanted."""
    if not wanted:
        return None
    from bertscope.analyses.flops.other import shapes_any

    return shapes_any(source, built, batch, seq)
