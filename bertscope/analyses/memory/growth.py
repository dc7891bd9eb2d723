"""The memory trace of a step at any batch, from those of two batches.

Each size grows with the batch by a fixed number of bytes; that of a kernel's scratch follows a rule (scratch_rules.py)
whose numbers do, and a matrix of all pairs is the product of its dimensions. The two batches differ by a large prime: a
minimum or a rounded quotient gives no whole number of bytes for a sequence, or fewer than 0 bytes without any.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import accumulate, groupby
from math import prod
from typing import Any, NamedTuple

from bertscope.analyses.memory.caching_allocator import Requests
from bertscope.analyses.memory.events import RETURN, Block, Layout, MemoryEvent, MemoryTrace, matched, rounded
from bertscope.analyses.memory.kernels.scratch_rules import RULES
from bertscope.analyses.parallel.collectives import Collective
from bertscope.reports.memory import BACKWARD, FORWARD, OPTIMIZER
from bertscope.settings.run_config import LOOPS, RunConfig

LARGEST_BATCH, _MOST_LINES = 2**20, 8
SMALLEST, FAR = 2, 2 + 1019  # some operators treat a batch of 1 differently
_PREVIOUS, _KEPT = "previous ", "activations"
_Place = tuple[str, str, str]  # phase, module and operator


class GrowingNumber(int):
    """A number at the batch SMALLEST, with what each further sequence adds."""

    slope: int

    @classmethod
    def of(cls, number: int, slope: int) -> GrowingNumber:
        """Return the line; SMALLEST sequences have `number`."""
        line = cls(number)
        line.slope = slope
        return line

    def __neg__(self) -> GrowingNumber:
        return GrowingNumber.of(-int(self), -self.slope)


def grown(one: MemoryTrace, other: MemoryTrace) -> MemoryTrace | None:
    """Return the trace at the batch SMALLEST with lines as its numbers, from the traces there and at FAR.

    None if their events differ, or if a size does not grow evenly. Consecutive frees have no order: if it differs, they
    are compared in that of their allocations.
    """
    if len(one.state) != len(other.state) or len(one.events) != len(other.events):
        return None
    for order in (lambda trace: range(len(trace.events)), _by_allocation):
        with suppress(ValueError):
            return _grown(one, other, zip(order(one), order(other), strict=True))
    return None


def _grown(one: MemoryTrace, other: MemoryTrace, pairs: Iterable[tuple[int, int]]) -> MemoryTrace:
    """Return the trace with lines from pairs of events; raises ValueError for a pair without one."""
    state = [(_block(a, b), _line(size, more)) for (a, size), (b, more) in zip(one.state, other.state, strict=True)]
    events = {number: _event(one.events[number], other.events[far]) for number, far in pairs}
    calls = {}
    for a, b in zip(sorted(one.collectives), sorted(other.collectives), strict=True):
        _same(a._replace(full_bytes=0), b._replace(full_bytes=0))
        calls[a] = a._replace(full_bytes=_line(a.full_bytes, b.full_bytes))
    return replace(other, state=tuple(state), events=tuple(events[number] for number in range(len(events))),
                   collectives=tuple(calls[call] for call in one.collectives))  # fmt: skip


def _by_allocation(trace: MemoryTrace) -> Iterator[int]:
    """Yield the numbers of the events, of consecutive frees of a phase in the order of their allocations."""
    before = [MemoryEvent(size, block, "", "", "") for block, size in trace.state]
    made = {id(event): number for event, number in matched([*before, *trace.events])}

    def freed(number: int) -> str:
        """Return the phase of a free whose bytes are 0 at no batch; else an empty text."""
        event = trace.events[number]
        return event.phase if event.size_bytes < 0 and event.block.dtype not in RULES else ""

    for are_frees, run in groupby(range(len(trace.events)), key=freed):
        numbers = list(run)
        yield from sorted(numbers, key=lambda number: made.get(id(trace.events[number]), 0)) if are_frees else numbers


def _event(one: MemoryEvent, other: MemoryEvent) -> MemoryEvent:
    """Return the event with lines; raises ValueError if there is none."""
    _same(one[2:], other[2:])
    block = _block(one.block, other.block)
    if block.dtype in RULES:
        return one._replace(block=block)
    size = _size(abs(one.size_bytes), abs(other.size_bytes), block, other.block)
    _same(one.size_bytes < 0, other.size_bytes < 0)
    return MemoryEvent(-size if one.size_bytes < 0 else size, block, *one[2:])


def _size(one: int, other: int, block: Block, other_block: Block) -> int:
    """Return the line of a size; if several dimensions of the block grow, the size must be their product."""
    if sum(map(bool, map(_slope, block.shape))) > 1 and _same(one * prod(other_block.shape), other * prod(block.shape)):
        return GrowingNumber.of(one, 0)
    return _line(one, other)


def _same(one: object, other: object) -> bool:
    if one != other:
        raise ValueError(f"{one} is not {other}")
    return True


def _block(one: Block, other: Block) -> Block:
    """Return the block of both batches, with lines as its dimensions."""
    _same((*one[:3], *one[4:], len(one.shape)), (*other[:3], *other[4:], len(other.shape)))
    return one if one.shape == other.shape else one._replace(shape=tuple(map(_line, one.shape, other.shape)))


def _line(one: int, other: int) -> int:
    """Return the line through both numbers; a number that does not grow as it is."""
    slope, rest = divmod(other - one, FAR - SMALLEST)
    if rest or one < slope * SMALLEST or slope < 0:
        raise ValueError(f"{one} and {other} are on no line")
    return GrowingNumber.of(one, slope) if slope else one


# ---- the numbers of a grown trace in columns ----


class Kind(NamedTuple):
    """The events and the state of one block, with what grows with the batch."""

    block: Block
    size_bytes: int  # at SMALLEST
    slope: int
    dims: tuple[int, ...]  # what a further sequence adds to each dimension; empty if nothing

    @classmethod
    def of(cls, block: Block, size_bytes: int) -> Kind:
        """Return the kind of a block of a grown trace."""
        dims = tuple(_slope(number) for number in block.shape)
        plain = block._replace(shape=tuple(map(int, block.shape)))
        return cls(plain, int(size_bytes), _slope(size_bytes), dims if any(dims) else ())

    @property
    def growth(self) -> Hashable:
        """Return what decides the bytes at each batch."""
        return self[1:3] if self.is_line else (self.block.dtype, self.block.shape, self.dims, self.size_bytes)

    @property
    def is_line(self) -> bool:
        """Return False for scratch, and for a matrix of which two dimensions grow."""
        return self.block.dtype not in RULES and len(self.dims) - self.dims.count(0) < 2

    def bytes_at(self, more: int) -> int:
        """Return the bytes with `more` sequences than SMALLEST, not rounded."""
        if self.is_line:
            return self.size_bytes + more * self.slope
        shape, by_rule = self.block_at(more).shape, RULES.get(self.block.dtype)
        return by_rule(*shape) if by_rule else self.size_bytes * prod(shape) // prod(self.block.shape)

    def block_at(self, more: int) -> Block:
        """Return the block with `more` sequences than SMALLEST."""
        if not self.dims:
            return self.block
        shape = tuple(number + more * slope for number, slope in zip(self.block.shape, self.dims, strict=True))
        return self.block._replace(shape=shape)


def _numbered(trace: MemoryTrace, number: Callable[[Block, int], int]) -> tuple[list[int], list[int]]:
    """Return the numbers of the state's kinds, and those of the events, complements for frees."""
    events: list[int] = []
    for event in trace.events:
        is_free = event.size_bytes < 0
        found = number(event.block, -event.size_bytes if is_free else event.size_bytes)
        if event.block.dtype in RULES:  # maybe of 0 bytes; scratch is freed before anything else is allocated
            is_free = events[-1:] == [found]
        events.append(~found if is_free else found)
    return [number(block, size) for block, size in trace.state], events


