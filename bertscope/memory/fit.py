"""`fit`: the largest batch that fits in a memory budget, for each variant of a run.

The growth of the memory with the batch gives every peak, and on CUDA the requests that the simulated allocator serves.
A step whose events change with the batch is traced at each batch that the search tries.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from bertscope.config import HEADS
from bertscope.gpus import Gpu
from bertscope.memory.caching_allocator import Allocator, Requests, replayed, requests
from bertscope.memory.kernels.overhead import Overhead, by_thread, overhead
from bertscope.memory.simulator import Simulator, estimate_report, largest, near
from bertscope.memory.summary import on_card, step_cost, uncounted_notes
from bertscope.progress import progress, stage
from bertscope.reports.memory import FitReport, FitRow, MemoryReport, Variant
from bertscope.reports.step import NO, UNCERTAIN, YES, ByteRange, StepCost
from bertscope.settings.checkpointing import NONE
from bertscope.settings.parallelism import ONE_PROCESS, SEARCHED, WORLD_SIZES, Parallelism, ranks_of
from bertscope.settings.run_config import CUDA, RunConfig
from bertscope.sources.model_source import ModelSource
from bertscope.units import FP32

_VARIED = ("batch", "seq", "checkpointing", "reentrant", "precision")


@dataclass
class Fitter:
    """Search for the batches of one model that fit into one budget."""

    steps: Simulator
    budget_bytes: int
    overhead: Overhead = Overhead()
    rows: Mapping[str, str] = field(default_factory=dict)  # of each module's path

    def __post_init__(self) -> None:
        self.trace = self.steps.trace
        self.limited = lru_cache(64)(self._limited)

    def row(self, run_config: RunConfig, batch: int | None = None) -> FitRow:
        """Return the result for this batch, by default for the largest that fits."""
        largest_batch = 0
        if batch is None:
            by_bytes = self._largest_by_bytes(run_config)
            served = self._largest_served(run_config, by_bytes)
        else:
            answer = self.answer(replace(run_config, batch=batch))
            by_bytes, served = (batch if answer in answers else 0 for answers in ((YES, UNCERTAIN), (YES,)))
            if not served and not self.steps.one_batch:
                most = min(self._largest_by_bytes(run_config), batch - 1)
                largest_batch = self._largest_served(run_config, most)
        run_config = replace(run_config, batch=batch or max(served, 1))
        flops, plain = self.steps.flops(run_config), self.steps.flops(run_config.changed(checkpointing=NONE))
        next_run = replace(run_config, batch=run_config.batch + 1 if served else run_config.batch)
        return FitRow(
            seq=run_config.seq,
            checkpointing=run_config.checkpointing,
            precision=run_config.precision,
            batch=served,
            batch_by_bytes=by_bytes,
            cost=self.cost(run_config, step_flops=flops, recompute_flops=flops - plain,
                           other_loop_bytes=self.trace(run_config).other_peak_bytes),
            next_peak_bytes=self.trace(next_run).peak_bytes,
            strategy=run_config.parallelism.strategy,
            ranks=run_config.parallelism.world_size,
            largest_batch=largest_batch,
        )  # fmt: skip

    def cost(self, run_config: RunConfig, known: StepCost | None = None, **others: Any) -> StepCost:
        """Return the cost of the step under the limit; `known` is that of the same step without one."""
        room, limit, trace = self.overhead, self.budget_bytes, self.trace(run_config)
        least, lacking = (max(trace.peak_bytes + used - limit, 0) for used in (room.lowest_bytes, room.highest_bytes))
        reserved = ByteRange(low_bytes=trace.peak_bytes, high_bytes=trace.peak_bytes)
        if run_config.device == CUDA:
            most = replayed(self._requests(run_config), expandable_segments=run_config.expandable_segments)
            found = most.peak_reserved_bytes
            if not lacking:
                limited = self.limited(run_config)
                lacking = limited.missing_bytes
                found = found if lacking else limited.peak_reserved_bytes
            reserved = ByteRange(low_bytes=found, high_bytes=max(found, most.peak_reserved_bytes))
            others = {"reserved": reserved, **others}
        fields = {
            "workspace_bytes": room.workspace_bytes,
            "context": ByteRange(low_bytes=room.context_low_bytes, high_bytes=room.context_high_bytes),
            "gpu_bytes": reserved.low_bytes + room.context_high_bytes,
            "limit_bytes": limit,
            "margin": room.margin,
            "shortfall": ByteRange(low_bytes=least, high_bytes=lacking),
            **others,
        }
        return replace(known, **fields) if known else step_cost(trace, self.rows, **fields)

    def needed_bytes(self, run_config: RunConfig) -> int:
        """Return the bytes of the tensors, the workspaces and the upper context at the peak of this step."""
        return self.trace(run_config).peak_bytes + self.overhead.highest_bytes

    def answer(self, run_config: RunConfig) -> str:
        """Return if the run fits: yes, no, or uncertain."""
        if self._is_served(run_config):
            return YES
        is_possible = self.trace(run_config).peak_bytes <= self.budget_bytes - self.overhead.lowest_bytes
        return UNCERTAIN if is_possible else NO

    def _is_served(self, run_config: RunConfig) -> bool:
        """Return True if the run fits with the upper context, on CUDA with the fragmentation of the allocator."""
        if self.needed_bytes(run_config) > self.budget_bytes:
            return False
        return run_config.device != CUDA or not self.limited(run_config).missing_bytes

    def _limited(self, run_config: RunConfig) -> Allocator:
        limit = self.overhead.limit_bytes(self.budget_bytes)
        return replayed(self._requests(run_config), limit, expandable_segments=run_config.expandable_segments)

    def _requests(self, run_config: RunConfig) -> Requests:
        """Return the requests to the allocator with the most memory that a version of torch needs for the run."""
        workspaces, trace = by_thread(run_config, self.overhead.workspace_bytes), self.trace(run_config)
        return requests(trace.upper if self.overhead.margin else trace, workspaces)

    def _largest_by_bytes(self, run_config: RunConfig) -> int:
        tensor_bytes = self.budget_bytes - self.overhead.lowest_bytes

        def fits(batch: int) -> bool:
            return self.trace(replace(run_config, batch=batch)).peak_bytes <= tensor_bytes

        growth = self.steps.growth(run_config)

        def peak_bytes(batch: int) -> int:  # a batch of 1 is traced, and each batch of a user's own code
            return (growth.scaled(batch) if growth else self.trace(replace(run_config, batch=batch))).peak_bytes

        return largest(fits, near=near(peak_bytes, tensor_bytes))

    def _largest_served(self, run_config: RunConfig, most: int) -> int:
        """Return the largest batch up to `most` that fits.

        A try that is not served says how many bytes its requests lack; the next one is smaller by as many sequences.
        """
        if run_config.device != CUDA or not most:
            return most
        low, high, place, step = 0, most + 1, most, 1  # at `low` it is served, at `high` it is not
        while high - low > 1:
            run = replace(run_config, batch=place)
            if self._is_served(run):
                low, place, step = place, min(place + step, high - 1), 2 * step
                continue
            sequence_bytes = max(self.needed_bytes(replace(run, batch=place + 1)) - self.needed_bytes(run), 1)
            excess = self.needed_bytes(run) - self.budget_bytes
            lacking_bytes = excess if excess > 0 else self.limited(run).missing_bytes
            fewer = max(lacking_bytes // sequence_bytes // 2, 1)
            high, place = place, max(place - fewer, (low + place) // 2, low + 1)
        return low


def other_head(source: ModelSource) -> ModelSource | None:
    """Return the BERT with another common head: a classifier for a language model, and the reverse; else None."""
    head = HEADS.get(source.architecture or "")
    return source.with_options(architecture=head.other) if head and head.other else None


def estimate_on(
    source: ModelSource, run_configs: Sequence[RunConfig], card: Gpu | None, steps: Simulator | None = None
) -> tuple[list[RunConfig], MemoryReport]:
    """Return the runs as on the GPU, if there is one, and their estimates with the answer whether each fits there."""
    runs, steps = [on_card(run_config, card) for run_config in run_configs], steps or Simulator(source)
    report = estimate_report(source, runs, card, steps)
    if card is None:
        return runs, report
    fitter, _ = fitter_for(source, runs[0], card, None, {source.architecture: steps})

    def limited(found: Variant, run: RunConfig) -> Variant:
        memory = found.estimated
        return (
            found if memory is None else replace(found, estimated=replace(memory, cost=fitter.cost(run, memory.cost)))
        )

    return runs, replace(report, variants=tuple(map(limited, report.variants, runs)))


def fitter_for(
    source: ModelSource,
    run_config: RunConfig,
    budget: int | Gpu,
    context_bytes: int | None,
    steps: dict[str | None, Simulator],
) -> tuple[Fitter, Gpu | None]:
    """Return the search in a budget of bytes or on a GPU, and the GPU; searches with the same `steps` share traces."""
    known = budget if isinstance(budget, Gpu) else None
    budget_bytes = budget.memory_bytes if isinstance(budget, Gpu) else budget
    own = steps.setdefault(source.architecture, Simulator(source))
    facts = own.facts(run_config.changed(checkpointing=NONE))
    room = overhead(run_config, context_bytes, known, facts.subject.attention)
    return Fitter(own, budget_bytes, room, facts.rows), known


def fit_report(
    source: ModelSource,
    variants: Sequence[RunConfig],
    seqs: Sequence[int],
    budget: int | Gpu,
    *,
    batch: int | None = None,
    context_bytes: int | None = None,
    known_steps: dict[str | None, Simulator] | None = None,
    tries_other_head: bool = True,
) -> FitReport:
    """Return the largest batches that fit in a budget of bytes or on a GPU, or with `batch` the variants that fit.

    Reports on one source trace a step once if they get the same `known_steps`, at first empty. Raises SelectionError
    for a length or a setting that the model does not have.
    """
    plain = variants[0].changed(checkpointing=NONE)
    steps = {} if known_steps is None else known_steps
    fitter, known = fitter_for(source, variants[0], budget, context_bytes, steps)
    facts = fitter.steps.facts(plain)
    budget_bytes, room = fitter.budget_bytes, fitter.overhead
    other = other_head(source) if batch and tries_other_head else None
    other_steps = steps.setdefault(other.architecture, Simulator(other)) if other else None
    other_fitter = Fitter(other_steps, budget_bytes, room) if other_steps else None
    rows = []
    for variant in variants:
        for seq in seqs:
            progress(f"{variant.checkpointing}, {variant.precision}, seq {seq}")
            run_config = replace(on_card(variant, known), seq=seq)
            row = fitter.row(run_config, batch)
            if other_fitter and batch:
                row = replace(row, other_head_answer=other_fitter.answer(replace(run_config, batch=batch)))
            rows.append(row)
    if batch:  # the variants that fit first, those with the fewest FLOPs before the others
        rank = (YES, UNCERTAIN, NO).index
        rows.sort(key=lambda row: (row.seq, rank(row.answer), row.cost.extra_flops or 0.0, row.precision != FP32.name))
    return FitReport(
        subject=replace(facts.subject, obtained="estimated"),
        run=replace(variants[0], **{name: getattr(RunConfig, name) for name in _VARIED}),
        budget_bytes=budget_bytes,
        card=known,
        asked_batch=batch,
        rows=tuple(rows),
        other_head=other.architecture or "" if other else "",
        units=facts.units,
        notes=uncounted_notes(fitter.trace(replace(run_config, batch=batch or max(rows[-1].batch, 1))), run_config),
    )


# ---- `fit --batch-total`: the fewest ranks with which a batch fits, for each strategy ----


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
    known_steps: dict[str | None, Simulator] | None = None,
) -> FitReport:
    """Return, for each strategy, the fewest ranks whose batches add up to `total`, and a variant that fits on them.

    The batch of a rank is `total` by the number of ranks, rounded up. The variant that needs the least memory decides
    the number of ranks. The row with the fewest ranks is first, with the cheapest variant. No further strategy is tried
    once one needs only the least number of ranks, or the next one where the least is not enough. A strategy is given
    for any number of ranks.
    """
    steps = {} if known_steps is None else known_steps
    fitter, known = fitter_for(source, variants[0], budget, context_bytes, steps)
    search = _BatchSearch(fitter, world_sizes, total)
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
class _BatchSearch:
    """A search for the number of ranks, by its place in `world_sizes`."""

    fitter: Fitter
    world_sizes: Sequence[int]
    total: int

    def on(self, run_config: RunConfig, ranks: Parallelism, size: int) -> RunConfig:
        return replace(run_config, batch=-(-self.total // size), parallelism=ranks.of_size(size))

    def leanest(self, runs: Sequence[RunConfig]) -> RunConfig:
        return min(runs, key=lambda run: self.fitter.needed_bytes(replace(run, batch=max(self.total // 2, 1))))

    def fewest(self, run_config: RunConfig, ranks: Parallelism) -> int:
        """Return the place of the fewest ranks with which the run fits; the number of places if it fits with none."""

        def fits(place: int) -> bool:
            return self.fitter.answer(self.on(run_config, ranks, self.world_sizes[place])) == YES

        if fits(0):
            return 0
        last = len(self.world_sizes) - 1
        return 1 + largest(lambda place: not fits(place), last, near=self._expected(run_config, ranks))

    def _expected(self, run_config: RunConfig, ranks: Parallelism) -> int:
        """Return the place at which the tensors should fit, the last one if they do at none.

        It is taken from the growth with the batch on two ranks, whose shares of the state are made as small as those on
        more ranks.
        """
        pair = self.on(run_config, ranks, 2)
        growth = self.fitter.steps.growth(pair)
        if growth is None:
            return 0
        trace = self.fitter.trace(pair)
        index = next(moment.index for moment in trace.peaks() if moment.live_bytes == trace.peak_bytes)
        divided = sum(trace.parts_after(index)[part] for part in ranks.row.divided_parts)
        limit = self.fitter.overhead.limit_bytes(self.fitter.budget_bytes)

        def share(size: int) -> int:
            run = replace(run_config, parallelism=ranks.of_size(size))
            return self.fitter.steps.facts(run).groups[0].updated_params

        def fits(size: int) -> bool:
            own = self.on(run_config, ranks, size)
            return growth.scaled(own.batch).peak_bytes - divided * (1 - share(size) / share(2)) <= limit

        return min(bisect_left(self.world_sizes, True, key=fits), len(self.world_sizes) - 1)
