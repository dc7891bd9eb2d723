"""The memory report as a table, CSV and Markdown; in the terminal with bars, and what to conclude."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from bertscope.errors import named, one_line
from bertscope.render.columns import (
    Column,
    answer_word,
    csv_only,
    fits_word,
    in_phase,
    listed,
    optional,
    row_phase,
    values,
)
from bertscope.render.console import Target, wrapped
from bertscope.render.footer import not_generation, title, uncounted
from bertscope.render.timeline.panels import kernel_word, part_name, run_text, strategy_name, variant_name
from bertscope.render.traffic import (
    parallel_words,
    rank_tables,
    ranks_notes,
    traffic_notes,
    traffic_tables,
)
from bertscope.render.views import Table, View
from bertscope.reports.calibration import TimeRange
from bertscope.reports.memory import (
    NO,
    UNCERTAIN,
    YES,
    DeviceTerms,
    FitReport,
    FitRow,
    KeptRow,
    LengthsRow,
    Memory,
    MemoryReport,
    Parts,
    PhasePeak,
    ProcessMemory,
    Timing,
    Variant,
)
from bertscope.reports.plan import PlanReport, PlanRow
from bertscope.settings.checkpointing import NONE
from bertscope.settings.run_config import CPU, CUDA, INFERENCE, PLAIN, TRAINER, TRAINING, RunConfig
from bertscope.units import BF16, FP16, binary_unit, bytes_text, count_text, shape_text, share_text, signed_text

_BAR_WIDTH = 48
_TIMES = (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3))
# A different letter for each, so that the bars can be read without colour.
_MARKS = {
    "parameters": "P",
    "buffers": "b",
    "optimizer_state": "O",
    "inputs": "i",
    "gradients": "G",
    "activations": "A",
    "temporaries": "t",
    "gathered_parameters": "g",
    "communication": "c",
}

LORA_NOTE = (
    "checkpointing enabled before get_peft_model, where peft has the embeddings require a gradient; enabled after it, "
    "a step needs less"
)
CUDNN_NOTE = "not counted: the workspaces of cuDNN's convolutions"


def bars(report: MemoryReport, target: Target) -> str:
    """Draw the parts at each variant's peak, to one scale."""
    memories = [(_name(variant), variant.memory) for variant in report.variants if variant.memory]
    if not memories:
        return ""
    highest = max(memory.peak.peak_bytes for _, memory in memories) or 1
    label = max(len(name) for name, _ in memories) + 1
    width = max(min(_BAR_WIDTH, (target.width or 80) - label - 14), 8)
    drawn = [_bar(memory, highest, width) for _, memory in memories]
    lines = [
        f"{name:<{label}}{bar:<{width}} {bytes_text(memory.peak.peak_bytes)}"
        for (name, memory), bar in zip(memories, drawn, strict=True)
    ]
    used = [part for part, mark in _MARKS.items() if any(mark in bar for bar in drawn)]
    legend = " " * label + " ".join(f"{_MARKS[part]} {part_name(part)}" for part in used)
    return "\n".join(line.rstrip() for line in lines) + "\n" + wrapped(legend, target, label)


def _bar(memory: Memory, highest: int, width: int) -> str:
    text, sum_bytes = "", 0
    for part, mark in _MARKS.items():
        sum_bytes += getattr(memory.peak.parts, part)
        text += mark * (round(width * sum_bytes / highest) - len(text))
    return text


