"""The kernels of CPU and CUDA: their temporary memory, and CUDA's kernels on fake tensors of a machine without CUDA.

A dispatch mode does not see what a kernel allocates and frees. A backward pass of fake CUDA tensors needs CUDA; the
shape functions and autograd formulas of the fused kernels do not. Functions in torch.nn.functional are patched, since
the autograd engine disables a function mode while it recomputes a checkpointed layer. CUDA's autocast lists are
registered under the CPU's autocast key.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from math import prod, sqrt
from typing import Any

from bertscope.errors import SelectionError, name_of
from bertscope.gpus import may_have_cuda
from bertscope.memory.extension_kernels import flash_2_bytes, package_actions, row_of
from bertscope.memory.kernel_rules import (
    EMBEDDING,
    LAYER_NORM,
    LEAST_OF_BLAS,
    MANY_THREADS,
    MATRICES,
    PRODUCT,
    SIZED,
    SUM,
    Scratch,
    onednn_scratchpad_bytes,
)
from bertscope.model.attention import say_once
from bertscope.settings.run_config import CUDA, RunConfig
from bertscope.torch_access import (
    always,
    close_library,
    has_bf16_products,
    has_kernel,
    operator_name,
    replace_kernel,
    torch,
)
from bertscope.torch_access.fake_gpu import Put

_HALF = (torch.bfloat16, torch.float16)
_BLOCK, _LOCK_BYTES = 64, 16
_MOST_FLASH_WIDTH, _MOST_CUDNN_WIDTH = 256, 128  # of a head
_CUDNN_BYTES = 256  # of each call of its attention, as measured
_SUM_BYTES = 4  # of a sum of numbers in 16 bits
# The first version whose flash kernel gives its result the layout of the query; before, the result is packed by tokens
# (mha_fwd of fmha_api.cpp in torch 2.0 and 2.1, csrc/flash_attn/flash_api.cpp from 2.2 on).
_FLASH_2_FROM = (2, 2)
_ALIGNMENT = 8  # of a flash kernel's head size, and of an efficient kernel's mask
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
_INDEXED = ("gather", "scatter")  # first parts of names
_ELEMENTWISE = ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_")
_FP32_BYTES, _INDEX_BYTES = 4, 8
_QUERY_BLOCKS, _KEY_BLOCK = ((768, 256), (192, 64), (0, 32)), 512  # least length of queries -> queries of a block
_NUMBER_BYTES = 8  # of a Python number as a tensor: a double or an integer of 64 bits


def cpu_scratch(operator: Any, args: Any) -> int | Scratch:
    """Return the temporary bytes that a CPU kernel allocates."""
    aten, name = torch.ops.aten, operator_name(operator)
    if name in _ELEMENTWISE:
        return _promoted_bytes(args, is_in_place=name.endswith("_"))
    if name in MATRICES:
        return _product_scratch(*(args[position] for position in MATRICES[name]))
    if operator in (aten.mean.dim, aten.mean.default):
        # The CPU computes a mean of 16-bit values from a copy in fp32, with a result in fp32: mean in ReduceOps.cpp.
        averaged = prod(args[0].shape[dim] for dim in (args[1] if len(args) > 1 and args[1] else range(args[0].ndim)))
        return _FP32_BYTES * (args[0].numel() + args[0].numel() // max(averaged, 1)) if args[0].dtype in _HALF else 0
    if name == "_safe_softmax":
        # Two masks and a zero: which scores are -inf, and which rows have no other ones (TransformerHelper.cpp).
        scores, dim = args[:2]
        masks = scores.numel() + scores.numel() // max(scores.shape[dim], 1) + scores.itemsize
        return int(masks if scores.is_contiguous() else max(masks, scores.nbytes))
    if name.startswith(_INDEXED) and args[0].dtype in _HALF:  # a result in fp32: create_acc_buffer of ReduceUtils.h
        result = args[2 if name == "gather" else 0]
        return Scratch(SIZED, (_FP32_BYTES, *result.shape)) if result.dim() > 1 or name != "gather" else 0
    if name == "logsumexp":  # the maxima and the exponentials: logsumexp_out_impl of ReduceOps.cpp
        summed = {dim % args[0].ndim for dim in args[1] or range(args[0].ndim)} if args[0].ndim else set()
        reduced = prod(args[0].shape[dim] for dim in summed)
        rest = (size for dim, size in enumerate(args[0].shape) if dim not in summed)
        return Scratch(SIZED, (args[0].itemsize, reduced + 1, *rest))
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


def _promoted_bytes(args: Any, *, is_in_place: bool) -> int:
    """Return the bytes of operands copied to the common dtype, the only one that a CPU elementwise kernel reads.

    A number becomes a tensor, and a copy of it that has the common dtype. A result in place in another dtype has a copy
    too. Source: promote_inputs_to_common_dtype and cast_common_dtype_to_outputs of TensorIterator; CUDA has none.
    """
    if len(args) < 2 or not isinstance(args[0], torch.Tensor):
        return 0
    first, second = args[:2]  # the common dtype of the most frequent operands needs no call of the dispatcher
    if isinstance(second, torch.Tensor):
        of_dtypes = first.dim() and second.dim()
        common = torch.promote_types(first.dtype, second.dtype) if of_dtypes else torch.result_type(first, second)
        operands = (first, second, *(first,) * is_in_place)
        return sum(tensor.numel() * common.itemsize for tensor in operands if tensor.dtype != common)
    is_real = isinstance(second, (int, float)) and first.dtype.is_floating_point
    common = first.dtype if is_real else torch.result_type(first, second)
    return _NUMBER_BYTES + (common.itemsize if common not in (torch.float64, torch.int64) else 0)


def _attention_backward_bytes(gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> int:
    """Return the bytes for scores and their gradients in each thread, a row of sums, and a copy.

    The gradient is copied if its heads do not lie side by side. In 16 bits, oneDNN may compute the products that add
    to the gradients of query, key and value, with a factor of 4 bytes. The sums and oneDNN's scratchpad count for
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
    length = query.shape[-2]
    most = next(block for least, block in _QUERY_BLOCKS if length >= least)
    return min(most, length), min(_KEY_BLOCK, key.shape[-2])


