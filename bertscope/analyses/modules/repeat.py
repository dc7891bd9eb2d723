"""The test that layers may be equal, and the repetition of one layer for all in a module tree.

`period` says which layers may be equal; each analysis verifies this on the few layers that it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bertscope.analyses.modules.module_tree import Node
from bertscope.run_config import Checkpointing
from bertscope.sources.model_source import ModelSource

RAN = 3  # periods that run: the first is next to the embeddings, the last next to the head; the middle one is repeated


def period(
    source: ModelSource, *, checkpointing: str = "none", freeze: Sequence[str] = (), reentrant: bool = False
) -> int:
    """Return the number of layers after which a run of the model repeats itself; 0 if it may not."""
    chosen = Checkpointing.parse(checkpointing)
    if not source.has_equal_layers or freeze or reentrant or (chosen and chosen.layers is not None):
        return 0
    return chosen.every if chosen else 1


def equal_layers(root: Node, path: str) -> tuple[Node, ...]:
    """Return the layers of the list at `path` in a folded tree; equal neighbours are one node."""
    stack = root.descend(path)
    return stack.children if stack else ()


@dataclass(frozen=True)
class Repeated:
    """A folded tree in which the `ran` equal layers at `path` count as `layers`; without a path, the tree as it ran."""

    root: Node
    path: str = ""
    ran: int = 1
    layers: int = 1

    def times(self, path: str) -> tuple[int, int]:
        """Return the numbers of layers that count and that ran, as a factor for the work of the module at `path`."""
        return (self.layers, self.ran) if self.path and path.startswith(f"{self.path}.") else (1, 1)


def repeated(root: Node, path: str, layers: int) -> Repeated | None:
    """Return the folded tree with `layers` layers at `path`; None if its layers differ."""
    found = equal_layers(root, path)
    if len(found) != 1:
        return None

    def change(node: Node) -> Node:
        """Return the node, with `layers` layers at `path` if that is at or below it."""
        if node.path != path:
            return replace(node, children=tuple(map(change, node.children)))
        return replace(node, children=(_renumbered(found[0], f"{path}.0-{layers - 1}", layers),))

    return Repeated(change(root), path, found[0].copies, layers)


def _renumbered(layer: Node, new: str, layers: int) -> Node:
    def moved(node: Node) -> Node:
        """Return the node under its new path."""
        return replace(node, path=new + node.path[len(layer.path) :], children=tuple(map(moved, node.children)))

    return replace(moved(layer), name=new.rpartition(".")[2], copies=layers)