def verdict(report: MemoryReport) -> str:
    """Return the peak of each variant and its moment in a sentence, with the settings that it assumes."""
    known = [(variant, variant.memory) for variant in report.variants if variant.memory is not None]
    kernel = kernel_word(report.subject.attention, report.run)
    words = run_text(report.run, inputs_given=report.inputs_given)
    settings = [*parallel_words(report.run, len(report.ranks), report.units), title(report), kernel, words]
    is_estimated = all(memory.obtained == "estimated" for _, memory in known)
    if is_estimated and report.run.device == CPU and report.run.compute_precision in (BF16.name, FP16.name):
        settings.append("in 16 bits oneDNN's copies are counted only on a CPU with AVX-512 for bf16 and without AMX")
    if report.run.device == CUDA and any(row.operator == "convolution" for _, memory in known for row in memory.kept):
        settings.append("without cuDNN's workspaces of convolutions, which may double the peak")
    if is_estimated:
        settings += uncounted(report)
    answer = _peaks(report) + not_generation(report)
    if fits := _fits(report):
        is_several = len(report.variants) > 1
        answer = f"{fits}; {answer}" if is_several else f"{fits}: {answer}"
    for _, memory in known[:1]:
        if memory.obtained == "estimated" and memory.other_loop_bytes is not None:
            more = memory.other_loop_bytes - memory.peak.peak_bytes
            answer = with_other_loop(answer, report.run, more, memory.peak.peak_bytes)
    return f"{answer}; assumed: {', '.join(filter(None, settings))}"


def with_other_loop(answer: str, run: RunConfig, more_bytes: int, peak_bytes: int) -> str:
    """Return the answer with what another loop saves or needs, if that is more than 1 % of the peak."""
    if abs(more_bytes) <= 0.01 * peak_bytes:
        return answer
    loop = "forward" if run.other_loop == TRAINER and run.mode != TRAINING else run.other_loop
    size = bytes_text(abs(more_bytes))
    if loop == PLAIN:
        return f"{answer}; a loop that keeps outputs until the next forward has returned needs {size} more"
    return f"{answer}; freeing the output before {'backward' if loop == TRAINER else 'the next forward'} saves {size}"


def _peaks(report: MemoryReport) -> str:
    """Return the peak of one variant with its moment, or of several the peaks of two or the lowest one."""
    known = [(variant, variant.memory) for variant in report.variants if variant.memory is not None]
    sizes = [memory.peak.peak_bytes for _, memory in known]
    if not known:
        return "nothing was measured"
    if len(report.variants) == 1:
        variant, memory = known[0]
        text, device = f"peak {bytes_text(sizes[0])} {_place(memory.peak)}", memory.device
        if device and report.card:
            text = f"{text}, {share_of(device.card_bytes, report.card.memory_bytes)} on the card"
        elif device:
            text = f"{text}, reserved {bytes_text(device.reserved_bytes)}"
        return with_time(text, variant)
    if len(known) > 1 and max(sizes) == min(sizes):
        places = listed(dict.fromkeys(in_phase(memory.peak.phase) for _, memory in known))
        return f"each of {len(sizes)} peaks is {bytes_text(sizes[0])}, {places}"
    if len(known) > 2:  # the table has the others
        known = [known[sizes.index(min(sizes))]]
    names = [_name(variant) for variant, _ in known]
    first = next((name for name in names if name != NONE), "")  # the word stands once
    peaks = [
        bytes_text(memory.peak.peak_bytes)
        + (" without " if name == NONE else " with ")
        + ("checkpointing" if name == NONE else f"checkpointing {name}" if name == first else name)
        for name, (_, memory) in zip(names, known, strict=True)
    ]
    found = ", ".join(peaks)
    return f"the lowest of {len(sizes)} peaks is {found}" if len(sizes) > 2 else f"the peak is {found}"


def share_of(size: int, limit: int) -> str:
    """Return `14.46 GiB of 14.56 GiB`, in the unit of the smaller, or of the larger above four digits."""
    small, large = sorted((size, limit))
    unit = large if large >= 10_000 * binary_unit(small)[0] else small
    return f"{bytes_text(size, unit_of=unit)} of {bytes_text(limit, unit_of=unit)}"


def needed_text(report: FitReport | PlanReport, row: FitRow | PlanRow) -> str:
    """Return the peak, and on a GPU the memory on the card, of the memory that there is."""
    if report.run.device == CPU:
        return f"peak {share_of(row.peak_bytes, report.budget_bytes)}"
    return f"peak {bytes_text(row.peak_bytes)}, {share_of(row.card_bytes, report.budget_bytes)} on the card"


