"""A StepCost's columns, its sentence and the words of a run: every report on a step shows these.

A new column of all these is a line of COST_COLUMNS.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from bertscope.errors import named, one_line
from bertscope.gpus import GPUS, half_precision
from bertscope.reports.base import PYTHON_ONLY, reads_words
from bertscope.reports.memory import EVALUATING, Variant
from bertscope.reports.step import (
    NO,
    UNCERTAIN,
    YES,
    ByteRange,
    PhasePeak,
    RunHistory,
    StepCost,
    StepTime,
    TimeRange,
    usable,
)
from bertscope.settings.generate import changed, row_words
from bertscope.settings.parallelism import Parallelism
from bertscope.settings.rows import rows
from bertscope.settings.run_config import AUTOCAST, CPU, CUDA, PLAIN, STORED, TRAINER, TRAINING, RunConfig
from bertscope.units import BF16, FP16, binary_unit, bytes_text, count_text, flops_text, share_text
from bertscope.views.columns import Column, Read, attribute, csv_only, in_phase, number, reader, values
from bertscope.views.console import PARTS, command_text, lists_all
from bertscope.views.footer import title, uncounted

_UNITS = (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3))
WIDE, VERBOSE = 1, 2  # a column that is left out of a wide table without -v; one that every table leaves out


def time_text(span: TimeRange, spans: Iterable[TimeRange] = ()) -> str:
    """Return a time with three digits, or a range with two: `2.05 h`, `66 to 140 ms`; in one unit with other spans."""
    low = min((other.low_seconds for other in spans), default=span.low_seconds)
    least = 0.1 if low < min(span.high_seconds, 1.0) else 1.0
    unit, seconds = next((row for row in _UNITS if low >= least * row[1]), _UNITS[-1])
    return f"{_digits(span.low_seconds / seconds, span.high_seconds / seconds)} {unit}"


def _digits(low: float, high: float) -> str:
    """Return a number with three digits, or a range with two."""
    first, last = (f"{float(f'{end:.{2 if low < high else 3}g}'):,g}" for end in (low, high))
    return f"{first} to {last}" if first != last else first


def money_text(time: StepTime | None) -> str:
    """Return what an epoch costs: `1.9 to 4 USD`."""
    if time is None or time.epoch_cost_low is None or time.epoch_cost_high is None:
        return ""
    is_tiny = time.epoch_cost_high < 0.01
    text = "under 0.01" if is_tiny else _digits(time.epoch_cost_low, time.epoch_cost_high)
    return f"{text} {time.currency}".rstrip()


def span_text(span: ByteRange) -> str:
    """Return `12.00 MiB to 3.00 GiB` or `1.00 to 3.00 GiB`, and one number for a range that shows none."""
    first, last = bytes_text(span.low_bytes), bytes_text(span.high_bytes)
    return last if first == last else _pair(first, "to", last)


def share_of(size: int, limit: int) -> str:
    """Return `14.46 of 14.56 GiB`, in the unit of the smaller, or of the larger above four digits."""
    small, large = sorted((size, limit))
    unit = large if large >= 10_000 * binary_unit(small)[0] else small
    return _pair(bytes_text(size, unit_of=unit), "of", bytes_text(limit, unit_of=unit))


def _pair(first: str, word: str, last: str) -> str:
    number, unit = first.split(" ")
    return f"{number if last.endswith(f' {unit}') else first} {word} {last}"


def lacking(cost: StepCost) -> str:
    """Return `needs 1.20 GiB more`, for a step that does not fit: beyond the limit, or the request without room."""
    least = cost.shortfall.low_bytes if cost.shortfall else 0
    return f"needs {bytes_text(max(cost.gpu_bytes - (cost.limit_bytes or 0), least))} more"


def histories_text(histories: Sequence[RunHistory]) -> str:
    """Return what torch reserves over the seeds of a run, and what emptying its cache would change."""
    highest, emptied = (max(histories, key=attrgetter(name)) for name in ("reserved_bytes", "emptied_bytes"))
    median, most = (bytes_text(RunHistory.reserved_of(histories, share) or 0) for share in (0.5, 0.95))
    return (
        f"over {len(histories)} seeds torch reserves {median} (p50), {most} (p95) and at most "
        f"{bytes_text(highest.reserved_bytes)}, which last grew in step {highest.grown_step}. With empty_cache() after "
        f"each step it is at most {bytes_text(emptied.emptied_bytes)}; a limit of its size is enough for "
        f"{sum(history.runs_in_emptied for history in histories)} of the seeds"
    )


def in_evaluation(cost: StepCost) -> str:
    """Return ` in evaluation` where that, and not the training step, has the peak."""
    return f" in {EVALUATING}" if cost.peak.phase == EVALUATING else ""


def verdict_text(cost: StepCost) -> str:
    """Return `yes`, `may fit` or `no, needs 1.20 GiB more`; of a script that ended there, its last peak."""
    if cost.verdict == NO and cost.gpu_bytes <= (cost.limit_bytes or 0):
        return f"no, out of memory at {bytes_text(cost.peak_bytes)}"
    return {UNCERTAIN: "may fit", NO: f"no, {lacking(cost)}"}.get(cost.verdict, cost.verdict)


def copied_text(size: int) -> str:
    """Return copies between GPU and host with their time: `3.20 GiB (58 to 270 ms)`."""
    return f"{bytes_text(size)} ({time_text(TimeRange.of_copies(size))})"


def _time_column(title: str, name: str) -> Column:
    def text_among(rows: Sequence[Any]) -> Callable[[Any], str]:
        spans = [span for row in rows if (span := getattr(row, name)) is not None]
        return number(title, name, partial(time_text, spans=spans)).text

    ends = [f"{name}.low_seconds", f"{name}.high_seconds"]
    return replace(number(title, name, time_text, csv=ends), text_among=text_among).of("time")


PEAK = "peak"  # the title of a column
# A cell whose value is None is empty, and a column without any value is not shown.
COST_COLUMNS = (
    number(PEAK, "peak_bytes", bytes_text, csv=["peak_bytes", "other_loop_bytes"]),
    attribute("peak in", "phase", "path", "operator", of="peak", detail=WIDE),
    number("saved for backward", "saved_bytes", bytes_text, detail=WIDE),
    number("allocated", "max_allocated_bytes", bytes_text, detail=VERBOSE),
    number("reserved", "reserved", span_text, csv=["reserved_bytes", "reserved.low_bytes"], detail=WIDE),
    Column("on the GPU", lambda cost: bytes_text(cost.gpu_bytes) if cost.reserved else "", values("gpu_bytes"), True),
    Column("fits", verdict_text, values("verdict", "limit_bytes", "margin"), is_verdict=True),
    number("in host memory", "host_bytes", bytes_text, detail=WIDE),
    number("copied in a step", "copied_bytes", copied_text, detail=WIDE),
    number("extra FLOPs", "extra_flops", lambda share: f"{100 * share:+.1f} %", detail=WIDE),
    number("step FLOPs", "step_flops", flops_text, csv=["step_flops", "recompute_flops"], detail=WIDE),
    _time_column("step time", "step"),
    number("tokens per second", "tokens_per_second", "{:,.0f}".format, of="time"),
    number("MFU", "mfu", share_text, of="time"),
    _time_column("epoch time", "epoch"),
    Column("epoch cost", money_text, values("epoch_cost_low", "epoch_cost_high", "hour_price")
           | {"currency": lambda time: time.currency or None}, right=True).of("time"),
)  # fmt: skip


def cost_columns(
    of: str | Read = "cost", *, without: Iterable[str] = (), missing: str = "", has_gpu: object = False, **titles: str
) -> list[Column]:
    """Return the columns of the costs of rows; CSV only has those in `without`, and `peak` and `fits` other titles.

    On a GPU the peak is left out where a line has no room for it.
    """
    columns = [replace(column.of(of, missing), shown=column.title not in without) for column in COST_COLUMNS]
    columns[0] = replace(columns[0], is_wide=2 * bool(has_gpu))
    return [replace(column, title=titles.get(column.title, column.title)) for column in columns]


def phase_columns(rows: Sequence[Any], of: str | Read, indent: str = "") -> list[Column]:
    """Return a column for the peak of each phase of a step, which tables have with -v only."""

    def size(name: str, phases: Iterable[PhasePeak]) -> str:
        return next((bytes_text(phase.peak_bytes) for phase in phases if phase.phase == name), "")

    names = dict.fromkeys(phase.phase for row in rows for phase in reader(of)(row) or ())
    wide: Any = {"right": True, "detail": VERBOSE}
    return [Column(f"{indent}{in_phase(name)}", partial(size, name), **wide).of(of) for name in names]


def parts_csv(of: str = "cost.peak") -> Column:
    """Return a peak's parts for CSV only."""
    return csv_only({f"{name}_bytes": reader(f"{of}.parts.{name}") for name in PARTS})


