"""The table of torchinfo 1.8.0 in plain text: a row for each module, or for each call of a report with shapes.

A parent shows only the parameters that no row below it has, or `--`. A module at the largest depth or without children
shows all its parameters, in parentheses if all are frozen. The column of names is as wide as the longest name at
any depth, 5 columns for each depth, rounded up to a multiple of 5. A row of a module that an earlier row has is
`(recursive)`. A module at several paths has its last one.

Calls are by their beginning. A module that is not called has a row only if modules below it are called.
The totals are those of torchinfo, except: the multiply-adds are all matrix products and convolutions, for each token,
those of attention too, without biases; the size of the parameters includes those that modules with children hold.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from bertscope.errors import SelectionError, suggestion
from bertscope.reports.base import TensorShape
from bertscope.reports.layer_ranges import expand
from bertscope.reports.modules import TORCHINFO_COLUMNS, TORCHINFO_OF_A_RUN, ModuleCall, TreeReport, TreeRow
from bertscope.units import count_text
from bertscope.views.console import Target

DEPTH = 3
_INDENT = 5
_MIN_NAME_WIDTH, _COLUMN_WIDTH = 40, 25
_ITEM_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "float16": 2, "bfloat16": 2, "int64": 8, "float64": 8}  # others: 4
_UNITS = ((10**12, "T"), (10**9, "G"), (10**6, "M"))


def table(report: TreeReport, target: Target, depth: int | None = None, columns: Sequence[str] | None = None) -> str:
    """Return the rows down to `depth` (default: 3); `columns` are by default the numbers of parameters and outputs.

    Where the columns that the user chose do not fit the target, each is as wide as its longest text. Raises
    SelectionError for an unknown column, and for a column of a run if the report has no shapes.
    """
    for word in columns or ():
        if word not in TORCHINFO_COLUMNS:
            hint = suggestion(str(word), TORCHINFO_COLUMNS)
            raise SelectionError(f"torchinfo has no column {str(word)[:40]!r}; {hint}")
    if not report.calls and set(columns or ()) & set(TORCHINFO_OF_A_RUN):
        raise SelectionError(f"the columns {', '.join(TORCHINFO_OF_A_RUN)} need a run; give inputs or shapes")
    chosen = tuple(columns or (("output_size", "num_params") if report.calls else ("num_params",)))
    lines = _lines(report)
    limit = DEPTH if depth is None else depth
    needed = max(_INDENT * line.row.depth + 1 + len(_name(line)) for line in lines)
    name_width = max(_MIN_NAME_WIDTH, -(-needed // _INDENT) * _INDENT)
    totals = report.totals
    total = totals.layer_params
    bar, first, other = ("│", "├─", "└─") if target.unicode else ("|", "+ ", "+ ")
    body = []
    for line in lines:
        level = line.row.depth
        if level <= limit:
            body.append([f"{bar:<{_INDENT}}" * (level - 1) + ("", first, other)[min(level, 2)] + _name(line)])
            body[-1] += map(_cells(line, limit, total).__getitem__, chosen)
    head = ["Layer (type:depth-idx)", *map(TORCHINFO_COLUMNS.__getitem__, chosen)]
    widths = [name_width, *[_COLUMN_WIDTH] * len(chosen)]
    if target.width and sum(widths) > target.width and columns:
        widths = [max(map(len, cells)) + 1 for cells in zip(head, *body, strict=True)]
    divider = "=" * min(sum(widths), target.width or sum(widths)) + "\n"

    def text(cells: Sequence[str]) -> str:
        return " ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip() + "\n"

    return (
        f"{divider}{text(head)}{divider}{''.join(map(text, body))}{divider}"
        f"Total params: {count_text(total)}\n"
        f"Trainable params: {count_text(totals.trainable_layer_params)}\n"
        f"Non-trainable params: {count_text(totals.frozen_layer_params)}\n"
        f"{_sizes(report, lines, divider) if report.calls else ''}{divider}"
    )


# ---- the rows ----


@dataclass(kw_only=True)
class _CallLine:
    """A module, or one call, with its row's numbers."""

    row: TreeRow
    call: ModuleCall | None
    again: bool
    index: int = 0  # among the rows of this depth
    is_leaf: bool = False
    params: int = 0  # each tensor once
    params_here: int = 0  # without those of rows below
    macs: int = 0  # outside modules below
    all_macs: int = 0

    @property
    def module(self) -> str:
        return _first_path(self.row)


