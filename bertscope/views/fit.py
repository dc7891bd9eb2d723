"""The reports of `fit`, and of `estimate` and `fit` with `--lengths`, as a table, CSV and Markdown."""

from collections.abc import Iterator, Sequence
from functools import partial
from math import isfinite
from operator import attrgetter
from typing import Any

from bertscope.errors import as_sentence, in_a_sentence, named, one_line
from bertscope.gpus import COMMON, sdpa_kernel
from bertscope.reports.memory import FitReport, FitRow, LengthsReport, LengthsRow
from bertscope.reports.step import NO, UNCERTAIN, YES, RunHistory
from bertscope.settings.checkpointing import NONE, with_checkpointing
from bertscope.settings.generate import row_words
from bertscope.settings.parallelism import SINGLE
from bertscope.settings.run_config import CPU, CUDA, INFERENCE, TRAINING
from bertscope.units import BF16, FP16, bytes_text, count_text, counted, flops_text, share_text
from bertscope.views import step
from bertscope.views.columns import Column, attribute, csv_only, fits_word, listed, number, values
from bertscope.views.console import Target
from bertscope.views.footer import is_generation_left_out, uncounted
from bertscope.views.views import Compared, Heading, Table, View, about, common_notes


def columns(report: FitReport) -> list[Column]:
    """Return the columns; a given batch needs no largest one, and a CPU has no caching allocator."""
    by_ranks, has_gpu = report.batch_total is not None, report.run.device == CUDA
    searched, are_all = report.asked_batch is None and not by_ranks, all(row.fits for row in report.rows)
    named_strategy = step.strategy_names(row.checkpointing for row in report.rows)
    several = {name: len({getattr(row, name) for row in report.rows}) > 1 for name in ("seq", "precision")}
    costs = step.cost_columns(without=["fits"] * (report.asked_batch is None and are_all), has_gpu=has_gpu)
    return [
        number("GPUs", "ranks", shown=by_ranks),
        attribute("strategy", "strategy", text=_strategy, shown=by_ranks),
        number("seq", "seq", shown=several["seq"] and not report.length_given),
        attribute("precision", "precision", text=step.precision_name, shown=several["precision"]),
        attribute("checkpointing", "checkpointing", text=named_strategy),
        number("batch each" if by_ranks else "batch", "batch", shown=report.asked_batch is None),
        csv_only(values("exact_batch", "batch_without_margin", "largest_batch")),
        number("may fit", "batch_by_bytes", detail=True, shown=searched and has_gpu),
        *costs,
        step.parts_csv(),
        csv_only(values("next_peak_bytes")),
        Column("tokens", lambda row: count_text(row.batch * row.seq) if row.fits else "", right=True,
               detail=report.run.mode != INFERENCE, shown=searched and not report.length_given),
        csv_only(values("other_head_answer")),
    ]  # fmt: skip


def _strategy(name: str) -> str:
    return "one process" if name == SINGLE else name


def best_row(report: FitReport, seq: int) -> FitRow:
    """Return the row of a length with the best answer: the largest batch, or the cheapest setting for a given batch."""
    rows = [row for row in report.rows if row.seq == seq]
    if report.batch_total is not None:  # the fewest ranks first
        return rows[0]
    if report.asked_batch is None:  # with a batch the rows come in the order of their cost
        rows.sort(key=lambda row: (-row.batch, -row.batch_by_bytes, row.cost.extra_flops or 0.0))
    if not any(row.batch_by_bytes for row in rows):
        rows.sort(key=attrgetter("cost.gpu_bytes"))
    return rows[0]


def verdict(report: FitReport) -> str:
    """Return the answer in a sentence: the largest batch, or whether the asked one fits.

    Of several lengths it is about the longest one with the best answer.
    """
    return step.line_of(*_facts(report), ", without generation" * is_generation_left_out(report))


