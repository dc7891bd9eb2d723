"""`bertscope diff`."""

from typing import Annotated

import typer

from bertscope.commands.model_options import (
    Architecture,
    Attention,
    Download,
    LoraText,
    ModelOptions,
    SizeOptions,
    complete_model,
)
from bertscope.commands.output import OutputOptions
from bertscope.commands.registry import command
from bertscope.sources.find import stored_alone

EXAMPLES = """
  bertscope diff bert-base-cased bert-base-uncased
  bertscope diff bert-base-uncased bert-large-uncased --architecture BertModel --seq 512
  bertscope diff my-bert.yaml bert-tiny --exit-code
  bertscope diff bert-tiny ./my-bert/model.safetensors
"""


@command(examples=EXAMPLES)
def diff(
    *,
    a: Annotated[str, typer.Argument(metavar="A", help="A model, as for count.", autocompletion=complete_model)],
    b: Annotated[str, typer.Argument(metavar="B", help="Another model.", autocompletion=complete_model)],
    architecture: Architecture = None,
    attention: Attention = None,
    lora: LoraText = None,
    sizes: SizeOptions,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit 1 if the two differ.")] = False,
    download: Download = False,
    out: OutputOptions,
) -> int:
    """Compare two models: settings, parameters added, removed or changed in shape, totals and FLOPs.

    Equal changes of neighbouring layers are one row. --architecture, --attention and --lora apply to
    both. A file with tensors is compared by its header.
    """
    one, other = (
        stored_alone(name)
        or ModelOptions(
            model=name, architecture=architecture, attention=attention, lora=lora, download=download
        ).found()
        for name in (a, b)
    )
    from bertscope.analyses.page import diff as analyse
    from bertscope.checkpoints.reading import Checkpoint

    models = [model for model in (one, other) if not isinstance(model, Checkpoint)]
    report = analyse(one, other, batch=sizes.batch, seq=sizes.length(*models))
    out.show(report)
    return 1 if exit_code and not report.is_empty else 0
