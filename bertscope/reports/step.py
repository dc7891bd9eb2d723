"""One step's cost: memory and its place, the limit and the verdict, FLOPs and time. Plain data in base units.

Every row of a report that is about a step has one StepCost. No other record has a field of that name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from math import ceil, inf

from bertscope.frozen import Record

YES, UNCERTAIN, NO = "yes", "uncertain", "no"  # the verdicts, best first


class Parts(Record):
    """The memory at one moment by use; the parts add up to the total.

    activations: saved for backward by the forward pass or by a recomputation. gathered_parameters: FSDP's
    collection for a layer, from all ranks. communication: buffers that collectives read and write. temporaries: all
    other memory that is allocated and freed within the step.
    """

    parameters: int = 0
    buffers: int = 0
    optimizer_state: int = 0
    inputs: int = 0
    gradients: int = 0
    activations: int = 0
    temporaries: int = 0
    gathered_parameters: int = 0
    communication: int = 0

    @property
    def total(self) -> int:
        """Return the sum of the parts."""
        return sum(vars(self).values())


class PhasePeak(Record):
    """A phase's peak by part, and the operator and module that run at that moment.

    The path of equal layers is a range; it is empty for the model's own code.
    """

    phase: str
    peak_bytes: int
    path: str
    operator: str
    parts: Parts

    def __post_init__(self) -> None:
        if self.parts.total != self.peak_bytes:
            raise ValueError(f"the parts add up to {self.parts.total:,} bytes, the peak is {self.peak_bytes:,}")


class ByteRange(Record):
    """The range of a number of bytes; both ends are equal where it is exact."""

    low_bytes: int = 0
    high_bytes: int = 0


# Bytes per second of copies from pinned memory, as nvbandwidth measures them: PCIe 3.0 (T4) and 5.0 (H100), 16 lanes.
_SLOWEST_COPY, _FASTEST_COPY = 12e9, 55e9


class TimeRange(Record):
    """A time's range; both ends are equal for one that a calibration predicts."""

    low_seconds: float
    high_seconds: float

    def plus(self, other: TimeRange) -> TimeRange:
        """Return the time of one after the other."""
        low, high = self.low_seconds + other.low_seconds, self.high_seconds + other.high_seconds
        return TimeRange(low_seconds=low, high_seconds=high)

    def times(self, count: float) -> TimeRange:
        """Return the time of that many steps."""
        return TimeRange(low_seconds=count * self.low_seconds, high_seconds=count * self.high_seconds)

    @classmethod
    def of_copies(cls, copied_bytes: int) -> TimeRange:
        """Return the time in which that many bytes are copied between GPU and host."""
        return cls(low_seconds=copied_bytes / _FASTEST_COPY, high_seconds=copied_bytes / _SLOWEST_COPY)


class StepTime(Record):
    """The time of a step and of an epoch; with a calibration of the GPU also the rates that follow.

    `flops` count the matrix products without recomputation. `mfu`, the model FLOPs utilization, is their rate by
    the dense peak of the GPU, None without a published one.
    """

    step: TimeRange
    epoch: TimeRange | None = None  # of --sequences, or of the lengths
    hour_price: float | None = None  # of the GPU, from the user
    currency: str = ""
    epoch_cost_low: float | None = None
    epoch_cost_high: float | None = None
    tokens_per_second: float | None = None  # None by a data sheet, as all that follows
    flops: int | None = None
    flops_per_second: float | None = None
    mfu: float | None = None
    peak_flops: float | None = None
    peak_source: str = ""

    @property
    def is_predicted(self) -> bool:
        """Return True if a calibration predicts the time, False for the range of a data sheet."""
        return self.tokens_per_second is not None

    def over(self, steps: float) -> StepTime:
        """Return the same with the time of an epoch with that many steps, and with its cost at the price of an hour."""
        epoch, price = self.step.times(steps), self.hour_price
        low, high = (None if price is None else price * end / 3600 for end in (epoch.low_seconds, epoch.high_seconds))
        return replace(self, epoch=epoch, epoch_cost_low=low, epoch_cost_high=high)


