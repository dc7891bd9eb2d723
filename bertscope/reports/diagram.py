"""What `diagram` returns: boxes, arrows and classes as plain data; how they are drawn is elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bertscope.reports.base import Subject, TensorShape


@dataclass(frozen=True, kw_only=True)
class DiagramNode:
    """One box. `role` is input, output, tensor, parameter, scalar (these are values), module or function (work).

    `detail` is a module's type, or what a function is given besides tensors. `group` is the path of the opened
    module that it stands in, "" outside all.
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
        """Whether it is something that flows, and not something that is done."""
        return self.role not in ("module", "function")


@dataclass(frozen=True, kw_only=True)
class DiagramEdge:
    """One tensor on its way: `shape` as it arrives, after the `views` that reshaped it underway."""

    source: str
    target: str
    shape: TensorShape | None = None
    views: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DiagramGroup:
    """A module drawn open, with its parts inside."""

    path: str
    name: str
    type: str
    copies: int
    parent: str  # the path of the group around it, "" for none


@dataclass(frozen=True, kw_only=True)
class GraphReport:
    """A dataflow (`forward`) or a module tree (`tree`). No arrow leads to a box that is not there.

    In a dataflow equal layers are drawn once: `copies` says for how many, and the arrow from one to the next
    is left out.
    """

    kind: ClassVar[str] = "diagram"
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


@dataclass(frozen=True, kw_only=True)
class ClassAttribute:
    """One attribute; `when` names the setting that a model needs to have it, "" where this model has it."""

    name: str
    type: str
    default: str | None = None  # of a configuration's field, as Python writes it
    when: str = ""


@dataclass(frozen=True, kw_only=True)
class ClassBox:
    """One class; `address` is where it is imported from, `bases` are names of classes in the same report."""

    name: str
    address: str
    bases: tuple[str, ...]
    attributes: tuple[ClassAttribute, ...]


@dataclass(frozen=True, kw_only=True)
class ClassLink:
    """An instance of `owner` holds `count` of `part` under `attribute`; a configuration is held, and no part."""

    owner: str
    part: str
    attribute: str
    count: int
    is_part: bool


@dataclass(frozen=True, kw_only=True)
class ClassReport:
    """The classes of a model, what their instances hold, and who inherits from whom."""

    kind: ClassVar[str] = "diagram"
    diagram: str = "class"
    subject: Subject
    package: str
    package_version: str
    around: str | None  # the class drawn, with its bases and parts; None for all
    classes: tuple[ClassBox, ...]
    links: tuple[ClassLink, ...]
