"""The fit report as a table, CSV and Markdown."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bertscope.errors import SelectionError
from bertscope.gpus import sdpa_kernel
from bertscope.render.columns import Column, csv_only, number, optional, values
from bertscope.render.footer import title
from bertscope.render.memory import (
    needed_text,
    range_columns,
    range_text,
    time_notes,
    uncounted,
    with_other_loop,
    with_time,
)
from bertscope.render.timeline.panels import kernel_word, loop_words, mode_word, strategy_name
from bertscope.render.traffic import parallel_words
from bertscope.render.views import Table, View
from bertscope.reports.memory import NO, UNCERTAIN, YES, FitReport, FitRow, LengthsRow
from bertscope.reports.plan import PlanRow
from bertscope.settings.checkpointing import NONE
from bertscope.settings.run_config import INFERENCE, STORED
from bertscope.texts import listed, phrase, say, word
from bertscope.units import BF16, FP16, FP32, bytes_text, count_text, flops_text, share_text


def columns(report: FitReport) -> list[Column]:
    """Return the columns; a given batch needs no largest one, and a CPU has no caching allocator."""
    by_ranks, on_gpu = report.batch_total is not None, _is_on_gpu(report)
    searched = report.asked_batch is None and not by_ranks
    batch = say("rank_batch") if by_ranks else say("largest_batch" if searched else "fits")
    return [
        number(say("gpus"), "ranks", shown=by_ranks),
        Column(say("strategy"), lambda row: word("strategy", row.strategy), values("strategy"), shown=by_ranks),
        number(say("seq"), "seq", shown=not report.length_given),
        Column(say("setting"), lambda row: say("comma").join((row.precision, strategy_name(row.checkpointing))),
               shown=by_ranks),
        Column(say("precision"), lambda row: row.precision, values("precision"), shown=not by_ranks),
        Column(say("checkpointing"), lambda row: strategy_name(row.checkpointing), values("checkpointing"),
               shown=not by_ranks),
        Column(batch, lambda row: count_text(row.batch) if row.fits and not report.asked_batch else
               answer_text(report, row), values("batch", "fits", "answer"), right=report.asked_batch is None),
        number(say("may_fit"), "batch_by_bytes", below=2, shown=searched and on_gpu),
        number(say("peak"), "peak_bytes", bytes_text),
        number(say("reserved"), "reserved_bytes", bytes_text, detail=True, shown=on_gpu),
        number(say("on_the_card"), "card_bytes", bytes_text, shown=on_gpu),
        Column(say("next_peak"), lambda row: bytes_text(row.next_peak_bytes) if row.fits else "",
               values("next_peak_bytes"), right=True, detail=True, shown=searched and not on_gpu),
        Column(say("tokens"), lambda row: count_text(row.batch * row.seq) if row.fits else "", right=True,
               detail=report.run.mode != INFERENCE, shown=searched),
        number(say("step_flops"), "step_flops", flops_text, detail=True),
        Column(say("more_flops"), lambda row: f"{100 * row.extra_flops:+.1f} %", right=True,
               detail=on_gpu),
        *time_columns(report.rows),
        csv_only({"other_head_answer": lambda row: row.other_head_answer,
                  "other_loop_bytes": lambda row: row.other_loop_bytes,
                  "budget_bytes": lambda row: report.budget_bytes}),
    ]  # fmt: skip


def time_columns(rows: Sequence[FitRow | PlanRow | LengthsRow]) -> list[Column]:
    """Return the columns of predicted times; none without a time."""

    def column(title: str, name: str, text: Callable[[Any], str]) -> Column:
        def value(row: FitRow | PlanRow | LengthsRow) -> Any:
            return getattr(row.predicted, name, None)

        return Column(title, lambda row: optional(text)(value(row)), {name: value}, right=True)

    predicted = [
        column(say("predicted_step"), "seconds", lambda seconds: f"{1000 * seconds:,.2f} ms"),
        column(say("tokens_per_second"), "tokens_per_second", lambda rate: f"{rate:,.0f}"),
        column(say("mfu_column"), "mfu", share_text),
    ]
    return predicted * any(row.predicted for row in rows) + range_columns(rows)


def _is_on_gpu(report: FitReport) -> bool:
    return report.run.device == "cuda"


def _lower_bytes(report: FitReport, row: FitRow) -> int:
    """Return the bytes of tensors and workspaces with the context at its lower end."""
    return row.peak_bytes + report.overhead_bytes - (report.context_high_bytes - report.context_low_bytes)


def answer_text(report: FitReport, row: FitRow) -> str:
    """Return the answer in words, with the missing bytes."""
    answer = say(f"answer_{row.answer}")
    if row.answer != NO:
        return answer
    size = bytes_text(_lower_bytes(report, row) - report.budget_bytes)
    is_known = report.context_high_bytes == report.context_low_bytes
    return say("short_by" if is_known else "short_by_least", answer=answer, size=size)


def missing_text(report: FitReport, row: FitRow) -> str:
    """Return the missing bytes, on a GPU as a range: with the context at its lower and at its upper end."""
    upper = row.peak_bytes + report.overhead_bytes
    return range_text(_lower_bytes(report, row) - report.budget_bytes, upper - report.budget_bytes)


def settings_text(report: FitReport, *words: str) -> str:
    """Return the model with its head and attention, the words, and the settings of the run."""
    return say("comma").join((*parallel_words(report.run, 2, report.units), title(report), *settings(report, *words)))


def settings(report: FitReport, *words: str) -> list[str]:
    """Return the kernel, the words, and the settings of the run."""
    run = report.run
    kernel = kernel_word(report.subject.attention, run, report.card, (row.precision for row in report.rows))
    return [text for text in (kernel, *words, mode_word(run), *loop_words(run), run.device) if text]


def best_row(report: FitReport, seq: int) -> FitRow:
    """Return the row of a length with the best answer: the largest batch, or the cheapest setting for a given batch."""
    rows = [row for row in report.rows if row.seq == seq]
    if report.batch_total is not None:  # the fewest ranks first
        return rows[0]
    if report.asked_batch is None:  # with a batch the rows come in the order of their cost
        rows.sort(key=lambda row: (-row.batch, -row.batch_by_bytes, row.extra_flops))
    if not any(row.batch_by_bytes for row in rows):
        rows.sort(key=lambda row: row.peak_bytes)
    return rows[0]


def verdict(report: FitReport) -> str:
    """Return the answer in a sentence: the batch, its setting and memory, and the settings that it assumes.

    Of several lengths it is about the longest one with the best answer.
    """
    row = _answering_row(report)
    seq = row.seq
    batch = count_text(report.asked_batch or row.batch or 1)
    on = say("on", name=report.card.name) if report.card else ""
    memory = needed_text(report, row)
    if report.answer == NO:
        memory = say("short_by", answer=memory, size=missing_text(report, row))
    if report.batch_total is not None:
        size = bytes_text(report.budget_bytes)
        on = say("times", name=report.card.name if report.card else size)
        share = -(-report.batch_total // row.ranks)
        answer = say(f"verdict_ranks_{YES if row.fits else NO}", ranks=count_text(row.ranks), on=on,
                     total=count_text(report.batch_total), at=_at(report, seq), strategy=word("strategy", row.strategy),
                     batch=count_text(share), way=way_of(row), memory=memory)  # fmt: skip
        return say("assumed", answer=answer, settings=settings_text(report))
    if report.run.mode == INFERENCE and report.asked_batch is None and row.batch:
        batch = say("batch_of_tokens", batch=batch, tokens=count_text(row.batch * seq))
    outcome = "no_batch" if report.answer == NO and report.asked_batch is None else report.answer
    answer = say(f"verdict_{outcome}", batch=batch, on=on, at=_at(report, seq), way=way_of(row), memory=memory)
    answer = with_time(answer, row) if row.fits else answer
    answer = with_other_loop(answer, report.run, row.other_loop_bytes, row.peak_bytes)
    return say("assumed", answer=answer, settings=settings_text(report))


def common_verdict(reports: Sequence[FitReport]) -> str:
    """Return the answer for several GPUs: `batch 8 fits on t4 and a10, does not fit on k80`."""
    names: dict[str, list[str]] = {}
    for report in reports:
        row, name = _answering_row(report), report.card.name if report.card else bytes_text(report.budget_bytes)
        key = row.answer
        if report.batch_total is not None:
            name = count_text(row.ranks) + say("times", name=name)
        elif row.fits and report.asked_batch is None:
            key, name = "largest", say("largest_on", batch=count_text(row.batch), name=name)
        names.setdefault(key, []).append(name)
    batch = count_text(reports[0].batch_total or reports[0].asked_batch or 1)
    found = [say(f"gpus_{key}", batch=batch, names=listed(names[key]))
             for key in ("largest", YES, UNCERTAIN, NO) if key in names]  # fmt: skip
    return say("semicolon").join(found)


def _answering_row(report: FitReport) -> FitRow:
    """Return the best row of the longest length with the best answer."""
    return best_row(report, max(row.seq for row in report.rows if row.answer == report.answer))


def notes(report: FitReport) -> Iterator[str]:
    """Yield the notes: what may change the answer first, then how the numbers were obtained."""
    is_calibrated = report.card is not None and bool(report.card.calibration)
    yield from uncounted(report)
    if report.card and is_calibrated:
        yield say("named", name=report.card.name, text=phrase(report.card.calibration))
    if other := [row for row in report.rows if row.other_head_answer not in ("", row.answer)]:
        answers = say("comma").join(
            say(
                "note_head_answer",
                answer=say(f"answer_{row.other_head_answer}"),
                way=way_of(row),
                at=_at(report, row.seq),
            )
            for row in other
        )
        yield say("note_head", head=report.other_head, answers=answers)
    if any(row.batch < row.batch_by_bytes for row in report.rows) and report.batch_total is None:
        yield say("note_answers" if report.asked_batch else "note_batches")
    lengths = list(dict.fromkeys(row.seq for row in report.rows))
    if report.asked_batch and len(lengths) > 1:
        for seq in lengths:
            # the rows come in the order of their cost
            fitting = (way_of(row) for row in report.rows if row.fits and row.seq == seq)
            cheapest = next(fitting, say("nothing_tried"))
            yield say("note_cheapest", batch=report.asked_batch, at=_at(report, seq), way=cheapest)
    if len(report.tried_ranks) > 1:
        yield say("note_fewest")
    if report.batch_total is not None or parallel_words(report.run):
        yield say("note_ranks_unknown")
    if report.subject.lora and any(row.checkpointing != NONE for row in report.rows):
        yield say("note_lora_checkpointing")
    yield say("note_fit_estimated")
    if report.card:
        if not is_calibrated:
            yield say("named", name=report.card.name, text=phrase(report.card.source))
        if (
            report.subject.attention == "sdpa"
            and any(BF16.name in row.precision for row in report.rows)
            and sdpa_kernel(report.card, BF16.name) == "math"
        ):
            yield say("note_no_fused_kernel", dtype=BF16.name, gpu=report.card.name, other=FP16.name)
    if _is_on_gpu(report):
        yield from _gpu_notes(report)
    yield from time_notes(report.rows)
    yield say("note_fit_units")


def _place_notes(report: FitReport) -> Iterator[str]:
    """Yield the memory that the simulated allocator has, and that of the tensors."""
    low, high = report.context_low_bytes, report.context_high_bytes
    if report.margin:
        yield say("note_margin", percent=f"{100 - 100 * report.margin:.0f}")
    else:
        yield say("note_upper_context" if low < high else "note_given_context")
    if low < high and (report.asked_batch is None or any(row.answer == NO for row in report.rows)):
        yield say("note_lower_context")


def _gpu_notes(report: FitReport) -> Iterator[str]:
    """Yield the notes on the memory of a GPU besides the tensors."""
    low, high = report.context_low_bytes, report.context_high_bytes
    workspaces = bytes_text(report.overhead_bytes - high)
    is_calibrated = report.card is not None and bool(report.card.calibration)
    if is_calibrated:
        yield say("note_context_calibrated", range=range_text(low, high))
    elif low < high:
        source = phrase(report.card.context_source) if report.card else ""
        where = say("published_for_it", source=source) if source else say("published_for_others")
        yield say("note_published_context", range=range_text(low, high), where=where)
    yield say("note_included", context=bytes_text(high), workspaces=workspaces)
    if not is_calibrated:
        yield say("note_not_counted")
    yield from _place_notes(report)
    if report.margin:
        yield say("note_softmax")
    yield say("note_fit_smi")


def way(precision: str, strategy: str) -> str:
    """Return a precision and a strategy in words: `fp32 without checkpointing`."""
    shown = say("way_stored") if precision == STORED else precision
    return say("way_plain" if strategy == NONE else "way", precision=shown, strategy=strategy)


def way_of(row: FitRow) -> str:
    """Return the setting of a row in words."""
    return way(row.precision, row.checkpointing)


def _at(report: FitReport, seq: int) -> str:
    """Return a length in words; nothing if the inputs fix it."""
    return "" if report.length_given else say("at_seq", seq=seq)


_TEI_DTYPES = {FP16.name: "float16", FP32.name: "float32"}  # --dtype of text-embeddings-inference


def tei(report: FitReport) -> str:
    """Return the flags of text-embeddings-inference for the most tokens of a batch."""
    if report.run.mode != INFERENCE or report.asked_batch is not None:
        raise SelectionError("--format tei is for the largest batch of --mode inference; give that, and no --batch")
    rows = [row for row in report.rows if row.precision in _TEI_DTYPES and row.fits]
    if not rows:
        raise SelectionError("nothing fits in fp32 or fp16, the dtypes of --format tei; give --precision fp16")
    row = max(rows, key=lambda row: row.batch * row.seq)
    return f"--max-batch-tokens {row.batch * row.seq} --dtype {_TEI_DTYPES[row.precision]}\n"


VIEW = View(
    answer=verdict,
    tables=lambda report, target: [Table(columns(report), report.rows, lambda row: row.fits)],
    notes=lambda report, target: notes(report),
    forms={"tei": tei},
)
