"""The test that layers may be equal, and the repetition of one layer for all in a module tree.

`period` says which layers may be equal; each analysis verifies this on the few layers that it runs.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple

from bertscope.analyses.modules.module_tree import Node, fold, moved
from bertscope.analyses.modules.totals import freeze
from bertscope.errors import BertscopeError, SelectionError
from bertscope.model.lora import base_model_of
from bertscope.settings.checkpointing import Checkpointing
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import nn

RAN = 3  # periods that run: the first is next to the embeddings, the last next to the head; the middle one is repeated
_MIDDLE = 1
_OF_PLACE = re.compile("idx|index|layer_(id|number)")  # names of attributes with the number of a layer


def period(source: ModelSource, *, checkpointing: str = "none", frozen: Sequence[str] = ()) -> int:
    """Return the number of layers after which a run of the model repeats itself; 0 if it may not.

    `frozen` are the patterns of frozen parameters, which must match the same ones of every layer.
    """
    chosen = Checkpointing.parse(checkpointing)
    if not source.has_equal_layers or (chosen and chosen.layers is not None):
        return 0
    every = chosen.every if chosen else 1
    return every if not frozen or _are_frozen_alike(source, frozen, RAN * every) else 0


class LayerRun(NamedTuple):
    """Consecutive units of layers, each like the one before; a unit is `period` layers."""

    period: int
    units: int


@dataclass(frozen=True)
class LayerStack:
    """A stack of layers as runs of equal units, of which few run in place of many."""

    path: str
    field: str  # of the configuration, with the number of layers
    kinds: tuple[Any, ...]  # equal for layers that may be equal
    runs: tuple[LayerRun, ...]

    @classmethod
    def of(cls, path: str, field: str, kinds: Sequence[Any]) -> "LayerStack":
        """Return the stack of layers of these kinds."""
        return cls(path, field, tuple(kinds), equal_runs(kinds))

    def few(self, units: int) -> tuple[Any, ...]:
        """Return the kinds of the layers that run if every run has at most so many units."""
        found, first = [], 0
        for run in self.runs:
            found += self.kinds[first : first + run.period * min(run.units, units)]
            first += run.period * run.units
        return tuple(found)

    def copies(self, ran: int, wanted: int | None = None) -> list[tuple[int, range]]:
        """Return for each layer of runs of `ran` units its unit and the distances of its copies.

        The copies make runs of `wanted` units, by default of all.
        """
        found: list[tuple[int, range]] = []
        number = moved = 0
        for period, units in self.runs:
            few, many = min(units, ran), min(units, wanted or units)
            for unit in range(few):
                first = moved + (many - few) * period * (unit > _MIDDLE)
                last = first + (many - few) * period * (unit == _MIDDLE)
                found += [(number + unit, range(first, last + 1, period))] * period
            number, moved = number + few, moved + (many - few) * period
        return found


def equal_runs(kinds: Sequence[Any]) -> tuple[LayerRun, ...]:
    """Return the runs of units in a sequence of kinds: at each place the unit whose repetition covers most layers."""
    runs: list[LayerRun] = []
    first = 0
    while first < len(kinds):
        best = LayerRun(1, 1)
        for period in range(1, (len(kinds) - first) // (RAN + 1) + 1):
            equal = takewhile(lambda at: kinds[at] == kinds[at - period], range(first + period, len(kinds)))
            units = 1 + sum(1 for _ in equal) // period
            if units > RAN and units * period > best.units * best.period:
                best = LayerRun(period, units)
        runs.append(best)
        first += best.period * best.units
    return tuple(runs)


def layer_stacks(
    source: ModelSource, *, checkpointing: str = "none", frozen: Sequence[str] = ()
) -> tuple[LayerStack, ...]:
    """Return the stacks of which few layers may run in place of many; none if all layers have to run.

    Layers are of one kind if they have equal modules, parameters and settings, and are recomputed and frozen alike. A
    model with fewer layers must have the same kinds.
    """
    chosen = Checkpointing.parse(checkpointing)
    if source.has_equal_layers and not frozen:
        (field,) = source.layer_counts(None)
        kinds = [(chosen is not None and chosen.covers(number),) for number in range(source.layers)]
        return (LayerStack.of(source.layer_path, field, kinds),)
    try:
        model = _frozen(source, {}, frozen)
        found = [stack for field, layers in source.layer_counts(model).items()
                 if (stack := _stack(source, model, field, layers, chosen, frozen))]  # fmt: skip
        for units in (RAN, RAN + 1):
            fewer = _frozen(source, {stack.field: len(stack.few(units)) for stack in found}, frozen)
            if any(_settings(fewer, stack.path, stack.field) != [kind[1:] for kind in stack.few(units)]
                   for stack in found):  # fmt: skip
                return ()
    except BertscopeError:  # such as a pattern that names a layer
        return ()
    return tuple(found)


def _stack(
    source: ModelSource, model: Any, field: str, layers: int, chosen: Checkpointing | None, frozen: Sequence[str]
) -> LayerStack | None:
    """Return the one list of the model that has one layer less if the field has; None if no or another list has."""
    fewer = {path: len(layers) for path, layers in _lists(_frozen(source, {field: layers - 1}, frozen)).items()}
    changed = [path for path, found in _lists(model).items() if fewer.get(path, len(found)) != len(found)]
    if len(changed) != 1 or fewer[changed[0]] != layers - 1 or len(_lists(model)[changed[0]]) != layers:
        return None
    covered = [(chosen is not None and chosen.covers(number),) for number in range(layers)]
    settings = _settings(model, changed[0], field)
    return LayerStack.of(changed[0], field, [one + other for one, other in zip(covered, settings, strict=True)])


def _frozen(source: ModelSource, counts: Mapping[str, int], frozen: Sequence[str]) -> Any:
    """Return the model with other numbers of layers, and with frozen parameters."""
    model = source.with_layer_counts(counts).build()
    freeze(model, frozen)
    return model


def _lists(model: Any) -> dict[str, Any]:
    """Return the lists of modules by their paths."""
    return {path: part for path, part in model.named_modules() if isinstance(part, (nn.ModuleList, nn.Sequential))}


def _settings(model: Any, path: str, field: str) -> list[tuple[Any, ...]]:
    """Return for each layer of a list what its run may depend on: classes, attributes, parameters, and its elements
    of the lists in the configuration that has the field.
    """
    layers = list(model.get_submodule(path))
    config = base_model_of(model).config.to_dict()
    for name in field.split(".")[:-1]:
        config = config[name]
    elements = [value for value in config.values() if isinstance(value, (list, tuple)) and len(value) == len(layers)]
    return [(*(repr(value[number]) for value in elements), *_attributes(layer)) for number, layer in enumerate(layers)]


def _attributes(layer: Any) -> Iterator[Any]:
    """Yield the path, class and simple attributes of each module, except numbers of the layer, and its tensors."""
    for path, module in layer.named_modules():
        plain = {name: repr(value) for name, value in vars(module).items()
                 if not name.startswith("_") and not _OF_PLACE.search(name)
                 and isinstance(value, (int, float, str, tuple, list, type(None)))}  # fmt: skip
        tensors = [(name, tensor.shape, tensor.dtype, tensor.requires_grad)
                   for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]  # fmt: skip
        yield path, type(module), tuple(sorted(plain.items())), tuple(tensors)


def _are_frozen_alike(source: ModelSource, frozen: Sequence[str], few: int) -> bool:
    """Return True if the patterns freeze the same parameters of every layer, and match some of a model with few."""
    model = source.build()
    freeze(model, frozen)
    stack: Any = model.get_submodule(source.layer_path)
    kinds = {tuple((path, param.requires_grad) for path, param in layer.named_parameters()) for layer in stack}
    try:
        freeze(source.with_layers(min(few, source.layers)).build(), frozen)
    except SelectionError:  # a pattern names a layer
        return False
    return len(kinds) == 1


def equal_layers(root: Node, path: str) -> tuple[Node, ...]:
    """Return the layers of the list at `path` in a folded tree; equal neighbours are one node."""
    stack = root.descend(path)
    return stack.children if stack else ()


@dataclass(frozen=True)
class Repeated:
    """A folded tree in which the `ran` layers at `path` count as `layers`; without a path, the tree as it ran."""

    root: Node
    path: str = ""
    ran: int = 1
    layers: int = 1
    repeats: int = 1  # number of layers in a period

    def scaled(self, path: str, cost: Any) -> Any:
        """Return what the module at `path` costs, as it ran, for all layers that count; those of the middle repeat."""
        prefix = f"{self.path}."
        if not self.path or not path.startswith(prefix):
            return cost
        number = int(path.removeprefix(prefix).partition(".")[0])
        is_middle = self.repeats <= number < self.ran - self.repeats
        return cost * (1 + (self.layers - self.ran) // self.repeats) if is_middle else cost


def repeated(root: Node, path: str, layers: int, repeats: int = 1) -> Repeated | None:
    """Return the folded tree with `layers` layers at `path`; None if they do not repeat after `repeats` layers."""
    found = [layer for layer in equal_layers(root, path) for _ in range(layer.copies)]
    first = found[:repeats]
    if not found or layers % repeats or len(found) % repeats:
        return None
    if any(layer.likeness != first[place % repeats].likeness for place, layer in enumerate(found)):
        return None

    def numbered(number: int) -> Node:
        layer = first[number % repeats]
        return replace(moved(layer, layer.path, f"{path}.{number}"), name=str(number), copies=1)

    def change(node: Node) -> Node:
        if node.path == path:
            return fold(replace(node, children=tuple(map(numbered, range(layers)))))
        return replace(node, children=tuple(map(change, node.children)))

    return Repeated(change(root), path, len(found), layers, repeats)