# ---- the sentence ----

LINE, COLUMNS = 100, 80  # characters of an answer; of one with facts that may be left out
Fact = str | tuple[str, int]  # of a sentence; one with a weight may be left out


def facts_text(facts: Iterable[Fact], limit: int = LINE) -> str:
    """Return the facts as one text; where it is longer than the limit, those with the lowest weights are left out."""
    shown = [(fact, 0) if isinstance(fact, str) else fact for fact in facts]
    weights = sorted({weight for _, weight in shown} - {0})
    while len(text := "".join(text for text, _ in shown)) > limit and weights:
        least = weights.pop(0)
        shown = [fact for fact in shown if fact[1] != least]
    return text


def line_of(*facts: Fact, limit: int = LINE) -> str:
    """Return the facts as a sentence: as many of those with a weight as a terminal has room for, or the limit."""
    text = facts_text(facts, (COLUMNS if limit == LINE else limit) - 1)
    return one_line(f"{text[:1].upper()}{text[1:]}.", limit=limit)


def step_time(cost: StepCost) -> str:
    """Return `, 412 ms a step`; nothing without a time."""
    time = cost.time
    if time is None:
        return ""
    money = f", {money_text(time)} an epoch" if money_text(time) else ""
    return f", {time_text(time.step)} a step{money}{'' if time.is_predicted else ' (data sheet)'}"


