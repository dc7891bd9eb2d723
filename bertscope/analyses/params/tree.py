"""`tree`: the module tree of any torch module, with equal neighbours folded."""

from collections import Counter
from collections.abc import Iterator, Mapping

from bertscope.analyses.modules.module_tree import InOut, Node, fold, read_with
from bertscope.analyses.modules.totals import subject, ties, totals, unknown
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

    The root has depth 0, so the totals are the same for every `depth`. `tracing.trace.shapes` returns `shapes`,
    whose FLOPs and calls the report has too.
    """
    root = read_with(model, shapes)
    sums = totals(root, None)
    rows = _rows(fold(root) if folded else root, sums.layer_params)
    return TreeReport(
        subject=subject(model, name),
        max_depth=depth,
        totals=sums,
        rows=tuple(row for row in rows if depth is None or row.depth <= depth),
        ties=ties(root),
        unknown=unknown(root),
        matmul_flops=getattr(shapes, "matmul_flops", None),
        calls=tuple(getattr(shapes, "calls", ())),
    )


def _rows(root: Node, layer_params: int) -> Iterator[TreeRow]:
    """Yield the rows of all modules, numbered at each depth as in torchinfo: `3-6`."""
    seen: Counter[int] = Counter()
    for node, depth, copies, is_last in root.rows():
        index = f"{depth}-{seen[depth] + 1}" if depth else ""
        seen[depth] += node.copies
        each = sum(held.layer_numel for held in node.params)
        inputs, outputs = node.note
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
            share=each * copies / layer_params if layer_params else 0.0,
            same_as=node.same_as,
            inputs=inputs,
            outputs=outputs,
            bytes=copies * sum(held.layer_numel * held.itemsize for held in node.params),
            kernel_size=node.kernel_size,
        )
