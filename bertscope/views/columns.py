"""The columns of a report, which serve the terminal, CSV and Markdown, and the layout of a table in the terminal."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import partial
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
    CSV holds the values of all columns by name, shown or not; columns with a higher `csv_order` come later.
    """

    title: str
    text: Callable[[Any], str]
    csv: Mapping[str, Read] = field(default_factory=dict)
    right: bool = False
    detail: int = 0
    csv_order: int = 0
    shown: bool = True  # where it has a text in any row
    missing: str = ""  # what it shows of a row that has no value
    is_verdict: bool = False  # its cells have the colour of their first word
    is_wide: int = 0  # above 0 it is left out where a line has no room for it, the highest number first
    text_among: Callable[[Sequence[Any]], Callable[[Any], str]] | None = None  # the text, in one unit for all rows

    def of(self, path: str | Read, missing: str = "") -> Column:
        """Return this column for rows that contain its row at a path; `missing` is shown where all values are None."""
        inner, csv = reader(path), self.csv

        def text(row: Any) -> str:
            inside = inner(row)
            is_known = inside is not None and (not csv or any(read(inside) is not None for read in csv.values()))
            return self.text(inside) if is_known else missing

        def value(read: Read, row: Any) -> Any:
            return None if (inside := inner(row)) is None else read(inside)

        def text_among(rows: Sequence[Any]) -> Callable[[Any], str]:
            return self.among([inside for row in rows if (inside := inner(row)) is not None]).of(path, missing).text

        outer = {name: partial(value, read) for name, read in csv.items()}
        among = text_among if self.text_among else None
        return replace(self, text=text, missing=missing, csv=outer, text_among=among)

    def among(self, rows: Sequence[Any]) -> Column:
        """Return this column for a table with these rows."""
        return replace(self, text=self.text_among(rows), text_among=None) if self.text_among else self


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
    as_text: str = "",
    missing: str = "",
    **options: Any,
) -> Column:
    """Return a column of an attribute of a row, or of its attribute `of`, as text; CSV has all attributes named.

    `missing` is the text of None and of an empty one; `csv` has the attributes that CSV holds instead, and `as_text`
    the name under which it holds the text.
    """
    read = reader(f"{of}.{names[0]}" if of else names[0])

    def cell(row: Any) -> str:
        value = read(row)
        return missing if value is None or value == "" else text(value)

    raw = {as_text: cell} if as_text else values(*(names if csv is None else csv), of=of)
    return Column(title, cell, raw, **options)


def number(title: str, name: str, text: Callable[[Any], str] = count_text, **options: Any) -> Column:
    """Return a column of numbers, as `attribute` does."""
    return attribute(title, name, text=text, right=True, **options)


def csv_only(csv: Mapping[str, Read]) -> Column:
    """Return a column that CSV holds and no table shows."""
    return Column("", str, csv, shown=False)


def listed(names: Iterable[str], most: int = 99) -> str:
    """Return the words as a list in a sentence: `q, k and v`; of more than `most`, `q, k and 3 more`."""
    *first, last = names
    if len(first) > most:
        first, last = first[:most], f"{len(first) + 1 - most} more"
    return f"{', '.join(first)} and {last}" if first else last


def fits_word(answer: str) -> str:
    """Return an answer's verb: fits, may fit or does not fit."""
    return {"yes": "fits", "uncertain": "may fit", "no": "does not fit"}[answer]


def in_phase(phase: str) -> str:
    """Return `in forward` or `in the optimizer step`."""
    return "in the optimizer step" if phase == "optimizer" else f"in {phase}"


def copies_text(copies: int) -> str:
    """Return ` (12 x)` for a row of several equal layers, else nothing."""
    return f" ({copies} x)" if copies > 1 else ""


def shown_columns(columns: Iterable[Column], rows: Sequence[Any]) -> list[Column]:
    """Return the columns of a table that have a text in any of these rows; without rows all."""

    def has_text(column: Column) -> bool:
        return not rows or any(column.text(row) not in ("", column.missing) for row in rows)

    return [column.among(rows) for column in columns if column.shown and has_text(column)]