def on_gpu(cost: StepCost) -> str:
    """Return what a step takes of its limit: `needs 14.46 of 14.56 GiB`, or by how much more it does not fit."""
    return need_text(cost.verdict, cost.least_bytes, cost.gpu_bytes, cost.limit_bytes or 0)


def need_text(answer: str, least: int, size: int, limit: int) -> str:
    """Return what a step with a verdict takes of its limit; the least is without fragmentation."""
    if answer == NO and size > limit:
        return f"needs {bytes_text(size - limit)} more than {bytes_text(limit)}"
    if answer == UNCERTAIN and size > limit:
        return f"needs {_pair(bytes_text(least), 'to', share_of(size, limit))}"
    return f"needs {share_of(size, limit)}"


def doubt(cost: StepCost) -> str:
    """Return why a step only may fit: too little stays free, or the allocator may fail."""
    if cost.gpu_bytes <= (cost.limit_bytes or 0):
        return f"less than {margin_text(cost.margin)} free"
    return "depending on fragmentation and CUDA context"


def fitting_gpu(cost: StepCost, first: str = "") -> str:
    """Return the GPU with the least memory on which a step certainly fits: this one if it does; empty for none."""
    fitting = [gpu for gpu in GPUS.values() if usable(gpu.memory_bytes, cost.margin) > cost.gpu_bytes]
    least = min(fitting, key=lambda gpu: (gpu.name != first, gpu.memory_bytes), default=None)
    return least.name if least else ""


def limit_text(report: Any) -> str:
    """Return `on t4`; for a budget it with the device, which the user may not have named."""
    ranks = report.run.parallelism.world_size
    if report.gpu:
        return f"on {f'each of {ranks:,} ' * (ranks > 1)}{report.gpu.name}"
    return f"in {bytes_text(report.budget_bytes or 0)} on a {'CPU' if report.run.device == CPU else 'GPU'}"


