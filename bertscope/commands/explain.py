"""`bertscope explain`."""

from typing import Annotated, Literal

import typer

from bertscope.commands.model_options import Inputs, ModelOptions, SizeOptions
from bertscope.commands.output import OutputOptions
from bertscope.commands.registry import command

EXAMPLES = """
  bertscope explain bert-large-zh
  bertscope explain bert-large-zh Transformer-0-FeedForward
  bertscope explain bert-base-cased encoder.layer.3 --naming tf
  bertscope explain bert-base-uncased outputs --seq 512
  bertscope explain bert-base-uncased config
  bertscope explain bert-large-zh encoder.layer.0.attention.self
  bertscope explain bert-large-zh --lang zh
  bertscope explain bert-tiny encoder --lora r=8,target=query+value
"""


@command(examples=EXAMPLES)
def explain(
    *,
    naming: Annotated[
        Literal["hf", "tf", "keras"] | None,
        typer.Option(help="BERT: show Hugging Face, TensorFlow and Keras names side by side, this one first."),
    ] = None,
    model: ModelOptions,
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="[PATH]",
            help="A step or a part: embeddings, encoder.layer.3, Transformer-0-FeedForward ...; or a section of a "
            "BERT: config, inputs, outputs, caches, positions, checkpointing.",
        ),
    ] = None,
    sizes: SizeOptions,
    inputs: Inputs = None,
    lang: Annotated[Literal["en", "zh"], typer.Option(help="The language of the text.")] = "en",
    out: OutputOptions,
) -> None:
    """Explain a model step by step: inputs, outputs, parameters and FLOPs as formulas.

    The steps of a model that is no BERT, or that has adapters, are the modules that own parameters or compute matrix
    products. The sums compare the formulas with the counts of the built model. Sections on the configuration, inputs
    and outputs of a BERT, on caches, relative positions and checkpointing follow, with their shapes at --batch and
    --seq.
    """
    source = model.found()
    if naming:
        source.require("--naming")
    from bertscope.analyses.explain.steps import explain as analyse

    report = analyse(source, path, batch=sizes.batch, seq=sizes.length(source), inputs=inputs or ())
    out.show(report, naming=naming, lang=lang)
