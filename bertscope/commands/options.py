"""The arguments and options that commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertscope.commands.output import check_outputs, note
from bertscope.commands.process import Unexpected
from bertscope.config import ARCHITECTURES
from bertscope.render.console import choose_color
from bertscope.run_config import STRATEGIES
from bertscope.sources.find import DEFAULT_MODEL, find
from bertscope.sources.model_source import ModelSource
from bertscope.sources.presets import preset_paths

if TYPE_CHECKING:
    from torch import nn

EXAMPLE_STRATEGIES = ("none", "full", "every-2", "layers:0-5", "selective")


def complete_model(incomplete: str) -> list[str]:
    """Preset names that begin with what is typed."""
    return [name for name in preset_paths() if name.startswith(incomplete)]


def complete_architecture(incomplete: str) -> list[str]:
    """Class names that begin with what is typed."""
    return [name for name in ARCHITECTURES if name.startswith(incomplete)]


def complete_checkpointing(incomplete: str) -> list[str]:
    """Strategies that begin with what is typed; the numbers in two of them are examples."""
    return [name for name in EXAMPLE_STRATEGIES if name.startswith(incomplete)]


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
Checkpointing = Annotated[
    str,
    typer.Option(
        metavar="STRATEGY",
        help=f"With training, which layers are recomputed: {STRATEGIES}.",
        autocompletion=complete_checkpointing,
    ),
]
Download = Annotated[bool, typer.Option("--download", help="Fetch a model that is not here from the Hugging Face hub.")]
Batch = Annotated[int, typer.Option("--batch", "-b", metavar="N", help="The batch size.")]
Seq = Annotated[int, typer.Option("--seq", "-s", metavar="N", help="The sequence length.")]
Format = Annotated[Literal["table", "json", "csv", "markdown"], typer.Option("--format", "-f", help="How to show it.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Write to FILE, whole or not at all, instead of stdout."),
]
Color = Annotated[
    Literal["auto", "always", "never"] | None,
    typer.Option(help="Colour: by the terminal, NO_COLOR and FORCE_COLOR (auto), or as said here.", show_default=False),
]


Debug = Annotated[
    bool, typer.Option("--debug", help="Show the traceback of an error, as BERTSCOPE_DEBUG=1 does.", show_default=False)
]


def with_shared_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with `--color` and `--debug`, which `bertscope` itself takes before the command.

    Before the command starts, check that every file it will write can be written: each option of type Path names one.
    """

    @functools.wraps(command)
    def shared(*, color: Literal["auto", "always", "never"] | None = None, debug: bool = False, **given: Any) -> Any:
        if color is not None:
            choose_color(color)
        check_outputs([value for value in given.values() if isinstance(value, Path)])
        try:
            return command(
                **given
            )  # `bertscope.commands.process` reads --debug, since an error may come before it is parsed
        except (EOFError, OSError) as error:  # Typer makes exit code 1 of them, which is an answer
            raise Unexpected from error

    signature = inspect.signature(command, eval_str=True)
    own = [
        inspect.Parameter("color", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Color),
        inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug),
    ]
    shared.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *own])  # type: ignore[attr-defined]
    shared.__annotations__ = command.__annotations__ | {"color": Color, "debug": Debug}
    return shared


__all__ = [
    "DEFAULT_MODEL",
    "Architecture",
    "Attention",
    "Batch",
    "Checkpointing",
    "Color",
    "Debug",
    "Download",
    "Format",
    "Freeze",
    "Model",
    "Output",
    "Pooler",
    "Seq",
    "Shapes",
    "with_shared_options",
]


def found_model(
    model: str,
    architecture: str | None,
    attention: str | None = None,
    pooler: bool | None = None,
    download: bool = False,
) -> ModelSource:
    """What MODEL names, with notes on what is passed over and whose code will run."""
    source = find(model, architecture=architecture, attention=attention, add_pooling_layer=pooler, download=download)
    if source.notice:
        note(source.notice)
    return source


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
    source = found_model(model, architecture, attention, pooler, download).with_fields(changes or {})
    from bertscope.analyses.modules.freeze import freeze  # torch is imported from here on

    built = source.build()
    freeze(built, freeze_patterns or ())
    return source, built


def traced_shapes(source: ModelSource, wanted: bool, batch: int, seq: int) -> dict[str, Any] | None:
    """The shapes of a forward pass on meta, if they are wanted."""
    if not wanted:
        return None
    from bertscope.analyses.tracing.shapes import source_shapes

    return source_shapes(source, batch, seq)
