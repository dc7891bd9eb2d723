"""The report of `calibrate`: the points that are measured on a card, and the result of each. Plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field, replace
from typing import ClassVar

from bertscope.frozen import dataclass
from bertscope.reports.base import FAILED, TableReport

PLANNED, MEASURED, SKIPPED = "planned", "measured", "skipped"
CONTEXT, WORKSPACES, RATES, STEP, LIMIT = "context", "workspaces", "rates", "step", "limit"
COPY = "copy"  # the name of a rate besides the precisions


@dataclass(frozen=True, kw_only=True)
class CalibrationPoint:
    """One measurement: of the context, the workspaces, the rates, a step of a model, or a step at a memory limit.

    `precision` is that of matrix products: fp32, tf32, or a 16-bit type under autocast. `kernel` is that of fused
    attention, empty for torch's choice. A point of a limit runs the largest batch of `fit` and `more` sequences more.
    """

    kind: str
    model: str = ""
    attention: str = ""
    kernel: str = ""
    precision: str = ""
    checkpointing: str = ""
    optimizer: str = ""
    implementation: str = ""
    mode: str = ""
    batch: int = 0
    seq: int = 0
    expandable: bool = False
    limit_bytes: int = 0
    more: int = 0

    @property
    def name(self) -> str:
        """Return all settings as one text, by which a measurement is found again."""
        sizes = f"{self.batch or 'fit'}x{self.seq}" if self.seq else ""
        words = (
            self.kind, self.model, sizes, self.attention, self.kernel, self.precision, self.checkpointing, self.mode,
            self.optimizer, self.implementation, "expandable" if self.expandable else "",
            f"limit {self.limit_bytes}" if self.limit_bytes else "", f"+{self.more}" if self.more else "",
        )  # fmt: skip
        return " ".join(word for word in words if word)


@dataclass(frozen=True, kw_only=True)
class CardWork:
    """The work of one step: FLOPs of matrix products by precision, bytes that the other operators move, and calls."""

    matmul_flops: dict[str, int] = field(default_factory=dict)
    moved_bytes: int = 0
    calls: int = 0


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The predicted time of a step on a calibrated card, and the rates that follow.

    `flops` are those of the matrix products without recomputation. `mfu`, the model FLOPs utilization, is their rate by
    the dense peak of the card, None without a published one.
    """

    seconds: float
    tokens_per_second: float
    flops: int
    flops_per_second: float
    mfu: float | None
    peak_flops: float | None
    peak_source: str


@dataclass(frozen=True, kw_only=True)
class TimeRange:
    """The range of a time; both ends are equal for one that a calibration predicts."""

    low_seconds: float
    high_seconds: float


@dataclass(frozen=True, kw_only=True)
class CalibrationRow:
    """A point and its result; None for what the kind of point does not have.

    `context_bytes` is the memory of the device that the process takes outside torch's allocator. `smi_bytes` is what
    nvidia-smi shows for the process, None if it does not know it. `rates` are FLOP/s of large matrix products by
    precision, and bytes per second of a large copy. `ran` of a limit is True if the step had enough memory.
    """

    point: CalibrationPoint
    outcome: str = PLANNED
    reason: str = ""
    estimated_allocated_bytes: int | None = None
    allocated_bytes: int | None = None
    estimated_reserved_bytes: int | None = None
    reserved_bytes: int | None = None
    context_bytes: int | None = None
    smi_bytes: int | None = None
    workspace_forward_bytes: int | None = None
    workspace_backward_bytes: int | None = None
    workspaces: dict[str, int] = field(default_factory=dict)  # by library and thread
    rates: dict[str, float] = field(default_factory=dict)
    work: CardWork | None = None
    step_seconds: tuple[float, ...] = ()
    batch: int | None = None
    ran: bool | None = None

    @property
    def name(self) -> str:
        """Return the name of the point."""
        return self.point.name

    @property
    def allocated_error(self) -> float | None:
        """Return the error of the estimate as a fraction of the allocated bytes."""
        return _error(self.estimated_allocated_bytes, self.allocated_bytes)

    @property
    def reserved_error(self) -> float | None:
        """Return the error of the estimate as a fraction of the reserved bytes."""
        return _error(self.estimated_reserved_bytes, self.reserved_bytes)

    @property
    def median_seconds(self) -> float | None:
        """Return the median time of a step."""
        from statistics import median  # with decimal and fractions, which only a calibration needs

        return median(self.step_seconds) if self.step_seconds else None

    @property
    def is_right(self) -> bool | None:
        """Return True if the answer of `fit` is right: the largest batch runs, and one more does not."""
        return None if self.ran is None else self.ran == (self.point.more == 0)


def _error(estimated: int | None, measured: int | None) -> float | None:
    return estimated / measured - 1 if estimated is not None and measured else None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The card and the versions of a calibration, and the date of its beginning."""

    card: str  # as torch names it
    memory_bytes: int
    capability: tuple[int, int]
    driver: str
    torch_version: str
    cuda_version: str
    python_version: str
    bertscope_version: str
    date: str

    def is_like(self, other: Machine) -> bool:
        """Return True if measurements on one apply to the other: all but the date is equal."""
        return replace(self, date="") == replace(other, date="")


@dataclass(frozen=True, kw_only=True, repr=False)
class CalibrationReport(TableReport[CalibrationRow]):
    """The measurements of `calibrate` on one card; without a machine the plan."""

    kind: ClassVar[str] = "calibrate"
    machine: Machine | None
    rows: tuple[CalibrationRow, ...]

    @property
    def is_complete(self) -> bool:
        """Return True if no point is left to measure."""
        return self.machine is not None and all(row.outcome != PLANNED for row in self.rows)

    def measured(self, *kinds: str) -> list[CalibrationRow]:
        """Return the rows of these kinds that were measured."""
        return [row for row in self.rows if row.outcome == MEASURED and row.point.kind in kinds]

    @property
    def failed(self) -> list[CalibrationRow]:
        """Return the rows that could not be measured."""
        return [row for row in self.rows if row.outcome == FAILED]

    @property
    def context_bytes(self) -> tuple[int, int] | None:
        """Return the least and the most memory outside the allocator in a step; None if no step was measured."""
        return _range(row.context_bytes for row in self.measured(STEP)) or _range(
            row.context_bytes for row in self.measured(CONTEXT)
        )

    @property
    def workspace_bytes(self) -> tuple[int, int] | None:
        """Return the most bytes of workspaces of the thread of forward, and of that of backward."""
        forward = _range(row.workspace_forward_bytes for row in self.measured(WORKSPACES))
        backward = _range(row.workspace_backward_bytes for row in self.measured(WORKSPACES))
        return (forward[1], backward[1]) if forward and backward else None

    @property
    def rates(self) -> dict[str, float]:
        """Return the measured rates by name."""
        return {name: rate for row in self.measured(RATES) for name, rate in row.rates.items()}

    def with_row(self, row: CalibrationRow) -> CalibrationReport:
        """Return the report with the result of one point."""
        return replace(self, rows=tuple(row if old.point == row.point else old for old in self.rows))


def _range(sizes: Iterable[int | None]) -> tuple[int, int] | None:
    known = [size for size in sizes if size is not None]
    return (min(known), max(known)) if known else None