def _lines(report: TreeReport) -> list[_CallLine]:
    rows = list(_with_repeated(_unfolded(report.rows)))
    if report.calls:
        lines = list(_called(rows, report.calls))
    else:
        lines = [_CallLine(row=row, call=None, again=row.same_as is not None) for row in rows]
    parents = {row.path.rpartition(".")[0] for row in rows if row.depth}
    leaves = {_first_path(row) for row in rows if row.path not in parents}
    params, seen = _params_of(report, rows), Counter[int]()
    for line in lines:
        seen[line.row.depth] += 1
        line.index = seen[line.row.depth]
        line.is_leaf, line.params = line.module in leaves, params[line.module]
    for index in range(len(lines) - 1, -1, -1):
        line, below = lines[index], list(_below(lines, index))
        line.params_here = line.params - sum(other.params_here for other in below if not other.again)
        line.all_macs = line.macs + sum(other.macs for other in below)
    return lines


def _below(lines: Sequence[_CallLine], index: int) -> Iterator[_CallLine]:
    for at in range(index + 1, len(lines)):
        if lines[at].row.depth <= lines[index].row.depth:
            return
        yield lines[at]


def _unfolded(rows: Sequence[TreeRow]) -> list[TreeRow]:
    unfolded: list[TreeRow] = []
    places: dict[str, tuple[int, ...]] = {}  # those of the module around it, its row, its number in the row
    for row_number, row in enumerate(rows):
        first_paths = [None] if row.same_as is None else [*expand(row.same_as)]
        for number, path in enumerate(expand(row.path)):
            above, _, name = path.rpartition(".")
            places[path] = (*places.get(above, ()), row_number, number)
            same_as = first_paths[number % len(first_paths)]
            one = replace(row, name=name, path=path, same_as=same_as, copies=1, params=row.each_params)
            trainable = row.trainable_params // row.copies
            unfolded.append(replace(one, trainable_params=trainable, bytes=row.bytes // row.copies))
    return sorted(unfolded, key=lambda row: places[row.path])


def _with_repeated(rows: Sequence[TreeRow]) -> Iterator[TreeRow]:
    """Yield the rows, below a module that is used again those of its children again."""
    for row in rows:
        yield row
        above = f"{row.same_as}."
        for child in rows if row.same_as is not None else ():
            if child.path.startswith(above):
                path = f"{row.path}.{child.path.removeprefix(above)}"
                depth = row.depth + path.count(".") - row.path.count(".")
                yield replace(child, path=path, depth=depth, same_as=_first_path(child))


def _first_path(row: TreeRow) -> str:
    return row.path if row.same_as is None else row.same_as


def _called(rows: Sequence[TreeRow], calls: Sequence[ModuleCall]) -> Iterator[_CallLine]:
    """Yield a line for each call, and before it one for each module around it whose call is not in progress."""
    at_path = {row.path: row for row in rows}
    last = {_first_path(row): row for row in rows}
    inserted = {call.path for call in calls}
    begun: set[str] = set()
    around: list[TreeRow] = []  # the rows that contain the next one
    line: _CallLine | None = None
    for call in calls:
        shown = call.path
        while shown not in last:  # below the largest depth of the report
            shown = shown.rpartition(".")[0]
        row = last[shown]
        parts = row.path.split(".")
        above = [at_path[".".join(parts[:end])] for end in range(1, row.depth + (shown != call.path))]
        for level, parent in enumerate(above):
            if [_first_path(item) for item in around[level : level + 1]] != [_first_path(parent)]:
                line = _CallLine(row=parent, call=None, again=_first_path(parent) in inserted)
                inserted.add(_first_path(parent))
                yield line
        around = above
        if shown == call.path or line is None:
            line = _CallLine(row=row, call=call, again=call.path in begun)
            begun.add(call.path)
            around = [*above, row] if row.depth else []
            yield line
        line.macs += call.matmul_flops // 2


def _params_of(report: TreeReport, rows: Sequence[TreeRow]) -> Mapping[str, int]:
    """Return each module's parameters, each tensor once, by the first path of the module."""
    modules = {row.path for row in rows if row.same_as is not None}
    ties = [tie for tie in report.ties if tie.path not in modules]
    params: dict[str, int] = {}
    for row in rows:
        above = f"{row.path}." if row.path else ""
        tied = sum(tie.params for tie in ties if tie.path.startswith(above) and tie.is_path.startswith(above))
        if row.same_as is None:
            params[row.path] = row.params - tied
    return params


# ---- the cells ----


def _name(line: _CallLine) -> str:
    row = line.row
    return f"{row.type}: {row.depth}-{line.index}" if row.depth else row.type


def _shape(tensors: Sequence[TensorShape]) -> str:
    return str(list(tensors[0].shape)) if tensors and tensors[0].shape else "--"


def _cells(line: _CallLine, depth: int, total: int) -> dict[str, str]:
    """Return the texts of all columns; a module at the largest depth or without children has all below it."""
    row, call, size = line.row, line.call, line.row.kernel_size
    is_whole = line.is_leaf or row.depth == depth
    shown_params = line.params if is_whole else max(line.params_here, 0)
    macs = line.all_macs if is_whole else line.macs
    params = count_text(shown_params) if shown_params else "--"
    trainable = "Partial" if row.trainable_params else "False"
    return {
        "input_size": _shape(call.inputs if call else ()),
        "output_size": _shape(call.outputs if call else ()),
        "num_params": "(recursive)" if line.again and line.params else
                      f"({params})" if shown_params and is_whole and not row.trainable_params else params,
        "params_percent": "(recursive)" if line.again and total else
                          f"{shown_params / total:>7.2%}" if shown_params and total else "     --",
        "kernel_size": str(list(size) if isinstance(size, tuple) else size) if size else "--",
        "mult_adds": count_text(macs) if macs else "--",
        "trainable": "--" if not line.params else "True" if row.trainable_params == row.params else trainable,
    }  # fmt: skip


# ---- the totals ----


def _sizes(report: TreeReport, lines: Sequence[_CallLine], divider: str) -> str:
    """Return the multiply-adds of the forward pass and the sizes of tensors, those of outputs with their gradients."""
    macs = (report.matmul_flops or 0) // 2
    factor, unit = next(((factor, unit) for factor, unit in _UNITS if macs >= factor), _UNITS[-1])
    digits = 0 if macs % factor == 0 else 2
    outputs = sum(2 * _bytes(line.call.outputs[:1]) for line in lines if line.call and line.is_leaf and line.params)
    inputs, params = _bytes(report.calls[0].inputs), report.rows[0].bytes
    return (
        f"Total mult-adds ({unit}): {macs / factor:,.{digits}f}\n{divider}"
        f"Input size (MB): {inputs / 1e6:.2f}\n"
        f"Forward/backward pass size (MB): {outputs / 1e6:.2f}\n"
        f"Params size (MB): {params / 1e6:.2f}\n"
        f"Estimated Total Size (MB): {(inputs + outputs + params) / 1e6:.2f}\n"
    )


def _bytes(tensors: Iterable[TensorShape]) -> int:
    return sum(prod(tensor.shape) * _ITEM_BYTES.get(tensor.dtype, 4) for tensor in tensors)
