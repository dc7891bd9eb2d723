"""The report on what fits: the largest batch for each way to run a step, or the ways that a batch leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bertscope.reports.base import Subject


@dataclass(frozen=True, kw_only=True)
class Card:
    """A device by name, and what CUDA offers of its memory."""

    name: str
    memory_bytes: int
    source: str


@dataclass(frozen=True, kw_only=True)
class FitRow:
    """One way to run at one length: peak(batch) <= budget < peak(batch + 1), both really evaluated.

    batch is 0 where not even one fits, and peak_bytes then that of one; `next_bytes` is the peak of batch + 1.
    Peaks hold everything that the budget must: tensors, and on CUDA workspaces and context.
    """

    seq: int
    checkpointing: str
    precision: str
    batch: int
    peak_bytes: int
    next_bytes: int
    fits: bool
    is_tight: bool  # the allocator's own fragments might not leave room
    step_flops: int
    extra_flops: float  # beside the same step without checkpointing, as a share of it


@dataclass(frozen=True, kw_only=True)
class FitReport:
    """What fits in `budget_bytes`; `asked_batch` is set where a batch was given and the ways are the answer."""

    kind: ClassVar[str] = "fit"
    subject: Subject
    run: dict[str, Any]
    budget_bytes: int
    overhead_bytes: int  # of CUDA's context and workspaces, in every peak
    card: Card | None
    asked_batch: int | None
    rows: tuple[FitRow, ...]

    @property
    def fits(self) -> bool:
        """Whether anything does."""
        return any(row.fits for row in self.rows)
