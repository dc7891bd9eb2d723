"""The lines under a table: every total under its convention's name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bertscope.errors import named, one_line, shown
from bertscope.reports.base import PYTHON_ONLY, UNCOUNTED, Note, Subject
from bertscope.settings.run_config import AUTOCAST, CPU, INFERENCE
from bertscope.units import bytes_text, count_text, counted, flops_text

if TYPE_CHECKING:
    from bertscope.reports.memory import TrainingFile, TrainingKey
    from bertscope.reports.modules import CountReport, TreeReport, WrittenSum
    from bertscope.views.console import Target

SHOWN_TIES = 8
SHOWN_PARTS = 4
_OF_A_RUN = ("memory", "fit", "lengths")  # kinds whose numbers depend on the implementation of the model


def title(report: Any) -> str:
    """Return `bert-large-zh: BertModel, sdpa attention, as in transformers 4.43.4` for a report with a `subject`."""
    subject: Subject = report.subject
    text = subtitle(report)
    return text if subject.name == subject.architecture else f"{one_line(subject.name, limit=120)}: {text}"


def subtitle(report: Any) -> str:
    """Return the title without the model's name."""
    subject: Subject = report.subject
    attention = f"{subject.attention} attention" if subject.attention else ""
    whose = subject.implementation if report.kind in _OF_A_RUN else ""
    return ", ".join(filter(None, (subject.architecture, attention, one_line(subject.adapters, limit=125), whose)))


def with_head(report: Any) -> str:
    """Return the title, and that the model has no head: presets of one family differ in that."""
    name = report.subject.architecture
    return title(report) if report.subject.has_head else title(report).replace(name, f"{name} (no head)", 1)


def note_text(note: Note) -> str:
    """Return the sentence of a report's note."""
    values = note.values
    match note.key:
        case "no_time_cpu":
            return f"no time: it is predicted for CUDA only; give {named('gpu')} or {named('device')} cuda"
        case "no_time_uncalibrated":
            return f"no time: {values['gpu']} has no calibration, and its data sheet is not enough here"
        case "no_time_precision":
            return "no time: the calibration has no times for the precisions that fit in one process"
        case "no_time_sheet":
            return (
                "a data sheet gives times from 25 ms for training in one process, in a precision with a published peak"
            )
        case "no_time_measure":
            return "'bertscope profile --device cuda --save FILE' on the machine with the GPU makes a calibration"
        case "cpu_scratch_not_counted":  # UNCOUNTED
            on_cpu = f"scratch of {values['kernels']} on a CPU is not counted"
            return on_cpu if values["device"] == CPU else "cuDNN workspaces (0 to 3.3 GiB) not counted"
        case "not_verified":
            return str(values["kernel"])
        case "python_only":
            return f"given as a Python object, so no command line repeats this: {', '.join(values['names'])}"
        case "plan_unchanged":
            return f"{values['names']} cannot change: {shown(values['why'])}"
        case "why_no_frames":
            return "no stacks were recorded: _record_memory_history(stacks='python') records them"
    raise KeyError(note.key)


def why_no_time(report: Any) -> str:
    """Return why there is no time, which the command prints on stderr, as lines after the text."""
    items = (item for item in getattr(report, "notes", ()) if item.key.startswith("no_time"))
    return "".join(f"\nnote: {note_text(item)}" for item in items)


def uncounted(report: Any) -> list[str]:
    """Return sentences on the kernels whose scratch an estimate leaves out, and on what no command repeats."""
    shown_below = (UNCOUNTED, PYTHON_ONLY)
    return [note_text(note) for note in getattr(report, "notes", ()) if note.key in shown_below]


def training_file_notes(file: TrainingFile, device: str) -> Iterator[str]:
    """Yield the effects of the keys of a training file, a line for each list and for each key that is not modelled."""
    yield f"{file.path} ({file.format}): {_keys(file.used) or 'sets nothing that changes the memory of a step'}"
    if file.replaced:
        rows = (f"{row.key} {str(row.value).lower()}: {row.effect}" for row in file.replaced)
        yield f"not used of {file.path}: {', '.join(rows)}"
    for row in file.not_modelled:
        yield f"not modelled: {_keys([row])}"
    if file.unknown:
        yield f"unknown keys, not used: {', '.join(one_line(row.key, limit=40) for row in file.unknown)}"
    if device == CPU and str(file.fields.get("precision", "")).startswith(AUTOCAST):
        yield f"{file.fields['precision']} suggests a GPU, and this step is on a CPU; {named('gpu')} names its GPU"
    if file.no_effect:
        yield (
            f"{counted(len(file.no_effect), 'other key')} {'has' if len(file.no_effect) == 1 else 'have'} no effect on "
            f"the memory of a training step ({named('to_json()')} lists them)"
        )


