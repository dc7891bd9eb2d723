"""`bertscope.flops`."""

from collections.abc import Sequence
from typing import Any

from bertscope.analyses.flops import count as counting
from bertscope.analyses.flops.sweep import FlopsRun, flops_model
from bertscope.api.given import Model, Size, built, inputs_of
from bertscope.errors import SelectionError
from bertscope.reports.flops import FlopsReport
from bertscope.run_config import NONE
from bertscope.sources.find import source_of
from bertscope.torch_access import torch


def flops(
    model: Model,
    inputs: Any = None,
    *,
    mode: str = "inference",
    name: str | None = None,
    batch: int = 1,
    seq: int = 128,
    checkpointing: str = NONE,
    freeze: Sequence[str] = (),
    input_size: Size | None = None,
    input_data: Any = None,
    dtypes: Sequence[torch.dtype] | None = None,
) -> FlopsReport:
    """Count the work of one run of any model; mode "training" adds the operators of the backward pass.

    A module runs with its `inputs` (`input_data` is another name of them): a tensor, a tuple, or a dictionary of
    keywords; `input_size` and `dtypes` describe them. Without inputs, and for any other model, they are derived from
    its forward at `batch` and `seq`; then layers of `checkpointing` are recomputed, and parameters that match `freeze`
    are not trained. The model runs on meta tensors, which compute and allocate nothing. One multiply-add counts as 2
    FLOPs in `matmul_flops`, as in torch.utils.flop_counter.

    >>> bertscope.flops("bert-base-cased", batch=1, seq=512)[""].forward.matmul_flops
    120044126208
    >>> report = bertscope.flops(torch.nn.Linear(3, 4), input_size=(10, 3))
    >>> report[""].forward.matmul_flops == 10 * 2 * 3 * 4
    True
    """
    given = inputs_of(inputs, input_size, input_data, dtypes)
    if given is not None:
        if checkpointing != NONE or freeze:
            raise SelectionError("checkpointing and freeze are for a run without inputs; a given module has its own")
        module, shown = built(model, name)
        return counting.flops(module, given, mode=mode, name=shown)
    if mode not in counting.MODES:
        raise SelectionError(f"mode must be one of {', '.join(counting.MODES)}; got {mode!r}")
    source = source_of(model, name=name)
    run = FlopsRun(source=source, mode=mode, checkpointing=checkpointing, freeze=tuple(freeze))
    return flops_model(run, (batch,), (seq,))
