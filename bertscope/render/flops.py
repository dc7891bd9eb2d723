"""The flops report as a table, CSV and Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from bertscope.render.console import Target
from bertscope.render.footer import title
from bertscope.render.table import Column, csv_text, markdown_text, table_text
from bertscope.render.tree import branches
from bertscope.reports.flops import FlopsReport, FlopsRow, OperatorRow
from bertscope.reports.layer_ranges import is_run
from bertscope.units import bytes_text, count_text, share_text

Line = tuple[FlopsRow, str]


def _columns(report: FlopsReport) -> list[Column]:
    training = report.mode == "training"
    columns = [
        Column("module", _label),
        Column("type", lambda line: line[0].type, give_up=6),
        Column("matmul FLOPs", lambda line: _count(line[0].total.matmul_flops), right=True),
        Column("MACs", lambda line: _count(line[0].macs), right=True, give_up=5),
        Column("share", lambda line: share_text(line[0].share) if line[0].share else "", right=True, give_up=2),
        Column("elementwise", lambda line: _count(line[0].total.elementwise_flops), right=True, give_up=3),
        Column("bytes moved", lambda line: bytes_text(line[0].total.bytes_moved), right=True, give_up=4),
        Column("FLOPs/byte", lambda line: f"{line[0].intensity:.2f}", right=True, give_up=7),
    ]
    if training:
        columns[2:2] = [
            Column("forward", lambda line: _count(line[0].forward.matmul_flops), right=True, give_up=1),
            Column("backward", lambda line: _count(line[0].backward.matmul_flops), right=True, give_up=1),
        ]
    if report.checkpointing != "none" and training:
        recompute = Column("recomputed", lambda line: _count(line[0].recompute.matmul_flops), right=True, give_up=1)
        columns.insert(4, recompute)
    return columns


def _count(value: int) -> str:
    return count_text(value) if value else "--"


def _label(line: Line) -> str:
    row, before = line
    folded = f" ({row.copies} x)" if is_run(row.name) else ""
    return before + (row.name or row.type) + folded


def _lines(report: FlopsReport, unicode: bool) -> list[Line]:
    return list(zip(report.rows, branches(report.rows, unicode), strict=True))


def footer(report: FlopsReport) -> list[tuple[str, str]]:
    """Totals, the polynomial, and how all of it was counted."""
    total = report.rows[0].total
    lines = [("at", f"batch {report.batch}, seq {report.seq}, {report.mode}")] if report.batch else []
    lines += [("forward", f"{count_text(report.rows[0].forward.matmul_flops)} FLOPs")]
    if report.mode == "training":
        lines += [
            ("backward", f"{count_text(report.rows[0].backward.matmul_flops)} FLOPs, from {report.loss}"),
            (
                "recomputed",
                f"{count_text(report.rows[0].recompute.matmul_flops)} FLOPs (checkpointing {report.checkpointing})",
            ),
        ]
    lines += [
        ("total", f"{count_text(total.matmul_flops)} FLOPs = {count_text(total.macs)} MACs, matrix products alone")
    ]
    lines += [
        ("elementwise", f"{count_text(total.elementwise_flops)} more (GELU 8, LayerNorm 5, softmax 5 an element)")
    ]
    if report.polynomial is not None:
        poly = report.polynomial
        formula = f"batch * ({poly.constant:,} + {poly.linear:,} * seq + {poly.quadratic:,} * seq^2)"
        lines += [("FLOPs =", f"{formula}, verified at batch {poly.verified_at[0]}, seq {poly.verified_at[1]}")]
    lines += [("convention", "a multiply-add is 2 FLOPs; bytes moved: every operator reads and writes its tensors")]
    lines += [("not counted", ", ".join(report.unknown_operators) or "nothing: every operator seen is known")]
    traced = f"; {report.traced_layers} equal layers run, multiplied" if report.traced_layers else ""
    lines += [
        (
            report.subject.obtained,
            f"from the operators dispatched on meta{traced}; torch {report.subject.torch_version}",
        )
    ]
    return lines


def table(report: FlopsReport, target: Target) -> str:
    """For the terminal."""
    lines = _lines(report, target.unicode)
    body = table_text(_columns(report), lines, target, lambda line: line[0].depth == 0)
    return f"{title(report)}\n{body}{sweep_text(report, target)}{_footer_text(footer(report))}"


def _footer_text(lines: Sequence[tuple[str, str]]) -> str:
    return "".join(f"{name:<13}{value}\n" for name, value in lines)


_SWEEP = (
    Column("batch", lambda point: count_text(point.batch), right=True),
    Column("seq", lambda point: count_text(point.seq), right=True),
    Column("forward", lambda point: count_text(point.forward_flops), right=True, give_up=1),
    Column("backward", lambda point: count_text(point.backward_flops), right=True, give_up=1),
    Column("recomputed", lambda point: count_text(point.recompute_flops), right=True, give_up=2),
    Column("total FLOPs", lambda point: count_text(point.total_flops), right=True),
)


def sweep_text(report: FlopsReport, target: Target) -> str:
    """The sweep, when there is more than one point."""
    if len(report.sweep) < 2:
        return ""
    return table_text(_SWEEP, report.sweep, target, lambda point: False)


_OPERATORS = (
    Column("operator", lambda row: row.operator),
    Column("phase", lambda row: row.phase),
    Column("calls", lambda row: count_text(row.calls), right=True),
    Column("counted as", lambda row: row.role),
    Column("matmul FLOPs", lambda row: _count(row.work.matmul_flops), right=True),
    Column("elementwise", lambda row: _count(row.work.elementwise_flops), right=True),
    Column("bytes moved", lambda row: bytes_text(row.work.bytes_moved), right=True, give_up=1),
)


def operators(report: FlopsReport, target: Target) -> str:
    """Every operator seen, and those that were not counted."""
    body = table_text(_OPERATORS, report.operators, target, lambda row: False)
    return f"{title(report)}\n{body}{_footer_text(footer(report))}"


def operators_markdown(report: FlopsReport) -> str:
    """The operators for a pull request or a page."""
    return f"**{title(report)}**\n\n{markdown_text(_OPERATORS, report.operators)}"


def convention(report: FlopsReport, name: str) -> str:
    """One line with the number, how it counts, and its source; the other conventions below."""
    lines = [item for item in report.conventions if item.name == name]
    lines += [item for item in report.conventions if item.name != name]
    text = "".join(
        f"{item.name:<10}{count_text(item.value):>26} {item.unit:<6} {item.how} [{item.source}]\n" for item in lines
    )
    return f"{title(report)}, batch {report.batch}, seq {report.seq}, {report.mode}\n{text}"


def markdown(report: FlopsReport) -> str:
    """For a pull request or a page."""
    lines = [(row, "    " * row.depth) for row in report.rows]
    notes = "".join(f"- {name}: {value}\n" for name, value in footer(report)).replace("*", "\\*").replace("_", "\\_")
    return f"**{title(report)}**\n\n{markdown_text(_columns(report), lines)}\n{notes}"


_FIELDS = ("depth", "path", "type", "copies")
_WORK = ("matmul_flops", "elementwise_flops", "bytes_moved")


def csv(report: FlopsReport) -> str:
    """For a spreadsheet: one record a module, each phase by itself."""
    phases = ("forward", "backward", "recompute", "total")
    titles = (*_FIELDS, *(f"{phase}_{work}" for phase in phases for work in _WORK), "macs", "share", "intensity")
    return csv_text(titles, [_record(row, phases) for row in report.rows])


def _record(row: FlopsRow, phases: Sequence[str]) -> list[object]:
    works = [getattr(getattr(row, phase), work) for phase in phases for work in _WORK]
    return [*(getattr(row, field) for field in _FIELDS), *works, row.macs, row.share, row.intensity]


def operator_csv(rows: Sequence[OperatorRow]) -> str:
    """The operators for a spreadsheet."""
    titles = ("operator", "phase", "calls", "role", *_WORK)
    records = [
        (row.operator, row.phase, row.calls, row.role, *(getattr(row.work, work) for work in _WORK)) for row in rows
    ]
    return csv_text(titles, records)
