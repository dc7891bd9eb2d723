"""The report of a dry run: functions of its log."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import accumulate, groupby
from typing import Any

from bertscope.dry_run.device import FakeCard
from bertscope.dry_run.limits import Evaluated, Limits
from bertscope.gpus import CONTEXT_BYTES
from bertscope.memory.fake_run import block_of, events_of
from bertscope.memory.summary import memory
from bertscope.memory.trace import GRANULE_BYTES, Block, MemoryTrace, rounded
from bertscope.reports.memory import FORWARD, OPTIMIZER
from bertscope.reports.run import HeldRow, RunEvaluation, RunPhase
from bertscope.reports.step import ByteRange, Parts, PhasePeak, StepCost
from bertscope.tracing.record import SETUP, Recorder, RunLog, RunPlace

WORKSPACES = "workspaces"
_NAMES = tuple(part.name for part in fields(Parts))
_JOINING = ("cat", "stack", "full", "new_full", "empty", "new_empty")
_NO_CONTEXT = ByteRange()
_KEPT, _STATE, _TEMPORARY = "activations", "optimizer_state", "temporaries"


class Recording:
    """A log with the size, the part and the live bytes of its blocks and events, on a card with its granule.

    `folder` is that of the script. What is before event `start` is left out of peaks: a script that went on after an
    error began anew there.
    """

    def __init__(self, log: RunLog, device: str = "cuda", start: int = 0, folder: str = "") -> None:
        self.log, self.granule, self.start, self.folder = log, GRANULE_BYTES[device], start, folder
        self.parts = [self._part(number) for number in range(len(log.blocks))]
        self.sizes = [
            0 if part == WORKSPACES else rounded(block.size_bytes, self.granule)
            for part, block in zip(self.parts, log.blocks, strict=True)
        ]
        self.changes = [self.sizes[e.block] if e.block >= 0 else -self.sizes[~e.block] for e in log.events]
        self.live = list(accumulate(self.changes, initial=0))[1:]

    def _part(self, number: int) -> str:
        """Return the use of a block: as it was named, else by where it was allocated and freed."""
        block, events = self.log.blocks[number], self.log.events
        if block.part:
            return block.part
        born = events[block.born].place
        freed = events[block.freed].place if block.freed >= 0 else None
        outlives = freed is None or freed[:2] != born[:2]
        if born.phase == OPTIMIZER:
            return _STATE if outlives else _TEMPORARY
        if born.recomputation:
            return _KEPT if freed is None or freed.recomputation != born.recomputation else _TEMPORARY
        if born.phase == FORWARD:
            return _KEPT if outlives else _TEMPORARY
        return "buffers" if born.phase == SETUP and outlives else _TEMPORARY

    def runs(self) -> Iterator[tuple[tuple[int, str], int, int]]:
        """Yield each step and phase with its first event and the one behind its last, in their order."""
        begun = self.start
        for key, run in groupby(self.log.events[begun:], key=lambda event: event.place[:2]):
            end = begun + sum(1 for _ in run)
            yield key, begun, end
            begun = end

    def peaks(self) -> dict[tuple[int, str], int]:
        """Return the event of the peak of each phase of each step, in the order in which they began.

        What lives when a phase begins counts too.
        """
        found = {key: begun - 1 for key, begun in self.log.begun.items() if begun > self.start}
        for key, begun, end in self.runs():
            best = max(range(max(begun - 1, 0), end), key=self.live.__getitem__)
            if key not in found or self.live[best] > self.live[found[key]]:
                found[key] = best
        order = {key: begun for key, begun, _ in reversed([*self.runs()])} | self.log.begun
        return dict(sorted(found.items(), key=lambda item: (item[0][0], order[item[0]])))

    def parts_at(self, moments: Sequence[int]) -> dict[int, Parts]:
        """Return the bytes of each part after each of these events."""
        sums, wanted, found = dict.fromkeys(_NAMES, 0), set(moments), {}
        for number, (event, change) in enumerate(zip(self.log.events, self.changes, strict=True)):
            if (part := self.parts[max(event.block, ~event.block)]) != WORKSPACES:
                sums[part] += change
            if number in wanted:
                found[number] = Parts(**sums)
        return found

    def alive_at(self, moment: int) -> list[int]:
        """Return the blocks that live after an event, but for workspaces."""
        return [
            number for number, block in enumerate(self.log.blocks)
            if block.born <= moment and not 0 <= block.freed <= moment and self.parts[number] != WORKSPACES
        ]  # fmt: skip

    def line(self, call: int) -> str:
        """Return the line that ran, with the path of its file as the user sees it."""
        return short_line(self.log.calls[call].line, self.folder) if call >= 0 else ""

    def trace(self, step: int) -> MemoryTrace:
        """Return one step as the memory trace of an estimate: what lives when it begins, and its events."""
        log = self.log
        begun, *_ = numbers = [
            number for number, event in enumerate(log.events)
            if event.place.step == step and event.place.phase != SETUP
            and self.parts[max(event.block, ~event.block)] != WORKSPACES
        ]  # fmt: skip

        def block(number: int) -> Block:
            return block_of(log, number, self.parts[number])

        state = [(block(number), log.blocks[number].size_bytes) for number in self.alive_at(begun - 1)]
        return MemoryTrace.of(state, events_of(log, numbers, block), self.granule)


def short_line(line: str, folder: str) -> str:
    """Return `train.py:31`: the file as its path from the script's folder, or outside of that its name."""
    name, colon, number = line.rpartition(":")
    shown = name.removeprefix(folder + os.sep)
    return f"{os.path.basename(shown) if os.path.isabs(shown) else shown}{colon}{number}"


