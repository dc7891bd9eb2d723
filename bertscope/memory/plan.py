"""`plan`: the operators to save for backward so that a step fits under a limit at the lowest recompute cost.

A layer may save the output of each of its matrix products, or recompute it. The products are taken in the order of
the FLOPs that a byte avoids, layer by layer from the last one, until the memory is full: this meets the front of
all sets of products (all 256 sets of a layer of BERT were tried), and layers that save more than others fill what is
left. The last layers save more, since their backward pass comes first. A layer without recomputation needs more bytes
and saves no further FLOPs: the last one is where its recomputation would need the same memory at once, others where all
products are saved. Each plan that is shown was run on fake tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, reduce
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from bertscope.errors import BertscopeError, Reason, SelectionError, name_of
from bertscope.memory.simulator import LARGEST_BATCH, Simulator, largest
from bertscope.memory.summary import for_gpu
from bertscope.progress import progress
from bertscope.reports.base import Note
from bertscope.reports.plan import FLOPS, TIME, PlanList, PlanOperator, PlanPoint, PlanReport, PlanRow
from bertscope.reports.step import NO, YES
from bertscope.settings.checkpointing import NONE, Saved, saved_text
from bertscope.settings.parallelism import ONE_PROCESS
from bertscope.settings.rows import rows
from bertscope.settings.run_config import TRAINING, RunConfig
from bertscope.sources.model_source import ModelSource

if TYPE_CHECKING:
    from bertscope.memory.layer_operators import LayerCosts

# A product that some layers of a list save and others do not makes a further kind of layer to run. After one of this
# share of the layers' FLOPs, 1 % of the FLOPs of a step, no further product fills what is left.
_FINE = 0.03
_FINEST = 0.005
_TRIED = 16  # plans that a search runs at most
# The plans from the leanest, and those after the cheapest that fits, of which one may fit: so many, and no further than
# one that needs so many times the memory.
_FIRST, _FURTHER = (10, 1.05), (4, 1.02)
_LEANER = 3  # rows below the answer
Counts = tuple[int, ...]  # for each product in order: the number of layers, the last ones, that save it


@dataclass(frozen=True)
class PlanSpace:
    """The plans for the layers of a model with these costs."""

    lists: tuple[LayerCosts, ...]

    @cached_property
    def products(self) -> tuple[tuple[LayerCosts, PlanOperator], ...]:
        """Return the products that recomputation would run, those with the most FLOPs for a byte first."""
        again = [(costs, product) for costs in self.lists for product in costs.operators if product.recomputed]
        return tuple(sorted(again, key=lambda item: (-item[1].flops / item[1].output_bytes, -item[1].output_bytes)))

    @property
    def everything(self) -> Counts:
        """Return the plan that saves all products."""
        return tuple(costs.recomputed for costs, _ in self.products)

    def with_whole(self, count: int) -> PlanSpace:
        """Return plans that do not recompute the last layers, whose backward pass comes first; one of each list is."""
        lists: list[LayerCosts] = []
        for costs in reversed(self.lists):
            lists.insert(0, replace(costs, whole=min(count, costs.layers - 1)))
            count -= lists[0].whole
        return PlanSpace(tuple(lists))

    def filled(self, room_bytes: int) -> Counts:
        """Return the plan that saves products of that many bytes."""
        counts = []
        for costs, product in self.products:
            count = max(min(costs.recomputed, room_bytes // product.output_bytes), 0)
            is_last = count < costs.recomputed and product.flops <= _FINE * self.flops
            room_bytes = 0 if is_last else room_bytes - count * product.output_bytes
            counts.append(count)
        return tuple(counts)

    def saved_bytes(self, counts: Counts) -> int:
        """Return the bytes of all saved outputs."""
        return sum(count * product.output_bytes for count, (_, product) in zip(counts, self.products, strict=True))

    def recompute_flops(self, counts: Counts) -> int:
        """Return the FLOPs of matrix products that recomputation adds to a forward and backward pass."""
        pairs = zip(counts, self.products, strict=True)
        always = sum(costs.recomputed * costs.always_flops for costs in self.lists)
        return always + sum((costs.recomputed - count) * product.flops for count, (costs, product) in pairs)

    @property
    def flops(self) -> int:
        """Return the FLOPs of the forward pass of all layers."""
        return sum(costs.layers * costs.flops for costs in self.lists)

    @property
    def moved_bytes(self) -> int:
        """Return the bytes that the other operators move in the recomputation."""
        return sum(costs.recomputed * costs.moved_bytes for costs in self.lists)

    def leanest(self, flops: float) -> Counts:
        """Return the plan with the fewest bytes and fewer recompute FLOPs; without one the plan of all products."""
        most = self.saved_bytes(self.everything)
        size = bisect_left(range(most), True, key=lambda size: self.recompute_flops(self.filled(size)) < flops)
        return self.filled(size)

    def next(self, counts: Counts) -> Counts:
        """Return the plan with the fewest bytes more and fewer recompute FLOPs; the same if there is none."""
        saved_bytes, flops = self.saved_bytes(counts), self.recompute_flops(counts)
        for size in sorted({product.output_bytes for _, product in self.products}):
            plan = self.filled(saved_bytes + size)
            if self.recompute_flops(plan) < flops:
                return plan
        return self.everything if flops else counts

    def in_lists(self, counts: Counts) -> tuple[PlanList, ...]:
        """Return what each list of layers saves; layers that save the same are one item."""
        items: list[PlanList] = []
        for costs in self.lists:
            pairs = zip(counts, self.products, strict=True)
            first = {product: costs.recomputed - count for count, (other, product) in pairs if other is costs}
            groups: dict[tuple[PlanOperator, ...], list[int]] = {}
            for layer in range(costs.recomputed):
                saved = tuple(item for item in costs.operators if item.recomputed and layer >= first[item])
                groups.setdefault(saved, []).append(layer)
            is_numbered = costs.layer_paths == tuple(f"{costs.path}.{number}" for number in range(costs.layers))
            for saved, layers in groups.items():
                recomputed = tuple(item for item in costs.operators if item.recomputed and item not in saved)
                item = PlanList(
                    path=costs.path,
                    layers=costs.layers,
                    recomputed=tuple(layers),
                    saved=saved,
                    recomputed_operators=recomputed,
                )
                items.append(item if is_numbered else replace(item, layer_paths=costs.layer_paths))
        return tuple(items)


def strategy_text(lists: Sequence[PlanList]) -> str:
    """Return the strategy of checkpointing that recomputes these layers so."""
    return saved_text(
        Saved(
            path=row.path,
            operators=frozenset(f"{product.name}.{product.number}" for product in row.saved),
            layers=None if len(row.recomputed) == row.layers else frozenset(row.recomputed),
        )
        for row in lists
    )


@dataclass(eq=False)
class PlanSearch:
    """The search for the cheapest plan of one run that fits."""

    simulator: Simulator
    run_config: RunConfig
    space_of: Callable[[Simulator, RunConfig], PlanSpace]
    changes: dict[str, Any]
    rows: dict[tuple[PlanSpace | None, Counts], PlanRow] = field(default_factory=dict)
    stage: str = "simulating"

    @cached_property
    def space(self) -> PlanSpace:
        """Return the run's plans, whatever its optimizer is."""
        return self.space_of(self.simulator, self.run_config.changed(optimizer="none"))

    @cached_property
    def byte_flops(self) -> float:
        """Return the FLOPs that cost as much as moving a byte: without a calibration only FLOPs count."""
        return self.simulator.timer.byte_flops(self.run_config) if self.simulator.timer else 0.0

    @property
    def plain(self) -> PlanRow:
        """Return the run without recomputation."""
        return self.row(None, ())

    @cached_property
    def answer(self) -> PlanRow:
        """Return the cheapest plan that fits; the leanest one if none does."""
        if self.plain.answer == YES:
            return self._timed(self.plain)
        lean = self.space.filled(0)
        if not self.space.products:
            raise SelectionError("the model has no layers whose matrix products a plan could save or recompute")
        # When the last layer is recomputed, all that it saves is there, as if it were not recomputed.
        most = sum(costs.layers - 1 for costs in self.space.lists)
        spaces = [self.space.with_whole(count) for count in (1, 0) if count <= most]
        starts = [(space, lean) for space in spaces if self.row(space, lean).answer == YES]
        for space in [] if starts else spaces:
            if (plan := self._beyond(space, lean, *_FIRST)) is not None:
                starts.append((space, plan))
        if not starts:
            return self._timed(self.row(self.space, lean))
        starts.sort(key=lambda start: self.row(*start).cost.gpu_bytes)
        self._narrow(*starts[0])
        for space in (space for space in spaces if space is not starts[0][0]):
            least = self._cost(self._best())[0] / self.run_config.accumulate - self.byte_flops * space.moved_bytes
            better = space.leanest(least)
            if space.recompute_flops(better) < least and self.row(space, better).answer == YES:
                self._narrow(space, better)
        while (further := self._further()) is not None:
            self._narrow(*further)
        if not any(
            costs.recomputed_operators for costs in self._best().lists
        ):  # further layers without recomputation move fewer bytes
            spaces = [self.space.with_whole(count) for count in range(most + 1)]
            largest(lambda count: self.row(spaces[count], spaces[count].everything).answer == YES, most)
        return self._timed(self._best())

    @property
    def cheaper(self) -> PlanRow | None:
        """Return the next cheaper plan, which does not fit."""
        cheaper = (row for row in self.rows.values() if self._cost(row) < self._cost(self.answer))
        return max(cheaper, key=self._cost, default=None)

    def rank(self, is_timed: bool) -> tuple[bool, bool, bool, bool, float, int]:
        """Return what makes the answer better, the smaller the better: no change, no copies, the result, the time."""
        answer = self.answer
        cost = (_seconds(answer) if is_timed else None) or answer.recompute_share
        is_changed, has_copies = bool(self.changes), bool(answer.cost.copied_bytes)
        return answer.answer != YES, is_changed, has_copies, not answer.keeps_result, cost, len(self.changes)

    def _beyond(self, space: PlanSpace, plan: Counts, number: int, most: float) -> Counts | None:
        """Run a plan and the next ones, `number` in all, that need up to `most` times the memory.

        Return the cheapest that fits. The allocator's free blocks may fit one, but no leaner one.
        """
        fitting = None
        for _ in range(number):
            row = self.row(space, plan)
            if row.answer == NO or row.cost.gpu_bytes > most * self.simulator.usable_bytes:
                break
            fitting = plan if row.answer == YES else fitting
            plan = space.next(plan)
        return fitting

    def _further(self) -> tuple[PlanSpace, Counts] | None:
        """Return a cheaper plan than the best one that fits, after one that does not; None if there is none near."""
        space, counts = next(key for key, row in self.rows.items() if row is self._best())
        if space is None or (following := space.next(counts)) == counts:
            return None
        plan = self._beyond(space, following, *_FURTHER)
        return None if plan is None else (space, plan)

    def _best(self) -> PlanRow:
        return min((row for row in self.rows.values() if row.answer == YES), key=self._cost)

    def _cost(self, row: PlanRow) -> tuple[float, int]:
        return (row.cost.recompute_flops or 0) + self.byte_flops * row.recompute_moved_bytes, row.recompute_moved_bytes

    def _narrow(self, space: PlanSpace, low: Counts) -> None:
        """Run plans until none is between one that fits and one that does not; `low` fits.

        A gap of at most _FINEST of the layers' FLOPs stays.
        """
        flops, saved_bytes = space.recompute_flops, space.saved_bytes
        least, top = -1, saved_bytes(space.everything) + 1  # FLOPs and bytes of a plan that does not fit
        last = self.row(space, low)
        stride = 0  # how many plans to go on, where the last one fits and has the fewest bytes more than the one before
        for _ in range(_TRIED):
            free = self.simulator.usable_bytes - last.cost.gpu_bytes  # as if each saved byte were one at the peak
            room = (saved_bytes(low) if last.answer == YES else top) + free
            if stride:
                ahead = reduce(lambda plan, _: space.next(plan), range(stride), low)
                room = (saved_bytes(low) + top) // 2 if least >= 0 else saved_bytes(ahead)
            tried = space.filled(max(min(room, top - 1), 0)), space.next(low)
            between = next((plan for plan in tried if flops(low) > flops(plan) > least), None)
            if between is None or (least >= 0 and flops(low) - least <= _FINEST * space.flops):
                break
            last = self.row(space, between)
            if last.answer == YES:
                stride = 4 * stride or 2 if stride or between == tried[1] else 0
                low = between
            else:
                least, top = flops(between), saved_bytes(between)

    def leaner(self) -> Iterator[PlanRow]:
        """Yield plans that need less, to the leanest: of all layers alike, and of all products that save as much."""
        if not self.answer.lists or self.answer.answer != YES:
            return
        products = self.space.products
        rates = [product.flops / product.output_bytes for _, product in products]
        ends = [number for number in range(1, len(rates)) if rates[number - 1] > rates[number]]
        plans = [tuple(costs.layers * (number < end) for number, (costs, _) in enumerate(products)) for end in ends]
        above = (self.answer.cost.recompute_flops or 0) // self.run_config.accumulate
        leaner = [plan for plan in plans if self.space.recompute_flops(plan) > above][-_LEANER:]
        for plan in (*reversed(leaner), self.space.filled(0)):
            row = self.row(self.space, plan)
            if row.peak_bytes < self.answer.peak_bytes and row.answer == YES:
                yield self._timed(row)

    def row(self, space: PlanSpace | None, counts: Counts) -> PlanRow:
        """Return a plan with its memory; without a space the run without recomputation."""
        if (space, counts) in self.rows:
            return self.rows[space, counts]
        progress(f"{self.stage} plan {len(self.rows) + 1}")
        lists = space.in_lists(counts) if space else ()
        run = replace(self.run_config, checkpointing=strategy_text(lists))
        recomputed = run.accumulate * space.recompute_flops(counts) if space else 0
        plain = replace(run, checkpointing=NONE)
        flops = self.simulator.flops(plain)
        logits_flops = flops - self.simulator.flops(plain.changed(loss_chunks=0))  # recomputed by a loss in chunks
        self.rows[space, counts] = PlanRow(
            checkpointing=run.checkpointing,
            batch=run.batch,
            accumulate=run.accumulate,
            cost=self.simulator.cost(run, recompute_flops=recomputed + logits_flops, step_flops=flops + recomputed),
            recompute_share=recomputed / (space.flops * run.accumulate) if space and space.flops else 0.0,
            recompute_moved_bytes=run.accumulate * space.moved_bytes if space else 0,
            changes=self.changes,
            lists=lists,
        )
        return self.rows[space, counts]

    def _timed(self, row: PlanRow) -> PlanRow:
        run = replace(self.run_config, checkpointing=row.checkpointing)
        return replace(row, cost=self.simulator.timed(row.cost, run))


