"""The memory report as a table, CSV and Markdown; in the terminal with bars, and what to conclude."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

from bertscope.errors import named, one_line
from bertscope.reports.memory import Memory, MemoryReport, Variant
from bertscope.reports.step import StepCost
from bertscope.settings.checkpointing import NONE
from bertscope.settings.run_config import CPU, CUDA, INFERENCE
from bertscope.units import BF16, FP16, bytes_text, shape_text, signed_text
from bertscope.views.columns import Column, attribute, csv_only, fits_word, in_phase, listed, number, values
from bertscope.views.console import PARTS, Target, wrapped
from bertscope.views.footer import not_generation, uncounted
from bertscope.views.step import (
    CUDNN_NOTE,
    LORA_NOTE,
    PEAK,
    VERBOSE,
    assumed,
    by_verdict,
    cost_columns,
    needs,
    part_columns,
    part_name,
    parts_csv,
    phase_columns,
    place_of,
    range_text,
    run_text,
    shown_by,
    sizes,
    strategy_names,
    time_notes,
    variant_name,
    with_other_loop,
)
from bertscope.views.traffic import rank_tables, ranks_notes, traffic_notes, traffic_tables
from bertscope.views.views import Compared, Table, View, about, common_notes, model_columns, side_by_side

_BAR_WIDTH = 48
_MARKS = dict(zip(PARTS, "PbOiGAtgc", strict=True))  # letters, so that the bars can be read without colour


def bars(report: MemoryReport, target: Target) -> str:
    """Draw the parts at each variant's peak, to one scale."""
    known = _known(report)
    if not known:
        return ""
    highest = max(memory.cost.peak_bytes for _, memory in known) or 1
    label = max(len(name) for name, _ in known) + 1
    width = max(min(_BAR_WIDTH, (target.width or 80) - label - 14), 8)
    lines, used = "", ""
    for name, memory in known:
        bar, sum_bytes = "", 0
        for part, mark in _MARKS.items():
            sum_bytes += getattr(memory.peak.parts, part)
            bar += mark * (round(width * sum_bytes / highest) - len(bar))
        used += bar
        lines += f"{name:<{label}}{bar:<{width}} {bytes_text(memory.cost.peak_bytes)}\n"
    legend = " ".join(f"{mark} {part_name(part)}" for part, mark in _MARKS.items() if mark in used)
    return lines + wrapped(" " * label + legend, target, label)


def _known(report: MemoryReport) -> list[tuple[str, Memory]]:
    """Return the name and the memory of each variant that has one."""
    return [(name, variant.memory) for name, variant in _named(report) if variant.memory]


def verdict(report: MemoryReport) -> str:
    """Return the peak of each variant and its moment in a sentence, with the settings that it assumes."""
    memories = [memory for _, memory in _known(report)]
    settings = [assumed(report, *sizes(report.run, report.inputs_given), groups=len(report.ranks))]
    is_estimated = all(memory.obtained == "estimated" for memory in memories)
    if is_estimated and report.run.device == CPU and report.run.compute_precision in (BF16.name, FP16.name):
        settings.append("in 16 bits oneDNN's copies are counted only on a CPU with AVX-512 for bf16 and without AMX")
    if report.run.device == CUDA and any(row.operator == "convolution" for memory in memories for row in memory.kept):
        settings.append("without cuDNN's workspaces of convolutions, which may double the peak")
    if is_estimated:
        settings += uncounted(report)
    answer = _peaks(report) + not_generation(report)
    if fits := _fits(report):
        answer = f"{fits}{';' if len(report.variants) > 1 else ':'} {answer}"
    if memories and memories[0].obtained == "estimated":
        answer = with_other_loop(answer, report.run, memories[0].cost)
    return f"{answer}; assumed: {', '.join(settings)}"


def _peaks(report: MemoryReport) -> str:
    """Return the peak of one variant with its moment, or of several the peaks of two or the lowest one."""
    known = _known(report)
    peaks = [memory.cost.peak_bytes for _, memory in known]
    if not known:
        return "nothing was measured"
    if len(report.variants) == 1:
        return needs(known[0][1].cost, place_of(known[0][1].peak))
    if len(known) > 1 and max(peaks) == min(peaks):
        places = listed(dict.fromkeys(in_phase(memory.peak.phase) for _, memory in known))
        return f"each of {len(peaks)} peaks is {bytes_text(peaks[0])}, {places}"
    if len(known) > 2:  # the table has the others
        known = [known[peaks.index(min(peaks))]]
    words, strategies = [], [name for name, _ in known if name != NONE]
    for name, memory in known:
        way = "without checkpointing" if name == NONE else f"with {name}"
        if [name] == strategies[:1]:  # the word stands once
            way = f"with checkpointing {name}"
        words.append(f"{bytes_text(memory.cost.peak_bytes)} {way}")
    found = ", ".join(words)
    return f"the lowest of {len(peaks)} peaks is {found}" if len(peaks) > 2 else f"the peak is {found}"


