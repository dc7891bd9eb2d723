"""The pages' HTML, CSS and JavaScript, which are files in `templates`; jinja2 escapes every value."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from bertscope.render.table import shown
from bertscope.units import unit_value, visible, visible_lines

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def environment() -> Environment:
    """Return the templates in this folder, with the filters that they use."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("bertscope.render.page"),
        autoescape=True,
        finalize=lambda value: visible(value) if type(value) is str else value,  # not Markup, which is a subclass
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    made.filters |= {"unit_value": unit_value, "shown": shown, "lines": _lines}
    return made


def _lines(text: str) -> Any:
    """Escape text of several lines."""
    from markupsafe import escape

    return escape(visible_lines(text))


def filled(name: str, **values: Any) -> str:
    """Return the template of this name, filled with the values."""
    return environment().get_template(name).render(values)


def page(name: str, **values: Any) -> str:
    """Return the page of this name with plotly's script in it; needs plotly."""
    from plotly.offline import get_plotlyjs

    return filled(name, plotly=markup(get_plotlyjs()), **values)


def markup(text: str) -> Any:
    """Mark text as HTML that is not to be escaped: scripts and pictures."""
    from markupsafe import Markup

    return Markup(text)  # noqa: S704 - of plotly's and of Graphviz's making
