"""Phases, blocks and evaluations of a dry run: functions of its log."""

import os
from collections import ChainMap, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import accumulate
from math import ceil
from operator import itemgetter, mul
from types import MappingProxyType

from bertscope.dry_run.limits import Evaluated, Limits
from bertscope.memory.caching_allocator import Requests
from bertscope.memory.fake_run import block_of, events_of
from bertscope.memory.kernel_rules import rounded
from bertscope.memory.trace import GRANULE_BYTES, Block, MemoryTrace
from bertscope.reports.memory import FORWARD, OPTIMIZER
from bertscope.reports.run import HeldRow, RunEvaluation, RunPhase
from bertscope.reports.step import ByteRange, Parts, PhasePeak, StepCost
from bertscope.tracing.log import LoggedBlock, Position, RunLog
from bertscope.tracing.record import SETUP

_NAMES = tuple(part.name for part in fields(Parts))
_JOINING = ("cat", "stack", "new_full", "new_empty")
_NO_CONTEXT, _NO_ROWS = ByteRange(), MappingProxyType[str, str]({})
_KEPT, _STATE, _TEMPORARY = "activations", "optimizer_state", "temporaries"


class Recording:
    """A log with the size, the part and the live bytes of its blocks and events, on a device with its granule.

    `folder` is that of the script, and `rows` has the row of each module's path in a folded tree. What is before event
    `start` is left out of peaks: a script that went on after an error began anew there. Of an evaluation in `limits`
    whose first batches ran, what they keep grows to all of them; `grown` is what that adds after each event.
    """

    def __init__(
        self, log: RunLog, device: str = "cuda", start: int = 0, folder: str = "", rows: Mapping[str, str] = _NO_ROWS,
        limits: Limits | None = None,
    ) -> None:  # fmt: skip
        self.log, self.granule, self.start, self.folder, self.rows = log, GRANULE_BYTES[device], start, folder, rows
        self.parts = [self._part(number) for number in range(len(log.blocks))]
        self.sizes = [rounded(block.size_bytes, self.granule) for block in log.blocks]
        self.live = before = self._live()
        runs = list(limits.partial_evaluations(before)) if limits is not None else []
        for number, factor in ChainMap(*(self._factors(*run) for run in runs)).items():
            self.sizes[number] = round(self.sizes[number] * factor)
        self.live = self._live()
        self.grown = [most - few for most, few in zip(self.live, before, strict=True)]
        partial_runs = []
        for one, calls, added in runs:
            batches, highest = ceil(one.total), max(self.live[calls[-1] - 1 : one.end])
            partial_runs.append(RunEvaluation(batches=batches, ran=one.ran, added_bytes=added, highest_bytes=highest))
        self.evaluation = max(partial_runs, key=lambda row: row.highest_bytes, default=None)

    def _live(self) -> list[int]:
        changes = (self.sizes[e.block] if e.block >= 0 else -self.sizes[~e.block] for e in self.log.events)
        return list(accumulate(changes, initial=0))[1:]

    def _part(self, number: int) -> str:
        """Return the use of a block: as it was named, else by where it was allocated and freed."""
        block, events = self.log.blocks[number], self.log.events
        if block.part:
            return block.part
        born = events[block.born].position
        freed = events[block.freed].position if block.freed >= 0 else None
        outlives = freed is None or freed[:2] != born[:2]
        if born.phase == OPTIMIZER:
            return _STATE if outlives else _TEMPORARY
        if born.recomputation:
            return _KEPT if freed is None or freed.recomputation != born.recomputation else _TEMPORARY
        if born.phase == FORWARD:
            return _KEPT if outlives else _TEMPORARY
        return "buffers" if born.phase == SETUP and outlives else _TEMPORARY

    def alive_at(self, moment: int) -> list[int]:
        """Return the blocks that live after an event."""
        blocks = enumerate(self.log.blocks)
        return [number for number, block in blocks if block.born <= moment and not 0 <= block.freed <= moment]

    def line(self, call: int) -> str:
        """Return the line that ran, with its file's path as the user sees it."""
        return short_line(self.log.calls[call].line, self.folder) if call >= 0 else ""

    def row(self, path: str) -> str:
        """Return the row of a module or a parameter: `encoder.layer.0-11.output.dense.weight`."""
        module, dot, name = path.rpartition(".")
        return self.rows[path] if path in self.rows else f"{self.rows.get(module, module)}{dot}{name}"

    def trace(self, step: int) -> MemoryTrace:
        """Return one step as the memory trace of an estimate: what lives when it begins, and its events."""
        log = self.log
        begun, *_ = numbers = [
            number
            for number, event in enumerate(log.events)
            if event.position.step == step and event.position.phase != SETUP
        ]

        def block(number: int) -> Block:
            return block_of(log, number, self.parts[number])

        state = [(block(number), log.blocks[number].size_bytes) for number in self.alive_at(begun - 1)]
        return MemoryTrace.of(state, events_of(log, numbers, block), self.granule)

    def phases(self, context: ByteRange = _NO_CONTEXT) -> tuple[RunPhase, ...]:
        """Return the peak of each phase of each step, in the order in which they began.

        What lives when a phase begins counts too.
        """
        log, events, live = self.log, self.log.events, self.live
        begins = [(begun, 0, key) for key, begun in log.begun.items() if begun > self.start]
        begins += [(number, 1, event.position[:2]) for number, event in enumerate(events) if number >= self.start]
        moments: dict[tuple[int, str], dict[int, None]] = defaultdict(dict)  # of a phase, with the one before it begins
        for number, events_there, key in sorted(begins, key=itemgetter(0, 1)):
            moments[key] |= dict.fromkeys(range(max(number - 1, 0), number + events_there))
        rows = []
        for key, numbers in sorted(moments.items(), key=lambda item: item[0][0]):
            inside = [number for number in numbers if events[number].position[:2] == key]
            moment = max(numbers, key=live.__getitem__)
            event, sums = events[moment], dict.fromkeys(_NAMES, 0)
            for number in self.alive_at(moment):
                sums[self.parts[number]] += self.sizes[number]
            # Else the peak is what the phase began with.
            position, call = (event.position, event.call) if moment in inside else (Position(*key, ""), -1)
            path, parts = self.row(position.path), Parts(**sums)
            peak = PhasePeak(phase=key[1], path=path, peak_bytes=live[moment], parts=parts, operator=log.operator(call))
            most = max(events[number].reserved_bytes + self.grown[number] for number in [*inside, moment])
            known = ByteRange(low_bytes=most, high_bytes=most) if most else None
            step, left_bytes = 0 if key[1] == SETUP else key[0] + 1, live[inside[-1] if inside else moment]
            cost = StepCost(peak=peak, context=context, reserved=known)
            rows.append(RunPhase(step=step, line=self.line(call), left_bytes=left_bytes, cost=cost))
        return tuple(rows)

    def held(self, moment: int) -> tuple[HeldRow, ...]:
        """Return what lives at a moment, by the line, module and phase that allocated it, the most first."""
        sums: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
        for number in self.alive_at(moment):
            block = self.log.blocks[number]
            phase = self.log.events[block.born].position.phase
            sums[self.line(block.call), self.row(block.owner), phase, self.parts[number]].append(self.sizes[number])
        rows = [
            HeldRow(line=line, path=path, phase=phase, part=part, blocks=len(sizes), held_bytes=sum(sizes))
            for (line, path, phase, part), sizes in sums.items()
        ]
        return tuple(sorted(rows, key=lambda row: (-row.held_bytes, row.line, row.path)))

    def _factors(self, one: Evaluated, calls: list[int], added: int) -> dict[int, float]:
        """Return the factors of blocks by which a few batches of an evaluation take what all of them take.

        They grow what the second of the last three batches keeps, or what the third has joined with those before, and
        then, from the last one on, what operators make of it with as many rows.
        """
        log, (second, third, last) = self.log, calls[-3:]
        blocks, more = log.blocks, one.total - one.ran
        reads = [{*log.calls[block.call].reads} for block in blocks]
        alive = [n for n, block in enumerate(blocks) if second <= block.born < last and not 0 <= block.freed < last]
        listed = [number for number in alive if blocks[number].born < third]
        replaced = {n for n, block in enumerate(blocks) if block.born < third <= block.freed < last}
        joined = [number for number in alive if blocks[number].born >= third and replaced & reads[number]]
        growing, factors = joined or listed or alive, dict.fromkeys(listed, 1 + more)
        known, rest = (sum(map(self.sizes.__getitem__, numbers)) for numbers in (growing, listed))
        factors |= {number: factors.get(number, 1) + (added - rest) * more / known for number in growing}
        for number, block in enumerate(blocks):
            grown = factors.keys() & reads[number] if block.born >= last else set()
            if grown and log.operator(block.call) in _JOINING:
                joined_bytes = sum((factors[read] - 1) * blocks[read].size_bytes for read in grown)
                factors[number] = 1 + joined_bytes / block.size_bytes
            elif alike := [read for read in grown if _rows(block) & _rows(blocks[read])]:
                factors[number] = max(factors[read] for read in alike)
        return factors