def row_of(path: str, rows: Mapping[str, str]) -> str:
    """Return the row of a module or a parameter: `encoder.layer.0-11.output.dense.weight`."""
    if path in rows or "." not in path:
        return rows.get(path, path)
    module, _, name = path.rpartition(".")
    return f"{rows.get(module, module)}.{name}"


def phases(found: Recording, rows: Mapping[str, str], context: ByteRange = _NO_CONTEXT) -> tuple[RunPhase, ...]:
    """Return the peak of each phase of each step, in the order in which they began."""
    peaks, log = found.peaks(), found.log
    parts = found.parts_at(list(peaks.values()))
    reserved: dict[tuple[int, str], int] = defaultdict(int)
    for event in log.events[found.start :]:
        reserved[event.place[:2]] = max(reserved[event.place[:2]], event.reserved_bytes)
    left = {key: found.live[moment] for key, moment in peaks.items()}
    left |= {key: found.live[end - 1] for key, _, end in found.runs()}
    made = []
    for (step, phase), moment in peaks.items():
        event = log.events[moment]
        is_before = event.place[:2] != (step, phase)  # the peak is what the phase began with
        place = RunPlace(step, phase, "") if is_before else event.place
        peak = PhasePeak(phase=phase, path=row_of(place.path, rows), peak_bytes=found.live[moment],
                         parts=parts[moment], operator="" if is_before else log.operator(event.call))  # fmt: skip
        most = max(reserved[step, phase], event.reserved_bytes)
        cost = StepCost(
            peak=peak, context=context, reserved=ByteRange(low_bytes=most, high_bytes=most) if most else None,
            gpu_bytes=(most or peak.peak_bytes) + context.high_bytes,
        )  # fmt: skip
        made.append(RunPhase(step=0 if phase == SETUP else step + 1, cost=cost, left_bytes=left[step, phase],
                             line="" if is_before else found.line(event.call)))  # fmt: skip
    return tuple(made)


def held(found: Recording, moment: int, rows: Mapping[str, str]) -> tuple[HeldRow, ...]:
    """Return what lives at a moment, by the line, module and phase that allocated it, the most first."""
    sums: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for number in found.alive_at(moment):
        block = found.log.blocks[number]
        phase = found.log.events[block.born].place.phase
        key = found.line(block.call), row_of(block.owner, rows), phase, found.parts[number]
        sums[key].append(found.sizes[number])
    made = [HeldRow(line=line, path=path, phase=phase, part=part, blocks=len(sizes), held_bytes=sum(sizes))
            for (line, path, phase, part), sizes in sums.items()]  # fmt: skip
    return tuple(sorted(made, key=lambda row: (-row.held_bytes, row.line, row.path)))


def evaluation(found: Recording, limits: Limits) -> RunEvaluation | None:
    """Return the evaluation with the highest peak over all of its batches, of those that did not run whole."""
    known = [_evaluated(found, one, limits.calls) for one in limits.evaluations if one.total > one.ran]
    return max((one for one in known if one is not None), key=lambda one: one.highest_bytes, default=None)


