"""The words in a diagram, the same in every format."""

from collections.abc import Iterator
from dataclasses import replace

from bertscope.render import footer
from bertscope.reports.diagram import ClassBox, ClassReport, DiagramEdge, DiagramGroup, DiagramNode, GraphReport
from bertscope.units import count_text, tensors_text


def title(report: ClassReport | GraphReport) -> str:
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


def node_lines(node: DiagramNode) -> list[str]:
    """Return the lines in a box: its name, its type or arguments, its shape or parameters."""
    name = f"{node.name} ({node.copies} x)" if node.copies > 1 else node.name
    if node.role in ("function", "scalar"):
        return [f"{name} {node.detail}".rstrip()]
    lines = [name, *([node.detail] if node.detail and node.detail != node.name else [])]
    if node.shape is not None:
        lines.append(tensors_text([node.shape]))
    if node.params is not None:
        lines.append(f"{count_text(node.params)} params" if node.params else "no params")
    return lines


def arrows(report: GraphReport, is_narrow: bool = False) -> Iterator[tuple[DiagramEdge, list[str]]]:
    """Yield each arrow with its lines: the views of the tensor, and its shape unless a box at an end shows it.

    The views are one line, or, for a narrow drawing, a line each.
    """
    shown = {node.id: node.shape for node in report.nodes}
    for edge in report.edges:
        is_shown = edge.shape in (shown[edge.source], shown[edge.target])
        shapes = [tensors_text([edge.shape])] if edge.shape and not is_shown else []
        views = edge.views if is_narrow or not edge.views else [", ".join(edge.views)]
        yield edge, [*views, *shapes]


def group_label(group: DiagramGroup) -> str:
    """Return `0-11 (12 x): BertLayer`."""
    copies = f" ({group.copies} x)" if group.copies > 1 else ""
    return f"{group.name}{copies}: {group.type}"


def attributes(box: ClassBox) -> Iterator[str]:
    """Yield `int vocab_size = 30522`, for every attribute."""
    for attribute in box.attributes:
        default = "" if attribute.default is None else f" = {attribute.default}"
        yield f"{attribute.type} {attribute.name}{default}"


def conditions(box: ClassBox) -> Iterator[str]:
    """Yield `crossattention: with add_cross_attention = true`, for attributes that this model does not have."""
    for attribute in box.attributes:
        if attribute.when:
            yield f"{attribute.name}: with {attribute.when}"
