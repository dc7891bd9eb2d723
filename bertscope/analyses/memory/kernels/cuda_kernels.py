"""CUDA's kernels on fake CPU tensors, for a machine without CUDA: their saved tensors and temporary memory.

A backward pass of fake CUDA tensors needs CUDA; the shape functions and autograd formulas of the fused kernels do
not. Functions of torch.nn.functional are patched, since the autograd engine disables a function mode while it
recomputes a checkpointed layer. CUDA's autocast lists are registered under the CPU's autocast key.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any

from bertscope.analyses.memory.kernels.cpu_products import MATRICES, is_read_by_blas
from bertscope.analyses.memory.kernels.cpu_scratch import contiguous_bytes
from bertscope.errors import SelectionError
from bertscope.gpus import CONTEXT_BYTES, Gpu, capability
from bertscope.settings.run_config import RunConfig
from bertscope.torch_access import close_library, has_kernel, operator_name, torch

_HALF = (torch.bfloat16, torch.float16)
# The memory-efficient backward sums gradients of queries in blocks of 64 x 64 numbers, each with a lock:
# GradQTempStorage and workspace_size in kernel_backward.h.
_BLOCK, _LOCK_BYTES = 64, 16
_ALIGNMENT = 8  # of a flash kernel's head size, and of an efficient kernel's mask


def kernel_for(
    dtype: torch.dtype, has_mask: bool, asked: str = "auto", *, head_size: int = 64, is_plain: bool = True
) -> str:
    """Return the kernel that torch chooses on CUDA (sm80 and later), or the one asked for.

    `is_plain` is False if keys have fewer heads than queries. Raises SelectionError if the kernel asked for does
    not support these arguments.
    """
    flash = dtype in _HALF and not has_mask and head_size <= 256
    efficient = dtype in (*_HALF, torch.float32) and head_size % (8 if dtype in _HALF else 4) == 0 and is_plain
    if (asked == "flash" and not flash) or (asked == "efficient" and not efficient):
        raise SelectionError(
            f"the {asked} kernel does not support {str(dtype).removeprefix('torch.')} with head size {head_size}"
            f"{' and a mask' if has_mask else ''}; use --sdpa-kernel auto"
        )
    return asked if asked != "auto" else "flash" if flash else "efficient" if efficient else "math"


def attention(run_config: RunConfig) -> Callable[..., torch.Tensor]:
    """Return a replacement of torch.nn.functional.scaled_dot_product_attention that dispatches CUDA's kernels."""

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
        if torch.is_autocast_enabled("cpu"):
            lower = torch.get_autocast_dtype("cpu")
            query, key, value = (tensor.to(lower) for tensor in (query, key, value))
        mask = None if attn_mask is None else attn_mask.to(query.dtype)
        with torch.autocast("cpu", enabled=False):
            kernel = _KERNELS[_chosen(query, key, value, mask, run_config.sdpa_kernel)]
            root = 1 / sqrt(query.shape[-1]) if scale is None else scale
            out: torch.Tensor = kernel(query, key, value, mask, dropout_p, is_causal, root)
        return out

    return run


def _chosen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, asked: str) -> str:
    if query.dim() != 4:
        return "math"
    has_mask = mask is not None or query.shape[-1] != value.shape[-1]
    return kernel_for(query.dtype, has_mask, asked, head_size=query.shape[-1], is_plain=query.shape[1] == key.shape[1])


def _flash(query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool, scale: float) -> Any:
    width = query.shape[-1]
    if width % _ALIGNMENT:
        query, key, value = (_padded(tensor) for tensor in (query, key, value))
    out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    return out[..., :width]


