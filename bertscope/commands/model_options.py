"""Options that select a model and change it, and those for the sizes of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from bertscope.commands.output import note
from bertscope.commands.project import project
from bertscope.config import ARCHITECTURES, LORA_EXAMPLE, LORA_RULES
from bertscope.errors import BertscopeError, SelectionError
from bertscope.frozen import dataclass
from bertscope.settings.code_names import CodeName
from bertscope.settings.run_config import RunConfig
from bertscope.sources.building import built_for_counting
from bertscope.sources.find import DEFAULT_MODEL, find
from bertscope.sources.model_source import ModelSource
from bertscope.sources.presets import preset_paths
from bertscope.torch_import import load_meta_kernels, without_meta_kernels

if TYPE_CHECKING:
    from torch import nn


Result = TypeVar("Result")


def complete_model() -> list[str]:
    """Return the names of all presets; the shell completes file names itself if none matches."""
    return list(preset_paths())


Model = Annotated[
    str,
    typer.Argument(
        metavar="[MODEL]",
        help="A preset's name, its name on the Hugging Face hub, a preset file (.yaml), a config.json, a folder or a "
        "checkpoint with one, an adapter folder of peft, a model in the Hugging Face cache, or module:attribute or "
        "file.py:attribute of your own code.",
        autocompletion=complete_model,
    ),
]
OtherModels = Annotated[
    list[str],
    typer.Argument(metavar="[MODEL...]", help="Further models, one row for each.", autocompletion=complete_model),
]
Batch = Annotated[int, typer.Option("--batch", "-b", metavar="N", help="The batch size.", rich_help_panel="common")]
Seq = Annotated[
    int | None,
    typer.Option(
        "--seq", "-s", metavar="N", rich_help_panel="common",
        help=f"The sequence length. [default: {RunConfig.seq}, or what the model takes]",
    ),
]  # fmt: skip
Architecture = Annotated[
    str | None,
    typer.Option(
        "--architecture", "-a", metavar="CLASS", autocompletion=lambda: list(ARCHITECTURES), rich_help_panel="model",
        help=f"The class to build instead of the model's own: {', '.join(ARCHITECTURES)}.",
    ),
]  # fmt: skip
Attention = Annotated[
    Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3"] | None,
    typer.Option(help="The attention kernel instead of the model's own.", rich_help_panel="model"),
]
Pooler = Annotated[
    bool | None,
    typer.Option("--pooler/--no-pooler", help="BertModel with or without its pooler.", rich_help_panel="model"),
]
LoraText = Annotated[
    str | None,
    typer.Option(
        "--lora", metavar="KEY=VALUE[,...]", rich_help_panel="common",
        help=f"LoRA adapters as of peft, such as {LORA_EXAMPLE}; keys: {', '.join(LORA_RULES)}.",
    ),
]  # fmt: skip
Freeze = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Freeze parameters: a glob ('*.bias') or whole parts of a path ('embeddings', 'encoder.layer.0'). "
        "Repeatable.",
        rich_help_panel="loop",
    ),
]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="NAME=SHAPE:DTYPE",
        help="The shape and dtype of an input of forward, such as pixel_values=Bx3x224x224:float32, or batch.image=... "
        "in a dictionary; B is --batch and S is --seq. Repeatable.",
        rich_help_panel="sizes",
    ),
]
Shapes = Annotated[
    bool, typer.Option("--shapes", help="Show input and output shapes at --batch and --seq.", rich_help_panel="sizes")
]
Download = Annotated[
    bool,
    typer.Option("--download", help="Download a missing model from the Hugging Face hub.", rich_help_panel="model"),
]


AllowCode = Annotated[
    bool,
    typer.Option("--allow-code", help="Import the code (module:attribute) that a file names.", rich_help_panel="model"),
]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """MODEL and the options that change it, under the names that `find` and `load` take."""

    model: Model = DEFAULT_MODEL
    architecture: Architecture = None
    attention: Attention = None
    add_pooling_layer: Pooler = None
    lora: LoraText = None
    download: Download = False

    def found(self) -> ModelSource:
        """Return the source that MODEL names; print its note, if it has one."""
        source = self._found()
        for notice in source.notice.splitlines():
            note(notice)
        return source

    def _found(self) -> ModelSource:
        """Return the source; the class that pyproject.toml sets is for BERTs only."""
        own = project()
        if own is None or own.architecture != self.architecture or not own.architecture:
            return find(**self._own())
        source = find(**self._own() | {"architecture": None})
        return source.with_options(architecture=own.architecture) if source.bert_config else source

    def _own(self) -> dict[str, Any]:
        """Return the options of one model, whose name was typed."""
        return {field.name: getattr(self, field.name) for field in fields(ModelOptions)} | {
            "model": CodeName(self.model)
        }

    def built(self, freeze_patterns: list[str] | None = None) -> tuple[ModelSource, nn.Module]:
        """Return the source that MODEL names, and its model on meta."""
        source = self.found()
        if source.bert_config:
            without_meta_kernels()
        else:  # what else a model runs to build itself is not known
            load_meta_kernels()
        from bertscope.analyses.modules.totals import freeze  # torch is imported from here on

        built = built_for_counting(source)
        freeze(built, freeze_patterns or ())
        return source, built


@dataclass(frozen=True, kw_only=True)
class ModelsOptions(ModelOptions):
    """One or several MODELs and the options that change each of them."""

    others: OtherModels = ()  # type: ignore[assignment]  # Typer reads the type, and a default cannot be a list

    def each(self, result_of: Callable[[ModelOptions], Result]) -> tuple[Result, ...]:
        """Return the result for each model; with several models an error names the one that it concerns.

        Several models are all found before the work for the first begins.
        """
        models = [ModelOptions(**self._own() | {"model": name}) for name in (self.model, *self.others)]
        for model in models if self.others else ():
            self._named(model, ModelOptions._found)
        return tuple(self._named(model, result_of) for model in models)

    def _named(self, model: ModelOptions, result_of: Callable[[ModelOptions], Result]) -> Result:
        """Return the result for a model; with several models an error names it."""
        try:
            return result_of(model)
        except BertscopeError as error:
            if self.others and model.model not in str(error):
                error.at(model.model)
            raise

    def only_one(self, options: Mapping[str, bool]) -> None:
        """Raise SelectionError if several models are given with an option for one; `options` says which are given."""
        for option, is_given in options.items():
            if is_given and self.others:
                number = 1 + len(self.others)
                raise SelectionError(f"{option} takes one MODEL; got {number}; give one, or leave {option} out")


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """Options for the sizes of the inputs."""

    batch: Batch = RunConfig.batch
    seq: Seq = None

    def length(self, *sources: ModelSource) -> int:
        """Return the sequence length; a default above the limit of a model is that limit."""
        from bertscope.api.asked import usual_length

        return usual_length(*sources) if self.seq is None else self.seq


@dataclass(frozen=True, kw_only=True)
class ShapeOptions(SizeOptions):
    """Options for the shapes of a forward pass."""

    shapes: Shapes = False
    inputs: Inputs = None

    def traced(self, source: ModelSource, *, is_needed: bool = False) -> dict[str, Any] | None:
        """Return the shapes of a forward pass on meta, if they are wanted or needed."""
        if not self.shapes and not is_needed:
            return None
        from bertscope.analyses.tracing.operators import source_shapes

        return source_shapes(source, self.batch, self.length(source), self.inputs or ())
