"""`bertscope.flops`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bertscope.api.arguments import Model, built, inputs_of
from bertscope.api.requests import default_length, requested, resolved, with_settings
from bertscope.errors import SelectionError
from bertscope.reports.modules import FlopsReport
from bertscope.settings.request import Request
from bertscope.settings.run_config import INFERENCE, QUESTIONS, TRAINING
from bertscope.sources.find import source_of
from bertscope.tracing import flops as analysis

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertscope.settings.keywords import RunSettings


@with_settings
def flops(
    model: Model | Request, inputs: Any = None, *, name: str | None = None, **settings: Unpack[RunSettings]
) -> FlopsReport:
    """Count the work of one run of any model; mode "training" adds the operators of the backward pass.

    A module runs with its `inputs`: a tensor, a tuple, or a dictionary of keywords; `input_size` and `dtypes` describe
    them. Without inputs, and for any other model, they are derived from its forward at `batch` and `seq`, of which
    there may be several; then layers of `checkpointing` are recomputed, and parameters that match `freeze` are not
    trained. The model runs on meta tensors, which compute and allocate nothing. One multiply-add counts as 2 FLOPs in
    `matmul_flops`, as in torch.utils.flop_counter.

    >>> bertscope.flops("bert-base-cased", batch=1, seq=512)[""].forward.matmul_flops
    120044126208
    >>> report = bertscope.flops(torch.nn.Linear(3, 4), input_size=(10, 3))
    >>> report[""].forward.matmul_flops == 10 * 2 * 3 * 4
    True
    """
    given = inputs_of(inputs, settings)
    request = requested("flops", model, settings)
    if given is not None:
        if unused := sorted(request.named - {"mode"}):
            raise SelectionError(f"{unused[0]} is for a run without inputs; a given module has its own")
        module, shown = built(request.subject, name)
        ((run_config, _),) = resolved(request).points
        return analysis.flops(module, given, mode=run_config.mode, name=shown)
    source = source_of(request.subject, name=name)
    runs = request.resolved(**QUESTIONS["flops"].defaults, **default_length(request, source)).runs
    if runs[0].mode not in (INFERENCE, TRAINING):
        raise SelectionError(f"FLOPs are those of mode {INFERENCE} or {TRAINING}; got {runs[0].mode}")
    batches, seqs = (tuple(dict.fromkeys(getattr(run, key) for run in runs)) for key in ("batch", "seq"))
    return analysis.flops_model(analysis.FlopsRun(source=source, run=replace(runs[0], batch=1, seq=1)), batches, seqs)
