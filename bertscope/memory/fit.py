"""`fit`: the largest batch that fits under a limit, for each variant of a run.

A trace with slopes gives every peak, and on CUDA the requests that the simulated allocator serves.
A step whose events change with the batch is traced at each batch that the search tries.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter

from bertscope.config import HEADS
from bertscope.memory.simulator import Simulator, largest
from bertscope.memory.summary import for_gpu, uncounted_notes
from bertscope.progress import progress, stage
from bertscope.reports.memory import FitReport, FitRow
from bertscope.reports.step import NO, UNCERTAIN, YES
from bertscope.settings.checkpointing import NONE, with_checkpointing
from bertscope.settings.parallelism import ONE_PROCESS, SEARCHED, WORLD_SIZES, Parallelism
from bertscope.settings.run_config import STORED, RunConfig
from bertscope.units import FP32

_VARIED = ("batch", "seq", "checkpointing", "reentrant", "precision")


def fit_row(simulator: Simulator, run_config: RunConfig, batch: int | None = None, *, is_exact: bool = True) -> FitRow:
    """Return the result for this batch, by default for the largest that fits, rounded unless it is exact."""
    smaller = exact_batch = without_margin = 0
    if batch is None:
        by_bytes = simulator.largest_by_bytes(run_config)
        without_margin = simulator.with_margin(0.0).largest_served(run_config, by_bytes)
        exact_batch = simulator.largest_served(run_config, without_margin) if simulator.margin else without_margin
        served = exact_batch if is_exact else simulator.multiple_below(run_config, exact_batch)
    else:
        answer = simulator.answer(replace(run_config, batch=batch))
        by_bytes, served = (batch if answer in answers else 0 for answers in ((YES, UNCERTAIN), (YES,)))
        if not served and not simulator.one_batch:
            smaller = simulator.largest_batch(replace(run_config, batch=batch), is_exact=is_exact)
    run_config = replace(run_config, batch=batch or max(served, 1))
    flops, plain = simulator.flops(run_config), simulator.flops(run_config.changed(checkpointing=NONE))
    next_run = replace(run_config, batch=(batch or exact_batch) + 1 if served else run_config.batch)
    other_bytes = simulator.trace(run_config).other_peak_bytes
    return FitRow(
        seq=run_config.seq,
        checkpointing=run_config.checkpointing,
        precision=run_config.precision,
        batch=served,
        batch_by_bytes=by_bytes,
        cost=simulator.cost(run_config, step_flops=flops, recompute_flops=flops - plain, other_loop_bytes=other_bytes),
        next_peak_bytes=simulator.trace(next_run).peak_bytes,
        strategy=run_config.parallelism.strategy,
        ranks=run_config.parallelism.world_size,
        largest_batch=smaller,
        exact_batch=exact_batch,
        batch_without_margin=without_margin,
    )


def fit_report(
    simulator: Simulator,
    run_configs: Sequence[RunConfig],
    *,
    batch: int | None = None,
    tries_other_head: bool = True,
    is_exact: bool = True,
) -> FitReport:
    """Return the largest batches that fit under the simulator's limit, or with `batch` the runs that fit.

    The asked batch is also tried with the BERT's other common head: a classifier for a language model, and the reverse.
    Raises SelectionError for a length or a setting that the model does not have.
    """
    head = HEADS.get(simulator.source.architecture or "") if batch and tries_other_head else None
    name = "BertForSequenceClassification" if head and head.has_words else "BertForMaskedLM"
    other = simulator.with_options(architecture=name) if head and head.logits else None
    rows = []
    for variant in run_configs:
        precision = "" if variant.precision == STORED else f"{variant.precision} "
        length = f", seq {variant.seq}" * (variant.seq != run_configs[0].seq or variant.seq != run_configs[-1].seq)
        progress(f"{precision}{with_checkpointing(variant.checkpointing)}{length}")
        run_config = for_gpu(variant, simulator.gpu)
        row = fit_row(simulator, run_config, batch, is_exact=is_exact)
        if row.batch:
            row = replace(row, cost=simulator.timed(row.cost, replace(run_config, batch=row.batch)))
        if other and batch:
            row = replace(row, other_head_answer=other.answer(replace(run_config, batch=batch)))
        rows.append(row)
    last = replace(run_config, batch=batch or max(rows[-1].batch, 1))
    if batch:  # the runs that fit first, those with the fewest FLOPs before the others
        rank = (YES, UNCERTAIN, NO).index
        rows.sort(key=lambda row: (row.seq, rank(row.answer), row.cost.extra_flops or 0.0, row.precision != FP32.name))
    facts = simulator.facts(run_configs[0])
    return FitReport(
        subject=replace(facts.subject, obtained="estimated"),
        run=replace(run_configs[0], **{name: getattr(RunConfig, name) for name in _VARIED}),
        budget_bytes=simulator.limit_bytes or 0,
        gpu=simulator.gpu,
        asked_batch=batch,
        rows=tuple(rows),
        other_head=other.source.architecture or "" if other else "",
        units=facts.units,
        notes=uncounted_notes(simulator.trace(last), last),
    )


# ---- `fit --batch-total`: the fewest ranks with which a batch fits, for each strategy ----


def fewest_report(
    simulator: Simulator,
    variants: Sequence[RunConfig],
    seqs: Sequence[int],
    total: int,
    *,
    strategies: Sequence[Parallelism] = (),
    world_sizes: Sequence[int] = WORLD_SIZES,
) -> FitReport:
    """Return, for each strategy, the fewest ranks whose batches add up to `total`, and a variant that fits on them.

    Each rank has `total` by the number of ranks, rounded up. The variant that needs the least memory decides how many
    ranks there are. The row with the fewest ranks is first, with the cheapest variant. No further strategy is tried
    once one needs only the least number of ranks, or the next one where the least is not enough. `strategies` may have
    any number of ranks; by default all are tried that `fit` searches.
    """
    rows: list[FitRow] = []

    def on(run_config: RunConfig, ranks: Parallelism, size: int) -> RunConfig:
        return replace(run_config, batch=-(-total // size), parallelism=ranks.of_size(size))

    for seq in seqs:
        progress(f"one GPU, seq {seq}")
        runs = [replace(for_gpu(variant, simulator.gpu), seq=seq) for variant in variants]
        of_last = [run for run in runs if run.checkpointing == runs[-1].checkpointing]
        half = max(total // 2, 1)
        leanest = min(of_last, key=lambda run: simulator.needed_bytes(replace(run, batch=half)))
        fewest: list[tuple[int, Parallelism]] = []  # the number of a size of the job, behind the last one if none fits
        for ranks in strategies or [Parallelism(strategy=name, world_size=2) for name in SEARCHED]:
            progress(f"{ranks.strategy}, seq {seq}")
            fewest.append((_fewest(simulator, partial(on, leanest, ranks), world_sizes), ranks))
            if fewest[-1][0] <= 1 < len(world_sizes):
                break
        fewest.sort(key=itemgetter(0))
        with stage(f"best settings, seq {seq}"):
            for position, (number, ranks) in enumerate(fewest):
                is_short = number == len(world_sizes)
                size = world_sizes[number - is_short]
                tried = [on(run, ranks, size) for run in ([leanest] if position or is_short else runs)]
                report = fit_report(simulator, tried, batch=tried[0].batch, tries_other_head=False)
                rows.append(report.rows[0])
    run, tried_ranks = replace(report.run, parallelism=ONE_PROCESS), tuple(world_sizes)
    return replace(report, run=run, rows=tuple(rows), batch_total=total, asked_batch=None, tried_ranks=tried_ranks)


def _fewest(simulator: Simulator, on: Callable[[int], RunConfig], world_sizes: Sequence[int]) -> int:
    """Return the index of the fewest ranks on which the run fits, `len(world_sizes)` if it fits on none."""

    def is_short(number: int) -> bool:
        return simulator.answer(on(world_sizes[number])) != YES

    if not is_short(0):
        return 0
    return 1 + largest(is_short, len(world_sizes) - 1, near=_expected(simulator, on, world_sizes))


def _expected(simulator: Simulator, on: Callable[[int], RunConfig], world_sizes: Sequence[int]) -> int:
    """Return the index of the fewest ranks on which the tensors should fit, the last one if they do on none.

    It is taken from the trace on two ranks, scaled to each batch, whose shares of the state are made as small as those
    on more ranks.
    """
    pair = on(2)
    scalable = simulator.scalable_trace(pair)
    if scalable is None:
        return 0
    trace = simulator.trace(pair)
    index = next(moment.index for moment in trace.peaks() if moment.live_bytes == trace.peak_bytes)
    divided = sum(trace.parts_after(index)[part] for part in pair.parallelism.row.divided_parts)

    def share(run_config: RunConfig) -> int:
        return simulator.facts(run_config).groups[0].updated_params

    def fits(size: int) -> bool:
        run_config = on(size)
        peak_bytes = scalable.scaled(run_config.batch).peak_bytes
        return peak_bytes - divided * (1 - share(run_config) / share(pair)) <= simulator.reservable_bytes

    return min(bisect_left(world_sizes, True, key=fits), len(world_sizes) - 1)
