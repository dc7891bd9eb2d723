"""The test that layers may be equal, and the repetition of one layer for all in a module tree.

`period` says which layers may be equal; each analysis verifies this on the few layers that it runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bertscope.analyses.modules.module_tree import Node, fold, moved
from bertscope.analyses.modules.totals import freeze
from bertscope.errors import SelectionError
from bertscope.reports.layer_ranges import LayerRange
from bertscope.settings.checkpointing import Checkpointing
from bertscope.sources.model_source import ModelSource

RAN = 3  # periods that run: the first is next to the embeddings, the last next to the head; the middle one is repeated


def period(source: ModelSource, *, checkpointing: str = "none", frozen: Sequence[str] = ()) -> int:
    """Return the number of layers after which a run of the model repeats itself; 0 if it may not.

    `frozen` are the patterns of frozen parameters, which must match the same ones of every layer.
    """
    chosen = Checkpointing.parse(checkpointing)
    if not source.has_equal_layers or (chosen and chosen.layers is not None):
        return 0
    every = chosen.every if chosen else 1
    return every if not frozen or _are_frozen_alike(source, frozen, RAN * every) else 0


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

    def numbered(layer: Node, numbers: LayerRange) -> Node:
        return replace(moved(layer, layer.path, f"{path}.{numbers}"), name=str(numbers), copies=len(numbers))

    def change(node: Node) -> Node:
        if node.path == path and repeats == 1:  # without a node for each of many layers
            return replace(node, children=(numbered(first[0], LayerRange(0, layers - 1)),))
        if node.path == path:
            each = (numbered(first[number % repeats], LayerRange(number, number)) for number in range(layers))
            return fold(replace(node, children=tuple(each)))
        return replace(node, children=tuple(map(change, node.children)))

    return Repeated(change(root), path, len(found), layers, repeats)
