"""`bertscope print`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from bertscope.commands import options
from bertscope.commands.options import build_model
from bertscope.commands.output import show
from bertscope.render.tool import print_model as renderer
from bertscope.reports.tool import PrintReport

EPILOG = """\b
examples:
  bertscope print
  bertscope print bert-base-uncased
  bertscope print bert-base-uncased --architecture BertForSequenceClassification
  bertscope print bert-base-cased --attention eager --format markdown
"""


def print_model(
    model: options.Model = options.DEFAULT_MODEL,
    architecture: options.Architecture = None,
    attention: options.Attention = None,
    pooler: options.Pooler = None,
    fmt: Annotated[
        Literal["text", "json", "markdown"], typer.Option("--format", "-f", help="As it is, or wrapped in a page.")
    ] = "text",
    download: options.Download = False,
    output: options.Output = None,
) -> None:
    """Print the model as PyTorch prints it.

    With the sdpa kernel the attention shows as BertSdpaSelfAttention, with eager as BertSelfAttention.
    """
    source, built = build_model(model, architecture, attention, pooler, download=download)
    from bertscope.analyses.modules.totals import subject

    show(PrintReport(subject=subject(built, source.name), text=f"{built}\n"), renderer, fmt, output)