def plan_report(
    simulator: Simulator,
    first: RunConfig,
    *,
    changes: Sequence[dict[str, Any]] = (),
    changed_run: Callable[[dict[str, Any]], RunConfig] | None = None,
    batch_total: int | None = None,
) -> PlanReport:
    """Return the plan with the least time of a step that fits under the simulator's limit.

    Without measured times it has the fewest recompute FLOPs. `changed_run` returns the run with each of the `changes`;
    they are tried if no run before them fits without recomputation, and are the answer if no run without them fits.
    With `batch_total` the micro-batch is the largest one that needs none, else the smallest, or a larger one that takes
    less time. Raises SelectionError for a model without products to save, and for inference.
    """
    searches: list[PlanSearch] = []
    notes: list[Note] = []
    gpu, space_of = simulator.gpu, cache(_space)
    for number, change in enumerate(({}, *changes)):
        try:
            run = changed_run(change) if change and changed_run else first
            other = simulator.with_options(lora=change["lora"]) if "lora" in change else simulator
            search = PlanSearch(other, for_gpu(run, gpu), space_of, change)
            search.stage = f"change {number} of {len(changes)}:" if change else search.stage
            searches.append(_sized(search, batch_total))
        except BertscopeError as error:
            if not change:
                raise
            notes.append(Note(key="plan_unchanged", values={"names": ", ".join(change), "why": Reason(error.marked)}))
        if searches[-1].plain.answer == YES:
            break
    fitting = [search.answer for search in searches if search.answer.answer == YES]
    is_timed = bool(fitting) and all(map(_seconds, fitting))
    best = min(searches, key=lambda search: search.rank(is_timed))
    rest = [search.answer for search in searches if search is not best]
    rows = [best.answer, *best.leaner(), *rest]
    if is_timed:
        rows.sort(key=lambda row: (row.answer != YES, bool(row.changes), not row.keeps_result, _seconds(row) or 0.0))
    facts, most = simulator.facts(first), 0
    if not fitting and first.batch > 1 and batch_total is None:
        most = simulator.largest_batch(replace(best.run_config, checkpointing=best.answer.checkpointing))
    return PlanReport(
        subject=replace(facts.subject, obtained="estimated"),
        units=facts.units,
        run=for_gpu(first, gpu).changed(checkpointing=NONE),
        budget_bytes=simulator.limit_bytes or 0,
        gpu=gpu,
        batch_total=batch_total,
        objective=TIME if is_timed else FLOPS,
        rows=tuple(rows),
        cheaper=best.cheaper,
        layers_flops=best.space.flops,
        front=tuple(
            PlanPoint(checkpointing=row.checkpointing, cost=row.cost, recompute_share=row.recompute_share)
            for row in sorted(best.rows.values(), key=attrgetter("peak_bytes"))
        ),
        tried=sum(len(search.rows) for search in searches),
        largest_batch=most,
        notes=tuple(notes),
    )


