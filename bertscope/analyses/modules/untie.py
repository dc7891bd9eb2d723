"""Separation of the tensors that a model holds under several names."""

from copy import deepcopy

from bertscope.torch_access import nn, torch


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
