"""The memory that kernels and libraries take besides their results: functions on integers, without torch.

The temporary memory of some kernels does not grow evenly with the batch. A memory trace keeps the numbers of a rule,
which do, so that the bytes are known at each batch. A CUDA device has cuBLAS's workspaces and its context besides.

oneDNN multiplies blocks: for each thread its scratchpad has a block of the right matrix, a block of the result in fp32
and, if the left matrix is transposed, a block of that. Source: oneDNN 3.12, src/cpu/x64/matmul/brgemm_matmul_utils.cpp
(compute_blocking_heuristic_avx512, init_aux_values, init_scratchpad).
"""

from collections.abc import Callable
from functools import lru_cache
from itertools import product
from math import inf, prod
from typing import NamedTuple

from bertscope.frozen import Record
from bertscope.gpus import CONTEXT_BYTES, Gpu, capability, may_have_cuda
from bertscope.reports.memory import BACKWARD, FORWARD
from bertscope.reports.step import ByteRange
from bertscope.settings.run_config import RunConfig

LEAST_OF_BLAS, _LEAST_OF_ONEDNN = 400, 16**3  # numbers multiplied: for BLAS of a matrix in a batch, for oneDNN in all
_LINE, _WIDE = 32, 512  # elements: of a cache line of bf16, and of a row that gets a further line if a power of two
_ALIGNMENT_BYTES = 128  # of each part of a scratchpad
_BATCH_BYTES = 16 * 40  # of a thread: 16 of brgemm_batch_element_t
_FP32_BYTES, _BF16_BYTES = 4, 2
_COLUMNS = 64  # of a block of the result
_DEPTH, _MORE_DEPTH = 512, 1024  # of a block; more if the product is deep and the left matrix not transposed
_ROWS, _LEAST_ROWS, _FEW_ROWS = 256, 32, 16  # of a block: at most, at least, at least with less blocks than threads
_COLUMN_BLOCKS = 16  # at most, for which a thread uses a block of the left matrix
_SPLIT_DEPTH, _DEPTH_THREADS = 2048, 4  # from which on threads share a sum, and how many at most
_KEY_BLOCK = 128  # tokens; of flash-attn 3 for heads of up to 128 numbers on Hopper
_SUM_THREADS, _WARP = 512, 32  # of a block that adds, for outputs of one number each; of a row of threads
_LEAST_SUMMED, _MOST_SUMMED = 16, 256  # values of a thread
_STRIDED_DEPTH, _STRIDED_ROWS = 4096, 1024  # from which on a matrix with rows of a power of two is copied, too

MATRICES = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}  # product -> places of its operands
EMBEDDING, LAYER_NORM, PRODUCT = "scratch of embedding", "scratch of layer_norm", "scratch of product"
SUM, SIZED = "scratch of sum", "scratch of a size"
FLASH = "scratch of flash attention 3"


class Scratch(NamedTuple):
    """The temporary bytes of a kernel: a rule, and its numbers."""

    rule: str
    numbers: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Return the bytes."""
        return RULES[self.rule](*self.numbers)


def layer_norm_bytes(width: int, rows: int, itemsize: int, copied: int) -> int:
    """Return the bytes for partial sums of weight and bias and for copies: many rows are summed in blocks of 32.

    Source: LaunchGammaBetaBackwardCUDAKernel of layer_norm_kernel.cu. It sums so only if the width is small for the
    GPU; its number of processors is not known here.
    """
    if rows <= 2**16:
        return copied
    return copied + 2 * min(-(-rows // 32), 2**15 // max(-(-width // 32), 1)) * width * itemsize


def embedding_bytes(width: int, ids: int, rows: int, itemsize: int, copied: int) -> int:
    """Return the temporary bytes of an embedding's backward: copies, sorted ids, and sums of their rows in tens.

    Source: EmbeddingBackwardKernel.cu. Up to 3072 ids are added directly; few rows with many ids each are summed
    by atomic additions in fp32.
    """
    if ids <= 3072:
        return copied
    rows_hit = min(ids, rows)
    partial = ids // 10 + rows_hit
    numbers = copied + 8 * (3 * ids + 2 * rows_hit + partial)
    if rows_hit < 400 and partial > 4 * rows_hit:
        return numbers + 8 * partial + (4 * rows * width if itemsize < 4 else 0)
    return numbers + 4 * partial * width


def sum_bytes(outputs: int, inputs: int, itemsize: int, gpu_threads: int) -> int:
    """Return the size of the global buffer of a column sum, such as a bias gradient, that several CTAs share.

    Each output sums `inputs` values in accumulators of `itemsize` bytes. The buffer stores one value for each output,
    CTA and thread in block.x. Source: setReduceConfig and global_memory_size in torch's Reduce.cuh.
    """
    together = next(size for size in (4, 2, 1) if outputs % size == 0)  # outputs of a thread
    most = _SUM_THREADS // together
    width = min(_power(outputs // together, most), _WARP)
    height = min(_power(inputs, most), most // width)
    width = min(_power(outputs // together, most), most // height)
    each = -(-inputs // height)  # values that a thread adds, if the rows of the block share them
    blocks, room = -(-outputs // (together * width)), gpu_threads // (width * height)
    if inputs < min(16 * height, _MOST_SUMMED) or each < _MOST_SUMMED or blocks > room:
        return 0
    sharing = max(min(-(-room // blocks), -(-each // _LEAST_SUMMED)), -(-each // _MOST_SUMMED))
    return itemsize * outputs * sharing * width * together if sharing > 1 else 0


def _power(number: int, most: int) -> int:
    """Return the largest power of two up to a number, which is at most `most`."""
    return 1 << (min(number, most).bit_length() - 1)


def product_bytes(
    batch: int, rows: int, columns: int, depth: int, is_transposed: int, threads: int, copied: int, plain: int,
    is_batched: int
) -> int:  # fmt: skip
    """Return the temporary bytes of a product of bf16 matrices on the CPU: with oneDNN's `copied`, else `plain`."""
    scratchpad = onednn_scratchpad_bytes(batch, rows, columns, depth, is_transposed, threads)
    if scratchpad:
        return scratchpad + copied
    return 0 if is_batched and rows * depth * columns < LEAST_OF_BLAS else plain


