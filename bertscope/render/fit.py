"""The fit report as a table, CSV and Markdown."""

from collections.abc import Iterator
from typing import Any

from bertscope.gpus import sdpa_kernel
from bertscope.render.console import Target, wrapped
from bertscope.render.footer import notes_text, title
from bertscope.render.memory_words import NOT_COUNTED
from bertscope.render.table import Column, csv_only, csv_text, markdown_text, number, table_text, values
from bertscope.render.timeline.panels import loop_words
from bertscope.reports.memory import NO, UNCERTAIN, YES, FitReport, FitRow
from bertscope.units import BF16, FP16, bytes_text, count_text

ANSWERS = {YES: "yes", UNCERTAIN: "not certain", NO: "no"}


def columns(report: FitReport) -> list[Column]:
    """Return the columns; a given batch needs no largest one, and a CPU has no caching allocator."""
    searched, on_gpu = report.asked_batch is None, _is_on_gpu(report)
    return [
        number("seq", "seq"),
        Column("precision", lambda row: row.precision, values("precision")),
        Column("checkpointing", lambda row: row.checkpointing, values("checkpointing")),
        Column("batch" if searched else "fits", lambda row: _batch(report, row), values("batch", "fits", "answer"),
               right=True),
        Column("by bytes", lambda row: count_text(row.batch_by_bytes), values("batch_by_bytes"), right=True,
               give_up=1, shown=searched and on_gpu),
        number("peak", "peak_bytes", bytes_text),
        Column("reserved", lambda row: bytes_text(row.reserved_bytes), values("reserved_bytes"), right=True,
               give_up=1, shown=on_gpu),
        Column("nvidia-smi", lambda row: _shown_text(report, row), right=True, give_up=6, shown=on_gpu),
        Column("peak of batch + 1", lambda row: bytes_text(row.next_bytes) if row.fits else "", values("next_bytes"),
               right=True, give_up=3, shown=searched and not on_gpu),
        Column("tokens", lambda row: count_text(row.batch * row.seq) if row.fits else "", right=True, give_up=2,
               shown=searched),
        number("FLOPs of the step", "step_flops", _work_text, give_up=4),
        Column("more FLOPs", lambda row: f"{100 * row.extra_flops:+.1f} %", right=True, give_up=5),
        csv_only({"other_head_answer": lambda row: row.other_head_answer,
                  "budget_bytes": lambda row: report.budget_bytes}),
    ]  # fmt: skip


def _is_on_gpu(report: FitReport) -> bool:
    return report.run.get("device") == "cuda"


def _shown_text(report: FitReport, row: FitRow) -> str:
    """Return the range that nvidia-smi would show: from the tensors with the lower context to the reserved bytes."""
    low = row.peak_bytes - (report.context_high_bytes - report.context_low_bytes)
    return f"{bytes_text(low)} to {bytes_text(row.reserved_bytes)}"


def _work_text(flops: int) -> str:
    """Return FLOPs in the unit that leaves digits before the point: `5.52 T`."""
    divisor, unit = next((pair for pair in ((10**12, "T"), (10**9, "G")) if flops >= pair[0]), (10**6, "M"))
    return f"{flops / divisor:,.2f} {unit}"


def answer_text(report: FitReport, row: FitRow) -> str:
    """Return the answer in words, with the missing bytes."""
    short = f", short by {bytes_text(_short_bytes(report, row))}" if row.answer == NO else ""
    return ANSWERS[row.answer] + short


def _batch(report: FitReport, row: FitRow) -> str:
    return count_text(row.batch) if row.fits and not report.asked_batch else answer_text(report, row)


def _short_bytes(report: FitReport, row: FitRow) -> int:
    """Return the bytes by which the tensors exceed the budget with the context at its lower end."""
    return row.peak_bytes - (report.context_high_bytes - report.context_low_bytes) - report.budget_bytes


def settings_text(report: FitReport, *words: str) -> str:
    """Return the model with its head and attention, the words, and the settings of the run."""
    run: dict[str, Any] = report.run
    kernel = ""
    if report.subject.attention == "sdpa" and _is_on_gpu(report):
        chosen = run.get("sdpa_kernel", "auto")
        kernel = "the kernel that torch chooses" if chosen == "auto" else f"{chosen} kernel"
    asked = f"batch {report.asked_batch}" if report.asked_batch else ""
    place = (asked, run.get("device"), run.get("alloc_conf"))
    return ", ".join(filter(None, (title(report), kernel, *words, run.get("mode"), *loop_words(run), *place)))


def heading(report: FitReport) -> str:
    """Return the model with its head and attention, the precisions, the run, and the budget."""
    precisions = " and ".join(dict.fromkeys(row.precision for row in report.rows))
    place = f"{report.card.name}: " if report.card else ""
    return f"{settings_text(report, precisions)}, budget {place}{bytes_text(report.budget_bytes)}\n"


def best_row(report: FitReport, seq: int) -> FitRow:
    """Return the row of a length with the best answer: the largest batch, or the cheapest setting for a given batch."""
    rows = [row for row in report.rows if row.seq == seq]
    if report.asked_batch is None:  # with a batch the rows come in the order of their cost
        rows.sort(key=lambda row: (-row.batch, -row.batch_by_bytes, row.extra_flops))
    if not any(row.batch_by_bytes for row in rows):
        rows.sort(key=lambda row: row.peak_bytes)
    return rows[0]