def _fits(report: MemoryReport) -> str:
    """Return if the step fits on the GPU, by the answers of the variants; empty without a GPU."""
    names = by_verdict((name, row.estimated.cost if row.estimated else None) for name, row in _named(report))
    on, answers = f" on {report.card.name}" if report.card else "", []
    for verdict, found in names.items():
        way = " without checkpointing" if found == [NONE] else f" with checkpointing {listed(found)}"
        answers.append(f"{fits_word(verdict)}{on}{way if len(report.variants) > 1 else ''}")
        on = ""
    return f"the step {' and '.join(answers)}" if answers else ""


def notes(report: MemoryReport, target: Target | None = None, **_: Any) -> Iterator[str]:
    """Yield what to conclude from the table, and how each number was obtained."""
    if report.card and report.card.calibration:
        yield f"{report.card.name}: {report.card.calibration}"
    yield from conclusions(report)
    yield from ranks_notes(report)
    yield from traffic_notes(report)
    yield from footnotes(report)


def conclusions(report: MemoryReport) -> Iterator[str]:
    """Yield the gain and cost of each further variant against the first, and the place of each peak."""
    variants = _named(report)
    for name, variant in variants:
        if variant.failure:
            yield f"{name}: {one_line(variant.failure)}"
    known = [(name, variant, variant.memory) for name, variant in variants if variant.memory is not None]
    for name, other, memory in known[1:]:
        _, first, first_memory = known[0]
        yield f"{name}: {_comparison(first, first_memory, other, memory)}"
        if memory.cost.peak_bytes >= first_memory.cost.peak_bytes and other.outlook is not None:
            points = "".join(
                f"; at batch {point.batch}: {bytes_text(point.own_bytes)} instead of {bytes_text(point.first_bytes)}"
                for point in other.outlook.points
            )
            yield f"the peak is lower from batch {other.outlook.pays_from_batch} on{points} (estimated)"
    for name, _, memory in known if len(variants) > 1 else ():  # the verdict names the place of one
        yield f"{name}: the peak is{place_of(memory.peak)}"


def _named(report: MemoryReport) -> list[tuple[str, Variant]]:
    """Return the variants, each with a name that no other one has."""
    name = strategy_names(map(variant_name, report.variants))
    return [(name(variant_name(variant)), variant) for variant in report.variants]


def _comparison(first: Variant, first_memory: Memory, other: Variant, memory: Memory) -> str:
    before, after = first_memory.cost.peak_bytes, memory.cost.peak_bytes
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
    return text


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
    if cost := next((memory.cost for memory in memories if memory.cost.reserved), None):
        yield from _device_notes(cost, is_calibrated=bool(report.card and report.card.calibration))
    yield from time_notes(variant.cost for variant in report.variants)
    gradients = "and adds to existing gradients" if report.run.has_gradients_before else "without gradients"
    yield f"1 MiB = 2**20 B; tied tensors once; not the first step: it starts with optimizer state, {gradients}"


def _device_notes(cost: StepCost, *, is_calibrated: bool) -> Iterator[str]:
    low, high = cost.context.low_bytes, cost.context.high_bytes
    if low == high and not is_calibrated:
        yield f"context and other memory in use on the GPU: {bytes_text(low)}, measured"
        return
    others = ""
    if cost.allocated:
        histories = range_text(cost.allocated.low_bytes, cost.allocated.high_bytes)
        others = f"; {histories} if a checkpoint was loaded on the GPU, or another model ran before"
    yield (
        "allocated: the blocks of the simulated allocator, as torch.cuda.max_memory_allocated adds them, with "
        f"{bytes_text(cost.workspace_bytes)} for cuBLAS; for a model moved from the CPU{others}"
    )
    yield CUDNN_NOTE
    yield (
        "reserved: the simulated caching allocator over four steps; 33 of 37 loops on an H200 within 1 %, the others "
        "within a tenth"
    )
    if cost.reserved_loaded_bytes:
        yield (
            f"reserved after a checkpoint was loaded on the GPU: {bytes_text(cost.reserved_loaded_bytes)}; its "
            "blocks stay until empty_cache(), and one copy of a tensor leaves a segment of its size"
        )
    how = "as measured in steps" if is_calibrated else "by GPU and version of torch"
    yield f"the CUDA context adds {range_text(low, high)} outside torch, {how}"
    least = cost.gpu_bytes - high + low
    yield f"on the GPU: reserved and the context, as nvidia-smi shows: {range_text(least, cost.gpu_bytes)}"


