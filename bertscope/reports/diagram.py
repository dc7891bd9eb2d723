"""The reports of `diagram`: boxes, arrows and classes as plain data; `views/diagram/` draws them."""

from collections.abc import Iterable
from dataclasses import replace

from bertscope.frozen import Record
from bertscope.reports.base import Report, Subject, TensorShape

NN_MODULE = "torch.nn.Module"  # the address of the base class of every module


class DiagramReport(Report):
    """A diagram; its text is Mermaid's."""

    def to_mermaid(self) -> str:
        """Return the diagram in Mermaid's language; raises SelectionError for one that Mermaid would refuse."""
        return self.shown("mermaid")

    def to_svg(self) -> str:
        """Return the drawn diagram; raises MissingExtraError without Graphviz."""
        return self.shown("svg")

    def to_markdown(self) -> str:
        """Return the diagram for a page that draws Mermaid, such as a README on GitHub."""
        return f"```mermaid\n{self.to_mermaid()}```\n"


class DiagramNode(Record):
    """One box. `role` is input, output, tensor, parameter, scalar (these are values), module or function (work).

    `detail` is the type of a module, or the arguments of a function other than tensors. `group` is the path of the
    opened module around the box, "" for none.
    """

    id: str
    role: str
    name: str
    detail: str = ""
    path: str = ""
    copies: int = 1
    shape: TensorShape | None = None  # of a value
    params: int | None = None  # of all copies, in a tree
    group: str = ""

    @property
    def is_value(self) -> bool:
        """Return True for a box that is a value, False for one that is a computation."""
        return self.role not in ("module", "function")


class DiagramEdge(Record):
    """One tensor between two boxes: `shape` at the second box, after the `views` that reshaped it."""

    source: str
    target: str
    shape: TensorShape | None = None
    views: tuple[str, ...] = ()


class DiagramGroup(Record):
    """A module drawn with its parts inside."""

    path: str
    name: str
    type: str
    copies: int
    parent: str  # path of the enclosing group, "" for none


class GraphReport(DiagramReport, kind="diagram"):
    """A dataflow (`forward`) or a module tree (`tree`). Both ends of every arrow are boxes of the report.

    A dataflow has equal layers once, with their number as `copies` and without the arrow from one to the next.
    """

    diagram: str
    subject: Subject
    path: str
    batch: int | None
    seq: int | None
    cache: int  # cached positions before the sequence
    direction: str  # "LR" or "TB"
    nodes: tuple[DiagramNode, ...]
    edges: tuple[DiagramEdge, ...]
    groups: tuple[DiagramGroup, ...] = ()


class ClassAttribute(Record):
    """One attribute; `when` is the setting that a model needs for it, "" if this model has the attribute."""

    name: str
    type: str
    default: str | None = None  # default of a configuration field, as Python writes it
    when: str = ""


class ClassBox(Record):
    """One class; `address` is its import path, `bases` are names of classes in the same report."""

    name: str
    address: str
    bases: tuple[str, ...]
    attributes: tuple[ClassAttribute, ...]


class ClassLink(Record):
    """The link from a class to `count` instances of `part` under `attribute`; a configuration is not a part."""

    owner: str
    part: str
    attribute: str
    count: int
    is_part: bool


class ClassReport(DiagramReport, kind="diagram"):
    """The classes of a model, the attributes of their instances, and their bases.

    `nn_module` tells the drawing to show torch.nn.Module and the arrow from it to each class, and `config` to show the
    configuration and the attributes that other settings create; `classes` and `links` always have them.
    """

    diagram: str = "class"
    subject: Subject
    package: str
    package_version: str
    around: str | None  # the class to draw with its bases and parts; None for all
    classes: tuple[ClassBox, ...]
    links: tuple[ClassLink, ...]
    nn_module: bool = False
    config: bool = False

    @property
    def _absent(self) -> set[tuple[str, str]]:
        """Return what other settings create and is not drawn; the classes of transformers have it, as in its docs."""
        if self.config or self.package != __package__.partition(".")[0]:
            return set()
        return {(box.name, item.name) for box in self.classes for item in box.attributes if item.when}

    @property
    def drawn_links(self) -> tuple[ClassLink, ...]:
        """Return the links to draw, without those to the configuration unless `config` is set."""
        links = (link for link in self.links if (link.owner, link.attribute) not in self._absent)
        return tuple(link for link in links if link.is_part or self.config or link.part == self.around)

    @property
    def drawn_classes(self) -> tuple[ClassBox, ...]:
        """Return the classes to draw, without torch.nn.Module and the configuration unless they are asked for.

        An instance of torch.nn.Module that is itself a part of the model is drawn.
        """
        used = {end for link in self.links for end in (link.owner, link.part)}
        root = next((box.name for box in self.classes if box.address == NN_MODULE and box.name not in used), None)
        configs = {link.part for link in self.links} - {link.part for link in self.drawn_links}
        of_configs = self._with_bases(configs)
        left_out = of_configs - self._with_bases({box.name for box in self.classes} - of_configs)
        left_out |= {root} if root is not None and not self.nn_module and len(self.classes) > 1 else set()
        absent, drawn = self._absent, [box for box in self.classes if box.name not in left_out]
        bases = [tuple(base for base in box.bases if base not in left_out) for box in drawn]
        attributes = [tuple(item for item in box.attributes if (box.name, item.name) not in absent) for box in drawn]
        rows = zip(drawn, bases, attributes, strict=True)
        return tuple(replace(box, bases=names, attributes=items) for box, names, items in rows)

    def _with_bases(self, names: Iterable[str]) -> set[str]:
        bases, reached, waiting = {box.name: box.bases for box in self.classes}, set[str](), [*names]
        while waiting:
            reached.add(name := waiting.pop())
            waiting += bases.get(name, ())
        return reached
