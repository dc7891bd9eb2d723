"""`bertscope explain`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from bertscope.commands import model_options, run_options
from bertscope.commands.output import Format, Output, show, write
from bertscope.commands.registry import command
from bertscope.render.console import Target, stdout_target
from bertscope.sources.find import DEFAULT_MODEL, load

EPILOG = """\b
examples:
  bertscope explain bert-large-zh
  bertscope explain bert-large-zh Transformer-0-FeedForward
  bertscope explain bert-base-cased encoder.layer.3 --naming tf
  bertscope explain bert-large-zh --lang zh
"""


@command(place=80, epilog=EPILOG, short_help="Explain a model step by step, with formulas for every number.")
def explain(
    model: model_options.Model = DEFAULT_MODEL,
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="[PATH]", help="A step or a part: embeddings, encoder.layer.3, Transformer-0-FeedForward ..."
        ),
    ] = None,
    naming: Annotated[
        Literal["hf", "tf", "keras"] | None,
        typer.Option(help="Show the three vocabularies side by side, this one first."),
    ] = None,
    lang: Annotated[Literal["en", "zh"], typer.Option(help="The language of the sentences.")] = "en",
    architecture: model_options.Architecture = None,
    pooler: model_options.Pooler = None,
    batch: run_options.Batch = 1,
    seq: run_options.Seq = 128,
    download: model_options.Download = False,
    fmt: Format = "table",
    output: Output = None,
) -> None:
    """Explain a model step by step: inputs, outputs, parameters and FLOPs as formulas.

    The sums at the end compare the formulas with the counts of the built model.
    """
    source = load(model, architecture=architecture, add_pooling_layer=pooler, download=download)
    from bertscope.analyses.explain.steps import explain as analyse
    from bertscope.render import explain as renderer

    report = analyse(source, path, language=lang, batch=batch, seq=seq)
    if naming is not None and fmt == "table":
        write(renderer.table(report, Target() if output else stdout_target(), naming), output)
    else:
        show(report, renderer, fmt, output)
