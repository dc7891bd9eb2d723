"""The fit report as a table, CSV and Markdown."""

from collections.abc import Iterator
from typing import Any

from bertscope.gpus import sdpa_kernel
from bertscope.render.console import Target
from bertscope.render.footer import title
from bertscope.render.table import Column, csv_only, csv_text, markdown_text, number, table_text, values
from bertscope.render.timeline.panels import loop_words
from bertscope.reports.memory import FitReport, FitRow
from bertscope.units import BF16, FP16, bytes_text, count_text


def columns(report: FitReport) -> list[Column]:
    """Return the columns; a given batch needs no largest one."""
    searched = report.asked_batch is None
    return [
        number("seq", "seq"),
        Column("precision", lambda row: row.precision, values("precision")),
        Column("checkpointing", lambda row: row.checkpointing, values("checkpointing")),
        Column("batch" if searched else "fits", lambda row: _batch(report, row), values("batch", "fits", "is_tight"),
               right=True),
        number("peak", "peak_bytes", bytes_text),
        Column("peak of batch + 1", lambda row: bytes_text(row.next_bytes) if row.fits else "", values("next_bytes"),
               right=True, give_up=2, shown=searched),
        Column("tokens", lambda row: count_text(row.batch * row.seq) if row.fits else "", right=True, give_up=1,
               shown=searched),
        number("FLOPs of the step", "step_flops", _work_text, give_up=3),
        Column("more FLOPs", lambda row: f"{100 * row.extra_flops:+.1f} %", right=True, give_up=4),
        csv_only({"budget_bytes": lambda row: report.budget_bytes}),
    ]  # fmt: skip


def _work_text(flops: int) -> str:
    """Return FLOPs in the unit that leaves digits before the point: `5.52 T`."""
    divisor, unit = next((pair for pair in ((10**12, "T"), (10**9, "G")) if flops >= pair[0]), (10**6, "M"))
    return f"{flops / divisor:,.2f} {unit}"


def _batch(report: FitReport, row: FitRow) -> str:
    if not row.fits:
        return f"no, short by {bytes_text(row.peak_bytes - report.budget_bytes)}"
    text = "yes" if report.asked_batch else count_text(row.batch)
    return text + (" (tight)" if row.is_tight else "")


def heading(report: FitReport) -> str:
    """Return the model, its run, and the budget."""
    run: dict[str, Any] = report.run
    loop = "".join(f", {words}" for words in loop_words(run))
    place = f"{report.card.name}: " if report.card else ""
    asked = f", batch {report.asked_batch}" if report.asked_batch else ""
    budget = f"{place}{bytes_text(report.budget_bytes)}"
    return f"{title(report)}, {run.get('mode')}{loop}{asked}, {run.get('device')}, budget {budget}\n"


def notes(report: FitReport) -> Iterator[str]:
    """Return the answer in a line, and how the numbers were obtained."""
    if not report.fits:
        least = min(report.rows, key=lambda row: row.peak_bytes)
        short = bytes_text(least.peak_bytes - report.budget_bytes)
        what = f"batch {report.asked_batch}" if report.asked_batch else "a batch of one"
        yield f"not even {what} fits: the nearest, {_way(least)}, exceeds the budget by {short}"
    elif report.asked_batch:
        for seq in dict.fromkeys(row.seq for row in report.rows):
            # the rows come in the order of their cost
            fitting = (_way(row) for row in report.rows if row.fits and row.seq == seq)
            cheapest = next(fitting, "nothing that was tried")
            yield f"cheapest setting for batch {report.asked_batch} at seq {seq}: {cheapest}"
    yield "estimated: every operator of the step dispatched, nothing allocated; the peaks of the batch and of batch + 1"
    if report.card:
        yield f"{report.card.name}: {report.card.source}"
        if (
            report.subject.attention == "sdpa"
            and any(BF16.name in row.precision for row in report.rows)
            and sdpa_kernel(report.card, BF16.name) == "math"
        ):
            on = f"on {report.card.name}, attention saves its scores"
            yield f"{BF16.name}: no fused kernel for it {on}; {FP16.name} has one"
    if report.run.get("device") == "cuda":
        overhead = bytes_text(report.overhead_bytes)
        context = f"{overhead} for context and workspaces (--context sets that of your GPU)"
        yield f"peaks include {context}; not compared with a GPU"
        yield "tight: the simulated allocator, with fragmentation, needs more than this budget"
    yield "1 MiB = 2**20 B; FLOPs are matrix products, a multiply-add is 2"


def _way(row: FitRow) -> str:
    return f"{row.precision}, checkpointing {row.checkpointing}"


def table(report: FitReport, target: Target) -> str:
    """Return the report for the terminal."""
    text = heading(report) + table_text(columns(report), report.rows, target, lambda row: row.fits)
    return text + "".join(f"{line}\n" for line in notes(report))


def markdown(report: FitReport) -> str:
    """Return the report as a GitHub table."""
    lines = "".join(f"- {line}\n" for line in notes(report))
    return heading(report).replace("_", "\\_") + "\n" + markdown_text(columns(report), report.rows) + "\n" + lines


def csv(report: FitReport) -> str:
    """Return one record for each way and length."""
    return csv_text(columns(report), report.rows)
