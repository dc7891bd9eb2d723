"""The reports on modules, `count`, `tree` and `flops`, as tables, CSV and Markdown."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from bertscope.errors import one_line
from bertscope.reports.base import Shape
from bertscope.reports.layer_ranges import is_run
from bertscope.reports.modules import CountReport, CountRow, FlopsReport, TreeReport, TreeRow, sum_of_rows
from bertscope.settings.checkpointing import NONE
from bertscope.units import bytes_text, count_text, counted, shape_text, share_text, tensors_text
from bertscope.views.columns import Column, attribute, copies_text, csv_only, number, values
from bertscope.views.console import Target, command_text, model_code, wrapped
from bertscope.views.footer import footer, title, with_head
from bertscope.views.views import Compared, Table, View

_TOTAL = "total"


def _names(rows: Sequence[Any], target: Target | None) -> dict[str, str]:
    """Return the names of modules by path with the branches of the tree before them; for Markdown indented."""
    bar, tee, corner = ("│  ", "├─ ", "└─ ") if target is None or target.unicode else ("|  ", "|- ", "`- ")
    names, trail = {}, ""
    for row in rows:
        before = "    " * row.depth
        if target is not None and row.depth:
            trail = trail[: 3 * (row.depth - 1)]
            before = trail + (corner if row.is_last else tee)
            trail += "   " if row.is_last else bar
        names[row.path] = before + (row.name or row.type) + (copies_text(row.copies) if is_run(row.name) else "")
    return names


def _some(value: int) -> str:
    return count_text(value) if value else "--"


def _share(value: float) -> str:
    return share_text(value) if value else ""


def _is_root(row: Any) -> bool:
    return not row.depth


def _in_out(**options: Any) -> Iterator[Column]:
    """Yield the columns of the shapes and dtypes that go into each module, if there is room, and come out."""
    yield attribute("in", "inputs", text=tensors_text, as_text="inputs", is_wide=True, **options)
    yield attribute("out", "outputs", text=tensors_text, as_text="outputs", **options)


def _per_layer(**options: Any) -> Column:
    def text(row: Any) -> str:
        return count_text(row.each_params) if row.copies > 1 and row.params else ""

    return Column("per layer", text, values("copies", "each_params"), right=True, **options)


# ---- count ----


def _count_table(report: CountReport, rows: Sequence[CountRow]) -> Table:
    lines = [line for row in rows for line in (row, *row.parts)]
    parts = {id(part) for row in rows for part in row.parts}

    def label(row: CountRow) -> str:
        return f"  {row.name}" if id(row) in parts else (row.path or row.name) + copies_text(row.copies)

    depth = {"depth": lambda row: int(id(row) in parts)}  # 1 marks the parts of the row above
    columns = [
        Column("path", label, depth | values("name", "path")),
        Column("type", lambda row: " + ".join(dict.fromkeys(row.type.split(" + "))), values("type"), detail=True),
        attribute("tensors", "shapes", text=_shapes, as_text="shapes", csv_order=3, detail=report.by == "layer",
                  shown=report.by != "group"),
        _per_layer(),
        number("params", "params", csv=["params", "distinct_params"]),
        number("share", "share", _share, csv_order=2),
        number("size", "bytes", bytes_text, detail=True, csv_order=1),
        number("trainable", "trainable_params", shown=report.totals.frozen_params > 0),
        attribute("tied to", "tied_to", csv=["in_layer_sum", "tied_to"], detail=True, csv_order=2),
        *_in_out(csv_order=3),
    ]  # fmt: skip
    return Table(columns, lines, lambda row: row.parts or row.name == _TOTAL)


def _shapes(shapes: Sequence[Shape]) -> str:
    """Return `4 x [768, 768], 4 x [768]`; more than four kinds are counted instead."""
    kinds = Counter(shapes)
    if len(kinds) > 4:
        return f"{len(shapes)} tensors"
    return ", ".join(f"{times} x " * (times > 1) + shape_text(shape) for shape, times in kinds.items())


def _count_tables(report: CountReport, target: Target | None) -> list[Table]:
    """Return the rows, those of the layers of one module below their sum, and the total of all rows."""
    rows: list[CountRow] = []
    for parent, group in groupby(report.rows, lambda row: row.path.rpartition(".")[0]):
        parts = list(group)
        below = [row for row in report.rows if row.path.startswith(f"{parent}.")]
        is_nested = any(row.parts or row.copies > 1 for row in parts)
        if report.by == "layer" and parent and 1 < len(parts) == len(below) < len(report.rows) and not is_nested:
            direct = [rows.pop()] if rows and rows[-1].path == parent else []  # the tensors of the module itself
            parts = [sum_of_rows(parent, [*direct, *parts])]
        rows += parts
    totals, total = report.totals, sum_of_rows(_TOTAL, report.rows)
    sums: dict[str, Any] = {"params": totals.layer_params, "share": 1.0, "bytes": totals.param_bytes}
    total = replace(total, parts=(), trainable_params=totals.trainable_layer_params, **sums)
    return [_count_table(report, [*rows, total])]


def _headline(report: CountReport | TreeReport) -> str:
    totals = report.totals
    if totals.layer_params == totals.distinct_params:
        return counted(totals.distinct_params, "parameter")
    return (
        f"{count_text(totals.distinct_params)} unique parameters; {count_text(totals.layer_params)} "
        "with tied tensors counted at each use"
    )


def _next(report: Any, name: str, why: str, **changes: Any) -> str:
    """Return the next step; empty on a command line without the input that a module of the user's own needs."""
    python = ""
    if report.subject.implementation is None:
        keywords = [f", {key}={value!r}" for key, value in changes.items() if value is not None and key != "shapes"]
        python = f"bertscope.{name}({model_code(report.subject.name)}, inputs=inputs{''.join(keywords)})"
    command = command_text(name, changes, {}, python, report.subject.name)
    return f"{why}\n  {command}" if command else ""


