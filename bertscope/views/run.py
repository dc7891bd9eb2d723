"""The report of `run` as a table, CSV and Markdown."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from shlex import join
from typing import Any

from bertscope.errors import as_sentence, named, one_line
from bertscope.gpus import COMMON
from bertscope.reports.base import Subject
from bertscope.reports.memory import BACKWARD, EVALUATING, FORWARD, MemoryReport, Variant
from bertscope.reports.run import UNRECORDED, RunFitReport, RunReport
from bertscope.reports.step import NO, UNCERTAIN, YES
from bertscope.settings.run_config import CUDA, RunConfig
from bertscope.units import bytes_text, count_text, counted, decimal
from bertscope.views import step
from bertscope.views.columns import attribute, fits_word, in_phase, number
from bertscope.views.console import Target, command_text
from bertscope.views.timeline import timeline
from bertscope.views.views import Heading, Table, View

_ROWS, _PATH = 8, 33  # without -v: lines that hold memory at the peak, characters of a module's path


def _answer(report: RunReport) -> str:
    peak, phase, at = "", "", ""
    if report.peak is not None:
        size, phase, at = report.peak.peak_bytes, report.peak.phase, _at(report.peak.line)
        if (whole := report.evaluation) and whole.highest_bytes == size:
            at = f" after {count_text(whole.batches)} batches"
        peak, phase = f"peak {bytes_text(size)}", f" {in_phase(phase)}"
    if not report.has_run:
        beyond = (f", no peak beyond the {peak}{phase}{at}" if peak else "", 1)
        return step.line_of("Nothing was measured: no model and no optimizer step ran on the GPU", beyond)
    more = ("" if report.updates else "; no optimizer step ran", 4)
    if not report.answer or report.cost is None or report.budget_bytes is None:
        return step.line_of(peak, (phase, 1), (at, 2), more)
    on = f"on {report.gpu.name}" if report.gpu else f"in {bytes_text(report.budget_bytes)}"
    verdict = f"{fits_word(report.answer)} {on}"
    line = _at(report.refused_lines[-1]) if report.failure and report.refused_lines else ""
    if report.is_cut:
        used = step.share_of(report.cost.gpu_bytes, report.budget_bytes)
        lacks = f" it asks for {bytes_text(report.refused_bytes[-1])} more, with {used} in use"
        return step.line_of(f"{verdict}:", (phase, 2), line, lacks)
    if report.failure:
        return step.line_of(f"{verdict}: {step.on_gpu(report.cost)}", f"; out of memory{line}")
    doubts = (f", {step.doubt(report.cost)}" if report.answer == UNCERTAIN else "", 5)
    return step.line_of(f"{verdict}: {step.on_gpu(report.cost)}", doubts, (f"; {peak}", 3), (phase, 1), (at, 2), more)


def _settings(report: RunReport | RunFitReport) -> str:
    cost = report.cost if isinstance(report, RunReport) else next((row.cost for row in report.rows), None)
    has_margin = cost and cost.margin and cost.limit_bytes is not None
    margin = f", {step.margin_text(cost.margin)} margin" if cost and has_margin else ""
    margin += "; simulated: values that it prints are not real" * isinstance(report, RunReport)
    return f"{one_line(join([report.script, *report.arguments]), limit=step.LINE - len(margin))}{margin}"


def _tip(report: RunReport) -> str:
    """Return the next run: without the limit that it exceeds, on a GPU, or with the picture of a step."""
    if report.remarks[-1:] == ("the function ran in this process, without a sandbox",) or not report.has_run:
        return ""
    code = f"bertscope.run({report.script!r}" + f", args={[*report.arguments]}" * bool(report.arguments)
    cost, is_limited = report.cost, report.budget_bytes is not None
    pairs = pairwise(" ".join(report.arguments).replace("=", " ").split())
    sizes = [(name.lstrip("-"), decimal(value)) for name, value in pairs if "batch" in name and decimal(value)]
    if report.failure and sizes:
        (name, most), limit = sizes[0], f"gpu={report.gpu.name!r}" if report.gpu else f"budget={report.budget_bytes}"
        search = f"{name.replace('-', '_')}=1..{most}"
        command = command_text("run", {"fit": search}, {}, f"{code}, {limit}, fit={search!r})")
        return f"find the largest {name} that fits\n  {command}"
    if cost and (report.failure or not is_limited):
        gpu, why = step.fitting_gpu(cost, COMMON), "see whether it fits on a GPU"
        command = command_text("run", {"gpu": gpu, "budget": None}, {}, f"{code}, gpu={gpu!r})") if gpu else ""
        return f"{'try a GPU with more memory' if is_limited else why}\n  {command}"
    command = command_text("run", {"timeline": "step.html"}, {}, "report.plot()")
    return f"draw the memory of the step\n  {command}"


def _at(line: str) -> str:
    return f" at {line}" if line else ""


def _tables(report: RunReport, target: Target | None, *, shown_rows: int | None = None) -> Sequence[Table]:
    """Return the phases and what is held at the peak.

    In a terminal without -v, the phases are those of the last step and of the one with the peak, and all evaluations.
    """
    is_whole = target is None or target.verbose or shown_rows == 0
    peak, phases, held_rows = report.peak, report.phases, report.held
    if peak is not None and not is_whole:
        last = max((phase.step for phase in phases if phase.phase == BACKWARD), default=peak.step)
        phases = tuple(row for row in phases if row.step in (peak.step, last) or row.phase == EVALUATING)
        held_rows = held_rows[: _ROWS if shown_rows is None else shown_rows]
    steps = {row.step for row in phases}
    is_one = len(steps) == 1 and steps != {0}

    def module(path: str) -> str:
        return path if is_whole or len(path) <= _PATH else f"...{path[3 - _PATH :]}"

    columns = [
        number("step", "step", lambda number: str(number) if number else "-", shown=not is_one),
        attribute(f"step {phases[0].step}" if is_one else "phase", "phase"),
        *step.cost_columns(without=["peak in", "on the GPU"]),
        attribute("line", "line", missing="-"),
        attribute("module", "path", of="cost.peak", text=module, missing="-"),
        attribute("operator", "operator", of="cost.peak", missing="-", detail=True),
        step.parts_csv(),
    ]
    is_one_part = len({_part(report, row.part) for row in held_rows}) == 1
    held = [
        attribute("at the peak: line", "line", missing="-"),
        attribute("module", "path", text=module, missing="-"),
        attribute("part", "part", text=partial(_part, report), is_wide=True, detail=is_one_part),
        number("blocks", "blocks", detail=True),
        number("size", "held_bytes", bytes_text),
    ]
    return [Table(columns, phases, strong=lambda row: row == peak, names=2), Table(held, held_rows, names=2)]


def _part(report: RunReport, name: str) -> str:
    """Return a part's name: before the first forward pass ends nobody knows what of its results backward needs."""
    is_open = report.is_cut and name == "temporaries" and report.peak is not None and report.peak.phase == FORWARD
    return "activations" if is_open else step.part_name(name)


