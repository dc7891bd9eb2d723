"""The report of a snapshot or of a profiler's memory timeline."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bertscope.analyses.memory.why.findings import findings
from bertscope.analyses.memory.why.history import NEVER, History, read_history
from bertscope.analyses.memory.why.stacks import NO_STACK
from bertscope.errors import SourceError
from bertscope.reports.base import Note
from bertscope.reports.why import BEFORE, PEAK, SNAPSHOT, TIMELINE, WhyFinding, WhyPart, WhyReport, WhyRow, WhySample

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
        allocated_bytes=sum(history.sizes[number] for number in history.live),
        reserved_bytes=history.reserved_bytes,
        largest_free_bytes=history.segments.largest_free_bytes or None,
        phase=phase, line=running.line or running.module, passes=history.phases[-1][2], events=history.events,
        parts=_parts(history), rows=_rows(history), findings=findings(history),
        timeline=tuple(_samples(history)), notes=tuple(notes),
    )  # fmt: skip


def _parts(history: History) -> tuple[WhyPart, ...]:
    sizes: Counter[str] = Counter()
    blocks = Counter(history.parts[number] for number in history.live)
    for number in history.live:
        sizes[history.parts[number]] += history.sizes[number]
    return tuple(WhyPart(part=part, held_bytes=size, blocks=blocks[part]) for part, size in sizes.most_common())


def _rows(history: History) -> tuple[WhyRow, ...]:
    """Return the blocks by part, line and module, the largest rows first."""
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for number in history.live:
        kind = history.kinds[number]
        groups[history.parts[number], kind.line, kind.module].append(number)
    rows = []
    for (part, line, module), blocks in groups.items():
        sizes = [history.sizes[number] for number in blocks]
        passes = {history.passes[number] for number in blocks} - {0}
        rows.append(WhyRow(part=part, line=line, module=module, blocks=len(blocks), passes=len(passes),
                           held_bytes=sum(sizes), smallest_bytes=min(sizes), largest_bytes=max(sizes)))  # fmt: skip
    return tuple(sorted(rows, key=lambda row: -row.held_bytes)[:_MOST_ROWS])


def _samples(history: History) -> Iterator[WhySample]:
    """Yield the highest moment of each of some equal spans of the history."""
    if history.events < _FEW_EVENTS:
        return
    changes: list[tuple[int, str, int]] = []
    for size, part, born, died in zip(history.sizes, history.parts, history.born, history.died, strict=True):
        changes.append((born, part, size))
        if died != NEVER:
            changes.append((died, part, -size))
    yield from _highest(sorted(changes, key=lambda change: change[0]), history.events)


def _highest(changes: Iterable[tuple[int, str, int]], events: int) -> Iterator[WhySample]:
    """Yield the highest moment of each span of the events; a change is an event, a part and bytes."""
    held: Counter[str] = Counter()
    total, best, span = 0, None, 0
    for event, part, size in changes:
        if max(event, 0) * _SAMPLES // events != span and best is not None:
            yield best[1]
            best = None
        span = max(event, 0) * _SAMPLES // events
        held[part] += size
        total += size
        if best is None or total > best[0]:
            best = total, WhySample(event=max(event, 0), held=dict(held))
    if best is not None:
        yield best[1]


def timeline_report(data: Any, name: str) -> WhyReport:
    """Return the report of what `export_memory_timeline` of torch's profiler wrote; raises SourceError for other data.

    The file has the times and the sizes by category, or events: time, action, bytes and category.
    """
    samples = list(_raw(data) if _is_raw(data) else _coalesced(data))
    if not samples:
        raise SourceError(
            "JSON that is no memory timeline; give what export_memory_timeline of torch's profiler wrote, or a "
            "snapshot of torch.cuda.memory", where=name
        )  # fmt: skip
    peak = max(samples, key=lambda sample: sum(sample.held.values()))
    parts = [WhyPart(part=part, held_bytes=size, blocks=0) for part, size in peak.held.items() if size]
    step = -(-len(samples) // _SAMPLES)
    spans = (samples[start : start + step] for start in range(0, len(samples), step))
    return WhyReport(
        name=name, source=TIMELINE, moment=PEAK, allocated_bytes=sum(peak.held.values()), events=len(samples),
        parts=tuple(sorted(parts, key=lambda part: -part.held_bytes)),
        findings=tuple(_of_parts(parts)),
        timeline=tuple(max(span, key=lambda sample: sum(sample.held.values())) for span in spans),
    )  # fmt: skip


def _of_parts(parts: Sequence[WhyPart]) -> Iterator[WhyFinding]:
    """Yield a finding for each large part; without blocks nobody knows what a remedy frees."""
    remedies = {"activations": "activations_all", "optimizer_state": "optimizer", "parameters": "parameters"}
    total = sum(part.held_bytes for part in parts)
    for part in sorted(parts, key=lambda part: -part.held_bytes):
        if part.part in remedies and 20 * part.held_bytes > total:
            yield WhyFinding(key=f"why_{remedies[part.part]}", values={"size": part.held_bytes})


def _is_raw(data: Any) -> bool:
    return isinstance(data, list) and bool(data) and all(isinstance(row, list) and len(row) == 4 for row in data[:2])


def _raw(data: Sequence[Sequence[int]]) -> Iterator[WhySample]:
    held: Counter[str] = Counter()
    for event, row in enumerate(data):
        time, _, size, category = row
        if not all(type(value) is int for value in (time, size, category)) or not 0 <= category < len(_CATEGORIES):
            return
        held[_CATEGORIES[category]] += size
        yield WhySample(event=event, held={part: max(size, 0) for part, size in held.items()})


def _coalesced(data: Any) -> Iterator[WhySample]:
    if not isinstance(data, list) or len(data) != 2 or not all(isinstance(item, list) for item in data):
        return
    for event, row in enumerate(data[1]):
        if not isinstance(row, list) or len(row) != len(_CATEGORIES) + 1 or not all(type(size) is int for size in row):
            return
        held: Counter[str] = Counter()
        for part, size in zip(_CATEGORIES, row[1:], strict=True):  # the first column is 0, for sums of the others
            held[part] += max(size, 0)
        yield WhySample(event=event, held=dict(held))
