"""The timeline as SVG or PNG, drawn by matplotlib: the same bytes for the same report."""

import io
import textwrap
from typing import Any

from bertscope.render.footer import title
from bertscope.render.timeline.panels import COLORS, Panel, PhaseMark, Pictured, part_name, pictured, run_text
from bertscope.reports.memory import MemoryReport
from bertscope.texts import say

_PANEL_INCHES = (6.4, 4.2)
_SETTINGS: dict[Any, Any] = {
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib; readers without it take their own sans-serif
    "font.size": 10,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "bertscope",  # else every file has other ids
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_METADATA: dict[str, dict[str, Any]] = {
    "svg": dict.fromkeys(("Date", "Creator", "Format", "Type")),
    "png": {"Software": None},
}


def image(report: MemoryReport, suffix: str) -> bytes:
    """Return the picture as the bytes of a file, `svg` or `png`."""
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's matplotlibrc says
        matplotlib.rcParams.update(_SETTINGS)
        _figure(report).savefig(out, format=suffix, dpi=150, metadata=_METADATA[suffix])
    return out.getvalue()


def _figure(report: MemoryReport) -> Any:
    from matplotlib.figure import Figure

    picture = pictured(report)
    columns = min(len(picture.panels), 2) or 1
    rows = -(-len(picture.panels) // columns) or 1
    width, height = columns * _PANEL_INCHES[0], rows * _PANEL_INCHES[1] + 1
    figure = Figure(figsize=(width, height), layout="constrained")
    heading = textwrap.wrap(title(report), 70 * columns) + textwrap.wrap(
        run_text(report.run, inputs_given=report.inputs_given), 70 * columns
    )
    figure.suptitle("\n".join(heading), fontsize=11)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for panel, axes in zip(picture.panels, grid.flat, strict=False):
        _draw(axes, panel, picture)
    for axes in grid.flat[len(picture.panels) :]:
        axes.remove()
    for axes in grid[:, 0]:
        axes.set_ylabel(say("live_memory", unit=picture.unit))
        axes.set_ylim(0, picture.top)
    _legend(figure, picture)
    return figure


def _draw(axes: Any, panel: Panel, picture: Pictured) -> None:
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_xticks([])
    axes.tick_params(labelleft=True)
    if not panel.samples:
        axes.text(0.5, 0.5, textwrap.fill(panel.failure, 50), ha="center", va="center", transform=axes.transAxes)
        return
    for part, heights in reversed(picture.tops(panel)):
        axes.fill(*_outline(heights), color=COLORS[part], linewidth=0, gid=part)
    axes.grid(axis="y", color="black", alpha=0.12, linewidth=0.6)
    axes.set_xlim(0, len(panel.samples))
    axes.set_xlabel(say("order"))
    for mark in panel.marks:
        _mark_phase(axes, mark)
    _mark_peak(axes, panel, picture)


def _outline(heights: list[float]) -> tuple[list[float], list[float]]:
    """Return the corners of the area under the steps: memory is constant from one event to the next."""
    x, y = [0.0], [0.0]
    for place, height in enumerate(heights):
        if height != y[-1]:
            x += [place, place]
            y += [y[-1], height]
    return [*x, len(heights), len(heights)], [*y, y[-1], 0.0]


def _mark_phase(axes: Any, mark: PhaseMark) -> None:
    if mark.start:
        axes.axvline(mark.start, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
    axes.annotate(
        f"{mark.phase}\n{mark.peak_text}",
        (mark.end + 1 if mark.at_end else mark.start, 1),
        xycoords=("data", "axes fraction"),
        xytext=(-4 if mark.at_end else 4, -2 - 26 * mark.row),
        textcoords="offset points",
        ha="right" if mark.at_end else "left",
        va="top",
        fontsize=9,
        bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1},  # over the line of a short phase
    )


def _mark_peak(axes: Any, panel: Panel, picture: Pictured) -> None:
    height = panel.samples[panel.peak_index].parts.total / picture.unit_bytes
    axes.plot([panel.peak_index + 0.5], [height], "o", color="black", markersize=5)
    axes.annotate(
        panel.peak_text,
        (panel.peak_index + 0.5, height),
        xytext=(-6 if panel.peak_near_end else 6, 3),
        textcoords="offset points",
        ha="right" if panel.peak_near_end else "left",
        va="bottom",
        fontweight="bold",
    )


def _legend(figure: Any, picture: Pictured) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=COLORS[part], label=part_name(part)) for part in picture.parts]
    if handles:
        rows = 2 if len(picture.panels) == 1 and len(handles) > 4 else 1
        figure.legend(handles=handles, loc="outside lower center", ncols=-(-len(handles) // rows), frameon=False)