SHOWN_ROWS = 10
_SMALL = 0.001  # of the peak: such as the position numbers of a BERT, and its inputs


def columns(report: MemoryReport, part_groups: Sequence[Sequence[str]]) -> list[Column]:
    """Return the columns of a report's variants: the parts at the peak, the cost, and what `profile` measured."""
    variants = report.variants
    costs = cost_columns(variants, fits=f"fits on {report.card.name}" if report.card else "fits")
    steps = max((len(variant.timing.step_seconds) for variant in variants if variant.timing), default=0)
    measured = partial(number, csv=())
    return [
        *part_columns(variants, "memory.peak", part_groups),
        *costs[:1],
        *phase_columns(variants, "memory.phases", indent="  "),
        *costs[1:],
        *shown_by(variants, [
            Column("estimated peak", lambda row: "" if row.error is None else bytes_text(row.estimated.cost.peak_bytes),
                   right=True),
            Column("  worst error", _error_text, right=True),
            measured("process: one step", "process", lambda process: (
                f"+{bytes_text(process.high_water_bytes - process.resident_before_bytes)}"), detail=VERBOSE),
            measured("process: whole run", "process.run_high_water_bytes", bytes_text, detail=VERBOSE),
            measured(f"step, median of {steps}", "timing", lambda timing: (
                f"{timing.median_seconds:.3f} s" if timing.step_seconds else "")),
            measured("  slowest - fastest", "timing.step_seconds", lambda seconds: (
                f"{max(seconds) - min(seconds):.3f} s" if len(seconds) > 1 else "")),
            measured("tokens per second", "timing.tokens_per_second", "{:,.0f}".format, detail=VERBOSE),
            measured("FLOP/s", "timing.flops_per_second", lambda rate: f"{rate / 1e9:,.1f} G", detail=VERBOSE),
        ]),
    ]  # fmt: skip


def variants_table(report: MemoryReport, *, is_verbose: bool = True) -> Table:
    """Return the table with a column for each variant; without -v the parts below _SMALL are one line."""
    obtained = [variant.memory.obtained if variant.memory else "nothing measured" for variant in report.variants]
    first, names = "at the peak", [name for name, _ in _named(report)]
    if len(set(obtained)) == 1:
        first = f"{first} ({obtained[0]})"
    else:
        names = [f"{name} ({how})" for name, how in zip(names, obtained, strict=True)]
    left_out = {"peak in"} | ({"saved for backward"} if report.run.mode == INFERENCE else set())  # notes have the place
    groups = _part_groups(report, 0 if is_verbose else _SMALL)
    found = [column for column in columns(report, groups) if column.title not in left_out]
    return side_by_side(first, found, report.variants, names, is_verbose=is_verbose, strong=PEAK)


def _part_groups(report: MemoryReport, small: float) -> list[list[str]]:
    """Return the parts of the peaks, each in a list; in one list those below this share of every peak."""
    peaks = [memory.peak for _, memory in _known(report)]
    found = [part for part in PARTS if any(getattr(peak.parts, part) for peak in peaks)]
    few = [part for part in found if all(getattr(peak.parts, part) < small * peak.peak_bytes for peak in peaks)]
    return [few if part in few else [part] for part in found if part not in few[1:]]


def _error_text(variant: Variant) -> str:
    if variant.error is None or variant.error_bytes is None:
        return ""
    percent = f"{100 * variant.error:+.4f} %"
    is_small = percent.strip("+-0. %") == ""
    error = signed_text(variant.error_bytes) if variant.error_bytes else "0"
    return f"{error} bytes" if is_small else percent


_KEPT_NAMES = 4  # the columns that identify a row


