"""The report on a memory trace: peaks by part, tensors saved for backward, and a timeline."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import accumulate

from bertscope.analyses.memory.events import PARTS, Block, MemoryEvent, MemoryTrace, parts
from bertscope.reports.layer_ranges import collapse
from bertscope.reports.memory import DeviceTerms, KeptRow, Memory, Parts, PhasePeak, Sample

SAMPLES = 600  # points of a timeline; the peaks are always among them
# The role of a tensor in BERT, by the end of its module's path and the operator that made it.
_WHAT = (
    (r"attention\.self(\.dropout)?$", r"_(safe_)?softmax", "attention probabilities"),
    (r"attention\.self(\.dropout)?$", r"empty_like|bernoulli.*", "attention dropout mask"),
    (r"attention\.self(\.dropout)?$", r"native_dropout", "dropped probabilities and mask"),
    (r"attention\.self(\.dropout)?$", r"mul", "dropped probabilities, or scaled query and key"),
    (r"attention\.self$", r"clone|_unsafe_view|bmm", "query, key, value and context, by head"),
    (r"attention\.self\.(query|key|value)$", r"addmm", "query, key, value"),
    (r"attention\.self$", r"_scaled_dot_product.*", "attention output and logsumexp"),
    (r"intermediate\.dense$", r"addmm", "activation's input"),
    (r"intermediate(\.intermediate_act_fn)?$", r"gelu|relu|silu|tanh|mul|pow|add", "activation's output"),
    (r"dropout$", r"empty_like|bernoulli.*", "dropout mask"),
    (r"dropout$", r"native_dropout", "dropout's output and mask"),
    (r"dropout$", r"mul", "dropout's output"),
    (r"", r"native_layer_norm", "LayerNorm's output, mean and deviation"),
    (r"(output|embeddings)$", r"add", "residual sum, LayerNorm's input"),
    (r"", r"_to_copy", "copy in another dtype"),
    (r"", r"_log_softmax", "log-probabilities of the vocabulary"),
    (r"", r"get_rng_state", "random state for recomputation"),
)  # fmt: skip


def memory(
    trace: MemoryTrace,
    obtained: str,
    device: DeviceTerms | None = None,
    traced_layers: int | None = None,
    rows: Mapping[str, str] | None = None,
) -> Memory:
    """Return the report on a trace; `rows` gives the row of each module's path, as `row_paths` returns it.

    Without `rows`, modules that save the same blocks and whose paths differ in the first number are one row.
    """
    rows = _alike(trace) if rows is None else rows
    phases = tuple(
        PhasePeak(
            phase=moment.phase,
            peak_bytes=moment.live_bytes,
            path=rows.get(moment.path, moment.path),
            operator=moment.operator,
            parts=Parts(**parts(trace.at(moment))),
        )
        for moment in trace.peaks()
    )
    kept = tuple(kept_rows(trace, rows))
    return Memory(
        obtained=obtained,
        phases=phases,
        kept=kept,
        kept_bytes=sum(row.kept_bytes for row in kept),
        timeline=tuple(_timeline(trace)),
        device=device,
        traced_layers=traced_layers,
    )


def kept_rows(trace: MemoryTrace, rows: Mapping[str, str]) -> Iterator[KeptRow]:
    """Yield the tensors saved for backward, largest first, summed over the modules of a row."""
    found: dict[Block, list[int]] = defaultdict(list)
    for block, size in _kept(trace):
        found[block._replace(path=rows.get(block.path, block.path))].append(size)
    kept = [
        KeptRow(
            path=block.path,
            operator=block.operator,
            what=what(block.path, block.operator),
            shape=block.shape,
            dtype=block.dtype,
            tensors=len(sizes),
            kept_bytes=sum(sizes),
        )
        for block, sizes in found.items()
    ]
    yield from sorted(kept, key=lambda row: (-row.kept_bytes, row.path))


def _kept(trace: MemoryTrace) -> Iterator[tuple[Block, int]]:
    for event in trace.events:
        if event.phase == "forward" and event.block.part == "activations" and event.size_bytes > 0:
            yield event.block, trace.taken(event.size_bytes)


def _alike(trace: MemoryTrace) -> dict[str, str]:
    """Return the rows of modules that save blocks of the same kinds."""
    kinds: dict[str, set[Block]] = defaultdict(set)
    for block, _ in _kept(trace):
        kinds[block.path].add(block._replace(path=""))
    alike = collapse((path, frozenset(blocks), path) for path, blocks in kinds.items())
    return {path: row for row, _, paths in alike for path in paths}


def what(path: str, operator: str) -> str:
    """Return the role of a tensor in BERT; the operator if no role is known."""
    for end, made_by, name in _WHAT:
        if re.search(end, path) and re.fullmatch(made_by, operator):
            return name
    return operator


def _timeline(trace: MemoryTrace) -> Iterator[Sample]:
    """Yield the bytes by part over the step: of each interval of events only the highest and the last point."""
    start = dict.fromkeys(PARTS, 0)
    for block, size in trace.state:
        start[block.part] += trace.taken(size)
    if not trace.events:
        return
    yield Sample(phase=trace.events[0].phase, parts=Parts(**start))
    live = trace.live_bytes()
    chosen = {*_highest(live, max(len(live) // SAMPLES, 1)), *(moment.index for moment in trace.peaks())}
    sums = accumulate(trace.events, lambda there, event: _with(there, event, trace), initial=start)
    next(sums)
    for index, there in enumerate(sums):
        if index in chosen:
            yield Sample(phase=trace.events[index].phase, parts=Parts(**there))


def _with(there: dict[str, int], event: MemoryEvent, trace: MemoryTrace) -> dict[str, int]:
    part = event.block.part
    return there | {part: there[part] + trace.taken(event.size_bytes)}


def _highest(live: list[int], width: int) -> Iterator[int]:
    """Yield the indices of the highest and the last point of every interval of `width`."""
    for start in range(0, len(live), width):
        interval = range(start, min(start + width, len(live)))
        yield max(interval, key=lambda index: live[index])
        yield interval[-1]
