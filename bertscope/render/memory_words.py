"""The text under the table of a memory report: bars, conclusions, and how each number was obtained."""

import json
from collections.abc import Iterator, Sequence

from bertscope.errors import one_line
from bertscope.render.console import Target, wrapped
from bertscope.render.footer import title
from bertscope.render.timeline.panels import run_text, variant_name
from bertscope.reports.memory import DeviceTerms, Memory, MemoryReport, PhasePeak, TrainingFile, TrainingKey, Variant
from bertscope.units import bytes_text, count_text

_BAR_WIDTH = 48
# A different letter for each, so that the bars can be read without colour.
_MARKS = {
    "parameters": "P",
    "buffers": "b",
    "optimizer_state": "O",
    "inputs": "i",
    "gradients": "G",
    "activations": "A",
    "temporaries": "t",
}

# cuBLASLt: CUBLASLT_WORKSPACE_SIZE is 1024 KiB by default (torch's CublasHandlePool.cpp).
NOT_COUNTED = "not counted: cuBLASLt's workspace of 1 MiB for each thread, and that of cuDNN, if attention runs there"


def bars(report: MemoryReport, target: Target) -> str:
    """Draw the parts at each variant's peak, to one scale."""
    memories = [(variant_name(variant), variant.memory) for variant in report.variants if variant.memory]
    if not memories:
        return ""
    highest = max(memory.peak.peak_bytes for _, memory in memories) or 1
    label = max(len(name) for name, _ in memories) + 1
    width = max(min(_BAR_WIDTH, (target.width or 80) - label - 14), 8)
    drawn = [_bar(memory, highest, width) for _, memory in memories]
    lines = [
        f"{name:<{label}}{bar:<{width}} {bytes_text(memory.peak.peak_bytes)}"
        for (name, memory), bar in zip(memories, drawn, strict=True)
    ]
    used = [part for part, mark in _MARKS.items() if any(mark in bar for bar in drawn)]
    legend = " " * label + " ".join(f"{_MARKS[part]} {part.replace('_', ' ')}" for part in used)
    return "\n".join(line.rstrip() for line in lines) + "\n" + wrapped(legend, target, label)


def _bar(memory: Memory, highest: int, width: int) -> str:
    text, sum_bytes = "", 0
    for part, mark in _MARKS.items():
        sum_bytes += getattr(memory.peak.parts, part)
        text += mark * (round(width * sum_bytes / highest) - len(text))
    return text


def verdict(report: MemoryReport) -> str:
    """Return the peak of each variant and its moment in a sentence, with the settings that it assumes."""
    known = [(variant, variant.memory) for variant in report.variants if variant.memory is not None]
    is_only = len(report.variants) == 1
    peaks = []
    for variant, memory in known:
        place = _place(memory.peak) if is_only else _phase(memory.peak)
        reserved = f", reserved {bytes_text(memory.device.reserved_bytes)}" if memory.device else ""
        whose = "" if is_only else f"{variant_name(variant)}: "
        peaks.append(f"{whose}peak {bytes_text(memory.peak.peak_bytes)} {place}{reserved}")
    return f"{'; '.join(peaks) or 'nothing was measured'}; assumed: {title(report)}, {run_text(report.run)}"


def notes(report: MemoryReport) -> Iterator[str]:
    """Yield what to conclude from the table, and how each number was obtained."""
    yield from conclusions(report)
    yield from footnotes(report)


def conclusions(report: MemoryReport) -> Iterator[str]:
    """Yield the gain and cost of each further variant against the first, and the place of each peak."""
    for variant in report.variants:
        if variant.failure:
            yield f"{variant_name(variant)}: {one_line(variant.failure)}"
    known = [(variant, variant.memory) for variant in report.variants if variant.memory is not None]
    for other, memory in known[1:]:
        yield _comparison(*known[0], other, memory)
        if memory.peak.peak_bytes >= known[0][1].peak.peak_bytes and other.outlook is not None:
            points = "".join(
                f"; at batch {point.batch}: {bytes_text(point.peak_bytes)} instead of {bytes_text(point.first_bytes)}"
                for point in other.outlook.points
            )
            yield f"the peak is lower from batch {other.outlook.pays_from_batch} on{points} (estimated)"
    for variant, memory in known:
        yield f"{variant_name(variant)}: peak {_place(memory.peak)}"


def _place(peak: PhasePeak) -> str:
    text = _phase(peak)
    if peak.operator:
        text += f", in {peak.operator}"
    return text + (f" of {peak.path}" if peak.path else " of the model's own code" if peak.phase != "optimizer" else "")