def _slope(number: int) -> int:
    return number.slope if isinstance(number, GrowingNumber) else 0


@dataclass(frozen=True)
class MemoryGrowth:
    """The memory of a step in one loop as a function of the batch, from SMALLEST on."""

    kinds: list[Kind]
    state: list[int]  # numbers of kinds
    events: list[int]  # the number of a kind that is allocated, the complement of one that is freed
    places: list[tuple[str, str, str]]
    place_of: list[int]  # of each event
    granule_bytes: int
    traced_layers: int | None
    collectives: list[tuple[Collective, int]]  # at SMALLEST, and what a further sequence adds to the bytes
    other_state: list[int]  # of the same step in another loop, of which only the peak is asked: kinds of these sizes
    other_events: list[int]

    @classmethod
    def of(cls, trace: MemoryTrace) -> MemoryGrowth:
        """Return the growth of a grown trace."""
        numbers: dict[tuple[Any, ...], int] = {}
        kinds: list[Kind] = []
        places: dict[tuple[str, str, str], int] = {}

        def number(block: Block, size: int) -> int:
            """Return the number of the block's kind."""
            lines = map(_slope, (size, *block.shape))
            key = (block, size, *lines) if isinstance(size, GrowingNumber) or block.dtype in RULES else (block, size)
            if key not in numbers:
                numbers[key] = len(kinds)
                kinds.append(Kind.of(block, size))
            return numbers[key]

        state, events = _numbered(trace, number)
        place_of = [places.setdefault(event[2:], len(places)) for event in trace.events]
        calls = [
            (call._replace(full_bytes=int(call.full_bytes)), _slope(call.full_bytes)) for call in trace.collectives
        ]
        return cls(kinds, state, events, list(places), place_of, trace.granule_bytes, trace.traced_layers, calls,
                   state, events)  # fmt: skip

    def in_loop(self, run_config: RunConfig, loop: str) -> MemoryGrowth:
        """Return the growth in this loop, from one in which outputs and loss are freed as soon as possible.

        The blocks that a variable of the loop refers to are freed when the next forward has returned, not before. So
        those of the step before are state, until then.
        """
        kinds, places = list(self.kinds), [*self.places, (FORWARD, "", "")]
        numbers: dict[tuple[int, str], int] = {}

        def changed(number: int, variable: str, part: str = "") -> int:
            """Return the number of the kind with this variable and part."""
            if (number, variable) not in numbers:
                block = kinds[number].block
                numbers[number, variable] = len(kinds)
                kinds.append(kinds[number]._replace(block=block._replace(variable=variable, part=part or block.part)))
            return numbers[number, variable]

        other, inputs = run_config.other_loop, [kind for kind in self.state if kinds[kind].block.part == "inputs"]
        state, events, place_of = self._in_loop(LOOPS[loop], changed)
        other_state, other_events, _ = self._in_loop(LOOPS[other], lambda number, *_: number)  # only of these bytes
        state += inputs * run_config.waiting_batches
        other_state += inputs * run_config.waiting_batches
        return replace(self, kinds=kinds, state=state, events=events, places=places, place_of=place_of,
                       other_state=other_state, other_events=other_events).ordered()  # fmt: skip

    def _in_loop(self, kept: Collection[str], changed: Callable[..., int]) -> tuple[list[int], list[int], list[int]]:
        """Return the state, the events and their places in a loop with these variables."""
        variables = {number: kind.block.variable for number, kind in enumerate(self.kinds)
                     if kind.block.variable or not (kind.size_bytes or kind.block.dtype)}  # fmt: skip
        last = self._end_of_forward if self.events else -1
        wanted = {*variables, *(~kind for kind in variables)}
        special = sorted({last, *(number for number, event in enumerate(self.events) if event in wanted)} - {-1})
        blocks = [kind for number in special if (kind := self.events[number]) >= 0 and variables.get(kind) in kept]
        previous = [changed(kind, _PREVIOUS + variables[kind], _KEPT) for kind in blocks]
        events: list[int] = []
        place_of: list[int] = []
        begun = 0  # events before it are done
        for number in special:
            events += self.events[begun:number]
            place_of += self.place_of[begun:number]
            event, begun = self.events[number], number + 1
            kind = max(event, ~event)
            variable = variables.get(kind, "")
            if variable in kept and event >= 0:
                events.append(changed(kind, variable, _KEPT))
            elif variable and variable not in kept:
                events.append(changed(kind, "") if event >= 0 else ~changed(kind, ""))
            elif kind not in variables:
                events.append(event)
            place_of += [self.place_of[number]] * (len(events) - len(place_of))
            if number == last:
                events += (~kind for kind in previous)
                place_of += [len(self.places)] * len(previous)
        return [*self.state, *previous], events + self.events[begun:], place_of + self.place_of[begun:]

    @property
    def _end_of_forward(self) -> int:
        """Return the number of the event at which forward returns: its mark, else its last allocation."""
        returns = {number for number, place in enumerate(self.places) if place[2] == RETURN}
        forward = {number for number, place in enumerate(self.places) if place[0] == FORWARD}
        found = [number for number, place in enumerate(self.place_of) if place in returns]
        found = found or [number for number, place in enumerate(self.place_of)
                          if place in forward and self.events[number] >= 0]  # fmt: skip
        return (found or [0])[-1]

    def ordered(self) -> MemoryGrowth:
        """Return the growth with consecutive frees of autocast's copies in the order of their allocations.

        Their own order, when autocast ends after forward or after a recomputed layer, changes from run to run.
        """
        phases = [place[0] for place in self.places]
        copies = {~number: kind.block.recomputed for number, kind in enumerate(self.kinds)
                  if kind.block.operator == _COPY}  # fmt: skip
        made = [0] * len(self.kinds)  # the newest allocation of each kind
        events, place_of = list(self.events), list(self.place_of)
        begun, phase = 0, ""  # of the frees of a phase before an event

        def order(begun: int, end: int) -> None:
            """Order consecutive frees."""
            pairs = zip(events[begun:end], place_of[begun:end], strict=True)
            frees = sorted(pairs, key=lambda pair: made[~pair[0]])
            events[begun:end], place_of[begun:end] = map(list, zip(*frees, strict=True))

        for number, (event, place) in enumerate(zip(self.events, self.place_of, strict=True)):
            freed = phases[place] if event in copies and (copies[event] or phases[place] == FORWARD) else ""
            if freed != phase:
                if phase and number - begun > 1:
                    order(begun, number)
                begun, phase = number, freed
            if event >= 0:
                made[event] = number
        if phase and len(events) - begun > 1:
            order(begun, len(events))
        return replace(self, events=events, place_of=place_of)

    @cached_property
    def layout(self) -> Layout:
        """Return the parts and places of all batches."""
        parts = [kind.block.part for kind in self.kinds]
        of_all = parts + parts[::-1]  # a complement counts from the end
        return Layout(
            [parts[number] for number in self.state],
            [of_all[number] for number in self.events],
            [self.places[number] for number in self.place_of],
        )

    def matched(self) -> list[tuple[int, int]]:
        """Return the number of each event, and the number of its block or the complement of one that is freed.

        The state has the first numbers. Equal blocks are interchangeable: the newest is freed.
        """
        living: dict[int, list[int]] = defaultdict(list)
        for number, kind in enumerate(self.state):
            living[kind].append(number)
        found = []
        for event, kind in enumerate(self.events):
            if kind >= 0:
                living[kind].append(event + len(self.state))
                found.append((event, event + len(self.state)))
            elif living[~kind]:
                found.append((event, ~living[~kind].pop()))
        return found

    def kind_bytes(self, batch: int) -> list[int]:
        """Return the bytes of each kind at a batch, not rounded."""
        sizes, classes = self._class_bytes(batch), self._classes[1]
        return [sizes[number] for number in classes]

    def _class_bytes(self, batch: int) -> list[int]:
        """Return the bytes of the first kind of each class at a batch."""
        return [kind.bytes_at(batch - SMALLEST) for kind in self._classes[0]]

    @cached_property
    def _classes(self) -> tuple[list[Kind], list[int]]:
        """Return the first kind of each class that has the same bytes at all batches, and the class of each kind."""
        numbers: dict[Hashable, int] = {}
        firsts: list[Kind] = []
        classes = []
        for kind in self.kinds:
            number = numbers.setdefault(kind.growth, len(firsts))
            if number == len(firsts):
                firsts.append(kind)
            classes.append(number)
        return firsts, classes

    def sizes(self, batch: int) -> list[int]:
        """Return the rounded bytes of each kind at a batch, and behind them those of their frees, the last first."""
        sizes, classes = [rounded(size, self.granule_bytes) for size in self._class_bytes(batch)], self._classes[1]
        freed = [-size for size in sizes]
        return [sizes[number] for number in classes] + [freed[number] for number in reversed(classes)]

    def other_peak_bytes(self, batch: int) -> int:
        """Return the peak at a batch in the other loop."""
        sizes = self.sizes(batch)
        before = sum(sizes[number] for number in self.other_state)
        return max(accumulate((sizes[number] for number in self.other_events), initial=before))

    def trace(self, batch: int) -> MemoryTrace:
        """Return the trace at a batch."""
        return GrownTrace(self, batch)

    def peak_bytes(self, batch: int) -> int:
        """Return the peak at a batch."""
        return self.trace(batch).peak_bytes

    @cached_property
    def upper(self) -> MemoryGrowth:
        """Return the growth of the step in which eager attention also saves the inputs of softmax.

        So does torch before 1.11. An input counts with the bytes of its output, that of log_softmax too; a step without
        eager attention, which older versions do not have, stays as it is. Source: pull request pytorch/pytorch 65242.
        """
        blocks = [kind.block for kind in self.kinds]
        if all(block.operator != _SOFTMAX for block in blocks):
            return self
        copies = [1 + (block.part == "activations" and block.operator in (_SOFTMAX, _LOG_SOFTMAX)) for block in blocks]
        pairs = zip(self.events, self.place_of, strict=True)
        events, places = zip(*(pair for pair in pairs for _ in range(copies[max(pair[0], ~pair[0])])), strict=True)
        return replace(self, events=list(events), place_of=list(places))

    def requests(self, batch: int, workspaces: Workspaces = ()) -> Requests:
        """Return the requests to the allocator at a batch; each workspace has the phase that makes it."""
        kinds = self.kind_bytes(batch)
        sizes = [kinds[number] for number in self.state]
        sizes += [kinds[number] if number >= 0 else 0 for number in self.events]
        phases = tuple(phase for phase, _ in workspaces)
        return self._requests(phases).of_sizes([*sizes, *(size for _, size in workspaces)])

    @cached_property
    def _requests(self) -> Callable[[tuple[str, ...]], Requests]:
        """Return the function from the phases of the workspaces to the requests without their sizes."""
        return cache(partial(_requests, self))


