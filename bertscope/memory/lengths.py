"""An epoch's steps for sequences of real lengths: their shapes, memory and FLOPs with fixed and with dynamic padding.

Steps of few lengths run on fake tensors. Between them each tensor grows evenly, or with both sides of a matrix of
length x length; where that does not hold, the next length that ran counts. FLOPs are taken from the parabola
through the three nearest lengths, exact for attention over all tokens of a sequence.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from itertools import accumulate
from math import exp, lgamma, prod

from bertscope.memory.caching_allocator import history, requests
from bertscope.memory.fit import fit_row
from bertscope.memory.kernel_rules import rounded
from bertscope.memory.simulator import Simulator
from bertscope.memory.trace import MemoryTrace
from bertscope.progress import progress
from bertscope.reports.memory import LengthBatch, LengthsRow
from bertscope.reports.step import RunHistory, StepTime
from bertscope.settings.run_config import RunConfig

_MOST_TRACED = 5  # each takes about 0.5 s
_MULTIPLE = 8
_HISTORY = 20  # steps
_ROUNDED = 64  # tokens, of memory-efficient attention
_ANY = 2**62  # a limit under which every batch fits
StepShape = tuple[int, int]  # sequences, tokens of each


def traced_lengths(lengths: list[int]) -> list[int]:
    """Return the lengths that run: all if they are few, else the shortest, the longest and multiples of 8 between."""
    if len(lengths) <= _MOST_TRACED:
        return lengths
    low, high = lengths[0], lengths[-1]
    parts = (low + (high - low) * number // (_MOST_TRACED - 1) for number in range(1, _MOST_TRACED - 1))
    return sorted({low, high, *(length for part in parts if (length := rounded(part, _MULTIPLE)) < high)})


class LengthSteps:
    """A run's steps with sequences of these lengths, the shortest first: their peaks, FLOPs and largest batches."""

    def __init__(self, simulator: Simulator, run: RunConfig, counts: dict[int, int], *, is_exact: bool = True) -> None:
        self.is_exact, self.counts = is_exact, counts
        self.total, self.longest = sum(counts.values()), max(counts)
        self.tokens = sum(length * count for length, count in counts.items())
        self.without_limit = {"limit_bytes": None, "shortfall": None} if simulator.limit_bytes is None else {}
        self.simulator = simulator.limited(run, _ANY) if self.without_limit else simulator
        self.traced = traced_lengths(list(counts))
        # The lengths from which others are scaled: multiples of what a kernel of attention rounds up to.
        long = self.longest // _ROUNDED * _ROUNDED
        self.ends = (long // 2 // _ROUNDED * _ROUNDED, long) if long > _ROUNDED else (self.traced[0], self.traced[-1])
        padding = run.padding or 1 - self.tokens / (self.total * self.longest)
        # A mask hides padding next to token ids, which a BERT takes.
        inputs = {"input_ids": None} if simulator.source.bert_config is not None else simulator.traces.inputs(run)
        takes_mask = run.padding or (isinstance(inputs, dict) and "input_ids" in inputs)
        self.run = replace(run, padding=padding if takes_mask else 0.0)

        @cache
        def peak_bytes(shape: StepShape) -> int:
            return self.trace(*shape).peak_bytes

        @cache
        def sequence_flops(seq: int) -> float:
            return self.simulator.flops(replace(run, batch=1, seq=seq)) / run.accumulate

        self.peak, self._flops, self._between = peak_bytes, sequence_flops, cache(self._with_slopes)

    def shapes(self, batch: int) -> dict[str, dict[StepShape, float]]:
        """Return the shapes of an epoch's steps with the number of each, with fixed and with dynamic padding.

        Of dynamic padding these are expected numbers of random batches. The chance that all `size` of a batch are among
        the `below` shortest is C(below, size) / C(total, size).
        """
        parts = (batch, self.total // batch), (self.total % batch, 1)
        sizes = {size: steps for size, steps in parts if size and steps}
        dynamic: dict[StepShape, float] = {}
        for size, steps in sizes.items():
            before, among_all = 0.0, lgamma(self.total + 1) - lgamma(self.total - size + 1)
            for length, below in zip(self.counts, accumulate(self.counts.values()), strict=True):
                if below >= size:
                    share = exp(lgamma(below + 1) - lgamma(below - size + 1) - among_all)
                    dynamic[size, length], before = steps * (share - before), share
        return {"fixed": {(size, self.longest): steps for size, steps in sizes.items()}, "dynamic": dynamic}

    def _with_slopes(self, batch: int) -> MemoryTrace | None:
        short, long = (self.simulator.trace(replace(self.run, batch=batch, seq=seq)).fixed() for seq in self.ends)
        return short.with_slopes(long, max(self.ends[1] - self.ends[0], 1), 0)

    def trace(self, batch: int, seq: int) -> MemoryTrace:
        """Return the trace of a step at any length; where its sizes do not grow evenly, at the next one that ran."""
        if (between := self._between(batch)) is not None:
            return between.with_more(seq - self.ends[0])
        seq = self.traced[bisect_left(self.traced, seq)]
        return self.simulator.trace(replace(self.run, batch=batch, seq=seq))

    def histories(self, shapes: Mapping[StepShape, float], seeds: int) -> Iterator[RunHistory]:
        """Yield what torch reserves in a run's steps with random batches of these shapes, for each seed."""
        laid, *_ = self.simulator.placements(self.run) or ((),)  # none on a CPU, which has no seeds either
        requests_of = cache(lambda shape: requests(self.trace(*shape), laid))
        for seed in range(seeds):
            progress(f"seed {seed + 1} of {seeds}")
            drawn = random.Random(seed).choices(list(shapes), list(shapes.values()), k=_HISTORY)  # noqa: S311
            yield history(list(map(requests_of, drawn)), expandable_segments=self.run.expandable_segments)

    def flops(self, seq: int) -> float:
        """Return one sequence's FLOPs."""
        near = sorted(self.traced, key=lambda traced: abs(traced - seq))[:3]
        return sum(
            self._flops(length) * prod((seq - other) / (length - other) for other in near if other != length)
            for length in near
        )

    def rows(self, batch: int, seeds: int = 0) -> Iterator[LengthsRow]:
        """Yield what an epoch of batches of that size needs, for each padding."""
        size = min(batch, self.total)
        for name, shapes in self.shapes(batch).items():
            steps = sum(shapes.values())
            each = {shape: count * shape[0] for shape, count in shapes.items()}  # sequences
            mean_bytes = round(sum(count * self.peak(shape) for shape, count in shapes.items()) / steps)
            row = LengthsRow(
                name=name,
                batch=batch,
                batches=round(steps),
                padding=1 - self.tokens / sum(count * length for (_, length), count in each.items()),
                expected_bytes=min(mean_bytes, self.peak((size, self.longest))),  # traces have two sequences at least
                worst_batch=size,
                worst_seq=self.longest,
                cost=self.simulator.cost(replace(self.run, batch=size, seq=self.longest), **self.without_limit),
                epoch_flops=round(sum(count * self.flops(length) for (_, length), count in each.items())),
                histories=tuple(self.histories(shapes, seeds)),
            )
            yield replace(row, cost=replace(row.cost, time=self._time(row)))

    def _time(self, row: LengthsRow) -> StepTime | None:
        """Return an epoch's time from a step of mean length, scaled by FLOPs."""
        mean = self.tokens / self.total / (1 - row.padding)
        seq = min(self.traced, key=lambda traced: abs(traced - mean))
        run = replace(self.run, batch=max(round(self.total / row.batches), 1), seq=seq)
        time = self.simulator.timer.time(self.simulator, run) if self.simulator.timer else None
        if time is None:
            return None
        return time.over(row.epoch_flops * run.accumulate / self.simulator.flops(run))

    def table(self) -> Iterator[LengthBatch]:
        """Yield the largest batch for the lengths up to each one that ran."""
        for low, high in zip([0, *self.traced], self.traced):  # noqa: B905
            row = fit_row(self.simulator, replace(self.run, seq=high), is_exact=self.is_exact)
            count = sum(count for length, count in self.counts.items() if low < length <= high)
            yield LengthBatch(
                low=low + 1, high=high, sequences=count, batch=row.batch, cost=row.cost, exact_batch=row.exact_batch
            )