def _pivot(reports: Sequence[CountReport]) -> Table | None:
    if reports[0].by != "group":
        return None
    names = dict.fromkeys(row.name for report in reports for row in report.rows)
    groups = []
    for name in names:
        params = (sum(row.params for row in report.rows if row.name == name) for report in reports)
        groups.append({"group": name, **{str(n): size for n, size in enumerate(params)}})
    for name, total in (("sum over layers", "layer_params"), ("unique parameters", "distinct_params")):
        groups.append({"group": name, **{str(n): getattr(report.totals, total) for n, report in enumerate(reports)}})
    models = (number(one_line(report.subject.name, limit=40), str(n), _some) for n, report in enumerate(reports))
    return Table([attribute("group", "group"), *models], groups)


def _compared_totals(report: CountReport) -> Table:
    columns = [
        number("unique parameters", "distinct_params"),
        number("sum over layers", "layer_params"),
        number("trainable", "trainable_params", detail=not report.totals.frozen_params),
        number("size", "param_bytes", bytes_text),
    ]
    return Table(columns, [report.totals])


_GROUPS = (csv_only({"group": attrgetter("name")} | values("params", "distinct_params", "trainable_params", "bytes")),)


def _span(numbers: Iterable[int], what: str) -> str:
    return f"{count_text(min(many := [*numbers]))} to {count_text(max(many))} {what}."


def _count_notes(reports: Sequence[CountReport]) -> list[str]:
    notes = ["unique parameters: every tensor once; sum over layers: a tied tensor at every layer that uses it"]
    if reports[0].by != "group":
        notes.append(f"size: of the unique parameters in {reports[0].subject.dtype}; 1 MiB = 2**20 B")
    return notes


count = View(
    answer=_headline,
    settings=with_head,
    tables=_count_tables,
    tip=lambda report: (
        _next(report, "tree", "see the shapes of every module", shapes=True)
        if any(row.outputs for row in report.rows)
        else _next(report, "estimate", "estimate the memory of a training step", batch=None)
        or _next(report, "tree", "see its modules")
    ),
    lines=footer,
    records=lambda report: _count_table(report, report.rows),
    params=attrgetter("totals.distinct_params"),
    compared=Compared(
        table=_compared_totals,
        answer=lambda reports: _span(
            (report.totals.distinct_params for report in reports), f"unique parameters in {len(reports)} models"
        ),
        notes=_count_notes,
        pivot=_pivot,
        records=lambda report: Table(_GROUPS, report.rows) if report.by == "group" else None,
    ),
)


