"""The flops report as a table, CSV and Markdown."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import SimpleNamespace

from bertscope.reports.flops import FlopsReport
from bertscope.settings.checkpointing import NONE
from bertscope.units import bytes_text, count_text, share_text
from bertscope.views.columns import Column, number, values
from bertscope.views.console import Target, wrapped
from bertscope.views.footer import title
from bertscope.views.tree import lines_of, row_name
from bertscope.views.views import Compared, Table, View

_values, _number = partial(values, of="row"), partial(number, of="row")
_WORK = ("matmul_flops", "elementwise_flops", "bytes_moved")


def _columns(report: FlopsReport) -> list[Column]:
    training = report.mode == "training"
    return [
        Column("module", lambda line: line.branches + row_name(line.row), _values("depth", "path")),
        Column("type", lambda line: line.row.type, _values("type", "copies"), detail=True),
        _phase("forward", "forward", shown=training),
        _phase("backward", "backward", shown=training),
        _phase("recomputed", "recompute", shown=training and report.checkpointing != NONE),
        _number("matmul FLOPs", "total.matmul_flops", _count),
        *([_number("within windows", "total.needed_flops", _count)] if report.is_local else []),
        _number("MACs", "macs", _count, detail=True, csv_order=1),
        _number("share", "share", lambda share: share_text(share) if share else "", detail=training, csv_order=1),
        _number("elementwise", "total.elementwise_flops", _count, detail=training),
        _number("bytes moved", "total.bytes_moved", bytes_text, detail=True),
        _number("FLOPs/byte", "intensity", "{:.2f}".format, detail=True, csv_order=1),
    ]


def _phase(title: str, name: str, *, shown: bool) -> Column:
    matmul_flops = attrgetter(f"row.{name}.matmul_flops")
    csv = _values(*(f"{name}.{work}" for work in _WORK))
    return Column(title, lambda line: _count(matmul_flops(line)), csv, right=True, shown=shown)


def _count(value: int) -> str:
    return count_text(value) if value else "--"


def _footer(report: FlopsReport, *, verbose: bool = True) -> list[tuple[str, str]]:
    root, subject, polynomial = report.rows[0], report.subject, report.polynomial
    lines = [("forward", f"{count_text(root.forward.matmul_flops)} FLOPs")]
    if report.batch:
        lines.insert(0, ("run", _sizes(report)))
    if report.mode == "training":
        backward, recomputed = count_text(root.backward.matmul_flops), count_text(root.recompute.matmul_flops)
        lines.append(("backward", f"{backward} FLOPs, from {report.loss}"))
        way = "without checkpointing" if report.checkpointing == NONE else f"checkpointing {report.checkpointing}"
        lines.append(("recomputed", f"{recomputed} FLOPs ({way})"))
    matmul, macs = count_text(root.total.matmul_flops), count_text(root.total.macs)
    lines.append(("total", f"{matmul} FLOPs = {macs} MACs, matrix products only"))
    if report.is_local:
        needed = count_text(root.total.needed_flops)
        lines.append(("windows", f"{needed} FLOPs without the pairs of tokens that windows and causal masks hide"))
    elementwise = count_text(root.total.elementwise_flops)
    lines.append(("elementwise", f"{elementwise} more (GELU 8, LayerNorm 5, softmax 5 for each element)"))
    if polynomial is not None:
        terms = f"{polynomial.constant:,} + {polynomial.linear:,} * seq + {polynomial.quadratic:,} * seq^2"
        batch, seq = polynomial.verified_at
        lines.append(("FLOPs =", f"batch * ({terms}), verified at batch {batch}, seq {seq}"))
    traced = ""
    if verbose and report.traced_layers:
        traced = f"; {report.traced_layers} equal layers ran, the others are extrapolated"
    return [
        *lines,
        ("convention", "a multiply-add is 2 FLOPs; bytes moved: the sum of what each operator reads and writes"),
        ("not counted", ", ".join(report.unknown_operators) or "nothing: all operators are known"),
        (subject.obtained, f"from the operators that torch dispatches{traced}; torch {subject.torch_version}"),
    ]


def _sizes(report: FlopsReport) -> str:
    sizes = f"batch {report.batch}, seq {report.seq}, {report.mode}"
    encoder = [] if report.encoder_seq is None else [f"encoder length {report.encoder_seq}"]
    return ", ".join([sizes, *encoder])


_SWEEP = (
    number("batch", "batch"),
    number("seq", "seq"),
    number("forward FLOPs", "forward_flops"),
    number("backward", "backward_flops"),
    number("recomputed", "recompute_flops"),
    number("total FLOPs", "total_flops"),
)
_OPERATORS = (
    Column("operator", lambda row: row.operator, values("operator")),
    Column("phase", lambda row: row.phase, values("phase")),
    number("calls", "calls"),
    Column("counted as", lambda row: row.role, values("role")),
    number("matmul FLOPs", "matmul_flops", _count, of="work"),
    number("elementwise", "elementwise_flops", _count, of="work"),
    number("bytes moved", "bytes_moved", bytes_text, of="work", detail=True),
)


def _tables(report: FlopsReport, target: Target | None) -> list[Table]:
    sweep = [Table(_SWEEP, report.sweep)] if target and len(report.sweep) > 1 else []
    return [Table(_columns(report), lines_of(report.rows, target), lambda line: line.row.depth == 0), *sweep]


def _lines(report: FlopsReport, target: Target | None) -> list[tuple[str, str]]:
    return _footer(report, verbose=target is None or target.verbose)


def _convention(report: FlopsReport, target: Target, name: str) -> str:
    """Return a line with the number, its rule and its source, and the other conventions below."""
    items = sorted(report.conventions, key=lambda item: item.name != name)
    lines = [f"{item.name:<10}{count_text(item.value):>26} {item.unit:<6} {item.how} [{item.source}]" for item in items]
    heading = f"{title(report)}, {_sizes(report)}"
    return wrapped(heading, target) + "".join(wrapped(line, target, 4) for line in lines)


def _compared_table(report: FlopsReport) -> Table:
    training = report.mode == "training"
    names = {"backward": training, "recomputed": training and report.checkpointing != NONE, "total FLOPs": training}
    sweep = [replace(column, shown=names.get(column.title, True)) for column in _SWEEP]
    macs = Column("MACs", lambda point: count_text(point.total_flops // 2),
                  {"macs": lambda point: point.total_flops // 2}, right=True, detail=True)  # fmt: skip
    return Table([*sweep, macs], report.sweep)


def _compared_notes(reports: Sequence[FlopsReport]) -> list[str]:
    unknown = [f"{report.subject.name}: not counted: {', '.join(report.unknown_operators)}"
               for report in reports if report.unknown_operators]  # fmt: skip
    how = "FLOPs: matrix products only, a multiply-add is 2; from the operators dispatched by torch"
    return [*unknown, f"{reports[0].mode}; {how}"]


VIEW = View(title=title, tables=_tables, lines=_lines, name_width=13,
            records=lambda report: Table(_columns(report), lines_of(report.rows, Target())),
            compared=Compared(table=_compared_table, notes=_compared_notes))  # fmt: skip
# Every operator seen, and those that were not counted.
operators = View(title=title, tables=lambda report, target: [Table(_OPERATORS, report.operators)], lines=_lines,
                 name_width=13)  # fmt: skip
convention = SimpleNamespace(table=_convention)