class StepCost(Record):
    """One step's cost in steady state; None is "not computed here".

    The verdict follows from the other fields, whoever fills them. A cost that contradicts itself raises ValueError: the
    parts add up to the peak; peak <= reserved; what fits is within the limit.
    """

    peak: PhasePeak  # the highest sum of live tensors, and its place
    saved_bytes: int | None = None  # for backward, when the forward pass ends
    max_allocated_bytes: int | None = None  # blocks of tensors and workspaces, as torch.cuda.max_memory_allocated
    allocated: ByteRange | None = None  # the same over what a process may do before the run
    workspace_bytes: int = 0  # of cuBLAS; measured ones are a part of the allocated bytes
    reserved: ByteRange | None = None  # segments of the allocator at the limit, if there is one: over the places of
    # cuBLAS's workspaces
    reserved_loaded_bytes: int = 0  # if a checkpoint lay on the GPU while the model was made there
    context: ByteRange = ByteRange()  # the smallest and the largest CUDA context of the GPU
    # Reserved and the largest context, as nvidia-smi shows them; on a CPU the peak.
    gpu_bytes: int = field(default=0, init=False)
    limit_bytes: int | None = None  # the memory of the GPU, or the budget
    margin: float = 0.0  # the share of the limit that a step which fits leaves free
    shortfall: ByteRange | None = None  # low: of the limit, with the smallest context and no fragmentation; high: of
    # the limit without the margin, with the largest context
    host_bytes: int | None = None  # in the CPU's memory: what is offloaded there
    copied_bytes: int | None = None  # in a step between GPU and host, in either way
    step_flops: int | None = None  # matmul FLOPs of forward, backward and recomputation; a multiply-add counts as 2
    recompute_flops: int | None = None  # that checkpointing adds; a part of step_flops
    time: StepTime | None = None
    other_loop_bytes: int | None = None  # the peak of the same step in `run.other_loop`
    verdict: str = field(default="", init=False)  # yes, uncertain or no; empty without a limit

    def __post_init__(self) -> None:
        if self.limit_bytes is not None and self.shortfall is not None:
            lacks = self.shortfall
            verdict = NO if lacks.low_bytes else UNCERTAIN if lacks.high_bytes else YES
            object.__setattr__(self, "verdict", verdict)
        reserved = self.reserved or ByteRange(low_bytes=self.peak_bytes, high_bytes=self.peak_bytes)
        object.__setattr__(self, "gpu_bytes", reserved.high_bytes + self.context.high_bytes)
        laws = {
            "peak <= reserved": self.peak_bytes <= reserved.low_bytes <= reserved.high_bytes,
            "a step that fits is within the limit and its margin": self.verdict != YES
            or self.gpu_bytes <= self.usable_bytes,
            "recomputation is a part of the step": (self.recompute_flops or 0) <= (self.step_flops or float("inf")),
        }
        for law, holds in laws.items():
            if not holds:
                raise ValueError(f"{law}: a cost contradicts itself: {self!r}")

    @property
    def peak_bytes(self) -> int:
        """Return the highest sum of live tensors."""
        return self.peak.peak_bytes

    @property
    def least_bytes(self) -> int:
        """Return what the step takes on the GPU with the smallest context and without fragmentation."""
        return self.peak_bytes + self.workspace_bytes + self.context.low_bytes

    @property
    def usable_bytes(self) -> int:
        """Return the limit's bytes without the margin; 0 without a limit."""
        return usable(self.limit_bytes or 0, self.margin)

    @property
    def reserved_bytes(self) -> int | None:
        """Return the most segments of the allocator, at the limit if there is one; None on a CPU."""
        return self.reserved.high_bytes if self.reserved else None

    @property
    def extra_flops(self) -> float | None:
        """Return the recompute FLOPs as a share of the same step without checkpointing: 0.33 for all layers."""
        if self.step_flops is None or self.recompute_flops is None:
            return None
        plain = self.step_flops - self.recompute_flops
        return self.recompute_flops / plain if plain else 0.0


def usable(limit_bytes: int, margin: float) -> int:
    """Return a limit's bytes without the share of it that stays free."""
    return limit_bytes - ceil(limit_bytes * margin)


class RunHistory(Record):
    """The most that torch reserves in steps of different sizes, of one random order.

    `emptied_bytes` is the same with torch.cuda.empty_cache() after each step.
    """

    reserved_bytes: int
    grown_step: int  # the last in which it grew, from 1 on
    emptied_bytes: int
    runs_in_emptied: bool  # under a limit of so many bytes, where the allocator frees cached segments itself

    @staticmethod
    def reserved_of(histories: Sequence[RunHistory], share: float) -> int | None:
        """Return what this share of the runs reserves at most; None without any."""
        most = sorted(history.reserved_bytes for history in histories)
        return most[max(ceil(share * len(most)) - 1, 0)] if most else None


class CostRow(Record):
    """A row of a report about a step, with what is read most of its cost."""

    cost: StepCost

    @property
    def peak_bytes(self) -> int:
        """Return the highest sum of live tensors."""
        return self.cost.peak_bytes

    @property
    def answer(self) -> str:
        """Return the verdict: yes, uncertain or no; empty without a limit."""
        return self.cost.verdict

    @property
    def fits(self) -> bool:
        """Return True if the step certainly fits."""
        return self.cost.verdict == YES

    @property
    def epoch_cost(self) -> float:
        """Return the lowest cost of an epoch; infinite where it is not known, or the step does not fit."""
        low = self.cost.time.epoch_cost_low if self.cost.time else None
        return inf if low is None or not self.fits else low