def contiguous_bytes(operator: Any, args: Any) -> int:
    """Return the bytes of contiguous copies, and of other temporaries, which some kernels have on any device.

    CTC sums from the end in backward: log_beta is like log_alpha (LossCTC.cpp, .cu). A sparse tensor is a copy of the
    indices and values that nonzero and index return (dense_to_sparse of TensorConversions.cpp). Some losses have each
    element before they are averaged (Loss.cpp, which no device's kernel replaces).
    """
    name = operator_name(operator)
    if name in _LOSSES:
        reduced, elementwise, position = _LOSSES[name]
        factor = reduced if (args[position] if len(args) > position else 1) else elementwise
        return int(factor * torch.broadcast_shapes(args[0].shape, args[1].shape).numel() * args[0].itemsize)
    if name == "_ctc_loss_backward":
        return int(args[6].nbytes)
    if name == "_to_sparse":
        return int(args[0].numel() * (_INDEX_BYTES * args[0].dim() + args[0].itemsize))
    taken = _WANT_ORDER.get(name, 0)
    operands = [arg for arg in args[:taken] if isinstance(arg, torch.Tensor)]
    return sum(tensor.numel() * tensor.itemsize for tensor in operands if not tensor.is_contiguous())


# Temporaries of losses by the size of their elements: with a mean or a sum, without, and where the argument is.
_LOSSES = {
    "mse_loss": (1, 0, 2), "smooth_l1_loss": (1, 0, 2), "huber_loss": (1, 0, 2), "soft_margin_loss_backward": (2, 2, 3),
    "binary_cross_entropy_with_logits": (2, 1, 4),
}  # fmt: skip


# ---- products of bf16 matrices ----