def _fits(report: MemoryReport) -> str:
    """Return if the step fits on the GPU, by the answers of the variants; empty without a GPU."""
    names: dict[str, list[str]] = {}
    for variant in report.variants if report.card else ():
        if variant.answer:
            names.setdefault(variant.answer, []).append(_name(variant))
    on, answers = f" on {report.card.name}" if report.card else "", []
    for answer in filter(names.get, (YES, UNCERTAIN, NO)):
        way = " without checkpointing" if names[answer] == [NONE] else f" with checkpointing {listed(names[answer])}"
        answers.append(f"{fits_word(answer)}{on}{way if len(report.variants) > 1 else ''}")
        on = ""
    return f"the step {' and '.join(answers)}" if answers else ""


def notes(report: MemoryReport) -> Iterator[str]:
    """Yield what to conclude from the table, and how each number was obtained."""
    if report.card and report.card.calibration:
        yield f"{report.card.name}: {report.card.calibration}"
    yield from conclusions(report)
    yield from ranks_notes(report)
    yield from traffic_notes(report)
    yield from footnotes(report)


def conclusions(report: MemoryReport) -> Iterator[str]:
    """Yield the gain and cost of each further variant against the first, and the place of each peak."""
    for variant in report.variants:
        if variant.failure:
            yield f"{_name(variant)}: {one_line(variant.failure)}"
    known = [(variant, variant.memory) for variant in report.variants if variant.memory is not None]
    for other, memory in known[1:]:
        yield _comparison(*known[0], other, memory)
        if memory.peak.peak_bytes >= known[0][1].peak.peak_bytes and other.outlook is not None:
            points = "".join(
                (f"; at batch {point.batch}: {bytes_text(point.peak_bytes)} instead of "
f"{bytes_text(point.first_bytes)}")
                for point in other.outlook.points
            )  # fmt: skip
            yield f"the peak is lower from batch {other.outlook.pays_from_batch} on{points} (estimated)"
    for variant, memory in known if len(report.variants) > 1 else ():  # the verdict names the place of one
        yield f"{_name(variant)}: the peak is {_place(memory.peak)}"


def _name(variant: Variant) -> str:
    return strategy_name(variant_name(variant))


def _place(peak: PhasePeak) -> str:
    operator = f", in {peak.operator}" if peak.operator else ""
    code = peak.path or ("the model's own code" if peak.phase != "optimizer" else "")
    return f"{in_phase(peak.phase)}{operator}{f' of {code}' if code else ''}"


def _comparison(first: Variant, first_memory: Memory, other: Variant, memory: Memory) -> str:
    before, after = first_memory.peak.peak_bytes, memory.peak.peak_bytes
    if after < before:
        percent = f"{100 * (before - after) / before:.1f}"
        text = f"the peak falls by {bytes_text(before - after)} ({percent} %)"
    elif after == before:
        text = "the peak does not change: no tensor saved for backward exists at the peak"
    else:
        text = f"the peak rises by {bytes_text(after - before)}"
    if first.timing and other.timing and first.timing.median_seconds:
        ratio = other.timing.median_seconds / first.timing.median_seconds
        text += f"; a step takes {ratio:.2f} x as long"
        if first.timing.flops and other.timing.flops:
            text += f" ({other.timing.flops / first.timing.flops:.2f} x the FLOPs)"
        some, others = first.timing.step_seconds, other.timing.step_seconds
        if min(len(some), len(others)) > 1 and min(some) <= max(others) and min(others) <= max(some):
            text += f"; the times overlap: raise {named('steps')}"
    return f"{_name(other)}: {text}"


