"""Layers of which backward recomputes all but some operators, on any module.

`bertscope plan --emit torch` writes these two functions as they are here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from bertscope.settings.checkpointing import Checkpointing


def call_name(operator: Any) -> str:
    """Return the name of an operator without its overload, one for all kernels of fused attention."""
    name = str(operator.name()).split(".")[0].removeprefix("aten::")
    return "scaled_dot_product_attention" if name.startswith("_scaled_dot_product") else name


def keep_contexts(kept: Collection[str]) -> Any:
    """Return the contexts of a layer's forward pass, which keeps operators such as `addmm.0`, and of its repetition."""
    calls: Counter[tuple[str, bool]] = Counter()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = call_name(operator)
        number = calls[name, context.is_recompute]
        calls[name, context.is_recompute] += 1
        is_kept = f"{name}.{number}" in kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def keep_operators(model: nn.Module, plan: Mapping[str, Collection[str]]) -> None:
    """Recompute the modules at the paths of `plan` in backward, except for the operators that it names for each."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            with suppress(AttributeError):  # a frozen one is not of transformers
                config.use_cache = False  # a repeated layer would add its keys and values again
    base = getattr(model, "get_base_model", lambda: model)()  # of peft's wrapper
    for path, kept in plan.items():
        layer = base.get_submodule(path)
        contexts = partial(keep_contexts, kept)
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)


def layer_lists(model: nn.Module) -> dict[str, list[str]]:
    """Return the paths of the lists of layers, each with the paths of its layers.

    The layers are those in lists of one class, else the children of the model, each a list of its own.
    """
    stacks = outermost(model, _is_stack)
    found = {f"{path}.{name}": layer for path, stack in stacks.items() for name, layer in stack.named_children()}
    if not found:
        return {path: [path] for path, child in model.named_children() if any(True for _ in child.parameters())}
    lists: dict[str, list[str]] = {}
    for path, layer in found.items():
        if any(True for _ in layer.parameters()):
            lists.setdefault(path.rpartition(".")[0], []).append(path)
    return lists


def keep_layers(model: nn.Module, chosen: Checkpointing) -> None:
    """Recompute the layers that `chosen` names except for the operators that it keeps; raises ConfigError."""
    lists = layer_lists(getattr(model, "get_base_model", lambda: model)())
    chosen.check_lists(lists)
    plan: dict[str, Collection[str]] = {}
    for path, layers in lists.items():
        if own := chosen.of(path):
            own.check_layers(len(layers))
            plan |= {layer: own.kept_in(number) for number, layer in enumerate(layers) if own.covers(number)}
    keep_operators(model, plan)


def outermost(model: nn.Module, is_wanted: Callable[[nn.Module], bool], path: str = "") -> dict[str, nn.Module]:
    """Return the modules that are wanted and not inside another one, by their paths."""
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        at = f"{path}.{name}" if path else name
        found |= {at: child} if is_wanted(child) else outermost(child, is_wanted, at)
    return found


def _is_stack(module: nn.Module) -> bool:
    """Return True for a list of modules of one class; a Sequential of one module is none."""
    least = 1 if isinstance(module, nn.ModuleList) else 2 if isinstance(module, nn.Sequential) else 10**9
    return len(list(module.children())) >= least and len(set(map(type, module.children()))) == 1