def _space(simulator: Simulator, run_config: RunConfig) -> PlanSpace:
    from bertscope.memory.layer_operators import layer_costs

    return PlanSpace(tuple(layer_costs(simulator.source, replace(run_config, parallelism=ONE_PROCESS))))


def _sized(search: PlanSearch, batch_total: int | None) -> PlanSearch:
    """Return the search with the micro-batch of a batch of an optimizer step, after it."""
    run = search.run_config
    if run.mode != TRAINING:
        raise SelectionError(f"a plan is for training; {run.mode} saves nothing for a backward pass")
    if run.reentrant:
        raise SelectionError("reentrant checkpointing saves no single operators; leave reentrant out")
    total = batch_total or 0
    most = rows(RunConfig)["accumulate"].below
    sizes = [size for size in range(min(total, LARGEST_BATCH), 0, -1) if total % size == 0 and total // size < most]
    if total and not sizes:
        raise SelectionError(f"batch_total {total:,} cannot be split into fewer than {int(most):,} of them")
    runs = [replace(run, batch=size, accumulate=total // size) for size in sizes] or [run]
    searches = [replace(search, run_config=sized, rows={}) for sized in runs]
    number = next((number for number, sized in enumerate(searches) if sized.plain.answer == YES), len(searches) - 1)
    best = searches[number]
    for larger in reversed(searches[:number] if _seconds(best.answer) else []):
        if larger.rank(is_timed=True) >= best.rank(is_timed=True):
            break
        best = larger
    return best


def _seconds(row: PlanRow) -> float | None:
    time = row.cost.time
    return time.step.low_seconds if time and time.is_predicted else None


def check_plan(source: ModelSource, report: PlanReport) -> None:
    """Raise SelectionError if a plan is for another model or attention, or if its numbers are no longer the same.

    A plan that was made with other versions runs again.
    """
    row, simulator, planned = report.rows[0], Simulator(source), report.subject
    current = simulator.facts(report.run).subject
    for name in ("architecture", "attention", "config"):
        pair = [getattr(subject, name) for subject in (planned, current)]
        if all(isinstance(config, dict) for config in pair):
            keys = (key for key in pair[0] | pair[1] if pair[0].get(key) != pair[1].get(key))
            pair = [f"{key} {config.get(key)}" for key in islice(keys, 1) for config in pair] or ["", ""]
        if pair[0] != pair[1]:
            raise SelectionError(
                f"the plan is for another {name}: {pair[0]}, and this model has {pair[1]}; make a plan for it"
            )
    if (lora := row.changes.get("lora")) and not current.lora:
        raise SelectionError(f"the plan is for adapters: give them with {name_of('lora')} {lora}")
    versions = ("bertscope_version", "torch_version", "implementation")
    if all(getattr(planned, name) == getattr(current, name) for name in versions):
        return
    planned_by = f"bertscope {planned.bertscope_version}, torch {planned.torch_version}"
    changed = {name: value for name, value in row.changes.items() if name != "lora"}
    run = replace(report.run, batch=row.batch, accumulate=row.accumulate).changed(**changed)
    operators = {row_list.path: row_list.operators for row_list in _space(simulator, run).lists}
    for row_list in row.lists:
        names = {(item.name, item.number, item.module) for item in operators.get(row_list.path, ())}
        for item in row_list.saved:
            if (item.name, item.number, item.module) not in names:
                raise SelectionError(
                    f"the plan was made by {planned_by}, and now the layers of {row_list.path} call no "
                    f"{item.name}.{item.number} in {item.module}; make it again"
                )
    peak = simulator.trace(run.changed(checkpointing=row.checkpointing)).peak_bytes
    if peak != row.peak_bytes:
        raise SelectionError(
            f"the plan was made by {planned_by} for a peak of {row.peak_bytes:,} bytes, which is {peak:,} now; make it "
            "again"
        )
