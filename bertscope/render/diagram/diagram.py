"""The diagram reports in the formats that `diagram` speaks."""

from __future__ import annotations

from bertscope.render.diagram import dot as diagram_dot
from bertscope.render.diagram import mermaid as diagram_mermaid
from bertscope.render.diagram.dot import drawn
from bertscope.render.diagram.texts import title
from bertscope.reports.diagram import ClassReport, GraphReport
from bertscope.units import html_text

Report = ClassReport | GraphReport

# Colours for light and dark pages; `style` comes after Graphviz's own attributes, so it decides.
_STYLE = """
  .graph { --ink: #1f2328; --line: #57606a; --paper: #ffffff; --value: #e8f1fb; --work: #fff4dc; --box: #f3f4f6; }
  @media (prefers-color-scheme: dark) {
    .graph { --ink: #e6edf3; --line: #9aa4af; --paper: #0d1117; --value: #10304f; --work: #453410; --box: #21262d; }
  }
  .graph text { fill: var(--ink); }
  .graph .node path, .graph .node polygon, .graph .node polyline, .graph .node ellipse,
  .graph .edge path, .graph .cluster path, .graph .cluster polygon { stroke: var(--line); }
  .graph .edge polygon { stroke: var(--line); fill: var(--line); }
  .graph .edge.inherits polygon { fill: var(--paper); }
  .graph .value path, .graph .value polygon { fill: var(--value); }
  .graph .function path, .graph .function polygon { fill: var(--work); }
  .graph .module path, .graph .module polygon, .graph .class polygon { fill: var(--box); }
"""
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}  :root {{ color-scheme: light dark; }}
  body {{ font: 16px/1.5 system-ui, sans-serif; margin: 1.5rem; }}
  h1 {{ font-size: 1.1rem; font-weight: 600; }}
  figure {{ margin: 1rem 0; overflow: auto; }}
  pre {{ overflow: auto; font-size: .85rem; }}
</style>
</head>
<body>
<h1>{title}</h1>
<figure>
{svg}</figure>
<details><summary>Mermaid</summary>
<pre>{source}</pre>
</details>
</body>
</html>
"""


def mermaid(report: Report) -> str:
    """For a README, a wiki, a pull request."""
    return diagram_mermaid.text(report)


def dot(report: Report) -> str:
    """For Graphviz."""
    return diagram_dot.text(report)


def svg(report: Report) -> str:
    """A picture by Graphviz; its colours follow the reader's light or dark mode."""
    return _styled(drawn(diagram_dot.text(report)), _STYLE)


def html(report: Report) -> str:
    """One page with the picture and its Mermaid text; it asks nothing of the network."""
    picture = drawn(diagram_dot.text(report))
    picture = picture[picture.index("<svg") :]  # a page has its own declaration
    source = diagram_mermaid.source(report)
    return _PAGE.format(title=html_text(title(report)), style=_STYLE, svg=picture, source=html_text(source))


def inline_svg(report: Report) -> str:
    """The picture as part of a page, with its own style sheet."""
    picture = svg(report)
    return picture[picture.index("<svg") :]


def _styled(picture: str, style: str) -> str:
    """The picture with a style sheet as its first child."""
    end = picture.index(">", picture.index("<svg")) + 1
    return f"{picture[:end]}\n<style>{style}</style>{picture[end:]}"
