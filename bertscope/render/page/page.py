"""One self-contained HTML page: works offline, in light and dark, on paper and on a narrow screen.

plotly's script stands in the page once; the policy in its head forbids every request to anywhere.
"""

from __future__ import annotations

import json
from typing import Any

from bertscope.units import html_text, unit_value

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
_CONFIG = {"displayModeBar": False, "responsive": True}  # the bar of buttons would cover the names of phases
# Charts are drawn one by one once the words stand, and redrawn to fit the paper: plotly fixes a width in pixels.
_SCRIPT = """
const waiting = [...document.querySelectorAll("script.figure")];
const draw = () => {
  const data = waiting.shift();
  if (!data) return;
  Plotly.newPlot(data.previousElementSibling, ...JSON.parse(data.textContent));
  setTimeout(draw);
};
addEventListener("load", () => setTimeout(draw));
const redraw = (change) => document.querySelectorAll(".chart").forEach((chart) => Plotly.relayout(chart, change));
const number = (cell) => parseFloat(cell.dataset.value ?? cell.textContent.replaceAll(",", ""));
const text = (cell) => cell.textContent.replace(/^[\\s│├└─]+/, "");  // a tree's branches are no words
// Figures begin with the largest, words with A; the third time the rows stand as they came.
const sort = (button) => {
  const head = button.closest("th"), table = head.closest("table"), place = [...head.parentNode.children].indexOf(head);
  const body = table.tBodies[0], rows = [...body.rows], figures = !head.classList.contains("text");
  rows.forEach((row, came) => { row.dataset.came ??= came; });
  const turns = figures ? ["descending", "ascending", ""] : ["ascending", "descending", ""];
  const turn = turns[(turns.indexOf(head.getAttribute("aria-sort") ?? "") + 1) % 3];
  const order = (one, other) => figures
    ? (number(one) || 0) - (number(other) || 0) : text(one).localeCompare(text(other), "en", { numeric: true });
  rows.sort((one, other) => turn === "" ? one.dataset.came - other.dataset.came
    : (turn === "descending" ? -1 : 1) * order(one.cells[place], other.cells[place]));
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  if (turn) head.setAttribute("aria-sort", turn);
  body.append(...rows);
};
const search = (field) => {
  const wanted = field.value.toLowerCase(), table = document.getElementById(field.dataset.table);
  let shown = 0;
  for (const row of table.tBodies[0].rows) {
    row.hidden = !row.textContent.toLowerCase().includes(wanted);
    shown += !row.hidden;
  }
  const said = field.closest(".search").querySelector("output");
  said.textContent = wanted ? `${shown} row${shown === 1 ? "" : "s"}` : "";
};
addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button?.dataset.chart) {
    const drawn = document.getElementById(button.dataset.chart);
    if (!drawn.data) return;
    button.textContent = `as ${drawn.data[0].type}`;
    Plotly.restyle(drawn, { type: drawn.data[0].type === "treemap" ? "icicle" : "treemap" });
  } else if (button?.closest("th")) sort(button);
});
addEventListener("input", (event) => event.target.dataset.table && search(event.target));
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
.tiles { display: grid; gap: .7rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 13.5rem), 1fr));
         padding: 0; margin: 1rem 0; list-style: none; }
.tiles li { border: 1px solid var(--line); border-radius: .4rem; padding: .5rem .8rem .6rem; }
.tiles b { display: block; font-size: 1.3rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--soft); font-size: .9rem; }
code { font-family: ui-monospace, monospace; font-size: .9em; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap;
        font-size: .9rem; }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line); }
th.text, td.text { text-align: left; }
tr.strong td { font-weight: 600; }
header nav a { margin-right: .8rem; }
a { color: inherit; }
h2 { border-bottom: 1px solid var(--line); padding-bottom: .2rem; }
h3, h4 { font-size: .95rem; margin: .6rem 0; }
h4 { margin-bottom: 0; font-weight: 600; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible, input:focus-visible { outline: 2px solid var(--ink); outline-offset: 2px; }
th[aria-sort=descending] button::after { content: " \\2193"; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
.long { max-height: 26rem; overflow: auto; margin: .4rem 0 .8rem; }
.long thead th { position: sticky; top: 0; background: var(--paper); }
td.text { white-space: pre; }
.search { display: flex; gap: .6rem; align-items: center; margin: .8rem 0 0; color: var(--soft); }
.search input { font: inherit; padding: .15rem .4rem; color: inherit; background: transparent;
                border: 1px solid var(--line); border-radius: .2rem; min-width: 0; width: 16rem; }
button { font: inherit; color: inherit; background: transparent; }
p button { border: 1px solid var(--line); border-radius: .2rem; padding: .1rem .5rem; cursor: pointer; }
.notes { padding-left: 1.2rem; color: var(--soft); overflow-wrap: anywhere; }
figure { margin: 1rem 0; overflow: auto; }
figcaption { color: var(--soft); }
.js-plotly-plot text { fill: var(--ink) !important; }
.js-plotly-plot .treemaplayer text, .js-plotly-plot .iciclelayer text,
.js-plotly-plot .bartext-inside { fill: #1b1b1b !important; }
.js-plotly-plot .crisp { stroke: var(--line) !important; }
.js-plotly-plot .shapelayer path, .js-plotly-plot .spikeline { stroke: var(--ink) !important; }
.js-plotly-plot .scatterlayer .point { fill: var(--ink) !important; stroke: var(--paper) !important; }
.js-plotly-plot .spikeline { stroke-width: 1px !important; }
.js-plotly-plot .hoverlayer .bg { fill: var(--paper) !important; fill-opacity: 1 !important;
                                  stroke: var(--line) !important; }
@media print {
  .charts { display: block; }
  .scroll, .long, figure { overflow: visible; max-height: none; }
  .search, p button, nav { display: none; }
  figure { break-inside: avoid; }
  figure svg { max-width: 100%; max-height: 24cm; height: auto; }
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
        f"<title>{html_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}"
        f"<script>{get_plotlyjs()}</script>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def chart(label: str, figure: dict[str, Any], ident: str = "") -> str:
    """A figure in plotly's words (data, layout), where it stands in the page; `label` is for who cannot see it."""
    name = f' id="{html_text(ident)}"' if ident else ""
    data = json.dumps([figure["data"], figure["layout"], _CONFIG], separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<div class="chart"{name} role="img" aria-label="{html_text(label)}"></div>'
        f'<script type="application/json" class="figure">{data}</script>\n'
    )


