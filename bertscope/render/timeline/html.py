"""The timeline as one HTML page: a chart for each variant, drawn by plotly, and the peaks as a table."""

from __future__ import annotations

from typing import Any

from bertscope.render.footer import title
from bertscope.render.page.page import chart, legend, page, table
from bertscope.render.timeline.panels import (
    COLORS,
    NOTE,
    X_LABEL,
    Panel,
    PhaseMark,
    Pictured,
    part_name,
    pictured,
    run_text,
    variant_name,
)
from bertscope.reports.memory import MemoryReport, PhasePeak
from bertscope.units import bytes_text, html_text


def html(report: MemoryReport) -> str:
    """The page."""
    heading = title(report)
    return page(f"{heading}: memory of a step", f"<h1>{html_text(heading)}</h1>\n{memory_charts(report)}")


def memory_charts(report: MemoryReport, level: int = 2) -> str:
    """A chart for each variant and the peaks as a table, as part of a page; headings of that level."""
    picture = pictured(report)
    sections = "".join(_section(panel, picture, level) for panel in picture.panels)
    colours = legend({part_name(part): COLORS[part] for part in picture.parts})
    return (
        f"<p>{html_text(_run(report))}</p>\n{colours}"
        f'<div class="charts">\n{sections}</div>\n<h{level}>peaks</h{level}>\n'
        f"{_peaks(report, picture)}<p>{html_text(NOTE)}</p>\n"
    )


def _run(report: MemoryReport) -> str:
    return f"{run_text(report.run)}; {report.machine}" if report.machine else run_text(report.run)


def _section(panel: Panel, picture: Pictured, level: int) -> str:
    drawn = f"<p>{html_text(panel.failure)}</p>\n"
    if panel.samples:
        drawn = chart(f"{panel.title}, {panel.peak_text}", figure(panel, picture))
    return f"<section>\n<h{level}>{html_text(panel.title)}</h{level}>\n{drawn}</section>\n"


def figure(panel: Panel, picture: Pictured) -> dict[str, Any]:
    """One variant in plotly's words."""
    areas = [_area(panel, picture, part) for part in picture.parts]
    return {
        "data": [*areas, _total(panel), _peak(panel, picture)],
        "layout": {
            "hovermode": "x unified",
            "hoverlabel": {"namelength": -1},
            "showlegend": False,
            "legend": {"traceorder": "reversed"},
            "margin": {"l": 60, "r": 8, "t": 8, "b": 36},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"family": "system-ui, sans-serif", "size": 13},
            "xaxis": {
                "title": {"text": X_LABEL, "standoff": 6},
                "range": [0, max(len(panel.samples) - 1, 1)],
                "unifiedhovertitle": {"text": "sample %{x}"},  # the index in the CSV
                "showticklabels": False,
                "showgrid": False,
                "zeroline": False,
            },
            "yaxis": {"title": {"text": f"live memory, {picture.unit}"}, "range": [0, picture.top], "zeroline": False},
            "shapes": [_line(mark) for mark in panel.marks if mark.start],
            "annotations": [*map(_words, panel.marks), _peak_words(panel, picture)],
        },
    }


def _area(panel: Panel, picture: Pictured, part: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": part_name(part),
        "y": [round(height, 5) for height in picture.heights(panel, part)],
        "customdata": [bytes_text(getattr(sample.parts, part)) for sample in panel.samples],
        "hovertemplate": "%{customdata}",
        "stackgroup": "parts",
        "mode": "lines",
        "line": {"width": 0, "shape": "hv", "color": COLORS[part]},
        "fillcolor": COLORS[part],
    }


def _total(panel: Panel) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": "total",
        "y": [0] * len(panel.samples),
        "customdata": [f"{bytes_text(sample.parts.total)}, {sample.phase}" for sample in panel.samples],
        "hovertemplate": "%{customdata}",
        "mode": "lines",
        "line": {"width": 0, "color": "rgba(0,0,0,0)"},
    }


def _peak(panel: Panel, picture: Pictured) -> dict[str, Any]:
    return {
        "type": "scatter",
        "x": [panel.peak_index],
        "y": [panel.samples[panel.peak_index].parts.total / picture.unit_bytes],
        "mode": "markers",
        "marker": {"size": 9, "line": {"width": 1}},
        "cliponaxis": False,
        "hoverinfo": "skip",
    }


def _peak_words(panel: Panel, picture: Pictured) -> dict[str, Any]:
    return {
        "text": f"<b>{panel.peak_text}</b>",
        "x": panel.peak_index,
        "y": panel.samples[panel.peak_index].parts.total / picture.unit_bytes,
        "xanchor": "right" if panel.peak_near_end else "left",
        "yanchor": "bottom",
        "xshift": -5 if panel.peak_near_end else 5,
        "showarrow": False,
    }


def _line(mark: PhaseMark) -> dict[str, Any]:
    return {"type": "line", "x0": mark.start, "x1": mark.start, "y0": 0, "y1": 1, "yref": "paper",
            "line": {"width": 1, "dash": "dash"}}  # fmt: skip


def _words(mark: PhaseMark) -> dict[str, Any]:
    return {
        "text": f"{html_text(mark.phase)}<br>{mark.peak_text}",
        "x": mark.end if mark.at_end else mark.start,
        "y": 1,
        "yref": "paper",
        "xanchor": "right" if mark.at_end else "left",
        "align": "right" if mark.at_end else "left",
        "yanchor": "top",
        "yshift": -36 * mark.row,
        "showarrow": False,
        "font": {"size": 11},
    }


def _peaks(report: MemoryReport, picture: Pictured) -> str:
    found = [
        (variant_name(variant), variant.memory, phase)
        for variant in report.variants
        if variant.memory
        for phase in variant.memory.phases
    ]
    rows = [[name, memory.obtained, *_cells(phase, picture)] for name, memory, phase in found]
    titles = ["checkpointing", "obtained", "phase", "peak", *map(part_name, picture.parts), "operator", "module"]
    strong = {index for index, (_, memory, phase) in enumerate(found) if phase == memory.peak}
    return table(titles, rows, figures=range(3, len(titles) - 2), strong=strong)


def _cells(phase: PhasePeak, picture: Pictured) -> list[str]:
    parts = [bytes_text(getattr(phase.parts, part)) for part in picture.parts]
    return [phase.phase, bytes_text(phase.peak_bytes), *parts, phase.operator, phase.path]