# ---- tree ----


def tree_table(report: TreeReport, target: Target | None = Target()) -> Table:  # noqa: B008  it is frozen
    """Return the modules, for a page or a target."""
    rows, names = report.rows, _names(report.rows, target)

    def kernel_size(row: TreeRow) -> str:
        return shape_text(row.kernel_size) if isinstance(row.kernel_size, tuple) else str(row.kernel_size or "")

    columns = [
        Column("module", lambda row: names[row.path], values("depth", "depth_index", "path", "name")),
        Column("type: depth-index", _type, values("type"), is_wide=2 * any(row.outputs for row in rows)),
        _per_layer(detail=True),
        number("params", "params", _some, csv=["params", "distinct_params", "trainable_params"]),
        number("share", "share", _share, is_wide=2),
        csv_only(values("same_as")),
        *_in_out(),
        csv_only(values("bytes") | {"kernel_size": kernel_size}),
    ]
    return Table(columns, rows, _is_root)


def _type(row: TreeRow) -> str:
    text = f"{row.type}: {row.depth_index}" if row.depth_index else row.type
    return f"{text} (same module as {row.same_as})" if row.same_as is not None else text


tree = View(
    answer=_headline,
    settings=with_head,
    tip=lambda report: (
        _next(report, "flops", "count the FLOPs of these modules")
        if any(row.outputs for row in report.rows)
        else _next(report, "tree", "see the shapes of their outputs", shapes=True)
        or _next(report, "diagram", "draw them")
    ),
    tables=lambda report, target: [tree_table(report, target)],
    lines=footer,
)


# ---- flops ----


def _flops_tables(report: FlopsReport, target: Target | None) -> list[Table]:
    training, names = report.mode == "training", _names(report.rows, target)
    columns = [
        Column("module", lambda row: names[row.path], values("depth", "path")),
        attribute("type", "type", csv=["type", "copies"], detail=True),
        _phase("forward FLOPs", "forward", shown=training),
        _phase("backward", "backward", shown=training),
        _phase("recomputed", "recompute", shown=training and report.checkpointing != NONE),
        number("total FLOPs" if training else "matmul FLOPs", "total.matmul_flops", _some),
        *([number("within windows", "total.needed_flops", _some)] if report.is_local else []),
        number("MACs", "macs", _some, detail=True, csv_order=1),
        number("share", "share", _share, detail=training, csv_order=1),
        number("elementwise", "total.elementwise_flops", _some, detail=training),
        number("bytes moved", "total.bytes_moved", bytes_text, detail=True),
        number("FLOPs/byte", "intensity", "{:.2f}".format, detail=True, csv_order=1),
    ]
    points = report.sweep if target and len(report.sweep) > 1 else ()
    return [Table(columns, report.rows, _is_root), Table(_sweep(report), points)]


def _phase(title: str, name: str, *, shown: bool) -> Column:
    csv = [f"{name}.{work}" for work in ("matmul_flops", "elementwise_flops", "bytes_moved")]
    return number(title, csv[0], _some, csv=csv, shown=shown, is_wide=name != "forward")


_OPERATORS = (
    attribute("operator", "operator"),
    attribute("phase", "phase"),
    number("calls", "calls"),
    attribute("counted as", "role"),
    number("matmul FLOPs", "matmul_flops", _some, of="work"),
    number("elementwise", "elementwise_flops", _some, of="work"),
    number("bytes moved", "bytes_moved", bytes_text, of="work", detail=True),
)


def _run(report: FlopsReport) -> str:
    return "a training step" if report.mode == "training" else "a forward pass"


def _flops_answer(report: FlopsReport) -> str:
    total = report.rows[0].total
    return f"{count_text(total.matmul_flops)} FLOPs ({count_text(total.macs)} MACs) for {_run(report)}."


