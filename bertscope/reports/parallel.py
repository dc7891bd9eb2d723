"""The traffic between the ranks of a training job, and the share of each rank. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

COLLECTIVES = ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST = (
    "all-gather", "reduce-scatter", "all-reduce", "broadcast",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TrafficRow:
    """The calls of one collective in a phase of a step, by the modules of one row, seen from one rank.

    `full_bytes` is the size of the tensors that the ranks of a call have together; `sent_bytes` is what a rank sends
    if they communicate in a ring: (n-1)/n of it for an all-gather, a reduce-scatter or a broadcast, and twice that for
    an all-reduce.
    """

    phase: str
    collective: str  # one of COLLECTIVES
    path: str  # equal layers as a range; empty for the whole model
    ranks: int  # of a call
    calls: int
    full_bytes: int
    sent_bytes: int


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """Consecutive ranks, from `first` to `last`, that hold the same number of parameters to update."""

    first: int
    last: int
    updated_params: int  # whose optimizer state each of them has

    @property
    def label(self) -> str:
        """Return the numbers of the ranks: `0-3`."""
        return f"{self.first:,}-{self.last:,}" if self.first < self.last else f"{self.first:,}"
