"""The content of every picture of a timeline: a panel for each variant, with its areas, phases and peak."""

import io
import operator
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from bertscope.errors import MissingExtraError, one_line
from bertscope.render.console import PARTS
from bertscope.render.footer import title
from bertscope.reports.memory import Memory, MemoryReport, Sample, Variant
from bertscope.settings.generate import changed, row_words
from bertscope.settings.parallelism import Parallelism
from bertscope.settings.rows import rows
from bertscope.settings.run_config import CUDA, STORED, TRAINING, RunConfig
from bertscope.units import binary_unit, bytes_text

COLORS = {part: light for part, (light, _) in PARTS.items()}  # of pictures, which have a light ground
_LABEL_SHARE = 0.25  # of the width of a panel: room for `655.91 MiB` on a phone


@dataclass(frozen=True, kw_only=True)
class PhaseMark:
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

    @property
    def peak_near_end(self) -> bool:
        """Check if the label of the peak goes to its left, because its right is too narrow."""
        return self.peak_index > 0.6 * (len(self.samples) - 1)


@dataclass(frozen=True, kw_only=True)
class Pictured:
    """All panels, the parts that any of them has, and the one unit of them all."""

    panels: tuple[Panel, ...]
    parts: tuple[str, ...]
    unit: str
    unit_bytes: int
    top: float  # of the vertical axis, in units, with space for the names above the highest peak

    def tops(self, panel: Panel) -> list[tuple[str, list[float]]]:
        """Return each part with the upper edge of its area, the lowest area first."""
        heights = ([getattr(sample.parts, part) / self.unit_bytes for sample in panel.samples] for part in self.parts)
        tops = accumulate(heights, lambda below, part: [*map(operator.add, below, part)])
        return list(zip(self.parts, tops, strict=True))


def pictured(report: MemoryReport) -> Pictured:
    """Return the report as panels."""
    panels = tuple(_panel(variant) for variant in report.variants)
    samples = [sample for panel in panels for sample in panel.samples]
    highest = max((sample.parts.total for sample in samples), default=0)
    unit_bytes, unit = binary_unit(highest)
    return Pictured(
        panels=panels,
        parts=tuple(part for part in COLORS if any(getattr(sample.parts, part) for sample in samples)),
        unit=unit,
        unit_bytes=unit_bytes,
        top=1.3 * highest / unit_bytes or 1.0,
    )


def _panel(variant: Variant) -> Panel:
    memory = variant.memory
    samples = memory.timeline if memory else ()
    name = variant_name(variant)
    if memory and memory.obtained:
        name = f"{name} ({memory.obtained})"
    return Panel(
        title=f"checkpointing: {name}",
        failure="" if samples else variant.failure or "no samples",
        samples=samples,
        marks=tuple(_marks(memory)) if memory else (),
        peak_index=max(range(len(samples)), key=lambda index: samples[index].parts.total, default=0),
        peak_text=f"peak {bytes_text(memory.cost.peak_bytes)}" if memory and samples else "",
    )


def _marks(memory: Memory) -> list[PhaseMark]:
    peaks = {phase.phase: bytes_text(phase.peak_bytes) for phase in memory.phases}
    last = len(memory.timeline) - 1
    marks: list[PhaseMark] = []
    free: list[float] = []  # the place from which each row of names is free
    start = 0
    for phase, group in groupby(memory.timeline, key=lambda sample: sample.phase):
        end = start + len(list(group)) - 1
        left = min(start, (1 - _LABEL_SHARE) * last)
        row = next((row for row, place in enumerate(free) if place <= left), len(free))
        free[row : row + 1] = [left + _LABEL_SHARE * last]
        marks.append(
            PhaseMark(phase=phase, peak_text=peaks.get(phase, ""), start=start, end=end, row=row,
                      at_end=0 < left < start)
        )  # fmt: skip
        start = end + 1
    return marks


def variant_name(variant: Variant) -> str:
    """Return `full`, or `full reentrant`."""
    return variant.checkpointing + (" reentrant" if variant.reentrant else "")