Workspaces = Sequence[tuple[str, int]]  # phase and bytes
_COPY = "_to_copy"
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_SOFTMAX, _LOG_SOFTMAX = "_softmax", "_log_softmax"


def _requests(growth: MemoryGrowth, workspaces: Sequence[str]) -> Requests:
    """Return the requests of a run whose steady step this is, without sizes.

    A run moves the parameters to the device in the order of the model. The first optimizer step creates the state
    of every parameter before it updates any. Gradients that exist before a step of the trace are laid down by a
    backward pass before it, each when backward reaches its module. The workspaces, given by their phases, are
    laid down by the first matrix product there, and stay: they may split a free block that a later step needs whole.
    What a variable of the loop refers to is allocated in each step while that of the step before still exists.
    """
    blocks, places = [kind.block for kind in growth.kinds], growth.layout.places
    held = [blocks[kind] for kind in growth.state]
    step = growth.matched()
    made_by = {number: blocks[kind] for number, kind in enumerate(growth.events, len(held)) if kind >= 0}
    gradients = [number for number, block in enumerate(held) if block.part == "gradients"]
    made = [number for number, block in enumerate(held) if block.part == "optimizer_state"]
    # Dictionaries in place of ordered sets.
    previous = dict.fromkeys(number for number, block in enumerate(held) if block.variable)
    kept = dict.fromkeys(number for _, number in step if number >= 0 and made_by[number].variable)
    later = {*gradients, *made, *previous}
    passes = [(places[event], number) for event, number in step if places[event][0] != OPTIMIZER]
    micro_batch, update = [number for _, number in passes], [n for event, n in step if places[event][0] == OPTIMIZER]
    laying = list(_laying_down(passes, {number: held[number].path for number in gradients}))
    laying += _left(micro_batch)
    laying = [number for number in laying if ~number not in previous]
    update += [number for number in _left(number for _, number in step) if ~number not in kept]
    freed = {~number for _, number in step if number < 0}
    first = [*(laying if gradients else ()), *(n for n in micro_batch if ~n not in previous), *made, *update]
    numbered = list(enumerate(workspaces, len(held) + len(growth.events)))
    for number, phase in reversed(numbered):  # so that those of one phase follow its product in their order
        products = (n for place, n in passes if n >= 0 and place[0] == phase and place[2] in _PRODUCTS)
        product = next(products, None)
        first.insert(0 if product is None else first.index(product) + 1, number)
    streams = [made_by[number].stream if number in made_by else "" for number in range(len(held) + len(growth.events))]
    return Requests(
        sizes=[],
        streams=[*streams, *("" for _ in workspaces)],
        start=[number for number in range(len(held)) if number not in later],
        first=first,
        step=[*(laying if freed.intersection(gradients) else ()), *micro_batch, *update],
        renamed=dict(zip(kept, previous, strict=True)),
    )


