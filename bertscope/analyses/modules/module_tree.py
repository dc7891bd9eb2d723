"""A plain tree of the modules and tensors of any torch module, and the folding of equal neighbours.

Counting rules, the same for every module:
- A module with several paths is one layer, which counts at its first path.
- A tensor counts at every layer that holds it; a container counts only tensors that no layer below it holds.
- `tied_to` of a tensor is the first path at which it counts. Tensors are compared by the identity of the
  Parameter, since tensors on meta have no storage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from bertscope import torch_access
from bertscope.config import MAX_BUILT_LAYERS
from bertscope.errors import SelectionError
from bertscope.reports.base import Shape, TensorShape
from bertscope.reports.layer_ranges import LayerRange, expand, number_of, written_apart
from bertscope.sources.building import REPEATED
from bertscope.torch_access import nn, torch


def public(cls: type) -> type:
    """Return the class, or for one of a private module its first base outside private modules."""
    while _is_private(cls.__module__) and cls.__bases__ != (object,):
        cls = cls.__bases__[0]
    return cls


def _is_private(module: str) -> bool:
    """Return True for a private module, and for the module here that subclasses torch's classes."""
    return module == torch_access.__name__ or any(part.startswith("_") for part in module.split("."))


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
    itemsize: int
    is_parameter: bool
    trainable: bool
    counts: bool
    tied_to: str | None

    @property
    def layer_numel(self) -> int:
        """Return the elements that it adds to the sum over layers."""
        return self.numel if self.counts else 0

    @property
    def distinct_numel(self) -> int:
        """Return the elements that it adds to the sum of unique tensors."""
        return 0 if self.tied_to else self.numel


@dataclass(frozen=True, kw_only=True)
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
    def likeness(self) -> object:
        """Return a value that is equal for modules that differ only in their path and number of copies."""
        return _likeness(self, self.path)

    @cached_property
    def all_held(self) -> tuple[Held, ...]:
        """Return every tensor at and below one copy, once for each copy below."""
        found = list(self.held)
        for child in self.children:
            if child.copies > MAX_BUILT_LAYERS:  # one tensor has the elements of all
                found += [held._replace(numel=held.numel * child.copies) for held in child.all_held]
            else:
                found += child.all_held * child.copies
        return tuple(found)

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


def read(model: nn.Module, note_of: Callable[[str], object] = lambda path: None) -> Node:
    """Return the tree of any module, including lazy, tied, shared and frozen parts, without running it.

    `note_of` returns the note of the module at a path; only modules with equal notes fold. The two layers of
    `built_for_counting` are one node with the copies of all.
    """
    return _node(_Reading(*_found(model), {}, note_of), model, "", "")


class _Reading(NamedTuple):
    """The reading of a model. No closure holds it, whose cycle would keep the model until the next collection."""

    found: dict[int, tuple[list[_Tensor], frozenset[int]]]
    homes: dict[int, str]
    met: dict[int, str]  # the first path of each module that was read
    note_of: Callable[[str], object]


def _node(reading: _Reading, module: nn.Module, name: str, path: str) -> Node:
    """Return the node of a module."""
    kind, note, found = type(module).__name__, reading.note_of(path), reading.found.get(id(module))
    first = reading.met.setdefault(id(module), path)
    if first != path:
        return Node(name=name, path=path, type=kind, same_as=first, note=note)
    children = tuple(
        [
            _node(reading, child, child_name, _join(path, child_name))
            for child_name, child in module._modules.items()
            if child is not None
        ]
    )
    if (layers := vars(module).get(REPEATED)) is not None:
        children = (_repeated(children, path, layers),)
    return Node(
        name=name,
        path=path,
        type=kind,
        held=tuple(_held(*found, path, reading.homes)) if found else (),
        children=children,
        is_list=isinstance(module, nn.ModuleList),
        kernel_size=_kernel_size(module),
        note=note,
    )


def _repeated(layers: tuple[Node, ...], path: str, copies: int) -> Node:
    """Return two equal layers as one node with these copies; raises SelectionError if they differ."""
    one, *others = map(fold, layers)
    if any(other.likeness != one.likeness or other.same_as for other in others):
        raise SelectionError(
            f"{copies:,} layers are counted from two equal ones, and those of {path} differ; leave "
            f"out what concerns single layers, or lower num_hidden_layers to {MAX_BUILT_LAYERS}"
        )
    return _named(replace(one, copies=copies))


def read_with(model: nn.Module, found: Mapping[str, InOut] | None) -> Node:
    """Return the tree of a model with the shapes of each module, or no shapes, as its note."""
    nothing: InOut = ((), ())
    return read(model, lambda path: (found or {}).get(path, nothing))


def _kernel_size(module: nn.Module) -> int | tuple[int, ...] | None:
    size = vars(module).get("kernel_size")
    if isinstance(size, (tuple, list)):
        return tuple(size) if all(isinstance(number, int) for number in size) else None
    return size if isinstance(size, int) else None


