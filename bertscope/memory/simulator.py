"""One model and what is known of its steps: traces at any batch, FLOPs, facts of the model, and what a step costs.

Two recorded runs of a kind of step give its memory at any batch (trace.py). Results are kept in the user's cache
(cache.py): a further report on the same kind of step imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, replace
from functools import cached_property, lru_cache
from itertools import cycle
from typing import TYPE_CHECKING, Any

from bertscope.errors import BertscopeError, SelectionError, name_of
from bertscope.gpus import Gpu
from bertscope.memory.caching_allocator import Allocator, Workspaces
from bertscope.memory.derived_traces import with_evaluation
from bertscope.memory.kernel_rules import Overhead, overhead, placements
from bertscope.memory.summary import (
    ModelFacts,
    device_cost,
    estimated,
    for_gpu,
    host_cost,
    memory_report,
    replay,
    reserved_range,
    step_cost,
    traffic,
    uncounted_notes,
)
from bertscope.memory.trace import SMALLEST, MemoryTrace
from bertscope.progress import progress
from bertscope.reports.json import NUMBER, checked
from bertscope.reports.memory import BreakEven, BreakEvenPoint, Memory, MemoryReport, Variant
from bertscope.reports.step import NO, UNCERTAIN, YES, ByteRange, StepCost, usable
from bertscope.settings.checkpointing import NONE, with_checkpointing
from bertscope.settings.run_config import CUDA, RunConfig
from bertscope.settings.training import MODEL, mini_batch
from bertscope.sources.model_source import ModelSource
from bertscope.tracing.cache import is_saved, saved

if TYPE_CHECKING:
    from bertscope.memory.estimate import MemoryTraces
    from bertscope.memory.step_time import Timer

LARGEST_BATCH, _MOST_LINES = 2**20, 8
_MULTIPLE = 8  # of which a rounded batch is one
_LIMIT = ("gpu", "limit_bytes", "overhead", "margin", "timer")  # attributes of a simulator
_SHOWN_BATCHES = (8, 32)
_KEPT = 32  # traces of about 1 MiB: a search needs its last ones, and the next budget the same runs


# What is known of a run -> its form in the cache: to JSON data, and from it; computed by the method of MemoryTraces.
_FORMS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "trace": (MemoryTrace.data, MemoryTrace.read),
    "scalable_trace": (
        lambda placements: placements and placements.data(),
        lambda data: None if data is None else MemoryTrace.read(data),
    ),
    "flops": (int, lambda data: int(checked(data, NUMBER))),
    "facts": (asdict, ModelFacts.of),
}


class Simulator:
    """A source, and what is known of its steps: `cost(run)` is what a step costs, `limited` has its verdict too.

    With `one_batch` each step runs at its batch only.
    """

    def __init__(self, source: ModelSource, *, one_batch: bool = False) -> None:
        self.source, self.one_batch = source, one_batch or source.has_own_dtypes
        self.limit_bytes: int | None = None
        self.margin = 0.0  # the share of the limit that a step which fits leaves free
        self.gpu: Gpu | None = None
        self.overhead = Overhead()
        self.timer: Timer | None = None
        self.rows: Mapping[str, str] = {}  # of each module's path, once there is a limit
        self.others: dict[Any, Simulator] = {}  # of the same source with options
        self.trace = lru_cache(_KEPT)(self._trace)
        self._scalable = lru_cache(4 * _KEPT)(self._computed_scalable)
        self._known = lru_cache(4 * _KEPT)(self._saved)
        self.allocator = lru_cache(8 * _KEPT)(self._replayed)

    def limited(
        self, run_config: RunConfig, memory: int | Gpu, context_bytes: int | None = None, margin: float = 0.0
    ) -> Simulator:
        """Return a simulator that knows the same, for runs under a budget in bytes or on a GPU.

        `context_bytes` replaces what is known about the GPU's context; a step that fits leaves the `margin` free.
        """
        gpu = memory if isinstance(memory, Gpu) else None
        return self._changed(
            gpu=gpu,
            limit_bytes=memory.memory_bytes if isinstance(memory, Gpu) else memory,
            overhead=overhead(run_config, context_bytes, gpu),
            rows=self.facts(run_config).rows,
            margin=margin,
        )

    def with_margin(self, margin: float) -> Simulator:
        """Return the simulator under the same limit with another margin."""
        return self._changed(margin=margin)

    def scaling(self) -> Simulator:
        """Return the simulator under the same limit whose traces are scaled to other batches, if they can be."""
        if not self.one_batch:
            return self
        if "scaling" not in self.others:
            self.others["scaling"] = Simulator(self.source)
            self.others["scaling"].one_batch = False
        return self._limiting(self.others["scaling"])

    def with_options(self, **options: Any) -> Simulator:
        """Return the source's simulator with these options, under the same limit."""
        key = tuple(options.items())
        if key not in self.others:
            self.others[key] = Simulator(self.source.with_options(**options), one_batch=self.one_batch)
        return self._limiting(self.others[key])

    def _limiting(self, known: Simulator) -> Simulator:
        return known._changed(**{name: getattr(self, name) for name in _LIMIT})

    def _changed(self, **attributes: Any) -> Simulator:
        """Return a simulator that shares all that is known of traces, with other attributes."""
        simulator = copy(self)
        vars(simulator).update(attributes)
        return simulator

    @cached_property
    def traces(self) -> MemoryTraces:
        """Return the traces of runs on fake tensors."""
        from bertscope.memory.estimate import MemoryTraces

        return MemoryTraces(self.source)

    # ---- what is known: in memory, in the cache, else computed ----

    def is_kept(self, run_config: RunConfig, threads: int) -> bool:
        """Return True if the cache has all that a row of a sweep needs of a run."""
        needed = [("facts", _plain(run_config)), ("flops", _counted(run_config))]
        needed += [("trace", run_config.evaluation)] if run_config.eval_batch else []
        run = replace(run_config.changed(eval_batch=None), batch=min(run_config.batch, SMALLEST))
        needed.append(("scalable_trace" if run.batch == SMALLEST else "trace", run))
        return all(is_saved(name, self.source, run, threads) for name, run in needed)

    def _trace(self, run_config: RunConfig) -> MemoryTrace:
        """Return a step's trace; a user's own code runs at this very batch.

        With mini-batches it is extrapolated in the examples after the first one; a CPU has a random state for each.
        """
        size = mini_batch(run_config.loss)
        batch = run_config.batch - size
        if not (self.one_batch or run_config.objects) and batch >= SMALLEST and (run_config.device == CUDA or not size):
            scalable = self._scalable(replace(run_config, batch=SMALLEST))
            if scalable is not None:
                return scalable.scaled(batch)
        trace: MemoryTrace = self._saved("trace", run_config)
        return trace

    def _saved(self, kind: str, run_config: RunConfig) -> Any:
        """Return what is in the cache, else what runs on fake tensors give; only these import torch."""
        if run_config.eval_batch and not run_config.evaluates_only:
            training = self._saved(kind, run_config.changed(eval_batch=None))
            return training and with_evaluation(training, self._known("trace", run_config.evaluation))
        return saved(kind, self.source, run_config, lambda: getattr(self.traces, kind)(run_config), *_FORMS[kind])

    def scalable_trace(self, run_config: RunConfig) -> MemoryTrace | None:
        """Return the trace from which all batches are scaled; None if its events change with the batch."""
        is_scalable = not (mini_batch(run_config.loss) or run_config.objects)
        return self._scalable(replace(run_config, batch=SMALLEST)) if is_scalable else None

    def _computed_scalable(self, run_config: RunConfig) -> MemoryTrace | None:
        scalable: MemoryTrace | None = None
        with suppress(BertscopeError):  # of a model or shape that takes no other batch: each batch runs by itself
            scalable = self._saved("scalable_trace", run_config)
        return scalable

    def flops(self, run_config: RunConfig) -> int:
        """Return a step's FLOPs: with the model's own loss of one sequence, times the batch."""
        run = _counted(run_config)
        flops: int = self._known("flops", run)
        return run_config.batch // run.batch * flops

    def facts(self, run_config: RunConfig) -> ModelFacts:
        """Return the model's facts as the run has it, which do not change with sizes and recomputation."""
        facts: ModelFacts = self._known("facts", _plain(run_config))
        return replace(facts, subject=replace(facts.subject, name=self.source.name))  # a file has no TypedName

    # ---- what a step costs ----

    def cost(self, run_config: RunConfig, known: StepCost | None = None, **fields: Any) -> StepCost:
        """Return a step's cost, under the limit if there is one; `known` is its cost without a limit."""
        trace, limit, room = self.trace(run_config), self.limit_bytes, self.overhead
        rows = self.rows or self.facts(run_config).rows
        if limit is None:
            return step_cost(trace, rows, **device_cost(trace, run_config, self.gpu), **fields)
        least, lacking = max(trace.peak_bytes - self.most_bytes, 0), self.excess_bytes(run_config)
        if run_config.device == CUDA:
            lacking = max(self.missing_bytes(run_config, laid) for laid in self.placements(run_config))
            limits = (each.reservable_bytes for each in (self, self.with_margin(0.0)) if each.is_served(run_config))
            at = next(limits, None)  # without a limit if it does not fit
            replays = (self.allocator(run_config, laid, at) for laid in self.placements(run_config))
            fields = {"reserved": reserved_range(replays), **host_cost(trace, run_config), **fields}
        fields = {
            "workspace_bytes": room.workspace_bytes,
            "context": room.context,
            "limit_bytes": limit,
            "margin": self.margin,
            "shortfall": ByteRange(low_bytes=least, high_bytes=lacking),
            **fields,
        }
        return replace(known, **fields) if known else step_cost(trace, rows, **fields)

    def timed(self, cost: StepCost, run_config: RunConfig) -> StepCost:
        """Return the cost with the step's time, if times are wanted."""
        return replace(cost, time=self.timer.time(self, run_config)) if self.timer else cost

    def answer(self, run_config: RunConfig) -> str:
        """Return if the run fits in the limit: yes, no, or uncertain."""
        if self.is_served(run_config):
            return YES
        return UNCERTAIN if self.trace(run_config).peak_bytes <= self.most_bytes else NO

    @property
    def usable_bytes(self) -> int:
        """Return the limit's bytes without the margin."""
        return usable(self.limit_bytes or 0, self.margin)

    @property
    def most_bytes(self) -> int:
        """Return the bytes of tensors above which no step fits."""
        return (self.limit_bytes or 0) - self.overhead.workspace_bytes - self.overhead.context.low_bytes

    def is_served(self, run_config: RunConfig) -> bool:
        """Return True if the run fits with the upper context, on CUDA with the allocator's fragmentation."""
        return not self.excess_bytes(run_config) and not any(
            self.missing_bytes(run_config, laid) for laid in self.placements(run_config)
        )

    def needed_bytes(self, run_config: RunConfig) -> int:
        """Return the bytes of the tensors, the workspaces and the upper context at this step's peak."""
        return self.trace(run_config).peak_bytes + self.overhead.highest_bytes

    def excess_bytes(self, run_config: RunConfig) -> int:
        """Return by how much these bytes exceed the limit without the margin."""
        return max(self.needed_bytes(run_config) - self.usable_bytes, 0)

    def missing_bytes(self, run_config: RunConfig, laid: Workspaces) -> int:
        """Return how many bytes a run lacks for its tensors, or else for the allocator's segments."""
        return self.excess_bytes(run_config) or self.allocator(run_config, laid, self.reservable_bytes).missing_bytes

    def placements(self, run_config: RunConfig) -> tuple[Workspaces, ...]:
        """Return where the workspaces of a run may lie in the allocator; none on a CPU, which has none."""
        return placements(run_config, self.overhead.workspace_bytes) if run_config.device == CUDA else ()

    @property
    def reservable_bytes(self) -> int:
        """Return the bytes that torch may reserve: without the margin and the upper context."""
        return self.usable_bytes - self.overhead.context.high_bytes

    def _replayed(self, run_config: RunConfig, laid: Workspaces, limit_bytes: int | None) -> Allocator:
        return replay(self.trace(run_config), run_config, laid, limit_bytes)

    # ---- the largest batch that fits ----

    def largest_by_bytes(self, run_config: RunConfig, limit_bytes: int | None = None) -> int:
        """Return the largest batch whose tensors are within a limit, by default may fit at all."""
        most = self.most_bytes if limit_bytes is None else limit_bytes
        if run_config.input:
            traces = (self.trace(replace(run_config, batch=batch)) for batch in (1, 2))
            one, two = ([kind.block for kind in trace.kinds if kind.block.part == "inputs"] for trace in traces)
            if one == two:
                remedy = f"write B for it in {name_of('input')}, such as x=Bx64:float32"
                raise SelectionError(f"no input changes with the batch; {remedy}")
        scalable = self.scalable_trace(run_config)

        def traced_bytes(batch: int) -> int:
            return self.trace(replace(run_config, batch=batch)).peak_bytes

        def peak_bytes(batch: int) -> int:  # a batch of 1 is traced, and each batch of a user's own code
            return scalable.scaled(batch).peak_bytes if scalable else traced_bytes(batch)

        return largest(lambda batch: traced_bytes(batch) <= most, near=near(peak_bytes, most))

    def largest_served(self, run_config: RunConfig, most: int) -> int:
        """Return the largest batch up to `most` that fits, wherever the workspaces lie."""
        if run_config.device != CUDA:
            return min(self.largest_by_bytes(run_config, self.usable_bytes), most) if self.margin else most
        if self.one_batch:  # scaled traces say where to look; steps of these very batches, if the answer is there
            batch = self.scaling().largest_served(run_config, most)
            known = {size: self.is_served(replace(run_config, batch=size)) for size in (batch, batch + 1) if size}
            if known.get(batch, True) and (batch == most or not known[batch + 1]):
                return batch
        agreeing, places = 0, cycle(placements := self.placements(run_config))
        while most and agreeing < len(placements):
            batch = self._largest_placed(run_config, most, next(places))
            agreeing, most = agreeing + 1 if batch == most else 1, batch
        return most

    def _largest_placed(self, run_config: RunConfig, most: int, laid: Workspaces) -> int:
        """Return the largest batch up to `most` that fits with the workspaces in this place.

        A try that is not served says how many bytes its requests lack; the next one is smaller by as many sequences.
        """
        low, high, batch, step = 0, most + 1, most, 1  # at `low` it is served, at `high` it is not
        while high - low > 1:
            run, more = replace(run_config, batch=batch), replace(run_config, batch=batch + 1)
            missing = self.missing_bytes(run, laid)
            if not missing:
                low, batch, step = batch, min(batch + step, high - 1), 2 * step
                continue
            sequence_bytes = max(self.needed_bytes(more) - self.needed_bytes(run), 1)
            high, batch = batch, max(batch - max(missing // sequence_bytes // 2, 1), (low + batch) // 2, low + 1)
        return low

    def multiple_below(self, run_config: RunConfig, batch: int) -> int:
        """Return a batch that fits, rounded down to a multiple of 8 above 16 (docs/fit.md).

        The allocator may serve a batch and not a smaller one, so the multiple itself must fit.
        """
        multiples = range(batch // _MULTIPLE * _MULTIPLE, 2 * _MULTIPLE, -_MULTIPLE)
        served = (multiple for multiple in multiples if self.is_served(replace(run_config, batch=multiple)))
        return next(served, min(batch, 2 * _MULTIPLE))

    def largest_batch(self, run_config: RunConfig, *, is_exact: bool = False) -> int:
        """Return the largest batch that fits and is smaller than the run's batch, rounded unless it is exact."""
        known = self if self.source.has_own_dtypes else self.scaling()
        most = min(known.largest_by_bytes(run_config), run_config.batch - 1)
        served = known.largest_served(run_config, most)
        return served if is_exact else known.multiple_below(run_config, served)

    # ---- reports ----

    def memory(self, run_config: RunConfig) -> Memory:
        """Return a step's memory without a limit."""
        return estimated(self.trace(run_config), run_config, self.facts(run_config).rows)

    def report(self, run_configs: Sequence[RunConfig]) -> MemoryReport:
        """Return a step's estimates for runs that differ only in checkpointing; with a GPU as they are there."""
        runs = [for_gpu(run_config, self.gpu) for run_config in run_configs]
        facts, path = self.facts(runs[0]), self.source.layer_path
        variants: list[Variant] = []
        for run in runs:
            progress(f"simulating {with_checkpointing(run.checkpointing)}")
            trace = self.trace(run)
            memory = estimated(trace, run, facts.rows, self.gpu)
            cost = memory.cost if self.limit_bytes is None else self.cost(run, memory.cost)
            calls = traffic(trace.collectives, facts.rows, facts.buckets, run.parallelism, run.accumulate)
            first, break_even = variants[0].cost if variants else None, None
            if first and path and cost.peak_bytes >= first.peak_bytes:
                break_even = self.break_even(runs[0], run)
            memory = replace(memory, cost=self.timed(cost, run))
            variant = Variant(checkpointing=run.checkpointing, reentrant=run.reentrant, estimated=memory)
            variants.append(replace(variant, traffic=calls, break_even=break_even))
        report = replace(
            memory_report(facts.subject, runs[0], tuple(variants)),
            gpu=self.gpu,
            notes=uncounted_notes(self.trace(runs[0]), runs[0]),
        )
        is_divided = runs[0].parallelism.world_size > 1
        return replace(report, ranks=facts.groups, units=facts.units) if is_divided else report

    def with_largest(self, report: MemoryReport) -> MemoryReport:
        """Return the report with the largest batch of the leanest variant, if none fits for certain."""
        costs = [variant.estimated.cost for variant in report.variants if variant.estimated]
        if self.one_batch or not costs or any(cost.verdict in ("", YES) for cost in costs) or report.run.batch == 1:
            return report
        variants = list(report.variants)
        number = min(range(len(costs)), key=lambda number: costs[number].gpu_bytes)
        checkpointing, is_reentrant = variants[number].checkpointing, variants[number].reentrant
        run = report.run.changed(checkpointing=checkpointing, **({"reentrant": True} if is_reentrant else {}))
        variants[number] = replace(variants[number], largest_batch=self.largest_batch(run))
        return replace(report, variants=tuple(variants))

    def break_even(self, first: RunConfig, run_config: RunConfig) -> BreakEven | None:
        """Return the least batch at which a run has a lower peak than the first one, and both peaks at larger batches.

        None if it is not known.
        """
        one, other = self.scalable_trace(first), self.scalable_trace(run_config)
        if one is None or other is None:
            return None

        def peaks(batch: int) -> tuple[int, int]:
            return one.scaled(batch).peak_bytes, other.scaled(batch).peak_bytes

        def is_behind(batch: int) -> bool:
            first_bytes, own_bytes = peaks(batch)
            return own_bytes >= first_bytes

        behind = largest(is_behind)
        if behind >= LARGEST_BATCH // 2:
            return None
        shown = [(batch, *peaks(batch)) for batch in _SHOWN_BATCHES if batch > max(first.batch, behind)]
        points = (BreakEvenPoint(batch=batch, first_bytes=first, own_bytes=second) for batch, first, second in shown)
        return BreakEven(pays_from_batch=behind + 1, points=tuple(points))


def _plain(run_config: RunConfig) -> RunConfig:
    """Return the run of other sizes, loop, kernels and strategy of checkpointing that builds the same model."""
    if run_config.checkpointing != NONE or run_config.eval_batch:
        run_config = run_config.changed(checkpointing=NONE, eval_batch=None)
    return replace(run_config, batch=1, seq=1, loop=run_config.traced_loop, sdpa_kernel="auto", gpu_threads=0)


def _counted(run_config: RunConfig) -> RunConfig:
    """Return the run whose FLOPs are counted: with the model's own loss of one sequence."""
    batch = 1 if run_config.loss == MODEL else run_config.batch
    return run_config.counted(accumulate=run_config.accumulate, batch=batch)


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
    low, high, number, step = 0, most + 1, near, 1
    while high - low > 1:
        number = min(max(number, low + 1), high - 1)
        if fits(number):
            low, number = number, number + step
        else:
            high, number = number, number - step
        if low > 0 and high <= most:
            number = (low + high) // 2
        step *= 2
    return low
