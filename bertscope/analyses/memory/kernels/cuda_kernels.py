"""CUDA's kernels on fake CPU tensors, for a machine without CUDA: their saved tensors and temporary memory.

A backward pass of fake CUDA tensors needs CUDA; the shape functions and autograd formulas of the fused kernels do
not. Functions of torch.nn.functional are patched, since the autograd engine disables a function mode while it
recomputes a checkpointed layer. CUDA's autocast lists are registered under the CPU's autocast key.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from bertscope.analyses.memory.kernels.cpu_scratch import contiguous_bytes
from bertscope.analyses.memory.kernels.cuda_attention import attention
from bertscope.gpus import CONTEXT_BYTES, Gpu, capability
from bertscope.settings.run_config import RunConfig
from bertscope.torch_access import close_library, has_kernel, torch

# cuBLAS's workspace for each thread, on Hopper and elsewhere (torch's CublasHandlePool.cpp).
_HOPPER_WORKSPACE_BYTES, _WORKSPACE_BYTES = 32 * 2**20, 8_519_680
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

    Without a compute capability it is that of this machine's GPU, or any but Hopper's.
    """
    if compute_capability is None and torch.cuda.is_available():
        compute_capability = torch.cuda.get_device_capability()
    workspace = _HOPPER_WORKSPACE_BYTES if compute_capability == (9, 0) else _WORKSPACE_BYTES
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
    aten = torch.ops.aten
    if operator is aten._scaled_dot_product_flash_attention_backward.default:
        query: torch.Tensor = args[1]
        *rows, length, width = query.shape
        length, width = -(-length // 128) * 128, -(-width // 32) * 32
        return 4 * prod(rows) * length * (width + 1)
    if operator is aten._scaled_dot_product_efficient_attention_backward.default:
        query = args[1]
        return 4 * prod(query.shape[:-1])
    copied = contiguous_bytes(operator, args)
    if operator is aten.embedding_dense_backward.default:
        return copied + _embedding_bytes(args[0].shape[-1], args[1].numel(), args[2], args[0].itemsize)
    return copied


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
