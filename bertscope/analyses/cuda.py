"""CUDA's semantics on fake host tensors, for a machine without CUDA: what its kernels keep, and take in passing.

Fake tensors of device cuda need CUDA itself for a backward pass; the fused kernels' shapes and autograd
formulas do not. torch.nn.functional is patched, not watched by a mode: the autograd engine turns such
modes off while it recomputes a checkpointed layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

from bertscope._torch import torch
from bertscope.spec import RunSpec

_HALF = (torch.bfloat16, torch.float16)
# The mean of what cuBLAS takes of the allocator, once for the forward thread and once for the backward one:
# 8,519,680 bytes before Hopper (CUBLAS_WORKSPACE_CONFIG :4096:2:16:8), 32 MiB on it.
WORKSPACE_BYTES = 2 * 8_519_680
# What the driver and the kernels' code take outside the allocator; it differs by card and driver.
CONTEXT_BYTES = (300 * 2**20, 700 * 2**20)


@contextmanager
def cuda_semantics(spec: RunSpec) -> Iterator[None]:
    """torch.nn.functional as it behaves on CUDA, for as long as this lasts."""
    functional = torch.nn.functional
    kept = {name: getattr(functional, name) for name in ("dropout", "layer_norm", "softmax", "log_softmax",
                                                         "cross_entropy", "scaled_dot_product_attention")}  # fmt: skip
    in_float = {name: _in_float(kept[name]) for name in ("layer_norm", "softmax", "log_softmax", "cross_entropy")}
    attention = _attention(kept["scaled_dot_product_attention"], spec)
    new = in_float | {"dropout": _dropout, "scaled_dot_product_attention": attention}
    try:
        for name, function in new.items():
            setattr(functional, name, function)
        yield
    finally:
        for name, function in kept.items():
            setattr(functional, name, function)


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """One fused kernel whose mask has a byte for each element."""
    return torch.native_dropout(input, p, True)[0] if training and p > 0 else input


def _in_float(function: Callable[..., Any]) -> Callable[..., Any]:
    """CUDA's autocast runs these in fp32; the host's does not."""

    def run(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(input.float() if torch.is_autocast_enabled("cpu") else input, *args, **kwargs)

    return run


def _attention(math: Callable[..., Any], spec: RunSpec) -> Callable[..., Any]:
    """The kernel that CUDA takes: flash for 16 bits without a mask, else the memory-efficient one."""
    aten = torch.ops.aten

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
        kernel = kernel_for(query.dtype, attn_mask is not None, spec.sdpa_kernel)
        if kernel == "math":
            return math(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)
        if kernel == "flash":
            return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        mask = None if attn_mask is None else attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
        keeps = torch.is_grad_enabled() and query.requires_grad
        found = aten._scaled_dot_product_efficient_attention(query, key, value, mask, keeps, dropout_p, is_causal,
                                                             scale=scale)  # fmt: skip
        return found[0]

    return run


def kernel_for(dtype: torch.dtype, has_mask: bool, asked: str = "auto") -> str:
    """The fused kernel that torch takes on CUDA (sm80 and later), or the one that is asked for."""
    if asked != "auto":
        return asked
    return "flash" if dtype in _HALF and not has_mask else "efficient"


def scratch_bytes(operator: Any, args: Any) -> int:
    """What a CUDA kernel takes only while it runs, unseen by dispatch: gradient sums of fused attention in fp32."""
    aten = torch.ops.aten
    if operator is aten._scaled_dot_product_flash_attention_backward.default:
        *rows, length, width = args[1].shape
        length, width = -(-length // 128) * 128, -(-width // 32) * 32
        return 4 * prod(rows) * length * (width + 1)
    if operator is aten._scaled_dot_product_efficient_attention_backward.default:
        *rows, length, _ = args[1].shape
        return 4 * prod(rows) * length
    return 0