def sized_bytes(itemsize: int, *sizes: int) -> int:
    """Return the bytes of a tensor of these sizes, of which more than one may follow the batch."""
    return itemsize * prod(sizes)


def flash_bytes(batch: int, queries: int, query_bytes: int, query_block: int, keys: int, key_bytes: int) -> int:
    """Return the sums of flash-attn 3's backward for packed sequences, each followed by a block of tokens.

    Source: total_q_padded_rounded and total_k_padded_rounded of mha_bwd, hopper/flash_api.cpp.
    """
    rows = rounded(queries + batch * query_block, query_block), rounded(keys + batch * _KEY_BLOCK, _KEY_BLOCK)
    return rows[0] * query_bytes + rows[1] * key_bytes


RULES: dict[str, Callable[..., int]] = {
    EMBEDDING: embedding_bytes,
    LAYER_NORM: layer_norm_bytes,
    PRODUCT: product_bytes,
    FLASH: flash_bytes,
    SUM: sum_bytes,
    SIZED: sized_bytes,
}


@lru_cache(maxsize=4096)
def onednn_scratchpad_bytes(batch: int, rows: int, columns: int, depth: int, is_transposed: int, threads: int) -> int:
    """Return oneDNN's scratchpad bytes for a product (rows, depth) x (depth, columns), or a batch of products.

    Other kernels compute it if they are 0. `is_transposed` says how the left matrix lies.
    """
    if batch * rows * depth * columns <= _LEAST_OF_ONEDNN:
        return 0
    is_column = bool(is_transposed or rows == 1)  # oneDNN takes a single row for a transposed column
    block_columns = min(_COLUMNS, columns)
    block_depth = min(depth, _DEPTH if is_column or depth <= _MORE_DEPTH else _MORE_DEPTH)
    is_strided = _is_power(depth) and depth >= _STRIDED_DEPTH and rows >= _STRIDED_ROWS
    is_copied = rows > 1 if is_column else is_strided  # a thread copies blocks of the left matrix

    # The threads that share a sum, and the blocks of columns and the rows of one piece of work: threads have equal
    # work, and blocks are full, or as nearly so as possible; of equally good splits it is the first.
    blocks = -(-columns // _COLUMNS)
    is_narrow = threads > batch * blocks
    is_shared = is_narrow and batch == 1 and is_column and depth >= _SPLIT_DEPTH and _is_power(depth)
    least_rows = min(_FEW_ROWS if is_narrow else _LEAST_ROWS, rows)
    best, least = (1, 1, least_rows), inf
    for sharing, column_blocks in product(
        range(min(threads, _DEPTH_THREADS) if is_shared else 1, 0, -1),
        range(min(_COLUMN_BLOCKS if is_copied else 1, blocks), 0, -1),
    ):
        pieces = batch * -(-columns // (block_columns * column_blocks))
        of_columns = (rounded(blocks, column_blocks) - blocks) / blocks
        of_sharing = threads % sharing / threads
        of_depth = _excess(depth, sharing * block_depth)
        for block_rows in range(min(_ROWS, rows), least_rows - 1, -1):
            units = pieces * -(-rows // block_rows)
            if is_shared or units >= 3 * threads or units % threads == 0:
                of_rows = rounded(rows, block_rows) % rows / rows
                # The shares of work that is idle or in excess, added in oneDNN's order.
                idle = _excess(units, threads // sharing) + of_rows + of_columns + of_sharing + of_depth
                if idle < least:
                    best, least = (sharing, column_blocks, block_rows), idle

    sharing, column_blocks, block_rows = best
    sums = rows * columns
    if sharing == 1:
        sums = block_rows * block_columns * (1 if block_depth == depth else column_blocks)
    line = rounded(block_depth, _LINE)
    parts = [_BATCH_BYTES, _BF16_BYTES * _COLUMNS * line, _FP32_BYTES * sums]
    if is_copied:
        line += _LINE if line >= _WIDE and _is_power(line) else 0
        parts.append(_BF16_BYTES * block_rows * line)
    return sum(threads * part + _ALIGNMENT_BYTES for part in parts)


def _excess(work: int, unit: int) -> float:
    """Return how far work is from the next multiple of a unit, as a share of the unit."""
    rest = work % unit
    return (unit - rest if work < unit else min(unit - rest, rest)) / unit


def _is_power(number: int) -> bool:  # of two
    return number & (number - 1) == 0


def rounded(number: int, multiple: int) -> int:
    """Return a number rounded up to a multiple."""
    return -(-number // multiple) * multiple


# ---- a CUDA device besides the tensors: cuBLAS's workspaces and the context ----


# cuBLAS's workspace for each thread, from capability 9 on and below (parseChosenWorkspaceSize of torch's
# CublasHandlePool.cpp), and cuBLASLt's, which stays as well (measured on an H200 with torch 2.11).
_LARGE_WORKSPACE_BYTES, _WORKSPACE_BYTES, _LARGE_FROM = 32 * 2**20, 8_519_680, 9
LT_WORKSPACE_BYTES = 2**20
MANY_THREADS = 132 * 2048  # of an H100: partial sums are larger than on most other GPUs
# The first versions in which the allocator of torch has these workspaces, cuBLAS's (GitHub issue pytorch/pytorch 95668)
# and cuBLASLt's (the runs of benchmarks/published.py, and an H200 with torch 2.11).
_BLAS_FROM, _LT_FROM = (2, 0), (2, 7)


def workspace_bytes(run_config: RunConfig, compute_capability: tuple[int, int] | None = None) -> int:
    """Return the bytes of cuBLAS's workspaces: one for the thread of forward, and in training one for backward's.

    A linear layer with a bias, which runs in cuBLASLt, has a further one. Before torch 2.0 they are outside the
    allocator. Without a compute capability this machine's GPU counts, or one below 9.
    """
    if compute_capability is None and may_have_cuda():
        from bertscope.torch_access import torch

        compute_capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if run_config.torch_version < _BLAS_FROM:
        return 0
    threads = 2 if run_config.mode == "training" else 1
    return threads * blas_bytes(compute_capability) + lt_bytes(run_config)


def lt_bytes(run_config: RunConfig) -> int:
    """Return the bytes that cuBLASLt's workspace keeps allocated for every product."""
    return LT_WORKSPACE_BYTES if run_config.torch_version >= _LT_FROM else 0


def blas_bytes(compute_capability: tuple[int, int] | None) -> int:
    """Return the bytes of cuBLAS's workspace of one thread."""
    is_large = compute_capability is not None and compute_capability[0] >= _LARGE_FROM
    return _LARGE_WORKSPACE_BYTES if is_large else _WORKSPACE_BYTES


def by_thread(run_config: RunConfig, workspaces: int) -> tuple[tuple[str, int], ...]:
    """Return the workspaces by the phase whose first product makes them, each with its bytes; none of 0 bytes."""
    if not workspaces:
        return ()
    lt = lt_bytes(run_config)
    blas = workspaces - lt
    backward = blas // 2 if run_config.mode == "training" else 0
    by_phase = ((FORWARD, blas - backward), (FORWARD, lt), (BACKWARD, backward))
    return tuple((phase, size) for phase, size in by_phase if size)


def placements(run_config: RunConfig, workspaces: int) -> tuple[tuple[tuple[str, int], ...], ...]:
    """Return where the workspaces may lie in the allocator, the usual place first.

    A workspace in a hole between the step's blocks takes no further room. One that an earlier matrix product of the
    process made has an empty phase. All five placements occur in published runs (docs/accuracy.md).
    """
    both = by_thread(run_config, workspaces)
    one = tuple(laid for laid in both if laid[0] == FORWARD)
    before = [tuple(("", size) for _, size in laid) for laid in (both, one)]
    return tuple(dict.fromkeys((both, one, (), *before)))


class Overhead(Record, kw_only=False):
    """The memory of a GPU that the tensors cannot use: cuBLAS's workspaces, and the CUDA context as a range."""

    workspace_bytes: int = 0
    context: ByteRange = ByteRange()

    @property
    def highest_bytes(self) -> int:
        """Return the bytes with the context at the upper end."""
        return self.workspace_bytes + self.context.high_bytes


def overhead(run_config: RunConfig, context_bytes: int | None, known: Gpu | None = None) -> Overhead:
    """Return the memory that tensors cannot use; `context_bytes` instead of what is known of the GPU.

    Without a known GPU the context is the range over all GPUs.
    """
    is_cuda = run_config.device == "cuda"
    workspaces = workspace_bytes(run_config, capability(known) if known else None) if is_cuda else 0
    low = high = context_bytes or 0
    if context_bytes is None and is_cuda:
        is_measured = known is not None and known.context_high_bytes
        low, high = (known.context_low_bytes, known.context_high_bytes) if known and is_measured else CONTEXT_BYTES
    return Overhead(workspaces, ByteRange(low_bytes=low, high_bytes=high))