def footnotes(report: MemoryReport) -> Iterator[str]:
    """Yield notes on how each number was obtained, and how far it may be off."""
    memories = [variant.memory for variant in report.variants if variant.memory]
    obtained = {memory.obtained for memory in memories}
    has_ranks = any(variant.rank_rows for variant in report.variants)
    if "measured" in obtained:
        what = "the allocator's events"
        if has_ranks:
            what = "the tensors that each real rank allocates and frees, without temporary memory inside kernels,"
        how = "" if has_ranks else " without the profiler"
        yield f"measured: {what} on {report.machine}; times from separate steps{how}"
    if "estimated" in obtained:
        device = report.run.device
        accuracy = "within 0.1 % of the measured peak of BERTs in training (docs/accuracy.md)"
        if report.run.compile:
            accuracy = (
                "inductor's programs for a CPU (a note says if the step is eager), within 0.1 % of 20 measured peaks "
                "there; no card was measured (docs/memory.md)"
            )
        elif device == CUDA:
            accuracy = "allocated within 0.2 % of 37 loops measured on an H200 (docs/accuracy.md)"
        yield (
            f"estimated for {device}: a run on fake tensors; torch dispatches every operator, nothing "
            f"is allocated; {accuracy}"
        )
    if report.subject.lora and any(variant.checkpointing != NONE for variant in report.variants):
        yield LORA_NOTE
    if layers := [memory.traced_layers for memory in memories if memory.traced_layers]:
        yield f"{max(layers)} layers ran; the other layers are extrapolated (verified)"
    if device_terms := next((memory.device for memory in memories if memory.device), None):
        yield from _device_notes(device_terms, is_calibrated=bool(report.card and report.card.calibration))
    yield from time_notes(report.variants)
    gradients = "and adds to existing gradients" if report.run.has_gradients_before else "without gradients"
    yield f"1 MiB = 2**20 B; tied tensors once; not the first step: it starts with optimizer state, {gradients}"


def time_notes(rows: Iterable[Variant | FitRow | PlanRow | LengthsRow]) -> Iterator[str]:
    """Yield the way in which times were predicted, and the peaks that MFU refers to."""
    rows = list(rows)
    if any(row.time_range for row in rows):
        yield (
            "time by the data sheet: 1.2 to 2.5 times FLOPs / peak + 4 x saved bytes / bandwidth, as 97 of 106 "
            "published steps of 25 ms and more took; with recomputation, of which no time is published, 6 x the bytes "
            "saved without it; 'bertscope profile --device cuda --save FILE' measures it"
        )
    known = [row.predicted for row in rows if row.predicted is not None]
    if known:
        yield (
            "time: matrix products and bytes moved at the rates of the card, corrected by one "
            "measured step of each precision and strategy"
        )
    for peak, source in dict.fromkeys((time.peak_flops, time.peak_source) for time in known):
        if peak is None:
            yield "no MFU: no peak is published for it here"
        else:
            yield (
                f"MFU: FLOPs of matrix products without recomputation, by the dense peak of {peak / 1e12:,.1f} "
                f"TFLOP/s ({source})"
            )


def _device_notes(device: DeviceTerms, *, is_calibrated: bool) -> Iterator[str]:
    low, high = device.context_low_bytes, device.context_high_bytes
    if low == high and not is_calibrated:
        yield f"context and other memory in use on the GPU: {bytes_text(low)}, measured"
        return
    histories = range_text(device.allocated_low_bytes, device.allocated_high_bytes)
    others = (
        f"; {histories} if a checkpoint was loaded on the card, or another model ran before"
        if device.allocated_low_bytes
        else ""
    )
    yield (
        "allocated: the blocks of the simulated allocator, as torch.cuda.max_memory_allocated adds them, with "
        f"{bytes_text(device.workspace_bytes)} for cuBLAS; for a model moved from the CPU{others}"
    )
    yield CUDNN_NOTE
    yield (
        "reserved: the simulated caching allocator over four steps; 33 of 37 loops on an H200 within 1 %, the others "
        "within a tenth"
    )
    if device.reserved_loaded_bytes:
        yield (
            f"reserved after a checkpoint was loaded on the card: {bytes_text(device.reserved_loaded_bytes)}; its "
            "blocks stay until empty_cache(), and one copy of a tensor leaves a segment of its size"
        )
    how = "as measured in steps" if is_calibrated else "by GPU and version of torch"
    yield f"the CUDA context adds {range_text(low, high)} outside torch, {how}"
    yield (
        "on the card: reserved and the context, as nvidia-smi shows: "
        f"{range_text(device.reserved_bytes + low, device.reserved_bytes + high)}"
    )


