"""The layers that may be equal, and the repetition of few layers for all in a module tree.

`layer_stacks` says which layers may be equal; each analysis verifies this on the few layers that it runs.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from operator import eq, itemgetter
from typing import Any, NamedTuple

from bertscope.errors import BertscopeError
from bertscope.model.lora import base_model_of
from bertscope.reports.layer_ranges import Copies, LayerRange, Unit
from bertscope.settings.checkpointing import Checkpointing, Saved, ranges_text, saved_text
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import nn
from bertscope.tracing.module_tree import Node, freeze, moved, tensors_of

RAN = 3  # periods that run: the first is next to the embeddings, the last next to the head; the middle one is repeated
_MIDDLE = 1
_LONGEST = 64  # period that is tried
_PLAIN = (int, float, str, tuple, list, type(None))  # values of attributes that tell layers apart
_OF_PLACE = re.compile("idx|index|layer_(id|number)")  # names of attributes with the number of a layer


class LayerRun(NamedTuple):
    """Consecutive units of layers, each like the one before; a unit is `period` layers."""

    period: int
    units: int


@dataclass(frozen=True)
class LayerStack:
    """A stack of layers as runs of equal units, of which few run instead of many."""

    path: str
    field: str  # of the configuration, with the number of layers
    kinds: tuple[Any, ...]  # equal for layers that may be equal
    runs: tuple[LayerRun, ...]

    @classmethod
    def of(cls, path: str, field: str, kinds: Sequence[Any]) -> "LayerStack":
        """Return the stack of layers of these kinds."""
        return cls(path, field, tuple(kinds), equal_runs(kinds))

    def few(self, units: int) -> tuple[Any, ...]:
        """Return the kinds of the layers that run if every run has at most `units` units."""
        kinds: list[Any] = []
        first = 0
        for run in self.runs:
            kinds += self.kinds[first : first + run.period * min(run.units, units)]
            first += run.period * run.units
        return tuple(kinds)

    def copies(self, ran: int, wanted: int | None = None) -> Copies:
        """Return for each layer of runs of `ran` units its unit and the distances of its copies.

        The copies make runs of `wanted` units, by default of all.
        """
        copies: list[tuple[Unit, range]] = []
        moved = 0
        for number, (period, units) in enumerate(self.runs):
            few, many = min(units, ran), min(units, wanted or units)
            for unit in range(few):
                first = moved + (many - few) * period * (unit > _MIDDLE)
                last = first + (many - few) * period * (unit == _MIDDLE)
                copies += [((number, unit), range(first, last + 1, period))] * period
            moved += (many - few) * period
        return copies


def equal_runs(kinds: Sequence[Any]) -> tuple[LayerRun, ...]:
    """Return the runs of units in a sequence of kinds: at each place the unit whose repetition covers most layers."""
    runs: list[LayerRun] = []
    first = 0
    known: dict[Any, int] = {}
    numbers = [known.setdefault(kind, len(known)) for kind in kinds]
    while first < len(kinds):
        best = LayerRun(1, 1)
        for period in range(1, min((len(kinds) - first) // (RAN + 1), _LONGEST) + 1):
            are_equal = map(eq, islice(numbers, first, None), islice(numbers, first + period, None))
            units = 1 + sum(takewhile(bool, are_equal)) // period
            if units > RAN and units * period > best.units * best.period:
                best = LayerRun(period, units)
        runs.append(best)
        first += best.period * best.units
    return tuple(runs)


def layer_stacks(
    source: ModelSource, *, checkpointing: str = "none", frozen: Sequence[str] = ()
) -> tuple[LayerStack, ...]:
    """Return the stacks of which few layers may run instead of many; none if all layers have to run.

    Layers are of one kind if they have equal modules, parameters and settings, and are recomputed and frozen alike. A
    model with fewer layers must have the same kinds.
    """
    chosen = Checkpointing.parse(checkpointing) or Checkpointing(layers=frozenset())
    if source.layer_path:
        chosen.check_layers(source.layer_path, source.layers)
    if source.has_equal_layers and not frozen:
        (field,) = source.layer_counts(None)
        kinds = [(operators,) for operators in chosen.saved_in(source.layer_path, source.layers)]
        return (LayerStack.of(source.layer_path, field, kinds),)
    try:
        model, stacks = _frozen(source, {}, frozen), list[LayerStack]()
        lists = _lists(model)
        for field, layers in source.layer_counts(model).items():
            # The list that has fewer layers if the field has, unless it is another one too.
            few = min(RAN, layers - 1)
            fewer = {path: len(listed) for path, listed in _lists(_frozen(source, {field: few}, frozen)).items()}
            changed = [path for path, listed in lists.items() if fewer.get(path, len(listed)) != len(listed)]
            if len(changed) == 1 and fewer[changed[0]] == few and len(lists[changed[0]]) == layers:
                covered, settings = chosen.saved_in(changed[0], layers), _settings(model, changed[0], field)
                kinds = [(one, *other) for one, other in zip(covered, settings, strict=True)]
                stacks.append(LayerStack.of(changed[0], field, kinds))
        for units in (RAN, RAN + 1) if stacks else ():
            short = _frozen(source, {stack.field: len(stack.few(units)) for stack in stacks}, frozen)
            wanted = [[kind[1:] for kind in stack.few(units)] for stack in stacks]
            if [_settings(short, stack.path, stack.field) for stack in stacks] != wanted:
                return ()
    except BertscopeError:  # such as a pattern that names a layer
        return ()
    return tuple(stacks)


def shortened(checkpointing: str, stacks: Mapping[str, Sequence[Any]]) -> str:
    """Return the strategy that recomputes the layers of these kinds, by their lists, as in the deep model."""
    chosen = Checkpointing.parse(checkpointing)
    covered = {path: [kind[0] for kind in kinds] for path, kinds in stacks.items()}
    is_same = chosen is None or all(chosen.saved_in(path, len(kinds)) == kinds for path, kinds in covered.items())
    if chosen is None or (is_same and all(saved.layers is None for saved in chosen.saved)):
        return checkpointing
    groups: dict[tuple[str, frozenset[str]], list[int]] = {}
    for path, kinds in covered.items():
        for number, operators in enumerate(kinds):
            if operators is not None:
                groups.setdefault((path, operators), []).append(number)
    if chosen.saved:
        saved = (
            Saved(path=path, operators=operators, layers=frozenset(numbers))
            for (path, operators), numbers in groups.items()
        )
        return saved_text(saved)
    return f"layers:{ranges_text(next(iter(groups.values())))}" if len(stacks) == 1 else checkpointing


def _frozen(source: ModelSource, counts: Mapping[str, int], frozen: Sequence[str]) -> Any:
    model = source.with_layer_counts(counts).build()
    freeze(model, frozen)
    return model


def _lists(model: Any) -> dict[str, Any]:
    return {path: part for path, part in model.named_modules() if isinstance(part, (nn.ModuleList, nn.Sequential))}


def _settings(model: Any, path: str, field: str) -> list[tuple[Any, ...]]:
    """Return for each layer of a list what its run may depend on.

    That is its classes, attributes and parameters, and its elements of the lists in the configuration with the field.
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
        public = ((name, value) for name, value in vars(module).items() if not name.startswith("_"))
        plain = {
            name: repr(value) for name, value in public if isinstance(value, _PLAIN) and not _OF_PLACE.search(name)
        }
        held = [(name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor, _ in tensors_of(module)]
        yield path, type(module), tuple(sorted(plain.items())), tuple(held)


@dataclass(frozen=True)
class Repeated:
    """A folded tree in which a layer that ran counts with its copies."""

    root: Node
    copies: Mapping[str, Copies] = field(default_factory=dict)  # by the path of the stack

    @property
    def ran(self) -> int | None:
        """Return the number of layers that ran; None if all did."""
        return sum(map(len, self.copies.values())) or None

    def scaled(self, path: str, cost: Any) -> Any:
        """Return what the module at `path` costs, as it ran, for all layers that count."""
        for stack, copies in self.copies.items():
            if path.startswith(f"{stack}."):
                return cost * len(copies[int(path.removeprefix(f"{stack}.").partition(".")[0])][1])
        return cost


def repeated(root: Node, copies: Mapping[str, Copies]) -> Repeated | None:
    """Return the folded tree with the copies of all layers; None if a unit is unlike the copied one next to it."""
    for path, layer_copies in copies.items():
        stack = root.descend(path)
        ran = _each(stack) if stack else []
        if len(ran) != len(layer_copies):
            return None
        for number, (unit, distances) in enumerate(layer_copies):
            period = sum(other == unit for other, _ in layer_copies)
            alike = (ran[number + step].likeness for step in (-period, period) if len(distances) > 1)
            if any(other != ran[number].likeness for other in alike):
                return None

    def change(node: Node) -> Node:
        if node.path not in copies:
            return replace(node, children=tuple(map(change, node.children)))
        spans: list[tuple[int, int, Node]] = []  # the first and the last number of equal layers; there may be many
        for first, last, layer in sorted(_places(copies[node.path], _each(node)), key=itemgetter(0)):
            if spans and spans[-1][1] + 1 == first and spans[-1][2].likeness == layer.likeness:
                first = spans.pop()[0]
            spans.append((first, last, layer))
        numbered = ((LayerRange(first, last), layer) for first, last, layer in spans)
        return replace(
            node,
            children=tuple(
                replace(moved(layer, layer.path, f"{node.path}.{numbers}"), name=str(numbers), copies=len(numbers))
                for numbers, layer in numbered
            ),
        )

    return Repeated(change(root), copies)


def _each(stack: Node) -> list[Node]:
    return [layer for layer in stack.children for _ in range(layer.copies)]


def _places(copies: Copies, ran: Sequence[Node]) -> Iterator[tuple[int, int, Node]]:
    """Yield the first and the last place of each layer that ran, or if units have several layers each place."""
    for number, ((_, distances), layer) in enumerate(zip(copies, ran, strict=True)):
        if distances.step == 1:
            yield number + distances[0], number + distances[-1], layer
        else:
            yield from ((number + distance, number + distance, layer) for distance in distances)
