"""`bertscope print`."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from bertscope.commands.model_options import ModelOptions
from bertscope.commands.output import note, output_option, show
from bertscope.commands.registry import command
from bertscope.config import MAX_BUILT_LAYERS
from bertscope.reports.tool import PrintReport

EXAMPLES = """
  bertscope print
  bertscope print bert-base-uncased
  bertscope print bert-base-uncased --architecture BertForSequenceClassification
  bertscope print bert-base-cased --attention eager --format markdown
"""
_NEWER = "elementwise_affine=True, bias=True)"  # how a newer torch ends the print of a LayerNorm


@command(examples=EXAMPLES)
def print_model(
    *,
    model: ModelOptions,
    fmt: Annotated[
        Literal["text", "json", "markdown"],
        typer.Option("--format", "-f", help="Plain text, JSON or Markdown.", rich_help_panel="common"),
    ] = "text",
    output: Annotated[Path | None, output_option("text (.txt), json and markdown (.md)")] = None,
) -> None:
    """Print the model as PyTorch prints it.

    With the sdpa kernel the attention is printed as BertSdpaSelfAttention, with eager as BertSelfAttention. A preset
    may set the kernel that is printed (printed_attention); --attention is stronger.
    """
    printed = getattr(model.found(), "printed_attention", None)
    source, built = replace(model, attention=model.attention or printed).built()
    from bertscope.analyses.modules.totals import subject

    text = f"{built}\n"
    if source.layers > MAX_BUILT_LAYERS:  # two are built
        text = text.replace("(0-1): 2 x", f"(0-{source.layers - 1}): {source.layers} x", 1)
    report = PrintReport(subject=subject(built, source.name), text=text)
    show(report, fmt, output)
    if source.bert_config and _NEWER in report.text:
        torch = report.subject.torch_version
        note(f"torch {torch} ends the line of each LayerNorm with ', bias=True', which older versions of torch do not")
