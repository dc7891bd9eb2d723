"""Layers of which backward recomputes all but some operators; `bertscope plan --emit torch` writes this code."""

from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

QUANTIZED = {"bitsandbytes::gemm_4bit": "mm", "bitsandbytes::int8_mixed_scaled_mm": "_int_mm"}  # and torch's products


def call_name(operator: Any, bias: Any = None) -> str:
    """Return an operator's name without its overload, one for all kernels of fused attention and of a product."""
    name = str(operator.name()).split(".")[0].removeprefix("aten::")
    name = "addmm" if name == "bitsandbytes::gemm_4bit" and bias is not None else QUANTIZED.get(name, name)
    return "scaled_dot_product_attention" if name.startswith("_scaled_dot_product") else name


def save_contexts(saved: Collection[str]) -> Any:
    """Return the contexts of a layer's forward pass, which saves operators such as `addmm.0`, and of its repetition."""
    calls: Counter[tuple[str, bool]] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = call_name(operator, *args[6:7])  # the seventh is bias
        number = calls[name, context.is_recompute]
        calls[name, context.is_recompute] += 1
        is_saved = f"{name}.{number}" in saved
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def save_operators(model: nn.Module, plan: Mapping[str, Collection[str]]) -> None:
    """Recompute the modules at the paths of `plan` in backward, except for the operators that it names for each."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            with suppress(AttributeError):  # a frozen one is not of transformers
                config.use_cache = False  # a repeated layer would add its keys and values again
    unwrapped: Any = getattr(model, "get_base_model", None)  # of peft's wrapper, which may be put around it later
    base = unwrapped() if unwrapped else model
    for path, saved in plan.items():
        layer = base.get_submodule(path.removeprefix("base_model.model."))
        contexts = partial(save_contexts, saved)
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
