"""Temporary memory of products of bf16 matrices on the CPU.

oneDNN computes them, with a scratchpad (scratch_rules.py). The bytes are exact for CPUs with AVX-512 for bf16 and
without AMX. On other CPUs, and in fp16, only the copies that torch makes are counted. Source of which products oneDNN
computes: aten/src/ATen/native/mkldnn/Matmul.cpp and LinearAlgebra.cpp in torch 2.13.
"""

from math import prod

from bertscope.analyses.memory.kernels.scratch_rules import LEAST_OF_BLAS, PRODUCT, Scratch, onednn_scratchpad_bytes
from bertscope.torch_access import has_bf16_products, torch

MATRICES = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}  # product -> places of its operands


def product_scratch(left: torch.Tensor, right: torch.Tensor) -> int | Scratch:
    """Return the temporary bytes of a product of two matrices, or of two batches of matrices."""
    batch, rows, depth, columns = prod(left.shape[:-2]), *left.shape[-2:], right.shape[-1]
    is_batched = left.dim() == 3
    is_read = _is_dense if is_batched else is_read_by_blas
    is_transposed = is_read(left) and left.stride(-1) != 1 and not (is_batched and depth == 1)
    if columns == 1 and not is_batched:  # torch computes the transposed result
        rows, columns = 1, rows
    plain = sum(prod(part.shape[-2:]) * part.itemsize for part in (left, right) if not is_read_by_blas(part))
    if not (left.dtype is torch.bfloat16 and has_bf16_products()):
        return 0 if is_batched and rows * depth * columns < LEAST_OF_BLAS else plain
    copied = sum(part.numel() * part.itemsize for part in (left, right) if not is_read(part))
    sizes = batch, rows, columns, depth, int(is_transposed), torch.get_num_threads()
    return Scratch(PRODUCT, (*sizes, copied, plain, int(is_batched)))


def scratchpad_bytes(dtype: torch.dtype, rows: int, columns: int, depth: int, *, is_transposed: bool = False) -> int:
    """Return the bytes of oneDNN's scratchpad for a product; 0 if other kernels compute it."""
    if dtype is not torch.bfloat16 or not has_bf16_products():
        return 0
    return onednn_scratchpad_bytes(1, rows, columns, depth, int(is_transposed), torch.get_num_threads())


def is_read_by_blas(given: torch.Tensor) -> bool:
    """Return False for a matrix whose rows or columns BLAS cannot read, such as the expanded gradient of a sum.

    It is copied: on a CPU one matrix of a batch after the other, on CUDA the whole batch. Sources: addmm_impl_cpu_ and
    bmm_out_or_baddbmm_ of LinearAlgebra.cpp; prepare_matrix_for_cublas of cuda/Blas.cpp.
    """
    (rows, columns), (row, column) = given.shape[-2:], given.stride()[-2:]
    return (column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows))


def _is_dense(given: torch.Tensor) -> bool:
    """Return True for a batch that oneDNN reads: contiguous, or with the last two dimensions exchanged."""
    return given.is_contiguous() or given.transpose(-2, -1).is_contiguous()
