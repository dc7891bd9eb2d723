"""Fused attention on CUDA: the kernel that torch chooses, and the tensors that each kernel saves for backward.

The rules are those of torch's sdp_utils.cpp and attention.cpp for compute capability 8.0 and later. On Hopper
and Blackwell torch prefers cuDNN's kernel, which saves the same tensors as flash.
"""

from collections.abc import Callable
from math import sqrt
from typing import Any

from bertscope.errors import SelectionError
from bertscope.settings.run_config import RunConfig
from bertscope.torch_access import torch

_HALF = (torch.bfloat16, torch.float16)
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