def strategy_name(text: str) -> str:
    """Return a strategy for a table or a sentence: `keep:addmm.5@0-6` without the path of the layers, cut if long."""
    return one_line(re.sub(r"(?<=[:;])[^:;=]*=", "", text), limit=34)


_PART_NAMES = {
    "reserved": "reserved, not in tensors",
    "context": "CUDA context",
    "before": "blocks from before the recording",
    "tensors": "tensors outside modules",
}


def part_name(part: str) -> str:
    """Return the name of a part in words."""
    return _PART_NAMES.get(part, part.replace("_", " "))


def run_text(run: RunConfig, *, inputs_given: bool = False, precision: bool = True) -> str:
    """Return `training, batch 8, sequence 512, fp32, optimizer adamw, cpu`; with given inputs there are no sizes."""
    sizes = [] if inputs_given else [f"batch {run.batch}", f"sequence {run.seq}"]
    dtypes = ["the dtypes of its parameters" if run.precision == STORED else run.precision] if precision else []
    return ", ".join([run.mode, *sizes, *dtypes, *loop_words(run), run.device])


def kernel_word(attention: str | None, run: RunConfig) -> str:
    """Return the attention kernel of a run on CUDA in words, nothing on a CPU and for eager attention."""
    if attention != "sdpa" or run.device != CUDA:
        return ""
    return f"{run.sdpa_kernel} kernel" if run.sdpa_kernel != "auto" else "the kernel that torch chooses"


# Settings that other texts name.
_NAMED = (
    "batch", "seq", "mode", "precision", "optimizer", "loop", "checkpointing", "reentrant", "device", "sdpa_kernel",
    "input", *rows(Parallelism),
)  # fmt: skip


def loop_words(run: RunConfig) -> list[str]:
    """Return the settings of a training loop in words: `optimizer sgd`, `momentum 0.9`, `4 micro-batches`."""
    optimizer = [row_words("optimizer", run.optimizer)] if run.mode == TRAINING else []
    others = [row_words(name, value) for name, value in changed(run).items() if name not in _NAMED]
    return [*optimizer, row_words("loop", run.loop), *others]


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
_METADATA: dict[str, dict[str, Any]] = {
    "svg": dict.fromkeys(("Date", "Creator", "Format", "Type")),
    "png": {"Software": None},
}


@contextmanager
def _our_settings() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's matplotlibrc says
        matplotlib.rcParams.update(_SETTINGS)
        yield


def image(report: MemoryReport, suffix: str) -> bytes:
    """Return the picture as the bytes of a file, `svg` or `png`."""
    out = io.BytesIO()
    with _our_settings():
        _figure(report).savefig(out, format=suffix, dpi=150, metadata=_METADATA[suffix])
    return out.getvalue()


def plot(report: MemoryReport) -> Any:
    """Return the picture as a figure of matplotlib; raises MissingExtraError without it."""
    try:
        with _our_settings():
            figure = _figure(report)
    except ImportError:
        raise MissingExtraError("plot", "plot", otherwise="; str(report) and to_dict need nothing") from None
    figure._repr_png_ = lambda: image(report, "png")  # notebooks draw figures only of pyplot by themselves
    return figure


def _figure(report: MemoryReport) -> Any:
    from matplotlib.figure import Figure

    picture = pictured(report)
    columns = min(len(picture.panels), 2) or 1
    rows = -(-len(picture.panels) // columns) or 1
    width, height = columns * _PANEL_INCHES[0], rows * _PANEL_INCHES[1] + 1
    figure = Figure(figsize=(width, height), layout="constrained")
    heading = title(report), run_text(report.run, inputs_given=report.inputs_given)
    figure.suptitle("\n".join(line for text in heading for line in textwrap.wrap(text, 70 * columns)), fontsize=11)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for panel, axes in zip(picture.panels, grid.flat, strict=False):
        _draw(axes, panel, picture)
    for axes in grid.flat[len(picture.panels) :]:
        axes.remove()
    for axes in grid[:, 0]:
        axes.set_ylabel(f"live memory, {picture.unit}")
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
    axes.set_xlabel("in the order of allocations (not time)")
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
