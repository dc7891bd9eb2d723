"""The content of every picture of a timeline: a panel for each variant, with its areas, phases and peak."""

import operator
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

from bertscope.render.colors import PARTS
from bertscope.reports.memory import Memory, MemoryReport, Sample, Variant
from bertscope.settings.generate import changed, row_words
from bertscope.settings.parallelism import Parallelism
from bertscope.settings.rows import rows
from bertscope.settings.run_config import CUDA, STORED, TRAINING, RunConfig
from bertscope.texts import has_text, say, word
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

    def heights(self, panel: Panel, part: str) -> list[float]:
        """Return one part over the samples, in units."""
        return [getattr(sample.parts, part) / self.unit_bytes for sample in panel.samples]

    def tops(self, panel: Panel) -> list[tuple[str, list[float]]]:
        """Return each part with the upper edge of its area, the lowest area first."""
        heights = (self.heights(panel, part) for part in self.parts)
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
        name = say("variant", name=name, obtained=word("obtained", memory.obtained))
    return Panel(
        title=say("named", name=say("checkpointing"), text=name),
        failure="" if samples else variant.failure or "no samples",
        samples=samples,
        marks=tuple(_marks(memory)) if memory else (),
        peak_index=max(range(len(samples)), key=lambda index: samples[index].parts.total, default=0),
        peak_text=say("peak_size", size=bytes_text(memory.peak.peak_bytes)) if memory and samples else "",
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
            PhaseMark(phase=word("phase", phase), peak_text=peaks.get(phase, ""), start=start, end=end, row=row,
                      at_end=0 < left < start)
        )  # fmt: skip
        start = end + 1
    return marks


def variant_name(variant: Variant) -> str:
    """Return `full`, or `full reentrant`."""
    return variant.checkpointing + (" reentrant" if variant.reentrant else "")


def part_name(part: str) -> str:
    """Return the name of a part in words."""
    return say(f"part_{part}")


def run_text(run: RunConfig, *, inputs_given: bool = False, precision: bool = True) -> str:
    """Return `training, batch 8, sequence 512, fp32, optimizer adamw, cpu`; with given inputs there are no sizes."""
    sizes = [] if inputs_given else [say("batch", count=run.batch), say("sequence", count=run.seq)]
    return say("comma").join([
        mode_word(run), *sizes, *([precision_word(run.precision)] if precision else ()), *loop_words(run), run.device
    ])  # fmt: skip


def precision_word(precision: str) -> str:
    """Return a precision in words: its own name, or that parameters keep their dtypes."""
    return say("own_dtypes") if precision == STORED else precision


def kernel_word(attention: str | None, run: RunConfig) -> str:
    """Return the attention kernel of a run on CUDA in words, nothing on a CPU and for eager attention."""
    if attention != "sdpa" or run.device != CUDA:
        return ""
    return say("chosen_kernel") if run.sdpa_kernel == "auto" else say("kernel", name=run.sdpa_kernel)


def mode_word(run: RunConfig) -> str:
    """Return the mode of a run in words."""
    return word("mode", run.mode)


# Settings that other texts name.
_NAMED = ("batch", "seq", "mode", "precision", "optimizer", "checkpointing", "reentrant", "device", "sdpa_kernel",
"input",
          *rows(Parallelism))  # fmt: skip


def loop_words(run: RunConfig) -> list[str]:
    """Return the settings of a training loop in words: `optimizer sgd`, `momentum 0.9`, `4 micro-batches`."""
    optimizer = [setting_word("optimizer", run.optimizer)] if run.mode == TRAINING else []
    return optimizer + [setting_word(name, value) for name, value in changed(run).items() if name not in _NAMED]


def setting_word(name: str, value: Any) -> str:
    """Return a setting in words; those of its row if the catalogue has none."""
    shown = " ".join(value) if isinstance(value, tuple) else value
    return say(f"setting_{name}", value=shown) if has_text(f"setting_{name}") else row_words(name, value)