def time_text(span: TimeRange) -> str:
    """Return a time with three digits, or a range with two: `2.05 h`, `66 to 140 ms`."""
    unit, seconds = next((row for row in _TIMES if span.low_seconds >= row[1]), _TIMES[-1])
    is_range = span.low_seconds < span.high_seconds
    low, high = (f"{float(f'{time / seconds:.{2 if is_range else 3}g}'):,g}"
                 for time in (span.low_seconds, span.high_seconds))  # fmt: skip
    return f"{f'{low} to {high}' if low != high else low} {unit}"


def range_columns(rows: Sequence[Any], of: str = "") -> list[Column]:
    """Return the columns of the ranges of times that a row has; a row's variant is its attribute `of`."""

    def column(name: str, title: str) -> Column:
        read, ends = attrgetter(f"{of}.{name}" if of else name), ("low_seconds", "high_seconds")
        csv = {f"{name}_{end}": partial(lambda end, row: getattr(read(row), end, None), end) for end in ends}
        return Column(title, lambda row: optional(time_text)(read(row)), csv, right=True,
                      shown=any(map(read, rows)))  # fmt: skip

    found = column("time_range", "step time (data sheet)"), column("epoch", "time of an epoch")
    return [column for column in found if column.shown]


def with_time(answer: str, row: Variant | FitRow) -> str:
    """Return the answer with the range of the time of a step by a data sheet, if there is one."""
    return (
        answer
        if row.time_range is None
        else (f"{answer}, {time_text(row.time_range)} a step (from the data sheet, as 97 of 106 published steps)")
    )


def range_text(low: int, high: int) -> str:
    """Return `12.00 MiB to 3.00 GiB` for two numbers of bytes, and one of them for a range that shows none."""
    return " to ".join(dict.fromkeys(map(bytes_text, (low, high))))


PARTS = tuple(field.name for field in fields(Parts))
SHOWN_ROWS = 10
_SMALL = 0.001  # of the peak: such as the position numbers of a BERT, and its inputs


@dataclass(frozen=True)
class _MemoryLine:
    """A name and its value for each variant; the terminal shows a detail with -v."""

    name: str
    cells: tuple[str, ...]
    is_strong: bool = False
    is_detail: bool = False


def memory_lines(report: MemoryReport, *, has_details: bool = True) -> Iterator[_MemoryLine]:
    """Yield the lines of the table: the parts at the peak, the peaks of the phases, and other measurements.

    Without details, the parts below _SMALL are one line, and some lines are left out.
    """
    lines = _memory_lines(report, _part_groups(report, 0 if has_details else _SMALL))
    return (line for line in lines if has_details or not line.is_detail)


def _part_groups(report: MemoryReport, small: float) -> list[list[str]]:
    """Return the parts of the peaks, each in a list; in one list those below this share of every peak."""
    peaks = [variant.memory.peak for variant in report.variants if variant.memory]
    found = [part for part in PARTS if any(getattr(peak.parts, part) for peak in peaks)]
    few = [part for part in found if all(getattr(peak.parts, part) < small * peak.peak_bytes for peak in peaks)]
    return [few if part in few else [part] for part in found if part not in few[1:]]