def _keys(rows: Sequence[TrainingKey]) -> str:
    texts: dict[str, list[str]] = {}
    for row in rows:
        texts.setdefault(row.effect, []).append(f"{row.key}={one_line(json.dumps(row.value), limit=40)}")
    return "; ".join(f"{', '.join(keys)}: {effect}" for effect, keys in texts.items())


def footer(report: CountReport | TreeReport, target: Target | None = None) -> Iterator[tuple[str, str]]:
    """Yield the names and figures of the totals, one line each; without -v those that the answer does not have."""
    totals, ties, subject = report.totals, report.ties, report.subject
    is_verbose = target is None or target.verbose
    sums: Sequence[WrittenSum] = getattr(report, "sums", ())
    if is_verbose:
        tied = "a tied tensor at every layer that uses it" if ties else "nothing is tied"
        yield "unique parameters", f"{count_text(totals.distinct_params)} (every tensor once)"
        yield "sum over layers", f"{count_text(totals.layer_params)} ({tied})"
    for item in sums:
        if item.name == "total":
            yield "" if is_verbose else "sum over layers", f"{item.terms} = {count_text(item.params)}"
    for number, tie in enumerate(ties[:SHOWN_TIES]):
        both = "; the table counts it at both" * (not number)
        yield "" if number else "tied", f"{tie.path} is {tie.is_path} ({count_text(tie.params)}){both}"
    if len(ties) > SHOWN_TIES:
        yield "", f"and {len(ties) - SHOWN_TIES} more ties; {named('to_json()')} lists them all"
    several = sum(item.name == "layer" for item in sums) > 1
    has_few = sum(item.name not in ("layer", "total") for item in sums) <= SHOWN_PARTS
    for item in sums:
        if item.name == "layer":
            yield "one layer", f"{f'{item.path}: ' * several}{item.terms} = {count_text(item.params)}"
        elif item.name != "total" and has_few:
            yield "", f"{item.name}: {item.terms} = {count_text(item.params)}"
    share = f" ({100 * totals.trainable_params / totals.distinct_params:.4f} %)" if totals.frozen_params else ""
    over = f"{count_text(totals.trainable_layer_params)}, frozen {count_text(totals.frozen_layer_params)}"
    over = f" (sum over layers {over})" if ties and is_verbose else ""
    yield "trainable", f"{count_text(totals.trainable_params)}{share}, frozen {count_text(totals.frozen_params)}{over}"
    if is_verbose:
        yield "buffers", f"{count_text(totals.buffer_params)} elements ({bytes_text(totals.buffer_bytes)})"
    unit = " (unique parameters; 1 MiB = 2**20 B)" if is_verbose else ""
    yield "size", f"{bytes_text(totals.fp32_bytes)} in fp32, {bytes_text(totals.bf16_bytes)} in bf16{unit}"
    if (flops := getattr(report, "matmul_flops", None)) is not None:
        macs = f"{count_text(flops // 2)} multiply-adds (matrix products, at these shapes)"
        yield "forward pass", f"{flops_text(flops)}, {macs}"
    if report.unknown:
        yield "not counted", f"{len(report.unknown)} not yet initialised: {', '.join(report.unknown)}"
    if is_verbose:
        classes = subject.implementation or ""  # their version may decide how many parameters there are
        version = f", {classes}" if classes.startswith("transformers ") else ""
        yield subject.obtained, f"from the torch modules' own tensors; torch {subject.torch_version}{version}"


def is_generation_left_out(report: Any) -> bool:
    """Return True for the inference of a decoder: one forward pass, which a reader may take for generate()."""
    is_decoder = re.search("CausalLM|LMHead|ConditionalGeneration|Seq2SeqLM", report.subject.architecture)
    return report.run.mode == INFERENCE and is_decoder is not None