def _facts(report: FitReport) -> Sequence[step.Fact]:
    row = _answering_row(report)
    on = step.limit_text(report) + _at(report, row.seq) * (len({one.seq for one in report.rows}) > 1)
    several = len({one.precision for one in report.rows}) > 1
    how, precision = with_checkpointing(row.checkpointing), f" in {step.precision_name(row.precision)}" * several
    need = f"{step.on_gpu(row.cost)}{step.in_evaluation(row.cost)}"
    if report.batch_total is not None:
        strategy = "" if row.strategy == SINGLE else f" with {row.strategy}"
        gpus = f"{count_text(row.ranks)} x {report.gpu.name}" if report.gpu else f"{count_text(row.ranks)} ranks"
        each = f", {count_text(-(-report.batch_total // row.ranks))} each"
        fits = f"Batch {count_text(report.batch_total)} fits on {gpus}"
        if not row.fits:
            fits = f"No: batch {count_text(report.batch_total)} does not fit on {gpus}"
        setting = f" ({how}, {row.precision})"
        return fits, (strategy, 2), each, (setting, 1), (f": {'' if row.fits else 'each '}{need}", 3)
    time, batch = (step.step_time(row.cost), 1), count_text(report.asked_batch or row.batch or 1)
    same = [one for one in report.rows if (one.precision, one.seq) == (row.precision, row.seq)]
    plain = next((one for one in same if one.checkpointing == NONE), row)
    if row.answer == YES and report.asked_batch:
        without = f", {'may not fit' if plain.answer == UNCERTAIN else 'does not'} without" * (not plain.fits)
        return f"Yes: batch {batch} fits {on}{precision}", (f" {how}", 4), (without, 3), (f": {need}", 2), time
    if row.batch and not report.asked_batch:
        first = f"{count_text(plain.batch)}, or " * (plain.batch > 0 and plain is not row)
        how = f" {how}{', none without' * (not plain.batch)}"
        if plain is row and report.run.mode == INFERENCE and not report.length_given:
            how = f", {count_text(row.batch * row.seq)} tokens"
        return f"Largest batch {on}{precision}: {first}{batch}", how, time
    if not report.asked_batch:
        start = "Batch 1 may fit" if row.answer == UNCERTAIN else "Not even batch 1 fits"
        return f"{start} {on}{precision}", (f" {how}", 3), f": {need}"
    best = max((one for one in report.rows if one.seq == row.seq), key=attrgetter("largest_batch"))
    best_how = f"{f' in {step.precision_name(best.precision)}' * several} {with_checkpointing(best.checkpointing)}"
    fits = f"{count_text(best.largest_batch)} fits" if best.largest_batch else "not even batch 1 fits"
    best_how *= best.largest_batch > 0 and best is not row
    start = f"Batch {batch} may fit" if row.answer == UNCERTAIN else f"No: batch {batch} does not fit"
    need, than, limit = need.partition(" than ")
    more = than + limit if row.answer == NO else f", {step.doubt(row.cost)}"
    return f"{start} {on}", (precision, 4), (f" {how}", 3), f": {need}", (more, 1), f"; {fits}", (best_how, 2)