def _memory_lines(report: MemoryReport, part_groups: Sequence[Sequence[str]]) -> Iterator[_MemoryLine]:
    """Yield all lines."""
    variants = report.variants

    def has(path: str) -> bool:
        return any(_at(variant, path) for variant in variants)

    def line(name: str, path: str, text: Callable[[Any], str] = bytes_text, **is_what: bool) -> _MemoryLine:
        values = [_at(variant, path) for variant in variants]
        return _MemoryLine(name, tuple(map(optional(text), values)), **is_what)

    for group in part_groups:
        name = ", ".join(map(part_name, group))
        yield line(name, "memory.peak.parts", partial(_sum_text, group))
    yield line("peak", "memory.peak.peak_bytes", is_strong=True)
    for number, phase in enumerate(next((variant.memory.phases for variant in variants if variant.memory), ())):
        peaks = [variant.memory.phases[number].peak_bytes if variant.memory else None for variant in variants]
        yield _MemoryLine(f"  {row_phase(phase.phase)}", tuple(map(optional(bytes_text), peaks)), is_detail=True)
    if report.run.mode != INFERENCE:
        yield line("saved for backward", "memory.kept_bytes")
    if has("predicted"):
        yield line("step time (predicted)", "predicted.seconds", lambda seconds: f"{1000 * seconds:,.2f} ms")
        yield line("tokens per second", "predicted.tokens_per_second", lambda rate: f"{rate:,.0f}")
        known = {variant.predicted.peak_flops for variant in variants if variant.predicted}
        for peak in filter(None, known):
            yield line(f"MFU of {peak / 1e12:,.1f} TFLOP/s", "predicted.mfu", share_text)
    if has("time_range"):
        yield line("step time (data sheet)", "time_range", time_text)
    if has("epoch"):
        yield line("time of an epoch", "epoch", time_text)
    if has("memory.device"):
        yield line("allocated", "memory.device.allocated_bytes", is_detail=True)
        yield line("reserved", "memory.device.reserved_bytes")
        yield line("on the card", "memory.device.card_bytes")
    if report.card and has("answer"):
        yield line(f"fits on {report.card.name}", "answer", answer_word)
    if any(variant.error is not None for variant in variants):
        peaks = [_at(variant, "estimated.peak.peak_bytes") if variant.measured else None for variant in variants]
        yield _MemoryLine("estimated peak", tuple(map(optional(bytes_text), peaks)))
        yield _MemoryLine("  worst error", tuple(map(_error_text, variants)))
    if has("process"):
        yield line("process: one step", "process", _step_text, is_detail=True)
        yield line("process: whole run", "process.run_high_water_bytes", is_detail=True)
    if has("timing"):
        steps = max(len(variant.timing.step_seconds) for variant in variants if variant.timing)
        yield line(f"step, median of {steps}", "timing", _seconds)
        if steps > 1:
            yield line("  slowest - fastest", "timing.step_seconds",
                       lambda seconds: f"{max(seconds) - min(seconds):.3f} s" if seconds else "")  # fmt: skip
    if has("timing.tokens_per_second"):
        yield line("tokens per second", "timing.tokens_per_second", lambda rate: f"{rate:,.0f}", is_detail=True)
        yield line("FLOP/s", "timing.flops_per_second", lambda rate: f"{rate / 1e9:,.1f} G",
                   is_detail=True)  # fmt: skip


def _at(item: Any, path: str) -> Any:
    """Return the attribute at a path such as `memory.peak`, None if one on the way is None."""
    for name in path.split("."):
        item = None if item is None else getattr(item, name)
    return item


def _sum_text(names: Sequence[str], parts: Parts) -> str:
    return bytes_text(sum(getattr(parts, name) for name in names))


def _error_text(variant: Variant) -> str:
    """Return the error as a percentage, or in bytes if it is less than the last digit of a percentage."""
    if variant.error is None or variant.error_bytes is None:
        return ""
    percent = f"{100 * variant.error:+.4f} %"
    is_small = percent.strip("+-0. %") == ""
    error = signed_text(variant.error_bytes) if variant.error_bytes else "0"
    return f"{error} bytes" if is_small else percent


def _step_text(process: ProcessMemory) -> str:
    return f"+{bytes_text(process.high_water_bytes - process.resident_before_bytes)}"


def _seconds(timing: Timing) -> str:
    return f"{timing.median_seconds:.3f} s" if timing.step_seconds else ""


def memory_columns(report: MemoryReport) -> list[Column]:
    """Return the column of names, and one for each variant."""
    obtained = [variant.memory.obtained if variant.memory else "nothing measured" for variant in report.variants]
    first, *names = "at the peak", *map(_name, report.variants)
    if len(set(obtained)) == 1:
        first = f"{first} ({obtained[0]})"
    else:
        names = [f"{name} ({how})" for name, how in zip(names, obtained, strict=True)]
    return [
        Column(first, lambda line: line.name),
        *(
            Column(name, partial(lambda number, line: line.cells[number], number), right=True)
            for number, name in enumerate(names)
        ),
    ]


