"""A plain tree of the modules and tensors of any torch module, the folding of equal neighbours, and sums over it.

Counting rules, the same for every module:
- A module with several paths is one layer, which counts at its first path.
- A tensor counts at every layer that holds it; a container counts only tensors that no layer below it holds.
- `tied_to` of a tensor is the first path at which it counts. Tensors are compared by the identity of the
  Parameter, since tensors on meta have no storage.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from importlib.metadata import version
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

from bertscope import __version__, torch_access
from bertscope.config import MAX_BUILT_LAYERS, BertConfig
from bertscope.errors import SelectionError
from bertscope.model.bert import BertPreTrainedModel
from bertscope.model.lora import base_model_of
from bertscope.model.quantized import QuantizedLinear
from bertscope.reports.base import Shape, Subject, TensorShape, Tie, Totals
from bertscope.reports.layer_ranges import LayerRange, expand, number_of, written_apart
from bertscope.settings.run_config import AS_IN_TRANSFORMERS
from bertscope.sources.model_source import REPEATED
from bertscope.torch_access import always, nn, torch
from bertscope.units import BF16, FP32, PRECISIONS


def public(cls: type) -> type:
    """Return the class, or for one of a private module, or of torch_access, its first base outside of these."""
    while cls.__bases__ != (object,):
        module = cls.__module__
        if module != torch_access.__name__ and not any(part.startswith("_") for part in module.split(".")):
            break
        cls = cls.__bases__[0]
    return cls


def type_name(cls: type, package: str) -> str:
    """Return the name of a class of `package` or of Python's builtins; the import path of any other."""
    cls = public(cls)
    return cls.__name__ if is_of(cls, package) or cls.__module__ == "builtins" else address(cls)


def is_of(cls: type, package: str) -> bool:
    """Return True if the class, or its public base, is defined in that package."""
    return public(cls).__module__.partition(".")[0] == package


def address(cls: type) -> str:
    """Return the shortest public import path of a class; that of its file's package if no package exports it.

    Examples: `torch.nn.Linear`, `bertscope.model.BertLayer`, `transformers.models.bert.BertModel`.
    """
    parts = cls.__module__.split(".")
    for length in range(min(2, len(parts)), len(parts)):
        package = ".".join(parts[:length])
        if getattr(sys.modules.get(package), cls.__name__, None) is cls:
            return f"{package}.{cls.__name__}"
    package_parts = parts[:-1] if len(parts) > 2 else parts
    return ".".join((*package_parts, cls.__name__))


Shapes = tuple[TensorShape, ...]
InOut = tuple[Shapes, Shapes]  # of a module in a run
_Tensor = tuple[str, torch.Tensor, bool]  # a name in its module, and True for a parameter


class Held(NamedTuple):
    """One parameter or buffer at one path; `counts` is True if it is part of the sum over layers."""

    path: str
    shape: Shape
    numel: int
    itemsize: float
    is_parameter: bool
    trainable: bool
    counts: bool
    is_packed: bool  # in 4 or 8 bits, whatever dtype the others have
    tied_to: str | None

    @property
    def layer_numel(self) -> int:
        """Return the elements that it adds to the sum over layers."""
        return self.numel if self.counts else 0

    @property
    def distinct_numel(self) -> int:
        """Return the elements that it adds to the sum of unique tensors."""
        return 0 if self.tied_to else self.numel


@dataclass(kw_only=True)  # frozen, it takes three times as long to make
class Node:
    """One module. A folded node represents `copies` equal neighbours and has the children of the first."""

    name: str
    path: str
    type: str
    held: tuple[Held, ...] = ()
    children: tuple[Node, ...] = ()
    copies: int = 1
    is_list: bool = False
    same_as: str | None = None
    kernel_size: int | tuple[int, ...] | None = None  # of a convolution or pooling
    note: Any = None  # data of an analysis on the module itself

    @cached_property
    def likeness(self) -> Node:
        """Return a node that is equal for modules that differ only in their path and number of copies."""
        return replace(moved(self, self.path, ""), name="", copies=1)

    @cached_property
    def all_held(self) -> tuple[Held, ...]:
        """Return every tensor at and below one copy, once for each copy below."""
        tensors = list(self.held)
        for child in self.children:
            if child.copies > MAX_BUILT_LAYERS:  # one tensor has the elements of all
                tensors += [held._replace(numel=held.numel * child.copies) for held in child.all_held]
            else:
                tensors += child.all_held * child.copies
        return tuple(tensors)

    @cached_property
    def params(self) -> tuple[Held, ...]:
        """Return the parameters at and below one copy."""
        return tuple(held for held in self.all_held if held.is_parameter)

    def descend(self, path: str) -> Node | None:
        """Return the node at `path` below this one, or None."""
        wanted = _join(self.path, path)
        return next((node for node in self.walk() if node.path == wanted), None)

    def walk(self) -> Iterator[Node]:
        """Yield this node and all below it, parents first."""
        return (node for node, *_ in self.rows())

    def rows(self, depth: int = 0, copies: int = 1, is_last: bool = True) -> Iterator[tuple[Node, int, int, bool]]:
        """Yield the same nodes, each with its depth, its copies in all, and True for the last child of its parent."""
        copies *= self.copies
        yield self, depth, copies, is_last
        for child in self.children:
            yield from child.rows(depth + 1, copies, child is self.children[-1])


