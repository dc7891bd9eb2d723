"""Live bytes over a step: panels for each variant, and the picture (HTML, SVG, PNG) or data (CSV, JSON) of them."""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby, pairwise
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from bertscope.errors import SelectionError, install_command, needs_extra
from bertscope.reports.memory import Memory, MemoryReport, Sample
from bertscope.units import binary_unit, bytes_text, html_text
from bertscope.views.columns import Column, attribute, csv_only, csv_text, number, reader, shown_columns, values
from bertscope.views.console import PARTS, variable
from bertscope.views.footer import title
from bertscope.views.page.templating import filled
from bertscope.views.step import part_name, run_text, variant_name

COLORS = {part: light for part, (light, _) in PARTS.items()}  # of pictures, which have a light ground
_LABEL_SHARE = 0.25  # of the width of a panel: room for `655.91 MiB` on a phone


class PhaseMark(NamedTuple):
    """A phase: its samples `start` to `end`, and the place of its name (`row` 0 is the highest)."""

    phase: str  # in words
    peak_text: str
    start: int
    end: int
    row: int
    at_end: bool  # the name ends at `end` instead of beginning at `start`


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One variant; empty, with a `failure`, where there is nothing to draw."""

    title: str  # `checkpointing: full (estimated)`
    failure: str
    samples: tuple[Sample, ...]
    marks: tuple[PhaseMark, ...]
    peak_index: int
    peak_text: str


@dataclass(frozen=True, kw_only=True)
class Pictured:
    """All panels, the parts that any has, and the one unit of them all."""

    panels: tuple[Panel, ...]
    parts: tuple[str, ...]
    unit: str
    unit_bytes: int
    top: float  # of the vertical axis, in units, with space for the names above the highest peak


def pictured(report: MemoryReport) -> Pictured:
    """Return the report as panels."""
    panels = []
    for variant in report.variants:
        memory = variant.memory
        samples = memory.timeline if memory else ()
        obtained = f" ({memory.obtained})" if memory and memory.obtained else ""
        panel = Panel(
            title=f"checkpointing: {variant_name(variant)}{obtained}",
            failure="" if samples else variant.failure or "no samples",
            samples=samples,
            marks=_marks(memory) if memory else (),
            peak_index=max(range(len(samples)), key=lambda index: samples[index].parts.total, default=0),
            peak_text=f"peak {bytes_text(memory.cost.peak_bytes)}" if memory and samples else "",
        )
        panels.append(panel)
    all_parts = [sample.parts for panel in panels for sample in panel.samples]
    highest = max((parts.total for parts in all_parts), default=0)
    unit_bytes, unit = binary_unit(highest)
    return Pictured(
        panels=tuple(panels),
        parts=tuple(part for part in COLORS if any(getattr(parts, part) for parts in all_parts)),
        unit=unit,
        unit_bytes=unit_bytes,
        top=1.3 * highest / unit_bytes or 1.0,
    )


def _marks(memory: Memory) -> tuple[PhaseMark, ...]:
    peaks = {phase.phase: bytes_text(phase.peak_bytes) for phase in memory.phases}
    last, start = len(memory.timeline) - 1, 0
    marks: list[PhaseMark] = []
    free: list[float] = []  # the place from which each row of names is free
    for phase, group in groupby(memory.timeline, key=attrgetter("phase")):
        end = start + len(list(group)) - 1
        left = min(start, (1 - _LABEL_SHARE) * last)
        row = next((row for row, position in enumerate(free) if position <= left), len(free))
        free[row : row + 1] = [left + _LABEL_SHARE * last]
        marks.append(PhaseMark(phase, peaks.get(phase, ""), start, end, row, at_end=0 < left < start))
        start = end + 1
    return tuple(marks)


# ---- the timeline as SVG or PNG, drawn by matplotlib: the same bytes for the same report ----


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
_METADATA: dict[str, Any] = {"svg": dict.fromkeys(("Date", "Creator", "Format", "Type")), "png": {"Software": None}}


def _our_settings() -> Any:
    from matplotlib import style

    return style.context(["default", _SETTINGS])  # whatever the user's matplotlibrc says


def image(report: MemoryReport, suffix: str) -> bytes:
    """Return the picture as a file's bytes, `svg` or `png`."""
    out = io.BytesIO()
    with _our_settings():
        _figure(report).savefig(out, format=suffix, dpi=150, metadata=_METADATA[suffix])
    return out.getvalue()


def plot(report: MemoryReport) -> Any:
    """Return the picture as a figure of matplotlib; raises MissingExtraError without it."""
    with needs_extra("plot", "plot", otherwise="; str(report) and to_dict need nothing"), _our_settings():
        figure = _figure(report)
    figure._repr_png_ = lambda: image(report, "png")  # notebooks draw figures only of pyplot by themselves
    return figure


