"""The report on a memory trace: peaks by part, tensors saved for backward, a timeline, and traffic between ranks."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any

from bertscope.gpus import Gpu, gpu_threads, sdpa_kernel
from bertscope.memory.caching_allocator import AFTER_ANOTHER, LOADED, Allocator, Workspaces, replayed, requests
from bertscope.memory.kernel_rules import by_thread, overhead, placements
from bertscope.memory.trace import ON_HOST, TO_GPU, TO_HOST, Collective, MemoryTrace, Moment
from bertscope.reports.base import UNCOUNTED, UNVERIFIED, Note, Subject
from bertscope.reports.json import not_negative, typed
from bertscope.reports.memory import (
    ALL_GATHER,
    ALL_REDUCE,
    BACKWARD,
    BROADCAST,
    FORWARD,
    OPTIMIZER,
    REDUCE_SCATTER,
    Memory,
    MemoryReport,
    RankGroup,
    Sample,
    SavedRow,
    TrafficRow,
    Variant,
)
from bertscope.reports.step import ByteRange, Parts, PhasePeak, StepCost
from bertscope.settings.checkpointing import NONE
from bertscope.settings.parallelism import REPLICATE, Parallelism
from bertscope.settings.run_config import CPU, CUDA, RunConfig

# Operators whose temporary memory is not counted, nor on a CPU the workspace that an LSTM saves for backward.
_UNCOUNTED_KERNELS = {CPU: {"convolution": "convolutions", "mkldnn_rnn_layer": "LSTMs"}, CUDA: {"convolution": "cuDNN"}}
SAMPLES = 600  # points of a timeline; the peaks are always among them
# The role of a tensor in BERT, by the end of its module's path and the operator that made it.
_WHAT = (
    (r"attention\.self(\.dropout)?$", r"_(safe_)?softmax", "attention probabilities"),
    (r"attention\.self(\.dropout)?$", r"empty_like|bernoulli.*", "attention dropout mask"),
    (r"attention\.self(\.dropout)?$", r"native_dropout", "dropped probabilities and mask"),
    (r"attention\.self(\.dropout)?$", r"mul", "dropped probabilities, or scaled query and key"),
    (r"attention\.self$", r"clone|_unsafe_view|bmm", "query, key, value and context, by head"),
    (r"attention\.self\.(query|key|value)$", r"addmm|add", "query, key, value"),
    (r"attention\.self$", r"_scaled_dot_product.*", "attention output and logsumexp"),
    (r"intermediate\.dense$", r"addmm", "activation's input"),
    (r"intermediate(\.intermediate_act_fn)?$", r"gelu|relu|silu|tanh|mul|pow|add", "activation's output"),
    (r"dropout(\.default)?$", r"empty_like|bernoulli.*", "dropout mask"),
    (r"dropout(\.default)?$", r"native_dropout", "dropout's output and mask"),
    (r"dropout(\.default)?$", r"mul", "dropout's output"),
    (r"lora_A\.default$", r"mm", "adapter's inner activations"),
    (r"", r"native_layer_norm", "LayerNorm's output, mean and deviation"),
    (r"(output|embeddings)$", r"add", "residual sum, LayerNorm's input"),
    (r"", r"_to_copy", "copy in another dtype"),
    (r"", r"_log_softmax", "log-probabilities of the vocabulary"),
    (r"", r"get_rng_state", "random state for recomputation"),
)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts of a model as a run has it, which reports show."""

    subject: Subject
    params: int
    rows: dict[str, str]  # the row of each module's path
    units: str  # of FSDP
    groups: tuple[RankGroup, ...]
    buckets: int  # of DDP
    strategies: tuple[str, ...]  # of checkpointing, to compare by default

    @classmethod
    def of(cls, data: Any) -> "ModelFacts":
        """Return the facts that asdict wrote, from JSON; raises ValueError for data that no model has."""
        not_negative(data)
        facts: ModelFacts = typed(cls, data, "facts")
        return facts


