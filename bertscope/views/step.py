"""The columns of a StepCost, its sentence and the words of a run: every report on a step shows these.

A new column of all of them is a line of COST_COLUMNS.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from bertscope.errors import one_line
from bertscope.reports.memory import Variant
from bertscope.reports.step import NO, UNCERTAIN, YES, PhasePeak, StepCost, TimeRange
from bertscope.settings.generate import changed, row_words
from bertscope.settings.parallelism import Parallelism
from bertscope.settings.rows import rows
from bertscope.settings.run_config import CUDA, PLAIN, STORED, TRAINER, TRAINING, RunConfig
from bertscope.units import binary_unit, bytes_text, flops_text, share_text
from bertscope.views.columns import (
    Column,
    Read,
    answer_word,
    attribute,
    csv_only,
    in_phase,
    number,
    reader,
    row_phase,
    values,
)
from bertscope.views.console import PARTS
from bertscope.views.footer import title

_UNITS = (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3))
WIDE, VERBOSE = 1, 2  # a column that is left out of a wide table without -v; one that every table leaves out


def time_text(span: TimeRange) -> str:
    """Return a time with three digits, or a range with two: `2.05 h`, `66 to 140 ms`."""
    unit, seconds = next((row for row in _UNITS if span.low_seconds >= row[1]), _UNITS[-1])
    digits = 2 if span.low_seconds < span.high_seconds else 3
    low, high = (f"{float(f'{end / seconds:.{digits}g}'):,g}" for end in (span.low_seconds, span.high_seconds))
    return f"{f'{low} to {high}' if low != high else low} {unit}"


def range_text(low: int, high: int) -> str:
    """Return `12.00 MiB to 3.00 GiB` for two numbers of bytes, and one of them for a range that shows none."""
    return " to ".join(dict.fromkeys(map(bytes_text, (low, high))))


def share_of(size: int, limit: int) -> str:
    """Return `14.46 GiB of 14.56 GiB`, in the unit of the smaller, or of the larger above four digits."""
    small, large = sorted((size, limit))
    unit = large if large >= 10_000 * binary_unit(small)[0] else small
    return f"{bytes_text(size, unit_of=unit)} of {bytes_text(limit, unit_of=unit)}"


def verdict_text(cost: StepCost) -> str:
    """Return `yes`, `not certain` or `no, short by 1.20 GiB`."""
    if cost.verdict != NO or cost.shortfall is None:
        return answer_word(cost.verdict)
    is_known = cost.context.low_bytes == cost.context.high_bytes
    return f"no, short by {'' if is_known else 'at least '}{bytes_text(cost.shortfall.low_bytes)}"


PEAK = "peak"  # the title of a column
# A cell whose value is None is empty, and a column without any value is not shown.
COST_COLUMNS = (
    number(PEAK, "peak_bytes", bytes_text, csv=["peak_bytes", "other_loop_bytes"]),
    attribute("peak in", "phase", "path", "operator", of="peak", detail=WIDE),
    number("saved for backward", "saved_bytes", bytes_text, detail=WIDE),
    number("allocated", "max_allocated_bytes", bytes_text, detail=VERBOSE),
    number("reserved", "reserved_bytes", bytes_text, detail=WIDE),
    Column("on the GPU", lambda cost: bytes_text(cost.gpu_bytes) if cost.reserved else "", values("gpu_bytes"), True),
    Column("fits", verdict_text, values("verdict", "limit_bytes")),
    number("extra FLOPs", "extra_flops", lambda share: f"{100 * share:+.1f} %", detail=WIDE),
    number("step FLOPs", "step_flops", flops_text, csv=["step_flops", "recompute_flops"], detail=WIDE),
    number("step time", "step", time_text, of="time", csv=["step.low_seconds", "step.high_seconds"]),
    number("tokens per second", "tokens_per_second", "{:,.0f}".format, of="time"),
    number("MFU", "mfu", share_text, of="time"),
    number("time of an epoch", "epoch", time_text, of="time", csv=["epoch.low_seconds", "epoch.high_seconds"]),
)


def cost_columns(
    rows: Sequence[Any], of: str | Read = "cost", *, without: Iterable[str] = (), missing: str = "", **titles: str
) -> list[Column]:
    """Return the columns of the costs of rows; CSV only has those in `without`, and `peak` and `fits` other titles."""
    found = shown_by(rows, [column.of(of, missing) for column in COST_COLUMNS], missing)
    found = [replace(column, shown=False) if column.title in without else column for column in found]
    return [replace(column, title=titles.get(column.title, column.title)) for column in found]


def shown_by(rows: Sequence[Any], columns: Iterable[Column], missing: str = "") -> list[Column]:
    """Return the columns, each shown if any row has a text for it."""
    return [replace(column, shown=any(column.text(row) not in ("", missing) for row in rows)) for column in columns]


def part_columns(rows: Sequence[Any], of: str, groups: Iterable[Sequence[str]]) -> list[Column]:
    """Return a column for each group of parts of a peak."""

    def size(group: Sequence[str], peak: PhasePeak) -> str:
        total = sum(getattr(peak.parts, name) for name in group)
        return bytes_text(total) if total else ""

    columns = []
    for group in groups:
        csv = {f"{name}_bytes": reader(f"parts.{name}") for name in group}
        columns.append(Column(", ".join(map(part_name, group)), partial(size, group), csv, right=True, detail=WIDE))
    return shown_by(rows, [column.of(of) for column in columns])


def phase_columns(rows: Sequence[Any], of: str | Read, indent: str = "") -> list[Column]:
    """Return a column for the peak of each phase of a step, which tables have with -v only."""

    def size(name: str, phases: Iterable[PhasePeak]) -> str:
        return next((bytes_text(phase.peak_bytes) for phase in phases if phase.phase == name), "")

    names = dict.fromkeys(phase.phase for row in rows for phase in reader(of)(row) or ())
    return [
        Column(f"{indent}{row_phase(name)}", partial(size, name), right=True, detail=VERBOSE).of(of) for name in names
    ]


def parts_csv(of: str = "cost.peak") -> Column:
    """Return the parts of a peak for CSV only."""
    return csv_only({f"{name}_bytes": reader(f"{of}.parts.{name}") for name in PARTS})


# ---- the sentence ----


def needs(cost: StepCost, place: str = "") -> str:
    """Return what a step needs: `peak 13.26 GiB in backward, 14.50 GiB of 14.56 GiB on the GPU, 412 ms a step`."""
    size = bytes_text(cost.peak_bytes)
    text = f"peak {size}{place}"
    if cost.reserved is None:
        text = f"peak {size if cost.limit_bytes is None else share_of(cost.peak_bytes, cost.limit_bytes)}{place}"
    elif cost.limit_bytes is None:
        text = f"{text}, reserved {bytes_text(cost.reserved.low_bytes)}"
    else:
        text = f"{text}, {share_of(cost.gpu_bytes, cost.limit_bytes)} on the GPU"
    if cost.verdict == NO and cost.shortfall:
        text = f"{text}, short by {range_text(cost.shortfall.low_bytes, cost.shortfall.high_bytes)}"
    if cost.time is not None:
        how = "" if cost.time.is_predicted else " (from the data sheet, as 97 of 106 published steps)"
        text = f"{text}, {time_text(cost.time.step)} a step{how}"
    return text


def place_of(peak: PhasePeak) -> str:
    """Return where a peak is: ` in backward, in mm of encoder.layer.0-11.output`."""
    operator = f", in {peak.operator}" if peak.operator else ""
    code = peak.path or ("the model's own code" if peak.phase != "optimizer" else "")
    return f" {in_phase(peak.phase)}{operator}{f' of {code}' if code else ''}"


def with_other_loop(answer: str, run: RunConfig, cost: StepCost) -> str:
    """Return the answer with what another loop saves or needs, if that is more than 1 % of the peak."""
    more = 0 if cost.other_loop_bytes is None else cost.other_loop_bytes - cost.peak_bytes
    if abs(more) <= 0.01 * cost.peak_bytes:
        return answer
    size = bytes_text(abs(more))
    if run.other_loop == PLAIN:
        return f"{answer}; a loop that keeps outputs until the next forward has returned needs {size} more"
    if run.zeroes_between:
        return f"{answer}; zeroing the gradients after the optimizer step saves {size}"
    is_early = run.other_loop == TRAINER and run.mode == TRAINING
    return f"{answer}; freeing the output before {'backward' if is_early else 'the next forward'} saves {size}"


def by_verdict(costs: Iterable[tuple[str, StepCost | None]]) -> dict[str, list[str]]:
    """Return the names of the steps with each verdict, the best verdict first."""
    pairs = [(name, cost.verdict) for name, cost in costs if cost is not None]
    found = {verdict: [name for name, own in pairs if own == verdict] for verdict in (YES, UNCERTAIN, NO)}
    return {verdict: names for verdict, names in found.items() if names}


# ---- the notes ----


LORA_NOTE = (
    "checkpointing enabled before get_peft_model, where peft has the embeddings require a gradient; enabled after it, "
    "a step needs less"
)
CUDNN_NOTE = "not counted: the workspaces of cuDNN's convolutions"


def time_notes(costs: Iterable[StepCost | None]) -> Iterable[str]:
    """Yield the way in which times were predicted, and the peaks that MFU refers to."""
    times = [cost.time for cost in costs if cost is not None and cost.time is not None]
    if any(not time.is_predicted for time in times):
        yield (
            "time by the data sheet: 1.2 to 2.5 times FLOPs / peak + 4 x saved bytes / bandwidth, as 97 of 106 "
            "published steps of 25 ms and more took; with recomputation, of which no time is published, 6 x the bytes "
            "saved without it; 'bertscope profile --device cuda --save FILE' measures it"
        )
    known = [time for time in times if time.is_predicted]
    if known:
        yield (
            "time: matrix products and bytes moved at the rates of the GPU, corrected by one measured step of each "
            "precision and strategy"
        )
    for peak, source in dict.fromkeys((time.peak_flops, time.peak_source) for time in known):
        if peak is None:
            yield "no MFU: no peak is published for it here"
        else:
            yield (
                f"MFU: FLOPs of matrix products without recomputation, by the dense peak of {peak / 1e12:,.1f} "
                f"TFLOP/s ({source})"
            )


# ---- the words of a run, of its variants and of the parts of memory ----


def variant_name(variant: Variant) -> str:
    """Return `full`, or `full reentrant`."""
    return variant.checkpointing + (" reentrant" if variant.reentrant else "")


def strategy_names(strategies: Iterable[str]) -> Callable[[str], str]:
    """Return a function that names the strategies of a table or a sentence, each differently.

    A name is without the path of the layers, such as `keep:addmm.5@0-6`, and cut if it is long; where that makes two
    strategies equal, they are numbered. Another strategy, of a report below in the same table, is not shortened.
    """
    short = {text: one_line(re.sub(r"(?<=[:;])[^:;=]*=", "", text), limit=34) for text in strategies}
    equal = {name: [text for text in short if short[text] == name] for name in short.values()}
    numbered = {text: f"{short[text]} ({place})" for texts in equal.values() if len(texts) > 1
                for place, text in enumerate(texts, 1)}  # fmt: skip
    names = short | numbered
    return lambda text: names.get(text, text)


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
    return ", ".join([run.mode, *sizes(run, inputs_given, precision=precision), *loop_words(run), run.device])


def sizes(run: RunConfig, inputs_given: bool, *, precision: bool = True) -> list[str]:
    """Return the batch, the length and the precision of a run in words."""
    found = [] if inputs_given else [f"batch {run.batch}", f"sequence {run.seq}"]
    return [*found, *["the dtypes of its parameters" if run.precision == STORED else run.precision] * precision]


def assumed(report: Any, *words: str, groups: int = 2) -> str:
    """Return what an answer assumes: ranks, the model, the kernel of attention, and the run with these words.

    `groups` is the number of kinds of ranks, which decides if the report is of one of them.
    """
    run, kernel, ranks = report.run, "", []
    if report.subject.attention == "sdpa" and run.device == CUDA:
        kernel = f"{run.sdpa_kernel} kernel" if run.sdpa_kernel != "auto" else "the kernel that torch chooses"
    if (own := run.parallelism).world_size > 1:
        which = f"each of {own.mesh} ranks" if groups == 1 else f"rank {own.rank} of {own.mesh}"
        ranks = [f"{own.strategy}, {which}"]
        ranks += [f"units {report.units}"] if getattr(report, "units", "") else []
        ranks += [f"parameters gathered in {own.param_dtype}"] if own.param_dtype else []
        if run.accumulate > 1 and own.row.reduces:
            ranks.append(f"gradients reduced in {'each' if own.sync_each_batch else 'the last'} micro-batch")
    parts = (*ranks, title(report), kernel, run.mode, *words, *loop_words(run), run.device)
    return ", ".join(filter(None, parts))


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