def _tip(report: FitReport) -> str:
    """Return the next step: a plan for a larger batch, micro-batches or a larger GPU for one that does not fit."""
    row, is_training = _answering_row(report), report.run.mode == TRAINING
    if report.batch_total is not None or report.length_given or report.run.compile:
        return ""
    same = [other for other in report.rows if other.checkpointing == NONE and other.seq == row.seq]
    best, plain = max(report.rows, key=attrgetter("largest_batch")), max((other.batch for other in same), default=0)
    batch_asked, batch = report.asked_batch, report.asked_batch or row.batch
    changes: dict[str, Any] = {"batch": batch, "checkpointing": None}
    gpu = report.gpu.name if report.gpu else None
    name, why = "estimate", f"see what batch {count_text(batch)} needs, part by part"
    if not row.fits and (smaller := step.smaller_evaluation(report, "fit", row.cost)):
        return smaller
    if not row.fits:
        larger = step.fitting_gpu(row.cost)
        if batch > 1 and is_training and best.largest_batch:
            return step.micro_batches(report, batch, precision=best.precision, seq=best.seq, gpu=gpu)
        if report.gpu and larger:
            return step.next_command(report, "fit", "try a GPU with more memory", gpu=larger, batch=batch_asked)
        if not is_training:
            return ""
        name, why = "plan", "allow changes of the training"
        changes |= {"batch": 1, "may_change": "lora,freeze,8bit,precision,sgd"}
    elif batch_asked is None and is_training and 0 < plain < row.batch // 2:
        name, why = "plan", f"train batch {2 * plain:,}, recomputing less than {row.checkpointing} checkpointing does"
        changes["batch"] = 2 * plain
    elif row.checkpointing != NONE and batch_asked:
        name, why = "plan", "find the cheapest checkpointing or micro-batches for this batch"
        changes |= {"batch": None, "batch_total": batch * report.run.accumulate, "accumulate": None}
    elif row.checkpointing != NONE:
        changes["checkpointing"] = row.checkpointing
    return step.next_command(report, name, why, precision=row.precision, seq=row.seq, gpu=gpu, **changes)


def _answering_row(report: FitReport) -> FitRow:
    return best_row(report, max(row.seq for row in report.rows if row.answer == report.answer))


def notes(report: FitReport, target: Target | None = None) -> Iterator[str]:
    """Yield the notes: what may change the answer first, then how the numbers were obtained."""
    yield Heading("Settings")
    yield step.assumed(report, *_sizes(report))
    yield Heading("What may change the answer")
    row = _answering_row(report)
    if other := [one for one in report.rows if one.other_head_answer not in ("", one.answer)]:
        answers = listed(
            f"{fits_word(one.other_head_answer)} {way(one.precision, one.checkpointing)}{_at(report, one.seq)}"
            for one in other[:2]
        )
        more = f" and {len(other) - 2} more settings" if len(other) > 2 else ""
        yield f"With {report.other_head} ({named('architecture')}) this batch {answers}{more}."
    if row.batch and row.batch < row.batch_without_margin:
        exact = f"Not rounded ({named('exact')}) it is {count_text(row.exact_batch)}. " * (row.batch < row.exact_batch)
        yield f"{exact}Without margin ({named('margin')} 0) it is {count_text(row.batch_without_margin)}."
    if report.asked_batch is None and report.batch_total is None and report.run.device == CUDA:
        yield "may fit: the largest batch whose tensors fit. extra FLOPs: recomputation. tokens: in a step."
    if more := step.other_loop(report.run, row.cost):
        yield f"At batch {count_text(row.batch or 1)}: {in_a_sentence(more)}"
    if is_generation_left_out(report):
        yield "One forward pass, not text generation."
    yield from map(as_sentence, uncounted(report))
    if len(report.tried_ranks) > 1:
        yield "Searched 1 to 8 GPUs, then multiples of 8; after the first row only settings with the least memory."
    if report.batch_total is not None or report.run.parallelism.world_size > 1:
        yield "Not counted: buffers of NCCL."
    if report.subject.lora and any(one.checkpointing != NONE for one in report.rows):
        yield step.LORA_NOTE
    is_math = report.gpu and report.subject.attention == "sdpa" and sdpa_kernel(report.gpu, BF16.name) == "math"
    if report.gpu and is_math and any(BF16.name in one.precision for one in report.rows):
        lacks = f"{report.gpu.name} has no fused attention kernel for {BF16.name}"
        yield f"{lacks}, so attention saves its scores; {FP16.name} has one."
    yield Heading("How the numbers were obtained")
    yield step.margin_note(row.cost)
    if report.run.device == CUDA:
        yield from _gpu_notes(report)
    yield from step.time_notes(one.cost for one in report.rows)
    yield f"Simulated, nothing allocated. {step.UNITS_NOTE}"


