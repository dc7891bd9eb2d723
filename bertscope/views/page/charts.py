"""The data of the page's charts, which charts.js draws: the parameters, FLOPs by module, and FLOPs over lengths.

Charts of the same `scale` share the axis up to the highest `top` of them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from bertscope.reports.layer_ranges import expand
from bertscope.reports.modules import CountReport, CountRow, FlopsReport, TreeReport
from bertscope.units import count_text, flops_text, share_text
from bertscope.views.console import ROLES, variable

# The role of a module -> the names and classes of that module or of one around it, of BERTs and of other families.
_ROLES = {
    "LayerNorm": "LayerNorm|RMSNorm|^ln_\\w",
    "attention": "[Aa]ttention|^attn$",
    "embeddings": "[Ee]mbedding",
    "feed-forward": "^intermediate$|^output$|MLP|FeedForward|FFN|MoeBlock|Dense\\w*Dense|^mlp$|^fc[12]$",
    "pooler and heads": "[Pp]ooler|[Hh]ead$|^cls$|^classifier$|_outputs$|^score$",
}
MIXED = "var(--mixed)"


def role(path: str, types: Mapping[str, str]) -> str:
    """Return the role of a module or tensor, by its path and the classes on it; empty for several roles or another."""
    parts = path.split(".")
    around = accumulate(parts, "{}.{}".format)
    names = [*parts, *(types.get(outer, "") for outer in around)]
    return next((role for role, pattern in _ROLES.items() if any(re.search(pattern, name) for name in names)), "")


def _color(path: str, types: Mapping[str, str]) -> str:
    found = role(path, types)
    return variable("role", found) if found else MIXED


def roles(shown: Sequence[str]) -> dict[str, str]:
    """Return the roles that have one of the colours shown, with their colours."""
    colors = {name: variable("role", name) for name in ROLES}
    return {name: color for name, color in colors.items() if color in shown}


def parameter_map(tensors: CountReport, tree: TreeReport) -> dict[str, Any]:
    """Draw a treemap of every tensor in its module, equal layers in one box; a tied tensor is where it counts."""
    leaves = _folded(tensors, tree)
    sizes, inside = _modules(leaves)
    nodes = list(_nodes(inside))
    types = {row.path: row.type for row in tree.rows}
    places = {path: place for place, (path, _) in enumerate(nodes)}
    return {
        "kind": "map",
        "scale": "parameters",
        "top": sizes[""],
        "whole": "Back",
        "nodes": [
            (
                -1 if parent is None else places[parent],
                tree.subject.architecture if parent is None else path[len(parent) :].lstrip("."),
                sizes[path],
                _color(path, types),
                _hover(path, sizes, leaves, types),
            )
            for path, parent in nodes
        ],
    }


def _folded(tensors: CountReport, tree: TreeReport) -> dict[str, list[CountRow]]:
    """Return the tensors under their path in the tree, which shows equal layers once."""
    rows = {path: row.path for row in tree.rows for path in expand(row.path)}
    found: dict[str, list[CountRow]] = {}
    for tensor in tensors.rows:
        if tensor.in_layer_sum:
            module, dot, name = tensor.path.rpartition(".")
            found.setdefault(f"{rows.get(module, module)}{dot}{name}", []).append(tensor)
    return found


def _modules(leaves: dict[str, list[CountRow]]) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Return the number of elements below every path, and the paths directly inside it."""
    sizes, inside = {"": 0}, dict[str, list[str]]()
    for leaf, rows in leaves.items():
        path, size = leaf, sum(row.params for row in rows)
        sizes[leaf] = size
        while path:
            parent = path.rpartition(".")[0]
            if path not in inside.setdefault(parent, []):
                inside[parent].append(path)
            sizes[parent] = sizes.get(parent, 0) + size
            path = parent
    return sizes, inside


def _nodes(inside: dict[str, list[str]]) -> Iterator[tuple[str, str | None]]:
    """Yield paths with the path around them, without the boxes that hold only one other."""
    waiting: list[tuple[str, str | None]] = [("", None)]
    while waiting:
        path, parent = waiting.pop()
        while len(inside.get(path, ())) == 1:
            [path] = inside[path]
        yield path, parent
        waiting += [(child, path) for child in reversed(inside.get(path, []))]


def _hover(path: str, sizes: dict[str, int], leaves: dict[str, list[CountRow]], types: dict[str, str]) -> list[str]:
    lines = [_named(path)]
    if path in types:
        lines.append(types[path])
    if path in leaves:
        rows = leaves[path]
        lines.append((f"{len(rows)} x " if len(rows) > 1 else "") + str(list(rows[0].shapes[0] or ())))
    whole = sizes[""]
    share = share_text(sizes[path] / whole if whole else 0)
    return [*lines, f"{count_text(sizes[path])} parameters, {share}"]


def flops_bars(report: FlopsReport) -> dict[str, Any]:
    """Draw the FLOPs of each module without its parts, equal layers together; the bars add up to the model."""
    own = {row.path: row.forward.matmul_flops for row in report.rows}
    types = {row.path: row.type for row in report.rows}
    inner = set()
    for row in report.rows[1:]:
        parent = row.path.rpartition(".")[0]
        own[parent] -= row.forward.matmul_flops
        inner.add(parent)
    bars = sorted(((flops, path) for path, flops in own.items() if flops > 0), reverse=True)
    whole = sum(own.values())
    return {
        "kind": "bars",
        "scale": "flops",
        "top": bars[0][0] if bars else 1,
        "x": "forward FLOPs, matrix products",
        "bars": [
            (
                _named(path),
                f"{_short(path)} itself" if path in inner else _short(path),
                flops,
                f"{_exact(flops)}, {share_text(flops / whole)}",
                _color(path, types),
            )
            for flops, path in bars
        ],
    }


def _exact(flops: int) -> str:
    return f"{flops_text(flops)} ({count_text(flops)})"


def _named(path: str) -> str:
    return path or "(model)"


def _short(path: str) -> str:
    before, layer, name = path.partition("layer.")
    return layer + name if layer and before.endswith("encoder.") else _named(path)


def lengths(report: FlopsReport) -> dict[str, Any]:
    """Draw the forward FLOPs over the sequence lengths of the sweep."""
    points = sorted((point.seq, point.forward_flops) for point in report.sweep)
    return {
        "kind": "line",
        "scale": "lengths",
        "top": max(flops for _, flops in points) or 1,
        "longest": points[-1][0],
        "x": "sequence length",
        "y": "forward FLOPs, matrix products",
        "points": [(seq, flops, _exact(flops)) for seq, flops in points],
    }
