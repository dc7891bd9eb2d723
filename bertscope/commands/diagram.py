"""`bertscope diagram`."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bertscope.commands.model_options import Architecture, Download, Inputs, Model, ModelOptions, Pooler, SizeOptions
from bertscope.commands.output import note, output_option, show
from bertscope.commands.registry import command
from bertscope.errors import SelectionError
from bertscope.frozen import dataclass
from bertscope.sources.find import DEFAULT_MODEL
from bertscope.sources.model_source import ModelSource

EXAMPLES = """
  bertscope diagram
  bertscope diagram bert-base-uncased --class BertAttention
  bertscope diagram --kind forward bert-large-zh
  bertscope diagram --kind forward bert-base-uncased encoder.layer.0
  bertscope diagram --kind forward bert-base-uncased encoder.layer.0.attention.self
  bertscope diagram --kind forward bert-tiny encoder.layer.0.attention.self --position-embedding relative_key_query
  bertscope diagram --kind forward bert-tiny encoder.layer.0 --cross-attention --cache 16
  bertscope diagram --kind tree bert-base-uncased --depth 2 --output tree.svg
"""
_STEP_BY_STEP = "eager"  # the kernel of which each step is a tensor
_SUFFIXES = {".mmd": "mermaid", ".mermaid": "mermaid", ".dot": "dot", ".gv": "dot", ".svg": "svg", ".html": "html",
             ".json": "json"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class DrawnModel:
    """The model to draw, and the options that change it."""

    model: Model = DEFAULT_MODEL
    architecture: Architecture = None
    attention: Annotated[
        Literal["eager", "sdpa"] | None,
        typer.Option(
            help="forward: the attention kernel: eager, drawn step by step, or sdpa, drawn as one box.",
            show_default=_STEP_BY_STEP,
        ),
    ] = None
    pooler: Pooler = None
    position_embedding: Annotated[
        Literal["absolute", "relative_key", "relative_key_query"] | None,
        typer.Option(help="The type of position embedding instead of the model's."),
    ] = None
    cross_attention: Annotated[
        bool, typer.Option("--cross-attention", help="Build the model as a decoder with cross-attention.")
    ] = False
    download: Download = False

    def found(self) -> ModelSource:
        """Return the source that MODEL names; raises an error for an option of BERTs only."""
        source = ModelOptions(model=self.model, architecture=self.architecture, add_pooling_layer=self.pooler,
                              download=self.download).found()  # fmt: skip
        wanted = {"--cross-attention": self.cross_attention, "--position-embedding": self.position_embedding,
                  "--attention": self.attention}  # fmt: skip
        for option in filter(wanted.get, wanted):
            source.require(option)
        return source

    def changed(self, source: ModelSource) -> ModelSource:
        """Return the source with the fields that the options change."""
        changes: dict[str, object] = {"attn_implementation": self.attention or _STEP_BY_STEP}
        if self.cross_attention:
            changes |= {"is_decoder": True, "add_cross_attention": True}
        if self.position_embedding:
            changes["position_embedding_type"] = self.position_embedding
        return source.with_fields(changes)


@dataclass(frozen=True, kw_only=True)
class DrawnOptions(SizeOptions):
    """Options for what is drawn of the model."""

    kind: Annotated[
        Literal["class", "forward", "tree"] | None,
        typer.Option(
            "--kind",
            "-k",
            help="The classes (default of a BERT), the dataflow of a forward pass, or the tree of modules "
            "(default of any other model).",
        ),
    ] = None
    class_name: Annotated[
        str | None, typer.Option("--class", metavar="NAME", help="class: draw only this class, its bases and parts.")
    ] = None
    implementation: Annotated[
        Literal["bertscope", "transformers"] | None,
        typer.Option(
            help="class: the package of the classes (transformers needs the extra of that name).",
            show_default="bertscope",
        ),
    ] = None
    nn_module: Annotated[
        bool, typer.Option("--nn-module", help="class: draw torch.nn.Module and its arrow to every class too.")
    ] = False
    depth: Annotated[
        int | None, typer.Option("--depth", "-d", min=1, metavar="N", help="forward, tree: number of levels to open.")
    ] = None
    cache: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="forward: cached positions; default: --seq for a decoder's self-attention, else 0.",
        ),
    ] = None
    mask: Annotated[bool, typer.Option("--mask/--no-mask", help="forward: with an attention mask.")] = True
    head_mask: Annotated[
        bool | None,
        typer.Option(
            "--head-mask/--no-head-mask", help="forward: with a head mask; default: only for a self-attention."
        ),
    ] = None
    direction: Annotated[
        Literal["LR", "TB"] | None,
        typer.Option(help="The direction; default: LR for tree, TB for forward."),
    ] = None
    inputs: Inputs = None


@command(examples=EXAMPLES)
def diagram(
    *,
    model: DrawnModel,
    path: Annotated[
        str, typer.Argument(metavar="[PATH]", help="A module: encoder, encoder.layer.0, encoder.layer.0.attention.self")
    ] = "",
    drawn: DrawnOptions,
    fmt: Annotated[
        Literal["mermaid", "dot", "svg", "html", "json"] | None,
        typer.Option(
            "--format",
            "-f",
            help="The format; by default that of the suffix of --output, else mermaid.",
            rich_help_panel="common",
        ),
    ] = None,
    output: Annotated[Path | None, output_option("mermaid (.mmd), dot, svg, html and json", ".svg", ".html")] = None,
) -> None:
    """Draw a model: its classes, the dataflow of a forward pass with the actual shapes, or its modules.

    The diagram comes from the imported classes and a run on the meta device. Equal layers are drawn once. The diagram
    of a self-attention (PATH encoder.layer.0.attention.self) has a mask, a head mask and, in a decoder, a cache.
    """
    if drawn.class_name and (drawn.kind not in (None, "class") or path):
        raise SelectionError("--class draws the classes around one, so it goes with --kind class and without PATH")
    own = model.found()
    source = model.changed(own)
    kind = drawn.kind or ("class" if drawn.class_name or source.bert_config else "tree")
    from bertscope.analyses.diagram.forward import Given
    from bertscope.api.explain import diagram as drawn_of

    seq = drawn.length(*[source] * (kind == "forward"))
    given = Given(batch=drawn.batch, seq=seq, cache=drawn.cache, mask=drawn.mask, head_mask=drawn.head_mask,
                  input=tuple(drawn.inputs or ()))  # fmt: skip
    classes: Any = {"around": drawn.class_name, "implementation": drawn.implementation, "nn_module": drawn.nn_module}
    with source.confined():
        report = drawn_of(source, kind, path, depth=drawn.depth, direction=drawn.direction,
                          given=given if kind == "forward" or given != Given() else None, **classes)  # fmt: skip
    suffix = output.suffix.lower() if output else ""
    show(report, fmt or _SUFFIXES.get(suffix, "mermaid"), output)
    kernel = own.bert_config.attn_implementation if own.bert_config else _STEP_BY_STEP
    if kind == "forward" and model.attention is None and kernel != _STEP_BY_STEP:
        note(f"attention is drawn in steps ({_STEP_BY_STEP}); --attention {kernel} draws the model's, as one box")
