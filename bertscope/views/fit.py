"""The reports of `fit`, and of `estimate` and `fit` with `--lengths`, as a table, CSV and Markdown."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from bertscope.errors import named, one_line
from bertscope.gpus import COMMON, GPUS, sdpa_kernel
from bertscope.reports.memory import FitReport, FitRow, LengthsReport, LengthsRow
from bertscope.reports.step import NO, UNCERTAIN, YES, usable
from bertscope.settings.checkpointing import NONE
from bertscope.settings.generate import row_words
from bertscope.settings.parallelism import SINGLE
from bertscope.settings.run_config import CPU, CUDA, INFERENCE, STORED, TRAINING
from bertscope.units import BF16, FP16, bytes_text, count_text, flops_text, share_text
from bertscope.views.columns import Column, attribute, csv_only, fits_word, listed, number, values
from bertscope.views.console import Target
from bertscope.views.footer import not_generation, uncounted
from bertscope.views.step import (
    CUDNN_NOTE,
    LORA_NOTE,
    PEAK,
    UNITS_NOTE,
    assumed,
    cost_columns,
    lacking,
    line_of,
    margin_note,
    next_command,
    on_gpu,
    other_loop,
    parts_csv,
    range_text,
    settings_line,
    step_time,
    strategy_names,
    time_notes,
    verdict_text,
    with_checkpointing,
)
from bertscope.views.views import Compared, Heading, Table, View, about, common_notes


def columns(report: FitReport) -> list[Column]:
    """Return the columns; a given batch needs no largest one, and a CPU has no caching allocator."""
    by_ranks, on_gpu = report.batch_total is not None, report.run.device == CUDA
    searched, are_all = report.asked_batch is None and not by_ranks, all(row.fits for row in report.rows)
    named_strategy = strategy_names(row.checkpointing for row in report.rows)
    several = {name: len({getattr(row, name) for row in report.rows}) > 1 for name in ("seq", "precision")}
    costs = cost_columns(report.rows, without=["fits"] * (report.asked_batch is None and are_all))
    return [
        number("GPUs", "ranks", shown=by_ranks),
        attribute("strategy", "strategy", text=_strategy, shown=by_ranks),
        number("seq", "seq", shown=several["seq"] and not report.length_given),
        attribute("precision", "precision", shown=several["precision"]),
        attribute("checkpointing", "checkpointing", text=named_strategy),
        number("batch each" if by_ranks else "batch", "batch", shown=report.asked_batch is None),
        csv_only(values("exact_batch", "batch_without_margin", "largest_batch")),
        number("may fit", "batch_by_bytes", detail=True, shown=searched and on_gpu),
        *(replace(column, is_wide=column.title == PEAK and on_gpu) for column in costs),
        parts_csv(),
        csv_only(values("next_peak_bytes")),
        Column("tokens", lambda row: count_text(row.batch * row.seq) if row.fits else "", right=True,
               detail=report.run.mode != INFERENCE, shown=searched),
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
        rows.sort(key=attrgetter("peak_bytes"))
    return rows[0]


def verdict(report: FitReport) -> str:
    """Return the answer in a sentence: the largest batch, or whether the asked one fits.

    Of several lengths it is about the longest one with the best answer.
    """
    if report.batch_total is not None:
        return line_of(*_on_ranks(report))
    return line_of(*(_largest(report) if report.asked_batch is None else _asked(report)))


def _largest(report: FitReport) -> Iterator[str]:
    row, on = _answering_row(report), limit_text(report)
    setting = _setting(report, row)
    if not row.batch:
        doubtful = row.answer == UNCERTAIN
        text = f"Not certain: batch 1 may fit {on}" if doubtful else f"Not even batch 1 fits {on}"
        need = on_gpu(row.cost) if doubtful else lacking(row.cost)
        yield f"{text} ({setting}, {with_checkpointing(row.checkpointing)}): it {need}."
        yield f"{text} {with_checkpointing(row.checkpointing)}: it {need}."
        yield f"{text}: it {need}."
        return
    plain = next((own for own in report.rows if own.checkpointing == NONE and own.precision == row.precision
                  and own.seq == row.seq), row)  # fmt: skip
    way = with_checkpointing(row.checkpointing)
    text = f"Largest batch {on} ({setting}): "
    if plain is row:
        tokens = f" ({count_text(row.batch * row.seq)} tokens)" if report.run.mode == INFERENCE else f" {way}"
        yield f"{text}{count_text(row.batch)}{tokens}{step_time(row.cost)}."
        yield f"{text}{count_text(row.batch)}{tokens}."
    elif plain.batch:
        yield f"{text}{count_text(plain.batch)}, or {count_text(row.batch)} {way}{step_time(row.cost)}."
        yield f"{text}{count_text(plain.batch)}, or {count_text(row.batch)} {way}."
    else:
        yield f"{text}{count_text(row.batch)} {way}, none without."
    yield f"Largest batch {on}: {count_text(row.batch)} {way}."


def _asked(report: FitReport) -> Iterator[str]:
    row, on = _answering_row(report), limit_text(report)
    batch, way, setting = (
        count_text(report.asked_batch or 1),
        with_checkpointing(row.checkpointing),
        _setting(report, row),
    )
    if row.answer == YES:
        yield f"Yes: batch {batch} fits {on} {way} ({setting}): {on_gpu(row.cost)}{step_time(row.cost)}."
        yield f"Yes: batch {batch} fits {on} {way} ({setting}): {on_gpu(row.cost)}."
        yield f"Yes: batch {batch} fits {on} {way}: {on_gpu(row.cost)}."
        return
    own = max((other for other in report.rows if other.seq == row.seq), key=lambda other: other.largest_batch)
    fits = f"batch {count_text(own.largest_batch)} fits" if own.largest_batch else "not even batch 1 fits"
    how = with_checkpointing(own.checkpointing) if own.largest_batch else ""
    if row.answer == UNCERTAIN:
        yield f"Not certain: batch {batch} may fit {on} {way} ({setting}); {fits} {how}."
        yield f"Not certain: batch {batch} may fit {on} {way}; {fits} for certain."
        yield f"Not certain: batch {batch} may fit {on}; {fits} for certain."
    else:
        yield f"No: batch {batch} {lacking(row.cost)} {on} ({setting}); {fits} {how}".rstrip() + "."
        yield f"No: batch {batch} {lacking(row.cost)} {on}; {fits} {how}".rstrip() + "."
        yield f"No: batch {batch} {lacking(row.cost)} {on}; {fits}."


def _on_ranks(report: FitReport) -> Iterator[str]:
    row = _answering_row(report)
    total, share = count_text(report.batch_total or 1), count_text(-(-(report.batch_total or 1) // row.ranks))
    way = f"{with_checkpointing(row.checkpointing)}, {row.precision}"
    gpus = f"{count_text(row.ranks)} x {report.card.name if report.card else bytes_text(report.budget_bytes)}"
    if row.fits:
        strategy = "" if row.strategy == SINGLE else f" with {row.strategy}"
        yield f"Batch {total} fits on {gpus}{strategy}, {share} each ({way}): {on_gpu(row.cost)}."
        yield f"Batch {total} fits on {gpus}{strategy}, {share} each."
    else:
        text = f"No: batch {total} does not fit on {gpus}"
        yield f"{text} with {row.strategy}, {share} each ({way}): {lacking(row.cost)}."
        yield f"{text}, {share} each: each {lacking(row.cost)}."


def _setting(report: FitReport, row: FitRow) -> str:
    """Return `fp32, seq 128`."""
    return row.precision if report.length_given else f"{row.precision}, seq {row.seq}"


def _tip(report: FitReport) -> str:
    """Return the next step: a plan for a larger batch, micro-batches or a larger GPU for one that does not fit."""
    row, is_training = _answering_row(report), report.run.mode == TRAINING
    if report.batch_total is not None or report.length_given or report.run.compile:
        return ""
    own = {"precision": row.precision, "seq": row.seq, "gpu": report.card and report.card.name}
    batch = report.asked_batch or row.batch
    if not row.fits:
        if batch > 1 and is_training and any(other.largest_batch for other in report.rows):
            why = f"make batch {count_text(batch)} fit, with micro-batches and checkpointing"
            own |= {"batch": None, "batch_total": batch, "checkpointing": None}
            return next_command(report, "plan", why, **own)
        larger = (card for card in GPUS.values() if usable(card.memory_bytes, row.cost.margin) > row.cost.gpu_bytes)
        if report.card and (card := min(larger, key=attrgetter("memory_bytes"), default=None)):
            return next_command(report, "fit", "try a GPU with more memory", gpu=card.name, batch=report.asked_batch)
        words = {"batch": 1, "may_change": "lora,freeze,8bit,precision,sgd", "checkpointing": None}
        return next_command(report, "plan", "allow changes of the training", **own | words) if is_training else ""
    plain = max(
        (other.batch for other in report.rows if other.checkpointing == NONE and other.seq == row.seq), default=0
    )
    if report.asked_batch is None and is_training and 0 < plain < row.batch // 2:
        words = {"batch": 2 * plain, "checkpointing": None}
        return next_command(report, "plan", "find the cheapest checkpointing for a batch in between", **own | words)
    words = {"batch": batch, "checkpointing": row.checkpointing if row.checkpointing != NONE else None}
    budget = {} if report.card else {"gpu": None}
    return next_command(
        report, "estimate", f"see what batch {count_text(batch)} needs, part by part", **own | words | budget
    )


def limit_text(report: Any) -> str:
    """Return `on t4`; for a budget it with the device, which the user may not have named."""
    if report.card:
        return f"on {report.card.name}"
    return f"in {bytes_text(report.budget_bytes or 0)} on a {'CPU' if report.run.device == CPU else 'GPU'}"


def _answering_row(report: FitReport) -> FitRow:
    return best_row(report, max(row.seq for row in report.rows if row.answer == report.answer))


def notes(report: FitReport, target: Target | None = None) -> Iterator[str]:
    """Yield the notes: what may change the answer first, then how the numbers were obtained."""
    yield Heading("Settings")
    yield assumed(report)
    yield Heading("What may change the answer")
    row = _answering_row(report)
    if other := [own for own in report.rows if own.other_head_answer not in ("", own.answer)]:
        answers = listed(f"{fits_word(own.other_head_answer)} {way_of(own)}{_at(report, own.seq)}" for own in other[:2])
        more = f" and {len(other) - 2} more settings" if len(other) > 2 else ""
        yield f"With {report.other_head} ({named('architecture')}) this batch {answers}{more}."
    if row.batch and row.batch < row.batch_without_margin:
        exact = f"Not rounded ({named('exact')}) it is {count_text(row.exact_batch)}. " * (row.batch < row.exact_batch)
        yield f"{exact}Without margin ({named('margin')} 0) it is {count_text(row.batch_without_margin)}."
    if more := other_loop(report.run, row.cost):
        yield more
    if more := not_generation(report):
        yield more
    yield from (f"{text[:1].upper()}{text[1:]}." for text in uncounted(report))
    lengths = list(dict.fromkeys(own.seq for own in report.rows))
    if report.asked_batch and len(lengths) > 1:
        for seq in lengths:
            # the rows come in the order of their cost
            fitting = (way_of(own) for own in report.rows if own.fits and own.seq == seq)
            yield f"Cheapest setting{_at(report, seq)}: {next(fitting, 'nothing that was tried')}."
    if len(report.tried_ranks) > 1:
        yield (
            "Searched 1 to 8 GPUs, then multiples of 8; after the first row only the setting that needs the least "
            "memory."
        )
    if report.batch_total is not None or report.run.parallelism.world_size > 1:
        yield "Not counted: buffers of NCCL."
    if report.subject.lora and any(own.checkpointing != NONE for own in report.rows):
        yield LORA_NOTE
    if (
        report.card and report.subject.attention == "sdpa"
        and any(BF16.name in own.precision for own in report.rows)
        and sdpa_kernel(report.card, BF16.name) == "math"
    ):  # fmt: skip
        yield (
            f"{report.card.name} has no fused attention kernel for {BF16.name}, so attention saves its scores; "
            f"{FP16.name} has one."
        )
    yield Heading("How the numbers were obtained")
    yield margin_note(row.cost)
    if report.run.device == CUDA:
        yield from _gpu_notes(report)
    yield from time_notes(own.cost for own in report.rows)
    yield f"Simulated, nothing allocated. {UNITS_NOTE}"


def _compared_notes(reports: Sequence[FitReport]) -> Iterator[str]:
    """Yield the notes on several GPUs: what they share, and the context of each; JSON has the sources."""
    common = common_notes((report.card.name if report.card else "", [*notes(report)]) for report in reports)
    names = tuple(f"{report.card.name}: " for report in reports if report.card)
    yield from (note for note in common if not note.startswith(names))
    for report in reports:
        own = report.rows[0].cost.context
        if report.card:
            source = f"; {report.card.calibration}" if report.card.calibration else ""
            yield f"{report.card.name}: CUDA context of {range_text(own.low_bytes, own.high_bytes)}{source}."


def _gpu_notes(report: FitReport) -> Iterator[str]:
    cost, card = report.rows[0].cost, report.card
    low, high = cost.context.low_bytes, cost.context.high_bytes
    is_calibrated = card is not None and bool(card.calibration)
    if card and is_calibrated:
        yield f"{card.name}: {card.calibration}; CUDA context {range_text(low, high)}, as measured."
    else:
        capacity = f"{card.name}: {card.source}. " if card else ""
        source = f" ({card.context_source})" if card and card.context_source else ""
        where = f", published{source}; {named('context')} sets yours" if low < high else ""
        yield f"{capacity}CUDA context: {range_text(low, high)}{where}."
    yield (
        f"on the GPU: reserved with {bytes_text(cost.workspace_bytes)} for cuBLAS, and the context; "
        "nvidia-smi may show 3.5 % more. "
        f"{CUDNN_NOTE}"
    )


def way(precision: str, strategy: str) -> str:
    """Return a precision and a strategy in words: `in fp32 without checkpointing`."""
    shown = "its own dtypes" if precision == STORED else precision
    return f"{shown} {with_checkpointing(strategy)}"


def way_of(row: FitRow) -> str:
    """Return the setting of a row in words."""
    return way(row.precision, row.checkpointing)


def _at(report: FitReport, seq: int) -> str:
    return "" if report.length_given else f" at seq {seq}"


# ---- several GPUs ----


def _compared_table(report: FitReport) -> Table:
    """Return the best row of each length; its GPU's columns have the answer."""
    best = [best_row(report, seq) for seq in dict.fromkeys(row.seq for row in report.rows)]
    answer = Column("answer", verdict_text, shown=report.batch_total is None).of("cost")
    memory = number("memory", "cost.limit_bytes", bytes_text, csv=())
    return Table([answer, memory, *(column for column in columns(report) if column.title != "fits")], best)


