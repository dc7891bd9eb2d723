"""The report behind the page: the other reports of one model, or of two, as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bertscope.reports.base import CountReport, DiffReport, TreeReport
from bertscope.reports.diagram import GraphReport
from bertscope.reports.fit import FitReport
from bertscope.reports.flops import FlopsReport
from bertscope.reports.memory import MemoryReport


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
