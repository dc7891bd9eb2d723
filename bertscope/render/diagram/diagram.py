"""The diagram reports in the formats that `diagram` speaks."""

from __future__ import annotations

from bertscope.render.diagram import dot as diagram_dot
from bertscope.render.diagram import mermaid as diagram_mermaid
from bertscope.render.diagram.dot import drawn
from bertscope.render.diagram.texts import title
from bertscope.render.page.templating import filled, markup
from bertscope.reports.diagram import ClassReport, GraphReport

Report = ClassReport | GraphReport


def mermaid(report: Report) -> str:
    """Return the diagram for a README, a wiki, a pull request."""
    return diagram_mermaid.text(report)


def dot(report: Report) -> str:
    """Return the diagram for Graphviz."""
    return diagram_dot.text(report)


def svg(report: Report) -> str:
    """Return a picture by Graphviz; its colours follow the reader's light or dark mode."""
    picture = drawn(diagram_dot.text(report))
    end = picture.index(">", picture.index("<svg")) + 1
    return f"{picture[:end]}\n<style>\n{filled('diagram.css')}\n</style>{picture[end:]}"


def html(report: Report) -> str:
    """Return one page with the picture and its Mermaid text; it asks nothing of the network."""
    picture = drawn(diagram_dot.text(report))
    source = diagram_mermaid.source(report)
    return filled("diagram.html", title=title(report), svg=markup(_inline(picture)), source=source)


def inline_svg(report: Report) -> str:
    """Return the picture as part of a page, with its own style sheet."""
    return _inline(svg(report))


def _inline(picture: str) -> str:
    """Return the picture without its XML declaration, for a page has its own."""
    return picture[picture.index("<svg") :]
