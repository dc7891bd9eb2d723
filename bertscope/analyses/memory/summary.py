"""From a trace to what it says: peaks and their parts, what is kept, and the course of the step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from bertscope.analyses.memory.events import PARTS, Block, MemoryEvent, MemoryTrace, parts
from bertscope.reports.memory import DeviceTerms, KeptRow, Memory, Parts, PhasePeak, Sample

_NUMBER = re.compile(r"\.(\d+)(?=\.|$)")
SAMPLES = 600  # points of a timeline; the peaks are always among them
# What a tensor is to BERT, by the end of its module's path and the operator that made it.
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
    trace: MemoryTrace, obtained: str, device: DeviceTerms | None = None, traced_layers: int | None = None
) -> Memory:
    """What a trace says, as a report."""
    phases = tuple(
        PhasePeak(
            phase=moment.phase,
            peak_bytes=moment.live_bytes,
            path=folded(moment.path),
            operator=moment.operator,
            parts=Parts(**parts(trace.at(moment))),
        )
        for moment in trace.peaks()
    )
    kept = tuple(kept_rows(trace))
    return Memory(
        obtained=obtained,
        phases=phases,
        kept=kept,
        kept_bytes=sum(row.kept_bytes for row in kept),
        timeline=tuple(_timeline(trace)),
        device=device,
        traced_layers=traced_layers,
    )


def folded(path: str) -> str:
    """The path with every number as `*`, so that equal layers are one."""
    return _NUMBER.sub(".*", path)


def kept_rows(trace: MemoryTrace, key: Callable[[str], str] = folded) -> Iterator[KeptRow]:
    """What the forward pass keeps, largest first; modules whose paths have the same `key` are one."""
    groups: dict[Block, list[tuple[Block, int]]] = defaultdict(list)
    for event in trace.events:
        if event.phase == "forward" and event.block.part == "activations" and event.size_bytes > 0:
            kind = event.block._replace(path=key(event.block.path))
            groups[kind].append((event.block, trace.taken(event.size_bytes)))
    rows = [_kept_row(kind, blocks) for kind, blocks in groups.items()]
    yield from sorted(rows, key=lambda row: (-row.kept_bytes, row.path))


def _kept_row(key: Block, blocks: list[tuple[Block, int]]) -> KeptRow:
    return KeptRow(
        path=_together(block.path for block, _ in blocks),
        operator=key.operator,
        what=what(key.path, key.operator),
        shape=key.shape,
        dtype=key.dtype,
        tensors=len(blocks),
        kept_bytes=sum(size for _, size in blocks),
    )


def _together(paths: Iterable[str]) -> str:
    """`encoder.layer.0-11.output` for paths that differ in one number."""
    names = list(dict.fromkeys(paths))
    numbers = sorted({int(found[1]) for found in map(_NUMBER.search, names) if found})
    if len(names) == 1 or len(numbers) != len(names):
        return names[0] if len(names) == 1 else folded(names[0])
    whole = numbers[-1] - numbers[0] + 1 == len(numbers)
    shown = f"{numbers[0]}-{numbers[-1]}" if whole else ",".join(map(str, numbers))
    return _NUMBER.sub(f".{shown}", names[0], count=1)


def what(path: str, operator: str) -> str:
    """What such a tensor is to BERT; the operator itself where nothing better is known."""
    for end, made_by, name in _WHAT:
        if re.search(end, path) and re.fullmatch(made_by, operator):
            return name
    return operator


def _timeline(trace: MemoryTrace) -> Iterator[Sample]:
    """The parts over the step, thinned out; in each stretch the highest point stands for it."""
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
    """The place of the highest and the last point of every stretch of `width`."""
    for start in range(0, len(live), width):
        stretch = range(start, min(start + width, len(live)))
        yield max(stretch, key=lambda place: live[place])
        yield stretch[-1]