def _compared_answer(reports: Sequence[FitReport]) -> str:
    """Return the answers, such as `Largest batch: 8 on t4, 64 on a10`, as many as a line has room for."""
    first, pairs = reports[0], [(_answering_row(report), report.card.name if report.card else "") for report in reports]
    asked = first.batch_total or first.asked_batch
    if asked:
        names: dict[str, list[str]] = {YES: [], UNCERTAIN: [], NO: []}
        for row, name in pairs:
            names[row.answer].append(f"{count_text(row.ranks)} x {name}" if first.batch_total else name)
        words = [f"{fits_word(answer)} on {listed(own)}" for answer, own in names.items() if own]
        counts = [f"{fits_word(answer)} on {len(own)}" for answer, own in names.items() if own]
        return line_of(
            f"Batch {count_text(asked)} {', '.join(words)}.", f"Batch {count_text(asked)} {', '.join(counts)}."
        )
    words = [f"{count_text(row.batch) if row.fits else 'none'} on {name}" for row, name in pairs]
    some = (f"{', '.join(words[:size])} and {len(words) - size} more" for size in range(len(words) - 1, 0, -1))
    return line_of(*(f"Largest batch: {text}." for text in (", ".join(words), *some)))


VIEW = View(
    answer=verdict,
    verdict=lambda report: report.answer,
    settings=settings_line,
    tip=_tip,
    columns=columns,
    names=5,
    strong=lambda report, row: row.fits,
    notes=notes,
    compared=Compared(
        table=_compared_table,
        subject=lambda reports: [about("GPU", "card.name")],
        answer=_compared_answer,
        settings=lambda reports: settings_line(reports[0]),
        notes=_compared_notes,
        names=5,
        records=lambda report: Table(columns(report), report.rows),
        shows_records=True,
    ),
)