def margin_text(margin: float) -> str:
    """Return `5 %`."""
    return f"{100 * margin:.3g} %"


def next_command(report: Any, name: str, why: str, python: str = "", /, **changes: Any) -> str:
    """Return what to do next and, below it, the command for the model and the settings of a report with changes.

    In Python it is the call of the function of that name, or this code. Empty if no command can name what was given.
    """
    if any(note.key == PYTHON_ONLY for note in getattr(report, "notes", ())):
        return ""
    limit = getattr(report, "budget_bytes", None)
    has_limit = limit is not None and name != "estimate"
    limits = {"gpu": report.gpu.name} if report.gpu else {"budget": limit} if has_limit else {}
    of_gpu = ("device", "sdpa_kernel") if limits else ()
    run = {key: value for key, value in changed(report.run).items() if key not in of_gpu}
    return f"{why}\n  {command_text(name, changes, run | limits, python, report.subject.name)}"


def micro_batches(report: Any, batch: int, **changes: Any) -> str:
    """Return the next step for a batch that does not fit: a plan with micro-batches, whose gradients it counts."""
    total = batch * report.run.accumulate
    changes |= {"batch": None, "accumulate": None, "batch_total": total, "checkpointing": None}
    return next_command(report, "plan", f"make batch {total:,} fit, with micro-batches", **changes)


