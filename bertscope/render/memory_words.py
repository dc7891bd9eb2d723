"""The text under the table of a memory report: bars, conclusions, and how each number was obtained."""

import json
from collections.abc import Iterable, Iterator, Sequence

from bertscope.errors import one_line
from bertscope.render.console import Target, wrapped
from bertscope.render.footer import title
from bertscope.render.timeline.panels import kernel_word, part_name, run_text, variant_name
from bertscope.render.traffic import parallel_words, ranks_notes, traffic_notes
from bertscope.reports.calibration import StepTime
from bertscope.reports.memory import DeviceTerms, Memory, MemoryReport, PhasePeak, Variant
from bertscope.reports.training import TrainingFile, TrainingKey
from bertscope.texts import phrase, say, word
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
    "gathered_parameters": "g",
    "communication": "c",
}


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
    legend = " " * label + " ".join(f"{_MARKS[part]} {part_name(part)}" for part in used)
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
        text = say("peak_of", size=bytes_text(memory.peak.peak_bytes), place=place)
        if memory.device and is_only:
            text = say("with_reserved", text=text, size=bytes_text(memory.device.reserved_bytes))
        peaks.append(text if is_only else say("named", name=variant_name(variant), text=text))
    if len(known) > 2:  # the table has the others
        sizes = [memory.peak.peak_bytes for _, memory in known]
        if max(sizes) == min(sizes):
            phases = dict.fromkeys(_phase(memory.peak) for _, memory in known)
            peaks = [say("equal_peaks", count=len(sizes), size=bytes_text(sizes[0]), place=say("comma").join(phases))]
        else:
            peaks = [say("lowest_peak", count=len(sizes), peak=peaks[sizes.index(min(sizes))])]
    kernel = kernel_word(report.subject.attention, report.run)
    words = run_text(report.run, inputs_given=report.inputs_given)
    settings = (*parallel_words(report.run, len(report.ranks)), title(report), kernel, words)
    answer = _fits(report) + say("semicolon").join(peaks) or say("nothing_measured")
    return say(
        "assumed",
        answer=answer,
        settings=say("comma").join(filter(None, settings)),
    )


def _fits(report: MemoryReport) -> str:
    """Return whether each variant fits on the GPU, as the beginning of a sentence; empty without a GPU."""
    if report.card is None:
        return ""
    card = say("card", name=report.card.name, size=bytes_text(report.card.memory_bytes))
    answers = {variant_name(variant): variant.answer for variant in report.variants if variant.answer}
    if len(set(answers.values())) == 1:
        every = "" if len(answers) == 1 else say("every", count=len(answers))
        return say("fits_on", every=every, answer=say(f"fits_{next(iter(answers.values()))}"), card=card)
    each = [say("fits_one", name=name, answer=say(f"answer_{answer}")) for name, answer in answers.items()]
    return say("fits_each", card=card, each=say("comma").join(each)) if each else ""


def notes(report: MemoryReport) -> Iterator[str]:
    """Yield what to conclude from the table, and how each number was obtained."""
    if report.card and report.card.calibration:
        yield say("named", name=report.card.name, text=phrase(report.card.calibration))
    yield from conclusions(report)
    yield from ranks_notes(report)
    yield from traffic_notes(report)
    yield from footnotes(report)


def conclusions(report: MemoryReport) -> Iterator[str]:
    """Yield the gain and cost of each further variant against the first, and the place of each peak."""
    for variant in report.variants:
        if variant.failure:
            yield say("named", name=variant_name(variant), text=one_line(phrase(variant.failure)))
    known = [(variant, variant.memory) for variant in report.variants if variant.memory is not None]
    for other, memory in known[1:]:
        yield _comparison(*known[0], other, memory)
        if memory.peak.peak_bytes >= known[0][1].peak.peak_bytes and other.outlook is not None:
            points = "".join(
                say("lower_at", batch=point.batch, size=bytes_text(point.peak_bytes),
                    before=bytes_text(point.first_bytes))
                for point in other.outlook.points
            )  # fmt: skip
            yield say("lower_from", batch=other.outlook.pays_from_batch, points=points)
    for variant, memory in known if len(report.variants) > 1 else ():  # the verdict names the place of one
        yield say("peak_is", name=variant_name(variant), place=_place(memory.peak))


def _place(peak: PhasePeak) -> str:
    is_own_code = not peak.path and peak.phase != "optimizer"
    words = ("operator" if peak.operator else "", "of" if peak.path else "of_own_code" if is_own_code else "")
    key = "_".join(filter(None, words))
    return say(key, phase=_phase(peak), operator=peak.operator, path=peak.path) if key else _phase(peak)


def _phase(peak: PhasePeak) -> str:
    return word("in", peak.phase)


