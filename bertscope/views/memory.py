"""The memory report as a table, CSV and Markdown; in the terminal with bars, and what to conclude."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter, itemgetter, methodcaller
from statistics import median
from types import SimpleNamespace
from typing import Any

from bertscope.errors import as_sentence, named, one_line
from bertscope.gpus import COMMON
from bertscope.reports.base import UNCOUNTED
from bertscope.reports.memory import EVALUATING, REDUCE_SCATTER, Memory, MemoryReport, Variant
from bertscope.reports.step import NO, UNCERTAIN, YES, ByteRange, PhasePeak, StepCost
from bertscope.settings.checkpointing import NONE, with_checkpointing
from bertscope.settings.run_config import CPU, CUDA, TRAINING
from bertscope.units import BF16, FP16, bytes_text, count_text, shape_text
from bertscope.views import step
from bertscope.views.columns import Column, attribute, csv_only, in_phase, listed, number, reader, shown_columns, values
from bertscope.views.console import PARTS, Target, lists_all
from bertscope.views.footer import is_generation_left_out, uncounted
from bertscope.views.views import Compared, Heading, Table, View, about, common_notes, model_columns


def _known(report: MemoryReport) -> list[tuple[str, Memory]]:
    return [(name, variant.memory) for name, variant in _named(report) if variant.memory]


def _estimated(report: MemoryReport) -> list[tuple[str, StepCost]]:
    return [(name, variant.estimated.cost) for name, variant in _named(report) if variant.estimated]


def verdict(report: MemoryReport) -> str:
    """Return the answer in a sentence: whether the step fits on the GPU, else its peak or what checkpointing saves."""
    known = _known(report)
    if not known:
        return "Nothing was measured: every run failed."
    costs = {name: cost for name, cost in _estimated(report) if cost.verdict}
    facts = _fits(report, costs) if costs else _peaks(report, known)
    return step.line_of(*facts, ", without generation" * is_generation_left_out(report))


def _peaks(report: MemoryReport, known: Sequence[tuple[str, Memory]]) -> Sequence[step.Fact]:
    """Return facts on one variant's peak, on what the second one saves, or on the lowest of several."""
    name, memory = known[0]
    is_estimate = not any(row.measured for row in report.variants)
    on_cpu = " on a CPU" * (is_estimate and report.run.device == CPU)  # the device if nobody names one
    peak, cost = memory.peak, memory.cost
    if len(known) == 1:
        timing = next((row.timing for row in report.variants if row.timing and row.timing.step_seconds), None)
        reserved = f"; torch reserves {step.span_text(cost.reserved)}" if cost.reserved else ""
        time = f", {timing.median_seconds:.3g} s a step" if timing else step.step_time(cost)
        sides = {phase.phase == EVALUATING: phase for phase in sorted(memory.phases, key=attrgetter("peak_bytes"))}
        other = sides.get(peak.phase != EVALUATING)
        lower = f", {bytes_text(other.peak_bytes)} {in_phase(other.phase)}" if other else ""
        text = f"Peak {bytes_text(peak.peak_bytes)}{on_cpu} {in_phase(peak.phase)}{lower}"
        return text, (reserved, 1), (time, 2)
    sizes = [other.peak.peak_bytes for _, other in known]
    if len(set(sizes)) == 1:
        phases = {in_phase(other.peak.phase) for _, other in known}
        ways = "with and without checkpointing" if len(known) == 2 and name == NONE else f"of all {len(known)} runs"
        always = f", always {phases.pop()}" * (len(phases) == 1)
        helps = [row.break_even.pays_from_batch for row in report.variants if row.break_even][:1]
        from_batch = "".join(f"; it helps from batch {count_text(batch)}" for batch in helps)
        return f"Peak {bytes_text(sizes[0])}{on_cpu} {ways}", (always, 1), (from_batch, 2)
    if len(known) == 2:
        return _comparison([row for row in report.variants if row.memory], on_cpu)
    lowest = known[sizes.index(min(sizes))][0]
    text = f"Lowest of {len(sizes)} peaks{on_cpu}: {bytes_text(min(sizes))} {with_checkpointing(lowest)}"
    return text, (f", {bytes_text(sizes[0])} {'without' if name == NONE else with_checkpointing(name)}", 1)


