"""Tables of the traffic between ranks, and notes on ranks that differ."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from statistics import median

from bertscope.errors import named
from bertscope.reports.memory import REDUCE_SCATTER, MemoryReport, RankRow, TrafficRow, Variant
from bertscope.units import bytes_text, count_text
from bertscope.views.columns import Column, in_phase, number
from bertscope.views.step import cost_columns, phase_columns, variant_name
from bertscope.views.views import Table

_Key = tuple[str, str, str, int]  # phase, collective, path, ranks
_Row = tuple[_Key, list[TrafficRow | None]]


def traffic_notes(report: MemoryReport) -> Iterator[str]:
    """Yield how ranks differ, and how the traffic was counted."""
    rank = report.run.parallelism.rank
    group = next((row for row in report.ranks if row.first <= rank <= row.last), None)
    different = [row for row in report.ranks if group and row.updated_params != group.updated_params]
    if group and different:
        least = min(different, key=lambda row: row.updated_params)
        yield (
            f"Rank {rank} updates {count_text(group.updated_params)} parameters, rank {least.label} "
            f"{count_text(least.updated_params)} ({named('rank')} N shows another)."
        )
    if any(variant.traffic for variant in report.variants):
        yield (
            "A rank sends, in a ring, (n-1)/n of the full tensor for all-gather, reduce-scatter and broadcast, twice "
            "that for all-reduce."
        )
        kinds = {row.collective for variant in report.variants for row in variant.traffic}
        if report.run.device == "cpu" and REDUCE_SCATTER in kinds:
            yield "gloo reduces a copy of the gradients, which is counted; NCCL makes none."
        yield "Not counted: buffers of NCCL."


def _rows(report: MemoryReport, *, by_module: bool) -> list[_Row]:
    cells_by_key: dict[_Key, list[TrafficRow | None]] = {}
    for column, variant in enumerate(report.variants):
        for row in variant.traffic:
            key = (row.phase, row.collective, row.path if by_module else "", row.ranks)
            cells = cells_by_key.setdefault(key, [None] * len(report.variants))
            if before := cells[column]:
                names = ("calls", "full_bytes", "sent_bytes")
                row = replace(before, **{name: getattr(before, name) + getattr(row, name) for name in names})
            cells[column] = row
    return list(cells_by_key.items())


def traffic_table(report: MemoryReport, *, by_module: bool) -> Table:
    """Return the traffic by module, or by phase only; what is the same in all variants is one column."""
    rows = _rows(report, by_module=by_module)
    sizes = {len({row.sent_bytes if row else 0 for row in cells}) for _, cells in rows}
    titles = [f"sent: {variant_name(variant)}" for variant in report.variants]
    titles = ["a rank sends"] if sizes == {1} else titles
    columns = [
        Column("between ranks, per step", _name),
        number("calls", "calls").of(_first),
        number("full tensors", "full_bytes", bytes_text, is_wide=True).of(_first),
        *(Column(title, partial(_sent, variant), right=True) for variant, title in enumerate(titles)),
    ]
    return Table(columns, rows)


def _name(row: _Row) -> str:
    phase, collective, path, ranks = row[0]
    text = f"{collective} {in_phase(phase)}"
    text = f"{text} of {path}" if path else text
    return f"{text}, {count_text(ranks)} ranks"


def _first(row: _Row) -> TrafficRow:
    return next(cell for cell in row[1] if cell is not None)


def _sent(variant: int, row: _Row) -> str:
    cell = row[1][variant]
    return bytes_text(cell.sent_bytes) if cell else ""


def ranks_table(report: MemoryReport) -> Table:
    """Return the real ranks; without any a table without rows."""
    rows = [{"variant": variant, "row": row} for variant in report.variants for row in variant.rank_rows]
    columns = [
        Column("rank", lambda item: _named(report, item["variant"], numbers_text(item["row"].ranks))),
        number("between steps", "row.state_bytes", bytes_text),
        *phase_columns(rows, "row.phases"),
        *cost_columns("row.cost"),
        number("sends per step", "row.sent_bytes", bytes_text),
        number("step", "row.step_seconds", lambda seconds: f"{median(seconds):.3f} s" if seconds else ""),
    ]
    return Table(columns, rows)


def ranks_notes(report: MemoryReport) -> Iterator[str]:
    """Yield for each variant that all ranks agree, or by how much each group differs from the largest one."""
    for variant in report.variants:
        rows = variant.rank_rows
        if len(rows) == 1 and len(rows[0].ranks) > 1:
            yield _named(report, variant, f"ranks {numbers_text(rows[0].ranks)} agree in memory and traffic")
        for row in rows[1:]:
            ranks, first_ranks = numbers_text(row.ranks), numbers_text(rows[0].ranks)
            differences = ", ".join(_differences(row, rows[0]))
            yield _named(report, variant, f"rank {ranks} differs from {first_ranks}: {differences}")


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
    if all(value == first_value for value, first_value in pairs.values()):
        phases = zip(row.phases, other.phases, strict=False)
        pairs = {in_phase(value.phase): (value.peak_bytes, first_value.peak_bytes) for value, first_value in phases}
    for name, (value, first_value) in pairs.items():
        if value != first_value:
            yield f"{name} {bytes_text(value)}, not {bytes_text(first_value)} ({value - first_value:+,} bytes)"
