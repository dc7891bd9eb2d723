"""One table of columns for each report; it serves the terminal, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal

from bertscope.render.console import Target, wrapped
from bertscope.render.texts import phrase, say
from bertscope.units import count_text, visible

if TYPE_CHECKING:  # rich costs 50 ms, and --help and completion draw nothing
    from rich.console import Console
    from rich.table import Table

Strong = Callable[[Any], object] | None  # true for the rows in bold
MANY = 2000  # rows
_UNLIMITED = 10_000
_GAP = "   "
_NARROWEST_NAME = 12  # columns
_BRANCHES = re.compile(r"[ │├└─|`-]+")
_CONTINUED = str.maketrans({"├": "│", "└": " ", "─": " ", "`": " ", "-": " "})
_BREAKS = re.compile(r"(?<=[.,]) ?| (?!x\))")  # not in `(12 x)`
_MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\|*_[]<"})
_FORMULA = re.compile(r"[=+@-](?![\d.,]+$)")  # no module or tensor of PyTorch is called so


@dataclass(frozen=True)
class Column:
    """A column of a report: its cells in the terminal and in Markdown, and its raw values in CSV.

    A narrow terminal drops the column with the highest `give_up` first, and none with 0. If that is not enough, the
    cells of columns with `below` are in lines below the first column. CSV holds the values of all columns by name,
    shown or not; columns with a higher `csv_order` come later.
    """

    title: str
    text: Callable[[Any], str]
    csv: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    right: bool = False
    give_up: int = 0
    below: bool = False
    csv_order: int = 0
    shown: bool = True

    @property
    def heading(self) -> str:
        """The title in the chosen language."""
        return phrase(self.title)


def values(*names: str, of: str = "") -> dict[str, Callable[[Any], Any]]:
    """Return CSV values that are attributes of a row, or of its attribute `of`: `a.b` is named `a_b`."""
    return {name.replace(".", "_"): attrgetter(f"{of}.{name}" if of else name) for name in names}


def number(title: str, name: str, text: Callable[[Any], str] = count_text, of: str = "", **options: Any) -> Column:
    """Return a column of numbers: an attribute of a row, or of its attribute `of`, as text and as a value in CSV."""
    read = attrgetter(f"{of}.{name}" if of else name)
    return Column(title, lambda row: text(read(row)), values(name, of=of), right=True, **options)


def csv_only(csv: Mapping[str, Callable[[Any], Any]]) -> Column:
    """Return a column that CSV holds and no table shows."""
    return Column("", str, csv, shown=False)


def copies_text(copies: int) -> str:
    """Return ` (12 x)` for a row of several equal layers, else nothing."""
    return f" ({copies} x)" if copies > 1 else ""


def shown(columns: Sequence[Column]) -> list[Column]:
    """Return the columns of a table."""
    return [column for column in columns if column.shown]


def table_text(columns: Sequence[Column], rows: Sequence[Any], target: Target, strong: Strong = None) -> str:
    """Return the rows as a table; a narrow terminal drops the least important columns, and a line says which."""
    columns = shown(columns)
    is_plain = target == Target()  # no width to fit and no colours; rich, whose import takes 80 ms, draws the same
    drawing = _Lines(columns, rows, target) if is_plain or len(rows) > MANY else _RichTable(rows, target, strong)
    kept = _fitting(columns, drawing, target)
    lower = [column for column in columns if column.below]
    if isinstance(drawing, _RichTable) and target.width and drawing.width(kept) > target.width:
        if lower:
            drawing = replace(drawing, below=lower)
            kept = _fitting([column for column in columns if not column.below], drawing, target)
        drawing = replace(drawing, excess=max(drawing.width(kept) - target.width, 0))
    text = drawing.text(kept)
    left_out = [column.heading for column in columns if column not in kept and column not in lower]
    if left_out:
        text += wrapped(say("left_out", names=say("comma").join(left_out)), target)
    return text


def _fitting(columns: Sequence[Column], drawing: _Lines | _RichTable, target: Target) -> list[Column]:
    """Return the columns without those that the width has no place for."""
    kept = list(columns)
    while target.width and drawing.width(kept) > target.width:
        spare = max(kept, key=lambda column: column.give_up)
        if spare.give_up == 0:
            break
        kept.remove(spare)
    return kept


@dataclass(frozen=True)
class _RichTable:
    """A table drawn by rich, which folds a long cell over lines; nothing is cut.

    The cells of the columns in `below` are lines of the first cell of a row, which is `excess` narrower than its
    longest line: a path is broken after a dot.
    """

    rows: Sequence[Any]
    target: Target
    strong: Strong
    below: Sequence[Column] = ()
    excess: int = 0

    def width(self, columns: Sequence[Column]) -> int:
        return _console(Target()).measure(self._table(columns)).maximum

    def text(self, columns: Sequence[Column]) -> str:
        console = _console(self.target)
        console.print(self._table(columns))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"

    def _table(self, columns: Sequence[Column]) -> Table:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        cells = [[visible(column.text(row)) for column in columns[1:]] for row in self.rows]
        widths, excess = self._narrowed(columns[1:], cells)
        table = Table(box=box.SIMPLE_HEAD if self.target.unicode else box.ASCII2, pad_edge=False, header_style="bold")
        for column, width in zip(columns, [None, *widths], strict=True):
            justify: Literal["left", "right"] = "right" if column.right else "left"
            table.add_column(column.heading, justify=justify, overflow="fold", no_wrap=column.right, width=width)
        first = [self._first_lines(columns[0], row) for row in self.rows]
        longest = max((_cell_width(line) for lines in first for line in lines), default=0)
        for row, lines, others in zip(self.rows, first, cells, strict=True):
            style = "bold" if self.strong and self.strong(row) else ""
            if excess and longest - excess >= _NARROWEST_NAME:
                lines = [part for line in lines for part in _broken(line, longest - excess)]
            table.add_row(*map(Text, ["\n".join(lines), *others]), style=style)
        return table

    def _narrowed(self, columns: Sequence[Column], cells: Sequence[Sequence[str]]) -> tuple[list[int | None], int]:
        """Return the widths of columns of words that are narrower than their texts, and the excess that is left."""
        widths: list[int | None] = [None] * len(columns)
        texts = [[column.heading, *(row[place] for row in cells)] for place, column in enumerate(columns)]
        natural = [max(map(_cell_width, column)) for column in texts]
        least = [max(_cell_width(word) for text in column for word in text.split() or [""]) for column in texts]
        excess = self.excess
        for place in sorted(range(len(columns)), key=lambda place: least[place] - natural[place]):
            if excess and not columns[place].right:
                width = max(natural[place] - excess, least[place])
                excess -= natural[place] - width
                widths[place] = width
        return widths, excess

    def _first_lines(self, column: Column, row: Any) -> list[str]:
        """Return the lines of the first cell of a row."""
        name = visible(column.text(row))
        branches = _BRANCHES.match(name)
        indent = (branches[0].translate(_CONTINUED) if branches else "") + "  "
        texts = [(lower.heading, visible(lower.text(row))) for lower in self.below]
        return [name, *(f"{indent}{title} {text}" for title, text in texts if text)]


def _broken(line: str, width: int) -> list[str]:
    """Return the line in parts of at most this width, broken after dots, commas and spaces."""
    parts = [line]
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    while _cell_width(parts[-1]) > width:
        ends = (found.end() for found in _BREAKS.finditer(parts[-1], len(indent) + 1))
        place = max((end for end in ends if end <= width), default=0)
        if not place:
            break
        parts[-1:] = [parts[-1][:place].rstrip(), indent + parts[-1][place:]]
    return parts


def _console(target: Target) -> Console:
    from rich.console import Console

    # markup off: `[768, 3072]` in a cell is data; height: without it rich clamps to 80 under TERM=dumb.
    return Console(
        file=io.StringIO(),
        width=target.width or _UNLIMITED,
        height=_UNLIMITED,
        force_terminal=target.color,
        color_system="standard" if target.color else None,
        no_color=not target.color,
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
    )


class _Lines:
    """A table in the same form without rich, which takes 0.3 ms and 5 KB for a row. The terminal wraps its lines."""

    def __init__(self, columns: Sequence[Column], rows: Sequence[Any], target: Target) -> None:
        self.rule = "\u2500" if target.unicode else "-"
        self.cells = {
            column.title: [column.heading, *(visible(column.text(row)) for row in rows)] for column in columns
        }
        self.widths = {title: max(map(_cell_width, cells)) for title, cells in self.cells.items()}

    def width(self, columns: Sequence[Column]) -> int:
        return sum(self.widths[column.title] + len(_GAP) for column in columns)

    def text(self, columns: Sequence[Column]) -> str:
        padded = [self._padded(column) for column in columns]
        lines = [f" {_GAP.join(cells)}".rstrip() for cells in zip(*padded, strict=True)]
        lines.insert(1, f" {self.rule * (self.width(columns) - len(_GAP))}")
        return "\n" + "\n".join(lines) + "\n\n"

    def _padded(self, column: Column) -> Iterator[str]:
        for cell in self.cells[column.title]:
            blank = " " * (self.widths[column.title] - _cell_width(cell))
            yield blank + cell if column.right else cell + blank


def _cell_width(cell: str) -> int:
    if cell.isascii():
        return len(cell)
    from rich.cells import cell_len

    return cell_len(cell)


def tables_text(
    columns: Sequence[Column], names: int, rows: Sequence[Any], target: Target, strong: Strong = None
) -> str:
    """Return the rows as `table_text` does, in a narrow terminal as several tables, all with the first `names`."""
    first, others = columns[:names], columns[names:]
    needed = [column for column in first if not column.give_up]
    drawing = _RichTable(rows, target, strong)

    def groups(size: int) -> list[Sequence[Column]]:
        return [others[start : start + size] for start in range(0, len(others), size)]

    def fits(size: int) -> bool:
        widths = (drawing.width([*needed, *group]) for group in groups(size))
        return target.width is None or max(widths) <= target.width

    size = next(filter(fits, range(len(others), 1, -1)), 1)
    return stacked(*(table_text([*first, *group], rows, target, strong) for group in groups(size)))


def stacked(*tables: str) -> str:
    """Return the tables one below the other, with one empty line between two."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(tables))


def markdown_text(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    """Return the rows as a GitHub table."""
    columns = shown(columns)
    lines = [
        [_markdown_cell(column.heading) for column in columns],
        ["---:" if column.right else "---" for column in columns],
        *([_markdown_cell(column.text(row)) for column in columns] for row in rows),
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _markdown_cell(text: str) -> str:
    indent = len(text) - len(text.lstrip(" "))
    return "&nbsp;" * indent + visible(text.strip()).translate(_MARKDOWN)


def csv_text(columns: Sequence[Column], rows: Iterable[Any]) -> str:
    """Return the raw values, one row a line, in cells that neither a terminal nor a spreadsheet acts upon."""
    ordered = sorted(columns, key=lambda column: column.csv_order)
    getters = {name: getter for column in ordered for name, getter in column.csv.items()}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(getters)
    writer.writerows([_csv_cell(getter(row)) for getter in getters.values()] for row in rows)
    return out.getvalue()


def _csv_cell(value: Any) -> Any:
    """Return text with escapes as in a table, after an apostrophe where a spreadsheet would see a formula."""
    if not isinstance(value, str):
        return value
    return f"'{visible(value)}" if _FORMULA.match(value) else visible(value)
