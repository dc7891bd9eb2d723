"""`bertscope verify`."""

from typing import Annotated

import typer

from bertscope.checkpoints.reading import read_checkpoint
from bertscope.commands.model_options import Architecture, Download, ModelOptions, Pooler, complete_model
from bertscope.commands.output import OutputOptions
from bertscope.commands.registry import OneOf, command
from bertscope.sources.find import weights_path
from bertscope.units import PRECISIONS

EXAMPLES = """
  bertscope verify ./my-bert
  bertscope verify bert-tiny ./my-bert/model.safetensors
  bertscope verify bert-tiny ./my-bert --architecture BertModel --allow unexpected
  bertscope verify ./my-bert/config.json ./my-bert --dtype fp32 --format json
  bertscope verify bert-tiny ./my-bert/model.safetensors --strip-prefix auto
exit codes: 0 the checkpoint fits, 1 it does not, 2 a file cannot be read
"""


@command(examples=EXAMPLES)
def verify(
    *,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="The configuration, as for count.", autocompletion=complete_model),
    ],
    checkpoint: Annotated[
        str | None,
        typer.Argument(
            metavar="[CHECKPOINT]",
            help="A file with tensors as for count, an index, a folder with one, or a model in the Hugging Face cache; "
            "default: that of MODEL.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        OneOf(PRECISIONS),
        typer.Option(help="The dtype of floating-point tensors instead of that in the config.json."),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="missing|unexpected|dtype",
            help="Report this difference without failing. Repeatable.",
            autocompletion=lambda: ["missing", "unexpected", "dtype"],
        ),
    ] = None,
    strip_prefix: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX|auto",
            help="Leave this prefix of the checkpoint's names out, such as module. or _orig_mod.; auto finds it.",
        ),
    ] = None,
    architecture: Architecture = None,
    pooler: Pooler = None,
    download: Download = False,
    out: OutputOptions,
) -> int:
    """Compare a model with a checkpoint's header: missing, unexpected, shapes, dtypes, ties, buffers, bytes.

    No weight is loaded, no pickle is run. Names of old checkpoints (TensorFlow's gamma and beta for a LayerNorm's
    weight and bias, bert. in front or not) are understood. The report accounts for every byte of the file.
    """
    stored = read_checkpoint(weights_path(checkpoint or model, download=download))  # before torch is imported
    source = ModelOptions(model=model, architecture=architecture, add_pooling_layer=pooler, download=download).found()
    from bertscope.analyses.verify import verify as analyse

    report = analyse(source, stored, dtype=dtype, allow=allow or (), strip_prefix=strip_prefix)
    out.show(report)
    return 0 if report.fits else 1
