"""What the host's kernels take only while they run, unseen by dispatch."""

from __future__ import annotations

from typing import Any

from bertscope._torch import torch

_PROMOTING = ("add", "sub", "mul", "div")


def scratch_bytes(operator: Any, args: Any) -> int:
    """Copies in the common dtype: on the host, unlike on CUDA, elementwise kernels read one dtype alone.

    TensorIterator, promote_inputs_to_common_dtype. Out of sight, and hence left out, is what oneDNN takes.
    """
    if operator not in {getattr(torch.ops.aten, name).Tensor for name in _PROMOTING}:
        return 0
    given = [arg for arg in args[:2] if isinstance(arg, torch.Tensor)]
    if len({tensor.dtype for tensor in given}) < 2:
        return 0
    common = torch.result_type(*given)
    return sum(tensor.numel() * common.itemsize for tensor in given if tensor.dtype != common)