def _compared_notes(reports: Sequence[FitReport]) -> Iterator[str]:
    common = common_notes((report.gpu.name if report.gpu else "", [*notes(report)]) for report in reports)
    names = tuple(f"{report.gpu.name}: " for report in reports if report.gpu)
    yield from (note for note in common if not note.startswith(names))
    if isfinite(reports[0].rows[0].epoch_cost):
        yield "Costs are hours times your prices. Where ranges overlap, the order may differ."
    for report in reports:
        if report.gpu:
            source = f"; {report.gpu.calibration}" if report.gpu.calibration else ""
            yield f"{report.gpu.name}: CUDA context of {step.span_text(report.rows[0].cost.context)}{source}."


def _gpu_notes(report: FitReport) -> Iterator[str]:
    cost, gpu = report.rows[0].cost, report.gpu
    context = step.span_text(cost.context)
    if gpu and gpu.calibration:
        yield f"{gpu.name}: {gpu.calibration}; CUDA context {context}, as measured."
    else:
        source = f" ({gpu.context_source})" if gpu and gpu.context_source else ""
        is_range = cost.context.low_bytes < cost.context.high_bytes
        where = f", published{source}; {named('context')} sets yours" if is_range else ""
        yield f"{f'{gpu.name}: {gpu.source}. ' if gpu else ''}CUDA context: {context}{where}."
    reserved = f"reserved with {bytes_text(cost.workspace_bytes)} for cuBLAS, and the context"
    yield f"on the GPU: {reserved}; nvidia-smi may show 3.5 % more."


def way(precision: str, strategy: str) -> str:
    """Return a precision and a strategy in words: `in fp32 without checkpointing`."""
    return f"{step.precision_name(precision)} {with_checkpointing(strategy)}"


def _at(report: FitReport, seq: int) -> str:
    return "" if report.length_given else f" at seq {seq}"


# ---- several GPUs ----


def _compared_table(report: FitReport) -> Table:
    by_seq = [[row for row in report.rows if row.seq == seq] for seq in dict.fromkeys(row.seq for row in report.rows)]
    least = [min(rows, key=attrgetter("epoch_cost")) for rows in by_seq]
    best = [row if isfinite(row.epoch_cost) else best_row(report, row.seq) for row in least]
    answer = Column("fits", step.verdict_text, shown=report.batch_total is None).of("cost")
    memory = number("capacity", "cost.limit_bytes", bytes_text, csv=(), is_wide=1)
    ranks, strategy, seq, *rest = (column for column in columns(report) if column.title != "fits")
    return Table([ranks, strategy, seq, answer, memory, *rest], best)


def _compared_answer(reports: Sequence[FitReport]) -> str:
    """Return the answers, such as `Largest batch: 8 on t4, 64 on a10`, as many as a line has room for."""
    first, pairs = reports[0], [(_answering_row(report), report.gpu.name if report.gpu else "") for report in reports]
    batch = first.batch_total or first.asked_batch
    least = (min(report.rows, key=attrgetter("epoch_cost")) for report in reports)
    cheapest = [(row, name) for row, (_, name) in zip(least, pairs, strict=True)]
    if isfinite(cheapest[0][0].epoch_cost):
        known = [(row.cost.time, name) for row, name in cheapest if isfinite(row.epoch_cost)]
        costs = [f"{name}, {step.money_text(time)}" for time, name in known]
        first_cost, *later = [time for time, _ in known if time]
        likely = "probably " * any((one.epoch_cost_low or 0) < (first_cost.epoch_cost_high or 0) for one in later)
        unknown = {name: row.cost.time for row, name in cheapest if row.fits and not isfinite(row.epoch_cost)}
        what = " or ".join(sorted({"price" if time else "time" for time in unknown.values()}))
        more = f"; no {what} is known for {listed(unknown, most=3)}" if unknown else ""
        rest = ((f"; {text}", -n) for n, text in enumerate(costs[1:], 1))
        first_words = "Cost of an epoch: " if unknown else f"Cheapest epoch: {likely}"
        return step.line_of(f"{first_words}{costs[0]}", *rest, more)
    if batch:
        names: dict[str, list[str]] = {YES: [], UNCERTAIN: [], NO: []}
        for row, name in pairs:
            names[row.answer].append(f"{count_text(row.ranks)} x {name}" if first.batch_total else name)
        some = ((fits_word(answer), gpus) for answer, gpus in names.items() if gpus)
        answers = ", ".join(f"{verb} on {listed(gpus, most=2)}" for verb, gpus in some)
        needs = f": it needs {bytes_text(min(row.cost.gpu_bytes for row, _ in pairs))}" * (len(names[NO]) == len(pairs))
        return step.line_of(f"Batch {count_text(batch)} {answers}", (needs, 1))
    batches = [f"{count_text(row.batch) if row.fits else 'none'} on {name}" for row, name in pairs]
    return step.line_of(f"Largest batch: {listed(batches, most=5)}")


