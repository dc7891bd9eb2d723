"""Temporary memory of CPU kernels, which a dispatch mode does not see."""

from typing import Any

from bertscope.analyses.memory.kernels.cpu_convolutions import (
    convolution_backward_scratch_bytes,
    convolution_scratch_bytes,
)
from bertscope.torch_access import operator_name, torch

# Kernel -> number of its first operands that it calls contiguous() on.
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
    """Return the temporary bytes that a CPU kernel allocates; those of oneDNN are unknown and left out."""
    aten = torch.ops.aten
    if operator in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor):
        return _promoted_bytes(args)
    if operator in (aten.mean.dim, aten.mean.default):
        # The CPU computes a mean of 16-bit values from a copy in fp32.
        return 4 * args[0].numel() if args[0].dtype in (torch.bfloat16, torch.float16) else 0
    if operator is aten.convolution.default:
        return convolution_scratch_bytes(args)
    if operator is aten.convolution_backward.default:
        return convolution_backward_scratch_bytes(args)
    return contiguous_bytes(operator, args)


def _promoted_bytes(args: Any) -> int:
    """Return the bytes of operands copied to the common dtype, the only one that a CPU elementwise kernel reads.

    Source: promote_inputs_to_common_dtype of TensorIterator; CUDA kernels need no copies.
    """
    given = [arg for arg in args[:2] if isinstance(arg, torch.Tensor)]
    if len({tensor.dtype for tensor in given}) < 2:
        return 0
    common = torch.result_type(*given)
    return sum(tensor.numel() * common.itemsize for tensor in given if tensor.dtype != common)


def contiguous_bytes(operator: Any, args: Any) -> int:
    """Return the bytes of contiguous copies, which some kernels make of their operands on any device."""
    taken = _WANT_ORDER.get(operator_name(operator), 0)
    given = [arg for arg in args[:taken] if isinstance(arg, torch.Tensor)]
    return sum(tensor.numel() * tensor.itemsize for tensor in given if not tensor.is_contiguous())
