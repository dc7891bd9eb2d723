"""The columns of a report, which serve the terminal, CSV and Markdown."""

import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from operator import attrgetter
from typing import Any

from bertscope.frozen import dataclass
from bertscope.units import count_text, visible

_MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\|*_[]<"})
_FORMULA = re.compile(r"[=+@-](?![0-9.,]+$)")  # no module or tensor of PyTorch is called so


@dataclass(frozen=True)
class Column:
    """A column of a report: its cells in the terminal and in Markdown, and its raw values in CSV.

    The terminal shows a column with `detail` with -v only (of 1 also in a table with the quantities below each other).
    Where a line has no room for all columns, some move into
    lines below the first column: the highest `below` first, then the last one. CSV holds the values of all columns by
    name, shown or not; columns with a higher `csv_order` come later.
    """

    title: str
    text: Callable[[Any], str]
    csv: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    right: bool = False
    detail: int = 0
    below: int = 0
    csv_order: int = 0
    shown: bool = True


def values(*names: str, of: str = "") -> dict[str, Callable[[Any], Any]]:
    """Return CSV values that are attributes of a row, or of its attribute `of`: `a.b` is named `a_b`."""
    return {name.replace(".", "_"): attrgetter(f"{of}.{name}" if of else name) for name in names}


def number(title: str, name: str, text: Callable[[Any], str] = count_text, of: str = "", **options: Any) -> Column:
    """Return a column of numbers: an attribute of a row, or of its attribute `of`, as text and as a value in CSV."""
    read = attrgetter(f"{of}.{name}" if of else name)
    return Column(title, lambda row: text(read(row)), values(name, of=of), right=True, **options)


def optional(text: Callable[[Any], str], missing: str = "") -> Callable[[Any], str]:
    """Return the function that writes None as nothing, or as `missing`."""
    return lambda value: missing if value is None else text(value)


def csv_only(csv: Mapping[str, Callable[[Any], Any]]) -> Column:
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
    writer.writerows([_csv_cell(getter(row)) for getter in getters.values()] for row in rows)
    return out.getvalue()


def _csv_cell(value: Any) -> Any:
    """Return text with escapes as in a table, after an apostrophe where a spreadsheet would see a formula."""
    if not isinstance(value, str):
        return value
    return f"'{visible(value)}" if _FORMULA.match(value) else visible(value)