def _left(numbers: Iterable[int]) -> list[int]:
    """Return the frees of the blocks that the requests leave."""
    left: dict[int, None] = {}
    for number in numbers:
        if number >= 0:
            left[number] = None
        else:
            left.pop(~number, None)
    return [~number for number in left]


def _laying_down(passes: Iterable[tuple[_Place, int]], gradients: dict[int, str]) -> Iterator[int]:
    """Yield the requests of a forward and backward pass, with each gradient where backward reaches its module."""
    waiting: dict[str, list[int]] = defaultdict(list)
    for number, path in gradients.items():
        waiting[path.rpartition(".")[0]].append(number)
    for (phase, path, _), number in passes:
        if phase == BACKWARD:
            yield from waiting.pop(path, ())
        yield number
    for numbers in waiting.values():
        yield from numbers


class GrownTrace(MemoryTrace):
    """A memory trace at one batch, whose events are made when they are asked for."""

    growth: MemoryGrowth
    batch: int

    def __init__(self, growth: MemoryGrowth, batch: int) -> None:
        calls = (call._replace(full_bytes=call.full_bytes + (batch - SMALLEST) * slope)
                 for call, slope in growth.collectives)  # fmt: skip
        sizes = growth.sizes(batch)
        vars(self).update(
            growth=growth, batch=batch, granule_bytes=growth.granule_bytes, traced_layers=growth.traced_layers,
            collectives=tuple(calls), layout=growth.layout, state_sizes=[sizes[number] for number in growth.state],
            sizes=[sizes[number] for number in growth.events],
        )  # fmt: skip

    def block(self, number: int) -> Block:
        """Return the block of an event."""
        found = self.growth.events[number]
        return self.growth.kinds[max(found, ~found)].block_at(self.batch - SMALLEST)

    def __getattr__(self, name: str) -> Any:
        """Make the state or the events."""
        if name not in ("state", "events"):
            raise AttributeError(name)
        growth, sizes = self.growth, self.growth.kind_bytes(self.batch)
        blocks = [kind.block_at(self.batch - SMALLEST) for kind in growth.kinds]
        if name == "state":
            found: tuple[Any, ...] = tuple((blocks[number], sizes[number]) for number in growth.state)
        else:
            sizes, blocks = sizes + [-size for size in reversed(sizes)], blocks + blocks[::-1]
            places = self.layout.places
            found = tuple(
                MemoryEvent(sizes[number], blocks[number], *place)
                for number, place in zip(growth.events, places, strict=True)
            )
        vars(self)[name] = found
        return found


def upper(trace: MemoryTrace) -> MemoryTrace:
    """Return the trace in which eager attention also saves the inputs of softmax."""
    found = of_trace(trace)
    return found.growth.upper.trace(found.batch)


def requests(trace: MemoryTrace, workspaces: Workspaces = ()) -> Requests:
    """Return the requests to the allocator of a run whose steady step is this trace."""
    found = of_trace(trace)
    return found.growth.requests(found.batch, workspaces)


def of_trace(trace: MemoryTrace) -> GrownTrace:
    """Return the trace by its growth; one that is none's has a growth in which nothing grows."""
    return trace if isinstance(trace, GrownTrace) else GrownTrace(MemoryGrowth.of(trace).ordered(), SMALLEST)


def in_loop(trace: MemoryTrace, run_config: RunConfig, loop: str) -> GrownTrace:
    """Return the trace of a step in this loop, from one in which outputs and loss are freed as soon as possible."""
    return GrownTrace(MemoryGrowth.of(trace).in_loop(run_config, loop), SMALLEST)


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