def _efficient(query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool, scale: float) -> Any:
    if mask is not None:
        *steps, last = mask.stride()
        if last != 1 or any(step % _ALIGNMENT for step in steps):
            mask = _padded(mask)[..., : mask.shape[-1]]
        mask = mask.expand(*query.shape[:3], key.shape[2])
    keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, keeps, dropout_p, is_causal, scale=scale
    )[0]


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with its last dimension padded to a multiple of 8."""
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


_KERNELS: dict[str, Callable[..., Any]] = {"flash": _flash, "efficient": _efficient, "math": _math}


# cuBLAS's workspace for each thread, from capability 9 on and below (parseChosenWorkspaceSize of torch's
# CublasHandlePool.cpp); cuBLASLt uses the same one from torch 2.7 on.
_LARGE_WORKSPACE_BYTES, _WORKSPACE_BYTES, _LARGE_FROM = 32 * 2**20, 8_519_680, 9
# Operators that autocast runs in fp32 on CUDA and not on the CPU: AT_FORALL_FP32 of ATen/autocast_mode.h, and those
# that take the result's dtype (AT_FORALL_FP32_SET_OPT_DTYPE).
_IN_FLOAT = (
    "acos", "asin", "cosh", "cosine_similarity", "erfinv", "exp", "expm1", "group_norm", "layer_norm", "log", "log10",
    "log1p", "log2", "logsumexp", "native_layer_norm", "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor",
    "reciprocal", "rms_norm", "rsqrt", "sinh", "softplus", "tan",
)  # fmt: skip
_TO_FLOAT = ("cumprod", "cumsum", "log_softmax.int", "softmax.int", "sum", "sum.dim_IntList")
_SOFTMAX = {"softmax.int": "_softmax", "log_softmax.int": "_log_softmax"}
# The share of the memory that a batch with eager attention must leave free on a GPU whose context is not given: on a
# V100 of 2021 nvidia-smi showed up to 3.9 % more (transformers documentation, model memory anatomy, by
# benchmarks/published.py). Fused attention needs torch 2.0 or later, whose context is far below the upper end.
MARGIN = 0.04
EAGER = "eager"


def workspace_bytes(run_config: RunConfig, compute_capability: tuple[int, int] | None = None) -> int:
    """Return the bytes of cuBLAS's workspaces: one for the thread of forward, and in training one for backward's.

    Without a compute capability it is that of this machine's GPU, or one below 9.
    """
    if compute_capability is None and torch.cuda.is_available():
        compute_capability = torch.cuda.get_device_capability()
    is_large = compute_capability is not None and compute_capability[0] >= _LARGE_FROM
    workspace = _LARGE_WORKSPACE_BYTES if is_large else _WORKSPACE_BYTES
    return 2 * workspace if run_config.mode == "training" else workspace


def card_workspace_bytes(run_config: RunConfig, card: Gpu | None) -> int:
    """Return the bytes of the workspaces on a GPU, measured if it has a calibration; None: as `workspace_bytes`."""
    if card is None or not card.calibration or not card.workspace_forward_bytes:
        return workspace_bytes(run_config, None if card is None else capability(card))
    backward = card.workspace_backward_bytes if run_config.mode == "training" else 0
    return card.workspace_forward_bytes + backward


def by_thread(run_config: RunConfig, workspaces: int) -> tuple[int, ...]:
    """Return the bytes of the workspaces of forward's thread, and in training of backward's: one half each."""
    return (workspaces // 2, workspaces - workspaces // 2) if run_config.mode == "training" else (workspaces,)


@dataclass(frozen=True)
class Overhead:
    """The memory of a GPU that the tensors cannot use: cuBLAS's workspaces, and the CUDA context as a range.

    `margin` is the share of the rest that must stay free for eager attention if the context is not given: then the
    version of torch may be an old one.
    """

    workspace_bytes: int = 0
    context_low_bytes: int = 0
    context_high_bytes: int = 0
    margin: float = 0.0

    @property
    def lowest_bytes(self) -> int:
        """Return the bytes with the context at the lower end."""
        return self.workspace_bytes + self.context_low_bytes

    @property
    def highest_bytes(self) -> int:
        """Return the bytes with the context at the upper end."""
        return self.workspace_bytes + self.context_high_bytes

    def limit_bytes(self, budget_bytes: int) -> int:
        """Return the bytes of the budget that torch may reserve: without the upper context and the margin."""
        return int((budget_bytes - self.context_high_bytes) * (1 - self.margin))


def overhead(
    run_config: RunConfig, context_bytes: int | None, known: Gpu | None = None, attention: str | None = None
) -> Overhead:
    """Return the memory that tensors cannot use; `context_bytes` instead of what is known of the GPU."""
    if run_config.device != "cuda":
        return Overhead(0, context_bytes or 0, context_bytes or 0)
    workspaces = card_workspace_bytes(run_config, known)
    if context_bytes is not None:
        return Overhead(workspaces, context_bytes, context_bytes)
    published = (known.context_low_bytes, known.context_high_bytes) if known and known.context_high_bytes else None
    is_measured = known is not None and bool(known.calibration)
    margin = MARGIN if attention == EAGER and not is_measured else 0.0
    return Overhead(workspaces, *(published or CONTEXT_BYTES), margin)


@contextmanager
def cuda_semantics(run_config: RunConfig) -> Iterator[None]:
    """Patch torch to run on CPU tensors as it runs on CUDA, and restore it at the end."""
    functional = torch.nn.functional
    new = {
        "dropout": _dropout(functional.dropout),
        "cross_entropy": _cross_entropy(functional.cross_entropy),
        "scaled_dot_product_attention": attention(run_config),
    }
    original = {name: getattr(functional, name) for name in new}
    library = torch.library.Library("aten", "IMPL")
    try:
        _add_lists(library)
        vars(functional).update(new)
        yield
    finally:
        vars(functional).update(original)
        close_library(library)


def _add_lists(library: Any) -> None:
    """Register CUDA's autocast lists under AutocastCPU, except for operators that torch registers there."""
    for names, wrapped in ((_IN_FLOAT, _in_float), (_TO_FLOAT, _to_float)):
        for name in names:
            packet, _, overload = name.partition(".")
            known = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if known is not None and not has_kernel(known, "AutocastCPU"):
                library.impl(name, wrapped(name, known), "AutocastCPU")


