"""The lists of layers of any model, and their recomputation."""

from collections.abc import Callable, Collection

from torch import nn

from bertscope.model.keep import keep_operators
from bertscope.settings.checkpointing import Checkpointing


def layer_lists(model: nn.Module) -> dict[str, list[str]]:
    """Return the paths of the lists of layers, each with the paths of its layers.

    The layers are those in lists of one class, else the children of the model, each a list of its own.
    """

    def is_stack(module: nn.Module) -> bool:  # a Sequential of one module is none
        least = 1 if isinstance(module, nn.ModuleList) else 2 if isinstance(module, nn.Sequential) else 10**9
        return len(list(module.children())) >= least and len(set(map(type, module.children()))) == 1

    stacks = outermost(model, is_stack)
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
        chosen.check_layers(path, len(layers))
        kept = zip(layers, chosen.kept_in(path, len(layers)), strict=True)
        plan |= {layer: operators for layer, operators in kept if operators is not None}
    keep_operators(model, plan)


def outermost(model: nn.Module, is_wanted: Callable[[nn.Module], bool], path: str = "") -> dict[str, nn.Module]:
    """Return the modules that are wanted and not inside another one, by their paths."""
    found: dict[str, nn.Module] = {}
    for name, child in model.named_children():
        at = f"{path}.{name}" if path else name
        found |= {at: child} if is_wanted(child) else outermost(child, is_wanted, at)
    return found
