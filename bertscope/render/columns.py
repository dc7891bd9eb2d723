"""One table of columns for each report; it serves the terminal, CSV and Markdown."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bertscope.render.console import Target, draw, natural_width

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Column:
    """A title, the text of a cell, and how soon a narrow terminal gives it up (0: never)."""

    title: str
    text: Callable[[Any], str]
    right: bool = False
    give_up: int = 0


def table_text(columns: Sequence[Column], rows: Sequence[Any], target: Target, strong: Callable[[Any], bool]) -> str:
    """The rows as a table; in a narrow terminal the least important columns go, and a line says which."""
    kept = list(columns)
    while target.width and natural_width(_table(kept, rows, target, strong)) > target.width:
        spare = max(kept, key=lambda column: column.give_up)
        if spare.give_up == 0:
            break
        kept.remove(spare)
    text = draw(_table(kept, rows, target, strong), target)
    left_out = [column.title for column in columns if column not in kept]
    if left_out:
        text += f"(too narrow for the columns {', '.join(left_out)}; widen the terminal, or pipe)\n"
    return text


def tables_text(
    columns: Sequence[Column], names: int, rows: Sequence[Any], target: Target, strong: Callable[[Any], bool]
) -> str:
    """As `table_text`; in a narrow terminal several tables with some columns each, all with the first `names`."""
    first, others = columns[:names], columns[names:]
    needed = [column for column in first if not column.give_up]

    def groups(size: int) -> list[Sequence[Column]]:
        """The other columns, so many at a time."""
        return [others[start : start + size] for start in range(0, len(others), size)]

    def is_too_wide(size: int) -> bool:
        """Whether a table of so many would not fit, were all that can be spared given up."""
        tables = (_table([*needed, *group], rows, target, strong) for group in groups(size))
        return target.width is not None and max(map(natural_width, tables)) > target.width

    size = next((size for size in range(len(others), 1, -1) if not is_too_wide(size)), 1)
    return "\n".join(table_text([*first, *group], rows, target, strong) for group in groups(size))


def _table(columns: Sequence[Column], rows: Sequence[Any], target: Target, strong: Callable[[Any], bool]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD if target.unicode else box.ASCII2, pad_edge=False, header_style="bold")
    for column in columns:
        # rich folds a long cell over lines; nothing is cut
        table.add_column(
            column.title, justify="right" if column.right else "left", overflow="fold", no_wrap=column.right
        )
    for row in rows:
        style = "bold" if strong(row) else ""
        table.add_row(*(Text(column.text(row)) for column in columns), style=style)
    return table


def markdown_text(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    """The rows as a GitHub table."""
    lines = [
        [column.title for column in columns],
        ["---:" if column.right else "---" for column in columns],
        *([_markdown_cell(column.text(row)) for column in columns] for row in rows),
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _markdown_cell(text: str) -> str:
    indent = len(text) - len(text.lstrip(" "))
    escaped = text.strip()
    for character in "\\|*_[]<":
        escaped = escaped.replace(character, "\\" + character)
    return "&nbsp;" * indent + escaped


def csv_text(titles: Sequence[str], records: Sequence[Sequence[Any]]) -> str:
    """Raw values, one record a line."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(titles)
    writer.writerows(records)
    return out.getvalue()