# ---- the lengths of a data set ----


def _batching(name: str) -> str:
    """Return a way to make batches in words: `dynamic padding`."""
    if name == "tokens":
        return "sorted by length, padded"
    grouped = "dynamic, grouped by length" if name == "grouped" else f"{name} padding"
    return name if name in ("unpadded", "packed") else grouped


def _size(row: LengthsRow) -> str:
    return count_text(row.batch) if row.batch else f"{count_text(row.tokens_per_batch)} tokens"


def best(report: LengthsReport) -> LengthsRow:
    """Return the row that every model can run, with padding, whose worst step fits with the fewest FLOPs."""
    padded = [row for row in report.rows if row.name not in ("unpadded", "packed")]
    return min(padded, key=lambda row: (row.answer not in ("yes", ""), row.epoch_flops))


def _length_verdict(report: LengthsReport) -> str:
    """Return the answer in a sentence: the way to make batches with the fewest FLOPs whose worst step fits."""
    if not report.rows:
        return f"Not even a batch of one sequence of {report.longest} tokens fits {limit_text(report)}."
    row, fixed = best(report), report.rows[0]
    worst = bytes_text(row.peak_bytes)
    how = f"{_batching(row.name)}, batch {_size(row)}"
    if row.answer:
        how = f"{fits_word(row.answer).capitalize()} {limit_text(report)}: {how}"
    else:
        how = f"{how[:1].upper()}{how[1:]}"
    share = share_text(row.epoch_flops / fixed.epoch_flops)
    less = "" if row is fixed else f"; {share} of the FLOPs of {_batching(fixed.name)}"
    return line_of(
        f"{how}: worst step {worst}, mean {bytes_text(row.expected_bytes)}{less}.",
        f"{how}: worst step {worst}{less}.",
        f"{how}: worst step {worst}.",
    )


