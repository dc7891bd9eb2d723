"""The names of weights in old and new checkpoints, translated to the names of a model."""

from collections.abc import Container, Mapping
from typing import Any

from torch import nn

# Buffers that transformers before 4.31 saved; computed here.
STORED_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_OLD_ENDS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def translated(state_dict: Mapping[str, Any], model: nn.Module) -> tuple[dict[str, Any], list[str]]:
    """Return the state dict with the names of `model`, and the tied names that were added.

    Raises ValueError for TensorFlow's names.
    """
    for name in state_dict:
        if "/" in name:
            raise ValueError(
                f"{name!r} is a TensorFlow name; convert the checkpoint first "
                "(transformers-cli convert --model_type bert), then load what that writes"
            )
    own = set(model.state_dict(keep_vars=True))
    found = {
        own_name(modern_name(name), own): tensor
        for name, tensor in state_dict.items()
        if not name.endswith(STORED_BUFFERS)
    }
    return found, _fill_ties(found, model)


def modern_name(name: str) -> str:
    """Return the name with `weight` and `bias` for a LayerNorm's `gamma` and `beta`."""
    for old, new in _OLD_ENDS.items():
        if name.endswith(old):
            return name[: -len(old)] + new
    return name


def own_name(name: str, own: Container[str], prefix: str = "bert") -> str:
    """Return the name with or without `bert.` in front, as in the model."""
    if name in own:
        return name
    front = f"{prefix}."
    other = name.removeprefix(front) if name.startswith(front) else front + name
    return other if other in own else name


def _fill_ties(found: dict[str, Any], model: nn.Module) -> list[str]:
    """Add the missing names of tied parameters with the tensor of another name; return the added names."""
    filled = []
    addresses: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        addresses.setdefault(id(parameter), []).append(name)
    for names in addresses.values():
        stored = next((name for name in names if name in found), None)
        for name in names:
            if stored is not None and name not in found:
                found[name] = found[stored]
                filled.append(name)
    return filled
