"""`bertscope.verify`."""

import os
from collections.abc import Iterable

from bertscope.analyses.checkpoint import verify as comparison
from bertscope.api.asked import Model
from bertscope.checkpoints.reading import Checkpoint, read_checkpoint
from bertscope.errors import SelectionError
from bertscope.reports.checkpoint import VerifyReport
from bertscope.sources.find import source_of, weights_path


def verify(
    model: Model,
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    *,
    dtype: str | None = None,
    allow: Iterable[str] = (),
    name: str | None = None,
) -> VerifyReport:
    """Compare a model with a checkpoint's header: it fits if it has exactly the model's tensors, shapes and dtypes.

    `checkpoint` is a file, an index, a folder with one, or a model in the Hugging Face cache; by default that of the
    model's path. `dtype` (fp32, bf16, fp16) is the expected one of floating-point tensors, by default that of the
    config.json, if any. `allow` lists the findings that are reported but not wrong: missing, unexpected, dtype.

    >>> bertscope.verify("my-bert").fits  # a folder with config.json and model.safetensors
    True
    >>> bertscope.verify(bertscope.load("bert-tiny", architecture="BertForMaskedLM"), "my-bert").fits
    False
    """
    if checkpoint is None:
        if not isinstance(model, (str, os.PathLike)):
            raise SelectionError("name the checkpoint: verify(model, 'model.safetensors')")
        checkpoint = model
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = read_checkpoint(weights_path(os.fspath(checkpoint)))
    return comparison.verify(source_of(model, name=name), checkpoint, dtype=dtype, allow=allow)