def _evaluated(found: Recording, one: Evaluated, all_calls: list[int]) -> RunEvaluation | None:
    log, calls = found.log, all_calls[one.first : one.first + one.ran * one.each : one.each]
    if len(calls) < one.ran or one.ran < 3:
        return None
    second, third, last = calls[-3:]
    end = one.end if one.end >= 0 else len(log.events)
    added = found.live[last - 1] - found.live[third - 1]
    if added <= 0:
        return None
    kept = set()  # bytes of each batch; what joins them grows, and has those of all batches up to this one
    for block in log.blocks:
        if second <= block.born < third and not 0 <= block.freed < third:
            kept |= {block.size_bytes // times for times in (1, one.ran - 2)}
    joined_rows = set()
    more, live, peak = one.total - one.ran, found.live[last - 1], found.live[last - 1]
    for event, change in zip(log.events[last:end], found.changes[last:end], strict=True):
        block = log.blocks[max(event.block, ~event.block)]
        is_late, rows = block.born >= last, block.shape[:1]
        is_joined = is_late and log.operator(block.call) in _JOINING and block.size_bytes / one.ran in kept
        if is_joined:
            joined_rows.add(rows)
        is_joined |= is_late and rows in joined_rows
        live += change * one.total // one.ran if is_joined else change
        peak = max(peak, live)
    return RunEvaluation(batches=one.total, ran=one.ran, added_bytes=added, highest_bytes=peak + added * more)


def summary(
    recorder: Recorder, limits: Limits, card: FakeCard, rows: Mapping[str, str], context_bytes: int | None,
    budget_bytes: int | None, is_full: bool, folder: str,
) -> tuple[dict[str, Any], MemoryTrace | None]:  # fmt: skip
    """Return the fields of the report that the log gives, and the trace of the step with the peak.

    `is_full` tells that the card had no room at the end; `folder` is that of the script.
    """
    if not recorder.log.events:
        return {"updates": recorder.updates, "phases": ()}, None
    log = recorder.log
    start = log.refused[-1][2] if log.refused and not is_full else 0
    found = Recording(log, card.kind, start if start < len(log.events) else 0, folder)
    low, high = (card.gpu.context_low_bytes, card.gpu.context_high_bytes) if card.gpu else CONTEXT_BYTES
    if context_bytes is not None:
        low = high = context_bytes
    context = ByteRange(low_bytes=low, high_bytes=high)
    shown = phases(found, rows, context)
    top = max(range(found.start, len(found.live)), key=found.live.__getitem__)
    step = log.events[top].place
    trace = found.trace(step.step) if step.phase != SETUP else None
    more = evaluation(found, limits)
    beyond = 0 if more is None else max(more.highest_bytes - found.live[top], 0)
    reserved = beyond + max(event.reserved_bytes for event in log.events[found.start :])
    allocated = beyond + max(event.allocated_bytes for event in log.events[found.start :])
    device: dict[str, Any] = {
        "max_allocated_bytes": allocated, "context": context, "gpu_bytes": reserved + high,
        "workspace_bytes": sum(block.size_bytes for block in log.blocks if block.part == WORKSPACES),
        "reserved": ByteRange(low_bytes=reserved, high_bytes=reserved),
    }  # fmt: skip
    refused = tuple(size for size, _, _ in log.refused)
    highest = max(shown, key=lambda phase: (phase.peak_bytes, phase.step)).cost
    limits_of: dict[str, Any] = {}
    if budget_bytes is not None:
        lacking = [max(reserved + size - budget_bytes, 0) for size in (low, high)]
        if is_full and refused:
            lacking = [refused[-1], max(refused[-1], lacking[1])]
        limits_of = {"limit_bytes": budget_bytes,
                     "shortfall": ByteRange(low_bytes=lacking[0], high_bytes=lacking[1])}  # fmt: skip
    fields = {
        "updates": recorder.updates, "phases": shown, "held": held(found, top, rows), "evaluation": more,
        "cost": replace(highest, **device, **limits_of),
        "memory": None if trace is None else memory(trace, "estimated", rows, **device),
        "refused_bytes": refused,
        "refused_lines": tuple(short_line(line, folder) for _, line, _ in log.refused),
    }  # fmt: skip
    return fields, trace