def kept_table(report: MemoryReport) -> Table:
    """Return each kind of tensor that a variant saves, and its bytes in each variant; the most bytes first."""
    tables = [{(row.path, row.operator, row.shape): row for row in (variant.memory.kept if variant.memory else ())}
              for variant in report.variants]  # fmt: skip
    rows = []
    for key in dict.fromkeys(key for table in tables for key in table):
        found = [table.get(key) for table in tables]
        rows.append((next(filter(None, found)), *(row.kept_bytes if row else 0 for row in found)))
    names = [
        attribute("saved for backward, by module", "path", missing="(model)", csv=()),
        attribute("what", "what", below=3, csv=()),
        Column("each", lambda row: f"{shape_text(row.shape)} {row.dtype}" if row.dtype else "", below=2),
        number("tensors", "tensors", below=1, csv=()),
    ]
    sizes = [Column(name, bytes_text, right=True).of(itemgetter(place))
             for place, (name, _) in enumerate(_named(report), 1)]  # fmt: skip
    columns = [*(column.of(itemgetter(0)) for column in names), *sizes]
    return Table(columns, sorted(rows, key=lambda row: -max(row[1:])), names=_KEPT_NAMES)


def _tables(report: MemoryReport, target: Target | None, *, shown_rows: int | None = None) -> list[Table]:
    """Return the parts and phases, the ranks, the traffic, and the tensors saved for backward.

    In the terminal the last is shown with -v, or with `shown_rows`: their number, 0 for all, by default SHOWN_ROWS.
    """
    is_detailed = target is None or target.verbose
    tables = [variants_table(report, is_verbose=is_detailed)]
    tables += [Table(*found) for found in rank_tables(report)]
    tables += [Table(*found) for found in traffic_tables(report, by_module=is_detailed)]
    kept = kept_table(report)
    if not kept.rows or not (is_detailed or shown_rows is not None):
        return tables
    shown = kept.rows if target is None else kept.rows[: SHOWN_ROWS if shown_rows is None else shown_rows or None]
    others = kept.rows[len(shown) :]
    rest = ", ".join(bytes_text(sum(sizes)) for sizes in [*zip(*others, strict=True)][1:])
    more = f"and {len(others)} more, {rest}; {named('rows')} 0 lists them all\n" if others else ""
    return [*tables, replace(kept, rows=shown, below=more)]


def _records(report: MemoryReport) -> Table:
    """Return one record for each phase of each variant, estimated and measured, in bytes."""
    rows = [
        SimpleNamespace(variant=variant, memory=memory, phase=phase)
        for variant in report.variants
        for memory in (variant.measured, variant.estimated)
        if memory is not None
        for phase in memory.phases
    ]
    of_phase = ("phase", "peak_bytes", "path", "operator")
    costs = [(name, read) for column in cost_columns(rows, "memory.cost") for name, read in column.csv.items()]
    return Table([
        csv_only(values("checkpointing", "reentrant", of="variant")),
        csv_only(values("obtained", of="memory")),
        csv_only(values(*of_phase, of="phase")),
        parts_csv("phase"),
        csv_only({name: read for name, read in costs if name not in of_phase}),
    ], rows)  # fmt: skip


def _compared_table(report: MemoryReport) -> Table:
    """Return the variants of one report as rows, without what `profile` adds."""
    name = strategy_names(map(variant_name, report.variants))
    strategy = Column("checkpointing", lambda row: name(variant_name(row)), values("checkpointing", "reentrant"))
    found = columns(report, [[part] for part in PARTS])
    return Table([strategy, *(column for column in found if not column.title.startswith(("  ", "estimated")))],
                 report.variants)  # fmt: skip


def _compared_subject(reports: Sequence[MemoryReport]) -> list[Column]:
    several = len({report.run.precision for report in reports}) > 1
    return [*model_columns(reports), about("parameters in", "run.precision", "precision", shown=several)]


VIEW = View(
    answer=verdict,
    tables=_tables,
    notes=notes,
    hidden_rows=lambda report, target: (
        len(variants_table(report).rows) - len(variants_table(report, is_verbose=False).rows)
    ),
    chart=lambda report, target: f"\n{bars(report, target)}" if target.verbose else "",
    records=_records,
    compared=Compared(
        table=_compared_table,
        subject=_compared_subject,
        answer=lambda reports: run_text(
            reports[0].run, precision=len({report.run.precision for report in reports}) == 1
        ),
        notes=lambda reports: common_notes(
            (one_line(report.subject.name, limit=120), [*uncounted(report), *footnotes(report)]) for report in reports
        ),
    ),
)
