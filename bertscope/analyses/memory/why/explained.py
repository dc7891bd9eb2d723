"""The report of a snapshot or of a profiler's memory timeline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, TypeAlias

from bertscope.analyses.memory.why.findings import findings, grouped, size_of
from bertscope.analyses.memory.why.history import NEVER, History, read_history
from bertscope.analyses.memory.why.stacks import NO_STACK
from bertscope.errors import SourceError
from bertscope.reports.base import Note
from bertscope.reports.why import BEFORE, PEAK, SNAPSHOT, TIMELINE, WhyFinding, WhyPart, WhyReport, WhyRow, WhySample

_Change: TypeAlias = tuple[int, str, int]  # event, part, bytes
_State: TypeAlias = tuple[int, int, Counter[str]]  # event, bytes, and those of each part
_MOST_ROWS = 100
_SAMPLES = 200  # of the history
_FEW_EVENTS = 2
# The categories of torch/profiler/_memory_profiler.py in their order; those without a category come last.
_CATEGORIES = (
    "parameters", "optimizer_state", "inputs", "temporaries", "activations", "gradients", "temporaries", BEFORE,
)  # fmt: skip


def snapshot_report(data: Any, name: str) -> WhyReport:
    """Return the report of a snapshot; raises SourceError for data of another structure."""
    history = read_history(data, name)
    moment, event = history.moment
    _, phase, _ = history.phase_at(event)
    tried, free = history.oom[1:] if history.oom else (None, None)
    running = history.oom_kind
    if running is NO_STACK and event in history.born:
        running = history.kinds[history.born.index(event)]
    notes = [] if history.has_frames or not history.sizes else [Note(key="why_no_frames")]
    return WhyReport(
        name=name, source=SNAPSHOT, moment=moment, tried_bytes=tried, free_bytes=free,
        allocated_bytes=size_of(history.blocks),
        reserved_bytes=history.reserved_bytes,
        largest_free_bytes=history.largest_free_bytes or None,
        phase=phase, line=running.line or running.module, passes=history.phases[-1][2], events=history.events,
        parts=_parts(history), rows=_rows(history), findings=findings(history),
        timeline=tuple(_samples(history)), notes=tuple(notes),
    )  # fmt: skip


def _parts(history: History) -> tuple[WhyPart, ...]:
    groups = grouped(history.blocks, lambda block: block.part)
    parts = [WhyPart(part=part, held_bytes=size_of(own), blocks=len(own)) for part, own in groups.items()]
    return tuple(sorted(parts, key=lambda part: -part.held_bytes))


def _rows(history: History) -> tuple[WhyRow, ...]:
    """Return the blocks by part, line and module, the largest rows first."""
    groups = grouped(history.blocks, lambda block: (block.part, block.kind.line, block.kind.module))
    rows = []
    for (part, line, module), blocks in groups.items():
        sizes = [block.size for block in blocks]
        passes = {block.forward_pass for block in blocks} - {0}
        rows.append(WhyRow(part=part, line=line, module=module, blocks=len(blocks), passes=len(passes),
                           held_bytes=sum(sizes), smallest_bytes=min(sizes), largest_bytes=max(sizes)))  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -row.held_bytes)[:_MOST_ROWS])


def _samples(history: History) -> Iterator[WhySample]:
    """Yield the highest moment of each of some equal spans of the history."""
    changes = list[_Change]()
    for size, part, born, died in zip(history.sizes, history.parts, history.born, history.died, strict=True):
        changes.append((max(born, 0), part, size))
        if died != NEVER:
            changes.append((died, part, -size))
    if history.events >= _FEW_EVENTS:
        yield from _highest(_states(sorted(changes, key=lambda change: change[0])), history.events)


def _states(changes: Iterable[_Change]) -> Iterator[_State]:
    held, total = Counter[str](), 0
    for event, part, size in changes:
        held[part] += size
        total += size
        yield event, total, held


def _highest(states: Iterable[_State], events: int) -> Iterator[WhySample]:
    """Yield the highest moment of each span of the events."""
    for _, span in groupby(states, key=lambda state: state[0] * _SAMPLES // events):
        most = -math.inf
        for event, total, held in span:
            if total > most:
                most = total
                sample = WhySample(event=event, held={part: max(size, 0) for part, size in held.items()})
        yield sample


def timeline_report(data: Any, name: str) -> WhyReport:
    """Return the report of what `export_memory_timeline` of torch's profiler wrote; raises SourceError for other data.

    The file has the times and the sizes by category, or events: time, action, bytes and category.
    """
    lists = data if isinstance(data, list) and all(isinstance(row, list) for row in data[:2]) else []
    is_raw = bool(lists) and all(len(row) == 4 for row in lists[:2])
    rows = lists if is_raw else lists[1] if len(lists) == 2 else []

    def states() -> Iterator[_State]:
        return _states(_raw(rows)) if is_raw else _coalesced(rows)

    samples = tuple(_highest(states(), len(rows)))
    if not samples:
        raise SourceError(
            "JSON that is no memory timeline; give what export_memory_timeline of torch's profiler wrote, or a "
            "snapshot of torch.cuda.memory", where=name
        )  # fmt: skip
    peak = max(samples, key=lambda sample: sum(sample.held.values()))
    parts = [WhyPart(part=part, held_bytes=size, blocks=0) for part, size in peak.held.items() if size]
    return WhyReport(
        name=name, source=TIMELINE, moment=PEAK, allocated_bytes=sum(peak.held.values()), events=len(rows),
        parts=tuple(sorted(parts, key=lambda part: -part.held_bytes)),
        findings=tuple(_of_parts(parts, _never_freed(states(), len(rows)))), timeline=samples,
    )  # fmt: skip


def _never_freed(states: Iterable[_State], events: int) -> int:
    """Return the bytes of activations at the end if a quarter of them was there in the whole second half; else 0."""
    least, last = math.inf, 0
    for event, _, held in states:
        if 2 * event >= events:
            last = held["activations"]
            least = min(least, last)
    return last if 4 * least > last else 0


def _of_parts(parts: Sequence[WhyPart], never_freed: int) -> Iterator[WhyFinding]:
    """Yield a finding for each large part; without blocks nobody knows what a remedy frees."""
    remedies = {"activations": "activations_all", "optimizer_state": "optimizer", "parameters": "parameters"}
    total = sum(part.held_bytes for part in parts)
    for part in sorted(parts, key=lambda part: -part.held_bytes):
        if part.part == "activations" and 2 * never_freed > part.held_bytes:
            yield WhyFinding(key="why_unfreed", values={"size": never_freed})
        elif part.part in remedies and 20 * part.held_bytes > total:
            yield WhyFinding(key=f"why_{remedies[part.part]}", values={"size": part.held_bytes})


def _raw(rows: Sequence[Any]) -> Iterator[_Change]:
    """Yield the events; the bytes of one that frees are negative."""
    for event, row in enumerate(rows):
        is_event = isinstance(row, list) and len(row) == 4 and all(type(value) is int for value in row[2:])
        if not is_event or not 0 <= row[3] < len(_CATEGORIES):
            return
        yield event, _CATEGORIES[row[3]], row[2]


def _coalesced(rows: Sequence[Any]) -> Iterator[_State]:
    for event, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(_CATEGORIES) + 1 or not all(type(size) is int for size in row):
            return
        held = Counter[str]()
        for part, size in zip(_CATEGORIES, row[1:], strict=True):  # the first column is 0, for sums of the others
            held[part] += max(size, 0)
        yield event, held.total(), held
