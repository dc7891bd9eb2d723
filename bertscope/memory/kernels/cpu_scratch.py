"""Temporary memory of CPU kernels, which a dispatch mode does not see."""

from math import prod
from typing import Any

from bertscope.memory.kernels.scratch_rules import (
    LEAST_OF_BLAS,
    MATRICES,
    PRODUCT,
    Scratch,
    onednn_scratchpad_bytes,
)
from bertscope.torch_access import has_bf16_products, operator_name, torch

# Kernel -> number of its first operands that it calls contiguous() on.
_WANT_ORDER = {
    "embedding": 2,
    "embedding_dense_backward": 2,
    "_softmax": 1,
    "_log_softmax": 1,
    "_softmax_backward_data": 2,
    "_log_softmax_backward_data": 2,
    "native_layer_norm": 1,
    "native_layer_norm_backward": 2,
}
_ELEMENTWISE = ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_")
_FP32_BYTES = 4
_QUERY_BLOCKS, _KEY_BLOCK = ((768, 256), (192, 64), (0, 32)), 512  # least length of queries -> queries of a block
_NUMBER_BYTES = 8  # of a Python number as a tensor: a double or an integer of 64 bits


def cpu_scratch(operator: Any, args: Any) -> int | Scratch:
    """Return the temporary bytes that a CPU kernel allocates."""
    aten, name = torch.ops.aten, operator_name(operator)
    if name in _ELEMENTWISE:
        return _promoted_bytes(args)
    if name in MATRICES:
        return _product_scratch(*(args[place] for place in MATRICES[name]))
    if operator in (aten.mean.dim, aten.mean.default):
        # The CPU computes a mean of 16-bit values from a copy in fp32.
        return 4 * args[0].numel() if args[0].dtype in (torch.bfloat16, torch.float16) else 0
    if name == "_safe_softmax":
        # Two masks and a zero: which scores are -inf, and which rows have no other ones (TransformerHelper.cpp).
        scores, dim = args[:2]
        masks = scores.numel() + scores.numel() // max(scores.shape[dim], 1) + scores.itemsize
        return int(masks if scores.is_contiguous() else max(masks, scores.nbytes))
    if name == "native_layer_norm_backward" and any(args[7][1:]):
        # Each thread sums up the gradients of weight and bias: LayerNormBackwardKernelImplInternal.
        sums = 2 * torch.get_num_threads() * prod(args[2]) * args[1].itemsize
        return int(sums) + contiguous_bytes(operator, args)
    if operator is aten._scaled_dot_product_flash_attention_for_cpu.default:
        # Each thread takes scores, their maxima and sums, and the result, for a block of queries: cpu_flash_attention
        # in FlashAttentionKernel.cpp. All are fp32; for 16 bits a copy of the scores comes with them.
        query, (queries, keys) = args[0], _attention_block(*args[:2])
        scores_bytes = queries * keys * (_FP32_BYTES + (query.itemsize if query.itemsize < _FP32_BYTES else 0))
        return int(torch.get_num_threads() * (scores_bytes + queries * (2 + query.shape[-1]) * _FP32_BYTES))
    if operator is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return _attention_backward_bytes(*args[:3])
    if name == "_reduce_scatter_base_":  # gloo reduces a copy: reduce_scatter_tensor_coalesced of ProcessGroupGloo.cpp
        return int(args[1].nbytes)
    return contiguous_bytes(operator, args)


def _promoted_bytes(args: Any) -> int:
    """Return the bytes of operands copied to the common dtype, the only one that a CPU elementwise kernel reads.

    A number becomes a tensor, and a copy of it that has the common dtype. Source: promote_inputs_to_common_dtype of
    TensorIterator; CUDA kernels need no copies.
    """
    if len(args) < 2 or not isinstance(args[0], torch.Tensor):
        return 0
    first, second = args[:2]
    common = _common_dtype(first, second)
    if not isinstance(second, torch.Tensor):
        return _NUMBER_BYTES + (common.itemsize if common not in (torch.float64, torch.int64) else 0)
    return sum(tensor.numel() * common.itemsize for tensor in (first, second) if tensor.dtype != common)


def _common_dtype(first: torch.Tensor, second: Any) -> torch.dtype:
    """Return torch.result_type of two operands; for the most frequent ones without a call of the dispatcher."""
    if not isinstance(second, torch.Tensor):
        is_real = isinstance(second, (int, float))
        return first.dtype if is_real and first.dtype.is_floating_point else torch.result_type(first, second)
    if first.dim() and second.dim():
        return torch.promote_types(first.dtype, second.dtype)
    return torch.result_type(first, second)


