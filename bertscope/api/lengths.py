"""`bertscope.lengths`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from bertscope.analyses.memory.fit import fitter_for
from bertscope.analyses.memory.lengths import Data, LengthSteps
from bertscope.analyses.memory.summary import on_card
from bertscope.api.asked import Asked, Model, Plan, TrainingArguments, card_for
from bertscope.api.memory import no_time_notes, timer_for
from bertscope.reports.base import Note
from bertscope.reports.calibration import TimeRange
from bertscope.reports.lengths import LengthsReport, LengthsRow
from bertscope.settings.checkpointing import NONE
from bertscope.settings.generate import with_settings
from bertscope.settings.resolve import Layer
from bertscope.settings.run_config import DEFAULTS, ESTIMATED, RunConfig
from bertscope.sources.find import source_of
from bertscope.sources.lengths import read_lengths

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertscope.analyses.calibrate.step_time import Timer
    from bertscope.settings.keywords import RunSettings

_ANY = 2**62  # a budget for which every batch fits


@with_settings(*ESTIMATED)
def lengths(
    model: Model,
    lengths: str | os.PathLike[str] | Iterable[int],
    *,
    field: str = "",
    tokenizer: str = "",
    tokens_per_batch: int = 0,
    search: bool = False,
    name: str | None = None,
    training_file: TrainingArguments = None,
    plan: Plan = None,
    layers: Sequence[Layer] = (),
    **settings: Unpack[RunSettings],
) -> LengthsReport:
    """Estimate the steps of an epoch of sequences of real lengths, for each way to make batches.

    `lengths` are numbers of tokens, a file of them, or `normal:256,64,16,512` (mean, deviation, least, most); the
    `field` of a JSONL, CSV or Parquet file may have texts for a `tokenizer`. `seq` cuts longer sequences. With
    `search` find the largest batches in a `budget` or on a `gpu`, and those for each length. Raises SourceError for a
    file without lengths, and SelectionError for a setting that no run has.

    >>> report = bertscope.lengths("bert-tiny", [64, 64, 128], batch=2)
    >>> report["fixed"].padding == 1 - (64 + 64 + 128) / (3 * 128), report["unpadded"].padding
    (True, 0.0)
    """
    asked = Asked.of(settings, layers, training_file=training_file, plan=plan)
    source = source_of(model, name=name)
    points = asked.resolved(source, **DEFAULTS["estimate"]).points
    if len(points) > 1:
        raise asked.error("{lengths} takes one value of each setting; give one", "lengths")
    run, limit = points[0]
    card = card_for(limit, run)
    if search and card is None and limit.budget is None:
        raise asked.error("give either {budget}, such as 16GiB, or {gpu}, such as t4", "budget", "gpu")
    counts = read_lengths(lengths, field=field, tokenizer=tokenizer)
    own = source.bert_config
    most = run.seq if "seq" in asked.named else own.max_position_embeddings if own else max(counts)
    cut = {length: count for length, count in counts.items() if length <= most}
    truncated = sum(counts.values()) - sum(cut.values())
    data = Data({**cut, most: cut.get(most, 0) + truncated} if truncated else cut)
    run = on_card(run, card)
    fitter, _ = fitter_for(source, run, card or limit.budget or _ANY, limit.context, {})
    steps = LengthSteps(fitter, run, data, is_limited=card is not None or limit.budget is not None)
    subject = fitter.steps.facts(run.changed(checkpointing=NONE)).subject
    is_fused = steps.is_fused
    report = LengthsReport(
        subject=replace(subject, obtained="estimated"), run=replace(run, batch=RunConfig.batch, seq=RunConfig.seq),
        source=os.path.basename(lengths) if isinstance(lengths, str | os.PathLike) else "", sequences=data.total,
        truncated=truncated, shortest=min(data.counts), longest=max(data.counts), mean=data.tokens / data.total,
        traced=steps.traced, rows=(), is_search=search, budget_bytes=card.memory_bytes if card else limit.budget,
        card=card, notes=() if is_fused else (Note(key="lengths_scores"),),
    )  # fmt: skip
    table = tuple(steps.table()) if search else ()
    batch, unpadded, packed, padded_tokens = run.batch, run.batch, tokens_per_batch, tokens_per_batch
    if search:
        batch, padded_tokens = table[-1].batch, min(own.batch * own.high for own in table)
        packed = is_fused * steps.largest(data.even, is_padded=False) * data.even
        unpadded = data.most_unpadded(packed)
        padded_tokens, packed = (size * (size >= report.longest) for size in (padded_tokens, packed))
    sizes = (batch, unpadded * is_fused, packed * is_fused, padded_tokens)
    rows = [steps.row(found, 0 if found.tokens_per_batch else unpadded if found.name == "unpadded" else batch)
            for found in data.batchings(*sizes)]  # fmt: skip
    report = replace(report, rows=tuple(rows), table=table, training_file=asked.noted([run], searched="seq"))
    if not limit.time:
        return report
    if (timer := timer_for(card, fitter.steps, limit, run)) is not None:
        report = replace(report, rows=tuple(_timed(report.rows, steps, timer)))
    return replace(report, notes=(*report.notes, *no_time_notes(limit, run, report.rows)))


def _timed(rows: Sequence[LengthsRow], steps: LengthSteps, timer: Timer) -> Iterator[LengthsRow]:
    """Yield the rows with the time of an epoch: that of a step of mean length, by the FLOPs of both."""
    for row in rows:
        sequences = steps.data.total / row.batches
        mean = steps.data.tokens / steps.data.total / (1 - row.padding)
        seq = min(steps.traced, key=lambda seq: abs(seq - mean))
        run = replace(steps.padded, batch=max(round(sequences), 1), seq=seq)
        found = timer.times(run)
        span = found["time_range"] or (
            (time := found["predicted"]) and TimeRange(low_seconds=time.seconds, high_seconds=time.seconds)
        )
        if span is not None:
            times = row.epoch_flops * run.accumulate / steps.fitter.steps.flops(run)
            found["epoch"] = TimeRange(low_seconds=times * span.low_seconds, high_seconds=times * span.high_seconds)
        yield replace(row, **found)
