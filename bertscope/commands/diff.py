"""`bertscope diff`."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from bertscope.checkpoints.reading import Checkpoint, read_checkpoint
from bertscope.commands.model_options import (
    Architecture,
    Attention,
    Download,
    LoraText,
    ModelOptions,
    Pooler,
    SizeOptions,
    complete_model,
)
from bertscope.commands.output import OutputOptions
from bertscope.commands.registry import OneOf, command
from bertscope.errors import SelectionError
from bertscope.frozen import dataclass
from bertscope.settings.run_config import RunConfig
from bertscope.sources.find import stored_alone, weights_path
from bertscope.sources.model_source import ModelSource
from bertscope.units import PRECISIONS

if TYPE_CHECKING:
    from bertscope.reports.checkpoint import VerifyReport

EXAMPLES = """
  bertscope diff bert-base-cased bert-base-uncased
  bertscope diff bert-base-uncased bert-large-uncased --architecture BertModel --seq 512
  bertscope diff my-bert.yaml bert-tiny --exit-code
  bertscope diff ./my-bert
  bertscope diff bert-tiny ./my-bert/model.safetensors
  bertscope diff bert-tiny ./my-bert --architecture BertModel --allow unexpected
  bertscope diff ./my-bert/config.json ./my-bert --dtype fp32 --format json
  bertscope diff bert-tiny ./my-bert/model.safetensors --strip-prefix auto
exit codes: 0 the checkpoint fits, 1 it does not, 2 a file cannot be read
"""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """The options of a comparison with a checkpoint."""

    dtype: Annotated[
        str | None,
        OneOf(PRECISIONS),
        typer.Option(help="The dtype of a checkpoint's floating-point tensors instead of that in the config.json."),
    ] = None
    allow: Annotated[
        list[str] | None,
        typer.Option(
            metavar="missing|unexpected|dtype",
            help="Report this difference of a checkpoint without failing. Repeatable.",
            autocompletion=lambda: ["missing", "unexpected", "dtype"],
        ),
    ] = None
    strip_prefix: Annotated[
        str | None,
        typer.Option(
            metavar="PREFIX|auto",
            help="Leave this prefix of a checkpoint's names out, such as module. or _orig_mod.; auto finds it.",
        ),
    ] = None

    def are_given(self) -> bool:
        """Return True if one of the options is given."""
        return bool(self.dtype or self.allow or self.strip_prefix is not None)

    def report(self, source: ModelSource, checkpoint: Checkpoint) -> "VerifyReport":
        """Return the comparison of a model with a checkpoint."""
        from bertscope.analyses.verify import verify

        return verify(source, checkpoint, dtype=self.dtype, allow=self.allow or (), strip_prefix=self.strip_prefix)


@command(examples=EXAMPLES)
def diff(
    *,
    a: Annotated[str, typer.Argument(metavar="A", help="A model, as for count.", autocompletion=complete_model)],
    b: Annotated[
        str | None,
        typer.Argument(
            metavar="[B]",
            help="Another model, or a checkpoint: a file with tensors as for count, an index, or a folder with one and "
            "no config.json; default: the weights of A.",
            autocompletion=complete_model,
        ),
    ] = None,
    weights: CheckpointOptions,
    architecture: Architecture = None,
    attention: Attention = None,
    pooler: Pooler = None,
    lora: LoraText = None,
    sizes: SizeOptions,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit 1 if two models differ.")] = False,
    download: Download = False,
    out: OutputOptions,
) -> int:
    """Compare two models, or a model with a checkpoint.

    Of two models: settings, parameters added, removed or changed in shape, totals and FLOPs. Equal changes of
    neighbouring layers are one row. The options that change a model apply to both. Two files with tensors
    are compared by their headers.

    Of a model and a checkpoint's header: missing, unexpected, shapes, dtypes, ties, buffers, bytes. No weight is
    loaded, no pickle is run. Names of old checkpoints (TensorFlow's gamma and beta for a LayerNorm's weight and bias,
    bert. in front or not) are understood. The report accounts for every byte of the file. A folder with weights and a
    config.json is a model; it is a checkpoint with --dtype, --allow or --strip-prefix, and without B.
    """
    changed = ModelOptions(
        architecture=architecture, attention=attention, add_pooling_layer=pooler, lora=lora, download=download
    )
    of_models = {
        "--attention": attention is not None,
        "--lora": lora is not None,
        "--batch": sizes.batch != RunConfig.batch,
        "--seq": sizes.seq is not None,
    }
    one, other = stored_alone(a), stored_alone(b)
    if b is None or weights.are_given() or (one is None) != (other is None):
        _refuse(of_models | {"--exit-code": exit_code}, "a checkpoint: its header is compared (exit code 1: no fit)")
        name, stored = (b, one) if b and one and not other else (a, other if b else one)
        stored = stored or read_checkpoint(weights_path(b or a, download=download))  # before torch is imported
        checked = weights.report(replace(changed, model=name).found(), stored)
        out.show(checked)
        return 0 if checked.fits else 1
    if one and other:
        of_models |= {"--architecture": architecture is not None, "--no-pooler": pooler is not None}
        _refuse(of_models, "two files with tensors: their headers are compared")
    from bertscope.analyses.page import diff as analyse

    sides = one or replace(changed, model=a).found(), other or replace(changed, model=b).found()
    length = sizes.length(*(side for side in sides if not isinstance(side, Checkpoint)))
    report = analyse(*sides, batch=sizes.batch, seq=length)
    out.show(report)
    return 1 if exit_code and not report.is_empty else 0


def _refuse(options: Mapping[str, bool], sides: str) -> None:
    """Raise SelectionError for an option without an effect."""
    for option, is_given in options.items():
        if is_given:
            raise SelectionError(f"{option} has no effect with {sides}; leave it out")