def memory(trace: MemoryTrace, obtained: str, rows: Mapping[str, str], **device: Any) -> Memory:
    """Return the report on a trace; `rows` gives the row of each module's path, `device` the fields of a GPU's cost."""
    phases = tuple(_peak(trace, moment, rows) for moment in trace.peaks())
    reserved = device.get("reserved")
    if obtained == "measured" and reserved and reserved.low_bytes < trace.peak_bytes:
        # Profiler and allocator measured two steps and round differently: what is allocated is reserved too.
        high = max(trace.peak_bytes, reserved.high_bytes)
        device["reserved"] = ByteRange(low_bytes=trace.peak_bytes, high_bytes=high)
    return Memory(
        obtained=obtained,
        cost=step_cost(trace, rows, **device),
        phases=phases,
        saved=tuple(saved_rows(trace, rows)),
        timeline=tuple(_timeline(trace)),
        traced_layers=trace.traced_layers,
    )


def step_cost(trace: MemoryTrace, rows: Mapping[str, str], **device: Any) -> StepCost:
    """Return a step's cost without a limit; `device` has the fields that a GPU adds."""
    highest = max(trace.peaks(), key=attrgetter("live_bytes"))
    return StepCost(peak=_peak(trace, highest, rows), **{"saved_bytes": trace.saved_bytes, **device})


def _peak(trace: MemoryTrace, moment: Moment, rows: Mapping[str, str]) -> PhasePeak:
    return PhasePeak(
        phase=moment.phase,
        peak_bytes=moment.live_bytes,
        path=rows.get(moment.path, moment.path),
        operator=moment.operator,
        parts=Parts(**trace.parts_after(moment.index)),
    )


def saved_rows(trace: MemoryTrace, rows: Mapping[str, str]) -> Iterator[SavedRow]:
    """Yield the tensors saved for backward, largest first, summed over a row's modules."""
    sizes_of: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for number in trace.saved_events:
        block = trace.block(number)
        key = rows.get(block.path, block.path), *block[2:]
        sizes_of[key].append(trace.sizes[number])
    saved = [
        SavedRow(
            path=path,
            operator=operator,
            what=what(path, operator),
            shape=shape,
            dtype=dtype,
            tensors=len(sizes),
            total_bytes=sum(sizes),
        )
        for (path, operator, shape, dtype, *_), sizes in sizes_of.items()
    ]
    yield from sorted(saved, key=lambda row: (-row.total_bytes, row.path))


@cache
def what(path: str, operator: str) -> str:
    """Return a tensor's role in BERT; the operator if no role is known."""
    for end, made_by, name in _WHAT:
        if re.search(end, path) and re.fullmatch(made_by, operator):
            return name
    return operator