def _fits(report: MemoryReport, costs: dict[str, StepCost]) -> Sequence[step.Fact]:
    on = report.gpu.name if report.gpu else "the GPU"
    groups = step.by_verdict(costs.items())
    best, names = next(iter(groups.items()))
    name = min(names, key=lambda name: costs[name].gpu_bytes) if best != YES else names[0]
    cost, several = costs[name], len(costs) > 1
    where = step.in_evaluation(cost)
    need = f"{step.on_gpu(cost)}{where}"
    how = f" {with_checkpointing(name)}" if several else ""
    if best == NO:
        largest = max(row.largest_batch or 0 for row in report.variants)
        text = f"Does not fit on {on}{f', not even{how}' if several else ''}: {need}"
        return text, (f"; batch {count_text(largest)} fits" if largest else "", 2), (how if largest else "", 1)
    if best == UNCERTAIN:
        return f"May fit on {on}{how}: {need}", (f", {step.doubt(cost)}", 1)
    if len(groups) > 1:
        rest = listed(with_checkpointing(other) for other in costs if other not in names)
        verb = "does not" if NO in groups else "may not fit"
        return f"Fits on {on} {with_checkpointing(name)}", (f", {verb} {rest}", 1), f": {need}"
    saved = cost.peak_bytes - costs[names[-1]].peak_bytes
    if len(costs) == 2 and name == NONE and saved > 0:
        share = f" ({100 * saved / cost.peak_bytes:.1f} %)"
        return f"Fits on {on}: {need}", (f"; checkpointing saves {bytes_text(saved)}", 2), (share, 1)
    if any(note.key == UNCOUNTED for note in report.notes):
        need += " without cuDNN's workspaces"
    both = " with and without checkpointing" if several else ""
    return f"Fits on {on}{both}: {need}", (how, 2), (step.step_time(cost), 1)


def _sizes(report: MemoryReport) -> list[str]:
    return [*step.sizes(report), step.precision_text(report, report.run.precision)]


def _settings(report: MemoryReport) -> str:
    return step.settings_line(report, *_sizes(report), groups=len(report.ranks))


def _tip(report: MemoryReport) -> str:
    """Return the next step: a plan for a step that does not fit, the largest batch on a GPU for another one."""
    batch, answers = report.run.batch, {row.answer for row in report.variants}
    if any(row.measured for row in report.variants):
        call = ("profile", "draw the memory of the step", "report.plot()")
        return "" if report.inputs_given else step.next_command(report, *call, timeline="step.html")
    if report.inputs_given or report.run.compile:
        return ""
    largest = {"batch": None, "checkpointing": None, "rank": None}
    if not report.gpu:
        return step.next_command(report, "fit", "find the largest batch on a GPU", gpu=COMMON, device=None, **largest)
    if YES in answers or report.run.mode != TRAINING:
        return step.next_command(report, "fit", f"find the largest batch on {report.gpu.name}", **largest)
    if smaller := step.smaller_evaluation(report, "estimate", report.variants[0].cost):
        return smaller
    if batch > 1:
        return step.micro_batches(report, batch)
    return step.next_command(report, "plan", "find the cheapest checkpointing with which it fits", batch=batch)


def notes(report: MemoryReport, target: Target | None = None, **_: Any) -> Iterator[str]:
    """Yield what to conclude from the table, and how each number was obtained."""
    yield Heading("Settings")
    yield step.assumed(report, *_sizes(report), groups=len(report.ranks))
    yield Heading("What the table says")
    yield from conclusions(report)
    yield from _traffic_notes(report)
    yield Heading("How the numbers were obtained")
    yield from footnotes(report)


