"""Tables of the traffic between ranks, and notes on ranks that differ."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from bertscope.render.console import Target
from bertscope.render.table import Column, markdown_text, table_text
from bertscope.render.texts import say, word
from bertscope.render.timeline.panels import variant_name
from bertscope.reports.memory import MemoryReport
from bertscope.reports.parallel import TrafficRow
from bertscope.units import bytes_text, count_text

_Key = tuple[str, str, str, int]  # phase, collective, path, ranks
_Row = tuple[_Key, list[TrafficRow | None]]


def parallel_words(run: Mapping[str, Any], groups: int = 1) -> list[str]:
    """Return the strategy of a run and its ranks in words, nothing for one process."""
    given = run.get("parallelism") or {}
    mesh = given.get("mesh", [1])
    if given.get("strategy", "none") == "none":
        return []
    key = "each_rank" if groups == 1 else "rank_of"
    key += "_of_mesh" if len(mesh) > 1 else ""
    size = "x".join(map(str, mesh))
    words = {
        say(key, strategy=given["strategy"], rank=given["rank"], ranks=size, mesh=size): True,
        say("param_dtype", dtype=given["param_dtype"]): given["param_dtype"],
        say("reduce_dtype", dtype=given["reduce_dtype"]): given["reduce_dtype"],
        say("bucket_view"): given["gradient_as_bucket_view"],
    }
    return [text for text, is_set in words.items() if is_set]


def traffic_text(report: MemoryReport, target: Target, *, by_module: bool) -> str:
    """Return the table of the traffic for the terminal, empty for one process; by module, or by phase only."""
    rows = _rows(report, by_module=by_module)
    return table_text(_columns(report, rows), rows, target) if rows else ""


def traffic_markdown(report: MemoryReport) -> Iterator[str]:
    """Yield the traffic by module as a GitHub table, nothing for one process."""
    if rows := _rows(report, by_module=True):
        yield markdown_text(_columns(report, rows), rows)


def traffic_notes(report: MemoryReport) -> Iterator[str]:
    """Yield how ranks differ, and how the traffic was counted."""
    given = report.run.get("parallelism") or {}
    own = next((row for row in report.ranks if row.first <= given.get("rank", 0) <= row.last), None)
    others = [row for row in report.ranks if own and row.updated_params != own.updated_params]
    if own and others:
        least = min(others, key=lambda row: row.updated_params)
        yield say("note_ranks", ranks=least.label, count=count_text(least.updated_params), rank=given["rank"],
                  own=count_text(own.updated_params))  # fmt: skip
    if any(variant.traffic for variant in report.variants):
        yield say("note_ring")
        kinds = {row.collective for variant in report.variants for row in variant.traffic}
        if report.run.get("device") == "cpu" and "reduce-scatter" in kinds:
            yield say("note_gloo")
        yield say("note_ranks_unknown")


def _rows(report: MemoryReport, *, by_module: bool) -> list[_Row]:
    """Return the calls of each variant under the same phase, collective and number of ranks."""
    found: dict[_Key, list[TrafficRow | None]] = {}
    for number, variant in enumerate(report.variants):
        for row in variant.traffic:
            key = (row.phase, row.collective, row.path if by_module else "", row.ranks)
            cells = found.setdefault(key, [None] * len(report.variants))
            cells[number] = _sum([row] if cells[number] is None else [cells[number], row])
    return list(found.items())


def _sum(rows: Iterable[TrafficRow | None]) -> TrafficRow:
    """Return one row with the sums of the given ones."""
    given = [row for row in rows if row is not None]
    sums = {name: sum(getattr(row, name) for row in given) for name in ("calls", "full_bytes", "sent_bytes")}
    return TrafficRow(**{**vars(given[0]), **sums})


def _columns(report: MemoryReport, rows: Iterable[_Row]) -> list[Column]:
    """Return the columns; what is the same in all variants is one column."""
    sizes = {len({row.sent_bytes if row else 0 for row in cells}) for _, cells in rows}
    names = map(variant_name, report.variants)
    sent = (
        [Column(say("rank_sends"), partial(_cell, 0, "sent_bytes"), right=True)]
        if sizes == {1}
        else [
            Column(say("rank_sends_by", name=name), partial(_cell, number, "sent_bytes"), right=True)
            for number, name in enumerate(names)
        ]
    )
    return [
        Column(say("travels"), _name),
        Column(say("calls"), lambda row: count_text(_first(row).calls), right=True),
        Column(say("full_tensors"), lambda row: bytes_text(_first(row).full_bytes), right=True),
        *sent,
    ]


def _name(row: _Row) -> str:
    phase, collective, path, ranks = row[0]
    text = say("call_in", collective=collective, phase=word("in", phase))
    text = say("call_of", text=text, path=path) if path else text
    return say("call_ranks", text=text, ranks=count_text(ranks))


def _first(row: _Row) -> TrafficRow:
    return next(cell for cell in row[1] if cell is not None)


def _cell(number: int, name: str, row: _Row) -> str:
    cell = row[1][number]
    return bytes_text(getattr(cell, name)) if cell else ""