def _length_settings(report: LengthsReport) -> str:
    checkpointing = report.run.checkpointing
    how = [] if checkpointing == NONE else [row_words("checkpointing", checkpointing)]
    return settings_line(report, one_line(report.source, limit=40), report.run.precision, *how)


def _length_tip(report: LengthsReport) -> str:
    if report.budget_bytes is not None or report.card:
        return ""
    return next_command(report, "fit", "find the largest batches on a GPU", gpu=COMMON, batch=None, device=None)


def _length_notes(report: LengthsReport, target: Target | None) -> Iterator[str]:
    """Yield the notes: the data first, then how the numbers were obtained."""
    yield Heading("Settings")
    how = row_words("checkpointing", report.run.checkpointing)
    yield f"{assumed(report, report.run.precision)}, {how}"
    yield (
        f"{count_text(report.sequences)} sequences of {report.shortest} to {report.longest} "
        f"tokens, mean {report.mean:.1f}: {report.source}"
    )
    if report.truncated:
        yield f"{count_text(report.truncated)} sequences were longer, and are cut to {report.longest} tokens."
    yield Heading("The ways to make batches")
    yield (
        "dynamic: random batches, the mean of all orders. grouped: group_by_length of transformers; the worst step has "
        "the longest sequences. unpadded and packed: as many tokens in equal sequences. grouped and packed: one random "
        "order."
    )
    yield Heading("How the numbers were obtained")
    yield (
        f"Simulated at lengths {', '.join(map(str, report.traced))}; between two of them a peak is on the "
        "straight line, which is not below it. On a GPU steps of changing sizes may fragment more."
    )
    if (report.rows or report.table)[0].cost.limit_bytes is not None:
        yield margin_note((report.rows or report.table)[0].cost)
    yield from time_notes(row.cost for row in report.rows)


