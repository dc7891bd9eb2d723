"""The columns of a report, which serve the terminal, CSV and Markdown, and the layout of a table in the terminal."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

from bertscope.frozen import Record
from bertscope.units import count_text, visible
from bertscope.views.console import Target, stacked, text_width, unbroken, verdict_cell, wrapped

_MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\|*_[]<"})
_FORMULA = re.compile(r"[=+@-](?![0-9.,]+$)")  # no module or tensor of PyTorch is called so
Read = Callable[[Any], Any]  # what a row has of a column


class Column(Record, kw_only=False):
    """A column of a report: its cells in the terminal and in Markdown, and its raw values in CSV.

    The terminal shows a column with `detail` with -v only (of 1 also in a table with the quantities below each other).
    Where a line has no room for all columns, some move into
    lines below the first column: the highest `below` first, then the last one. CSV holds the values of all columns by
    name, shown or not; columns with a higher `csv_order` come later.
    """

    title: str
    text: Callable[[Any], str]
    csv: Mapping[str, Read] = field(default_factory=dict)
    right: bool = False
    detail: int = 0
    below: int = 0
    csv_order: int = 0
    shown: bool = True
    is_verdict: bool = False  # its cells have the colour of their first word
    is_wide: bool = False  # left out where a line has no room for it

    def of(self, path: str | Read, missing: str = "") -> Column:
        """Return this column for rows that have its own row at a path; `missing` is shown where all values are None."""
        own, csv = reader(path), self.csv

        def text(row: Any) -> str:
            found = own(row)
            is_known = found is not None and (not csv or any(read(found) is not None for read in csv.values()))
            return self.text(found) if is_known else missing

        def value(read: Read, row: Any) -> Any:
            return None if (found := own(row)) is None else read(found)

        return replace(self, text=text, csv={name: partial(value, read) for name, read in csv.items()})


def reader(path: str | Read) -> Read:
    """Return the function that reads attributes and keys at a path such as `cost.peak.path`; None if one is None."""
    if not isinstance(path, str):
        return path
    names = path.split(".")

    def read(row: Any) -> Any:
        for name in names:
            if row is None:
                break
            row = row.get(name) if isinstance(row, dict) else getattr(row, name)
        return row

    return read


def values(*names: str, of: str = "") -> dict[str, Read]:
    """Return CSV values that are attributes of a row, or of its attribute `of`: `a.b` is named `a_b`."""
    return {name.replace(".", "_"): reader(f"{of}.{name}" if of else name) for name in names}


def attribute(
    title: str,
    *names: str,
    text: Callable[[Any], str] = str,
    of: str = "",
    csv: Sequence[str] | None = None,
    missing: str = "",
    **options: Any,
) -> Column:
    """Return a column of an attribute of a row, or of its attribute `of`, as text; CSV has all attributes named.

    `missing` is the text of None and of an empty one; `csv` has the attributes that CSV holds instead.
    """
    read = reader(f"{of}.{names[0]}" if of else names[0])

    def cell(row: Any) -> str:
        value = read(row)
        return missing if value is None or value == "" else text(value)

    return Column(title, cell, values(*(names if csv is None else csv), of=of), **options)


def number(title: str, name: str, text: Callable[[Any], str] = count_text, **options: Any) -> Column:
    """Return a column of numbers, as `attribute` does."""
    return attribute(title, name, text=text, right=True, **options)


def optional(text: Callable[[Any], str], missing: str = "") -> Callable[[Any], str]:
    """Return the function that writes None as nothing, or as `missing`."""
    return lambda value: missing if value is None else text(value)


def csv_only(csv: Mapping[str, Read]) -> Column:
    """Return a column that CSV holds and no table shows."""
    return Column("", str, csv, shown=False)


def listed(words: Iterable[str]) -> str:
    """Return the words as a list in a sentence: `q, k and v`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def answer_word(answer: str) -> str:
    """Return an answer of a report in words: yes, not certain or no."""
    return "not certain" if answer == "uncertain" else answer


def fits_word(answer: str) -> str:
    """Return the verb of an answer: fits, may fit or does not fit."""
    return {"yes": "fits", "uncertain": "may fit", "no": "does not fit"}[answer]


def in_phase(phase: str) -> str:
    """Return `in forward` or `in the optimizer step`."""
    return "in the optimizer step" if phase == "optimizer" else f"in {phase}"


def row_phase(phase: str) -> str:
    """Return `in forward` or `in optimizer step`, the name of a row or column."""
    return "in optimizer step" if phase == "optimizer" else f"in {phase}"


def copies_text(copies: int) -> str:
    """Return ` (12 x)` for a row of several equal layers, else nothing."""
    return f" ({copies} x)" if copies > 1 else ""