def _parts(report: RunReport) -> Iterator[str]:
    cost, peak = report.cost, report.peak
    if peak is not None:
        parts = [(name, size) for name, size in vars(peak.cost.peak.parts).items() if size]
        parts.sort(key=lambda part: -part[1])
        yield f"At the peak: {', '.join(f'{_part(report, name)} {bytes_text(size)}' for name, size in parts)}."
    if cost is not None:
        yield f"allocated: {bytes_text(cost.max_allocated_bytes or 0)} (torch.cuda.max_memory_allocated)."
        yield f"reserved: {bytes_text(cost.reserved_bytes or 0)} (torch.cuda.max_memory_reserved)."
        yield f"on the GPU: {bytes_text(cost.gpu_bytes)}, with {step.span_text(cost.context)} for the CUDA context."


def _notes(report: RunReport, target: Target | None, **_: Any) -> Iterator[str]:
    is_whole = target is None or target.verbose
    if is_whole:
        yield Heading("Memory")
        yield from _parts(report)
    if (more := report.evaluation) is not None:
        yield (
            f"The evaluation has {count_text(more.batches)} batches, of which {more.ran} ran; each adds "
            f"{bytes_text(more.added_bytes)}, so its peak is {bytes_text(more.highest_bytes)}."
        )
    if report.histories:
        yield f"{counted(report.updates, 'step')}: {step.histories_text(report.histories)}."
    if named("gpu") in report.arguments and report.budget_bytes is None:
        yield f"{named('gpu')} after {report.script} is the script's; before it, it names the simulated GPU."
    if report.refused_bytes and not report.failure:
        yield f"{counted(len(report.refused_bytes), 'request')} ran out of memory, and the script went on."
    if report.assumed:
        shown = ", ".join(report.assumed[:3])
        yield f"Unknown values were read at {shown}: loops and shapes that depend on them may differ in training."
    if not report.has_run:
        yield as_sentence(UNRECORDED)
    yield from map(as_sentence, report.remarks)
    if is_whole:
        yield Heading("How the numbers were obtained")
        none = f"no optimizer step ran on the GPU in this process; {UNRECORDED}."
        some = f"{count_text(report.updates)} optimizer steps ran without values on the GPU."
        yield f"Simulated: {some if report.updates else none}"
        if report.cost is not None and report.cost.limit_bytes is not None:
            yield step.margin_note(report.cost)


VIEW = View(answer=_answer, settings=_settings, tip=_tip, tables=_tables, notes=_notes, shows_all_notes=True)


def step_timeline(report: RunReport, suffix: str) -> Any:
    """Return the step's picture with the peak."""
    unknown: dict[str, Any] = dict.fromkeys(("attention", "dtype", "torch_version", "bertscope_version"), "")
    subject = Subject(name=report.script, architecture=report.script, obtained="estimated", **unknown)
    variant = Variant(checkpointing="none", reentrant=False, estimated=report.memory)
    run = RunConfig(device=CUDA)
    memory = MemoryReport(subject=subject, run=run, machine="", variants=(variant,), inputs_given=True)
    return timeline(memory, suffix)


def _fit_answer(report: RunFitReport) -> str:
    where = report.gpu.name if report.gpu else bytes_text(report.budget_bytes)
    if not report.largest:
        lacks = [f": {report.low:,} {step.lacking(row.cost)}" for row in report.rows[:1] if row.answer == NO]
        return f"No {report.argument} from {report.low:,} to {report.high:,} fits on {where}{''.join(lacks)}."
    if len({row.peak_bytes for row in report.rows}) == 1 < len(report.rows):
        every = f"Every value of {report.argument} from {report.low:,} to {report.high:,} fits on {where}"
        return f"{every}: the peak does not change with it."
    more = ", the highest that was asked for" * (report.largest == report.high)
    return f"Largest {report.argument} on {where}: {report.largest:,}{more}."


FIT = View(
    answer=_fit_answer,
    verdict=lambda report: YES if report.largest else NO,
    settings=_settings,
    columns=lambda report: [number(report.argument, "value"), *step.cost_columns()],
    strong=lambda report, row: row.value == report.largest,
    notes=lambda report, target: map(as_sentence, report.remarks),
    shows_all_notes=True,
)
