"""The calibration of a card, as `profile --save` writes it. Plain data."""

from __future__ import annotations

from dataclasses import field, replace
from typing import ClassVar

from bertscope.frozen import dataclass
from bertscope.reports.base import TableReport

COPY = "copy"  # the name of a rate besides the precisions


@dataclass(frozen=True, kw_only=True)
class CardWork:
    """The work of one step: FLOPs of matrix products by precision, bytes that the other operators move, and calls."""

    matmul_flops: dict[str, int] = field(default_factory=dict)
    moved_bytes: int = 0
    calls: int = 0


@dataclass(frozen=True, kw_only=True)
class CalibrationStep:
    """A measured step; `precision` is that of its matrix products.

    `context_bytes` is the memory of the device outside torch's allocator. Estimates and `work` are None for a step
    whose operators depend on the values of tensors.
    """

    model: str
    batch: int
    seq: int
    mode: str
    precision: str
    checkpointing: str
    context_bytes: int
    estimated_allocated_bytes: int | None
    allocated_bytes: int
    estimated_reserved_bytes: int | None
    reserved_bytes: int
    work: CardWork | None
    step_seconds: tuple[float, ...]

    @property
    def name(self) -> str:
        """Return the settings of the step, which a later measurement replaces."""
        return f"{self.model} {self.batch}x{self.seq} {self.mode} {self.precision} {self.checkpointing}"

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


def _error(estimated: int | None, measured: int) -> float | None:
    return estimated / measured - 1 if estimated is not None and measured else None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The card and the versions of a calibration, and the date of its last measurement."""

    card: str  # as torch names it
    memory_bytes: int
    driver: str
    torch_version: str
    bertscope_version: str
    date: str


@dataclass(frozen=True, kw_only=True, repr=False)
class CalibrationReport(TableReport[CalibrationStep]):
    """The calibration of one card: rates, and steps measured next to their estimates.

    `rates` are the FLOP/s of a large matrix product by precision, and the bytes per second of a large copy.
    """

    kind: ClassVar[str] = "calibration"
    rows_in = "steps"
    machine: Machine
    rates: dict[str, float]
    steps: tuple[CalibrationStep, ...]

    @property
    def context_bytes(self) -> tuple[int, int] | None:
        """Return the least and the most memory outside the allocator in a step; None without a step."""
        sizes = [step.context_bytes for step in self.steps]
        return (min(sizes), max(sizes)) if sizes else None

    def after(self, earlier: CalibrationReport | None) -> CalibrationReport:
        """Return this calibration with what an earlier one measured of the same card with the same versions."""
        if earlier is None or replace(earlier.machine, date="") != replace(self.machine, date=""):
            return self
        steps = {step.name: step for step in (*earlier.steps, *self.steps)}
        return replace(self, rates={**earlier.rates, **self.rates}, steps=tuple(steps.values()))
