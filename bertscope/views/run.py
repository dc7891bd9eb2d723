"""The report of `run` as a table, CSV and Markdown."""

from collections.abc import Iterator, Sequence
from shlex import join
from typing import Any

from bertscope.errors import one_line
from bertscope.reports.base import Subject
from bertscope.reports.memory import BACKWARD, EVALUATING, MemoryReport, Variant
from bertscope.reports.run import NOTHING_RAN, UNRECORDED, RunFitReport, RunReport
from bertscope.settings.run_config import CUDA, RunConfig
from bertscope.units import bytes_text, count_text
from bertscope.views.columns import attribute, fits_word, in_phase, number
from bertscope.views.console import Target
from bertscope.views.step import cost_columns, part_name, parts_csv, range_text
from bertscope.views.timeline import timeline
from bertscope.views.views import Table, View

_ROWS = 8  # lines that hold memory at the peak, without -v


def _answer(report: RunReport) -> str:
    peak = report.peak
    where = "" if peak is None else f"peak {bytes_text(peak.peak_bytes)} {in_phase(peak.phase)}{_at(peak.line)}"
    if not report.has_run:
        return f"{NOTHING_RAN[:1].upper()}{NOTHING_RAN[1:]}{where and f'; {where}'}."
    if not report.updates:
        where += "; no optimizer step ran"
    if not report.answer or report.cost is None or report.budget_bytes is None:
        return f"{where[:1].upper()}{where[1:]}."
    total = bytes_text(report.budget_bytes)
    verdict = f"{fits_word(report.answer).capitalize()} {f'on {report.card.name}' if report.card else f'in {total}'}"
    if report.failure:
        line = report.refused_lines[-1] if report.refused_lines else ""
        return f"{verdict}: out of memory{_at(line)}, where {bytes_text(report.refused_bytes[-1])} more is needed."
    return f"{verdict}: {bytes_text(report.cost.gpu_bytes)} of {total}; {where}."


def _at(line: str) -> str:
    return f" at {line}" if line else ""


def _title(report: RunReport | RunFitReport) -> str:
    return one_line(join([report.script, *report.arguments]), limit=200)


def _tables(report: RunReport, target: Target | None, *, shown_rows: int | None = None) -> Sequence[Table]:
    """Return the phases and what is held at the peak.

    In a terminal without -v, the phases are those of the last step and of the one with the peak, and all evaluations.
    """
    is_whole = target is None or target.verbose or shown_rows == 0
    peak, phases, found = report.peak, report.phases, report.held
    if peak is not None and not is_whole:
        last = max((phase.step for phase in phases if phase.phase == BACKWARD), default=peak.step)
        phases = tuple(row for row in phases if row.step in (peak.step, last) or row.phase == EVALUATING)
        found = found[: _ROWS if shown_rows is None else shown_rows]
    columns = [
        number("step", "step", lambda step: str(step) if step else "-"),
        attribute("phase", "phase"),
        *cost_columns(phases, without=["peak in", "on the GPU"]),
        attribute("line", "line", missing="-"),
        attribute("module", "path", of="cost.peak", missing="-", below=1),
        attribute("operator", "operator", of="cost.peak", missing="-", detail=True),
        parts_csv(),
    ]
    held = [
        attribute("at the peak: line", "line", missing="-"),
        attribute("module", "path", missing="-", below=1),
        attribute("part", "part", text=part_name),
        number("blocks", "blocks", detail=True),
        number("bytes", "held_bytes", bytes_text),
    ]
    tables = [Table(columns, phases, strong=lambda row: row == peak)]
    return [*tables, Table(held, found)] if found else tables


def _lines(report: RunReport, target: Target | None) -> Iterator[tuple[str, str]]:
    cost, peak = report.cost, report.peak
    if peak is not None:
        parts = [(name, size) for name, size in vars(peak.cost.peak.parts).items() if size]
        parts.sort(key=lambda part: -part[1])
        yield "parts at the peak", ", ".join(f"{part_name(name)} {bytes_text(size)}" for name, size in parts)
    if cost is not None:
        yield "allocated", f"{bytes_text(cost.max_allocated_bytes or 0)} (torch.cuda.max_memory_allocated)"
        yield "reserved", f"{bytes_text(cost.reserved_bytes or 0)} (torch.cuda.max_memory_reserved)"
        context = range_text(cost.context.low_bytes, cost.context.high_bytes)
        yield "on the GPU", f"{bytes_text(cost.gpu_bytes)}, with {context} for the CUDA context"


def _notes(report: RunReport, target: Target | None, **_: Any) -> Iterator[str]:
    if report.updates:
        yield f"simulated: {count_text(report.updates)} optimizer steps ran without values on the GPU"
    elif report.has_run:  # else the answer says it
        yield f"simulated: no optimizer step ran on the GPU in this process; {UNRECORDED}"
    if (more := report.evaluation) is not None:
        yield (
            f"the evaluation has {count_text(more.batches)} batches, of which {more.ran} ran; each adds "
            f"{bytes_text(more.added_bytes)}, so its peak is {bytes_text(more.highest_bytes)}"
        )
    if report.refused_bytes and not report.failure:
        yield f"{count_text(len(report.refused_bytes))} requests ran out of memory, and the script went on"
    if report.assumed:
        shown = ", ".join(report.assumed[:3])
        yield f"asked for values that are not known ({shown}): a loop or a shape that depends on them may be another"
    yield from report.remarks


VIEW = View(
    answer=_answer,
    title=_title,
    tables=_tables,
    lines=_lines,
    notes=_notes,
    hidden_rows=lambda report, target: max(len(report.held) - _ROWS, 0),
)


def step_timeline(report: RunReport, suffix: str) -> Any:
    """Return the picture of the step with the peak."""
    subject = Subject(name=report.script, architecture=report.script, attention="", dtype="", obtained="estimated",
                      torch_version="", bertscope_version="")  # fmt: skip
    variant = Variant(checkpointing="none", reentrant=False, estimated=report.memory)
    run = RunConfig(device=CUDA)
    made = MemoryReport(subject=subject, run=run, machine="", variants=(variant,), inputs_given=True)
    return timeline(made, suffix)


def _fit_answer(report: RunFitReport) -> str:
    where = report.card.name if report.card else bytes_text(report.budget_bytes)
    if not report.largest:
        return f"No {report.argument} from {report.low:,} to {report.high:,} fits on {where}."
    is_all = report.largest == report.high
    more = ", the highest that was asked for" if is_all else ""
    return f"Largest {report.argument} on {where}: {report.largest:,}{more}."


FIT = View(
    answer=_fit_answer,
    title=_title,
    columns=lambda report: [number(report.argument, "value"), *cost_columns(report.rows)],
    strong=lambda report, row: row.value == report.largest,
    notes=lambda report, target: report.remarks,
    shows_all_notes=True,
)