def conclusions(report: MemoryReport) -> Iterator[str]:
    """Yield the gain and cost of each further variant against the first, and the place of each peak."""
    variants = _headed(report)
    for name, variant in variants:
        if variant.failure:
            yield f"{name[:1].upper()}{name[1:]}: {one_line(variant.failure)}"
    known = [(name, variant, variant.memory) for name, variant in variants if variant.memory is not None]
    for _, other, memory in known[1:]:
        _, first, first_memory = known[0]
        yield step.line_of(*_comparison([first, other], ""), limit=400)
        if memory.cost.peak_bytes >= first_memory.cost.peak_bytes and other.break_even is not None:
            points = "".join(
                f"; at batch {point.batch} it saves {bytes_text(point.first_bytes - point.own_bytes)}"
                for point in other.break_even.points
            )
            yield f"It helps from batch {other.break_even.pays_from_batch}{points} (estimated)."
    for name, _, memory in known:
        yield f"{f'{name[:1].upper()}{name[1:]}: p' if len(variants) > 1 else 'P'}eak{step.place_of(memory.peak)}."
    if known and known[0][2].obtained == "estimated" and (more := step.other_loop(report.run, known[0][2].cost)):
        yield more
    if report.run.eval_batch and not report.run.eval_samples:
        yield f"The evaluation keeps no logits; for metrics that need them, give {named('eval_samples')}."
    if is_generation_left_out(report):
        yield "One forward pass, not text generation."


def _named(report: MemoryReport) -> list[tuple[str, Variant]]:
    name = step.strategy_names(map(step.variant_name, report.variants))
    return [(name(step.variant_name(variant)), variant) for variant in report.variants]


def _headed(report: MemoryReport) -> list[tuple[str, Variant]]:
    """Return the variants with names that are headings: `without checkpointing`, `full checkpointing`."""
    return [(with_checkpointing(name).removeprefix("with "), variant) for name, variant in _named(report)]


def _comparison(variants: Sequence[Variant], on: str) -> list[step.Fact]:
    first, other = variants
    before, after = (variant.cost.peak_bytes if variant.cost else 0 for variant in variants)
    name = step.strategy_names([step.variant_name(other)])(step.variant_name(other))
    subject = "Checkpointing" if name == "full" else f"{name} checkpointing"
    facts: list[step.Fact] = [f"{subject} does not help at this batch{on} (all activations are freed at the peak)"]
    if after < before:
        facts = [f"{subject} saves {bytes_text(before - after)} ({100 * (before - after) / before:.1f} %){on}"]
    elif after > before:
        facts = [f"{subject} needs {bytes_text(after - before)} more{on}"]
    if first.timing and other.timing and first.timing.median_seconds:
        ratio = other.timing.median_seconds / first.timing.median_seconds
        facts.append((f" and makes a step {ratio:.2f}x as long", 3))
        if first.timing.flops and other.timing.flops:
            facts.append((f" ({other.timing.flops / first.timing.flops:.2f}x the FLOPs)", 1))
        one, two = first.timing.step_seconds, other.timing.step_seconds
        if min(len(one), len(two)) > 1 and min(one) <= max(two) and min(two) <= max(one):
            facts.append((f"; the times overlap: use {named('steps')} 10", 2))
    return facts


