"""The rows of a sweep as one HTML page: the peaks over each setting that is a number, and a table that sorts."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from bertscope.render.colors import PARTS, variable
from bertscope.render.page.templating import page
from bertscope.render.sweep.rows import columns, setting_text, verdict
from bertscope.reports.sweep import SweepReport, SweepRow
from bertscope.units import binary_unit, bytes_text, html_text

MAX_LINES = 60  # of a chart; more cannot be told apart
_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x")


def html(report: SweepReport) -> str:
    """Return the page."""
    return page("sweep.html", title=report.grid, verdict=verdict(report), charts=list(_charts(report)),
                columns=columns(report), rows=report.rows)  # fmt: skip


def _charts(report: SweepReport) -> list[tuple[str, dict[str, Any]]]:
    """Return the titles and the charts: one over each setting with several numbers."""
    numbers = [name for name, values in report.varied.items() if all(type(value) in (int, float) for value in values)]
    return [_chart(report, name) for name in numbers]


def _chart(report: SweepReport, axis: str) -> tuple[str, dict[str, Any]]:
    """Return the title and the peaks over a setting, with a line for each combination of the others."""
    others = [name for name in report.varied if name != axis]
    lines: dict[tuple[str, ...], list[SweepRow]] = defaultdict(list)
    for row in report.rows:
        if row.peak_bytes is not None:
            lines[tuple(str(setting_text(name, row)) for name in others)].append(row)
    largest = max((row.peak_bytes or 0 for rows in lines.values() for row in rows), default=1)
    divisor, unit = binary_unit(largest)
    shown = list(lines.items())[:MAX_LINES]
    firsts = list(dict.fromkeys(names[:1] for names, _ in shown))
    more = f", the first {MAX_LINES} of {len(lines)} lines" if len(lines) > MAX_LINES else ""
    return f"peak over {axis.replace('_', ' ')}{more}", {
        "data": [_line(place, firsts.index(names[:1]), names, rows, axis, divisor)
                 for place, (names, rows) in enumerate(shown)],
        "layout": {
            "hovermode": "closest", "showlegend": True, "margin": {"l": 60, "r": 16, "t": 8, "b": 42},
            "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": "system-ui, sans-serif", "size": 13},
            "xaxis": {"title": {"text": axis.replace("_", " ")}, "tickvals": report.varied[axis], "zeroline": False},
            "yaxis": {"title": {"text": f"peak, {unit}"}, "rangemode": "tozero"},
        },
    }  # fmt: skip


def _line(
    place: int, first: int, names: Sequence[str], rows: Sequence[SweepRow], axis: str, divisor: int
) -> dict[str, Any]:
    """Draw one line; those with the same first setting, such as the model, have one colour."""
    color = variable("part", list(PARTS)[first % len(PARTS)])
    ordered = sorted(rows, key=lambda row: row.point[axis])
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": html_text(", ".join(filter(None, names)) or "all"),
        "x": [row.point[axis] for row in ordered],
        "y": [(row.peak_bytes or 0) / divisor for row in ordered],
        "customdata": [_hover(row) for row in ordered],
        "hovertemplate": "%{fullData.name}<br>%{x}: %{customdata}<extra></extra>",
        "line": {"color": color},
        "marker": {"symbol": _SYMBOLS[place % len(_SYMBOLS)]},
    }


def _hover(row: SweepRow) -> str:
    answer = f", fits: {row.fits}" if row.fits else ""
    return f"{bytes_text(row.peak_bytes or 0)}{answer}"