def _attention_backward_bytes(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> int:
    """Return the bytes of the scores and of their gradients of each thread, of a row of sums, and of a copy.

    The gradient is copied if its heads do not lie side by side. In 16 bits, oneDNN may compute the products that add
    to the gradients of query, key and value, with a factor of 4 bytes. The sums and oneDNN's scratchpad are those of
    one thread, as torch's profiler sees no other. Source: cpu_flash_attention_backward, as above.
    """
    (queries, keys), width = _attention_block(query, key), query.shape[-1]
    scores = 2 * queries * keys * (_FP32_BYTES + (query.itemsize if query.itemsize < _FP32_BYTES else 0))
    copied = 0 if gradient.transpose(1, 2).is_contiguous() else gradient.numel() * gradient.itemsize
    threads, product = torch.get_num_threads(), 0
    if query.dtype is torch.bfloat16 and has_bf16_products():
        sizes = (keys, width, queries, 1), (queries, width, keys, 0)  # the first product has a transposed left matrix
        product = max(onednn_scratchpad_bytes(1, *size, threads) for size in sizes)
    sums = queries * _FP32_BYTES + (product + _FP32_BYTES if product else 0)
    return threads * scores + sums + copied


def _attention_block(query: torch.Tensor, key: torch.Tensor) -> tuple[int, int]:
    """Return the numbers of queries and of keys that a thread takes at one time."""
    length = query.shape[-2]
    most = next(block for least, block in _QUERY_BLOCKS if length >= least)
    return min(most, length), min(_KEY_BLOCK, key.shape[-2])


def contiguous_bytes(operator: Any, args: Any) -> int:
    """Return the bytes of contiguous copies, which some kernels make of their operands on any device."""
    taken = _WANT_ORDER.get(operator_name(operator), 0)
    given = [arg for arg in args[:taken] if isinstance(arg, torch.Tensor)]
    return sum(tensor.numel() * tensor.itemsize for tensor in given if not tensor.is_contiguous())


# ---- products of bf16 matrices ----


def _product_scratch(left: torch.Tensor, right: torch.Tensor) -> int | Scratch:
    """Return the temporary bytes of a product of two matrices, or of two batches of matrices.

    oneDNN computes it, with a scratchpad (scratch_rules.py). The bytes are exact for CPUs with AVX-512 for bf16 and
    without AMX. On other CPUs, and in fp16, only the copies that torch makes are counted. Source of which products
    oneDNN computes: aten/src/ATen/native/mkldnn/Matmul.cpp and LinearAlgebra.cpp in torch 2.13.
    """
    batch, rows, depth, columns = prod(left.shape[:-2]), *left.shape[-2:], right.shape[-1]
    is_batched = left.dim() == 3

    def is_read(part: torch.Tensor) -> bool:
        is_dense = part.is_contiguous() or part.transpose(-2, -1).is_contiguous()
        return is_dense if is_batched else is_read_by_blas(part)

    is_transposed = is_read(left) and left.stride(-1) != 1 and not (is_batched and depth == 1)
    if columns == 1 and not is_batched:  # torch computes the transposed result
        rows, columns = 1, rows
    plain = sum(prod(part.shape[-2:]) * part.itemsize for part in (left, right) if not is_read_by_blas(part))
    if not (left.dtype is torch.bfloat16 and has_bf16_products()):
        return 0 if is_batched and rows * depth * columns < LEAST_OF_BLAS else plain
    copied = sum(part.numel() * part.itemsize for part in (left, right) if not is_read(part))
    sizes = batch, rows, columns, depth, int(is_transposed), torch.get_num_threads()
    return Scratch(PRODUCT, (*sizes, copied, plain, int(is_batched)))


def is_read_by_blas(given: torch.Tensor) -> bool:
    """Return False for a matrix whose rows or columns BLAS cannot read, such as the expanded gradient of a sum.

    It is copied: on a CPU one matrix of a batch after the other, on CUDA the whole batch. Sources: addmm_impl_cpu_ and
    bmm_out_or_baddbmm_ of LinearAlgebra.cpp; prepare_matrix_for_cublas of cuda/Blas.cpp.
    """
    (rows, columns), (row, column) = given.shape[-2:], given.stride()[-2:]
    return (column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows))