def smaller_evaluation(report: Any, name: str, cost: StepCost | None, **changes: Any) -> str:
    """Return the next step where an evaluation with kept logits or larger batches has the peak; else nothing."""
    if cost is None or not in_evaluation(cost):
        return ""
    if cost.peak.operator == "cat" and report.run.eval_samples:
        why = "keep no logits on the GPU: move them to the CPU"
        return next_command(report, name, why, eval_samples=None, **changes)
    smaller = max(report.run.batch, min(8, report.run.eval_batch // 2))
    if report.run.eval_batch <= smaller:
        return ""
    return next_command(report, name, "evaluate in smaller batches", eval_batch=smaller, **changes)


def place_of(peak: PhasePeak) -> str:
    """Return where a peak is: ` in backward, in mm of encoder.layer.0-11.output`."""
    operator = f", in {peak.operator}" if peak.operator else ""
    code = peak.path or ("the model's own code" if peak.phase != "optimizer" else "")
    return f" {in_phase(peak.phase)}{operator}{f' of {code}' if code else ''}"


def other_loop(run: RunConfig, cost: StepCost) -> str:
    """Return what another loop saves or needs, if that is more than 1 % of the peak."""
    more = 0 if cost.other_loop_bytes is None else cost.other_loop_bytes - cost.peak_bytes
    if abs(more) <= 0.01 * cost.peak_bytes:
        return ""
    size = bytes_text(abs(more))
    if run.other_loop == PLAIN:
        return f"A loop that keeps its outputs until the next forward has returned needs {size} more."
    if run.zeroes_between:
        return f"Zeroing the gradients right after the optimizer step saves {size}."
    is_early = run.other_loop == TRAINER and run.mode == TRAINING
    return f"'del outputs' {'after the loss' if is_early else 'before the next forward'} saves {size}."


def by_verdict(costs: Iterable[tuple[str, StepCost | None]]) -> dict[str, list[str]]:
    """Return the steps' names with each verdict, the best verdict first."""
    pairs = [(name, cost.verdict) for name, cost in costs if cost is not None]
    by_answer = {verdict: [name for name, answer in pairs if answer == verdict] for verdict in (YES, UNCERTAIN, NO)}
    return {verdict: names for verdict, names in by_answer.items() if names}


# ---- the notes ----


LORA_NOTE = (
    "LoRA: checkpointing is enabled before get_peft_model, so the embeddings need a gradient; enabled after it, a step "
    "needs less."
)


def margin_note(cost: StepCost) -> str:
    """Return what a verdict means, with the margin and the contexts behind it."""
    high = cost.context.high_bytes
    context = f" with a context of {bytes_text(high)}" if high else ""
    return (
        f"yes: fits{context}, {margin_text(cost.margin)} free ({named('margin')}). may fit: less free, or "
        "it fragments. no: the tensors alone do not fit."
    )


UNITS_NOTE = "1 MiB = 2**20 B; FLOPs are matrix products, a multiply-add counts as 2."


def time_notes(costs: Iterable[StepCost | None]) -> Iterable[str]:
    """Yield the way in which times were predicted, and the peaks that MFU refers to."""
    times = [cost.time for cost in costs if cost is not None and cost.time is not None]
    if any(not time.is_predicted for time in times):
        yield (
            "Time from the data sheet: 1.2 to 2.5 times FLOPs / peak + 4 x saved bytes / bandwidth (recomputed: 6 x), "
            "as 97 of 106 published steps above 25 ms."
        )
    known = [time for time in times if time.is_predicted]
    if known:
        yield "Time from the measured rates of the GPU, corrected by one measured step a precision and strategy."
    for peak, source in dict.fromkeys((time.peak_flops, time.peak_source) for time in known):
        if peak is None:
            yield "No MFU: no peak is published for this precision."
        else:
            yield f"MFU: FLOPs without recomputation divided by the dense peak, {peak / 1e12:,.1f} TFLOP/s ({source})."


# ---- the words of a run, of its variants and of the parts of memory ----


def variant_name(variant: Variant) -> str:
    """Return `full`, or `full reentrant`."""
    return variant.checkpointing + (" reentrant" if variant.reentrant else "")


def strategy_names(strategies: Iterable[str]) -> Callable[[str], str]:
    """Return a function that names the strategies of a table or a sentence, each differently.

    A name is without the layers' path, such as `save:addmm.5@0-6`, and cut if it is long; where that makes two
    strategies equal, they are numbered. Another strategy, of a report below in the same table, is not shortened.
    """
    short = {text: one_line(re.sub(r"(?<=[:;])[^:;=]*=", "", text), limit=34) for text in strategies}
    equal = {name: [text for text in short if short[text] == name] for name in short.values()}
    several = (texts for texts in equal.values() if len(texts) > 1)
    numbered = {text: f"{short[text]} ({number})" for texts in several for number, text in enumerate(texts, 1)}
    names = short | numbered
    return lambda text: names.get(text, text)


_PART_NAMES = {
    "reserved": "reserved, not in tensors",
    "context": "CUDA context",
    "before": "blocks from before the recording",
    "tensors": "tensors outside modules",
}


def part_name(part: str) -> str:
    """Return a part's name in words."""
    return _PART_NAMES.get(part, part.replace("_", " "))


def run_text(report: Any) -> str:
    """Return `training, batch 8, seq 512, fp32, optimizer adamw, cpu`; with given inputs there are no sizes."""
    run = report.run
    facts = [run.mode, *sizes(report), precision_name(run.precision), *loop_words(run), run.device]
    return ", ".join(facts)


def sizes(report: Any) -> list[str]:
    """Return the batch and the length of a run in words, as far as its inputs follow them."""
    run, config = report.run, report.subject.config
    if getattr(report, "inputs_given", False):
        return []
    has_length = run.seq != 1 or not (run.input or (config and not reads_words(config)))
    return [f"batch {count_text(run.batch)}", *[f"seq {count_text(run.seq)}"] * has_length]


def precision_name(precision: str) -> str:
    """Return a precision's name."""
    return "the model's dtypes" if precision == STORED else precision


def precision_text(report: Any, precision: str) -> str:
    """Return a precision in words: 16 bits without autocast are not what most people mean, nor bf16 on an old GPU."""
    gpu, what = getattr(report, "gpu", None), []
    if precision in (BF16.name, FP16.name) and report.run.mode == TRAINING:  # peft keeps adapters in fp32
        mixed = f"weights and optimizer too; mixed precision is {AUTOCAST}{precision}"
        what.append("adapters in fp32" if report.subject.adapters else mixed)
    if gpu and precision.endswith(BF16.name) and half_precision(gpu) != BF16.name:
        what.append(f"slow: {gpu.name} has no bf16 units")
    return precision_name(precision) + (f" ({', '.join(what)})" if what else "")


def assumed(report: Any, *texts: str, groups: int = 2) -> str:
    """Return what an answer assumes: ranks, the model, the kernel of attention, and the run with these words.

    `groups` is the number of kinds of ranks, which decides if the report is about one.
    """
    run, kernel, ranks = report.run, "", []
    if report.subject.attention == "sdpa" and run.device == CUDA:
        kernel = f"{run.sdpa_kernel} kernel" if run.sdpa_kernel != "auto" else "the kernel that torch chooses"
    if (job := run.parallelism).world_size > 1:
        which = f"each of {job.mesh} ranks" if groups == 1 else f"rank {job.rank} of {job.mesh}"
        ranks = [f"{job.strategy}, {which}"]
        ranks += [f"units {report.units}"] if getattr(report, "units", "") else []
        ranks += [f"parameters gathered in {job.param_dtype}"] if job.param_dtype else []
        if run.accumulate > 1 and job.row.reduces:
            ranks.append(f"gradients reduced in {'each' if job.sync_each_batch else 'the last'} micro-batch")
    parts = (*ranks, title(report), kernel, run.mode, *texts, *loop_words(run), run.device)
    return ", ".join(filter(None, parts))


def unusual(run: RunConfig, *, has_gpu: bool = False) -> list[str]:
    """Return the mode, the loop and the device of a run in words, where they are not the defaults."""
    facts = [run.mode, *loop_words(run), *([] if has_gpu else [run.device])]
    return [word for word in facts if word not in _USUAL]


def settings_line(report: Any, *texts: str, groups: int = 2) -> str:
    """Return the model, these words, and what else of a run differs from the defaults; then what is not counted."""
    run, subject, ranks = report.run, report.subject, []
    if (job := run.parallelism).world_size > 1:
        ranks = [f"{job.strategy}, {'each' if groups == 1 else f'rank {job.rank}'} of {job.mesh}"]
    limits = [cost for row in getattr(report, "rows", getattr(report, "variants", ())) if (cost := row.cost)]
    margin = limits[0].margin if limits and limits[0].limit_bytes is not None else 0.0
    has_gpu = bool(getattr(report, "gpu", None))
    optional = [
        *texts,
        *ranks,
        one_line(subject.adapters, limit=35),
        f"{subject.attention} attention" if subject.attention not in (None, "sdpa") else "",
        f"{run.sdpa_kernel} kernel" if run.sdpa_kernel != "auto" and not has_gpu else "",
        *unusual(run, has_gpu=has_gpu),
    ]
    name = "" if subject.name == subject.architecture else f"{one_line(subject.name, limit=40)}: "
    is_bare = run.mode == TRAINING and run.loss == RunConfig.loss and not subject.has_head
    bare = " (no head)" * is_bare
    margins = [f"{margin_text(margin)} margin"] * bool(margin)
    line = listed_facts(f"{name}{subject.architecture}{bare}", optional, margins)
    line += lists_all() * (len(line + lists_all()) <= LINE)
    return "\n".join([line, *uncounted(report)])


def listed_facts(first: str, optional: Iterable[str], last: Iterable[str] = ()) -> str:
    """Return what a line of settings lists, where it is too long without the last of the optional ones."""
    facts = [(f", {word}", -rank) for rank, word in enumerate(optional, 1) if word]
    return facts_text([first, *facts, *(f", {word}" for word in last)], 2 * LINE)


# Settings that other texts name.
_NAMED = (
    "batch", "seq", "mode", "precision", "optimizer", "loop", "checkpointing", "reentrant", "device", "sdpa_kernel",
    "input", *rows(Parallelism),
)  # fmt: skip


def loop_words(run: RunConfig) -> list[str]:
    """Return the settings of a training loop in words: `optimizer sgd`, `momentum 0.9`, `4 micro-batches`."""
    optimizer = [row_words("optimizer", run.optimizer)] if run.mode == TRAINING else []
    changes = [row_words(name, value) for name, value in changed(run).items() if name not in _NAMED]
    return [*optimizer, row_words("loop", run.loop), *changes]


_USUAL = (RunConfig().mode, *loop_words(RunConfig()), RunConfig().device)
