"""The reports on memory: where the peak of a step stands and what it is made of. Plain data in bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bertscope.reports.base import Subject


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What memory is used for at one moment; the parts add up to all of it.

    activations: kept by the forward pass, or by a recomputation, for backward. temporaries: the rest of
    what comes and goes within the step.
    """

    parameters: int = 0
    buffers: int = 0
    optimizer_state: int = 0
    inputs: int = 0
    gradients: int = 0
    activations: int = 0
    temporaries: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return sum(vars(self).values())


@dataclass(frozen=True, kw_only=True)
class PhasePeak:
    """The highest point of a phase, and the operator and module that it stands in."""

    phase: str
    peak_bytes: int
    path: str
    operator: str
    parts: Parts


@dataclass(frozen=True, kw_only=True)
class KeptRow:
    """What the forward pass of one kind of module keeps for backward: one kind of tensor, over all its copies."""

    path: str  # equal layers together: bert.encoder.layer.0-11.attention.self
    operator: str
    what: str
    shape: tuple[int, ...]
    dtype: str
    tensors: int
    kept_bytes: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The parts at one point of the step."""

    phase: str
    parts: Parts


@dataclass(frozen=True, kw_only=True)
class DeviceTerms:
    """What a CUDA device holds beside the tensors, each an estimate of its own, or measured."""

    allocated_bytes: int  # tensors in blocks of 512 bytes, and workspaces
    workspace_bytes: int
    reserved_bytes: int
    context_low_bytes: int
    context_high_bytes: int


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of one step, estimated or measured."""

    obtained: str
    phases: tuple[PhasePeak, ...]
    kept: tuple[KeptRow, ...]
    kept_bytes: int
    timeline: tuple[Sample, ...] = ()
    device: DeviceTerms | None = None
    traced_layers: int | None = None  # how many layers ran, where they stand for more

    @property
    def peak(self) -> PhasePeak:
        """The highest point of the step."""
        return max(self.phases, key=lambda phase: phase.peak_bytes)


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How long bare steps took, run apart from the traced one."""

    warmup_seconds: float
    step_seconds: tuple[float, ...]
    median_seconds: float
    tokens_per_second: float | None = None
    flops: int | None = None  # matrix products of the step, a multiply-add as 2
    flops_per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    """What the operating system saw of the whole process, library code and all."""

    resident_before_bytes: int  # before the step, model and optimizer in it
    high_water_bytes: int  # the highest during one step
    peak_bytes: int  # the highest of the process's life


@dataclass(frozen=True, kw_only=True)
class BreakEvenPoint:
    """The estimated peaks of the first variant and of this one at another batch."""

    batch: int
    first_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class BreakEven:
    """Where a variant that buys nothing here begins to: the least such batch, and peaks beyond it."""

    pays_from_batch: int
    points: tuple[BreakEvenPoint, ...]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run the step: estimated, measured, or both."""

    checkpointing: str
    reentrant: bool
    estimated: Memory | None = None
    measured: Memory | None = None
    timing: Timing | None = None
    process: ProcessMemory | None = None
    outlook: BreakEven | None = None  # beside the first variant, where this one's peak is no lower
    failure: str = ""  # why there is no measurement

    @property
    def memory(self) -> Memory | None:
        """The measurement where there is one, else the estimate."""
        return self.measured or self.estimated

    @property
    def error(self) -> float | None:
        """How far the estimate is off the measured peak, as a share of it; the worst of the phases."""
        if self.estimated is None or self.measured is None:
            return None
        pairs = zip(self.estimated.phases, self.measured.phases, strict=True)
        errors = [(one.peak_bytes - other.peak_bytes) / other.peak_bytes for one, other in pairs if other.peak_bytes]
        return max(errors, key=abs, default=0.0)


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """What `estimate` and `profile` say: the same step in one or several ways."""

    kind: ClassVar[str] = "memory"
    subject: Subject
    run: dict[str, Any]  # the RunConfig, in its own names
    machine: str  # what it was measured on, or whose semantics were estimated
    variants: tuple[Variant, ...]


@dataclass(frozen=True, kw_only=True)
class Gpu:
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
    card: Gpu | None
    asked_batch: int | None
    rows: tuple[FitRow, ...]

    @property
    def fits(self) -> bool:
        """Whether anything does."""
        return any(row.fits for row in self.rows)