def _figure(report: MemoryReport) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    picture = pictured(report)
    columns = min(len(picture.panels), 2) or 1
    rows = -(-len(picture.panels) // columns) or 1
    figure = Figure(figsize=(columns * _PANEL_INCHES[0], rows * _PANEL_INCHES[1] + 1), layout="constrained")
    heading = title(report), run_text(report)
    figure.suptitle("\n".join(line for text in heading for line in textwrap.wrap(text, 70 * columns)), fontsize=11)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for panel, axes in zip(picture.panels, grid.flat, strict=False):
        _draw(axes, panel, picture)
    for axes in grid.flat[len(picture.panels) :]:
        axes.remove()
    for axes in grid[:, 0]:
        axes.set_ylabel(f"live memory, {picture.unit}")
        axes.set_ylim(0, picture.top)
    if handles := [Patch(color=COLORS[part], label=part_name(part)) for part in picture.parts]:
        lines = 2 if len(picture.panels) == 1 and len(handles) > 4 else 1
        figure.legend(handles=handles, loc="outside lower center", ncols=-(-len(handles) // lines), frameon=False)
    return figure


def _draw(axes: Any, panel: Panel, picture: Pictured) -> None:
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.set_xticks([])
    axes.tick_params(labelleft=True)
    if not panel.samples:
        axes.text(0.5, 0.5, textwrap.fill(panel.failure, 50), ha="center", va="center", transform=axes.transAxes)
        return
    for end, part in reversed([*enumerate(picture.parts, 1)]):
        below = picture.parts[:end]
        tops = [sum(getattr(sample.parts, name) for name in below) / picture.unit_bytes for sample in panel.samples]
        # Memory is constant from one event to the next.
        axes.stairs(tops, fill=True, color=COLORS[part], linewidth=0, gid=part)
    axes.grid(axis="y", color="black", alpha=0.12, linewidth=0.6)
    axes.set_xlim(0, len(panel.samples))
    axes.set_xlabel("in the order of allocations (not time)")

    def label(text: str, at: tuple[float, float], shift: tuple[int, int], **options: Any) -> None:
        align = "right" if shift[0] < 0 else "left"
        axes.annotate(text, at, xytext=shift, textcoords="offset points", ha=align, **options)

    for mark in panel.marks:
        if mark.start:
            axes.axvline(mark.start, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
        over_lines = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1}  # of short phases
        at, shift = (mark.end + 1 if mark.at_end else mark.start, 1), (-4 if mark.at_end else 4, -2 - 26 * mark.row)
        above: Any = {"xycoords": ("data", "axes fraction"), "va": "top", "fontsize": 9, "bbox": over_lines}
        label(f"{mark.phase}\n{mark.peak_text}", at, shift, **above)
    peak = panel.peak_index + 0.5, panel.samples[panel.peak_index].parts.total / picture.unit_bytes
    axes.plot([peak[0]], [peak[1]], "o", color="black", markersize=5)
    is_near_end = panel.peak_index > 0.6 * (len(panel.samples) - 1)  # there is no room to the right
    label(panel.peak_text, peak, (-6 if is_near_end else 6, 3), va="bottom", fontweight="bold")


# ---- a small chart as SVG: bytes over a share ----


@dataclass(frozen=True)
class Chart:
    """A chart's axes as SVG: bytes up to `top` over shares from left to right, and room for a `legend`."""

    top: float
    title: str
    x_title: str
    legend: int = 0

    def at(self, share: float, size: float) -> tuple[float, float]:
        """Return the place of a share and a size."""
        return round(70 + 550 * share, 1), round(275 - 255 * size / self.top, 1)

    def text(self, x: float, y: float, content: str, anchor: str = "start") -> str:
        """Return a text that begins, ends or has its middle there."""
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html_text(content)}</text>'

    def svg(self, shapes: Sequence[str], x_texts: Sequence[str] = ()) -> str:
        """Return the picture with these shapes, and with texts below the axis, from the left end to the right one."""
        unit_bytes, unit = binary_unit(int(self.top))
        axes = [
            '<path d="M70 20V275H620" fill="none" stroke="currentColor"/>',
            self.text(6, 13, f"{self.title}, {unit}"),
            self.text(345, 312, self.x_title, "middle"),
        ]
        for tick in (0, 0.25, 0.5, 0.75, 1):
            _, y = self.at(0, tick * self.top)
            axes.append(self.text(64, y + 4, f"{tick * self.top / unit_bytes:.1f}", "end"))
        for mark, content in enumerate(x_texts):
            axes.append(self.text(self.at(mark / (len(x_texts) - 1), 0)[0], 291, content, "middle"))
        box = f'viewBox="0 0 {640 + self.legend} 320" width="{640 + self.legend}" height="320"'
        style = 'font-family="system-ui, sans-serif" font-size="12" fill="currentColor"'
        return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {box} {style}>', *axes, *shapes, "</svg>\n"])


# ---- the picture of a page, and the data ----


def memory_charts(report: MemoryReport, *, with_parts: bool = False) -> dict[str, Any]:
    """Return what a page shows: a chart for each variant, and the peaks as a table, if wanted with their parts."""
    picture, run = pictured(report), run_text(report)
    known = [(variant, memory) for variant in report.variants if (memory := variant.memory)]
    obtained = {memory.obtained for _, memory in known}
    rows = ((variant, phase, phase == memory.peak) for variant, memory in known for phase in memory.phases)
    peaks = [{"variant": variant, "phase": phase, "is_highest": is_highest} for variant, phase, is_highest in rows]
    columns = [
        Column("checkpointing", variant_name).of("variant"),
        attribute("obtained", "variant.memory.obtained", csv=(), shown=len(obtained) > 1),
        attribute("phase", "phase.phase", csv=()),
        number("peak", "phase.peak_bytes", bytes_text, csv=()),
        *(number(part_name(part), f"phase.parts.{part}", bytes_text, csv=()) for part in picture.parts if with_parts),
        attribute("operator", "phase.operator", csv=()),
        attribute("module", "phase.path", csv=()),
    ]
    return {
        "run": f"{run}; {report.machine}" if "measured" in obtained else run,
        "colors": {part_name(part): variable("part", part) for part in picture.parts},
        "panels": [(panel, figure(panel, picture) if panel.samples else None) for panel in picture.panels],
        "columns": shown_columns(columns, peaks),
        "peaks": peaks,
        "is_highest": itemgetter("is_highest"),
    }


def figure(panel: Panel, picture: Pictured) -> dict[str, Any]:
    """Return the data of the chart of one variant; each part is its changes, in bytes."""
    columns = [[getattr(sample, name) for sample in panel.samples] for name in ("phase", "path", "operator")]
    names = [list(dict.fromkeys(column)) for column in columns]
    numbers = [{text: number for number, text in enumerate(texts)} for texts in names]
    return {
        "kind": "memory",
        "scale": "memory",
        "top": max(sample.parts.total for sample in panel.samples) or 1,
        "rows": 1 + max((mark.row for mark in panel.marks), default=0),
        "x": "in the order of allocations (not time)",
        "total": "total",
        "back_label": "Back",
        "parts": [(part_name(part), variable("part", part)) for part in picture.parts],
        "changes": [_changes([getattr(sample.parts, part) for sample in panel.samples]) for part in picture.parts],
        "names": names,
        "places": [[known[text] for text in column] for known, column in zip(numbers, columns, strict=True)],
        "marks": panel.marks,
        "peak": (panel.peak_index, panel.peak_text),
    }


def _changes(sizes: Sequence[int]) -> list[int | str]:
    """Return the changes from sample to sample; as text the number of samples without one."""
    runs = groupby((size - before for before, size in pairwise([0, *sizes])), bool)
    return [item for is_change, run in runs for item in (run if is_change else [str(len([*run]))])]


FORMATS = "html", "svg", "png", "csv", "json"


def timeline(report: MemoryReport, suffix: str) -> bytes:
    """Return the file for `--timeline out.SUFFIX`; raises SelectionError as `check_suffix` does."""
    suffix = check_suffix(suffix)
    if suffix in ("svg", "png"):
        return image(report, suffix)
    if suffix == "html":
        return filled("timeline.html", title=title(report), timeline=memory_charts(report, with_parts=True)).encode()
    return (csv(report) if suffix == "csv" else report.to_json()).encode()


def check_suffix(suffix: str) -> str:
    """Return the format that `html` or `.HTML` names; a command asks before it measures for minutes.

    Raises SelectionError for a format that there is not, or whose drawing library is not installed.
    """
    name = suffix.lower().removeprefix(".")
    if name not in FORMATS:
        raise SelectionError(f"a timeline is written as {', '.join(FORMATS)}; got {name[:40]!r}: name such a file")
    if name in ("svg", "png") and find_spec("matplotlib") is None:
        raise SelectionError(
            f"a timeline as {name} needs matplotlib, which is not installed: {install_command('plot')}, or name a .csv "
            "or .json file"
        )
    return name


def csv(report: MemoryReport) -> str:
    """Return one record for each sample of each variant, in bytes."""
    sizes = {f"{part}_bytes": reader(f"sample.parts.{part}") for part in (*COLORS, "total")}
    columns = [csv_only(values("variant", "obtained", "index") | values("phase", of="sample") | sizes)]
    rows = []
    for variant in report.variants:
        about = {"variant": variant_name(variant), "obtained": variant.memory and variant.memory.obtained}
        for index, sample in enumerate(variant.memory.timeline if variant.memory else ()):
            rows.append({**about, "index": index, "sample": sample})
    return csv_text(columns, rows)