def read(model: nn.Module, notes: Mapping[str, object] | None = None, no_note: object = None) -> Node:
    """Return the tree of any module, including lazy, tied, shared and frozen parts, without running it.

    `notes` are those of modules by their paths; only modules with equal notes fold. The two layers of
    `built_for_counting` are one node with the copies of all.
    """
    return _Reader(model, notes or {}, no_note).node(model, "", "")


class _Reader:
    """A model's reader. No closure holds it, whose cycle would keep the model until the next collection."""

    def __init__(self, model: nn.Module, notes: Mapping[str, object], no_note: object) -> None:
        self.notes, self.no_note = notes, no_note
        self.met: dict[int, str] = {}  # the first path of each module that was read
        self.tensors: dict[int, tuple[list[_Tensor], set[int]]] = {}  # of each module, and the ids of all below it
        self.homes: dict[int, str] = {}  # the first path at which each tensor counts
        outer: dict[int, str] = {}
        for path, module in model.named_modules():
            if tensors := tensors_of(module):
                inside = module.modules() if module._modules else ()
                below = {id(tensor) for inner in inside if inner is not module for _, tensor, _ in tensors_of(inner)}
                self.tensors[id(module)] = tensors, below
                for name, tensor, _ in tensors:
                    (outer if id(tensor) in below else self.homes).setdefault(id(tensor), _join(path, name))
        self.homes = outer | self.homes  # every module of a cycle holds the tensors that have no other path

    def node(self, module: nn.Module, name: str, path: str) -> Node:
        kind, note = type(module).__name__, self.notes.get(path, self.no_note)
        first = self.met.setdefault(id(module), path)
        if first != path:
            return Node(name=name, path=path, type=kind, same_as=first, note=note)
        parts = [(part, child) for part, child in module._modules.items() if child is not None]
        children = tuple([self.node(child, part, _join(path, part)) for part, child in parts])
        if (layers := vars(module).get(REPEATED)) is not None:
            children = (_repeated(children, path, layers),)
        size = vars(module).get("kernel_size")
        size = tuple(size) if isinstance(size, (tuple, list)) else size
        is_size = all(isinstance(number, int) for number in (size if isinstance(size, tuple) else (size,)))
        return Node(
            name=name,
            path=path,
            type=kind,
            held=tuple(self.held(module, path)),
            children=children,
            is_list=isinstance(module, nn.ModuleList),
            kernel_size=size if is_size else None,
            note=note,
        )

    def held(self, module: nn.Module, path: str) -> Iterator[Held]:
        tensors, below = self.tensors.get(id(module), ((), ()))
        first_names: dict[int, str] = {}  # the module itself may hold a tensor twice
        for name, tensor, is_parameter in tensors:
            address, home = _join(path, name), self.homes[id(tensor)]
            is_first = first_names.setdefault(id(tensor), name) == name
            unknown = nn.parameter.is_lazy(tensor)
            shape: tuple[int, ...] = () if unknown else tuple(tensor.shape)
            if isinstance(module, QuantizedLinear) and name == "weight":
                shape = tuple(module.shape)
            is_packed = not unknown and shape != tensor.shape
            yield Held(
                path=address,
                shape=None if unknown else shape,
                numel=0 if unknown else prod(shape),
                itemsize=tensor.nbytes / prod(shape) if is_packed else tensor.dtype.itemsize,
                is_packed=is_packed,
                is_parameter=is_parameter,
                trainable=is_parameter and tensor.requires_grad,
                counts=home == address or (is_first and id(tensor) not in below),
                tied_to=None if home == address else home,
            )


def tensors_of(module: nn.Module) -> list[_Tensor]:
    """Return the name of each parameter and buffer of the module itself, the tensor, and True for a parameter."""
    kinds = ((module._parameters, True), (module._buffers, False))
    return [(name, tensor, kind) for tensors, kind in kinds for name, tensor in tensors.items() if tensor is not None]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _repeated(layers: tuple[Node, ...], path: str, copies: int) -> Node:
    """Return two equal layers as one node with these copies; raises SelectionError if they differ."""
    one, *rest = map(fold, layers)
    if any(other.likeness != one.likeness or other.same_as for other in rest):
        raise SelectionError(
            f"{copies:,} layers are counted from two equal ones, and those of {path} differ; leave "
            f"out what concerns single layers, or lower num_hidden_layers to {MAX_BUILT_LAYERS}"
        )
    return _named(replace(one, copies=copies))


