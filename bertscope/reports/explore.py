"""The report behind `explore`: one row for each module with all that is known of it. Plain data, as in `reports`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bertscope.reports.base import Shape, Subject, Tie, Totals, TreeRow
from bertscope.reports.flops import Work
from bertscope.reports.memory import KeptRow


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
    run: dict[str, Any]  # the RunSpec that work, shapes and memory are of, in its own names
    totals: Totals
    ties: tuple[Tie, ...]
    rows: tuple[ExploreRow, ...]
    awaited: tuple[str, ...] = ()  # what is still to be computed: "FLOPs and shapes", "memory"