_KEPT_NAMES = 4  # the columns that identify a row


def kept_columns(report: MemoryReport) -> list[Column]:
    """Return the columns of a kind of kept tensor, and one for its bytes in each variant."""
    return [
        Column("saved for backward, by module", lambda row: row[0].path or "(model)"),
        Column("what", lambda row: row[0].what, below=3),
        Column("each", lambda row: f"{shape_text(row[0].shape)} {row[0].dtype}" if row[0].dtype else "",
               below=2),
        Column("tensors", lambda row: count_text(row[0].tensors), right=True, below=1),
        *(Column(_name(variant), partial(lambda number, row: bytes_text(row[1][number]), number), right=True)
          for number, variant in enumerate(report.variants)),
    ]  # fmt: skip


def kept_cells(report: MemoryReport) -> list[tuple[KeptRow, tuple[int, ...]]]:
    """Return each kind of tensor that any variant keeps, with its bytes in each."""
    memories = [variant.memory for variant in report.variants]
    tables = [{(row.path, row.operator, row.shape): row for row in (memory.kept if memory else ())}
              for memory in memories]  # fmt: skip
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = []
    for key in keys:
        found = [table.get(key) for table in tables]
        first = next(row for row in found if row is not None)
        rows.append((first, tuple(row.kept_bytes if row else 0 for row in found)))
    return sorted(rows, key=lambda row: -max(row[1]))


def _tables(report: MemoryReport, target: Target | None, *, shown_rows: int | None = None) -> list[Table]:
    """Return the parts and phases, the ranks, the traffic, and the tensors saved for backward.

    In the terminal the last is shown with -v, or with `shown_rows`: their number, 0 for all, by default SHOWN_ROWS.
    """
    is_detailed = target is None or target.verbose
    lines = list(memory_lines(report, has_details=is_detailed))
    tables = [Table(memory_columns(report), lines, lambda line: line.is_strong, names=1)]
    tables += [Table(*found) for found in rank_tables(report)]
    tables += [Table(*found) for found in traffic_tables(report, by_module=is_detailed)]
    rows = kept_cells(report) if is_detailed or shown_rows is not None else []
    if not rows:
        return tables
    shown = rows if target is None else rows[: SHOWN_ROWS if shown_rows is None else shown_rows or None]
    rest = [sum(row[1][number] for row in rows[len(shown) :]) for number in range(len(report.variants))]
    sizes = ", ".join(map(bytes_text, rest))
    more = f"and {len(rows) - len(shown)} more, {sizes}; {named('rows')} 0 lists them all" + "\n" if any(rest) else ""
    return [*tables, Table(kept_columns(report), shown, names=_KEPT_NAMES, below=more)]


_PHASES = (
    csv_only(values("checkpointing", "reentrant", of="variant")),
    csv_only(values("obtained", of="memory")),
    csv_only(values("phase", "peak_bytes", "path", "operator", of="phase")),
    csv_only({f"{part}_bytes": attrgetter(f"phase.parts.{part}") for part in PARTS}),
)


def _records(report: MemoryReport) -> Table:
    """Return one record for each phase of each variant, estimated and measured, in bytes."""
    return Table(_PHASES, [
        SimpleNamespace(variant=variant, memory=memory, phase=phase)
        for variant in report.variants
        for memory in (variant.measured, variant.estimated)
        if memory is not None
        for phase in memory.phases
    ])  # fmt: skip


VIEW = View(
    answer=verdict,
    tables=_tables,
    notes=lambda report, target, **options: notes(report),
    hidden_rows=lambda report, target: len([*memory_lines(report)]) - len([*memory_lines(report, has_details=False)]),
    chart=lambda report, target: f"\n{bars(report, target)}" if target.verbose else "",
    records=_records,
)
