"""The reports of `report`, `diff` and of several models; they contain the other reports unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from bertscope.frozen import Record
from bertscope.reports.base import Report, Shape, Subject, TableReport, Totals
from bertscope.reports.diagram import GraphReport
from bertscope.reports.memory import FitReport, MemoryReport
from bertscope.reports.modules import CountReport, FlopsReport, TreeReport, TreeRow
from bertscope.reports.plan import PlanReport

_Compared: TypeAlias = CountReport | FlopsReport | MemoryReport | FitReport


class ModelPart(Record):
    """All reports of one model at one batch size and sequence length."""

    batch: int
    seq: int
    tensors: CountReport  # every parameter, layer by layer
    tree: TreeReport
    flops: FlopsReport  # inference, over several lengths
    training: FlopsReport
    memory: MemoryReport  # without and with checkpointing, estimated
    fit: FitReport | None  # the largest batches
    batch_fit: FitReport | None = None  # the answers for the batch of the page
    plan: PlanReport | None = None  # what to recompute, if that batch does not fit without recomputation
    forward: GraphReport | None  # None: the run of another model on meta failed
    layer: GraphReport | None
    idle: tuple[str, ...] = ()  # sizes, batch or seq, that change no input of own code

    @property
    def name(self) -> str:
        """Return the model's name."""
        return self.tree.subject.name

    @property
    def parts(self) -> tuple[TreeRow, ...]:
        """Return the modules."""
        return self.tree.rows


class PageReport(TableReport[ModelPart | TreeRow], kind="report", rows_in="models"):
    """One model, or two models and their differences; its rows are the models, and by path their modules."""

    models: tuple[ModelPart, ...]
    diff: DiffReport | None = None
    written: str = ""  # the date, as 2026-11-22

    def to_html(self) -> str:
        """Return the page as text."""
        return self.shown("html")

    @property
    def tables(self) -> Iterator[Report]:
        """Yield the reports that are tables."""
        for model in self.models:
            yield from (part for part in (model.tree, model.flops, model.memory, model.fit) if part)
        if self.diff:
            yield self.diff


class ComparisonReport(TableReport[_Compared], kind="comparison", rows_in="reports"):
    """The reports of several models or GPUs, in the order in which they were given."""

    of: str  # the kind of each report
    reports: tuple[_Compared, ...]


def combined(reports: Sequence[Any]) -> Any:
    """Return a single report as it is, also without a sequence, and several as a comparison."""
    several = (reports,) if isinstance(reports, Report) else tuple(reports)
    return several[0] if len(several) == 1 else ComparisonReport(of=several[0].kind, reports=several)


class FieldChange(Record):
    """One setting that differs between two models."""

    field: str
    a: Any
    b: Any


class DiffRow(Record):
    """One parameter that is `added`, `removed` or has a different shape, in all equal neighbouring layers."""

    path: str
    status: str
    copies: int
    shape_a: Shape
    shape_b: Shape
    params_a: int  # over all copies
    params_b: int


class DiffReport(TableReport[DiffRow], kind="diff"):
    """The differences of two models; empty for a model and itself."""

    a: Subject
    b: Subject
    fields: tuple[FieldChange, ...]
    rows: tuple[DiffRow, ...]
    totals_a: Totals
    totals_b: Totals
    batch: int
    seq: int
    inputs_given: bool = False  # by a Python program, without a length
    forward_flops_a: int | None  # None: the forward pass did not run
    forward_flops_b: int | None

    @property
    def is_empty(self) -> bool:
        """Return True if no setting with an effect on the model differs."""
        return not self.fields and not self.rows
