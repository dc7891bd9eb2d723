"""`count`: parameters by group, layer, module or parameter, of any torch module."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod
from operator import attrgetter, itemgetter
from typing import Any

from bertscope.errors import SelectionError
from bertscope.model.lora import WRAPPED
from bertscope.reports.layer_ranges import LayerRange
from bertscope.reports.modules import CountReport, CountRow, TreeReport, TreeRow, WrittenSum
from bertscope.torch_access import nn
from bertscope.tracing.module_tree import Held, InOut, Node, fold, held_bytes, read, subject, ties, totals, unknown
from bertscope.units import PRECISIONS

_MOST_TERMS = 8  # of a sum; one with more is not written
_MOST_LAYERS = 2  # kinds of repeated layers, such as an encoder's and a decoder's


def written_sums(groups: Sequence[CountRow], layers: Sequence[CountRow]) -> Iterator[WrittenSum]:
    """Yield the sums from the rows of the groups and of the folded layers; nothing if no layer is repeated."""
    repeated = [row for row in layers if row.copies > 1 and row.parts]
    if not 1 <= len(repeated) <= _MOST_LAYERS:
        return
    terms: list[tuple[int, int]] = []  # (times, params)
    for group in groups:
        inside = [row for row in repeated if row.path.startswith(f"{group.path}.")]
        rest = group.params - sum(row.params for row in inside)
        terms += [(1, rest)] if rest else []
        terms += [(row.copies, row.each_params) for row in inside]
    yield from _written("total", "", terms)
    for row in repeated:
        yield from _written("layer", row.path, [(1, part.each_params) for part in row.parts])
        for part in row.parts:
            yield from _of_shapes(part)


def _written(name: str, path: str, terms: Sequence[tuple[int, int]]) -> Iterator[WrittenSum]:
    """Yield `22,163,456 + 24 x 12,596,224`, unless it has too many terms, or only one."""
    merged = [(sum(times for times, _ in equal), params) for params, equal in groupby(terms, itemgetter(1))]
    if 1 < len(merged) <= _MOST_TERMS:
        text = " + ".join(f"{times} x {params:,}" if times > 1 else f"{params:,}" for times, params in merged)
        yield WrittenSum(name=name, path=path, terms=text, params=sum(times * params for times, params in terms))


def _of_shapes(part: CountRow) -> Iterator[WrittenSum]:
    """Yield `4 x (1024 x 1024 + 1024)` for a part with matrices, each of which is followed by its bias."""
    layers: list[list[tuple[int, ...]]] = []
    for shape in part.shapes:
        if shape is None:
            return
        if len(shape) < 2 and layers and len(layers[-1]) == 1 and len(layers[-1][0]) > 1:
            layers[-1].append(shape)
        else:
            layers.append([shape])
    counts = Counter(map(tuple, layers))
    values = [times * sum(map(prod, shapes)) for shapes, times in counts.items()]
    has_matrix = any(len(shape) > 1 for shapes in counts for shape in shapes)
    if has_matrix and len(counts) <= _MOST_TERMS // 2 and sum(values) == part.each_params:
        terms = (f"{times} x {_term(shapes)}" if times > 1 else _term(shapes) for shapes, times in counts.items())
        text = " + ".join(terms)
        if len(values) > 1:
            text += " = " + " + ".join(f"{value:,}" for value in values)
        elif text.startswith("("):
            text = text.strip("()")
        yield WrittenSum(name=part.name, path=part.path, terms=text, params=part.each_params)


def _term(shapes: Sequence[tuple[int, ...]]) -> str:
    """Return `(in x out + out)` for a dense layer, whichever way its weight is stored; other sizes as stored."""
    first, *bias = shapes
    sizes = first[::-1] if len(first) == 2 and bias and bias[0] == first[:1] else first
    product = " x ".join(map(str, sizes)) or "1"
    return f"({product} + {prod(bias[0])})" if bias else product


BY = ("group", "layer", "module", "parameter")
SORTS: dict[str, Callable[[CountRow], Any]] = {
    "model": lambda row: 0,
    "params": lambda row: -row.params,
    "path": attrgetter("path"),
}

# The parts of one transformer layer, and the modules of each. They differ from the modules of the code: as in the
# paper, attention's output layer belongs to the attention, and its LayerNorm is a separate part.
LAYER_PARTS = {
    "self_attention": "attention.{self,output.dense}",
    "attention_LayerNorm": "attention.output.LayerNorm",
    "cross_attention": "crossattention.{self,output.dense}",
    "cross_attention_LayerNorm": "crossattention.output.LayerNorm",
    "feed_forward": "{intermediate.dense,output.dense}",
    "LayerNorm": "output.LayerNorm",
}
# Short names of the rows outside the layers, by the end of their path.
ROW_NAMES = {
    "embeddings.word_embeddings": "token",
    "embeddings.position_embeddings": "position",
    "embeddings.token_type_embeddings": "token_type",
    "embeddings.LayerNorm": "LayerNorm",
    "encoder.layer": "layer",
    "pooler": "pooler",
    "cls.predictions.transform": "transform",
    "cls.predictions.decoder": "decoder",
    "cls.seq_relationship": "seq_relationship",
    "classifier": "classifier",
    "qa_outputs": "qa_outputs",
}
WHOLE = ("pooler", "transform")  # rows that include everything below them


def count(model: nn.Module, *, by: str = "layer", **options: Any) -> CountReport:
    """Count the parameters by group, layer, module or parameter; the options are the same as for `counts`."""
    return counts(model, (by,), **options)[0]


def counts(
    model: nn.Module,
    tables: Sequence[str],
    *,
    name: str | None = None,
    dtype: str | None = None,
    folded: bool | None = None,
    sort: str = "model",
    shapes: Mapping[str, InOut] | None = None,
) -> list[CountReport]:
    """Return what `bertscope.count` returns for each value of `by` in `tables`, from one reading of the model.

    `shapes`, as returned by `tracing.flops.shapes`, adds the shapes of inputs and outputs.
    """
    options: list[tuple[str, Any, Collection[Any]]] = [("by", by, BY) for by in tables]
    for option, value, allowed in (*options, ("sort", sort, SORTS), ("dtype", dtype, (*PRECISIONS, None))):
        if value not in allowed:
            raise SelectionError(f"{option} must be one of {', '.join(map(str, allowed))}; got {value!r}")
    root = read(model, shapes, ((), ()))
    equal = fold(root)
    sums_of_all = totals(root, dtype)
    rows = _Rows(sums_of_all.layer_params, dtype)
    make = {"group": rows.by_group, "layer": rows.by_layer, "module": rows.by_module, "parameter": rows.by_parameter}
    of_equal = {by: make[by](equal) for by in {"group", "layer", *tables} - {"parameter"}}
    sums = tuple(written_sums(of_equal["group"], of_equal["layer"]))
    about = subject(model, name, dtype)
    first = CountReport(
        subject=about, by="", totals=sums_of_all, rows=(), ties=ties(root), unknown=unknown(root), sums=sums
    )
    reports = []
    for by in tables:
        is_folded = by != "parameter" if folded is None else folded
        shown = of_equal[by] if is_folded and by in of_equal else make[by](equal if is_folded else root)
        reports.append(replace(first, by=by, rows=tuple(sorted(shown, key=SORTS[sort]))))
    return reports


def _sums(params: Sequence[Held], copies: int, total: int) -> dict[str, Any]:
    each = sum(held.layer_numel for held in params)
    return {
        "copies": copies,
        "each_params": each,
        "params": each * copies,
        "distinct_params": copies * sum(held.distinct_numel for held in params),
        "trainable_params": copies * sum(held.layer_numel for held in params if held.trainable),
        "share": each * copies / total if total else 0.0,
    }


class _Rows:
    def __init__(self, total: int, dtype: str | None) -> None:
        self.total, self.dtype = total, dtype

    def row(self, node: Node, held: Iterable[Held], copies: int, **fields: Any) -> CountRow:
        params = [item for item in held if item.is_parameter]
        paths = {item.path for item in params}
        tied = [item.tied_to for item in params if item.tied_to and item.tied_to not in paths]
        values: dict[str, Any] = {
            "name": node.name,
            "path": node.path,
            "type": node.type,
            "shapes": tuple(item.shape for item in params),
            "bytes": copies * sum(held_bytes(item, self.dtype) for item in params),
            "tied_to": ", ".join(dict.fromkeys(tied)) or None,
            "inputs": node.note[0],
            "outputs": node.note[1],
        }
        return CountRow(**values | _sums(params, copies, self.total) | fields)

    def by_group(self, root: Node) -> list[CountRow]:
        return [self.row(node, node.params, copies) for node, copies in _groups(root) if node.params]

    def by_layer(self, root: Node) -> list[CountRow]:
        return [
            self.row(node, node.params, copies, name=_row_name(node),
                     parts=tuple(self._parts(node, copies)) if is_block else ())
            for node, copies, is_block in _layer_nodes(root) if node.params
        ]  # fmt: skip

    def _parts(self, block: Node, copies: int) -> Iterator[CountRow]:
        claimed: set[str] = set()
        is_transformer = all(block.descend(path) for path in ("attention.self", "output.LayerNorm"))
        for name, part in LAYER_PARTS.items() if is_transformer else ():
            start, _, ends = part.partition("{")
            places = [start + end for end in ends.rstrip("}").split(",")]
            nodes = [node for node in map(block.descend, places) if node is not None]
            if len(nodes) == len(places):
                held = [item for node in nodes for item in node.params]
                claimed.update(item.path for item in held)
                kind = " + ".join(node.type for node in nodes)
                path, outputs = f"{block.path}.{part}", nodes[-1].note[1]
                yield self.row(nodes[0], held, copies, name=name, path=path, type=kind, outputs=outputs)
        for node, _, within, _ in block.rows():
            left = [item for item in node.held if item.is_parameter and item.path not in claimed]
            if left:
                name = node.path[len(block.path) + 1 :] or "(own)"
                yield self.row(node, left * (within // block.copies), copies, name=name)

    def by_module(self, root: Node) -> list[CountRow]:
        return [self.row(node, node.held, copies) for node, _, copies, _ in root.rows() if _holds_own(node)]

    def by_parameter(self, root: Node) -> list[CountRow]:
        return [
            self.row(node, [held._replace(counts=True)], copies, name=held.path, path=held.path, type="Parameter",
                     in_layer_sum=held.counts, inputs=(), outputs=())
            for node, _, copies, _ in root.rows() for held in node.held if held.is_parameter
        ]  # fmt: skip


def _groups(root: Node) -> Iterator[tuple[Node, int]]:
    wrapped = root.descend(WRAPPED.removesuffix("."))  # by peft
    if wrapped is not None:
        yield from _groups(wrapped)
        return
    for child in root.children:
        names = {grandchild.name for grandchild in child.children}
        if {"embeddings", "encoder"} <= names:
            yield from ((grandchild, child.copies * grandchild.copies) for grandchild in child.children)
            yield replace(child, children=()), child.copies
        else:
            yield child, child.copies
    yield replace(root, name="(own)", children=(), note=((), ())), 1


def _layer_nodes(node: Node, copies: int = 1) -> Iterator[tuple[Node, int, bool]]:
    """Yield the nodes of rows with their copies, containers without their parts; True for a block of a stack."""
    for child in node.children:
        times = copies * child.copies
        is_block = node.is_list and bool(child.children)
        if is_block or not child.children or _row_name(child) in WHOLE:
            yield child, times, is_block
        else:
            if _holds_own(child):
                yield replace(child, children=()), times, False
            yield from _layer_nodes(child, times)
    if not node.path and _holds_own(node):
        yield replace(node, children=()), 1, False


def _holds_own(node: Node) -> bool:
    return any(held.is_parameter and held.counts for held in node.held)


def _row_name(node: Node) -> str:
    path = node.path.rpartition(".")[0] if LayerRange.parse(node.name) else node.path  # a layer is named for its list
    names = (name for end, name in ROW_NAMES.items() if path == end or path.endswith(f".{end}"))
    return next(names, node.path or "(own)")


# ---- `tree`: the module tree of any torch module, with equal neighbours folded ----


def tree(
    model: nn.Module,
    *,
    depth: int | None = None,
    name: str | None = None,
    folded: bool = True,
    shapes: Mapping[str, InOut] | None = None,
) -> TreeReport:
    """Return the modules down to `depth`; with `shapes` of `tracing.flops.shapes` also its FLOPs and calls."""
    root = read(model, shapes, ((), ()))
    sums = totals(root, None)
    numbers: Counter[int] = Counter()  # of the modules at each depth
    rows = []
    for node, at, copies, is_last in (fold(root) if folded else root).rows():
        index = f"{at}-{numbers[at] + 1}" if at else ""  # as in torchinfo: `3-6`
        numbers[at] += node.copies
        if depth is None or at <= depth:
            rows.append(
                TreeRow(
                    **{name: getattr(node, name) for name in ("name", "path", "type", "same_as", "kernel_size")},
                    depth=at,
                    depth_index=index,
                    is_last=is_last,
                    inputs=node.note[0],
                    outputs=node.note[1],
                    bytes=copies * sum(round(held.layer_numel * held.itemsize) for held in node.params),
                    **_sums(node.params, copies, sums.layer_params),
                )
            )
    return TreeReport(
        subject=subject(model, name),
        max_depth=depth,
        totals=sums,
        rows=tuple(rows),
        ties=ties(root),
        unknown=unknown(root),
        matmul_flops=getattr(shapes, "matmul_flops", None),
        calls=tuple(getattr(shapes, "calls", ())),
    )