def markdown_text(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    """Return the rows as a GitHub table."""
    columns = shown_columns(columns, rows)
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
        writer.writerow(
            ["'" * bool(_FORMULA.match(cell)) + visible(cell) if isinstance(cell, str) else cell for cell in cells]
        )
    return out.getvalue()


# ---- the layout of a table in the terminal: on a narrow one no number is cut and no row breaks in two ----


Strong = Callable[[Any], object] | None  # true for the rows in bold
_GAPS = "   ", "  "  # between columns: the second one where a line has no room for the first
_NARROWEST_NAME, _NARROWEST_TEXT = 20, 16  # columns of the terminal
_BRANCHES = re.compile(r"[ │├└─|`-]+")
_CONTINUED = str.maketrans({"├": "│", "└": " ", "─": " ", "`": " ", "-": " "})
_BREAKS = re.compile(r"(?<=[.,]) ?| (?!x\))")  # not in `(12 x)`


def table_text(
    columns: Sequence[Column], rows: Sequence[Any], target: Target, strong: Strong = None, names: int = 1
) -> str:
    """Return the rows as a table; in a narrow terminal as several tables, all with the first `names` columns.

    The first of these that is enough: headings take several lines; columns with `is_wide` are left out; there are
    several tables, of which the further ones lack rows without a text; columns of words become narrow; long names get
    separate lines.
    """
    first, rest = (
        [_Cells.of(column, rows) for column in shown_columns(part, rows) if target.verbose or not column.detail]
        for part in (columns[:names], columns[names:])
    )
    width = target.width or sys.maxsize

    def fits(group: Sequence[_Cells]) -> bool:
        least = _narrowed([*first, *group], 0, _GAPS[-1], breaks_words=False)
        return _line_width(least, _GAPS[-1]) <= width

    wide = sorted((cells for cells in rest if cells.column.is_wide), key=lambda cells: cells.column.is_wide)
    while wide and not target.verbose and not fits(rest):
        rest.remove(wide.pop())
    groups: list[list[_Cells]] = [[]]
    for cells in rest:
        if groups[-1] and not fits([*groups[-1], cells]):
            groups.append([])
        groups[-1].append(cells)
    is_strong = [bool(strong and strong(row)) for row in rows]
    is_tree = len(groups) == 1 or any(map(_stem, first[0].texts))
    tables = []
    for group in groups:
        full = [n for n in range(1, len(rows) + 1) if is_tree or any(cells.texts[n].strip("- ") for cells in group)]
        if full or group is groups[0]:
            tables.append(_drawn([*first, *group], [(0, True), *((n, is_strong[n - 1]) for n in full)], target))
    return stacked(*tables)


class _Cells(Record, kw_only=False):
    """A column's texts, its heading first, and its width in the terminal."""

    column: Column
    texts: Sequence[str]
    width: int

    @classmethod
    def of(cls, column: Column, rows: Sequence[Any]) -> _Cells:
        texts = [*map(visible, [column.title, *map(column.text, rows)])]
        return cls(column, texts, max(map(text_width, texts)))

    def least_width(self, *, breaks_words: bool) -> int:
        """Return the width of the longest text that is not broken: a word of the heading, a cell or a word of it."""
        heading, *cells = self.texts
        widths = [*map(text_width, cells)]
        if breaks_words and not self.column.right and max(widths, default=0) > _NARROWEST_TEXT:
            widths = [_NARROWEST_TEXT, *(text_width(part) for cell in cells for part in unbroken(cell))]
        return max([*map(text_width, unbroken(heading)), *widths, 0])

    def padded(self, text: str) -> str:
        blank = " " * (self.width - text_width(text))
        return blank + text if self.column.right else text + blank


def _line_width(columns: Sequence[_Cells], gap: str) -> int:
    return 1 + sum(cells.width for cells in columns) + len(gap) * (len(columns) - 1)


def _narrowed(columns: Sequence[_Cells], width: int, gap: str, *, breaks_words: bool) -> list[_Cells]:
    """Return the columns with headings, and if wanted cells of words, in as many lines as the width asks for."""
    excess, narrowed = max(_line_width(columns, gap) - width, 0), [*columns]
    least = {number: cells.least_width(breaks_words=breaks_words) for number, cells in enumerate(columns) if number}
    for number in sorted(least, key=lambda number: least[number] - columns[number].width):
        narrower = min(excess, columns[number].width - least[number])
        narrowed[number] = replace(columns[number], width=columns[number].width - narrower)
        excess -= narrower
    return narrowed


def _drawn(columns: Sequence[_Cells], rows: Sequence[tuple[int, bool]], target: Target) -> str:
    """Return the rows of these numbers, each in bold or not; row 0 is the heading."""
    drawn, gap = [*columns], _GAPS[0]
    if target.width:
        whole = [(gap, False) for gap in _GAPS if _line_width(columns, gap) <= target.width]
        for gap, breaks_words in (*whole, (_GAPS[0], False), (_GAPS[1], False), (_GAPS[1], True)):
            drawn = _narrowed(columns, target.width, gap, breaks_words=breaks_words)
            if (excess := _line_width(drawn, gap) - target.width) <= 0:
                break
        else:
            first, least = drawn[0], min(drawn[0].width, _NARROWEST_NAME)
            drawn[0] = replace(first, width=max(first.width - excess, least))
    lines: list[str] = []
    width, rule = _line_width(drawn, gap) - 1, "\u2500" if target.unicode else "-"
    for number, is_bold in rows:
        start, end = ("\x1b[1m", "\x1b[0m") if is_bold and target.color else ("", "")
        lines += [f"{start}{f' {part}'.rstrip()}{end}" for part in _lines(drawn, number, gap, target)]
        if not number:
            lines.append(f" {rule * width}")
    return "\n" + "\n".join(lines) + "\n\n"


def _lines(columns: Sequence[_Cells], number: int, gap: str, target: Target) -> list[str]:
    first, *rest = columns
    name, lines = first.texts[number], []
    if text_width(name) > first.width:
        lines, name = _broken(name, target.width - 1 if target.width else 0), _stem(name).rstrip()
    parts = [wrapped(cells.texts[number], Target(cells.width)).splitlines() for cells in rest]
    for texts in zip_longest([name], *parts, fillvalue=""):
        paint = verdict_cell if target.color and number else str
        pairs = zip(columns, texts, strict=True)
        lines.append(gap.join((paint if cells.column.is_verdict else str)(cells.padded(text)) for cells, text in pairs))
    return lines


def _stem(name: str) -> str:
    """Return the branches of the tree below those before a name."""
    branches = _BRANCHES.match(name)
    return branches[0].translate(_CONTINUED) if branches else ""


def _broken(line: str, width: int) -> list[str]:
    """Return the line in parts of at most this width, broken after dots, commas and spaces."""
    parts = [line]
    indent = f"{_stem(line)}  "
    while text_width(parts[-1]) > width:
        ends = (mark.end() for mark in _BREAKS.finditer(parts[-1], len(indent) + 1))
        end = max((end for end in ends if end <= width), default=0)
        if not end:
            break
        parts[-1:] = [parts[-1][:end].rstrip(), indent + parts[-1][end:]]
    return parts