def footnotes(report: MemoryReport) -> Iterator[str]:
    """Yield notes on how each number was obtained, and how far it may be off."""
    memories = [variant.memory for variant in report.variants if variant.memory]
    obtained = {memory.obtained for memory in memories}
    run, has_ranks = report.run, any(variant.rank_rows for variant in report.variants)
    if "measured" in obtained:
        what = "tensors of each real rank, without kernels' scratch," if has_ranks else "the allocator's events"
        how = "" if has_ranks else "; times are of steps without the profiler"
        yield f"Measured: {what} on {report.machine}{how}."
    if "estimated" in obtained:
        accuracy = "within 0.1 % of the measured peak of BERTs"
        if run.compile:
            accuracy = "inductor's programs for a CPU, within 0.1 % of 20 measured peaks; no GPU was measured"
        elif run.device == CUDA:
            accuracy = "allocated within 0.2 % of 37 loops on an H200, reserved within 1 % of 33"
        yield f"Simulated; {accuracy} (docs/accuracy.md)."
        if run.device == CPU and run.compute_precision in (BF16.name, FP16.name):
            yield "In 16 bits oneDNN's copies are counted only on a CPU with AVX-512 for bf16 and without AMX."
        yield from map(as_sentence, uncounted(report))
    if report.gpu and report.gpu.calibration:
        yield f"{report.gpu.name}: {report.gpu.calibration}."
    if report.subject.lora and any(variant.checkpointing != NONE for variant in report.variants):
        yield step.LORA_NOTE
    if layers := [memory.traced_layers for memory in memories if memory.traced_layers]:
        yield f"Simulated with {max(layers)} layers, extrapolated to all (checked)."
    if cost := next((memory.cost for memory in memories if memory.cost.reserved), None):
        yield from _device_notes(report, cost)
    yield from step.time_notes(variant.cost for variant in report.variants)
    gradients = ", with gradients of the step before" if run.has_gradients_before else ""
    yield f"Steady state, from the second step on{gradients}; tied tensors once; 1 MiB = 2**20 B."


def _device_notes(report: MemoryReport, cost: StepCost) -> Iterator[str]:
    is_calibrated = bool(report.gpu and report.gpu.calibration)
    low, high = cost.context.low_bytes, cost.context.high_bytes
    if low == high and not is_calibrated:
        yield f"CUDA context and other memory in use on the GPU: {bytes_text(low)}, measured."
        return
    more = ""
    if cost.allocated and cost.allocated.low_bytes < cost.allocated.high_bytes:
        more = f", {step.span_text(cost.allocated)} depending on what ran before"
    yield f"allocated: torch.cuda.max_memory_allocated(), with {bytes_text(cost.workspace_bytes)} for cuBLAS{more}."
    loaded = cost.reserved_loaded_bytes
    more = f"; {bytes_text(loaded)} if weights were loaded there, until empty_cache()" if loaded else ""
    if cost.reserved and cost.reserved.low_bytes < cost.reserved.high_bytes:
        more = f", depending on where cuBLAS allocates{more}"
    yield f"reserved: torch.cuda.max_memory_reserved(){more}."
    how = "measured" if is_calibrated else "depending on GPU and torch"
    most = step.span_text(ByteRange(low_bytes=cost.gpu_bytes - high + low, high_bytes=cost.gpu_bytes))
    yield f"on the GPU: {most} in nvidia-smi, with a context of {step.span_text(cost.context)} ({how})."
    if cost.limit_bytes is not None:
        yield step.margin_note(cost)


SHOWN_ROWS = 10
_SMALL = 0.001  # of the peak: such as the position numbers of a BERT, and its inputs


def _sum_text(group: Sequence[str], peak: PhasePeak) -> str:
    total = sum(getattr(peak.parts, name) for name in group)
    return _some_bytes(total)


def _some_bytes(size: int) -> str:
    return bytes_text(size) if size else ""


