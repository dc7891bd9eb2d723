"""The page's charts of FLOPs in plotly's words: by module, and over lengths."""

from __future__ import annotations

from typing import Any

from bertscope.render.page.parameter_map import MIXED, ROLES, role
from bertscope.render.timeline.panels import COLORS
from bertscope.reports.flops import FlopsReport
from bertscope.units import count_text, share_text

_FONT = {"family": "system-ui, sans-serif", "size": 13}
_BARE = {"paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "font": _FONT, "showlegend": False}


def flops_bars(report: FlopsReport) -> dict[str, Any]:
    """Draw the FLOPs of each module without its parts, equal layers together; the bars add up to the model."""
    own = {row.path: row.forward.matmul_flops for row in report.rows}
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
                "y": [path or "(model)" for _, path in bars],
                "text": [_short(path) + (" itself" if path in inner else "") for _, path in bars],
                "textposition": "auto",
                "insidetextanchor": "start",
                "textangle": 0,
                "constraintext": "none",
                "cliponaxis": False,
                "customdata": [f"{count_text(flops)}, {share_text(flops / whole)}" for flops, _ in bars],
                "hovertemplate": "%{y}<br>%{customdata}<extra></extra>",
                "marker": {"color": [ROLES.get(role(path), MIXED) for _, path in bars]},
            }
        ],
        "layout": {**_BARE, "margin": {"l": 10, "r": 10, "t": 8, "b": 36}, "bargap": 0.12,
                   "xaxis": {"title": {"text": "forward FLOPs, matrix products"}, "zeroline": False,
                             "exponentformat": "SI"},
                   "yaxis": {"showticklabels": False}},
    }  # fmt: skip


def _short(path: str) -> str:
    """Return a module's name from its layer on."""
    before, layer, name = path.partition("layer.")
    return layer + name if layer and before.endswith("encoder.") else path or "(model)"


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
                "customdata": [count_text(point.forward_flops) for point in points],
                "hovertemplate": "sequence %{x}<br>%{customdata} FLOPs<extra></extra>",
                "line": {"color": COLORS["parameters"]},
            }
        ],
        "layout": {**_BARE, "margin": {"l": 60, "r": 10, "t": 8, "b": 36},
                   "xaxis": {"title": {"text": "sequence length"}, "tickvals": [point.seq for point in points]},
                   "yaxis": {"title": {"text": "forward FLOPs"}, "rangemode": "tozero", "exponentformat": "SI"}},
    }  # fmt: skip