def _in_float(name: str, operator: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        """Run the operator on copies in fp32."""
        with torch.autocast("cpu", enabled=False):
            return operator(*(_float(arg) for arg in args), **{key: _float(arg) for key, arg in kwargs.items()})

    return run


def _float(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value


def _to_float(name: str, operator: Any) -> Callable[..., Any]:
    def run(given: torch.Tensor, *args: Any, dtype: torch.dtype | None = None) -> Any:
        """Run the operator with a result in fp32; only a softmax reads fp16 without a copy."""
        if name in _SOFTMAX and len(args) > 1:
            args, dtype = args[:1], args[1]
        with torch.autocast("cpu", enabled=False):
            if dtype is None and given.dtype == torch.float16 and name in _SOFTMAX:
                return getattr(torch.ops.aten, _SOFTMAX[name])(given, *args, True)
            if dtype is None and given.dtype in (torch.bfloat16, torch.float16):
                dtype = torch.float32
            return operator(given, *args, dtype=dtype)

    return run


def _dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    def run(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        """Run the fused kernel, whose mask has one byte for each element; torch has none in place."""
        if inplace or not training or not 0 < p < 1:
            return original(input, p, training, inplace)  # type: ignore[no-any-return]
        return torch.native_dropout(input, p, True)[0]

    return run


def _cross_entropy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return cross_entropy for CUDA, whose autocast lists only its log_softmax; the CPU's copies the input to fp32."""

    def run(input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        plain = input.dtype == torch.float16 and not target.is_floating_point() and not kwargs.get("label_smoothing")
        if not torch.is_autocast_enabled("cpu") or not plain or len(args) > 5:
            return original(input, target, *args, **kwargs)  # type: ignore[no-any-return]
        given = {name: value for name, value in kwargs.items() if name != "label_smoothing"}
        likelihoods = torch.log_softmax(input, 1 if input.dim() > 1 else 0)
        return torch.nn.functional.nll_loss(likelihoods, target, *args, **given)

    return run


def cuda_scratch_bytes(operator: Any, args: Any) -> int:
    """Return the temporary bytes that a CUDA kernel allocates: gradient sums in fp32, and copies."""
    aten, name = torch.ops.aten, operator_name(operator)
    if name in MATRICES:
        return sum(int(args[place].nbytes) for place in MATRICES[name] if not is_read_by_blas(args[place]))
    if operator is aten._scaled_dot_product_flash_attention_backward.default:
        query: torch.Tensor = args[1]
        *rows, length, width = query.shape
        length, width = -(-length // 128) * 128, -(-width // 32) * 32
        return 4 * prod(rows) * length * (width + 1)
    if operator is aten._scaled_dot_product_efficient_attention_backward.default:
        *rows, length, width = args[1].shape
        blocks = -(-length // _BLOCK) * -(-width // _BLOCK)
        return int(prod(rows) * (4 * length + blocks * (4 * _BLOCK**2 + _LOCK_BYTES)))
    if operator is aten.native_layer_norm_backward.default:
        return contiguous_bytes(operator, args) + _layer_norm_bytes(args[1])
    copied = contiguous_bytes(operator, args)
    if operator is aten.embedding_dense_backward.default:
        return copied + _embedding_bytes(args[0].shape[-1], args[1].numel(), args[2], args[0].itemsize)
    return copied


def _layer_norm_bytes(given: torch.Tensor) -> int:
    """Return the bytes of the partial sums of weight and bias: many rows are summed in blocks of 32.

    Source: LaunchGammaBetaBackwardCUDAKernel of layer_norm_kernel.cu. It sums so only if the width is small for the
    card; its number of processors is not known here.
    """
    width = given.shape[-1]
    rows = given.numel() // max(width, 1)
    if rows <= 2**16:
        return 0
    return int(2 * min(-(-rows // 32), 2**15 // max(-(-width // 32), 1)) * width * given.itemsize)


def _embedding_bytes(width: int, ids: int, rows: int, itemsize: int) -> int:
    """Return the temporary bytes of an embedding's backward, which sorts the ids and sums their rows in tens.

    Source: EmbeddingBackwardKernel.cu. Up to 3072 ids are added directly; few rows with many ids each are summed
    by atomic additions in fp32.
    """
    if ids <= 3072:
        return 0
    rows_hit = min(ids, rows)
    partial = ids // 10 + rows_hit
    numbers = 8 * (3 * ids + 2 * rows_hit + partial)
    if rows_hit < 400 and partial > 4 * rows_hit:
        return numbers + 8 * partial + (4 * rows * width if itemsize < 4 else 0)
    return numbers + 4 * partial * width
