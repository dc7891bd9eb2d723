"""The report of `estimate --lengths` and `fit --lengths` as a table, CSV and Markdown."""

from collections.abc import Iterator

from bertscope.render.columns import Column, number, values
from bertscope.render.fit import time_columns
from bertscope.render.footer import title
from bertscope.render.memory import time_notes
from bertscope.render.timeline.panels import loop_words, mode_word, setting_word
from bertscope.render.traffic import parallel_words
from bertscope.render.views import Table, View
from bertscope.reports.memory import LengthsReport, LengthsRow
from bertscope.texts import say, word
from bertscope.units import bytes_text, count_text, flops_text, share_text


def columns(report: LengthsReport) -> list[Column]:
    """Return the columns of the ways to make batches."""
    return [
        Column(say("batching"), lambda row: word("batching", row.name), values("name")),
        Column(say("batch_size"), _size, values("batch", "tokens_per_batch"), right=True),
        number(say("batches"), "batches"),
        number(say("padding"), "padding", share_text),
        number(say("mean_peak"), "expected_bytes", bytes_text),
        number(say("worst_peak"), "worst_bytes", bytes_text),
        Column(say("worst_step"), lambda row: f"{row.worst_batch} x {row.worst_seq}",
               values("worst_batch", "worst_seq"), right=True, detail=True),
        number(say("on_the_card"), "card_bytes", bytes_text, shown=report.card is not None),
        Column(say("fits"), lambda row: word("answer", row.answer), values("answer"),
               shown=report.budget_bytes is not None),
        number(say("epoch_flops"), "epoch_flops", flops_text),
        *time_columns(report.rows),
    ]  # fmt: skip


def _size(row: LengthsRow) -> str:
    return count_text(row.batch) if row.batch else say("lengths_tokens", count=count_text(row.tokens_per_batch))


def best(report: LengthsReport) -> LengthsRow:
    """Return the row that every model can run, with padding, whose worst step fits with the fewest FLOPs."""
    padded = [row for row in report.rows if row.name not in ("unpadded", "packed")]
    return min(padded, key=lambda row: (row.answer not in ("yes", ""), row.epoch_flops))


def verdict(report: LengthsReport) -> str:
    """Return the answer in a sentence, and what it assumes."""
    row, fixed = best(report), report.rows[0]
    on = say("on", name=report.card.name) if report.card else ""
    what = say("lengths_with", name=word("batching", row.name), size=_size(row), on=on)
    answer = say("lengths_known", what=what, worst=bytes_text(row.worst_bytes),
                 mean=bytes_text(row.expected_bytes), flops=flops_text(row.epoch_flops),
                 share=share_text(row.epoch_flops / fixed.epoch_flops), first=word("batching", fixed.name))  # fmt: skip
    answer = say("named", name=word("answer", row.answer), text=answer) if row.answer else answer
    run = report.run
    words = (*parallel_words(run, 2), title(report), mode_word(run), run.precision, *loop_words(run), run.device,
             setting_word("checkpointing", run.checkpointing))  # fmt: skip
    return say("assumed", answer=answer, settings=say("comma").join(words))


def notes(report: LengthsReport) -> Iterator[str]:
    """Yield the notes: the data first, then how the numbers were obtained."""
    yield say("lengths_data", count=count_text(report.sequences), low=report.shortest, high=report.longest,
              mean=f"{report.mean:.1f}", source=report.source)  # fmt: skip
    if report.truncated:
        yield say("lengths_cut", count=count_text(report.truncated), most=report.longest)
    yield say("lengths_traced", lengths=say("comma").join(map(str, report.traced)))
    yield say("lengths_batchings")
    yield from time_notes(report.rows)


def _tables(report: LengthsReport) -> Iterator[Table]:
    yield Table(columns(report), report.rows, lambda row: row is best(report))
    by_length = [
        Column(say("lengths"), lambda row: f"{row.low}-{row.high}"), number(say("sequences"), "sequences"),
        number(say("largest_batch"), "batch"), number(say("peak"), "peak_bytes", bytes_text),
    ]  # fmt: skip
    if report.table:
        yield Table(by_length, report.table)


VIEW = View(
    answer=verdict,
    tables=lambda report, target: list(_tables(report)),
    notes=lambda report, target: notes(report),
)
