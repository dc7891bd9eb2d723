"""`tree`: the module tree of any torch module, with equal neighbours folded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from bertscope.analyses.modules.module_tree import Node, fold, read
from bertscope.analyses.modules.totals import subject, ties, totals, unknown
from bertscope.analyses.tracing.shapes import InOut, in_out, noted
from bertscope.reports.params import TreeReport, TreeRow
from bertscope.torch_access import nn


def tree(
    model: nn.Module,
    *,
    depth: int | None = None,
    name: str | None = None,
    folded: bool = True,
    shapes: Mapping[str, InOut] | None = None,
) -> TreeReport:
    """Return the modules down to `depth` (default: all); each row sums everything at and below its module.

    The root has depth 0, so the totals are the same for every `depth`. `analyses.shapes` returns `shapes`.
    """
    root = noted(read(model), shapes or {})
    sums = totals(root, None)
    numbers = _Numbers(sums.layer_params)
    rows = tuple(numbers.rows(fold(root) if folded else root))
    return TreeReport(
        subject=subject(model, name),
        max_depth=depth,
        totals=sums,
        rows=tuple(row for row in rows if depth is None or row.depth <= depth),
        ties=ties(root),
        unknown=unknown(root),
    )


class _Numbers:
    """The numbers of the modules at each depth, as in torchinfo: `3-6`."""

    def __init__(self, layer_params: int) -> None:
        self.layer_params = layer_params
        self.seen: Counter[int] = Counter()

    def rows(self, node: Node, depth: int = 0, copies: int = 1, is_last: bool = True) -> Iterator[TreeRow]:
        """Yield the row of a node, then those of all below it."""
        index = f"{depth}-{self.seen[depth] + 1}" if depth else ""
        self.seen[depth] += node.copies
        copies *= node.copies
        each = sum(held.layer_numel for held in node.params)
        yield TreeRow(
            name=node.name,
            path=node.path,
            type=node.type,
            depth=depth,
            depth_index=index,
            copies=copies,
            is_last=is_last,
            each_params=each,
            params=each * copies,
            distinct_params=copies * sum(held.distinct_numel for held in node.params),
            trainable_params=copies * sum(held.layer_numel for held in node.params if held.trainable),
            share=each * copies / self.layer_params if self.layer_params else 0.0,
            same_as=node.same_as,
            inputs=in_out(node)[0],
            outputs=in_out(node)[1],
        )
        for place, child in enumerate(node.children, start=1):
            yield from self.rows(child, depth + 1, copies, place == len(node.children))