def _comparison(first: Variant, first_memory: Memory, other: Variant, memory: Memory) -> str:
    before, after = first_memory.peak.peak_bytes, memory.peak.peak_bytes
    if after < before:
        percent = f"{100 * (before - after) / before:.1f}"
        text = say("peak_falls", size=bytes_text(before - after), percent=percent)
    elif after == before:
        text = say("peak_stays")
    else:
        text = say("peak_rises", size=bytes_text(after - before))
    if first.timing and other.timing and first.timing.median_seconds:
        ratio = other.timing.median_seconds / first.timing.median_seconds
        text += say("takes", ratio=f"{ratio:.2f}")
        if first.timing.flops and other.timing.flops:
            text += say("takes_flops", ratio=f"{other.timing.flops / first.timing.flops:.2f}")
        if _overlap(first.timing.step_seconds, other.timing.step_seconds):
            text += say("times_overlap")
    return say("named", name=variant_name(other), text=text)


def _overlap(some: Sequence[float], others: Sequence[float]) -> bool:
    """Return True if both have several times, and neither has only times below those of the other."""
    return min(len(some), len(others)) > 1 and min(some) <= max(others) and min(others) <= max(some)


def footnotes(report: MemoryReport) -> Iterator[str]:
    """Yield notes on how each number was obtained, and how far it may be off."""
    memories = [variant.memory for variant in report.variants if variant.memory]
    obtained = {memory.obtained for memory in memories}
    has_ranks = any(variant.rank_rows for variant in report.variants)
    if "measured" in obtained:
        yield say("note_ranks_measured" if has_ranks else "note_measured", machine=report.machine)
    if "estimated" in obtained:
        device = report.run.device
        accuracy = say("accuracy_cuda" if device == "cuda" else "accuracy_cpu")
        yield say("note_estimated", device=device, accuracy=accuracy)
    if layers := [memory.traced_layers for memory in memories if memory.traced_layers]:
        yield say("note_layers", count=max(layers))
    if device_terms := next((memory.device for memory in memories if memory.device), None):
        yield from _device_notes(device_terms, is_calibrated=bool(report.card and report.card.calibration))
    yield from time_notes(variant.predicted for variant in report.variants)
    yield say("note_units_kept" if report.run.has_gradients_before else "note_units")


def time_notes(times: Iterable[StepTime | None]) -> Iterator[str]:
    """Yield the way in which times were predicted, and the peaks that MFU refers to."""
    known = [time for time in times if time is not None]
    if known:
        yield say("note_time")
    for peak, source in dict.fromkeys((time.peak_flops, time.peak_source) for time in known):
        if peak is None:
            yield say("note_no_peak")
        else:
            yield say("note_mfu", peak=f"{peak / 1e12:,.1f}", source=source)


def _device_notes(device: DeviceTerms, *, is_calibrated: bool) -> Iterator[str]:
    low, high = device.context_low_bytes, device.context_high_bytes
    if low == high and not is_calibrated:
        yield say("note_context_measured", size=bytes_text(low))
        return
    yield say("note_allocated", size=bytes_text(device.workspace_bytes))
    # cuBLASLt: CUBLASLT_WORKSPACE_SIZE is 1024 KiB by default (torch's CublasHandlePool.cpp).
    if not is_calibrated:
        yield say("note_not_counted")
    yield say("note_reserved")
    yield say("note_context_calibrated" if is_calibrated else "note_context", range=range_text(low, high))
    yield say("note_smi", range=range_text(device.reserved_bytes + low, device.reserved_bytes + high))


def range_text(low: int, high: int) -> str:
    """Return `12.00 MiB to 3.00 GiB` for two numbers of bytes."""
    return say("range", low=bytes_text(low), high=bytes_text(high))


def training_file_notes(file: TrainingFile) -> Iterator[str]:
    """Yield the effects of the keys of a training file, a line for each list and for each key that is not modelled."""
    yield say("file", path=file.path, format=file.format, keys=_keys(file.used) or say("file_nothing"))
    if file.replaced:
        rows = (f"{row.key} {str(row.value).lower()}: {row.effect}" for row in file.replaced)
        yield say("file_not_used", path=file.path, keys=say("comma").join(rows))
    for row in file.not_modelled:
        yield say("file_not_modelled", keys=_keys([row]))
    if file.unknown:
        yield say("file_unknown", keys=say("comma").join(one_line(row.key, limit=40) for row in file.unknown))
    if file.no_effect:
        yield say("file_no_effect", count=count_text(len(file.no_effect)))


def _keys(rows: Sequence[TrainingKey]) -> str:
    return say("semicolon").join(f"{row.key}={one_line(json.dumps(row.value), limit=40)}: {row.effect}" for row in rows)
