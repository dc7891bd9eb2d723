"""`bertscope print`."""

from __future__ import annotations

from bertscope.commands import options
from bertscope.commands.building import build_model
from bertscope.commands.output import write

EPILOG = """\b
examples:
  bertscope print
  bertscope print bert-base-uncased
  bertscope print bert-base-uncased --architecture BertForSequenceClassification
  bertscope print bert-base-cased --attention eager
"""


def print_model(
    model: options.Model = options.DEFAULT_MODEL,
    architecture: options.Architecture = None,
    attention: options.Attention = None,
    pooler: options.Pooler = None,
    download: options.Download = False,
    output: options.Output = None,
) -> None:
    """Print the model as PyTorch prints it.

    With the sdpa kernel the attention shows as BertSdpaSelfAttention, with eager as BertSelfAttention.
    """
    _, built = build_model(model, architecture, attention, pooler, download=download)
    write(f"{built}\n", output)