def legend(colors: dict[str, str]) -> str:
    """Names beside their colours."""
    items = [f'<li><i style="background:{color}"></i>{html_text(name)}</li>' for name, color in colors.items()]
    return f'<ul class="legend">{"".join(items)}</ul>\n'


def tiles(figures: list[tuple[str, str]]) -> str:
    """What to see first: a figure, and what it is."""
    items = [f"<li><b>{html_text(figure)}</b><span>{html_text(words)}</span></li>\n" for figure, words in figures]
    return f'<ul class="tiles">\n{"".join(items)}</ul>\n'


def table(titles: list[str], rows: list[list[str]], *, figures: range, strong: set[int]) -> str:
    """Cells as given; the columns `figures` are set as numbers, the rows `strong` stand out."""
    lines = [f"<tr{' class=strong' if index in strong else ''}>{_cells('td', row, figures)}</tr>\n"
             for index, row in enumerate(rows)]  # fmt: skip
    head = f"<thead><tr>{_cells('th', titles, figures)}</tr></thead>"
    return f'<div class="scroll" tabindex="0"><table>{head}\n<tbody>\n{"".join(lines)}</tbody></table></div>\n'


def searchable(ident: str, name: str, titles: list[str], rows: list[list[str]], figures: set[int]) -> str:
    """A table that sorts by its headings and shows the rows that hold what is typed; plain without a script.

    `name` is what its rows are; it stands beside the field, and tells the tables apart where they are only heard.
    """
    kinds = ["" if place in figures else ' class="text"' for place in range(len(titles))]
    head = "".join(f'<th{kind} scope="col"><button type="button">{html_text(title)}</button></th>'
                   for kind, title in zip(kinds, titles, strict=True))  # fmt: skip
    lines = "".join(
        f"<tr>{''.join(_cell(kind, value) for kind, value in zip(kinds, row, strict=True))}</tr>\n" for row in rows
    )
    ident, name = html_text(ident), html_text(name)
    return (
        f'<div class="search"><label>search {name} <input type="search" data-table="{ident}"></label>'
        f'<output></output></div>\n<div class="long" role="region" aria-label="{name}" tabindex="0">'
        f'<table id="{ident}" aria-label="{name}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{lines}</tbody></table></div>\n"
    )


def _cell(kind: str, value: str) -> str:
    """A figure with a unit carries what it is worth, to be sorted by."""
    worth = None if kind else unit_value(value)
    data = "" if worth is None else f' data-value="{worth}"'
    return f"<td{kind}{data}>{html_text(value)}</td>"


def _cells(tag: str, values: list[str], figures: range) -> str:
    kinds = ["" if place in figures else ' class="text"' for place in range(len(values))]
    return "".join(f"<{tag}{kind}>{html_text(value)}</{tag}>" for kind, value in zip(kinds, values, strict=True))
