"""The page's charts in plotly's words: a map of the parameters, FLOPs by module, and FLOPs over lengths."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from bertscope.render.console import ROLES, variable
from bertscope.reports.flops import FlopsReport
from bertscope.reports.layer_ranges import expand
from bertscope.reports.params import CountReport, CountRow, TreeReport
from bertscope.texts import phrase, say
from bertscope.units import count_text, flops_text, share_text

# The role of a module -> the names and classes of that module or of one around it, of BERTs and of other families.
_ROLES = {
    "LayerNorm": "LayerNorm|RMSNorm|^ln_\\w",
    "attention": "[Aa]ttention|^attn$",
    "embeddings": "[Ee]mbedding",
    "feed-forward": "^intermediate$|^output$|MLP|FeedForward|FFN|MoeBlock|Dense\\w*Dense|^mlp$|^fc[12]$",
    "pooler and heads": "[Pp]ooler|[Hh]ead$|^cls$|^classifier$|_outputs$|^score$",
}
MIXED = "var(--mixed)"  # page.js replaces variables by the colours of the theme
_FONT = {"family": "system-ui, sans-serif", "size": 13}
_BARE = {"paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "font": _FONT, "showlegend": False}


def role(path: str, types: Mapping[str, str]) -> str:
    """Return the role of a module or tensor, by its path and the classes on it; empty for several roles or another."""
    parts = path.split(".")
    around = accumulate(parts, "{}.{}".format)
    names = [*parts, *(types.get(outer, "") for outer in around)]
    return next((role for role, pattern in _ROLES.items() if any(re.search(pattern, name) for name in names)), "")


def _color(path: str, types: Mapping[str, str]) -> str:
    """Return the colour of a module or tensor."""
    found = role(path, types)
    return variable("role", found) if found else MIXED


def roles(shown: Sequence[str]) -> dict[str, str]:
    """Return the roles that have one of the colours shown, with their colours."""
    colors = {phrase(name): variable("role", name) for name in ROLES}
    return {name: color for name, color in colors.items() if color in shown}


def parameter_map(tensors: CountReport, tree: TreeReport) -> dict[str, Any]:
    """Draw a treemap of every tensor in its module, equal layers in one box; a tied tensor is where it counts."""
    leaves = _folded(tensors, tree)
    sizes, inside = _modules(leaves)
    nodes = list(_nodes(inside))
    types = {row.path: row.type for row in tree.rows}
    root = tree.subject.architecture
    names = [root if parent is None else path[len(parent) :].lstrip(".") for path, parent in nodes]
    return {
        "data": [
            {
                "type": "treemap",
                "branchvalues": "total",
                "ids": [_named(path) for path, _ in nodes],
                "labels": names,
                "parents": ["" if parent is None else _named(parent) for _, parent in nodes],
                "values": [sizes[path] for path, _ in nodes],
                "customdata": [_hover(path, sizes, leaves, types) for path, _ in nodes],
                "hovertemplate": "%{customdata}<extra></extra>",
                "textinfo": "label+percent root",
                "tiling": {"pad": 2},
                "leaf": {"opacity": 1},  # an icicle's leaves are paler of themselves
                "marker": {
                    "colors": [_color(path, types) for path, _ in nodes],
                    "line": {"width": 1, "color": "var(--paper)"},
                },
                "root": {"color": MIXED},
            }
        ],
        "layout": {
            "paper_bgcolor": "rgba(0,0,0,0)",
            "font": _FONT,
            "margin": {"l": 0, "r": 0, "t": 24, "b": 0},
            "uniformtext": {"minsize": 10, "mode": "hide"},
        },
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


def _hover(path: str, sizes: dict[str, int], leaves: dict[str, list[CountRow]], types: dict[str, str]) -> str:
    lines = [_named(path)]
    if path in types:
        lines.append(types[path])
    if path in leaves:
        rows = leaves[path]
        lines.append((f"{len(rows)} x " if len(rows) > 1 else "") + str(list(rows[0].shapes[0] or ())))
    whole = sizes[""]
    share = share_text(sizes[path] / whole if whole else 0)
    lines.append(say("map_size", count=count_text(sizes[path]), share=share))
    return "<br>".join(lines)


def flops_bars(report: FlopsReport) -> dict[str, Any]:
    """Draw the FLOPs of each module without its parts, equal layers together; the bars add up to the model."""
    own = {row.path: row.forward.matmul_flops for row in report.rows}
    types = {row.path: row.type for row in report.rows}
    inner = set()
    for row in report.rows[1:]:
        parent = row.path.rpartition(".")[0]
        own[parent] -= row.forward.matmul_flops
        inner.add(parent)
    bars = sorted((flops, path) for path, flops in own.items() if flops > 0)
    whole = sum(own.values())
    return {
        "data": [
            {
                "type": "bar",
                "orientation": "h",
                "x": [flops for flops, _ in bars],
                "y": [_named(path) for _, path in bars],
                "text": [say("itself", name=_short(path)) if path in inner else _short(path) for _, path in bars],
                "textposition": "auto",
                "insidetextanchor": "start",
                "textangle": 0,
                "constraintext": "none",
                "cliponaxis": False,
                "customdata": [f"{_exact(flops)}, {share_text(flops / whole)}" for flops, _ in bars],
                "hovertemplate": "%{y}<br>%{customdata}<extra></extra>",
                "marker": {"color": [_color(path, types) for _, path in bars]},
            }
        ],
        "layout": {**_BARE, "margin": {"l": 10, "r": 10, "t": 8, "b": 36}, "bargap": 0.12,
                   "xaxis": {**_titled(say("axis_flops")), "zeroline": False,
                             "exponentformat": "SI"},
                   "yaxis": {"showticklabels": False}},
    }  # fmt: skip


def _titled(text: str) -> dict[str, Any]:
    """Return the title of an axis."""
    return {"title": {"text": text, "font": _FONT}}


def _exact(flops: int) -> str:
    return f"{flops_text(flops)} ({count_text(flops)})"


def _named(path: str) -> str:
    return path or say("whole_model")


def _short(path: str) -> str:
    """Return a module's name from its layer on."""
    before, layer, name = path.partition("layer.")
    return layer + name if layer and before.endswith("encoder.") else _named(path)


def lengths(report: FlopsReport) -> dict[str, Any]:
    """Draw the forward FLOPs over the sequence lengths of the sweep."""
    points = sorted(report.sweep, key=lambda point: point.seq)
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": [point.seq for point in points],
                "y": [point.forward_flops for point in points],
                "customdata": [_exact(point.forward_flops) for point in points],
                "hovertemplate": "%{x}<br>%{customdata}<extra></extra>",
                "line": {"color": "var(--accent)"},
            }
        ],
        "layout": {**_BARE, "margin": {"l": 60, "r": 10, "t": 8, "b": 36},
                   "xaxis": {**_titled(say("axis_length")), "tickvals": [point.seq for point in points]},
                   "yaxis": {**_titled(say("axis_flops")), "rangemode": "tozero", "exponentformat": "SI"}},
    }  # fmt: skip