def _length_tables(report: LengthsReport, target: Target | None) -> list[Table]:
    chosen = best(report) if report.rows else None
    columns = [
        attribute("batches", "name", text=_batching),
        Column("batch", _size, values("batch", "tokens_per_batch"), right=True),
        number("an epoch", "batches"),
        number("padding", "padding", share_text),
        number("mean peak", "expected_bytes", bytes_text),
        Column("worst step", lambda row: f"{row.worst_batch} x {row.worst_seq}", values("worst_batch", "worst_seq"),
               right=True, detail=True),
        *cost_columns(report.rows, peak="worst peak"),
        number("epoch FLOPs", "epoch_flops", flops_text),
    ]  # fmt: skip
    tables = [Table(columns, report.rows, lambda row: row is chosen, names=1)] if report.rows else []
    if report.table:
        lengths = Column("lengths", lambda row: f"{row.low}-{row.high}")
        by_length = [lengths, number("sequences", "sequences"), number("batch", "batch"), *cost_columns(report.table)]
        tables.append(Table(by_length, report.table, names=1))
    return tables


LENGTHS = View(
    answer=_length_verdict,
    verdict=lambda report: best(report).answer if report.rows else NO,
    settings=_length_settings,
    tip=_length_tip,
    tables=_length_tables,
    notes=_length_notes,
)