def _timeline(trace: MemoryTrace) -> Iterator[Sample]:
    """Yield the bytes by part over the step: of each interval of events only the highest and the last point."""
    layout = trace.layout
    if not layout.parts:
        return
    sums = trace.parts_after(-1)
    yield Sample(phase=layout.places[0][0], parts=Parts(**sums))
    live, chosen, begun = trace.live_bytes(), {moment.index for moment in trace.peaks()}, 0
    width = max(len(live) // SAMPLES, 1)
    for start in range(0, len(live), width):
        interval = live[start : start + width]
        chosen |= {start + interval.index(max(interval)), start + len(interval) - 1}
    for index in sorted(chosen):
        if index >= begun:  # not before the first event
            for part, size in zip(layout.parts[begun : index + 1], trace.sizes[begun : index + 1], strict=True):
                sums[part] += size
            begun = index + 1
            phase, path, operator = layout.places[index]
            yield Sample(phase=phase, parts=Parts(**sums), path=path, operator=operator)


# ---- the report of an estimate, and on CUDA what the allocator, cuBLAS and the context add ----


def estimated(trace: MemoryTrace, run_config: RunConfig, rows: Mapping[str, str], gpu: Gpu | None = None) -> Memory:
    """Return the memory of a step, with the peak of the same step in another loop."""
    device = device_cost(trace, run_config, gpu)
    if device:
        laid = by_thread(run_config, device["workspace_bytes"])
        replays = [replay(trace, run_config, laid, history=history) for history in (LOADED, AFTER_ANOTHER)]
        peaks = [device["max_allocated_bytes"], *(allocator.peak_allocated_bytes for allocator in replays)]
        device["allocated"] = ByteRange(low_bytes=min(peaks), high_bytes=max(peaks))
        device["reserved_loaded_bytes"] = replays[0].peak_reserved_bytes
    return memory(trace, "estimated", rows, other_loop_bytes=trace.other_peak_bytes, **device)


def replay(trace: MemoryTrace, run_config: RunConfig, laid: Workspaces, *rest: Any, **more: Any) -> Allocator:
    """Return the allocator after the steps of a run whose workspaces lie there; the rest is as for `replayed`."""
    return replayed(requests(trace, laid), *rest, expandable_segments=run_config.expandable_segments, **more)


_SPREAD = 0.005  # of the reserved bytes: a smaller difference is no range


def reserved_range(replays: Iterable[Allocator]) -> ByteRange:
    """Return the reserved bytes of a run over its workspaces' places: of the first if all agree about.

    In the first place the workspaces are among the allocated bytes, which are reserved in any.
    """
    first, *rest = replays
    peaks = [first.peak_reserved_bytes, *(allocator.peak_reserved_bytes for allocator in rest)]
    low, high = max(min(peaks), first.peak_allocated_bytes), max(peaks)
    is_one = high - low <= _SPREAD * peaks[0]
    return ByteRange(low_bytes=peaks[0] if is_one else low, high_bytes=peaks[0] if is_one else high)


def device_cost(trace: MemoryTrace, run_config: RunConfig, gpu: Gpu | None = None) -> dict[str, Any]:
    """Return the fields that a CUDA device, a GPU or any, adds to a cost; none for the CPU."""
    if run_config.device != "cuda":
        return {}
    room = overhead(run_config, None, gpu)
    replays = [replay(trace, run_config, laid) for laid in placements(run_config, room.workspace_bytes)]
    reserved = reserved_range(replays)
    return {
        "max_allocated_bytes": replays[0].peak_allocated_bytes,
        "workspace_bytes": room.workspace_bytes,
        "reserved": reserved,
        "context": room.context,
        **host_cost(trace, run_config),
    }


def uncounted_notes(trace: MemoryTrace, run_config: RunConfig) -> tuple[Note, ...]:
    """Return notes on the kernels of the step whose scratch is left out, and on those whose rules no test holds."""
    operators = {operator for _, _, operator in trace.layout.places}
    kernels = [name for operator, name in _UNCOUNTED_KERNELS[run_config.device].items() if operator in operators]
    values = {"kernels": " and ".join(kernels), "device": run_config.device}
    unverified = tuple(Note(key=UNVERIFIED, values={"kernel": text}) for text in trace.notes)
    return (Note(key=UNCOUNTED, values=values), *unverified) if kernels else unverified


def memory_report(
    about: Subject, run_config: RunConfig, variants: tuple[Variant, ...], *, machine: str = ""
) -> MemoryReport:
    """Return the report on these variants of a model, with the run that they share."""
    return MemoryReport(
        subject=replace(about, obtained="measured" if machine else "estimated"),
        run=run_config.changed(checkpointing=NONE),
        machine=machine or "estimated on fake tensors",
        variants=variants,
    )


def for_gpu(run_config: RunConfig, gpu: Gpu | None) -> RunConfig:
    """Return the run with the threads of the GPU, and its attention kernel unless another one is asked for."""
    if gpu is None:
        return run_config
    chosen = sdpa_kernel(gpu, run_config.compute_precision) if run_config.sdpa_kernel == "auto" else None
    return replace(run_config, sdpa_kernel=chosen or run_config.sdpa_kernel, gpu_threads=gpu_threads(gpu) or 0)


def host_cost(trace: MemoryTrace, run_config: RunConfig) -> dict[str, int]:
    """Return the fields of a step that uses the host's memory: what lies there, and what is copied in either way."""
    lying = moved = 0
    for call in trace.collectives:
        if call.kind == ON_HOST or (call.kind, call.phase) == (TO_HOST, FORWARD):
            lying += call.full_bytes
        if call.kind in (TO_HOST, TO_GPU):
            moved += call.full_bytes * (1 if call.phase == OPTIMIZER else run_config.accumulate)
    return {"host_bytes": lying, "copied_bytes": moved} if lying else {}


# ---- the traffic between ranks ----

NAMESPACES = ("c10d", "_c10d_functional")  # of torch.distributed's operators


# Kind -> how its operators' names begin, and how often each rank sends its share of a tensor in a ring: Patarasuk and
# Yuan 2009, doi 10.1016/j.jpdc.2008.09.002. An all-reduce is a reduce-scatter and an all-gather.
COLLECTIVE_SHARES: dict[str, tuple[tuple[str, ...], int]] = {
    ALL_GATHER: (("allgather", "all_gather"), 1),
    REDUCE_SCATTER: (("reduce_scatter",), 1),
    ALL_REDUCE: (("allreduce", "all_reduce"), 2),
    BROADCAST: (("broadcast",), 1),
}


def kind_of(operator: str) -> str:
    """Return the kind of an operator such as `_allgather_base_`, empty if it moves nothing between ranks."""
    name = operator.strip("_")
    return next((kind for kind, (starts, _) in COLLECTIVE_SHARES.items() if name.startswith(starts)), "")


def sent_bytes(kind: str, full_bytes: int, ranks: int) -> int:
    """Return the bytes that each of `ranks` sends in a ring, on average, for a tensor of `full_bytes`.

    >>> sent_bytes("all-reduce", 1000, 4)
    1500
    """
    return COLLECTIVE_SHARES[kind][1] * full_bytes * (ranks - 1) // ranks


def traffic(
    collectives: Iterable[Collective],
    rows: Mapping[str, str],
    bucket_count: int,
    parallelism: Parallelism,
    micro_batches: int = 1,
) -> tuple[TrafficRow, ...]:
    """Return the traffic in a step, from the collectives in one micro-batch and in the optimizer step.

    `rows` gives the row of each module's path. DDP reduces gradients not by module but in buckets, which are one row;
    `bucket_count` is their number.
    """
    sent_rows: dict[tuple[str, str, str, int], TrafficRow] = {}
    reductions = micro_batches if parallelism.sync_each_batch else 1
    buckets = reductions * bucket_count if parallelism.row.has_buckets else 0
    for call in (call for call in collectives if call.kind in COLLECTIVE_SHARES):
        # What each reduction of gradients has once; DDP broadcasts the buffers after one.
        is_of_replicas = call.kind == ALL_REDUCE and REPLICATE in parallelism.row.dimensions
        is_reduction = (call.phase, call.kind) == (FORWARD, BROADCAST) or (
            call.phase == BACKWARD and (call.kind == REDUCE_SCATTER or is_of_replicas)
        )
        is_in_buckets = parallelism.row.has_buckets and (call.phase, call.kind) == (BACKWARD, ALL_REDUCE)
        path = "" if is_in_buckets else rows.get(call.path, call.path)
        times = 1 if call.phase == "optimizer" else reductions if is_reduction else micro_batches
        key = (call.phase, call.kind, path, call.ranks)
        row = sent_rows.get(key) or TrafficRow(
            phase=call.phase, collective=call.kind, path=path, ranks=call.ranks, calls=0, full_bytes=0, sent_bytes=0
        )
        sent = sent_bytes(call.kind, call.full_bytes, call.ranks)
        sent_rows[key] = replace(
            row,
            calls=buckets if is_in_buckets else row.calls + times,
            full_bytes=row.full_bytes + times * call.full_bytes,
            sent_bytes=row.sent_bytes + times * sent,
        )
    return tuple(sent_rows.values())