def fold(node: Node) -> Node:
    """Return the same tree with equal, consecutively numbered neighbours as one node: `0-11`, 12 copies."""
    runs: list[tuple[Node, int]] = []  # the first of equal ones, and their number
    for child in map(fold, node.children):
        number = number_of(child.name)
        first, copies = runs[-1] if runs else (child, 0)
        follows = number is not None and child.same_as is None and number_of(first.name) == number - copies
        if copies and follows and first.likeness == child.likeness:
            runs[-1] = first, copies + 1
        else:
            runs.append((child, 1))
    children = tuple([_named(first if copies == 1 else replace(first, copies=copies)) for first, copies in runs])
    return node if children == node.children else replace(node, children=children)


def row_paths(model: nn.Module) -> dict[str, str]:
    """Return, for the path of every module, the path of its row in the folded tree."""
    return {path: row.path for row in fold(read(model)).walk() for path in expand(row.path)}


def _named(node: Node) -> Node:
    """Return a node with the layer range of its copies in its path and in those below."""
    number = number_of(node.name)
    if number is None and node.copies > 1:  # it has its range
        return node
    numbers = written_apart(node.name) if number is None else str(LayerRange(number, number + node.copies - 1))
    if numbers == node.name:
        return node
    return replace(moved(node, node.path, node.path.removesuffix(node.name) + numbers), name=numbers)


def moved(node: Node, old: str, new: str) -> Node:
    """Return a node at or below the path `old` with its paths below `new`."""
    start = len(old)
    return Node(  # `replace` takes four times as long
        name=node.name,
        path=new + node.path[start:],
        type=node.type,
        held=tuple(
            [Held(new + held.path[start:], *held[1:-1], _renamed(held.tied_to, old, new)) for held in node.held]
        ),
        children=tuple([moved(child, old, new) for child in node.children]),
        copies=node.copies,
        is_list=node.is_list,
        same_as=_renamed(node.same_as, old, new),
        kernel_size=node.kernel_size,
        note=node.note,
    )


def _renamed(path: str | None, old: str, new: str) -> str | None:
    return new + path[len(old) :] if path is not None and path.startswith(f"{old}.") else path


# ---- the sums of each convention, and the ties ----


def held_bytes(held: Held, dtype: str | None) -> int:
    """Return a tensor's bytes as stored or in `dtype`; 0 for a tied one."""
    itemsize = PRECISIONS[dtype].size_bytes if dtype and not held.is_packed else held.itemsize
    return round(held.distinct_numel * itemsize)


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
    """Return every further path of a tensor or module that has several, the largest first."""
    further = [Tie(path=held.path, is_path=held.tied_to, params=held.numel) for held in root.all_held if held.tied_to]
    nodes = {node.path: node for node in root.walk()}
    for node in nodes.values():
        if node.same_as is not None:
            params = sum(held.layer_numel for held in nodes[node.same_as].params)
            further.append(Tie(path=node.path, is_path=node.same_as, params=params))
    return tuple(sorted(further, key=attrgetter("params"), reverse=True))


def unknown(root: Node) -> tuple[str, ...]:
    """Return the paths of tensors whose shape torch does not know yet."""
    return tuple(held.path for held in root.all_held if held.shape is None)


def subject(model: torch.nn.Module, name: str | None = None, dtype: str | None = None) -> Subject:
    """Return the subject of a report on `model`, with its configuration if it has one."""
    base, config = base_model_of(model), getattr(model, "config", None)
    bert_config = config if isinstance(config, BertConfig) else None
    to_dict = getattr(config, "to_dict", None)  # of transformers
    plain = json.loads(json.dumps(to_dict(), default=str)) if bert_config is None and callable(to_dict) else None
    lora = vars(model).get("lora")  # the settings in a PeftModel, or a text that the source has set on peft's model
    architecture = type(base if lora else model).__name__
    implementation = None  # of a module of the user's own
    if isinstance(base, BertPreTrainedModel):
        implementation = AS_IN_TRANSFORMERS if base.base_model.uses_transformers_masks else "bertscope's own"
    elif type(base).__module__.startswith("transformers."):
        implementation = f"transformers {version('transformers')}"
    outputs = getattr(base, "get_output_embeddings", always(None))()
    return Subject(
        name=name or architecture,
        architecture=architecture,
        dtype=dtype or "stored",
        implementation=implementation,
        has_head=implementation is None or getattr(base, "base_model", None) is not base or outputs is not None,
        attention=bert_config.attn_implementation if bert_config else getattr(config, "_attn_implementation", None),
        lora=lora and str(lora),
        config=bert_config.to_dict() if bert_config else plain,
        ignored_fields=bert_config.ignored if bert_config else (),
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
                f"the pattern {pattern!r} matches no parameter; use a glob ('*.bias') or complete parts of a "
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