def shown_columns(columns: Sequence[Column]) -> list[Column]:
    """Return the columns of a table."""
    return [column for column in columns if column.shown]


def markdown_text(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    """Return the rows as a GitHub table."""
    columns = shown_columns(columns)
    lines = [
        [_markdown_cell(column.title) for column in columns],
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
    for row in rows:
        cells = (read(row) for read in getters.values())
        # Text has escapes as in a table, and an apostrophe before it where a spreadsheet would see a formula.
        writer.writerow([
            "'" * bool(_FORMULA.match(cell)) + visible(cell) if isinstance(cell, str) else cell for cell in cells
        ])  # fmt: skip
    return out.getvalue()


# ---- the layout of a table in the terminal: on a narrow one nothing is left out and no number is cut ----


Strong = Callable[[Any], object] | None  # true for the rows in bold
_GAP = "   "
_NARROWEST_NAME, _NARROWEST_TEXT = 20, 16  # columns of the terminal
_BRANCHES = re.compile(r"[ │├└─|`-]+")
_CONTINUED = str.maketrans({"├": "│", "└": " ", "─": " ", "`": " ", "-": " "})
_BREAKS = re.compile(r"(?<=[.,]) ?| (?!x\))")  # not in `(12 x)`


def table_text(columns: Sequence[Column], rows: Sequence[Any], target: Target, strong: Strong = None) -> str:
    """Return the rows as a table; in a narrow terminal words, long names and columns take lines of their own."""
    is_strong = [bool(strong and strong(row)) for row in rows]
    return _Drawing.of(columns, rows, target).fitted(target.width).text(target, is_strong)


class _Cells(Record, kw_only=False):
    """The texts of a column, its heading first, and its width in the terminal."""

    column: Column
    texts: Sequence[str]
    width: int

    def padded(self) -> Iterator[str]:
        """Yield the texts as wide as the column; those that are wider, or not of ASCII, need more than this."""
        pad = str.rjust if self.column.right else str.ljust
        return (pad(text, self.width) for text in self.texts)

    def least_width(self, *, words: bool) -> int:
        """Return the width of the longest text that is not broken: a word of the heading, a cell or a word of it."""
        heading, *cells = self.texts
        widths = [*map(text_width, cells)]
        if words and not self.column.right and max(widths, default=0) > _NARROWEST_TEXT:
            widths = [_NARROWEST_TEXT, *(text_width(part) for cell in cells for part in unbroken(cell))]
        return max([*map(text_width, unbroken(heading)), *widths, 0])


class _Drawing(Record, kw_only=False):
    """The columns of a table, names first, and those whose texts stand in lines below the names."""

    columns: Sequence[_Cells]
    below: Sequence[_Cells] = ()

    @classmethod
    def of(cls, columns: Sequence[Column], rows: Sequence[Any], target: Target) -> _Drawing:
        cells = []
        for column in shown_columns(columns):
            if target.verbose or not column.detail:
                texts = [column.title, *map(column.text, rows)]
                everything = "".join(texts)
                if not everything.isprintable():
                    texts = [*map(visible, texts)]
                cells.append(_Cells(column, texts, max(map(len if everything.isascii() else text_width, texts))))
        return cls(cells)

    @cached_property
    def width(self) -> int:
        """The columns of the terminal that a line takes."""
        return 1 + sum(cells.width for cells in self.columns) + len(_GAP) * (len(self.columns) - 1)

    @property
    def least_width(self) -> int:
        """The same with headings in several lines."""
        return self._narrowed(0, words=False).width

    def fitted(self, width: int | None) -> _Drawing:
        """Return the drawing for a terminal: nothing is left out, no number is cut and no word is broken.

        The first of these that is enough: headings take several lines; the columns with `below` move below the names;
        columns of words become narrow; long names get lines of their own; the last columns move below the names.
        """
        if width is None or self.width <= width:
            return self
        drawing = self._narrowed(width, words=False)
        if drawing.width <= width:
            return drawing
        if wide := [cells for cells in self.columns if cells.column.is_wide]:
            return replace(self, columns=[cells for cells in self.columns if cells is not wide[-1]]).fitted(width)
        first, *others = self.columns
        if most := max((cells.column.below for cells in others), default=0):
            return self._moved(lambda cells: cells.column.below == most).fitted(width)
        drawing = self._narrowed(width, words=True)
        name = max(first.width - max(drawing.width - width, 0), min(first.width, _NARROWEST_NAME))
        drawing = replace(drawing, columns=[replace(first, width=name), *drawing.columns[1:]])
        if drawing.width <= width or not others:
            return drawing
        return self._moved(lambda cells: cells is others[-1]).fitted(width)

    def _narrowed(self, width: int, *, words: bool) -> _Drawing:
        """Return the drawing with headings, and with `words` cells of words, in as many lines as the width asks for."""
        excess, columns = max(self.width - width, 0), [*self.columns]
        least = {place: cells.least_width(words=words) for place, cells in enumerate(columns) if place}
        for place in sorted(least, key=lambda place: least[place] - columns[place].width):
            narrower = min(excess, columns[place].width - least[place])
            columns[place] = replace(columns[place], width=columns[place].width - narrower)
            excess -= narrower
        return replace(self, columns=columns)

    def _moved(self, is_moved: Callable[[_Cells], bool]) -> _Drawing:
        """Return the drawing with some columns below the names, before those that are there."""
        kept = [cells for cells in self.columns if not is_moved(cells)]
        return _Drawing(kept, [*filter(is_moved, self.columns), *self.below])

    def text(self, target: Target, is_strong: Sequence[bool]) -> str:
        lines: list[str] = []
        width, rule = self.width - 1, "\u2500" if target.unicode else "-"
        has_colors = target.color and any(cells.column.is_verdict for cells in self.columns)
        padded = zip(*(cells.padded() for cells in self.columns), strict=True)
        for place, (line, is_bold) in enumerate(zip(map(_GAP.join, padded), (True, *is_strong), strict=True)):
            # The usual row: every cell has room.
            is_usual = len(line) == width and line.isascii() and not self.below and not (place and has_colors)
            row = (line,) if is_usual else self._lines(place, target)
            start, end = ("\x1b[1m", "\x1b[0m") if is_bold and target.color else ("", "")
            lines += [f"{start}{f' {part}'.rstrip()}{end}" for part in row]
            if not place:
                lines.append(f" {rule * width}")
        return "\n" + "\n".join(lines) + "\n\n"

    def _lines(self, place: int, target: Target) -> list[str]:
        first, *others = self.columns
        name = first.texts[place]
        stem = _stem(name)
        lines = []
        if text_width(name) > first.width:
            lines, name = _broken(name, target.width - 1 if target.width else 0), stem.rstrip()
        texts = zip_longest(
            *(wrapped(cells.texts[place], Target(cells.width)).splitlines() for cells in others), fillvalue=""
        )
        for number, cells in enumerate(texts if others else [()]):
            shown = map(_padded, (stem.rstrip() if number else name, *cells), self.columns)
            paints = (target.color and own.column.is_verdict and place for own in self.columns)
            lines.append(_GAP.join(verdict_cell(text) if paint else text for text, paint in zip(shown, paints)))  # noqa: B905
        below = [f"{cells.column.title} {cells.texts[place]}" for cells in self.below if place]
        below = [text for text in below if not text.endswith((" ", " --"))]
        if below:
            width = target.width - len(stem) - 3 if target.width else None
            lines += [f"{stem}  {line}" for line in wrapped("; ".join(below), Target(width), 2).splitlines()]
        return lines


def _padded(text: str, cells: _Cells) -> str:
    if text.isascii():
        return text.rjust(cells.width) if cells.column.right else text.ljust(cells.width)
    blank = " " * (cells.width - text_width(text))
    return blank + text if cells.column.right else text + blank


def _stem(name: str) -> str:
    """Return what stands under the branches of a name: their continuation."""
    branches = _BRANCHES.match(name)
    return branches[0].translate(_CONTINUED) if branches else ""


def _broken(line: str, width: int) -> list[str]:
    """Return the line in parts of at most this width, broken after dots, commas and spaces."""
    parts = [line]
    indent = f"{_stem(line)}  "
    while text_width(parts[-1]) > width:
        ends = (found.end() for found in _BREAKS.finditer(parts[-1], len(indent) + 1))
        place = max((end for end in ends if end <= width), default=0)
        if not place:
            break
        parts[-1:] = [parts[-1][:place].rstrip(), indent + parts[-1][place:]]
    return parts


def tables_text(
    columns: Sequence[Column], names: int, rows: Sequence[Any], target: Target, strong: Strong = None
) -> str:
    """Return the rows as `table_text` does, in a narrow terminal as several tables, all with the first `names`."""
    visible_columns = [[column for column in part if column.shown and (target.verbose or not column.detail)]
                       for part in (columns[:names], columns[names:])]  # fmt: skip
    first, others = visible_columns
    needed = [column for column in first if not column.below]

    def fits(group: Sequence[Column]) -> bool:
        return target.width is None or _Drawing.of([*needed, *group], rows, target).least_width <= target.width

    while not target.verbose and not fits(others) and (wide := [column for column in others if column.is_wide]):
        others.remove(wide[-1])
    groups: list[list[Column]] = [[]]
    for column in others:
        if groups[-1] and not fits([*groups[-1], column]):
            groups.append([])
        groups[-1].append(column)
    return stacked(*(table_text([*first, *group], rows, target, strong) for group in groups))
