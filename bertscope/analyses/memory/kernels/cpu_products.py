"""Temporary memory of products of bf16 matrices on the CPU.

oneDNN multiplies blocks: for each thread its scratchpad has a block of the right matrix, a block of the result in fp32
and, if the left matrix is transposed, a block of that. The bytes are exact for CPUs with AVX-512 for bf16 and without
AMX. On other CPUs, and in fp16, only the copies that torch makes are counted.

Sources: which products oneDNN computes, aten/src/ATen/native/mkldnn/Matmul.cpp and LinearAlgebra.cpp in torch 2.13;
the blocks, oneDNN 3.12, src/cpu/x64/matmul/brgemm_matmul_utils.cpp (compute_blocking_heuristic_avx512,
init_aux_values, init_scratchpad).
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from bertscope.torch_access import has_bf16_products, torch

MATRICES = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}  # product -> places of its operands
_LEAST_OF_BLAS, _LEAST_OF_ONEDNN = 400, 16**3  # numbers multiplied: for BLAS of a matrix in a batch, for oneDNN in all
_LINE, _WIDE = 32, 512  # elements: of a cache line of bf16, and of a row that gets a further line if a power of two
_ALIGNMENT_BYTES = 128  # of each part of a scratchpad
_BATCH_BYTES = 16 * 40  # of a thread: 16 of brgemm_batch_element_t
_FP32_BYTES = 4
_COLUMNS = 64  # of a block of the result
_DEPTH, _MORE_DEPTH = 512, 1024  # of a block; more if the product is deep and the left matrix not transposed
_ROWS, _LEAST_ROWS, _FEW_ROWS = 256, 32, 16  # of a block: at most, at least, at least with less blocks than threads
_COLUMN_BLOCKS = 16  # at most, for which a thread uses a block of the left matrix
_SPLIT_DEPTH, _DEPTH_THREADS = 2048, 4  # from which on threads share a sum, and how many at most
_STRIDED_DEPTH, _STRIDED_ROWS = 4096, 1024  # from which on a matrix with rows of a power of two is copied, too


def product_scratch_bytes(left: torch.Tensor, right: torch.Tensor) -> int:
    """Return the temporary bytes of a product of two matrices, or of two batches of matrices."""
    batch, rows, depth, columns = prod(left.shape[:-2]), *left.shape[-2:], right.shape[-1]
    is_batched = left.dim() == 3
    is_read = _is_dense if is_batched else is_read_by_blas
    is_transposed = is_read(left) and left.stride(-1) != 1 and not (is_batched and depth == 1)
    if columns == 1 and not is_batched:  # torch computes the transposed result
        rows, columns = 1, rows
    scratchpad = scratchpad_bytes(left.dtype, rows, columns, depth, is_transposed=is_transposed, batch=batch)
    if scratchpad:
        return scratchpad + sum(part.numel() * part.itemsize for part in (left, right) if not is_read(part))
    if is_batched and rows * depth * columns < _LEAST_OF_BLAS:
        return 0
    return sum(prod(part.shape[-2:]) * part.itemsize for part in (left, right) if not is_read_by_blas(part))


def scratchpad_bytes(
    dtype: torch.dtype, rows: int, columns: int, depth: int, *, is_transposed: bool = False, batch: int = 1
) -> int:
    """Return the bytes of oneDNN's scratchpad for a product; 0 if other kernels compute it."""
    if dtype is not torch.bfloat16 or not has_bf16_products() or batch * rows * depth * columns <= _LEAST_OF_ONEDNN:
        return 0
    return _scratchpad_bytes(batch, rows, columns, depth, is_transposed or rows == 1, torch.get_num_threads())


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


@lru_cache(maxsize=4096)
def _scratchpad_bytes(*sizes: int) -> int:
    """Return the bytes of oneDNN's scratchpad, by the fields of a product."""
    return _Product(*sizes).scratchpad_bytes


