"""The reports of `flops`: the cost of a forward pass or a training step. Plain data in base units."""

from __future__ import annotations

from typing import ClassVar

from bertscope.frozen import dataclass
from bertscope.reports.base import Subject, TableReport


@dataclass(frozen=True, kw_only=True)
class Work:
    """The cost of a computation. A multiply-add is 2 FLOPs; `macs` counts it as one."""

    matmul_flops: int = 0
    elementwise_flops: int = 0
    bytes_moved: int = 0  # read and written by each operator; views move no bytes
    # The matmul FLOPs without the pairs of tokens that attention windows hide, and in such a model causal masks.
    needed_flops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def __mul__(self, times: int) -> Work:
        return Work(**{name: value * times for name, value in vars(self).items()})

    def __floordiv__(self, parts: int) -> Work:
        return Work(**{name: value // parts for name, value in vars(self).items()})

    @property
    def macs(self) -> int:
        """Return the multiply-adds of the matrix products."""
        return self.matmul_flops // 2

    @property
    def intensity(self) -> float:
        """Return the arithmetic intensity: FLOPs for each byte moved."""
        flops = self.matmul_flops + self.elementwise_flops
        return flops / self.bytes_moved if self.bytes_moved else 0.0


@dataclass(frozen=True, kw_only=True)
class OperatorRow:
    """One operator in one phase: number of calls, cost, and `role`, the way in which it is counted."""

    operator: str
    phase: str
    calls: int
    role: str  # matmul, elementwise, movement, or unknown (not counted)
    elements: int  # of its output, over all calls
    work: Work


@dataclass(frozen=True, kw_only=True)
class FlopsRow:
    """One module: the work of the module with all modules below it in each phase, over all copies."""

    name: str
    path: str
    type: str
    depth: int
    copies: int
    is_last: bool
    forward: Work
    backward: Work
    recompute: Work
    total: Work
    macs: int
    intensity: float
    share: float  # of the matmul FLOPs


@dataclass(frozen=True, kw_only=True)
class SweepPoint:
    """The matmul FLOPs at one batch size and sequence length."""

    batch: int
    seq: int
    forward_flops: int
    backward_flops: int
    total_flops: int  # with recomputation

    @property
    def recompute_flops(self) -> int:
        """Return the FLOPs that checkpointing adds."""
        return self.total_flops - self.forward_flops - self.backward_flops

    @property
    def macs(self) -> int:
        """Return the multiply-adds of the matrix products."""
        return self.total_flops // 2


@dataclass(frozen=True, kw_only=True)
class Polynomial:
    """Total matmul FLOPs = batch * (constant + linear * seq + quadratic * seq**2), verified at a further point."""

    constant: int
    linear: int
    quadratic: int
    verified_at: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Convention:
    """The FLOPs of the same computation under another convention, with the rules of that convention."""

    name: str
    value: int
    unit: str
    how: str
    source: str


@dataclass(frozen=True, kw_only=True, repr=False)
class FlopsReport(TableReport[FlopsRow]):
    """The work of each module. `matmul_flops` of the root row equals torch's FlopCounterMode."""

    kind: ClassVar[str] = "flops"
    subject: Subject
    mode: str
    checkpointing: str
    batch: int | None
    seq: int | None
    rows: tuple[FlopsRow, ...]
    operators: tuple[OperatorRow, ...]
    sweep: tuple[SweepPoint, ...] = ()
    polynomial: Polynomial | None = None
    conventions: tuple[Convention, ...] = ()
    loss: str = ""
    encoder_seq: int | None = None  # the length of the encoder's input or states, if cross-attention reads them
    traced_layers: int | None = None  # number of layers that ran; the others are equal and multiplied

    @property
    def is_local(self) -> bool:
        """Return True if windows of attention, or causal masks next to them, hide pairs of tokens."""
        return self.rows[0].total.needed_flops < self.rows[0].total.matmul_flops

    @property
    def unknown_operators(self) -> tuple[str, ...]:
        """Return the operators that ran and were not counted."""
        return tuple(dict.fromkeys(row.operator for row in self.operators if row.role == "unknown"))
