"""Freezing of the parameters that match patterns."""

from collections.abc import Iterable
from copy import deepcopy
from fnmatch import fnmatchcase

from bertscope.errors import SelectionError
from bertscope.torch_access import nn, torch


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Set `requires_grad` to False for the parameters that match a pattern.

    A pattern is a glob over parameter paths (`*.bias`) or consecutive path components (`embeddings`,
    `encoder.layer.0`, `LayerNorm`). Raises SelectionError for a pattern that matches nothing.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        forms = (pattern, f"{pattern}.*", f"*.{pattern}", f"*.{pattern}.*")
        chosen = [parameter for path, parameter in named if any(fnmatchcase(path, form) for form in forms)]
        if not chosen:
            tops = sorted({path.split(".")[0] for path, _ in named})
            raise SelectionError(
                f"the pattern {pattern!r} matches no parameter; use a glob ('*.bias') or whole parts of a path "
                f"('embeddings', 'encoder.layer.0'); the top modules are {', '.join(tops)}"
            )
        for parameter in chosen:
            parameter.requires_grad_(False)


# ---- separation of the tensors that a model holds under several names ----


def untie(model: nn.Module) -> int:
    """Give each further name of a shared parameter or module a separate one; return the number of parameters added.

    The new tensors are on meta, so the model can be counted and not run.
    """
    before = sum(parameter.numel() for parameter in model.parameters() if not nn.parameter.is_lazy(parameter))
    _separate(model, {id(model)}, set(), (model,))
    after = sum(parameter.numel() for parameter in model.parameters() if not nn.parameter.is_lazy(parameter))
    return after - before


def _separate(module: nn.Module, modules: set[int], tensors: set[int], above: tuple[nn.Module, ...]) -> None:
    """Replace the parameters of this module and the modules below it that were met before."""
    for name, parameter in module._parameters.items():
        if parameter is not None and not nn.parameter.is_lazy(parameter):
            if id(parameter) in tensors:
                empty = torch.empty_like(parameter, device="meta")
                parameter = module._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            tensors.add(id(parameter))
    for name, child in module._modules.items():
        if child is not None and not any(child is parent for parent in above):
            if id(child) in modules:
                child = module._modules[name] = deepcopy(child)
            modules.add(id(child))
            _separate(child, modules, tensors, (*above, child))