def _settings(report: FitReport) -> str:
    on_cpu = f"CPU ({named('device')} cuda for a GPU)" * (report.run.device == CPU and not report.gpu)
    return step.settings_line(report, *_sizes(report), on_cpu)


def _sizes(report: FitReport) -> list[str]:
    """Return the length and the precision in words; the answer names one of several precisions."""
    length = [] if report.length_given else [f"seq {count_text(_answering_row(report).seq)}"]
    precisions = dict.fromkeys(step.precision_text(report, one.precision) for one in report.rows)
    length += [text for text in precisions if len(precisions) == 1 or "(" in text]
    if report.gpu and not (report.asked_batch or report.batch_total):
        length.append(f"{report.gpu.name} has {bytes_text(report.gpu.memory_bytes)}")
    return [*length, *["multiples of 8"] * any(row.batch < row.exact_batch for row in report.rows)]


def _compared_settings(reports: Sequence[FitReport]) -> str:
    first = reports[0]
    row, precisions = _answering_row(first), {_answering_row(report).precision for report in reports}
    batch = f"batch {count_text(first.asked_batch)}" if first.asked_batch else ""
    facts = [batch, *([] if first.length_given else [f"seq {count_text(row.seq)}"])]
    facts += [step.precision_text(first, name) for name in precisions if len(precisions) == 1]
    return step.settings_line(first, *facts)


def _compared_tip(reports: Sequence[FitReport]) -> str:
    best = next((report for report in reports if report.fits), None)
    if best is None or best.batch_total is not None or not best.gpu:
        return "" if best else _tip(max(reports, key=lambda report: report.gpu.memory_bytes if report.gpu else 0))
    return step.next_command(best, "fit", f"see every setting on {best.gpu.name}", gpu=best.gpu.name)


VIEW = View(
    answer=verdict,
    settings=_settings,
    tip=_tip,
    columns=columns,
    names=5,
    strong="fits",
    notes=notes,
    compared=Compared(
        table=_compared_table,
        subject=lambda reports: [about("GPU", "gpu.name")],
        answer=_compared_answer,
        settings=_compared_settings,
        tip=_compared_tip,
        notes=_compared_notes,
        names=3,
        records=lambda report: Table(columns(report), report.rows),
        shows_records=True,
    ),
)


# ---- the lengths of a data set ----


def _reserved(share: float, histories: Sequence[RunHistory]) -> str:
    return bytes_text(RunHistory.reserved_of(histories, share) or 0) if histories else ""


def best(report: LengthsReport) -> LengthsRow:
    """Return the row whose worst step fits with the fewest FLOPs."""
    return min(report.rows, key=lambda row: (row.answer not in ("yes", ""), row.epoch_flops))


