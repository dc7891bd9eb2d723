"""The flops report as a table, CSV and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter

from bertscope.render.console import Target
from bertscope.render.footer import title
from bertscope.render.table import Column, csv_text, markdown_text, table_text, values
from bertscope.render.tree import Line, lines_of
from bertscope.reports.flops import FlopsReport, OperatorRow
from bertscope.reports.layer_ranges import is_run
from bertscope.units import bytes_text, count_text, share_text

_values = partial(values, of="row")
_WORK = ("matmul_flops", "elementwise_flops", "bytes_moved")


def _columns(report: FlopsReport) -> list[Column]:
    training = report.mode == "training"
    return [
        Column("module", _label, _values("depth", "path")),
        Column("type", lambda line: line.row.type, _values("type", "copies"), give_up=6),
        _phase("forward", "forward", shown=training),
        _phase("backward", "backward", shown=training),
        _phase("recomputed", "recompute", shown=training and report.checkpointing != "none"),
        Column("matmul FLOPs", lambda line: _count(line.row.total.matmul_flops), _values("total.matmul_flops"),
               right=True),
        Column("MACs", lambda line: _count(line.row.macs), _values("macs"), right=True, give_up=5, csv_order=1),
        Column("share", lambda line: share_text(line.row.share) if line.row.share else "", _values("share"), right=True,
               give_up=2, csv_order=1),
        Column("elementwise", lambda line: _count(line.row.total.elementwise_flops), _values("total.elementwise_flops"),
               right=True, give_up=3),
        Column("bytes moved", lambda line: bytes_text(line.row.total.bytes_moved), _values("total.bytes_moved"),
               right=True, give_up=4),
        Column("FLOPs/byte", lambda line: f"{line.row.intensity:.2f}", _values("intensity"), right=True, give_up=7,
               csv_order=1),
    ]  # fmt: skip


def _phase(title: str, name: str, *, shown: bool) -> Column:
    matmul_flops = attrgetter(f"row.{name}.matmul_flops")
    csv = _values(*(f"{name}.{work}" for work in _WORK))
    return Column(title, lambda line: _count(matmul_flops(line)), csv, right=True, give_up=1, shown=shown)


def _count(value: int) -> str:
    return count_text(value) if value else "--"


def _label(line: Line) -> str:
    row, before = line.row, line.branches
    folded = f" ({row.copies} x)" if is_run(row.name) else ""
    return f"{before}{row.name or row.type}{folded}"


def footer(report: FlopsReport) -> list[tuple[str, str]]:
    """Return the totals, the polynomial, and the rules of counting."""
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
    """Return the report for the terminal."""
    lines = lines_of(report.rows, target.unicode)
    body = table_text(_columns(report), lines, target, lambda line: line.row.depth == 0)
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
    """Return the table of the sweep, empty for a single point."""
    if len(report.sweep) < 2:
        return ""
    return table_text(_SWEEP, report.sweep, target)


_OPERATORS = (
    Column("operator", lambda row: row.operator, values("operator")),
    Column("phase", lambda row: row.phase, values("phase")),
    Column("calls", lambda row: count_text(row.calls), values("calls"), right=True),
    Column("counted as", lambda row: row.role, values("role")),
    Column("matmul FLOPs", lambda row: _count(row.work.matmul_flops), values("matmul_flops", of="work"), right=True),
    Column("elementwise", lambda row: _count(row.work.elementwise_flops), values("elementwise_flops", of="work"),
           right=True),
    Column("bytes moved", lambda row: bytes_text(row.work.bytes_moved), values("bytes_moved", of="work"), right=True,
           give_up=1),
)  # fmt: skip


def operators(report: FlopsReport, target: Target) -> str:
    """Return every operator seen, and those that were not counted."""
    body = table_text(_OPERATORS, report.operators, target)
    return f"{title(report)}\n{body}{_footer_text(footer(report))}"


def operators_markdown(report: FlopsReport) -> str:
    """Return the operators for a pull request or a page."""
    return f"**{title(report)}**\n\n{markdown_text(_OPERATORS, report.operators)}"


def convention(report: FlopsReport, name: str) -> str:
    """Return a line with the number, its rule and its source, and the other conventions below."""
    lines = [item for item in report.conventions if item.name == name]
    lines += [item for item in report.conventions if item.name != name]
    text = "".join(
        f"{item.name:<10}{count_text(item.value):>26} {item.unit:<6} {item.how} [{item.source}]\n" for item in lines
    )
    return f"{title(report)}, batch {report.batch}, seq {report.seq}, {report.mode}\n{text}"


def markdown(report: FlopsReport) -> str:
    """Return the report for a pull request or a page."""
    lines = [Line(row, "    " * row.depth) for row in report.rows]
    notes = "".join(f"- {name}: {value}\n" for name, value in footer(report)).replace("*", "\\*").replace("_", "\\_")
    return f"**{title(report)}**\n\n{markdown_text(_columns(report), lines)}\n{notes}"


def csv(report: FlopsReport) -> str:
    """Return one record a module, each phase by itself, for a spreadsheet."""
    return csv_text(_columns(report), lines_of(report.rows))


def operator_csv(rows: Sequence[OperatorRow]) -> str:
    """Return the operators for a spreadsheet."""
    return csv_text(_OPERATORS, rows)
