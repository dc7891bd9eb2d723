"""The sums of each convention, and the ties, of any module's tree."""

import json
from collections.abc import Iterable
from copy import deepcopy
from fnmatch import fnmatchcase
from importlib.metadata import version

from bertscope import __version__
from bertscope.config import BertConfig
from bertscope.errors import SelectionError
from bertscope.model import BertPreTrainedModel
from bertscope.model.lora import PeftModel, base_model_of
from bertscope.reports.base import Subject, Tie, Totals
from bertscope.settings.run_config import AS_IN_TRANSFORMERS
from bertscope.torch_access import nn, torch
from bertscope.tracing.module_tree import Held, Node
from bertscope.units import BF16, FP32, PRECISIONS


def held_bytes(held: Held, dtype: str | None) -> int:
    """Return the bytes of a tensor as stored or in `dtype`; 0 for a tied one."""
    return held.distinct_numel * (PRECISIONS[dtype].size_bytes if dtype else held.itemsize)


def totals(root: Node, dtype: str | None) -> Totals:
    """Return all sums over an unfolded tree."""
    params = root.params
    trainable = [held for held in params if held.trainable]
    buffers = [held for held in root.all_held if not held.is_parameter]
    distinct, of_trainable = (sum(held.distinct_numel for held in some) for some in (params, trainable))
    layers, of_trainable_layers = (sum(held.layer_numel for held in some) for some in (params, trainable))
    return Totals(
        distinct_params=distinct,
        layer_params=layers,
        trainable_params=of_trainable,
        frozen_params=distinct - of_trainable,
        trainable_layer_params=of_trainable_layers,
        frozen_layer_params=layers - of_trainable_layers,
        buffer_params=sum(held.distinct_numel for held in buffers),
        buffer_bytes=sum(held_bytes(held, None) for held in buffers),
        param_bytes=sum(held_bytes(held, dtype) for held in params),
        fp32_bytes=distinct * FP32.size_bytes,
        bf16_bytes=distinct * BF16.size_bytes,
        unknown_tensors=len(unknown(root)),
    )


def ties(root: Node) -> tuple[Tie, ...]:
    """Return every further path of a tensor or module that has several."""
    found = [Tie(path=held.path, is_path=held.tied_to, params=held.numel) for held in root.all_held if held.tied_to]
    nodes = {node.path: node for node in root.walk()}
    for node in nodes.values():
        if node.same_as is not None:
            params = sum(held.layer_numel for held in nodes[node.same_as].params)
            found.append(Tie(path=node.path, is_path=node.same_as, params=params))
    return tuple(found)


def unknown(root: Node) -> tuple[str, ...]:
    """Return the paths of tensors whose shape torch does not know yet."""
    return tuple(held.path for held in root.all_held if held.shape is None)


def subject(model: torch.nn.Module, name: str | None = None, dtype: str | None = None) -> Subject:
    """Return the subject of a report on `model`, with its configuration if it has one."""
    base, config = base_model_of(model), getattr(model, "config", None)
    own = config if isinstance(config, BertConfig) else None
    to_dict = getattr(config, "to_dict", None)  # of transformers
    plain = json.loads(json.dumps(to_dict(), default=str)) if own is None and callable(to_dict) else None
    lora = str(model.lora) if isinstance(model, PeftModel) else None
    architecture = type(base if lora else model).__name__
    implementation = None  # of a module of the user's own
    if isinstance(base, BertPreTrainedModel):
        implementation = AS_IN_TRANSFORMERS if base.base_model.uses_transformers_masks else "bertscope's own"
    elif type(base).__module__.startswith("transformers."):
        implementation = f"transformers {version('transformers')}"
    return Subject(
        name=name or architecture,
        architecture=architecture,
        dtype=dtype or "stored",
        implementation=implementation,
        attention=own.attn_implementation if own else getattr(config, "_attn_implementation", None),
        lora=lora,
        config=own.to_dict() if own else plain,
        ignored_fields=own.ignored if own else (),
        torch_version=str(torch.__version__),
        bertscope_version=__version__,
    )


# ---- freezing of the parameters that match patterns ----


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
                f"the pattern {pattern!r} matches no parameter; use a glob ('*.bias') or whole parts of a "
                f"path ('embeddings', 'encoder.layer.0'); the top modules are {', '.join(tops)}"
            )
        for parameter in chosen:
            parameter.requires_grad_(False)


# ---- separation of the tensors that a model holds under several names ----


def untie(model: nn.Module) -> int:
    """Give each further name of a shared parameter or module a separate one; return the number of parameters added.

    The new tensors are on meta, so the model can be counted and not run.
    """
    before = _known(model)
    _separate(model, {id(model)}, set(), (model,))
    return _known(model) - before


def _known(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if not nn.parameter.is_lazy(parameter))


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
