"""Activation checkpointing: layers that run again in the backward pass instead of saving activations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bertscope.settings.checkpointing import Checkpointing

# The operators whose outputs selective checkpointing saves: matrix products and fused attention kernels.
_SAVED = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
}  # fmt: skip


def recomputed(layer: nn.Module, how: Checkpointing) -> Callable[..., Any]:
    """Return the layer as a function that saves only its inputs for backward; dropout repeats its masks."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    options: dict[str, Any] = {"use_reentrant": how.use_reentrant}
    if how.selective:
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_matrix_products)
        return partial(checkpoint, partial(_without_weight_cache, layer), **options)
    return partial(checkpoint, layer, **options)


def _without_weight_cache(layer: nn.Module, hidden: Tensor, *others: Any) -> Any:
    """Turn off autocast's weight cache, with which recomputation runs fewer operators than the forward pass."""
    kind = hidden.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return layer(hidden, *others)
    with torch.autocast(kind, dtype=torch.get_autocast_dtype(kind), cache_enabled=False):
        return layer(hidden, *others)


def _keep_matrix_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    return CheckpointPolicy.MUST_SAVE if operator.name() in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE
