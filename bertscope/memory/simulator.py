"""One model and what is known of its steps: traces at any batch, FLOPs, and facts of the model.

Two recorded runs of a kind of step give its memory at any batch (trace.py). Results are kept in the user's cache
(saved.py): a further report on the same kind of step imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

from bertscope.errors import BertscopeError
from bertscope.gpus import Gpu
from bertscope.memory.parallel.collectives import traffic
from bertscope.memory.summary import estimated, memory_report, uncounted_notes
from bertscope.memory.trace import SMALLEST, MemoryTrace
from bertscope.progress import progress
from bertscope.reports.base import Subject
from bertscope.reports.json import typed
from bertscope.reports.memory import BreakEven, BreakEvenPoint, Memory, MemoryReport, RankGroup, Variant
from bertscope.settings.run_config import CUDA, FREED, RunConfig
from bertscope.settings.training import MODEL, mini_batch
from bertscope.sources.model_source import ModelSource
from bertscope.tracing.saved import NUMBER, checked, is_saved, not_negative, saved

if TYPE_CHECKING:
    from bertscope.memory.estimate import MemoryTraces

LARGEST_BATCH, _MOST_LINES = 2**20, 8
_SHOWN_BATCHES = (8, 32)
_KEPT = 32  # traces of about 1 MiB: a search needs its last ones, and the next budget those of the same runs


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts of a model as a run has it, which reports show."""

    subject: Subject
    params: int
    rows: dict[str, str]  # the row of each module's path
    units: str  # of FSDP
    groups: tuple[RankGroup, ...]
    buckets: int  # of DDP
    strategies: tuple[str, ...]  # of checkpointing, to compare by default

    @classmethod
    def of(cls, data: Any) -> ModelFacts:
        """Return the facts that asdict wrote, from JSON; raises ValueError for data that no model has."""
        not_negative(data)
        found: ModelFacts = typed(cls, data, "facts")
        return found


class Simulator:
    """A source, and what is known of its steps; with `one_batch` each step runs at its batch only."""

    def __init__(self, source: ModelSource, *, one_batch: bool = False) -> None:
        self.source, self.one_batch = source, one_batch or source.has_own_dtypes
        self.trace = lru_cache(_KEPT)(self._trace)
        self._read_once = lru_cache(_KEPT)(self._facts)
        self._grown = lru_cache(4 * _KEPT)(self._growth)
        self._counted = lru_cache(4 * _KEPT)(self._flops)

    @cached_property
    def traces(self) -> MemoryTraces:
        """Return the traces of runs on fake tensors."""
        from bertscope.memory.estimate import MemoryTraces

        return MemoryTraces(self.source)

    def is_kept(self, run_config: RunConfig, threads: int) -> bool:
        """Return True if the cache has all that a row of a sweep needs of a run."""
        kind = "growth" if run_config.batch >= SMALLEST else "trace"
        needed = {"facts": _plain(run_config), kind: run_config, "step FLOPs": _counted(run_config)}
        if kind == "growth":
            needed[kind] = replace(run_config, batch=SMALLEST)
        return all(is_saved(name, self.source, run, threads) for name, run in needed.items())

    def _trace(self, run_config: RunConfig) -> MemoryTrace:
        """Return the trace of a step; that of a user's own code is of this very batch.

        With mini-batches it is extrapolated in the examples after the first one; a CPU has a random state for each.
        """
        size = mini_batch(run_config.loss)
        batch = run_config.batch - size
        if not self.one_batch and batch >= SMALLEST and (run_config.device == CUDA or not size):
            growing = self._grown(replace(run_config, batch=SMALLEST))
            if growing is not None:
                return growing.scaled(batch)
        return saved("trace", self.source, run_config, lambda: self.traces.trace(run_config), MemoryTrace.data,
                     MemoryTrace.read)  # fmt: skip

    def growth(self, run_config: RunConfig) -> MemoryTrace | None:
        """Return the trace from which those of all batches are scaled; None if its events change with the batch."""
        return None if mini_batch(run_config.loss) else self._grown(replace(run_config, batch=SMALLEST))

    def _growth(self, run_config: RunConfig) -> MemoryTrace | None:
        found: MemoryTrace | None = None
        with suppress(BertscopeError):  # of a model or shape that takes no other batch: each batch runs by itself
            found = saved(
                "growth", self.source, run_config, lambda: self.traces.growth(run_config),
                lambda found: found and found.data(), lambda data: None if data is None else MemoryTrace.read(data),
            )  # fmt: skip
        return found

    def flops(self, run_config: RunConfig) -> int:
        """Return the FLOPs of a step: with the model's own loss those of one sequence, times the batch."""
        run = _counted(run_config)
        return run_config.batch // run.batch * self._counted(run)

    def _flops(self, run_config: RunConfig) -> int:
        def compute() -> int:
            from bertscope.memory.step import step_flops

            return step_flops(self.source, run_config)

        return saved("step FLOPs", self.source, run_config, compute, int, lambda data: int(checked(data, NUMBER)))

    def facts(self, run_config: RunConfig) -> ModelFacts:
        """Return the facts of the model as the run has it, which do not change with its batch and length."""
        return self._read_once(_plain(run_config))

    def _facts(self, run_config: RunConfig) -> ModelFacts:
        compute = partial(self._read, run_config)
        return saved("facts", self.source, run_config, compute, asdict, ModelFacts.of)

    def _read(self, run_config: RunConfig) -> ModelFacts:
        from bertscope.memory.parallel.collectives import bucket_sizes
        from bertscope.memory.parallel.strategies import rank_groups, units_text
        from bertscope.memory.step import counted_model
        from bertscope.tracing.module_tree import read, row_paths
        from bertscope.tracing.totals import subject, totals

        parallelism, path = run_config.parallelism, self.source.layer_path
        model = counted_model(self.source, run_config)
        return ModelFacts(
            subject=subject(model, self.source.name, run_config.dtype),
            params=totals(read(model), None).distinct_params,
            rows=dict(row_paths(model)),
            units=units_text(model, parallelism, path),
            groups=rank_groups(model, parallelism, path),
            buckets=len(bucket_sizes(model)),
            strategies=tuple(self.source.strategies(model)),
        )


def _plain(run_config: RunConfig) -> RunConfig:
    """Return the run of other sizes and loop that builds the same model."""
    return replace(run_config, batch=1, seq=1, loop=FREED)


def _counted(run_config: RunConfig) -> RunConfig:
    """Return the run whose FLOPs are counted: with the model's own loss that of one sequence."""
    batch = 1 if run_config.loss == MODEL else run_config.batch
    return run_config.counted(accumulate=run_config.accumulate, batch=batch)


def break_even(one: MemoryTrace | None, other: MemoryTrace | None, above: int) -> BreakEven | None:
    """Return the least batch at which `other` has the lower peak, and both peaks at batches above `above`.

    None if it is not known.
    """
    if one is None or other is None:
        return None

    def peaks(batch: int) -> tuple[int, int]:
        return one.scaled(batch).peak_bytes, other.scaled(batch).peak_bytes

    def is_behind(batch: int) -> bool:
        first, second = peaks(batch)
        return second >= first

    behind = largest(is_behind)
    if behind >= LARGEST_BATCH // 2:
        return None
    shown = [(batch, *peaks(batch)) for batch in _SHOWN_BATCHES if batch > max(above, behind)]
    points = tuple(BreakEvenPoint(batch=batch, first_bytes=first, own_bytes=second) for batch, first, second in shown)
    return BreakEven(pays_from_batch=behind + 1, points=points)


def estimate_memory(source: ModelSource, run_config: RunConfig, steps: Simulator | None = None) -> Memory:
    """Return the memory of a step of the model of `source`; `steps` are this model's, by default new ones."""
    steps = steps or Simulator(source)
    rows = steps.facts(run_config).rows
    trace = steps.trace(run_config)
    return estimated(trace, trace.other_peak_bytes, run_config, rows)


def estimate_report(
    source: ModelSource, run_configs: Sequence[RunConfig], card: Gpu | None = None, steps: Simulator | None = None
) -> MemoryReport:
    """Return the estimates of one model's step for run configurations that differ only in checkpointing.

    On CUDA the context and the workspaces are those of `card`; `steps` are this model's, by default new ones.
    """
    steps = steps or Simulator(source)
    facts = steps.facts(run_configs[0])
    variants: list[Variant] = []
    for run_config in run_configs:
        progress(f"estimating {run_config.checkpointing}")
        trace = steps.trace(run_config)
        found = estimated(trace, trace.other_peak_bytes, run_config, facts.rows, card)
        variant = Variant(
            checkpointing=run_config.checkpointing,
            reentrant=run_config.reentrant,
            estimated=found,
            traffic=traffic(
                trace.collectives, facts.rows, facts.buckets, run_config.parallelism, run_config.accumulate
            ),
        )
        first = variants[0].estimated if variants else None
        if first and source.layer_path and found.cost.peak_bytes >= first.cost.peak_bytes:
            growths = steps.growth(run_configs[0]), steps.growth(run_config)
            variant = replace(variant, outlook=break_even(*growths, above=run_configs[0].batch))
        variants.append(variant)
    notes = uncounted_notes(steps.trace(run_configs[0]), run_configs[0])
    report = replace(memory_report(facts.subject, run_configs[0], tuple(variants)), card=card, notes=notes)
    if run_configs[0].parallelism.world_size == 1:
        return report
    return replace(report, ranks=facts.groups, units=facts.units)


# ---- searches ----


def near(peak_bytes: Callable[[int], int], limit_bytes: int) -> int:
    """Return about the largest batch within a limit, where lines through the peaks of two batches end."""
    before, batch = SMALLEST, 8 * SMALLEST
    for _ in range(_MOST_LINES):
        first, second = peak_bytes(before), peak_bytes(batch)
        slope, room = (second - first) / (batch - before), limit_bytes - second
        end = batch + room / slope if slope > 0 else LARGEST_BATCH if room >= 0 else 1
        before, batch = batch, int(min(max(end, 1), 8 * batch, LARGEST_BATCH))
        if abs(batch - before) <= 1:
            break
    return batch


def largest(fits: Callable[[int], bool], most: int = LARGEST_BATCH, near: int = 1) -> int:
    """Return the largest number up to `most` that fits, 0 for none; every smaller one fits too.

    The search goes from `near` in steps that double, until it is between one that fits and one that does not.
    """
    low, high, place, step = 0, most + 1, near, 1
    while high - low > 1:
        place = min(max(place, low + 1), high - 1)
        if fits(place):
            low, place = place, place + step
        else:
            high, place = place, place - step
        if low > 0 and high <= most:
            place = (low + high) // 2
        step *= 2
    return low
