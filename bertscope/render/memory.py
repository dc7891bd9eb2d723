"""The memory report as a table, CSV and Markdown; in the terminal with bars, and what to conclude."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from bertscope.render.console import Target
from bertscope.render.footer import title
from bertscope.render.memory_words import bars, conclusions, footnotes
from bertscope.render.table import Column, csv_only, csv_text, markdown_text, tables_text, values
from bertscope.render.timeline.panels import run_text, variant_name
from bertscope.reports.memory import KeptRow, Memory, MemoryReport, Parts, Variant
from bertscope.units import bytes_text, count_text

PARTS = tuple(field.name for field in fields(Parts))
SHOWN_ROWS = 10
_PHASE_NAMES = {"forward": "forward", "backward": "backward", "optimizer": "optimizer step"}


@dataclass(frozen=True)
class _Line:
    """A name and its value for each variant."""

    name: str
    cells: tuple[str, ...]
    is_strong: bool = False


def memory_lines(report: MemoryReport) -> Iterator[_Line]:
    """Return the lines of the table: the parts at the peak, the peaks of the phases, and other measurements."""
    variants = report.variants
    for part in PARTS:
        if any(memory and getattr(memory.peak.parts, part) for memory in _memories(report)):
            yield _line(part.replace("_", " "), report, _part(part))
    yield _line("peak", report, lambda memory: memory.peak.peak_bytes, is_strong=True)
    for number, phase in enumerate(next((memory.phases for memory in _memories(report) if memory), ())):
        name = f"  in {_PHASE_NAMES.get(phase.phase, phase.phase)}"
        yield _line(name, report, _phase_peak(number))
    if report.run.get("mode") != "inference":
        yield _line("saved for backward", report, lambda memory: memory.kept_bytes)
    if any(memory and memory.device for memory in _memories(report)):
        yield _line(
            "allocated on the device", report, lambda memory: memory.device.allocated_bytes if memory.device else None
        )
        yield _line("reserved by torch", report, lambda memory: memory.device.reserved_bytes if memory.device else None)
    if any(variant.estimated and variant.measured for variant in variants):
        yield _Line("estimated peak", tuple(_estimate(variant) for variant in variants))
        yield _Line("  worst error", tuple(_error(variant) for variant in variants))
    if any(variant.process for variant in variants):
        yield _Line("process: one step", tuple(_of(variant.process, _step_text) for variant in variants))
        yield _Line(
            "process: all its life", tuple(_of(v.process, lambda p: bytes_text(p.peak_bytes)) for v in variants)
        )
    if any(variant.timing for variant in variants):
        steps = max(len(variant.timing.step_seconds) for variant in variants if variant.timing)
        yield _Line(f"step, median of {steps}", tuple(_of(variant.timing, _seconds) for variant in variants))
    if any(variant.timing and variant.timing.tokens_per_second for variant in variants):
        yield _Line("tokens per second", tuple(_of(variant.timing, _tokens) for variant in variants))
        yield _Line("FLOP/s", tuple(_of(variant.timing, _work) for variant in variants))


def _memories(report: MemoryReport) -> list[Memory | None]:
    return [variant.memory for variant in report.variants]


def _line(name: str, report: MemoryReport, of: Callable[[Memory], int | None], is_strong: bool = False) -> _Line:
    values = (None if memory is None else of(memory) for memory in _memories(report))
    return _Line(name, tuple("" if value is None else bytes_text(value) for value in values), is_strong)


def _part(part: str) -> Callable[[Memory], int]:
    return lambda memory: int(getattr(memory.peak.parts, part))


def _phase_peak(number: int) -> Callable[[Memory], int]:
    return lambda memory: memory.phases[number].peak_bytes


def _cell(number: int) -> Callable[[_Line], str]:
    return lambda line: line.cells[number]


def _kept_cell(number: int) -> Callable[[tuple[KeptRow, tuple[int, ...]]], str]:
    return lambda row: bytes_text(row[1][number])


def _of(value: Any, text: Callable[[Any], str]) -> str:
    return "" if value is None else text(value)


def _estimate(variant: Variant) -> str:
    if variant.estimated is None or variant.measured is None:
        return ""
    return bytes_text(variant.estimated.peak.peak_bytes)


def _error(variant: Variant) -> str:
    return _of(variant.error, lambda error: f"{100 * error:+.4f} %")


def _step_text(process: Any) -> str:
    return f"+{bytes_text(process.high_water_bytes - process.resident_before_bytes)}"


def _seconds(timing: Any) -> str:
    return f"{timing.median_seconds:.3f} s" if timing.step_seconds else ""


def _tokens(timing: Any) -> str:
    return _of(timing.tokens_per_second, lambda rate: f"{rate:,.0f}")


def _work(timing: Any) -> str:
    return _of(timing.flops_per_second, lambda rate: f"{rate / 1e9:,.1f} G")


def memory_columns(report: MemoryReport) -> list[Column]:
    """Return the column of names, and one for each variant."""
    columns = [Column("at the peak of the step", lambda line: line.name)]
    for number, variant in enumerate(report.variants):
        columns.append(Column(_heading(variant), _cell(number), right=True))
    return columns


def _heading(variant: Variant) -> str:
    obtained = variant.memory.obtained if variant.memory else "nothing measured"
    return f"{variant_name(variant)} ({obtained})"


_KEPT_NAMES = 4  # the columns that identify a row


def kept_columns(report: MemoryReport) -> list[Column]:
    """Return the columns of a kind of kept tensor, and one for its bytes in each variant."""
    columns = [
        Column("saved for backward, by module", lambda row: row[0].path or "(model)"),
        Column("what", lambda row: row[0].what, give_up=1),
        Column("each", lambda row: _shape(row[0]), give_up=3),
        Column("tensors", lambda row: count_text(row[0].tensors), right=True, give_up=2),
    ]
    for number, variant in enumerate(report.variants):
        columns.append(Column(variant_name(variant), _kept_cell(number), right=True))
    return columns


def _shape(row: KeptRow) -> str:
    return f"[{', '.join(map(str, row.shape))}] {row.dtype}" if row.dtype else ""


def kept_rows(report: MemoryReport) -> list[tuple[KeptRow, tuple[int, ...]]]:
    """Return each kind of tensor that any variant keeps, with its bytes in each."""
    tables = [{(row.path, row.operator, row.shape): row for row in (memory.kept if memory else ())}
              for memory in _memories(report)]  # fmt: skip
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = []
    for key in keys:
        found = [table.get(key) for table in tables]
        first = next(row for row in found if row is not None)
        rows.append((first, tuple(row.kept_bytes if row else 0 for row in found)))
    return sorted(rows, key=lambda row: -max(row[1]))


def table(report: MemoryReport, target: Target, *, shown_rows: int | None = SHOWN_ROWS) -> str:
    """Return the report for the terminal."""
    text = f"{title(report)}, {run_text(report.run)}\n"
    text += tables_text(memory_columns(report), 1, list(memory_lines(report)), target, lambda line: line.is_strong)
    rows = kept_rows(report)
    if rows:
        shown = rows[:shown_rows]
        text += "\n" + tables_text(kept_columns(report), _KEPT_NAMES, shown, target)
        rest = [sum(row[1][number] for row in rows[len(shown) :]) for number in range(len(report.variants))]
        if any(rest):
            text += f"and {len(rows) - len(shown)} more, {', '.join(map(bytes_text, rest))}; --rows 0 lists them all\n"
    text += "\n" + bars(report, target)
    return text + "".join(f"{line}\n" for line in (*conclusions(report), *footnotes(report)))


def markdown(report: MemoryReport) -> str:
    """Return the report as GitHub tables."""
    text = f"{title(report)}, {run_text(report.run)}\n\n".replace("_", "\\_")
    text += markdown_text(memory_columns(report), list(memory_lines(report)))
    if rows := kept_rows(report):
        text += "\n" + markdown_text(kept_columns(report), rows)
    return (
        text + "\n" + "".join(f"- {line}\n" for line in (*conclusions(report), *footnotes(report))).replace("_", "\\_")
    )


_PHASES = (
    csv_only(values("checkpointing", "reentrant", of="variant")),
    csv_only(values("obtained", of="memory")),
    csv_only(values("phase", "peak_bytes", "path", "operator", of="phase")),
    csv_only({f"{part}_bytes": attrgetter(f"phase.parts.{part}") for part in PARTS}),
)


def csv(report: MemoryReport) -> str:
    """Return one record for each phase of each variant, estimated and measured, in bytes."""
    return csv_text(_PHASES, [
        SimpleNamespace(variant=variant, memory=memory, phase=phase)
        for variant in report.variants
        for memory in (variant.measured, variant.estimated)
        if memory is not None
        for phase in memory.phases
    ])  # fmt: skip