def verdict(report: FitReport) -> str:
    """Return the answer in a sentence: the batch, its setting and memory, and the settings that it assumes.

    Of several lengths it is about the longest one with the best answer.
    """
    seq = max(row.seq for row in report.rows if row.answer == report.answer)
    row = best_row(report, seq)
    what = f"batch {count_text(report.asked_batch or row.batch or 1)}"
    if report.answer == NO:
        what = f"not even {what}"
    on = f" on {report.card.name}" if report.card else ""
    memory = f"peak {bytes_text(row.peak_bytes)}"
    if _is_on_gpu(report):
        memory += f", reserved {bytes_text(row.reserved_bytes)}"
    memory += f" of {bytes_text(report.budget_bytes)}"
    if report.answer == NO:
        memory += f", short by {bytes_text(_short_bytes(report, row))}"
    fits = "may fit" if report.answer == UNCERTAIN else "fits"
    answer = f"{ANSWERS[report.answer]}: {what} {fits}{on} at seq {seq} with {_way(row)}"
    return f"{answer}: {memory}; assumed: {settings_text(report)}"


def notes(report: FitReport) -> Iterator[str]:
    """Yield the notes: what may change the answer first, then how the numbers were obtained."""
    if other := [row for row in report.rows if row.other_head_answer not in ("", row.answer)]:
        answers = ", ".join(f"{ANSWERS[row.other_head_answer]} for {_way(row)} at seq {row.seq}" for row in other)
        yield f"the head matters: with --architecture {report.other_head} the answer is {answers}"
    if _is_on_gpu(report):
        if report.asked_batch:
            yield "yes: the simulated allocator serves it; no: not even the tensors fit; else it is not certain"
        else:
            yield "batch: the simulated allocator serves it; by bytes: only the tensors fit, so it is not certain"
    lengths = list(dict.fromkeys(row.seq for row in report.rows))
    if report.asked_batch and len(lengths) > 1:
        for seq in lengths:
            # the rows come in the order of their cost
            fitting = (_way(row) for row in report.rows if row.fits and row.seq == seq)
            cheapest = next(fitting, "nothing that was tried")
            yield f"cheapest setting for batch {report.asked_batch} at seq {seq}: {cheapest}"
    yield "estimated: every operator of the step dispatched, nothing allocated"
    if report.card:
        yield f"{report.card.name}: {report.card.source}"
        if (
            report.subject.attention == "sdpa"
            and any(BF16.name in row.precision for row in report.rows)
            and sdpa_kernel(report.card, BF16.name) == "math"
        ):
            on = f"on {report.card.name}, attention saves its scores"
            yield f"{BF16.name}: no fused kernel for it {on}; {FP16.name} has one"
    if _is_on_gpu(report):
        yield from _gpu_notes(report)
    yield "1 MiB = 2**20 B; FLOPs are matrix products, a multiply-add is 2"


def _place_notes(report: FitReport) -> Iterator[str]:
    """Yield the memory that the simulated allocator has, and that of the tensors."""
    low, high = report.context_low_bytes, report.context_high_bytes
    place = f"with the {'upper context' if low < high else 'context'}"
    if report.margin:
        place = f"in {100 - 100 * report.margin:.0f} % of what the upper context leaves"
    yield f"the simulated allocator serves a batch {place}"
    if low < high:
        yield "a batch whose tensors do not even fit with the lower context does not fit"


def _gpu_notes(report: FitReport) -> Iterator[str]:
    """Yield the notes on the memory of a GPU besides the tensors."""
    low, high = report.context_low_bytes, report.context_high_bytes
    workspaces = bytes_text(report.overhead_bytes - high)
    if low < high:
        source = report.card.context_source if report.card else ""
        where = f"published for it ({source})" if source else "published for other GPUs"
        yield f"CUDA context: {bytes_text(low)} to {bytes_text(high)}, {where}; --context sets yours"
    yield f"peak and reserved include {bytes_text(high)} for the context and {workspaces} for cuBLAS"
    yield NOT_COUNTED
    yield from _place_notes(report)
    if report.margin:
        yield "reserved: with the inputs of softmax, which eager attention saves before torch 1.11 (not with --context)"
    yield "nvidia-smi: from the tensors with the lower context to reserved; not compared with a GPU"


def _way(row: FitRow) -> str:
    return f"{row.precision}, checkpointing {row.checkpointing}"


def table(report: FitReport, target: Target, *, verbose: bool = False) -> str:
    """Return the report for the terminal."""
    body = table_text(columns(report), report.rows, target, lambda row: row.fits)
    return wrapped(verdict(report), target) + body + notes_text([*notes(report)], target, verbose=verbose)


def markdown(report: FitReport) -> str:
    """Return the report as a GitHub table."""
    lines = "".join(f"- {line}\n" for line in notes(report))
    return f"{verdict(report)}\n".replace("_", "\\_") + f"\n{markdown_text(columns(report), report.rows)}\n{lines}"


def csv(report: FitReport) -> str:
    """Return one record for each way and length."""
    return csv_text(columns(report), report.rows)
