"""`plan`: the operators to keep for backward so that a step fits under a limit with the fewest FLOPs again.

A layer may keep the output of each of its matrix products, or compute it again. The products are taken in the order of
the FLOPs that a kept byte saves, layer by layer from the last one, until the memory is full: this meets the front of
all sets of products (all 256 sets of a layer of BERT were tried), and layers that keep more than others fill what is
left. The last layers keep more, since their backward pass comes first. A layer that is kept whole needs more bytes than
one that keeps all its products, and saves no further FLOPs: only the last layer is, where its recomputation would need
the same memory at once. Each plan that is shown was run on fake tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bertscope.analyses.memory.fit import Fitter, fitter_for
from bertscope.analyses.memory.steps import Steps
from bertscope.analyses.memory.summary import on_card
from bertscope.errors import BertscopeError, SelectionError, Text
from bertscope.gpus import Gpu
from bertscope.progress import progress
from bertscope.reports.base import Note
from bertscope.reports.memory import YES
from bertscope.reports.plan import PlanList, PlanOperator, PlanPoint, PlanReport, PlanRow
from bertscope.settings.checkpointing import NONE, Kept, kept_text
from bertscope.settings.parallelism import ONE_PROCESS
from bertscope.settings.run_config import TRAINING, RunConfig
from bertscope.sources.model_source import ModelSource

if TYPE_CHECKING:
    from bertscope.analyses.memory.layer_operators import LayerCosts

# A product that some layers of a list keep and others do not makes a further kind of layer to run. After one of this
# share of the layers' FLOPs, 1 % of those of a step, no further product fills what is left.
_FINE = 0.03
_COARSE = 0.1  # the gap, of the layers' FLOPs, at which the two kinds of plans are compared
_FINEST = 0.005
_TRIED = 16  # plans that a search runs at most
_LEANER = 3  # rows below the answer
Counts = tuple[int, ...]  # for each product in order: the number of layers, the last ones, that keep it


@dataclass(frozen=True)
class PlanSpace:
    """The plans for the layers of a model with these costs."""

    lists: tuple[LayerCosts, ...]

    @cached_property
    def products(self) -> tuple[tuple[LayerCosts, PlanOperator], ...]:
        """Return the products that would run again, those that save the most FLOPs for a byte first."""
        found = [(own, product) for own in self.lists for product in own.operators if product.again]
        return tuple(sorted(found, key=lambda item: (-item[1].flops / item[1].kept_bytes, -item[1].kept_bytes)))

    @property
    def nothing(self) -> Counts:
        """Return the plan that keeps no product."""
        return (0,) * len(self.products)

    @property
    def everything(self) -> Counts:
        """Return the plan that keeps all products."""
        return tuple(own.recomputed for own, _ in self.products)

    @property
    def with_last_whole(self) -> PlanSpace | None:
        """Return the plans that keep the layer whole whose backward pass comes first; None if it is the only one."""
        *others, last = self.lists
        return PlanSpace((*others, replace(last, whole=1))) if last.layers > 1 else None

    def filled(self, room_bytes: int) -> Counts:
        """Return the plan that keeps products of so many bytes."""
        counts = []
        for own, product in self.products:
            count = max(min(own.recomputed, room_bytes // product.kept_bytes), 0)
            is_last = count < own.recomputed and product.flops <= _FINE * self.flops
            room_bytes = 0 if is_last else room_bytes - count * product.kept_bytes
            counts.append(count)
        return tuple(counts)

    def kept_bytes(self, counts: Counts) -> int:
        """Return the bytes of all kept outputs."""
        return sum(count * product.kept_bytes for count, (_, product) in zip(counts, self.products, strict=True))

    def flops_again(self, counts: Counts) -> int:
        """Return the FLOPs of matrix products of a forward and backward pass that run again."""
        pairs = zip(counts, self.products, strict=True)
        always = sum(own.recomputed * own.always_flops for own in self.lists)
        return always + sum((own.recomputed - count) * product.flops for count, (own, product) in pairs)

    @property
    def flops(self) -> int:
        """Return the FLOPs of the forward pass of all layers."""
        return sum(own.layers * own.flops for own in self.lists)

    @property
    def moved_bytes(self) -> int:
        """Return the bytes that the other operators move again."""
        return sum(own.recomputed * own.moved_bytes for own in self.lists)

    def leanest(self, flops: int) -> Counts:
        """Return the plan with the fewest bytes that runs fewer FLOPs again; without one that of all products."""
        most = self.kept_bytes(self.everything)
        size = bisect_left(range(most), True, key=lambda size: self.flops_again(self.filled(size)) < flops)
        return self.filled(size)

    def next(self, counts: Counts) -> Counts:
        """Return the plan with the fewest bytes more that runs fewer FLOPs again; the same if there is none."""
        kept, flops = self.kept_bytes(counts), self.flops_again(counts)
        for size in sorted({product.kept_bytes for _, product in self.products}):
            found = self.filled(kept + size)
            if self.flops_again(found) < flops:
                return found
        return self.everything if flops else counts

    def in_lists(self, counts: Counts) -> tuple[PlanList, ...]:
        """Return what each list of layers keeps; layers that keep the same are one item."""
        found: list[PlanList] = []
        for own in self.lists:
            pairs = [(count, product) for count, (other, product) in zip(counts, self.products, strict=True)
                     if other is own]  # fmt: skip
            kept = [tuple(product for count, product in pairs if number >= own.recomputed - count)
                    for number in range(own.recomputed)]  # fmt: skip
            products = [product for product in own.operators if product.again]
            for operators in dict.fromkeys(kept):
                numbers = tuple(number for number, other in enumerate(kept) if other == operators)
                found.append(
                    PlanList(
                        path=own.path, layers=own.layers, recomputed=numbers,
                        kept=tuple(product for product in products if product in operators),
                        again=tuple(product for product in products if product not in operators),
                        layer_paths=() if _is_numbered(own) else own.layer_paths,
                    )
                )  # fmt: skip
        return tuple(found)


def _is_numbered(own: LayerCosts) -> bool:
    """Return True if the layers of a list have its path and their numbers."""
    return own.layer_paths == tuple(f"{own.path}.{number}" for number in range(own.layers))


def strategy_text(lists: Sequence[PlanList]) -> str:
    """Return the strategy of checkpointing that recomputes these layers so."""
    return kept_text(
        Kept(
            path=own.path, operators=frozenset(f"{product.name}.{product.number}" for product in own.kept),
            layers=None if len(own.recomputed) == own.layers else frozenset(own.recomputed),
        )
        for own in lists
    )  # fmt: skip


@dataclass(eq=False)
class PlanSearch:
    """The search for the cheapest plan of one run that fits."""

    fitter: Fitter
    run_config: RunConfig
    space: PlanSpace
    changes: dict[str, Any]
    rows: dict[tuple[PlanSpace | None, Counts], PlanRow] = field(default_factory=dict)

    def found(self) -> tuple[list[PlanRow], PlanRow | None]:
        """Return the plan that fits with the fewest FLOPs again and leaner ones, and the next cheaper one."""
        plain, lean = self.plain(), self.space.nothing
        if plain.answer == YES:
            return [plain], None
        if not self.space.products:
            raise SelectionError("the model has no layers whose matrix products a plan could keep or compute again")
        if self.row(self.space, lean).answer != YES:
            return [self.row(self.space, lean)], plain
        answer, cheaper = self._cheapest(self.space, lean, plain, _COARSE)
        # When the last layer is recomputed, all that it saves is there, as if it were kept whole.
        for space in filter(None, (self.space.with_last_whole, self.space)):
            better = space.leanest(answer.flops_again // self.run_config.accumulate)
            if answer.flops_again and self.row(space, better).answer == YES:
                answer, cheaper = self._cheapest(space, better, cheaper, _FINEST)
            elif answer.flops_again and space is self.space and better != space.everything:
                cheaper = max(cheaper, self.row(space, better), key=lambda row: row.flops_again)
        return [answer, *self._leaner(answer)], cheaper

    def plain(self) -> PlanRow:
        """Return the run without recomputation."""
        return self.row(None, ())

    def _cheapest(self, space: PlanSpace, low: Counts, cheaper: PlanRow, gap: float) -> tuple[PlanRow, PlanRow]:
        """Return the plan that fits while a cheaper one, which is returned too, does not; `low` fits.

        Between them is no plan, or at most this share of the layers' FLOPs. `cheaper` is one that is known not to fit.
        """
        flops, kept = space.flops_again, space.kept_bytes
        least, top = -1, kept(space.everything) + 1  # FLOPs and bytes of a plan that does not fit
        last = self.row(space, low)
        for turn in range(_TRIED):
            free = self.fitter.budget_bytes - last.card_bytes  # as if each kept byte were one at the peak
            known = kept(low) if last.answer == YES else top
            room = (kept(low) + top) // 2 if turn % 2 else known + free
            tried = space.filled(max(min(room, top - 1), 0)), space.next(low)
            between = next((plan for plan in tried if flops(low) > flops(plan) > least), None)
            if between is None or (least >= 0 and flops(low) - least <= gap * space.flops):
                break
            last = self.row(space, between)
            if last.answer == YES:
                low = between
            else:
                cheaper, least, top = last, flops(between), kept(between)
        return self.row(space, low), cheaper

    def _leaner(self, answer: PlanRow) -> Iterator[PlanRow]:
        """Yield plans that need less, to the leanest: of all layers alike, and of all products that save as much."""
        products = self.space.products
        rates = [product.flops / product.kept_bytes for _, product in products]
        ends = [number for number in range(1, len(rates)) if rates[number - 1] > rates[number]]
        plans = [tuple(own.layers * (place < end) for place, (own, _) in enumerate(products)) for end in ends]
        above = answer.flops_again // self.run_config.accumulate
        leaner = [plan for plan in plans if self.space.flops_again(plan) > above][-_LEANER:]
        for plan in (*reversed(leaner), self.space.nothing):
            row = self.row(self.space, plan)
            if row.peak_bytes < answer.peak_bytes:
                yield row

    def row(self, space: PlanSpace | None, counts: Counts) -> PlanRow:
        """Return a plan with its memory; without a space that of the run without recomputation."""
        key = space, counts
        if key not in self.rows:
            progress(Text("plan {number}", number=len(self.rows) + 1))
            self.rows[key] = self._row(space, counts)
        return self.rows[key]

    def _row(self, space: PlanSpace | None, counts: Counts) -> PlanRow:
        lists = space.in_lists(counts) if space else ()
        run = replace(self.run_config, checkpointing=strategy_text(lists))
        again = run.accumulate * space.flops_again(counts) if space else 0
        answer = self.fitter.answer(run)
        reserved = self.fitter.reserved_bytes(run, is_limited=answer == YES)
        return PlanRow(
            checkpointing=run.checkpointing,
            batch=run.batch,
            accumulate=run.accumulate,
            peak_bytes=self.fitter.trace(run).peak_bytes,
            reserved_bytes=reserved,
            card_bytes=reserved + self.fitter.overhead.context_high_bytes,
            flops_again=again,
            share_again=again / (self.space.flops * run.accumulate) if self.space.flops else 0.0,
            moved_bytes_again=run.accumulate * space.moved_bytes if space else 0,
            step_flops=self.fitter.steps.flops(replace(run, checkpointing=NONE)) + again,
            answer=answer,
            changes=self.changes,
            lists=lists,
        )


@dataclass(frozen=True)
class _Answer:
    """The rows of one run, the answer first, and the next cheaper plan."""

    rows: list[PlanRow]
    cheaper: PlanRow | None
    space: PlanSpace
    tried: list[PlanRow]

    @property
    def rank(self) -> tuple[bool, float, int]:
        """Return what makes an answer better, the smaller the better."""
        first = self.rows[0]
        return first.answer != YES, first.share_again, len(first.changes)


def plan_report(
    source: ModelSource,
    runs: Sequence[tuple[RunConfig, dict[str, Any]]],
    budget: int | Gpu,
    *,
    batch_total: int | None = None,
    context_bytes: int | None = None,
) -> PlanReport:
    """Return the plan with the fewest FLOPs again that fits in a budget of bytes or on a GPU.

    `runs` has the run as it is asked for, then others, each with what it changes, which are tried if no run before
    them fits without recomputation. With `batch_total` the micro-batch is the largest one that needs none, else the
    smallest. Raises SelectionError for a model without products to keep, and for inference.
    """
    (first, _), answers, notes = runs[0], [], []
    asked, card = fitter_for(source, first, budget, context_bytes, {})
    for run, changes in runs:
        try:
            own = source.with_options(lora=changes["lora"]) if "lora" in changes else source
            fitter = fitter_for(own, run, budget, context_bytes, {})[0] if changes else asked
            answers.append(_answer(own, on_card(run, card), fitter, changes, batch_total))
        except BertscopeError as error:
            if not changes:
                raise
            notes.append(Note(key="plan_unchanged", values={"names": ", ".join(changes), "why": str(error)}))
        if not answers[-1].rank[1] and answers[-1].rows[0].answer == YES:
            break
    best = min(answers, key=lambda answer: answer.rank)
    others = [answer.rows[0] for answer in answers if answer is not best]
    facts = asked.steps.facts(first.changed(checkpointing=NONE))
    return PlanReport(
        subject=replace(facts.subject, obtained="estimated"),
        units=facts.units,
        run=on_card(first, card).changed(checkpointing=NONE),
        budget_bytes=asked.budget_bytes,
        card=card,
        batch_total=batch_total,
        rows=(*best.rows, *others),
        cheaper=best.cheaper,
        layers_flops=best.space.flops,
        front=tuple(_point(row) for row in sorted(best.tried, key=lambda row: row.peak_bytes)),
        tried=sum(len(answer.tried) for answer in answers),
        notes=tuple(notes),
    )


def _answer(
    source: ModelSource, run: RunConfig, fitter: Fitter, changes: dict[str, Any], batch_total: int | None
) -> _Answer:
    """Return the plans of one run."""
    if run.mode != TRAINING:
        raise SelectionError("a plan is for training; {mode} keeps nothing for a backward pass", mode=run.mode)
    if run.reentrant:
        raise SelectionError("reentrant checkpointing keeps no operators; leave reentrant out")
    from bertscope.analyses.memory.layer_operators import layer_costs

    space = PlanSpace(tuple(layer_costs(source, replace(run, parallelism=ONE_PROCESS))))
    total = batch_total or run.batch
    sizes = [size for size in range(total, 0, -1) if total % size == 0] if batch_total else [total]
    for size in sizes:
        sized = replace(run, batch=size, accumulate=total // size) if batch_total else run
        search = PlanSearch(fitter, sized, space, changes)
        if search.plain().answer == YES or size == sizes[-1]:
            break
    rows, cheaper = search.found()
    return _Answer(rows, cheaper, space, [*search.rows.values()])


def _point(row: PlanRow) -> PlanPoint:
    return PlanPoint(**{item.name: getattr(row, item.name) for item in fields(PlanPoint)})


def check_plan(source: ModelSource, report: PlanReport) -> None:
    """Raise SelectionError if a plan is for another model or attention, or if its numbers are no longer the same.

    A plan that was made with other versions runs again.
    """
    row, steps = report.rows[0], Steps(source)
    facts = steps.facts(report.run.changed(checkpointing=NONE))
    lora = row.changes.get("lora") is not None
    for name in ("architecture", "attention", "config"):
        planned, found = getattr(report.subject, name), getattr(facts.subject, name)
        if planned != found:
            fields = [key for key in planned if planned[key] != found.get(key)] if name == "config" and found else []
            shown = (f"{fields[0]} {planned[fields[0]]}", f"{found[fields[0]]}") if fields else (planned, found)
            raise SelectionError("the plan is for another {name}: {planned}, and this model has {found}; make a plan "
                                 "for it", name=name, planned=shown[0], found=shown[1])  # fmt: skip
    if lora != bool(facts.subject.lora) and lora:
        raise SelectionError("the plan is for adapters: give them by --lora {lora}", lora=row.changes["lora"])
    versions = ("bertscope_version", "torch_version", "implementation")
    if all(getattr(report.subject, name) == getattr(facts.subject, name) for name in versions):
        return
    from bertscope.analyses.memory.layer_operators import layer_costs

    made = f"bertscope {report.subject.bertscope_version}, torch {report.subject.torch_version}"
    changed = {name: value for name, value in row.changes.items() if name != "lora"}
    run = replace(report.run, batch=row.batch, accumulate=row.accumulate).changed(**changed)
    costs = {own.path: own.operators for own in layer_costs(source, replace(run, parallelism=ONE_PROCESS))}
    for own in row.lists:
        names = {(product.name, product.number, product.module) for product in costs.get(own.path, ())}
        if gone := [item for item in own.kept if (item.name, item.number, item.module) not in names]:
            raise SelectionError("the plan was made by {made}, and now the layers of {path} call no {name}.{number} in "
                                 "{module}; make it again", made=made, path=own.path, name=gone[0].name,
                                 number=gone[0].number, module=gone[0].module)  # fmt: skip
    peak = steps.trace(run.changed(checkpointing=row.checkpointing)).peak_bytes
    if peak != row.peak_bytes:
        raise SelectionError("the plan was made by {made} for a peak of {planned:,} bytes, which is {peak:,} now; make "
                             "it again", made=made, planned=row.peak_bytes, peak=peak)  # fmt: skip
