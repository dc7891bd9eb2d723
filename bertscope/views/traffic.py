"""Tables of the traffic between ranks, and notes on ranks that differ."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from statistics import median

from bertscope.errors import named
from bertscope.reports.memory import REDUCE_SCATTER, MemoryReport, RankRow, TrafficRow, Variant
from bertscope.units import bytes_text, count_text
from bertscope.views.columns import Column, in_phase, row_phase
from bertscope.views.step import cost_columns, phase_columns, variant_name

_Key = tuple[str, str, str, int]  # phase, collective, path, ranks
_Row = tuple[_Key, list[TrafficRow | None]]


def traffic_notes(report: MemoryReport) -> Iterator[str]:
    """Yield how ranks differ, and how the traffic was counted."""
    rank = report.run.parallelism.rank
    own = next((row for row in report.ranks if row.first <= rank <= row.last), None)
    others = [row for row in report.ranks if own and row.updated_params != own.updated_params]
    if own and others:
        least = min(others, key=lambda row: row.updated_params)
        yield (
            f"Rank {rank} updates {count_text(own.updated_params)} parameters, rank {least.label} "
            f"{count_text(least.updated_params)} ({named('rank')} N shows another)."
        )
    if any(variant.traffic for variant in report.variants):
        yield (
            "A rank sends, in a ring, (n-1)/n of the whole tensor for all-gather, reduce-scatter and broadcast, twice "
            "that for all-reduce."
        )
        kinds = {row.collective for variant in report.variants for row in variant.traffic}
        if report.run.device == "cpu" and REDUCE_SCATTER in kinds:
            yield ("gloo reduces a copy of the gradients, which is counted; NCCL makes none.")
        yield "Not counted: buffers of NCCL."


def _rows(report: MemoryReport, *, by_module: bool) -> list[_Row]:
    found: dict[_Key, list[TrafficRow | None]] = {}
    for number, variant in enumerate(report.variants):
        for row in variant.traffic:
            key = (row.phase, row.collective, row.path if by_module else "", row.ranks)
            cells = found.setdefault(key, [None] * len(report.variants))
            if before := cells[number]:
                names = ("calls", "full_bytes", "sent_bytes")
                row = replace(before, **{name: getattr(before, name) + getattr(row, name) for name in names})
            cells[number] = row
    return list(found.items())


def traffic_tables(report: MemoryReport, *, by_module: bool) -> Iterator[tuple[list[Column], list[_Row]]]:
    """Yield the traffic by module, or by phase only; what is the same in all variants is one column."""
    rows = _rows(report, by_module=by_module)
    sizes = {len({row.sent_bytes if row else 0 for row in cells}) for _, cells in rows}
    titles = [f"sent: {variant_name(variant)}" for variant in report.variants]
    titles = ["a rank sends"] if sizes == {1} else titles
    columns = [
        Column("between ranks, per step", _name),
        Column("calls", lambda row: count_text(_first(row).calls), right=True),
        Column("whole tensors", lambda row: bytes_text(_first(row).full_bytes), right=True, is_wide=True),
        *(Column(title, partial(_sent, number), right=True) for number, title in enumerate(titles)),
    ]
    if rows:  # not for one process
        yield columns, rows


def _name(row: _Row) -> str:
    phase, collective, path, ranks = row[0]
    text = f"{collective} {in_phase(phase)}"
    text = f"{text} of {path}" if path else text
    return f"{text}, {count_text(ranks)} ranks"


def _first(row: _Row) -> TrafficRow:
    return next(cell for cell in row[1] if cell is not None)


def _sent(number: int, row: _Row) -> str:
    cell = row[1][number]
    return bytes_text(cell.sent_bytes) if cell else ""


_RankItem = tuple[Variant, RankRow]


def rank_tables(report: MemoryReport) -> Iterator[tuple[list[Column], list[_RankItem]]]:
    """Yield the columns and rows of the ranks; nothing without real ranks."""
    rows = [(variant, row) for variant in report.variants for row in variant.rank_rows]
    if not rows:
        return
    columns = [
        Column("rank", lambda item: _named(report, item[0], numbers_text(item[1].ranks))),
        Column("between steps", lambda item: bytes_text(item[1].state_bytes), right=True),
        *phase_columns(rows, lambda item: item[1].phases),
        *cost_columns(rows, lambda item: item[1].cost),
        Column("sends per step", lambda item: bytes_text(item[1].sent_bytes), right=True),
        Column("step",
               lambda item: f"{median(item[1].step_seconds):.3f} s" if item[1].step_seconds else "", right=True),
    ]  # fmt: skip
    yield columns, rows


def ranks_notes(report: MemoryReport) -> Iterator[str]:
    """Yield for each variant that all ranks agree, or by how much each group differs from the largest one."""
    for variant in report.variants:
        rows = variant.rank_rows
        if len(rows) == 1 and len(rows[0].ranks) > 1:
            yield _named(report, variant, f"ranks {numbers_text(rows[0].ranks)} agree in memory and traffic")
        for row in rows[1:]:
            own, others = numbers_text(row.ranks), numbers_text(rows[0].ranks)
            differences = ", ".join(_differences(row, rows[0]))
            yield _named(report, variant, f"rank {own} differs from {others}: {differences}")


def numbers_text(numbers: Sequence[int]) -> str:
    """Return numbers with ranges.

    >>> numbers_text([0, 1, 2, 5])
    '0-2, 5'
    """
    runs = (list(run) for _, run in groupby(enumerate(sorted(numbers)), lambda item: item[1] - item[0]))
    return ", ".join(f"{run[0][1]}-{run[-1][1]}" if len(run) > 1 else f"{run[0][1]}" for run in runs)


def _named(report: MemoryReport, variant: Variant, text: str) -> str:
    return f"{variant_name(variant)}: {text}" if len(report.variants) > 1 else text


def _differences(row: RankRow, other: RankRow) -> Iterator[str]:
    pairs = {
        "between steps": (row.state_bytes, other.state_bytes),
        "peak": (row.peak_bytes, other.peak_bytes),
        "sends per step": (row.sent_bytes, other.sent_bytes),
    }
    if all(own == others for own, others in pairs.values()):
        phases = zip(row.phases, other.phases, strict=False)
        pairs = {row_phase(own.phase): (own.peak_bytes, others.peak_bytes) for own, others in phases}
    for name, (own, others) in pairs.items():
        if own != others:
            yield f"{name} {bytes_text(own)}, not {bytes_text(others)} ({own - others:+,} bytes)"