def _phase(peak: PhasePeak) -> str:
    return "in the optimizer step" if peak.phase == "optimizer" else f"in {peak.phase}"


def _comparison(first: Variant, first_memory: Memory, other: Variant, memory: Memory) -> str:
    before, after = first_memory.peak.peak_bytes, memory.peak.peak_bytes
    kept = f"saves {bytes_text(memory.kept_bytes)} for backward instead of {bytes_text(first_memory.kept_bytes)}"
    text = f"{variant_name(other)} {kept}; the peak "
    if after < before:
        text += f"falls by {bytes_text(before - after)} ({100 * (before - after) / before:.1f} %)"
    elif after == before:
        text += "does not change: no tensor saved for backward exists at the peak"
    else:
        text += f"rises by {bytes_text(after - before)}"
    if first.timing and other.timing and first.timing.median_seconds:
        ratio = other.timing.median_seconds / first.timing.median_seconds
        text += f"; a step takes {ratio:.2f} x as long"
        if first.timing.flops and other.timing.flops:
            text += f" ({other.timing.flops / first.timing.flops:.2f} x the FLOPs)"
        if _overlap(first.timing.step_seconds, other.timing.step_seconds):
            text += "; the times overlap: more --steps tell more"
    return text


def _overlap(some: Sequence[float], others: Sequence[float]) -> bool:
    """Return True if both have several times, and neither has only times below those of the other."""
    return min(len(some), len(others)) > 1 and min(some) <= max(others) and min(others) <= max(some)


def footnotes(report: MemoryReport) -> Iterator[str]:
    """Yield notes on how each number was obtained, and how far it may be off."""
    memories = [variant.memory for variant in report.variants if variant.memory]
    obtained = {memory.obtained for memory in memories}
    if "measured" in obtained:
        yield f"measured: the allocator's events on {report.machine}; times from separate steps without the profiler"
    if "estimated" in obtained:
        device = report.run.get("device")
        accuracy = "within 0.1 % of the measured peak of BERTs in training (docs/accuracy.md)"
        if device == "cuda":
            accuracy = "not compared with a GPU"
        how = "a run on fake tensors; torch dispatches every operator, nothing is allocated"
        yield f"estimated for {device}: {how}; {accuracy}"
    if layers := [memory.traced_layers for memory in memories if memory.traced_layers]:
        yield f"{max(layers)} layers ran; the other layers are extrapolated (verified)"
    if device_terms := next((memory.device for memory in memories if memory.device), None):
        yield from _device_notes(device_terms)
    has_gradients = report.run.get("accumulate", 1) > 1 or report.run.get("keep_gradients")
    start = f"optimizer state, {'and adds to existing' if has_gradients else 'without'} gradients"
    yield f"1 MiB = 2**20 B; tied tensors once; not the first step: it starts with {start}"


def _device_notes(device: DeviceTerms) -> Iterator[str]:
    low, high = device.context_low_bytes, device.context_high_bytes
    if low == high:
        yield f"context and other memory in use on the GPU: {bytes_text(low)}, measured"
        return
    workspaces = bytes_text(device.workspace_bytes)
    shown = " to ".join(bytes_text(device.reserved_bytes + context) for context in (low, high))
    yield f"allocated: in blocks of 512 B, with {workspaces} for cuBLAS (on Hopper 32 MiB for each thread)"
    yield NOT_COUNTED
    yield "reserved: the simulated caching allocator over three steps; the real one may differ by a tenth"
    yield f"the CUDA context adds {bytes_text(low)} to {bytes_text(high)} outside torch, by GPU and version of torch"
    yield f"nvidia-smi would show {shown}: reserved memory and the context"


def training_file_notes(file: TrainingFile) -> Iterator[str]:
    """Yield the effects of the keys of a training file, a line for each list and for each key that is not modelled."""
    yield f"{file.path} ({file.format}): {_keys(file.used) or 'sets nothing that changes the memory of a step'}"
    if file.replaced:
        rows = (f"{row.key} {str(row.value).lower()}: {row.effect}" for row in file.replaced)
        yield f"not used of {file.path}: {', '.join(rows)}"
    for row in file.not_modelled:
        yield f"not modelled: {_keys([row])}"
    if file.unknown:
        yield f"unknown keys, not used: {', '.join(one_line(row.key, limit=40) for row in file.unknown)}"
    if file.no_effect:
        number = count_text(len(file.no_effect))
        yield f"{number} other keys have no effect on the memory of a training step (--format json lists them)"


def _keys(rows: Sequence[TrainingKey]) -> str:
    return "; ".join(f"{row.key}={one_line(json.dumps(row.value), limit=40)}: {row.effect}" for row in rows)