def _length_verdict(report: LengthsReport) -> str:
    """Return the answer in a sentence: the padding with the fewest FLOPs whose worst step fits."""
    if not report.rows:
        return f"Not even a batch of one sequence of {report.longest} tokens fits {step.limit_text(report)}."
    row, fixed = best(report), report.rows[0]
    worst = bytes_text(row.peak_bytes)
    how = f"batch {count_text(row.batch)}, {row.name} padding"
    if row.answer:
        how = f"{fits_word(row.answer)} {step.limit_text(report)}: {how}"
    share = share_text(row.epoch_flops / fixed.epoch_flops)
    less = "" if row is fixed else f", {share} of the FLOPs with fixed padding"
    return step.line_of(how, (f", worst step {worst}", 2), (less, 1))


def _length_settings(report: LengthsReport) -> str:
    how = "" if report.run.checkpointing == NONE else row_words("checkpointing", report.run.checkpointing)
    return step.settings_line(report, one_line(report.source, limit=40), report.run.precision, how)


def _length_tip(report: LengthsReport) -> str:
    has_limit, why = report.budget_bytes is not None or report.gpu, "find the largest batches on a GPU"
    return "" if has_limit else step.next_command(report, "fit", why, gpu=COMMON, batch=None, device=None)


def _length_notes(report: LengthsReport, target: Target | None) -> Iterator[str]:
    yield Heading("Settings")
    how = row_words("checkpointing", report.run.checkpointing)
    yield f"{step.assumed(report, report.run.precision)}, {how}"
    lengths = f"{report.shortest} to {report.longest} tokens, mean {report.mean:.1f}"
    yield f"{counted(report.sequences, 'sequence')} of {lengths}: {report.source}"
    if report.truncated:
        verb = "is" if report.truncated == 1 else "are"
        yield f"{counted(report.truncated, 'longer sequence')} {verb} cut to {report.longest} tokens."
    yield Heading("The steps of an epoch")
    yield "dynamic: random batches, averaged over all orders; each order has the longest sequence."
    for row in report.rows:
        if row.histories:
            yield f"{row.name} padding: {step.histories_text(row.histories)}."
    yield Heading("How the numbers were obtained")
    yield (
        f"Simulated at lengths {', '.join(map(str, report.traced))}; between them sizes grow evenly (checked), or the "
        f"next one counts. On a GPU steps of changing sizes may fragment more, which {named('seeds')} simulates."
    )
    if (cost := (report.rows or report.table)[0].cost).limit_bytes is not None:
        yield step.margin_note(cost)
    yield from step.time_notes(row.cost for row in report.rows)


def _length_tables(report: LengthsReport, target: Target | None) -> list[Table]:
    chosen = best(report) if report.rows else None
    columns = [
        attribute("padding", "name"),
        number("batch", "batch"),
        number("steps", "batches", is_wide=True),
        number("padded", "padding", share_text, is_wide=True),
        number("mean peak", "expected_bytes", bytes_text, is_wide=True),
        Column("worst step", "{0.worst_batch} x {0.worst_seq}".format, values("worst_batch", "worst_seq"), True, True),
        *step.cost_columns(has_gpu=report.gpu, peak="worst peak"),
        *(number(f"reserved, {name}", "histories", partial(_reserved, share), csv=(), detail=share < 1.0)
          for name, share in (("p50", 0.5), ("p95", 0.95), ("most", 1.0))),
        number("epoch FLOPs", "epoch_flops", flops_text),
    ]  # fmt: skip
    lengths = Column("lengths", "{0.low}-{0.high}".format)
    by_length = [lengths, number("sequences", "sequences"), number("batch", "batch"), *step.cost_columns()]
    return [Table(columns, report.rows, lambda row: row is chosen), Table(by_length, report.table)]


LENGTHS = View(
    answer=_length_verdict,
    verdict=lambda report: best(report).answer if report.rows else NO,
    settings=_length_settings,
    tip=_length_tip,
    tables=_length_tables,
    notes=_length_notes,
)