def columns(report: MemoryReport, part_groups: Sequence[Sequence[str]]) -> list[Column]:
    """Return the columns of a report's variants: the parts at the peak, the cost, and what `profile` measured."""
    variants = report.variants
    costs = step.cost_columns(fits=f"fits on {report.gpu.name}" if report.gpu else "fits")
    steps = max((len(variant.timing.step_seconds) for variant in variants if variant.timing), default=0)
    measured = partial(number, csv=())
    return [
        *(Column(", ".join(map(step.part_name, group)), partial(_sum_text, group), right=True, detail=step.WIDE,
                 csv={f"{name}_bytes": reader(f"parts.{name}") for name in group}).of("memory.peak")
          for group in part_groups),
        *costs[:1],
        *step.phase_columns(variants, "memory.phases", indent="  "),
        *costs[1:5],
        number("CUDA context, up to", "cost.context.high_bytes", _some_bytes, csv=(), detail=step.WIDE),
        *costs[5:],
        Column("estimated peak", lambda row: "" if row.error is None else bytes_text(row.estimated.cost.peak_bytes),
               right=True),
        Column("  largest error", _error_text, right=True),
        measured("process: one step", "process", lambda process: (
            f"+{bytes_text(process.high_water_bytes - process.resident_before_bytes)}"), detail=step.VERBOSE),
        measured("process: full run", "process.run_high_water_bytes", bytes_text, detail=step.VERBOSE),
        measured(f"step, median of {steps}", "timing", lambda timing: (
            f"{timing.median_seconds:.3f} s" if timing.step_seconds else "")),
        measured("  spread", "timing.step_seconds", lambda seconds: (
            f"{max(seconds) - min(seconds):.3f} s" if len(seconds) > 1 else "")),
        measured("tokens per second", "timing.tokens_per_second", "{:,.0f}".format, detail=step.VERBOSE),
        measured("FLOP/s", "timing.flops_per_second", lambda rate: f"{rate / 1e9:,.1f} G", detail=step.VERBOSE),
    ]  # fmt: skip


def variants_table(report: MemoryReport, *, is_verbose: bool = True) -> Table:
    """Return the table with a column for each variant; without -v the parts below _SMALL are one line."""
    obtained = [variant.memory.obtained if variant.memory else "nothing measured" for variant in report.variants]
    first, names = "at the peak", [name for name, _ in _headed(report)]
    if len(set(obtained)) == 1:
        first = f"{first} ({obtained[0]})"
    else:
        names = [f"{name} ({how})" for name, how in zip(names, obtained, strict=True)]
    left_out = {"peak in", *["saved for backward"] * report.run.is_eval}  # notes have the place
    peaks = [memory.peak for _, memory in _known(report)]
    parts = [part for part in PARTS if any(getattr(peak.parts, part) for peak in peaks)]
    small = 0 if is_verbose else _SMALL
    few = [part for part in parts if all(getattr(peak.parts, part) < small * peak.peak_bytes for peak in peaks)]
    groups = [few if part in few else [part] for part in parts if part not in few[1:]]
    shown = [column for column in columns(report, groups) if column.title not in left_out]
    shown = [column for column in shown_columns(shown, report.variants) if is_verbose or column.detail < step.VERBOSE]
    pairs = zip(names, report.variants, strict=True)
    cells = [Column(name, methodcaller("text", variant), right=True) for name, variant in pairs]
    return Table([Column(first, attrgetter("title")), *cells], shown, lambda line: line.title == step.PEAK)


def _error_text(variant: Variant) -> str:
    if variant.largest_error is None:
        return ""
    size, percent = variant.largest_error[0], f"{100 * (variant.error or 0.0):+.4f} %"
    is_small = percent.strip("+-0. %") == ""
    return percent if not is_small else f"{size:+,} bytes" if size else "0 bytes"


def saved_table(report: MemoryReport) -> Table:
    """Return each kind of tensor that a variant saves, and its bytes in each variant; the most bytes first."""
    saved = [variant.memory.saved if variant.memory else () for variant in report.variants]
    tables = [{(row.path, row.operator, row.shape): row for row in rows} for rows in saved]
    rows = []
    for key in dict.fromkeys(key for table in tables for key in table):
        cells = [table.get(key) for table in tables]
        rows.append((next(filter(None, cells)), *(row.total_bytes if row else 0 for row in cells)))
    names = [
        attribute("tensors saved for backward", "path", missing="(model)", csv=()),
        attribute("what", "what", is_wide=2, csv=()),
        Column("each", lambda row: f"{shape_text(row.shape)} {row.dtype}" if row.dtype else "", is_wide=3),
        number("tensors", "tensors", is_wide=1, csv=()),
    ]
    sizes = [Column(name, bytes_text, right=True).of(itemgetter(n)) for n, (name, _) in enumerate(_named(report), 1)]
    columns = [*(column.of(itemgetter(0)) for column in names), *sizes]
    return Table(columns, sorted(rows, key=lambda row: -max(row[1:])), fits_line=True)