def _product_scratch(left: torch.Tensor, right: torch.Tensor) -> int | Scratch:
    """Return the temporary bytes for a product of two matrices or two batches.

    oneDNN computes it, with a scratchpad (kernel_rules.py). The bytes are exact for CPUs with AVX-512 for bf16 and
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


def is_read_by_blas(matrix: torch.Tensor) -> bool:
    """Return False for a matrix whose rows or columns BLAS cannot read, such as the expanded gradient of a sum.

    It is copied: on a CPU one matrix of a batch after the other, on CUDA the batch at once. Sources: addmm_impl_cpu_
    and bmm_out_or_baddbmm_ of LinearAlgebra.cpp; prepare_matrix_for_cublas of cuda/Blas.cpp.
    """
    (rows, columns), (row, column) = matrix.shape[-2:], matrix.stride()[-2:]
    return (column == 1 and row >= max(1, columns)) or (row == 1 and column >= max(1, rows))


# ---- CUDA's kernels ----


def kernel_for(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, wanted: str = "auto"
) -> str:
    """Return the kernel that torch chooses on CUDA (sm80 and later), or the one asked for, but cudnn only if it can.

    A GPU without flash has "efficient", and "math" where that cannot run. Raises SelectionError if flash cannot run.
    """
    dtype, width, is_half = query.dtype, query.shape[-1], query.dtype in _HALF
    trains_mask = mask is not None and mask.requires_grad  # cuDNN's kernel has no gradient of a mask
    has_width = width % _ALIGNMENT == 0 and width <= _MOST_CUDNN_WIDTH
    if wanted == "cudnn" and not (is_half and has_width and not trains_mask):
        wanted = "auto"
    tensors = [tensor for tensor in (query, key, value, mask) if tensor is not None]
    # check_last_dim_stride_equals_1_dense of torch's sdp_utils_cpp.h, such as for T5's bias by heads
    is_strided = any(tensor.stride(-1) != 1 and tensor.shape[-1] != 1 for tensor in tensors)
    if query.dim() != 4 or (is_strided and wanted in ("auto", "cudnn")):
        return "math"
    has_mask, has_all_heads = mask is not None or width != value.shape[-1], query.shape[1] == key.shape[1]
    can_run = {  # in the order that torch prefers
        "flash": is_half and not has_mask and width <= _MOST_FLASH_WIDTH,
        "efficient": (is_half or dtype == torch.float32) and width % (8 if is_half else 4) == 0 and has_all_heads,
        "math": True,
    }
    if wanted == "efficient" and not can_run[wanted]:
        return "math"
    if not can_run.get(wanted, True):
        raise SelectionError(
            f"the {wanted} kernel does not support {str(dtype).removeprefix('torch.')} with head size {width}"
            f"{' and a mask' if has_mask else ''}; use {name_of('sdpa_kernel')} auto"
        )
    return wanted if wanted != "auto" else next(name for name, can in can_run.items() if can)


def attention(
    chosen: Callable[[torch.dtype], str], device: str = "cpu", *, packs: bool = False
) -> Callable[..., torch.Tensor]:
    """Return a replacement of torch.nn.functional.scaled_dot_product_attention that dispatches CUDA's kernels.

    `chosen` returns the kernel that is requested for a query dtype. Tensors on another device type than `device` go to
    torch's own function. If flash attention packs its result by tokens, as the memory-efficient kernel does, that runs.
    """
    original = torch.nn.functional.scaled_dot_product_attention

    def run(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if query.device.type != device:
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if torch.is_autocast_enabled(device):
            lower = torch.get_autocast_dtype(device)
            query, key, value = (tensor.to(lower) for tensor in (query, key, value))
        mask = None if attn_mask is None else attn_mask.to(query.dtype)
        with torch.autocast(device, enabled=False):
            kernel = kernel_for(query, key, value, mask, chosen(query.dtype))
            kernel = "efficient" if packs and kernel == "flash" else kernel
            root = 1 / sqrt(query.shape[-1]) if scale is None else scale
            run_kernel = _math if kernel == "math" else partial(_fused, kernel)
            out: torch.Tensor = run_kernel(query, key, value, mask, dropout_p, is_causal, root)
        return out

    return run


def _fused(
    kernel: str, query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool, scale: float
) -> Any:
    aten, width = torch.ops.aten, query.shape[-1]
    keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    if kernel == "flash":
        if width % _ALIGNMENT:
            query, key, value = (_padded(tensor) for tensor in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out[..., :width]
    if kernel == "cudnn":
        attend = aten._scaled_dot_product_cudnn_attention
        return attend(query, key, value, mask, keeps, dropout_p, is_causal, False, scale=scale)[0]
    if mask is not None:
        *steps, last = mask.stride()
        if last != 1 or any(step % _ALIGNMENT for step in steps):
            mask = _padded(mask)[..., : mask.shape[-1]]
        mask = mask.expand(*query.shape[:3], key.shape[2])
    attend = aten._scaled_dot_product_efficient_attention
    return attend(query, key, value, mask, keeps, dropout_p, is_causal, scale=scale)[0]


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(tensor, (0, _ALIGNMENT - tensor.shape[-1] % _ALIGNMENT))


def _math(query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool, scale: float) -> Any:
    """Compute attention in separate operators, for 16-bit inputs in fp32."""
    dtype = query.dtype
    if dtype in _HALF:
        query, key, value = (tensor.float() for tensor in (query, key, value))
    if query.dim() == 4 and query.shape[1] != key.shape[1]:
        times = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(times, 1) for tensor in (key, value))
    if is_causal:
        allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = torch.where(allowed, 0.0, float("-inf"))
    root = sqrt(abs(scale))
    scores = (query * root) @ (key.transpose(-2, -1) * root)
    if mask is not None:
        scores += mask
    probabilities = torch.ops.aten._safe_softmax(scores, -1)
    del scores
    if dropout_p > 0:
        probabilities = torch.native_dropout(probabilities, dropout_p, True)[0]
    return (probabilities @ value).to(dtype)


# Operators that autocast runs in fp32 on CUDA and not on the CPU: AT_FORALL_FP32 of ATen/autocast_mode.h, and those
# that take the result's dtype (AT_FORALL_FP32_SET_OPT_DTYPE) and keep it if it is given.
_IN_FLOAT = (
    "acos asin cosh cosine_similarity dist erfinv exp expm1 frobenius_norm.dim group_norm layer_norm log log10 log1p "
    "log2 logsumexp native_layer_norm nuclear_norm nuclear_norm.dim pdist pow.Scalar pow.Tensor_Scalar "
    "pow.Tensor_Tensor reciprocal renorm rms_norm rsqrt sinh softplus tan upsample_linear1d upsample_trilinear3d "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_bilinear2d _upsample_bilinear2d_aa upsample_bicubic2d _upsample_bicubic2d_aa"
)
_TO_FLOAT = (
    "cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int softmax.int "
    "sum sum.dim_IntList"
)
_SOFTMAX = {"softmax.int": "_softmax", "log_softmax.int": "_log_softmax"}


@contextmanager
def cuda_semantics(run_config: RunConfig) -> Iterator[None]:
    """Patch torch to run on CPU tensors as it runs on CUDA, and restore it at the end."""
    functional = torch.nn.functional
    new = {
        "dropout": _dropout(functional.dropout),
        "scaled_dot_product_attention": attention(
            always(run_config.sdpa_kernel), packs=run_config.torch_version < _FLASH_2_FROM
        ),
    }
    library = torch.library.Library("aten", "IMPL")
    with ExitStack() as stack:
        stack.callback(close_library, library)
        _add_lists(library)
        put = Put(stack)
        put(functional, **new)
        for name, act in package_actions(put, say_once, always(None)).items():
            if name in sys.modules:
                act(sys.modules[name])
        yield


def device_semantics(run_config: RunConfig) -> AbstractContextManager[None]:
    """Return the context in which CPU tensors run as on the run's device."""
    return cuda_semantics(run_config) if run_config.device == CUDA else nullcontext()


