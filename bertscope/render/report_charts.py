"""The page's charts in plotly's words: parameters down to tensors, FLOPs by module and over lengths."""

from __future__ import annotations

from typing import Any

from bertscope.flops_reports import FlopsReport
from bertscope.render.timeline_panels import COLORS
from bertscope.reports import CountReport, TreeReport
from bertscope.units import count_text, share_text

_FONT = {"family": "system-ui, sans-serif", "size": 13}
_BARE = {"paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "font": _FONT, "showlegend": False}
_TINTS = ("#ffffff", "#e4eef8", "#cfe2f3", "#bcd6ee", "#d9ead3", "#fce5cd", "#fff2cc")  # by depth; dark ink on all


def parameter_map(tensors: CountReport, tree: TreeReport) -> dict[str, Any]:
    """Every tensor in its module, its area by its elements; a tied tensor stands where it counts."""
    whole = tree.totals.layer_params
    types = {row.path: row.type for row in tree.rows}
    sizes: dict[str, int] = {"": 0}
    for row in tensors.rows:
        if not row.in_layer_sum:
            continue
        sizes[row.path] = row.params
        parts = row.path.split(".")
        for end in range(len(parts)):
            parent = ".".join(parts[:end])
            sizes[parent] = sizes.get(parent, 0) + row.params
    paths = list(sizes)
    return {
        "data": [
            {
                "type": "treemap",
                "branchvalues": "total",
                "ids": [path or "(model)" for path in paths],
                "labels": [path.rpartition(".")[2] or tree.subject.architecture for path in paths],
                "parents": ["" if not path else path.rpartition(".")[0] or "(model)" for path in paths],
                "values": [sizes[path] for path in paths],
                "customdata": [_hover(path, sizes[path], whole, types) for path in paths],
                "hovertemplate": "%{customdata}<extra></extra>",
                "textinfo": "label+percent root",
                "maxdepth": 4,
                "tiling": {"pad": 1},
                "marker": {"colors": [_TINTS[min(path.count(".") + bool(path), len(_TINTS) - 1)] for path in paths]},
            }
        ],
        "layout": {**_BARE, "margin": {"l": 0, "r": 0, "t": 24, "b": 0}},
    }  # fmt: skip


def _hover(path: str, size: int, whole: int, types: dict[str, str]) -> str:
    kind = f"{types[path]}<br>" if path in types else ""
    return f"{path or '(model)'}<br>{kind}{count_text(size)} parameters, {share_text(size / whole if whole else 0)}"


def flops_bars(report: FlopsReport) -> dict[str, Any]:
    """The modules that do the matrix products themselves, equal layers together."""
    parents = {row.path.rpartition(".")[0] for row in report.rows}
    rows = [row for row in report.rows if row.path not in parents and row.forward.matmul_flops]
    inner = [row for row in report.rows if row.path in parents and row.path]
    rows += [row for row in inner if row.path.endswith("attention.self")]
    rows.sort(key=lambda row: row.forward.matmul_flops)
    return {
        "data": [
            {
                "type": "bar",
                "orientation": "h",
                "x": [row.forward.matmul_flops for row in rows],
                "y": [row.path for row in rows],
                "customdata": [f"{count_text(row.forward.matmul_flops)}, {share_text(row.share)}" for row in rows],
                "hovertemplate": "%{y}<br>%{customdata}<extra></extra>",
                "marker": {"color": COLORS["parameters"]},
            }
        ],
        "layout": {**_BARE, "margin": {"l": 10, "r": 10, "t": 8, "b": 36},
                   "xaxis": {"title": {"text": "forward FLOPs, matrix products"}, "zeroline": False},
                   "yaxis": {"automargin": True}},
    }  # fmt: skip


def lengths(report: FlopsReport) -> dict[str, Any]:
    """Forward FLOPs over the sequence lengths of the sweep."""
    points = sorted(report.sweep, key=lambda point: point.seq)
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": [point.seq for point in points],
                "y": [point.forward_flops for point in points],
                "customdata": [count_text(point.forward_flops) for point in points],
                "hovertemplate": "sequence %{x}<br>%{customdata} FLOPs<extra></extra>",
                "line": {"color": COLORS["parameters"]},
            }
        ],
        "layout": {**_BARE, "margin": {"l": 60, "r": 10, "t": 8, "b": 36},
                   "xaxis": {"title": {"text": "sequence length"}, "tickvals": [point.seq for point in points]},
                   "yaxis": {"title": {"text": "forward FLOPs"}, "rangemode": "tozero"}},
    }  # fmt: skip