def _tables(report: MemoryReport, target: Target | None, *, shown_rows: int | None = None) -> list[Table]:
    """Return the parts and phases, the ranks, the traffic, and the tensors saved for backward.

    In the terminal the last is shown with -v, or with `shown_rows`: their number, 0 for all, by default SHOWN_ROWS.
    """
    is_detailed = target is None or target.verbose
    tables = [
        variants_table(report, is_verbose=is_detailed),
        ranks_table(report),
        _traffic_table(report, by_module=is_detailed),
    ]
    if not is_detailed and shown_rows is None:
        return tables
    saved = saved_table(report)
    shown = saved.rows if target is None else saved.rows[: SHOWN_ROWS if shown_rows is None else shown_rows or None]
    hidden = saved.rows[len(shown) :]
    rest = ", ".join(bytes_text(sum(sizes)) for sizes in [*zip(*hidden, strict=True)][1:])
    more = f"and {len(hidden)} more, {rest}; {named('rows')} 0 lists them all\n" if hidden else ""
    return [*tables, replace(saved, rows=shown, below=more)]


def _records(report: MemoryReport) -> Table:
    rows = [
        SimpleNamespace(variant=variant, memory=memory, phase=phase)
        for variant in report.variants
        for memory in (variant.measured, variant.estimated)
        if memory is not None
        for phase in memory.phases
    ]
    of_phase = ("phase", "peak_bytes", "path", "operator")
    costs = [(name, read) for column in step.cost_columns("memory.cost") for name, read in column.csv.items()]
    return Table([
        csv_only(values("checkpointing", "reentrant", of="variant")),
        csv_only(values("obtained", of="memory")),
        csv_only(values(*of_phase, of="phase")),
        step.parts_csv("phase"),
        csv_only({name: read for name, read in costs if name not in of_phase}),
    ], rows)  # fmt: skip


# ---- several ranks ----


def _traffic_notes(report: MemoryReport) -> Iterator[str]:
    """Yield how ranks differ, and how the traffic was counted."""
    rank = report.run.parallelism.rank
    group = next((row for row in report.ranks if row.first <= rank <= row.last), None)
    different = [row for row in report.ranks if group and row.updated_params != group.updated_params]
    if group and different:
        least = min(different, key=attrgetter("updated_params"))
        yield (
            f"Rank {rank} updates {count_text(group.updated_params)} parameters, rank {least.label} "
            f"{count_text(least.updated_params)} ({named('rank')} N shows another)."
        )
    if any(variant.traffic for variant in report.variants):
        yield (
            "A rank sends, in a ring, (n-1)/n of the full tensor for all-gather, reduce-scatter and broadcast, twice "
            "that for all-reduce."
        )
        kinds = {row.collective for variant in report.variants for row in variant.traffic}
        if report.run.device == "cpu" and REDUCE_SCATTER in kinds:
            yield "gloo reduces a copy of the gradients, which is counted; NCCL makes none."
        yield "Not counted: buffers of NCCL."


def _traffic_table(report: MemoryReport, *, by_module: bool) -> Table:
    """Return the traffic by module, or by phase only; what is the same in all variants is one column."""
    sums: dict[str, list[Counter[str]]] = {}  # of each variant
    for column, variant in enumerate(report.variants):
        for row in variant.traffic:
            path = f" of {row.path}" if row.path and by_module else ""
            name = f"{row.collective} {in_phase(row.phase)}{path}, {count_text(row.ranks)} ranks"
            cells = sums.setdefault(name, [Counter() for _ in report.variants])
            cells[column].update(calls=row.calls, full_bytes=row.full_bytes, sent_bytes=row.sent_bytes)
    rows: list[dict[str, Any]] = []
    for name, cells in sums.items():
        rows.append({"name": name, "any": next(filter(None, cells)), **{str(n): cell for n, cell in enumerate(cells)}})
    sent = {f"sent: {step.variant_name(variant)}": str(n) for n, variant in enumerate(report.variants)}
    if all(len({cell["sent_bytes"] for cell in cells}) == 1 for cells in sums.values()):
        sent = {"a rank sends": "any"}
    columns = [
        attribute("between ranks, per step", "name"),
        number("calls", "any.calls"),
        number("full tensors", "any.full_bytes", bytes_text, is_wide=True),
        *(number(title, f"{key}.sent_bytes", bytes_text) for title, key in sent.items()),
    ]
    return Table(columns, rows)