def _add_lists(library: Any) -> None:
    """Register CUDA's autocast lists under AutocastCPU: all operators but those that torch casts there as on CUDA."""
    for names, wrapped in ((_IN_FLOAT, _in_float), (_TO_FLOAT, _to_float)):
        for name in names.split():
            packet, _, overload = name.partition(".")
            known = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if known is not None and not has_kernel(known, "AutocastCPU"):
                library.impl(name, partial(wrapped, name, known), "AutocastCPU")
    # CUDA lists the parts of cross_entropy and not the whole, which asks for a log_softmax in the dtype of its input:
    # autocast leaves that as it is, and nll_loss gets a copy in fp32. Source: ATen/native/LossNLL.cpp.
    replace_kernel(library, "cross_entropy_loss", torch.ops.aten.cross_entropy_loss.default.decompose, "AutocastCPU")


def _in_float(name: str, operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on copies in fp32."""
    with torch.autocast("cpu", enabled=False):
        return operator(*map(_float, args), **{key: _float(arg) for key, arg in kwargs.items()})


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _HALF else value


def _to_float(name: str, operator: Any, tensor: torch.Tensor, *args: Any, dtype: torch.dtype | None = None) -> Any:
    """Run an operator with a result in fp32; only a softmax reads fp16 without a copy."""
    if name in _SOFTMAX and len(args) > 1:
        args, dtype = args[:1], args[1]
    with torch.autocast("cpu", enabled=False):
        if dtype is None and tensor.dtype == torch.float16 and name in _SOFTMAX:
            return getattr(torch.ops.aten, _SOFTMAX[name])(tensor, *args, True)
        if dtype is None and tensor.dtype in _HALF:
            dtype = torch.float32
        return operator(tensor, *args, dtype=dtype)


def _dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        """Run the fused kernel, whose mask has one byte for each element; torch has none in place."""
        if inplace or not training or not 0 < p < 1:
            return original(input, p, training, inplace)  # type: ignore[no-any-return]
        return torch.native_dropout(input, p, True)[0]

    return run  # a partial has no name, which torch.compile asks for


def _sums_of_queries(query: torch.Tensor) -> int:
    *rows, length, width = query.shape
    return 4 * prod(rows) * (-(-length // 128) * 128) * (-(-width // 32) * 32 + 1)


def _efficient_bytes(batch: int, heads: int, length: int, width: int) -> int:
    blocks = -(-length // _BLOCK) * -(-width // _BLOCK)
    return batch * heads * (4 * length + blocks * (4 * _BLOCK**2 + _LOCK_BYTES))


def cuda_scratch(operator: Any, args: Any, gpu_threads: int) -> int | Scratch:
    """Return the temporary bytes that a CUDA kernel allocates; `gpu_threads` run at once on the GPU."""
    name = operator_name(operator)
    if name in MATRICES:
        return sum(int(args[position].nbytes) for position in MATRICES[name] if not is_read_by_blas(args[position]))
    if (row := row_of(operator)) is not None:
        return 0 if row.scratch is None else row.scratch(operator, args)
    if operator is torch.ops.aten.sum.dim_IntList and args[0].is_contiguous() and args[0].numel():
        summed, dims = args[0], {dim % max(args[0].dim(), 1) for dim in args[1] or ()}
        if dims == set(range(len(dims))) and 0 < len(dims) < summed.dim():  # sums over the first dimensions
            sums = prod(summed.shape[len(dims) :])
            return Scratch(SUM, (sums, summed.numel() // sums, max(summed.itemsize, _SUM_BYTES), gpu_threads))
    copied = contiguous_bytes(operator, args)
    match name:
        case "_scaled_dot_product_cudnn_attention":
            return _CUDNN_BYTES
        case "_scaled_dot_product_cudnn_attention_backward":
            return _sums_of_queries(args[1]) + _CUDNN_BYTES
        case "_scaled_dot_product_flash_attention_backward":
            return _sums_of_queries(args[1])
        case "_scaled_dot_product_efficient_attention_backward":
            # Sums of gradients in blocks of 64 x 64 numbers with a lock: GradQTempStorage in kernel_backward.h.
            return _efficient_bytes(*args[1].shape)
        case "_efficient_attention_backward":
            batch, length, heads, width = args[1].shape
            return _efficient_bytes(batch, heads, length, width)
        case "_flash_attention_backward":
            return flash_2_bytes(args[1], args[2], args[6])
        case "native_layer_norm_backward":
            width, itemsize = args[1].shape[-1], args[1].itemsize
            return Scratch(LAYER_NORM, (width, args[1].numel() // max(width, 1), itemsize, copied))
        case "embedding_dense_backward":
            return Scratch(EMBEDDING, (args[0].shape[-1], args[1].numel(), args[2], args[0].itemsize, copied))
    return copied


def resident_threads(run_config: RunConfig) -> int:
    """Return how many threads the GPU runs at once: the run's GPU, else this machine's, else an H100."""
    if not run_config.gpu_threads and may_have_cuda() and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return int(properties.multi_processor_count * properties.max_threads_per_multi_processor)
    return run_config.gpu_threads or MANY_THREADS


# Their mean or sum is written into the tensor of their elements, which keeps its size (ATen's Loss.cpp and Loss.cu).
_REDUCED_IN_PLACE = tuple(getattr(torch.ops.aten, name).default for name in (
    "mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy",
))  # fmt: skip


def result_bytes(operator: Any, args: Any, number: int, tensor: torch.Tensor, *, on_cuda: bool) -> int | None:
    """Return the bytes of a result of which torch's shape function is wrong; None for any other.

    LayerNorm's statistics are fp32 on CUDA, and on the CPU for fp32 weights.
    """
    if operator in _REDUCED_IN_PLACE:
        return int(tensor.itemsize * torch.broadcast_shapes(args[0].shape, args[1].shape).numel())
    if operator is not torch.ops.aten.native_layer_norm.default or args[0].itemsize >= 4 or not number:
        return None
    is_wide = on_cuda or (args[2] is not None and args[2].itemsize == 4)
    return 4 * tensor.numel() if is_wide else None
