"""The reports of `fit`, and of `estimate` and `fit` with `--lengths`, as a table, CSV and Markdown."""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

from bertscope.errors import named
from bertscope.gpus import sdpa_kernel
from bertscope.reports.memory import FitReport, FitRow, LengthsReport, LengthsRow
from bertscope.reports.step import NO, UNCERTAIN, YES
from bertscope.settings.checkpointing import NONE
from bertscope.settings.generate import row_words
from bertscope.settings.parallelism import SINGLE
from bertscope.settings.run_config import CPU, CUDA, INFERENCE, STORED
from bertscope.units import BF16, FP16, bytes_text, count_text, flops_text, share_text
from bertscope.views.columns import Column, answer_word, attribute, csv_only, fits_word, listed, number, values
from bertscope.views.console import Target
from bertscope.views.footer import not_generation, uncounted
from bertscope.views.step import (
    CUDNN_NOTE,
    LORA_NOTE,
    assumed,
    cost_columns,
    needs,
    parts_csv,
    range_text,
    strategy_names,
    time_notes,
    verdict_text,
    with_other_loop,
)
from bertscope.views.views import Compared, Table, View, about, common_notes


def columns(report: FitReport) -> list[Column]:
    """Return the columns; a given batch needs no largest one, and a CPU has no caching allocator."""
    by_ranks, on_gpu = report.batch_total is not None, report.run.device == CUDA
    searched, are_all = report.asked_batch is None and not by_ranks, all(row.fits for row in report.rows)
    named_strategy = strategy_names(row.checkpointing for row in report.rows)
    return [
        number("GPUs", "ranks", shown=by_ranks),
        attribute("strategy", "strategy", text=_strategy, shown=by_ranks),
        number("seq", "seq", shown=not report.length_given),
        Column("setting", lambda row: f"{row.precision}, {named_strategy(row.checkpointing)}", shown=by_ranks),
        attribute("precision", "precision", shown=not by_ranks),
        attribute("checkpointing", "checkpointing", text=named_strategy, shown=not by_ranks),
        number("batch each" if by_ranks else "batch", "batch", shown=report.asked_batch is None),
        csv_only(values("largest_batch")),
        number("may fit", "batch_by_bytes", below=2, shown=searched and on_gpu),
        *cost_columns(report.rows, without=["fits"] * (report.asked_batch is None and are_all)),
        parts_csv(),
        Column("peak of batch + 1", lambda row: bytes_text(row.next_peak_bytes) if row.fits else "",
               values("next_peak_bytes"), right=True, detail=True, shown=searched and not on_gpu),
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
    """Return the answer in a sentence: the batch, its setting and memory, and the settings that it assumes.

    Of several lengths it is about the longest one with the best answer.
    """
    row = _answering_row(report)
    batch, at, on = count_text(report.asked_batch or row.batch or 1), _at(report, row.seq), on_text(report)
    memory = needs(row.cost) + not_generation(report)
    if report.batch_total is not None:
        total, share = count_text(report.batch_total), count_text(-(-report.batch_total // row.ranks))
        outcome = f"yes: batch {total} fits" if row.fits else f"no: batch {total} does not fit"
        how = f"{_strategy(row.strategy)}, {way_of(row)}: batch {share} each, {memory}"
        return f"{outcome} on {count_text(row.ranks)} x {_card(report)}{at} with {how}; assumed: {assumed(report)}"
    if report.run.mode == INFERENCE and report.asked_batch is None and row.batch:
        batch = f"{batch} ({count_text(row.batch * row.seq)} tokens)"
    if report.answer == YES:
        answer = f"yes: batch {batch} fits{on}{at} with"
    elif report.answer == UNCERTAIN:
        answer = f"not certain: batch {batch} may fit{on}{at} with"
    elif report.asked_batch is None:
        answer = f"no: not even batch {batch} fits{on}{at} with"
    else:
        largest = count_text(row.largest_batch) if row.largest_batch else "none"
        answer = f"no: batch {batch} does not fit{on}{at}, {largest} does; the closest setting is"
    answer = with_other_loop(f"{answer} {way_of(row)}: {memory}", report.run, row.cost)
    return f"{answer}; assumed: {assumed(report)}"


def _card(report: Any) -> str:
    return report.card.name if report.card else bytes_text(report.budget_bytes)


def on_text(report: Any) -> str:
    """Return ` on t4`; for a budget the device, which the user may not have named."""
    device = "a CPU" if report.run.device == CPU else "a GPU"
    return f" on {report.card.name if report.card else device}"


def _answering_row(report: FitReport) -> FitRow:
    return best_row(report, max(row.seq for row in report.rows if row.answer == report.answer))


def notes(report: FitReport, target: Target | None = None) -> Iterator[str]:
    """Yield the notes: what may change the answer first, then how the numbers were obtained."""
    is_calibrated = report.card is not None and bool(report.card.calibration)
    yield from uncounted(report)
    if report.card and is_calibrated:
        yield f"{report.card.name}: {report.card.calibration}"
    if other := [row for row in report.rows if row.other_head_answer not in ("", row.answer)]:
        answers = ", ".join(
            f"{answer_word(row.other_head_answer)} for {way_of(row)}{_at(report, row.seq)}" for row in other
        )
        yield f"the head matters: with {named('architecture')} {report.other_head} the answer is {answers}"
    if any(row.batch < row.batch_by_bytes for row in report.rows) and report.batch_total is None:
        yield (
            "not certain: the tensors fit, but the allocator may fail"
            if report.asked_batch
            else "may fit: the tensors fit up to this batch, but the allocator may fail"
        )
    lengths = list(dict.fromkeys(row.seq for row in report.rows))
    if report.asked_batch and len(lengths) > 1:
        for seq in lengths:
            # the rows come in the order of their cost
            fitting = (way_of(row) for row in report.rows if row.fits and row.seq == seq)
            cheapest = next(fitting, "nothing that was tried")
            yield f"cheapest setting for batch {report.asked_batch}{_at(report, seq)}: {cheapest}"
    if len(report.tried_ranks) > 1:
        yield (
            "tried: 1 to 8 GPUs and multiples of 8; strategies after the first row with the setting "
            "that needs the least memory"
        )
    if report.batch_total is not None or report.run.parallelism.world_size > 1:
        yield "not counted: buffers of NCCL"
    if report.subject.lora and any(row.checkpointing != NONE for row in report.rows):
        yield LORA_NOTE
    yield "estimated: every operator of the step dispatched, nothing allocated"
    if report.card:
        if not is_calibrated:
            yield f"{report.card.name}: {report.card.source}"
        if (
            report.subject.attention == "sdpa"
            and any(BF16.name in row.precision for row in report.rows)
            and sdpa_kernel(report.card, BF16.name) == "math"
        ):
            yield (
                f"{BF16.name}: no fused kernel for it on {report.card.name}, attention saves its scores; "
                f"{FP16.name} has one"
            )
    if report.run.device == CUDA:
        yield from _gpu_notes(report)
    yield from time_notes(row.cost for row in report.rows)
    yield "1 MiB = 2**20 B; FLOPs are matrix products, a multiply-add is 2"


def _gpu_notes(report: FitReport) -> Iterator[str]:
    cost = report.rows[0].cost
    low, high = cost.context.low_bytes, cost.context.high_bytes
    is_calibrated = report.card is not None and bool(report.card.calibration)
    if is_calibrated:
        yield f"the CUDA context adds {range_text(low, high)} outside torch, as measured in steps"
    elif low < high:
        source = report.card.context_source if report.card else ""
        where = f"published ({source})" if source else "published for other GPUs"
        yield f"CUDA context: {range_text(low, high)}, {where}; {named('context')} sets yours"
    workspaces = bytes_text(cost.workspace_bytes)
    yield f"on the GPU: reserved, with {workspaces} for cuBLAS, and {bytes_text(high)} for the context"
    yield CUDNN_NOTE
    if cost.margin:
        room = f"in {100 - 100 * cost.margin:.0f} % of what the upper context leaves"
    else:
        room = "with the upper context" if low < high else "with the context"
    yield f"the simulated allocator serves a batch {room}"
    if low < high and (report.asked_batch is None or any(row.answer == NO for row in report.rows)):
        yield "a batch whose tensors do not even fit with the lower context does not fit"
    if cost.margin:
        yield (
            "reserved: with the inputs of softmax, which eager attention saves before torch 1.11 (not with "
            f"{named('context')})"
        )
    yield "nvidia-smi shows what is on the GPU; its published figures are up to 3.2 % above"


def way(precision: str, strategy: str) -> str:
    """Return a precision and a strategy in words: `fp32 without checkpointing`."""
    shown = "its own dtypes" if precision == STORED else precision
    return f"{shown} without checkpointing" if strategy == NONE else f"{shown}, checkpointing {strategy}"


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
    memory = number("memory", "cost.limit_bytes", bytes_text, csv=(), below=3)
    return Table([answer, memory, *(column for column in columns(report) if column.title != "fits")], best)


def _compared_answer(reports: Sequence[FitReport]) -> str:
    """Return the answers, such as `batch 8 fits on t4 and a10, does not fit on k80`, and what they assume."""
    first, largest = reports[0], "largest"
    names: dict[str, list[str]] = {largest: [], YES: [], UNCERTAIN: [], NO: []}
    for report in reports:
        row, name = _answering_row(report), _card(report)
        if report.batch_total is not None:
            names[row.answer].append(f"{count_text(row.ranks)} x {name}")
        elif row.fits and report.asked_batch is None:
            names[largest].append(f"{count_text(row.batch)} on {name}")
        else:
            names[row.answer].append(name)
    batch = f"batch {count_text(first.batch_total or first.asked_batch or 1)}"
    said = {key: f"{batch} {fits_word(key)} on" if key != largest else "the largest batch is" for key in names}
    answer = "; ".join(f"{said[key]} {listed(own)}" for key, own in names.items() if own)
    seqs = ",".join(map(str, dict.fromkeys(row.seq for row in first.rows)))
    words = (f"batch {count_text(first.asked_batch)}" if first.asked_batch else "", f"sequence {seqs}")
    return f"{answer}; assumed: {assumed(first, *words[: 1 if first.length_given else 2])}"


VIEW = View(
    answer=verdict,
    columns=columns,
    strong=lambda report, row: row.fits,
    notes=notes,
    compared=Compared(
        table=_compared_table,
        subject=lambda reports: [about("GPU", "card.name")],
        answer=_compared_answer,
        notes=lambda reports: common_notes((report.card.name, [*notes(report)]) for report in reports),
        records=lambda report: Table(columns(report), report.rows),
        shows_records=True,
    ),
)


# ---- the lengths of a data set ----


def _batching(name: str) -> str:
    """Return a way to make batches in words: `dynamic padding`."""
    if name == "tokens":
        return "sorted by length, padded"
    grouped = "dynamic padding, grouped by length" if name == "grouped" else f"{name} padding"
    return name if name in ("unpadded", "packed") else grouped


def _size(row: LengthsRow) -> str:
    return count_text(row.batch) if row.batch else f"{count_text(row.tokens_per_batch)} tokens"


def best(report: LengthsReport) -> LengthsRow:
    """Return the row that every model can run, with padding, whose worst step fits with the fewest FLOPs."""
    padded = [row for row in report.rows if row.name not in ("unpadded", "packed")]
    return min(padded, key=lambda row: (row.answer not in ("yes", ""), row.epoch_flops))


def _length_verdict(report: LengthsReport) -> str:
    """Return the answer in a sentence, and what it assumes."""
    row, fixed = best(report), report.rows[0]
    on = f" on {report.card.name}" if report.card else ""
    what = f"{_batching(row.name)}, batch {_size(row)}{on}"
    answer = (
        f"{what}: worst step {bytes_text(row.peak_bytes)}, mean step {bytes_text(row.expected_bytes)}; an epoch "
        f"{flops_text(row.epoch_flops)}, {share_text(row.epoch_flops / fixed.epoch_flops)} of {_batching(fixed.name)}"
    )
    answer = f"{answer_word(row.answer)}: {answer}" if row.answer else answer
    how = row_words("checkpointing", report.run.checkpointing)
    return f"{answer}; assumed: {assumed(report, report.run.precision)}, {how}"


def _length_notes(report: LengthsReport, target: Target | None) -> Iterator[str]:
    """Yield the notes: the data first, then how the numbers were obtained."""
    yield (
        f"{count_text(report.sequences)} sequences of {report.shortest} to {report.longest} "
        f"tokens, mean {report.mean:.1f}: {report.source}"
    )
    if report.truncated:
        yield f"{count_text(report.truncated)} sequences were longer, and are cut to {report.longest} tokens"
    yield (
        f"steps of these lengths ran: {', '.join(map(str, report.traced))}; between two of them a peak is on the "
        "straight line, not below the step's own; on a card steps of changing sizes may fragment more"
    )
    yield (
        "dynamic: random batches, the mean of all orders; grouped: group_by_length of "
        "transformers; the worst step has the longest sequences; unpadded and packed: the memory "
        "of as many tokens in equal sequences; grouped and packed: one random order"
    )
    yield from time_notes(row.cost for row in report.rows)


def _length_tables(report: LengthsReport, target: Target | None) -> list[Table]:
    chosen = best(report)
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
    tables = [Table(columns, report.rows, lambda row: row is chosen)]
    if report.table:
        lengths = Column("lengths", lambda row: f"{row.low}-{row.high}")
        by_length = [lengths, number("sequences", "sequences"), number("batch", "batch"), *cost_columns(report.table)]
        tables.append(Table(by_length, report.table))
    return tables


LENGTHS = View(answer=_length_verdict, tables=_length_tables, notes=_length_notes)
