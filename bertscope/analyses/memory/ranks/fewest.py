"""`fit --batch-total`: the fewest ranks with which a batch fits, for each strategy."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from bertscope.analyses.memory.fit import Fitter, Progress, Steps, fit_report, fitter_for, on_card
from bertscope.analyses.memory.growth import SMALLEST
from bertscope.analyses.memory.step import run_model
from bertscope.analyses.parallel.shares import rank_groups
from bertscope.parallelism import DDP, FSDP, NO_RESHARD, ONE_PROCESS, SINGLE, ZERO1, Parallelism
from bertscope.reports.memory import YES, FitReport, FitRow, Gpu
from bertscope.run_config import RunConfig
from bertscope.sources.model_source import ModelSource

# One GPU, those of a node, then whole nodes of eight.
WORLD_SIZES = (*range(1, 9), *range(16, 1025, 8))
# Those whose ranks have batches of their own and one dimension; with equally many ranks the first one is the answer.
TRIED = (DDP, ZERO1, NO_RESHARD, FSDP)
# The parts of the memory at the peak that shrink with the number of ranks.
_SHARDS = ("parameters", "optimizer_state", "gradients")
_DIVIDED = {ZERO1: ("optimizer_state",), NO_RESHARD: _SHARDS, FSDP: _SHARDS}


def fewest_report(
    source: ModelSource,
    variants: Sequence[RunConfig],
    seqs: Sequence[int],
    budget: int | Gpu,
    total: int,
    *,
    strategies: Sequence[str] = TRIED,
    world_sizes: Sequence[int] = WORLD_SIZES,
    context_bytes: int | None = None,
    progress: Progress = lambda text: None,
    known_steps: dict[str | None, Steps] | None = None,
) -> FitReport:
    """Return, for each strategy, the fewest ranks whose batches add up to `total`, and a variant that fits on them.

    The batch of a rank is `total` by the number of ranks, rounded up. The variant that needs the least memory decides
    the number of ranks. The row with the fewest ranks is first, with the cheapest variant. No further strategy is tried
    once one needs only one rank, or two where one is not enough.
    """
    steps = {} if known_steps is None else known_steps
    fitter, known = fitter_for(source, variants[0], budget, context_bytes, steps)

    def report(variants: Sequence[RunConfig], batch: int) -> FitReport:
        """Return the report on the variants at one batch."""
        return fit_report(
            source, variants, [variants[0].seq], budget, batch=batch, context_bytes=context_bytes, known_steps=steps,
            tries_other_head=False,
        )  # fmt: skip

    rows: list[FitRow] = []
    for seq in seqs:
        progress(f"one rank, seq {seq}")
        runs = [replace(on_card(variant, known), seq=seq) for variant in variants]
        last = [run_config for run_config in runs if run_config.checkpointing == runs[-1].checkpointing]
        share = replace(runs[0], batch=_share(total, world_sizes[min(len(world_sizes) - 1, 1)])).batch
        leanest = min(last, key=lambda run_config: fitter.peak_bytes(replace(run_config, batch=share)))
        found: list[tuple[int, Parallelism]] = []
        for strategy in strategies:
            progress(f"{strategy}, seq {seq}")
            size = _fewest(fitter, leanest, strategy, world_sizes, total)
            found.append((size or world_sizes[-1], _ranks(strategy, size or world_sizes[-1])))
            if size and world_sizes.index(size) <= 1:
                break
        found.sort(key=lambda pair: pair[0])
        for place, (size, ranks) in enumerate(found):
            tried = [replace(run_config, parallelism=ranks) for run_config in ([leanest] if place else runs)]
            made = report(tried, _share(total, size))
            rows.append(made.rows[0])
    return replace(made, rows=tuple(rows), batch_total=total, asked_batch=None)


def _fewest(fitter: Fitter, run_config: RunConfig, strategy: str, world_sizes: Sequence[int], total: int) -> int | None:
    """Return the fewest ranks with which the run fits; None if it fits with none of these numbers."""

    def fits(place: int) -> bool:
        """Return True if the run fits with that number of ranks."""
        size = world_sizes[place]
        at_size = replace(run_config, batch=_share(total, size), parallelism=_ranks(strategy, size))
        return fitter.answer(at_size) == YES

    if fits(0):
        return world_sizes[0]
    place, end = max(_expected(fitter, run_config, strategy, world_sizes, total), 1), len(world_sizes)
    while place < end and not fits(place):
        place += 1
    while place < end and place > 1 and fits(place - 1):
        place -= 1
    return world_sizes[place] if place < end else None


def _expected(fitter: Fitter, run_config: RunConfig, strategy: str, world_sizes: Sequence[int], total: int) -> int:
    """Return the place of the number of ranks with which the tensors should fit, the last one if they do with none.

    It is taken from the growth with the batch on two ranks, whose shares of the state are made as small as those on
    more ranks.
    """
    pair = replace(run_config, parallelism=_ranks(strategy, 2))
    growth, batch = fitter.steps.growth(pair, SMALLEST), _share(total, 2)
    if growth is None:
        return 1
    model = run_model(fitter.steps.source, run_config)

    def share(size: int) -> int:
        """Return the parameters that rank 0 updates."""
        return rank_groups(model, _ranks(strategy, size), fitter.steps.source.layer_path)[0].updated_params

    trace = fitter.trace(replace(pair, batch=batch))
    index = next(moment.index for moment in trace.peaks() if moment.live_bytes == trace.peak_bytes)
    parts = trace.parts_after(index)
    divided = sum(parts[part] for part in _DIVIDED.get(strategy, ()))
    limit = fitter.overhead.limit_bytes(fitter.budget_bytes)

    def fits(size: int) -> bool:
        """Return True if the tensors should fit with that number of ranks."""
        return growth.peak_bytes(_share(total, size)) - divided * (1 - share(size) / share(2)) <= limit

    return min(bisect_left(world_sizes, True, key=fits), len(world_sizes) - 1)


def _ranks(strategy: str, size: int) -> Parallelism:
    return ONE_PROCESS if size == 1 or strategy == SINGLE else Parallelism(strategy, (size,))


def _share(total: int, size: int) -> int:
    """Return the batch of a rank."""
    return -(-total // size)