def _rows(block: LoggedBlock) -> set[int]:
    """Return the numbers of rows that a tensor has in its views: of 4 x 16 x 500 they are 4, 64 and 32,000."""
    return {*accumulate(block.shape, mul)}


def log_requests(log: RunLog, laid: Iterable[tuple[int, int]] = ()) -> list[Requests]:
    """Return the requests of the steps of a run to the allocator; each workspace is laid down before an event."""
    sizes, waiting = [block.size_bytes for block in log.blocks], list(laid)
    begun: list[int] = []
    by_step: dict[int, list[int]] = defaultdict(list)
    for index, event in enumerate(log.events):
        is_before = event.position.phase == SETUP and not event.position.step
        numbers = begun if is_before else by_step[event.position.step]
        while waiting and waiting[0][0] <= index:
            numbers.append(len(sizes))
            sizes.append(waiting.pop(0)[1])
        numbers.append(event.block)
    streams, (first, *steps) = [""] * len(sizes), list(by_step.values()) or [[]]
    runs = [Requests(sizes, streams, begun, first, [], {})]
    runs += [Requests(sizes, streams, [], [], step, {}) for step in steps]
    return [run.of_sizes(sizes) for run in runs]


def short_line(line: str, folder: str) -> str:
    """Return `train.py:31`: the file as its path from the script's folder, or outside of that its name."""
    name, colon, number = line.rpartition(":")
    shown = name.removeprefix(folder + os.sep)
    return f"{os.path.basename(shown) if os.path.isabs(shown) else shown}{colon}{number}"
