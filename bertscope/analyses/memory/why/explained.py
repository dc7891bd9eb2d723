"""The report of a snapshot."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, TypeAlias

from bertscope.analyses.memory.why.findings import findings, grouped, size_of
from bertscope.analyses.memory.why.history import NEVER, History, read_history
from bertscope.analyses.memory.why.stacks import NO_STACK
from bertscope.reports.base import Note
from bertscope.reports.why import SNAPSHOT, WhyPart, WhyReport, WhyRow, WhySample

_Change: TypeAlias = tuple[int, str, int]  # event, part, bytes
_State: TypeAlias = tuple[int, int, Counter[str]]  # event, bytes, and those of each part
_MOST_ROWS = 100
_SAMPLES = 200  # of the history
_FEW_EVENTS = 2


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