@dataclass(frozen=True)
class _Product:
    """A product of a matrix of rows x depth and one of depth x columns, or of a batch of them."""

    batch: int
    rows: int
    columns: int
    depth: int
    is_transposed: int  # the left matrix, or a single row, which oneDNN takes for a transposed column
    threads: int

    @property
    def scratchpad_bytes(self) -> int:
        sharing, column_blocks, block_rows = self._split()
        sums = self.rows * self.columns
        if sharing == 1:
            sums = block_rows * self.block_columns * (1 if self.block_depth == self.depth else column_blocks)
        line = _rounded(self.block_depth, _LINE)
        parts = [_BATCH_BYTES, torch.bfloat16.itemsize * _COLUMNS * line, _FP32_BYTES * sums]
        if self.is_copied:
            line += _LINE if line >= _WIDE and _is_power(line) else 0
            parts.append(torch.bfloat16.itemsize * block_rows * line)
        return sum(self.threads * part + _ALIGNMENT_BYTES for part in parts)

    @property
    def block_columns(self) -> int:
        return min(_COLUMNS, self.columns)

    @property
    def block_depth(self) -> int:
        return min(self.depth, _DEPTH if self.is_transposed or self.depth <= _MORE_DEPTH else _MORE_DEPTH)

    @property
    def is_copied(self) -> bool:
        """Return True if a thread copies blocks of the left matrix."""
        is_strided = _is_power(self.depth) and self.depth >= _STRIDED_DEPTH and self.rows >= _STRIDED_ROWS
        return self.rows > 1 if self.is_transposed else is_strided

    def _split(self) -> tuple[int, int, int]:
        """Return the threads that share a sum, and the blocks of columns and the rows of one piece of work.

        Threads have equal work, and blocks are full, or as nearly so as possible; of equally good splits it is the
        first.
        """
        blocks = -(-self.columns // _COLUMNS)  # of columns
        is_narrow = self.threads > self.batch * blocks
        is_deep = self.depth >= _SPLIT_DEPTH and _is_power(self.depth)
        is_shared = bool(is_narrow and self.batch == 1 and self.is_transposed and is_deep)
        least_rows = min(_FEW_ROWS if is_narrow else _LEAST_ROWS, self.rows)
        splits = product(
            range(min(self.threads, _DEPTH_THREADS) if is_shared else 1, 0, -1),
            range(min(_COLUMN_BLOCKS if self.is_copied else 1, blocks), 0, -1),
            range(min(_ROWS, self.rows), least_rows - 1, -1),
        )
        even = (split for split in splits if is_shared or self._is_even(*split))
        return min(even, key=lambda split: self._imbalance(*split), default=(1, 1, least_rows))

    def _units(self, column_blocks: int, block_rows: int) -> int:
        """Return the pieces of work of a split."""
        return self.batch * -(-self.rows // block_rows) * -(-self.columns // (self.block_columns * column_blocks))

    def _is_even(self, sharing: int, column_blocks: int, block_rows: int) -> bool:
        units = self._units(column_blocks, block_rows)
        return units >= 3 * self.threads or units % self.threads == 0

    def _imbalance(self, sharing: int, column_blocks: int, block_rows: int) -> float:
        """Return the sum of the shares of work that is idle or in excess, in oneDNN's order."""
        blocks = -(-self.columns // _COLUMNS)
        idle = _excess(self._units(column_blocks, block_rows), self.threads // sharing)
        idle += _rounded(self.rows, block_rows) % self.rows / self.rows
        idle += (_rounded(blocks, column_blocks) - blocks) / blocks
        idle += self.threads % sharing / self.threads
        return idle + _excess(self.depth, sharing * self.block_depth)


def _excess(work: int, unit: int) -> float:
    """Return how far work is from the next multiple of a unit, as a share of the unit."""
    rest = work % unit
    return (unit - rest if work < unit else min(unit - rest, rest)) / unit


def _is_power(number: int) -> bool:
    """Return True for a power of two."""
    return number & (number - 1) == 0


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