def _held(own: list[_Tensor], below: frozenset[int], path: str, homes: dict[int, str]) -> Iterator[Held]:
    """Yield the tensors of a module at this path; `below` are the ids of those of the modules below it."""
    first_names: dict[int, str] = {}  # the module itself may hold a tensor twice
    for name, tensor, is_parameter in own:
        address, home = _join(path, name), homes[id(tensor)]
        is_first = first_names.setdefault(id(tensor), name) == name
        unknown = nn.parameter.is_lazy(tensor)
        yield Held(
            path=address,
            shape=None if unknown else tuple(tensor.shape),
            numel=0 if unknown else tensor.numel(),
            itemsize=tensor.dtype.itemsize,
            is_parameter=is_parameter,
            trainable=is_parameter and tensor.requires_grad,
            counts=home == address or (is_first and id(tensor) not in below),
            tied_to=None if home == address else home,
        )


def tensors_of(module: nn.Module) -> list[_Tensor]:
    """Return the name of each parameter and buffer of the module itself, the tensor, and True for a parameter."""
    kinds = ((module._parameters, True), (module._buffers, False))
    return [(name, tensor, kind) for tensors, kind in kinds for name, tensor in tensors.items() if tensor is not None]


def _found(model: nn.Module) -> tuple[dict[int, tuple[list[_Tensor], frozenset[int]]], dict[int, str]]:
    """Return the own tensors of each module with the ids of those below it, and the first path of each tensor."""
    found: dict[int, tuple[list[_Tensor], frozenset[int]]] = {}
    homes: dict[int, str] = {}
    others: dict[int, str] = {}
    for path, module in model.named_modules():
        if own := tensors_of(module):
            below = _held_below(module) if module._modules else frozenset()
            found[id(module)] = own, below
            for name, tensor, _ in own:
                (others if id(tensor) in below else homes).setdefault(id(tensor), _join(path, name))
    return found, others | homes  # every module of a cycle holds the tensors that have no other path


def _held_below(module: nn.Module) -> frozenset[int]:
    """Return the ids of the tensors held by modules below this one."""
    below = (inner for inner in module.modules() if inner is not module)  # a child may hold its parent
    return frozenset(id(tensor) for inner in below for _, tensor, _ in tensors_of(inner))


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def fold(node: Node) -> Node:
    """Return the same tree with equal, consecutively numbered neighbours as one node: `0-11`, 12 copies."""
    runs: list[list[Node]] = []
    for child in map(fold, node.children):
        if runs and _continues(runs[-1], child):
            runs[-1].append(child)
        else:
            runs.append([child])
    children = tuple([_named(run[0] if len(run) == 1 else replace(run[0], copies=len(run))) for run in runs])
    return node if children == node.children else replace(node, children=children)


def row_paths(model: nn.Module) -> dict[str, str]:
    """Return, for the path of every module, the path of its row in the folded tree."""
    return {path: row.path for row in fold(read(model)).walk() for path in expand(row.path)}


def _continues(run: list[Node], child: Node) -> bool:
    number, first = number_of(child.name), number_of(run[0].name)
    if number is None or first is None or child.same_as is not None:
        return False
    return number == first + len(run) and run[0].likeness == child.likeness


def _named(node: Node) -> Node:
    """Return a node with the layer range of its copies in its path and in those below."""
    number = number_of(node.name)
    if number is None and node.copies > 1:  # it has its range
        return node
    numbers = written_apart(node.name) if number is None else str(LayerRange(number, number + node.copies - 1))
    if numbers == node.name:
        return node
    return replace(moved(node, node.path, node.path.removesuffix(node.name) + numbers), name=numbers)


def _likeness(node: Node, base: str) -> object:
    """Return all that a node is, except its name and copies, with the paths below `base` relative to it."""

    def relative(path: str | None) -> str | None:
        return _renamed(path, base, "")

    held = [
        (relative(item.path), item.shape, item.numel, item.itemsize, item.is_parameter, item.trainable, item.counts,
         relative(item.tied_to))
        for item in node.held
    ]  # fmt: skip
    children = [(child.name, child.copies, _likeness(child, base)) for child in node.children]
    return (
        node.type, node.is_list, node.kernel_size, node.note, relative(node.same_as), tuple(held), tuple(children)
    )  # fmt: skip


def moved(node: Node, old: str, new: str) -> Node:
    """Return a node at or below the path `old` with its paths below `new`."""
    return replace(
        node,
        path=new + node.path[len(old) :],
        held=tuple(
            held._replace(path=new + held.path[len(old) :], tied_to=_renamed(held.tied_to, old, new))
            for held in node.held
        ),
        same_as=_renamed(node.same_as, old, new),
        children=tuple(moved(child, old, new) for child in node.children),
    )


def _renamed(path: str | None, old: str, new: str) -> str | None:
    return new + path[len(old) :] if path is not None and path.startswith(f"{old}.") else path