def _flops_lines(report: FlopsReport, target: Target | None) -> Iterator[tuple[str, str]]:
    root, subject, polynomial = report.rows[0], report.subject, report.polynomial
    is_verbose, is_training = target is None or target.verbose, report.mode == "training"
    if is_verbose and report.batch:
        yield "run", f"{_sizes(report)}, {report.mode}"
    if is_verbose or is_training:
        yield "forward", f"{count_text(root.forward.matmul_flops)} FLOPs"
    if is_training:
        how = "without checkpointing" if report.checkpointing == NONE else f"checkpointing {report.checkpointing}"
        yield "backward", f"{count_text(root.backward.matmul_flops)} FLOPs, from {report.loss}"
        yield "recomputed", f"{count_text(root.recompute.matmul_flops)} FLOPs ({how})"
    if report.is_local:
        needed = count_text(root.total.needed_flops)
        yield "windows", f"{needed} FLOPs without the pairs of tokens that windows and causal masks hide"
    each = " (GELU 8, LayerNorm 5, softmax 5 for each element)" if is_verbose else ""
    yield "elementwise", f"{count_text(root.total.elementwise_flops)} FLOPs more{each}"
    if polynomial is not None:
        terms = f"{polynomial.constant:,} + {polynomial.linear:,} * seq + {polynomial.quadratic:,} * seq^2"
        batch, seq = polynomial.verified_at
        yield "FLOPs", f"batch * ({terms}), verified at batch {batch}, seq {seq}"
    if report.unknown_operators:
        yield "not counted", ", ".join(report.unknown_operators)
    if is_verbose:
        yield (
            "convention",
            "a multiply-add counts as 2 FLOPs; bytes moved: all that operators read and write",
        )
        layers = report.traced_layers
        traced = f"; {layers} equal layers ran, the others are extrapolated" if layers else ""
        versions = ", ".join(filter(None, (f"torch {subject.torch_version}", subject.implementation)))
        yield subject.obtained, f"from the operators that torch dispatches{traced}; {versions}"


def _sizes(report: FlopsReport) -> str:
    encoder = "" if report.encoder_seq is None else f", encoder length {report.encoder_seq}"
    return f"batch {report.batch}{f', seq {report.seq}' * bool(report.seq)}{encoder}"


def _convention(report: FlopsReport, target: Target, name: str) -> str:
    items = sorted(report.conventions, key=lambda item: item.name != name)
    lines = [f"{item.name:<10}{count_text(item.value):>26} {item.unit:<6} {item.how} [{item.source}]" for item in items]
    heading = f"{title(report)}, {_sizes(report)}, {report.mode}"
    return wrapped(heading, target) + "".join(wrapped(line, target, 4) for line in lines)


def _compared_work(reports: Sequence[FlopsReport]) -> str:
    points = (point.total_flops for report in reports for point in report.sweep)
    return _span(points, f"FLOPs for {_run(reports[0])} of {len(reports)} models")


def _sweep(report: FlopsReport) -> list[Column]:
    training = report.mode == "training"
    return [
        number("batch", "batch"),
        number("seq", "seq"),
        attribute("checkpointing", "checkpointing", shown=len({row.checkpointing for row in report.sweep}) > 1),
        number("forward FLOPs", "forward_flops"),
        number("backward", "backward_flops", shown=training),
        number("recomputed", "recompute_flops", shown=training and any(row.recompute_flops for row in report.sweep)),
        number("total FLOPs", "total_flops", shown=training),
    ]


def _flops_notes(reports: Sequence[FlopsReport]) -> list[str]:
    unknown = ((report.subject.name, report.unknown_operators) for report in reports)
    notes = [f"{name}: not counted: {', '.join(operators)}" for name, operators in unknown if operators]
    how = "FLOPs: matrix products only, a multiply-add counts as 2; from the operators dispatched by torch"
    return [*notes, f"{reports[0].mode}; {how}"]


flops = View(
    answer=_flops_answer,
    settings=lambda report: ", ".join([title(report), *[_sizes(report)] * bool(report.batch)]),
    tip=lambda report: (
        _next(report, "estimate", "estimate the memory of this step", mode=None)
        if report.mode == "training"
        else _next(report, "flops", "count a training step", mode="training")
    ),
    tables=_flops_tables,
    lines=_flops_lines,
    name_width=13,
    compared=Compared(
        table=lambda report: Table([*_sweep(report), number("MACs", "macs", detail=True)], report.sweep),
        answer=_compared_work,
        notes=_flops_notes,
    ),
)
# Every operator seen, and those that were not counted.
operators = replace(flops, columns=_OPERATORS, rows="operators")
convention = SimpleNamespace(table=_convention)
