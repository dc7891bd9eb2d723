"""The report behind the page: the other reports of one model, or of two, as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bertscope.reports.base import CountReport, Shape, Subject, Tie, Totals, TreeReport, TreeRow
from bertscope.reports.diagram import GraphReport
from bertscope.reports.flops import FlopsReport, Work
from bertscope.reports.memory import FitReport, KeptRow, MemoryReport


@dataclass(frozen=True, kw_only=True)
class ModelPart:
    """Everything about one model at one batch and sequence."""

    batch: int
    seq: int
    tensors: CountReport  # every parameter, layer by layer
    tree: TreeReport
    flops: FlopsReport  # inference, over several lengths
    training: FlopsReport
    memory: MemoryReport  # without and with checkpointing, estimated
    fit: FitReport | None
    forward: GraphReport
    layer: GraphReport | None


@dataclass(frozen=True, kw_only=True)
class PageReport:
    """One model, or two and what tells them apart."""

    kind: ClassVar[str] = "report"
    models: tuple[ModelPart, ...]
    diff: DiffReport | None = None


@dataclass(frozen=True, kw_only=True)
class FieldChange:
    """One setting that two models do not share."""

    field: str
    a: Any
    b: Any


@dataclass(frozen=True, kw_only=True)
class DiffRow:
    """One parameter that came (`added`), went (`removed`) or changed its shape, over equal neighbours."""

    path: str
    status: str
    copies: int
    shape_a: Shape
    shape_b: Shape
    params_a: int  # over all copies
    params_b: int


@dataclass(frozen=True, kw_only=True)
class DiffReport:
    """What tells two models apart; empty for a model and itself."""

    kind: ClassVar[str] = "diff"
    a: Subject
    b: Subject
    fields: tuple[FieldChange, ...]
    rows: tuple[DiffRow, ...]
    totals_a: Totals
    totals_b: Totals
    batch: int
    seq: int
    forward_flops_a: int
    forward_flops_b: int

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs that shapes or switches the model."""
        return not self.fields and not self.rows


@dataclass(frozen=True, kw_only=True)
class HeldTensor:
    """One parameter or buffer that a module itself holds; of one copy where the module stands for several."""

    path: str
    shape: Shape
    numel: int
    is_parameter: bool
    trainable: bool
    tied_to: str | None


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What a training step costs at and below a module, over all copies."""

    forward: Work
    backward: Work
    recompute: Work

    @property
    def total(self) -> Work:
        """All of the step."""
        return self.forward + self.backward + self.recompute


@dataclass(frozen=True, kw_only=True)
class ExploreRow:
    """One module. `work` and `kept_bytes` are of all at and below it, `tensors` and `kept` of the module itself.

    `work` and `kept_bytes` are None until they are computed. Sizes are over all copies, shapes of one.
    """

    module: TreeRow
    tensors: tuple[HeldTensor, ...]
    work: StepWork | None = None
    kept_bytes: int | None = None
    kept: tuple[KeptRow, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ExploreReport:
    """The module tree with everything joined to it by path, parents first."""

    kind: ClassVar[str] = "explore"
    subject: Subject
    run: dict[str, Any]  # the RunConfig that work, shapes and memory are of, in its own names
    totals: Totals
    ties: tuple[Tie, ...]
    rows: tuple[ExploreRow, ...]
    awaited: tuple[str, ...] = ()  # what is still to be computed: "FLOPs and shapes", "memory"
