"""Trace a deep model from a shallow one, and a step in another training loop.

`tracing.repeat` says which layers may be equal. Only numbers are repeated: a kind of block, or a place, is known by its
layer and by what all layers have in common.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

from bertscope.memory.kernel_rules import SUM
from bertscope.memory.trace import (
    CAT,
    PREVIOUS,
    RETURN,
    SAVED,
    STACK,
    Block,
    Collective,
    Kind,
    MemoryEvent,
    MemoryTrace,
)
from bertscope.reports.layer_ranges import Copies, LayerRange, Unit
from bertscope.reports.memory import ALL_GATHER, ALL_REDUCE, BROADCAST, EVALUATING, FORWARD, OPTIMIZER
from bertscope.settings.run_config import LOOPS, RunConfig
from bertscope.settings.training import OPTIMIZERS

_STACKED = ((OPTIMIZER, ALL_REDUCE), (OPTIMIZER, ALL_GATHER), (FORWARD, BROADCAST))  # norms, and DDP's buffers
_OLD_BEFORE = (1, 11)  # the version of torch that no longer saves the input of softmax
_SOFTMAX, _LOG_SOFTMAX = "_softmax", "_log_softmax"
_Rest = TypeVar("_Rest")
_Row = TypeVar("_Row")
_Run = tuple[Unit | None, range, list[int]]  # of events: their unit, how far its copies are moved, and their numbers


def with_copies(trace: MemoryTrace, path: str, copies: Copies) -> MemoryTrace:
    """Return the trace with copies of the layers at `path`."""
    return _Repetition(trace, path, copies).trace()


class _Repetition:
    def __init__(self, shallow: MemoryTrace, path: str, copies: Copies) -> None:
        self.shallow, self.copies, self.ranges = shallow, copies, dict(copies)
        self.prefix, self.around = f"{path}.", path.rpartition(".")[0]
        self.rows = list(shallow.kinds)
        self.grown: dict[tuple[int, int], tuple[int, int]] = {}  # bytes and elements of stacks, with few layers and all
        self.split = cache(self._split)  # a trace repeats few paths many times

    def trace(self) -> MemoryTrace:
        """Return the trace with all copies."""
        shallow, changes = self.shallow, self._with_all_norms()
        origins = [(row.block.path, (row.block[0], row.block[2:], row[1:])) for row in self.rows]
        kind_of = lambda path, origin: Kind(Block(origin[0], path, *origin[1]), *origin[2])  # noqa: E731
        moved_kind, kinds = self._numbered(origins, kind_of)
        pairs = [(path, (phase, operator)) for phase, path, operator in shallow.places]
        moved_place, places = self._numbered(pairs, lambda path, pair: (pair[0], path, pair[1]))
        held: list[int] = []
        for unit, run in groupby(shallow.held, key=lambda number: self.unit(self.rows[number].block.path)):
            numbers = list(run)  # in the order of the full model, layer after layer
            for layers in self.shifts(unit):
                held += [moved_kind(number, layers) for number in numbers]
        repeated: list[int] = []
        place_of: list[int] = []
        left_bytes = 0  # by the copies
        for unit, moved, numbers in self._runs(changes):
            ran = [(change, max(change, ~change), shallow.place_of[n]) for n in numbers for change in [changes[n]]]
            spans = [self._span(number, unit, moved) for _, number, _ in ran]
            for layers in moved:
                for (change, number, at), (low, high) in zip(ran, spans, strict=True):
                    there = moved_kind(number, min(max(layers, low), high))
                    repeated.append(there if change >= 0 else ~there)
                    place_of.append(moved_place(at, layers))
            sizes = (self.rows[number].size_bytes * (1 if change >= 0 else -1) for change, number, _ in ran)
            left_bytes += (len(moved) - 1) * sum(sizes)
        if left_bytes:
            here = [moved_kind(change, 0) if change >= 0 else ~moved_kind(~change, 0) for change in changes]
            repeated, place_of = _with_all_frees(here, repeated, place_of)
        calls = [(copy, slope) for call, slope in shallow.calls for copy in self._calls(call)]
        return replace(shallow, kinds=kinds, held=held, changes=repeated, places=places, place_of=place_of, calls=calls,
                       other_held=held, other_changes=repeated)  # fmt: skip

    def _numbered(
        self, rows: Iterable[tuple[str, _Rest]], make: Callable[[str, _Rest], _Row]
    ) -> tuple[Callable[[int, int], int], list[_Row]]:
        """Return the number of a row that is moved by some layers, and the rows by number, which grow with each ask.

        A row has a path and a rest, which `inputs` joins.
        """
        numbers: dict[Any, int] = {}
        numbered: list[_Row] = []
        parts = [(*self.split(path), rest) for path, rest in rows]

        @cache
        def number(row: int, layers: int) -> int:
            layer, inner, rest = parts[row]
            key = (None if layer is None else layer + layers, inner, rest)
            if key not in numbers:
                numbers[key] = len(numbered)
                numbered.append(make(inner if layer is None else f"{self.prefix}{key[0]}{inner}", rest))
            return numbers[key]

        return number, numbered

    def _split(self, path: str) -> tuple[int | None, str]:
        """Return the layer of a path, None outside all, and the path without it."""
        name, dot, rest = path.removeprefix(self.prefix).partition(".")
        layers = LayerRange.parse(name) if path.startswith(self.prefix) else None
        return (layers.first, dot + rest) if layers else (None, path)

    def unit(self, path: str) -> Unit | None:
        """Return the unit that a path lies in."""
        layer, _ = self.split(path)
        return None if layer is None else self.copies[layer][0]

    def shifts(self, unit: Unit | None, before: Unit | None = None) -> range:
        """Return the layers to move each copy of the events by, in order; in backward the last copy comes first."""
        distances = range(1) if unit is None else self.ranges[unit]
        return distances[::-1] if unit and before and before > unit else distances

    def _span(self, kind: int, unit: Unit | None, moved: range) -> tuple[int, int]:
        """Return how far a kind is moved at least and at most: as its unit, less if it is in another run."""
        first, last = sorted((moved[0], moved[-1]))
        home = self.unit(self.rows[kind].block.path)
        if home and unit and home[0] != unit[0]:
            low, high = self.ranges[home][0], self.ranges[home][-1]
            first, last = min(max(first, low), high), min(max(last, low), high)
        return first, last

    def _runs(self, changes: list[int]) -> Iterator[_Run]:
        for phase, start, stop in self.shallow.layout.phases:
            before, is_forward = None, phase in (FORWARD, EVALUATING)  # a second forward pass begins at the first layer
            for unit, run in groupby(self._with_units(changes, start, stop), key=itemgetter(0)):
                yield unit, self.shifts(unit, None if is_forward else before), [number for _, number in run]
                before = unit if unit is not None else before

    def _with_units(self, changes: list[int], start: int, stop: int) -> Iterator[tuple[Unit | None, int]]:
        """Yield each event with its module's unit; outside its block's encoder; else of the event before.

        What is freed outside all modules is no event before: autocast frees its weights in any order.
        """
        unit = None
        for number in range(start, stop):
            change, path = changes[number], self.shallow.layout.places[number][1]
            unit_here, is_outside = self.unit(path), path != self.around
            if unit_here is None and is_outside:
                unit_here = self.unit(self.rows[max(change, ~change)].block.path)
            if is_outside and change < 0 and not path:
                yield unit_here, number
                continue
            unit = unit if unit_here is None else unit_here
            yield unit, number

    def _with_all_norms(self) -> list[int]:
        """Return the changes; a stack of a number for each parameter, such as norms to clip, grows with the copies.

        So do DDP's buffers in one tensor, and the results of operators on either. Events of no bytes before it name
        the parameters or buffers.
        """
        stacked: list[Block] = []
        numbers: dict[int, int] = {}
        repeated = []
        for change in self.shallow.changes:
            number = max(change, ~change)
            block, size = self.rows[number].block, self.rows[number].size_bytes
            if block.operator in (STACK, CAT) and not size:
                stacked.append(block)
            elif block.operator in (STACK, CAT) and stacked:
                few = sum(part.shape[0] for part in stacked)
                many = sum(part.shape[0] * len(self.shifts(self.unit(part.path))) for part in stacked)
                if many != few and not block.path and block.shape == (few,):
                    self.grown[size, few] = size // few * many, many
                stacked = []
            if not block.path and block.shape and (size, block.shape[0]) in self.grown:
                many, count = self.grown[size, block.shape[0]]
                if number not in numbers:
                    numbers[number] = len(self.rows)
                    block = block._replace(shape=(count, *block.shape[1:]))
                    self.rows.append(self.rows[number]._replace(size_bytes=many, block=block))
                number = numbers[number]
            repeated.append(number if change >= 0 else ~number)
        return repeated

    def _calls(self, call: Collective) -> Iterator[Collective]:
        for (few, _), (many, _) in self.grown.items():
            if (call.path, call.full_bytes) == ("", few) and (call.phase, call.kind) in _STACKED:
                call = call._replace(full_bytes=many)
                break
        layer, rest = self.split(call.path)
        for moved in self.shifts(self.unit(call.path)):
            yield call if layer is None else call._replace(path=f"{self.prefix}{layer + moved}{rest}")


def _with_all_frees(ran: list[int], changes: list[int], places: list[int]) -> tuple[list[int], list[int]]:
    """Return the repeated changes, and the frees that their blocks lack next to an equal one.

    They belong to no layer: reentrant checkpointing frees the random states of all layers after the last one.
    """
    lacking: Counter[int] = Counter()
    for sign, counted in ((1, changes), (-1, ran)):
        for change in counted:
            lacking[max(change, ~change)] += sign if change >= 0 else -sign
    lacking = +lacking
    times = [1 if change >= 0 else 1 + lacking.pop(~change, 0) for change in changes]
    return (
        [change for change, count in zip(changes, times, strict=True) for _ in range(count)],
        [number for number, count in zip(places, times, strict=True) for _ in range(count)],
    )


def ordered_frees(events: Iterable[MemoryEvent]) -> list[MemoryEvent]:
    """Return the events with consecutive frees, whose order has no meaning, sorted."""
    runs = groupby(events, key=lambda event: event.size_bytes < 0)
    return [event for are_frees, run in runs for event in (sorted(run) if are_frees else run)]


def same_events(one: MemoryTrace, other: MemoryTrace) -> bool:
    """Compare two traces, ignoring the order of consecutive frees and of collectives."""
    are_equal = sorted(one.state) == sorted(other.state) and sorted(one.collectives) == sorted(other.collectives)
    return are_equal and ordered_frees(one.events) == ordered_frees(other.events)


# ---- the same step in another loop ----


def in_loop(trace: MemoryTrace, run_config: RunConfig) -> MemoryTrace:
    """Return the trace in the run's loop, from one in which outputs and loss are freed as soon as possible.

    The blocks that a variable of the loop refers to are freed when the next forward has returned, not before. Until
    then the blocks of the step before are state.
    """
    kinds, places = list(trace.kinds), [*trace.places, (FORWARD, "", "")]
    waiting = [number for number in trace.held if kinds[number].block.part == "inputs"] * run_config.waiting_batches
    positions = trace.layout.places
    returns = [event for event, where in enumerate(positions) if where[2] == RETURN]  # without a mark its allocations
    forward = (event for event, where in enumerate(positions) if where[0] == FORWARD)
    returns = returns or [event for event in forward if trace.changes[event] >= 0]
    returned = (returns or [0])[-1]

    @cache
    def changed(number: int, variable: str, part: str) -> int:
        kind = trace.kinds[number]
        kinds.append(kind._replace(block=kind.block._replace(variable=variable, part=part or kind.block.part)))
        return len(kinds) - 1

    def rows(loop: str) -> tuple[list[int], list[int], list[int]]:
        ends: dict[int, int | None] = {}  # what the allocations and frees of special kinds become; None for nothing
        previous: dict[int, int] = {}
        for number, (block, size, *_) in enumerate(trace.kinds):
            if block.variable in LOOPS[loop]:
                ends[number], ends[~number] = changed(number, block.variable, SAVED), None
                previous[number] = ~changed(number, PREVIOUS + block.variable, SAVED)
            elif block.variable:
                ends[number] = changed(number, "", "")
                ends[~number] = ~changed(number, "", "")
            elif not (size or block.dtype):  # a mark
                ends[number] = None
        freed = [previous[change] for change in trace.changes if change in previous]
        changes: list[int] = []
        place_of: list[int] = []
        for event, change in enumerate(trace.changes):
            if (end := ends.get(change, change)) is not None:
                changes.append(end)
                place_of.append(trace.place_of[event])
            if event == returned:
                changes += freed
                place_of += [len(trace.places)] * len(freed)
        return [*trace.held, *(~number for number in freed), *waiting], changes, place_of

    held, changes, place_of = rows(run_config.loop)
    other_held, other_changes, _ = rows(run_config.other_loop)
    trace = replace(trace, kinds=kinds, held=held, changes=changes, places=places, place_of=place_of,
                    other_held=other_held, other_changes=other_changes)  # fmt: skip
    trace = _of_version(trace, run_config)
    return _zeroed_between(trace) if run_config.zeroes_between and not run_config.has_gradients_before else trace


def with_evaluation(trace: MemoryTrace, evaluation: MemoryTrace) -> MemoryTrace:
    """Return a training step and the evaluation after it, whose model exists already."""
    inputs = [number for number in evaluation.held if evaluation.kinds[number].block.part == "inputs"]
    order = [*((number, -1) for number in inputs), *zip(evaluation.changes, evaluation.place_of, strict=True)]
    order += [(~number, -1) for number in inputs]
    first, first_place = len(trace.kinds), len(trace.places) + 1
    changes = [change + first if change >= 0 else change - first for change, _ in order]
    return replace(
        trace, kinds=trace.kinds + evaluation.kinds, changes=trace.changes + changes,
        other_changes=trace.other_changes + changes, places=[*trace.places, (EVALUATING, "", ""), *evaluation.places],
        place_of=trace.place_of + [first_place + at for _, at in order],
    )  # fmt: skip


def _of_version(trace: MemoryTrace, run_config: RunConfig) -> MemoryTrace:
    """Return the step of the run's version of torch, in which some blocks exist twice or not at all.

    Before 1.11 eager attention saves the inputs of softmax too, each with its output's bytes, and so does log_softmax
    (pull request pytorch/pytorch 65242). A linear layer adds its bias to the product (Linear.cpp of torch 1.8), so
    backward sums the bias's gradient before it has the other gradients: the buffer of that sum is part of no peak.
    Those versions have no other attention; a step with another one stays as it is.
    """
    version, row = run_config.torch_version, OPTIMIZERS.get(run_config.optimizer)
    blocks = [kind.block for kind in trace.kinds]
    is_old = version < _OLD_BEFORE and any(block.operator == _SOFTMAX for block in blocks)
    has_two_lists = row is not None and version < row.one_list_from

    def copies(block: Block) -> int:
        if is_old and block.dtype == SUM:
            return 0
        is_input = is_old and block.part == SAVED and block.operator in (_SOFTMAX, _LOG_SOFTMAX)
        return 1 + (is_input or (has_two_lists and block.operator == "_foreach_sqrt"))

    times = list(map(copies, blocks))
    pairs = zip(trace.changes, trace.place_of, strict=True)
    changes, place_of = zip(*(pair for pair in pairs for _ in range(times[max(pair[0], ~pair[0])])), strict=True)
    return replace(trace, changes=list(changes), place_of=list(place_of))


def _zeroed_between(trace: MemoryTrace) -> MemoryTrace:
    """Return the trace in a loop that frees the gradients of the step before between forward and backward."""
    kinds, is_update = list(trace.kinds), [phase == OPTIMIZER for phase, _, _ in trace.places]
    left: list[int] = []  # the gradients that forward and backward leave
    changes, place_of = [], []
    for change, at in zip(trace.changes, trace.place_of, strict=True):
        number = max(change, ~change)
        if kinds[number].block.part == "gradients":
            if change >= 0:
                left.append(number)
            elif is_update[at]:
                continue
            else:
                left.remove(number)
        changes.append(change)
        place_of.append(at)
    previous: dict[int, int] = {}  # a gradient -> the one of the step before
    for number in dict.fromkeys(left):
        kind, previous[number] = kinds[number], len(kinds)
        kinds.append(kind._replace(block=kind.block._replace(variable=f"{PREVIOUS}gradient")))
        kinds[number] = kind._replace(block=kind.block._replace(variable="gradient"))
    begun = next((event for event, at in enumerate(place_of) if trace.places[at][0] != FORWARD), len(changes))
    held = [previous[number] for number in left]
    changes[begun:begun] = [~number for number in held]
    place_of[begun:begun] = [len(trace.places)] * len(held)
    held, places = [*trace.held, *held], [*trace.places, (FORWARD, "", "")]
    return replace(trace, kinds=kinds, held=held, changes=changes, place_of=place_of, places=places)
