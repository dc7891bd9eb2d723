"""The measurements of real ranks as a table, with the ranks that agree as one row, and notes on those that differ."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from statistics import median

from bertscope.render.console import Target
from bertscope.render.table import Column, markdown_text, table_text
from bertscope.render.texts import say, word
from bertscope.render.timeline.panels import variant_name
from bertscope.reports.memory import MemoryReport, RankRow, Variant
from bertscope.units import bytes_text

_Row = tuple[Variant, RankRow]


def ranks_text(report: MemoryReport, target: Target) -> str:
    """Return the table of the ranks for the terminal, empty without real ranks."""
    rows = _rows(report)
    return table_text(_columns(report, rows), rows, target) if rows else ""


def ranks_markdown(report: MemoryReport) -> Iterator[str]:
    """Yield the table of the ranks for GitHub, nothing without real ranks."""
    if rows := _rows(report):
        yield markdown_text(_columns(report, rows), rows)


def ranks_notes(report: MemoryReport) -> Iterator[str]:
    """Yield for each variant that all ranks agree, or by how much each group differs from the largest one."""
    for variant in report.variants:
        rows = variant.rank_rows
        if len(rows) == 1 and len(rows[0].ranks) > 1:
            yield _named(report, variant, say("ranks_agree", ranks=numbers_text(rows[0].ranks)))
        for row in rows[1:]:
            others = numbers_text(rows[0].ranks)
            yield _named(report, variant, say("rank_differs", ranks=numbers_text(row.ranks), others=others,
                                              differences=say("comma").join(_differences(row, rows[0]))))  # fmt: skip


def numbers_text(numbers: Sequence[int]) -> str:
    """Return numbers with ranges.

    >>> numbers_text([0, 1, 2, 5])
    '0-2, 5'
    """
    runs = (list(run) for _, run in groupby(enumerate(sorted(numbers)), lambda item: item[1] - item[0]))
    return ", ".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else f"{run[0][1]}" for run in runs)


def _rows(report: MemoryReport) -> list[_Row]:
    return [(variant, row) for variant in report.variants for row in variant.rank_rows]


def _columns(report: MemoryReport, rows: Sequence[_Row]) -> list[Column]:
    phases = next((row.phases for _, row in rows), ())
    return [
        Column(say("measured_rank"), lambda item: _name(report, *item)),
        Column(say("between_steps"), lambda item: bytes_text(item[1].state_bytes), right=True, give_up=2),
        *(Column(word("row", phase.phase).strip(), partial(_phase_cell, number), right=True, give_up=3)
          for number, phase in enumerate(phases)),
        Column(say("peak"), lambda item: bytes_text(item[1].peak.peak_bytes), right=True),
        Column(say("sends"), lambda item: bytes_text(item[1].sent_bytes), right=True),
        Column(say("step_time"), _seconds, right=True),
    ]  # fmt: skip


def _name(report: MemoryReport, variant: Variant, row: RankRow) -> str:
    return _named(report, variant, numbers_text(row.ranks))


def _named(report: MemoryReport, variant: Variant, text: str) -> str:
    return say("named", name=variant_name(variant), text=text) if len(report.variants) > 1 else text


def _phase_cell(number: int, item: _Row) -> str:
    return bytes_text(item[1].phases[number].peak_bytes) if number < len(item[1].phases) else ""


def _seconds(item: _Row) -> str:
    return f"{median(item[1].step_seconds):.3f} s" if item[1].step_seconds else ""


def _differences(row: RankRow, other: RankRow) -> Iterator[str]:
    """Yield the bytes of one group of ranks and those of the other, where they differ."""
    pairs = {
        "between_steps": (row.state_bytes, other.state_bytes),
        "peak": (row.peak.peak_bytes, other.peak.peak_bytes),
        "sends": (row.sent_bytes, other.sent_bytes),
    }
    different = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    for name, (own, others) in different.items():
        yield say("difference", name=say(name), own=bytes_text(own), others=bytes_text(others), by=f"{own - others:+,}")
    if not different:
        for phase, its in zip(row.phases, other.phases, strict=False):
            if phase.peak_bytes != its.peak_bytes:
                yield say("difference", name=word("row", phase.phase).strip(), own=bytes_text(phase.peak_bytes),
                          others=bytes_text(its.peak_bytes), by=f"{phase.peak_bytes - its.peak_bytes:+,}")  # fmt: skip