def _ranks_text(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def ranks_table(report: MemoryReport) -> Table:
    """Return the real ranks; without any a table without rows."""
    rows = [{"variant": variant, "row": row} for variant in report.variants for row in variant.rank_rows]
    columns = [
        attribute("variant", "variant", text=step.variant_name, shown=len(report.variants) > 1),
        attribute("rank", "row.ranks", text=_ranks_text),
        number("between steps", "row.state_bytes", bytes_text),
        *step.phase_columns(rows, "row.phases"),
        *step.cost_columns("row.cost"),
        number("sends per step", "row.sent_bytes", bytes_text),
        number("step", "row.step_seconds", lambda seconds: f"{median(seconds):.3f} s" if seconds else ""),
    ]
    return Table(columns, rows)


# ---- several models ----


def _compared_table(report: MemoryReport) -> Table:
    name = step.strategy_names(map(step.variant_name, report.variants))
    csv, is_one = values("checkpointing", "reentrant"), len(report.variants) == 1
    strategy = Column("checkpointing", lambda row: name(step.variant_name(row)), csv, detail=is_one)
    costs = columns(report, [[part] for part in PARTS])
    shown = [column for column in costs if not column.title.startswith(("  ", "estimated"))]
    return Table([strategy, *shown], report.variants)


def _compared_answer(reports: Sequence[MemoryReport]) -> str:
    gpu, many = reports[0].gpu, len(reports)
    size = attrgetter("gpu_bytes" if gpu else "peak_bytes")
    known = {one_line(report.subject.name, limit=24): _known(report) for report in reports}
    lowest = {name: min((memory.cost for _, memory in rows), key=size) for name, rows in known.items() if rows}
    costs = sorted(lowest.items(), key=lambda item: size(item[1]))
    if not costs:
        return "Nothing was measured."
    (first, low), (last, high) = costs[0], costs[-1]
    ends = bytes_text(size(low)), (f" ({first})", 1), f" to {bytes_text(size(high))}", (f" ({last})", 1)
    fitting = sum(cost.verdict == YES for _, cost in costs)
    start = f"{fitting} of {many} models fit on {gpu.name}" if gpu else f"Peaks of {many} models"
    return step.line_of(f"{start}: ", *ends)


def _compared_settings(reports: Sequence[MemoryReport]) -> str:
    run, has_one = reports[0].run, len({report.run.precision for report in reports}) == 1
    has_gpu = bool(reports[0].gpu)
    sizes = _sizes(reports[0])[: None if has_one else -1]
    facts = [*sizes, *step.unusual(run, has_gpu=has_gpu)]
    return one_line(", ".join(facts) + lists_all(), limit=step.LINE)


def _compared_subject(reports: Sequence[MemoryReport]) -> list[Column]:
    several = len({report.run.precision for report in reports}) > 1
    return [*model_columns(reports), about("parameters in", "run.precision", "precision", shown=several)]


VIEW = View(
    answer=verdict,
    verdict=lambda report: next(iter(step.by_verdict(_estimated(report))), ""),
    settings=_settings,
    tip=_tip,
    tables=_tables,
    notes=notes,
    records=_records,
    compared=Compared(
        table=_compared_table,
        subject=_compared_subject,
        answer=_compared_answer,
        settings=_compared_settings,
        names=1,
        notes=lambda reports: common_notes(
            (one_line(report.subject.name, limit=120), [*uncounted(report), *footnotes(report)]) for report in reports
        ),
    ),
)
