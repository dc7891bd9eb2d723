"""The report of `estimate --lengths` and `fit --lengths` as a table, CSV and Markdown."""

from collections.abc import Iterator

from bertscope.reports.memory import LengthsReport, LengthsRow
from bertscope.settings.generate import row_words
from bertscope.units import bytes_text, count_text, flops_text, share_text
from bertscope.views.columns import Column, answer_word, attribute, number, values
from bertscope.views.console import Target
from bertscope.views.step import assumed, cost_columns, time_notes
from bertscope.views.views import Table, View


def columns(report: LengthsReport) -> list[Column]:
    """Return the columns of the ways to make batches."""
    return [
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


def verdict(report: LengthsReport) -> str:
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


def notes(report: LengthsReport, target: Target | None) -> Iterator[str]:
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


def _tables(report: LengthsReport, target: Target | None) -> list[Table]:
    chosen = best(report)
    tables = [Table(columns(report), report.rows, lambda row: row is chosen)]
    if report.table:
        lengths = Column("lengths", lambda row: f"{row.low}-{row.high}")
        by_length = [lengths, number("sequences", "sequences"), number("batch", "batch"), *cost_columns(report.table)]
        tables.append(Table(by_length, report.table))
    return tables


VIEW = View(answer=verdict, tables=_tables, notes=notes)
