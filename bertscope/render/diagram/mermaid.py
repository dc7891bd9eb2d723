"""Diagrams as Mermaid text, within what Mermaid parses and draws."""

import re
from collections.abc import Iterable, Iterator

from bertscope.errors import SelectionError
from bertscope.render.diagram.texts import arrows, attributes, conditions, group_label, node_lines, title
from bertscope.reports.diagram import ClassBox, ClassReport, GraphReport
from bertscope.units import visible

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
    remedy = "draw a part of it with PATH or --class, less of it with --depth, or choose --format svg"
    if edges > MAX_EDGES:
        raise SelectionError(f"the diagram has {edges:,} arrows and Mermaid takes at most {MAX_EDGES}; {remedy}")
    if len(written) > MAX_CHARACTERS:
        size = f"{len(written):,} characters and Mermaid draws at most {MAX_CHARACTERS:,}"
        raise SelectionError(f"the diagram has {size}; {remedy}")
    return written


def source(report: ClassReport | GraphReport) -> str:
    """Return the text, at any length."""
    in_yaml = visible(title(report)).replace("\\", "\\\\").replace('"', '\\"')
    body = _classes(report) if isinstance(report, ClassReport) else _flowchart(report)
    return "\n".join(["---", f'title: "{in_yaml}"', "---", *body]) + "\n"


# ---- classDiagram ----


def _classes(report: ClassReport) -> Iterator[str]:
    yield "classDiagram"
    for box in report.drawn_classes:
        yield from _class(box, report.package)
    for box in report.drawn_classes:
        for base in box.bases:
            yield f"  {base} <|-- {box.name}"
    for link in report.links:
        arrow, count = ("*--", link.count) if link.is_part else ("-->", 1)
        middle = arrow if link.count == 1 else f'"1" {arrow} "{count}"'
        yield f"  {link.owner} {middle} {link.part} : {link.attribute}"
    for box in report.drawn_classes:
        if lines := _joined(conditions(box)):
            yield f'  note for {box.name} "{lines}"'


def _class(box: ClassBox, package: str) -> Iterator[str]:
    head = f'  class {box.name}["{_escaped(box.address.removeprefix(package))}"]'
    if not box.attributes:
        yield head
        return
    yield f"{head} {{"
    for attribute in attributes(box):
        # `ModuleList[BertLayer]` in Mermaid's own generics; braces would end the class
        member = re.sub(r"^([\w.]+)\[(\w+)\] ", r"\1~\2~ ", attribute)
        yield "    +" + member.replace("{", "#123;").replace("}", "#125;")
    yield "  }"


# ---- flowchart ----


def _flowchart(report: GraphReport) -> Iterator[str]:
    yield f"flowchart {report.direction}"
    yield from _group("", report, 1)
    for edge, lines in arrows(report):
        label = f'|"{_joined(lines)}"|' if lines else ""
        yield f"  {_id(edge.source)} -->{label} {_id(edge.target)}"


def _group(path: str, report: GraphReport, level: int) -> Iterator[str]:
    """Yield the nodes of one open module, then the modules open in it."""
    indent = "  " * level
    for node in report.nodes:
        if node.group == path:
            opening, closing = _SHAPES.get(node.role, ('["', '"]'))
            yield f"{indent}{_id(node.id)}{opening}{_joined(node_lines(node))}{closing}"
    for number, group in enumerate(report.groups):
        if group.parent == path:
            yield f'{indent}subgraph group_{number}["{_escaped(group_label(group))}"]'
            yield from _group(group.path, report, level + 1)
            yield f"{indent}end"


def _id(ident: str) -> str:
    return f"{ident}_" if ident in _RESERVED else ident


def _joined(lines: Iterable[str]) -> str:
    return "<br/>".join(map(_escaped, lines))


def _escaped(written: str) -> str:
    return visible(written).translate(_ESCAPES)
