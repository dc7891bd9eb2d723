"""`fit --batch-total`: the fewest ranks with which a batch fits, for each strategy."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bertscope.analyses.memory.fit import Fitter, Steps, fit_report, fitter_for, on_card
from bertscope.analyses.memory.growth import SMALLEST
from bertscope.analyses.memory.step import run_model
from bertscope.analyses.parallel.shares import rank_groups
from bertscope.gpus import Gpu
from bertscope.progress import progress, stage
from bertscope.reports.memory import YES, FitReport, FitRow
from bertscope.settings.parallelism import ONE_PROCESS, SEARCHED, WORLD_SIZES, Parallelism, ranks_of
from bertscope.settings.run_config import RunConfig
from bertscope.sources.model_source import ModelSource

_EACH = tuple(ranks_of(name, 2) for name in SEARCHED)


def fewest_report(
    source: ModelSource,
    variants: Sequence[RunConfig],
    seqs: Sequence[int],
    budget: int | Gpu,
    total: int,
    *,
    strategies: Sequence[Parallelism] = _EACH,
    world_sizes: Sequence[int] = WORLD_SIZES,
    context_bytes: int | None = None,
    known_steps: dict[str | None, Steps] | None = None,
) -> FitReport:
    """Return, for each strategy, the fewest ranks whose batches add up to `total`, and a variant that fits on them.

    The batch of a rank is `total` by the number of ranks, rounded up. The variant that needs the least memory decides
    the number of ranks. The row with the fewest ranks is first, with the cheapest variant. No further strategy is tried
    once one needs only the least number of ranks, or the next one where the least is not enough. A strategy is given
    for any number of ranks.
    """
    steps = {} if known_steps is None else known_steps
    fitter, known = fitter_for(source, variants[0], budget, context_bytes, steps)
    search = _Search(fitter, world_sizes, total)
    rows: list[FitRow] = []
    for seq in seqs:
        progress(f"one rank, seq {seq}")
        runs = [replace(on_card(variant, known), seq=seq) for variant in variants]
        leanest = search.leanest([run for run in runs if run.checkpointing == runs[-1].checkpointing])
        found: list[tuple[int, bool, Parallelism]] = []
        for ranks in strategies:
            progress(f"{ranks.strategy}, seq {seq}")
            place = search.fewest(leanest, ranks)
            found.append((place, place == len(world_sizes), ranks))
            if place <= 1 < len(world_sizes):
                break
        found.sort(key=lambda item: item[0])
        with stage(f"all ranks, seq {seq}"):
            for number, (place, is_none, ranks) in enumerate(found):
                size = world_sizes[place - is_none]
                tried = [search.on(run, ranks, size) for run in ([leanest] if number or is_none else runs)]
                report = fit_report(source, tried, [seq], budget, batch=tried[0].batch, context_bytes=context_bytes,
                                    known_steps=steps, tries_other_head=False)  # fmt: skip
                rows.append(report.rows[0])
    run = replace(report.run, parallelism=ONE_PROCESS)
    return replace(
        report, run=run, rows=tuple(rows), batch_total=total, asked_batch=None, tried_ranks=tuple(world_sizes)
    )


@dataclass
class _Search:
    """A search for the number of ranks, by its place in `world_sizes`."""

    fitter: Fitter
    world_sizes: Sequence[int]
    total: int

    def on(self, run_config: RunConfig, ranks: Parallelism, size: int) -> RunConfig:
        """Return the run of one of so many ranks, with its share of the batch."""
        return replace(run_config, batch=-(-self.total // size), parallelism=ranks.of_size(size))

    def leanest(self, runs: Sequence[RunConfig]) -> RunConfig:
        """Return the run that needs the least memory on one of two ranks, in one process."""
        return min(runs, key=lambda run: self.fitter.peak_bytes(replace(run, batch=max(self.total // 2, 1))))

    def fewest(self, run_config: RunConfig, ranks: Parallelism) -> int:
        """Return the place of the fewest ranks with which the run fits; the number of places if it fits with none."""

        def fits(place: int) -> bool:
            """Return True if the run fits with that number of ranks."""
            return self.fitter.answer(self.on(run_config, ranks, self.world_sizes[place])) == YES

        if fits(0):
            return 0
        low, high, step = 0, len(self.world_sizes), 1  # at `low` it does not fit; at `high` it does, or it is the end
        place = max(self._expected(run_config, ranks), 1)
        while high - low > 1:
            if fits(place):
                high, next_place = place, max(place - step, low + 1)
            else:
                low, next_place = place, min(place + step, high - 1)
            is_between = low > 0 and high < len(self.world_sizes)
            place, step = (low + high) // 2 if is_between else next_place, 2 * step
        return high

    def _expected(self, run_config: RunConfig, ranks: Parallelism) -> int:
        """Return the place at which the tensors should fit, the last one if they do at none.

        It is taken from the growth with the batch on two ranks, whose shares of the state are made as small as those on
        more ranks.
        """
        pair, source = self.on(run_config, ranks, 2), self.fitter.steps.source
        growth = self.fitter.steps.growth(pair, SMALLEST)
        if growth is None:
            return 0
        model = run_model(source, run_config)
        trace = self.fitter.trace(pair)
        index = next(moment.index for moment in trace.peaks() if moment.live_bytes == trace.peak_bytes)
        divided = sum(trace.parts_after(index)[part] for part in ranks.row.divided_parts)
        limit = self.fitter.overhead.limit_bytes(self.fitter.budget_bytes)

        def share(size: int) -> int:
            """Return the parameters that rank 0 of so many updates."""
            return rank_groups(model, ranks.of_size(size), source.layer_path)[0].updated_params

        def fits(size: int) -> bool:
            """Return True if the tensors should fit with that number of ranks."""
            own = self.on(run_config, ranks, size)
            return growth.peak_bytes(own.batch) - divided * (1 - share(size) / share(2)) <= limit

        return min(bisect_left(self.world_sizes, True, key=fits), len(self.world_sizes) - 1)
