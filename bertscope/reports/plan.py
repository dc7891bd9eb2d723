"""The report of `plan`: what each layer saves for backward, and what each plan needs. Plain data."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from bertscope.errors import SelectionError
from bertscope.frozen import Record
from bertscope.reports.memory import StepReport
from bertscope.reports.step import CostRow
from bertscope.settings.checkpointing import Checkpointing
from bertscope.settings.rows import rows
from bertscope.settings.run_config import RunConfig
from bertscope.settings.training import KEEPING_RESULTS

TIME, FLOPS = "time", "recompute FLOPs"  # the order of plans: on a calibrated GPU, and else


class PlanOperator(Record):
    """One call of an operator in each layer of a list, such as the sixth addmm, which output.dense makes.

    `name` is torch's without `aten::`, and `scaled_dot_product_attention` for each of torch's fused kernels;
    `torch_name` names the kernel itself. Bytes and FLOPs are counted in one layer.
    """

    name: str
    number: int  # of the call in a layer's forward pass, from 0
    torch_name: str
    module: str  # its path in the layer
    output_bytes: int
    flops: int  # of matrix products
    recomputed: bool  # it would run in the recomputation, which ends when all saved tensors are there
    calls: int = 0  # of the operator in a layer's forward pass; 0: not known


class PlanList(Record):
    """The layers of a list that are recomputed, and the operators that they save; other layers are not checkpointed."""

    path: str
    layers: int
    recomputed: tuple[int, ...]
    saved: tuple[PlanOperator, ...]
    recomputed_operators: tuple[PlanOperator, ...] = ()
    layer_paths: tuple[str, ...] = ()  # empty: numbered layers, such as encoder.layer.0


class PlanPoint(CostRow):
    """A plan that was run: what it needs, and the share of the layers' forward pass that it recomputes."""

    checkpointing: str
    recompute_share: float


class PlanRow(PlanPoint):
    """A plan of the table: its strategy of checkpointing, the cost of its step, and what else it changes."""

    batch: int
    accumulate: int
    recompute_moved_bytes: int
    changes: dict[str, Any] = field(default_factory=dict)  # of the run, beyond checkpointing and the batch
    lists: tuple[PlanList, ...] = ()

    @property
    def keeps_result(self) -> bool:
        """Return True if the changes save memory only: the model learns the same."""
        return self.changes.keys() <= KEEPING_RESULTS


class PlanReport(StepReport[PlanRow], kind="plan"):
    """The plans for a limit, the cheapest that fits first; each was run on fake tensors.

    After the answer come plans that need less memory, then plans of runs with other settings; by `objective` time all
    are in its order. `cheaper` is the next cheaper plan, which does not fit; None if the first recomputes nothing.
    """

    budget_bytes: int
    batch_total: int | None = None
    objective: str = FLOPS
    rows: tuple[PlanRow, ...]
    cheaper: PlanRow | None = None
    front: tuple[PlanPoint, ...] = ()  # all plans of the answer's run that were tried, the leanest first
    layers_flops: int  # of the forward pass of all layers, for one micro-batch
    tried: int = 0  # plans that were run
    largest_batch: int = 0  # that fits with the leanest plan, if none fits for the asked one
    may_change: tuple[str, ...] = ()  # what else was allowed to change
    units: str = ""  # of FSDP
    answer: str = field(default="", init=False)  # of the first plan: yes, uncertain or no

    def __post_init__(self) -> None:
        object.__setattr__(self, "answer", self.rows[0].answer if self.rows else "")

    @property
    def first(self) -> PlanRow:
        """Return the answer, or the leanest plan if none fits; raise SelectionError for a report without plans."""
        if not self.rows:
            raise SelectionError("a report of plans has at least one, the leanest if none fits")
        return self.rows[0]

    @property
    def fits(self) -> bool:
        """Return True if a plan fits for certain."""
        return self.answer == "yes"

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of the run of the first plan that are not the defaults, without checkpointing."""
        row, table = self.rows[0], rows(RunConfig)
        values = {name: value for name, value in self.run.flat().items() if value != table[name].default}
        values |= {name: value for name, value in row.changes.items() if name in table}
        return values | {"batch": row.batch, "accumulate": row.accumulate}

    def apply(self, model: Any, row: int = 0) -> None:
        """Make a live module recompute its layers as a row says, as the code of `--emit torch` does."""
        from bertscope.model.modules import recompute_layers

        if (chosen := Checkpointing.parse(self.rows[row].checkpointing)) is not None:
            recompute_layers(model, chosen)

    def emitted(self, form: str) -> str:
        """Return the answer as code to paste, for torch, trainer or lightning, or as json."""
        return self.shown("emitted", view="plan_code", into=form)
