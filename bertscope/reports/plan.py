"""The report of `plan`: which operators of which layers are kept for backward, and what each plan needs. Plain data."""

from __future__ import annotations

from dataclasses import field
from typing import Any, ClassVar

from bertscope.frozen import dataclass
from bertscope.gpus import Gpu
from bertscope.reports.base import Note, Subject, TableReport
from bertscope.settings.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class PlanOperator:
    """One call of an operator in each layer of a list, such as the sixth addmm, which output.dense makes.

    `name` is that of torch without `aten::`, and `scaled_dot_product_attention` for each of torch's fused kernels;
    `torch_name` is that of the very kernel. Bytes and FLOPs are those of one layer.
    """

    name: str
    number: int  # of the call in a layer's forward pass, from 0
    torch_name: str
    module: str  # its path in the layer
    kept_bytes: int  # of its output
    flops: int  # of matrix products
    again: bool  # it would run again in the recomputation, which ends when all saved tensors are there
    calls: int = 0  # of the operator in a layer's forward pass; 0: not known


@dataclass(frozen=True, kw_only=True)
class PlanList:
    """A list of layers: those that are recomputed, and the operators that they keep; the other layers are kept whole."""

    path: str
    layers: int
    recomputed: tuple[int, ...]
    kept: tuple[PlanOperator, ...]
    layer_paths: tuple[str, ...] = ()  # empty: those of numbered layers, such as encoder.layer.0


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A plan: its strategy of checkpointing, and the memory of its step.

    `flops_again` is what the recomputation of a step costs, and `share_again` its share of the layers' forward pass.
    `card_bytes` are the reserved bytes with the context, which nvidia-smi shows; on a CPU they are the peak.
    """

    checkpointing: str
    label: str
    batch: int
    accumulate: int
    peak_bytes: int
    reserved_bytes: int
    card_bytes: int
    flops_again: int
    share_again: float
    moved_bytes_again: int
    step_flops: int
    answer: str  # yes, no or uncertain
    changes: dict[str, Any] = field(default_factory=dict)  # of the run, beyond checkpointing and the batch
    lists: tuple[PlanList, ...] = ()


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanReport(TableReport[PlanRow]):
    """The plans for a limit, the cheapest that fits first; each was run on fake tensors.

    `cheaper` is the next cheaper plan, which does not fit; None if the first recomputes nothing. `front` are the
    plans that no other one beats in both FLOPs and bytes, by the sums of the operators.
    """

    kind: ClassVar[str] = "plan"

    subject: Subject
    run: RunConfig
    budget_bytes: int
    card: Gpu | None = None
    batch_total: int | None = None
    rows: tuple[PlanRow, ...]
    cheaper: PlanRow | None = None
    front: tuple[tuple[int, float], ...] = ()  # peak bytes and share again
    tried: int = 0  # plans that were run
    notes: tuple[Note, ...] = ()

    @property
    def fits(self) -> bool:
        """Return True if a plan fits for certain."""
        return bool(self.rows) and self.rows[0].answer == "yes"
