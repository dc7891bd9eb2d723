"""What the host's kernels take only while they run, unseen by dispatch."""

from __future__ import annotations

from typing import Any

from bertscope.torch_access import operator_name, torch

_PROMOTING = ("add", "sub", "mul", "div")
# Kernels that call contiguous() on so many of their first operands.
_WANT_ORDER = {
    "embedding_dense_backward": 1,
    "_softmax": 1,
    "_log_softmax": 1,
    "_softmax_backward_data": 2,
    "_log_softmax_backward_data": 2,
    "native_layer_norm": 1,
    "native_layer_norm_backward": 2,
}


def cpu_scratch_bytes(operator: Any, args: Any) -> int:
    """Bytes that the host's kernel takes in passing. Out of sight, and hence left out, is what oneDNN takes."""
    aten = torch.ops.aten
    if operator in {getattr(aten, name).Tensor for name in _PROMOTING}:
        return _promoted_bytes(args)
    if operator in (aten.mean.dim, aten.mean.default):
        return _mean_bytes(args)
    return contiguous_bytes(operator, args)


def _promoted_bytes(args: Any) -> int:
    """Copies in the common dtype: on the host, unlike on CUDA, elementwise kernels read one dtype alone.

    TensorIterator, promote_inputs_to_common_dtype.
    """
    given = [arg for arg in args[:2] if isinstance(arg, torch.Tensor)]
    if len({tensor.dtype for tensor in given}) < 2:
        return 0
    common = torch.result_type(*given)
    return sum(tensor.numel() * common.itemsize for tensor in given if tensor.dtype != common)


def _mean_bytes(args: Any) -> int:
    """The host averages 16 bits over a copy in fp32."""
    is_half = args[0].dtype in (torch.bfloat16, torch.float16)
    return 4 * args[0].numel() if is_half else 0


def contiguous_bytes(operator: Any, args: Any) -> int:
    """Copies of operands whose elements do not lie in order, for kernels that want them so on any device."""
    taken = _WANT_ORDER.get(operator_name(operator), 0)
    given = [arg for arg in args[:taken] if isinstance(arg, torch.Tensor)]
    return sum(tensor.numel() * tensor.itemsize for tensor in given if not tensor.is_contiguous())
