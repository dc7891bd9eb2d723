"""The view of each kind of report: what shows it as a table, CSV, Markdown and in its other forms."""

import sys
from dataclasses import replace
from importlib import import_module
from typing import Any

from bertscope.errors import SelectionError
from bertscope.render.console import Target, stdout_target
from bertscope.texts import ENGLISH, LANGUAGES, in_language
from bertscope.units import html_text, visible_lines

# The module in this folder, with `:name` for an object in it; of other kinds the module of that name.
VIEWS = {
    "calibrate": "tool:calibrate",  "doctor": "tool:doctor",
    "operators": "flops:operators", "presets": "tool:presets", "print": "tool:print_model", "report": "page.report",
    "schemas": "tool:schemas", "verify": "checkpoint:verify",
}  # fmt: skip
_MARKUP = ("html", "svg")  # with scripts and style sheets; the templates escape every value


def view_of(kind: str) -> Any:
    """Return the view of a kind of report: a function for each form, such as `table`, `csv` and `markdown`."""
    name, _, attribute = VIEWS.get(kind, kind).partition(":")
    module = import_module(f"{__package__}.{name}")
    return getattr(module, attribute) if attribute else module


def display(
    report: Any, form: str, *, language: str = ENGLISH, view: str = "", target: Target | None = None, **options: Any
) -> str:
    """Return a report in a form of its view: printed, notebook, table, csv, markdown, html ...

    `printed` is what `print` shows, and `notebook` HTML of full width. `view` is another view than that of the kind.
    Raises SelectionError for an unknown language.
    """
    if language not in LANGUAGES:
        raise SelectionError(f"language must be one of {', '.join(LANGUAGES)}; got {language!r}")
    shown = view_of(view or report.kind)
    with in_language(language):
        if form == "notebook":
            lines = "\n".join(map(html_text, visible_lines(_text(shown, report, Target())).split("\n")))
            return f'<pre style="white-space: pre; overflow-x: auto; line-height: 1.2">{lines}</pre>'
        if form == "printed":
            to = stdout_target()
            unicode = to.unicode or not getattr(sys.stdout, "encoding", None)  # a stream of text, such as StringIO
            return visible_lines(_text(shown, report, replace(to, color=False, unicode=unicode)))
        if form == "table":
            wanted = target or Target()
            return visible_lines(shown.table(report, wanted, **options), color=wanted.color)
        found = str(getattr(shown, form)(report, **options))
        return found if form in _MARKUP else visible_lines(found)


def _text(view: Any, report: Any, target: Target) -> str:
    return str(view.table(report, target) if hasattr(view, "table") else view.mermaid(report))
