"""The pages' HTML, CSS and JavaScript, which are files in `templates`; jinja2 escapes every value."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from bertscope.units import breakable_html, count_text, unbroken_html, unit_value, visible, visible_lines
from bertscope.views.columns import Column, shown_columns
from bertscope.views.console import declarations

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def environment() -> Environment:
    """Return the templates in this folder, with the filters that they use."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
    from markupsafe import escape

    templates = Environment(
        loader=PackageLoader("bertscope.views.page"),
        autoescape=select_autoescape(disabled_extensions=("txt",), default=True),  # of code and diagrams
        finalize=lambda value: visible(value) if type(value) is str else value,  # not Markup, which is a subclass
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    templates.filters |= {
        "shown": shown_columns,
        "lines": lambda text: escape(visible_lines(text)),
        "cell": _cell,
        "branched": _branched,
        "share": _share,
        "command": _command,
        "name": breakable_html,
        "unbroken": unbroken_html,
    }
    templates.globals["palette"] = declarations
    return templates


def _branched(text: str) -> tuple[int, str]:
    """Return the depth that the branches of a tree before a name draw, and the name."""
    name = text.lstrip(" │├└─")
    return (len(text) - len(name) + 2) // 3, name


def _cell(row: Any, column: Column) -> dict[str, Any]:
    """Return the text of a cell; a figure with a unit also has its value, to sort by, and the exact number if known."""
    text, value, exact = column.text(row), None, ""
    if column.right:
        value = unit_value(text)
        values = [read(row) for read in column.csv.values()]
        if value is not None and len(values) == 1 and type(values[0]) is int:
            value, exact = values[0], count_text(values[0])
    return {"text": text, "value": value, "exact": exact}


def _command(text: str) -> Any:
    """Return a command as HTML whose lines break only between words."""
    from markupsafe import Markup

    spans = (Markup("<span>{}</span>").format(visible(word)) for word in text.split(" "))
    return Markup("<code>{}</code>").format(Markup(" ").join(spans))


def _share(text: str) -> float | None:
    """Return the percentage in a cell, which a notebook draws as a bar; None for a difference or another figure."""
    with suppress(ValueError):
        share = float(text.removesuffix(" %"))
        return share if text.endswith(" %") and text[0] not in "+-" and share <= 100 else None
    return None


def filled(name: str, **values: Any) -> str:
    """Return the template of this name, filled with the values."""
    return environment().get_template(name).render(values)


def markup(text: str) -> Any:
    """Mark text as HTML that is not to be escaped: pictures."""
    from markupsafe import Markup

    return Markup(text)  # noqa: S704 - of Graphviz's making
