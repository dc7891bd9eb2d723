"""One self-contained HTML page: works offline, in light and dark, on paper and on a narrow screen.

plotly's script stands in the page once; the policy in its head forbids every request to anywhere.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
_CONFIG = {"displayModeBar": False, "responsive": True}  # the bar of buttons would cover the names of phases
# Charts are drawn when all of the page is there, and redrawn to fit the paper: plotly fixes a width in pixels.
_SCRIPT = """
addEventListener("DOMContentLoaded", () => {
  for (const data of document.querySelectorAll("script.figure")) {
    Plotly.newPlot(data.previousElementSibling, ...JSON.parse(data.textContent));
  }
});
const redraw = (change) => document.querySelectorAll(".chart").forEach((chart) => Plotly.relayout(chart, change));
addEventListener("beforeprint", () => redraw({ width: 680, autosize: false }));
addEventListener("afterprint", () => redraw({ width: null, autosize: true }));
"""
# plotly writes colours into its elements; `!important` lets the page's theme, and the printer, have the last word.
_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --soft: #5c5c5c; --paper: #ffffff; --line: #d5d5d5; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ink: #e8e8e8; --soft: #a8a8a8; --paper: #16181c; --line: #3c4046; }
}
body { margin: 0 auto; padding: 1rem; max-width: 90rem; color: var(--ink); background: var(--paper);
       font: 1rem/1.45 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 1.2rem 0 0; }
p { margin: .3rem 0 .8rem; color: var(--soft); }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; padding: 0; margin: .8rem 0 0; list-style: none; }
.legend i { display: inline-block; width: .9em; height: .9em; margin-right: .4em; vertical-align: -.1em;
            print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.charts { display: grid; gap: 0 1.5rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
.charts section { min-width: 0; break-inside: avoid; }
.chart { height: 24rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap;
        font-size: .9rem; }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); }
th.text, td.text { text-align: left; }
tr.strong td { font-weight: 600; }
.js-plotly-plot text { fill: var(--ink) !important; }
.js-plotly-plot .crisp { stroke: var(--line) !important; }
.js-plotly-plot .shapelayer path, .js-plotly-plot .spikeline { stroke: var(--ink) !important; }
.js-plotly-plot .point { fill: var(--ink) !important; stroke: var(--paper) !important; }
.js-plotly-plot .spikeline { stroke-width: 1px !important; }
.js-plotly-plot .hoverlayer .bg { fill: var(--paper) !important; fill-opacity: 1 !important;
                                  stroke: var(--line) !important; }
@media print {
  .charts { display: block; }
  .scroll { overflow: visible; }
  table { font-size: .55rem; }
  th, td { padding-right: .4rem; }
}
"""


def page(title: str, body: str) -> str:
    """The page around `body`, plotly's script in it; needs plotly."""
    from plotly.offline import get_plotlyjs

    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n<script>{get_plotlyjs()}</script>\n"
        f"<script>{_SCRIPT}</script>\n"
        f"</head>\n<body>\n{body}</body>\n</html>\n"
    )


def chart(label: str, figure: dict[str, Any]) -> str:
    """A figure in plotly's words (data, layout), where it stands in the page; `label` is for who cannot see it."""
    data = json.dumps([figure["data"], figure["layout"], _CONFIG], separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<div class="chart" role="img" aria-label="{escape(label)}"></div>'
        f'<script type="application/json" class="figure">{data}</script>\n'
    )


def table(titles: list[str], rows: list[list[str]], *, figures: range, strong: set[int]) -> str:
    """Cells as given; the columns `figures` are set as numbers, the rows `strong` stand out."""
    lines = [f"<tr{' class=strong' if index in strong else ''}>{_cells('td', row, figures)}</tr>\n"
             for index, row in enumerate(rows)]  # fmt: skip
    head = f"<thead><tr>{_cells('th', titles, figures)}</tr></thead>"
    return f'<div class="scroll"><table>{head}\n<tbody>\n{"".join(lines)}</tbody></table></div>\n'


def _cells(tag: str, values: list[str], figures: range) -> str:
    kinds = ["" if place in figures else ' class="text"' for place in range(len(values))]
    return "".join(f"<{tag}{kind}>{escape(value)}</{tag}>" for kind, value in zip(kinds, values, strict=True))
