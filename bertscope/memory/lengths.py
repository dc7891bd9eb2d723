"""An epoch's steps for sequences of real lengths: their shapes, memory and FLOPs for each way to make batches.

Steps of few lengths run on fake tensors. Between them each tensor grows evenly, or with both sides of a matrix of
length x length; where that does not hold, the next length that ran counts. FLOPs are taken from the parabola
through the three nearest lengths, exact for attention over all tokens of a sequence. A batch without padding needs the
memory of as many tokens in sequences of equal length if attention saves no scores, so that a token needs no more in a
longer sequence.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from math import exp, lgamma, prod

from bertscope.errors import SelectionError, name_of
from bertscope.memory.caching_allocator import history, requests
from bertscope.memory.fit import fit_row
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
_MEGABATCHES = 50  # batches that group_by_length sorts together: get_length_grouped_indices of transformers
_ANY = 2**62  # a limit under which every batch fits
_LARGE = 1024  # a batch in which activations decide the peak
_NO_SCORES = 0.002  # the share by which a token's memory may grow with the length, such as by a kernel's scratch
StepShape = tuple[int, int]  # sequences, tokens of each


def traced_lengths(lengths: list[int]) -> list[int]:
    """Return the lengths that run: all if they are few, else the shortest, the longest and multiples of 8 between."""
    low, high = lengths[0], lengths[-1]
    parts = (low + (high - low) * number // (_MOST_TRACED - 1) for number in range(1, _MOST_TRACED - 1))
    between = (-(-length // _MULTIPLE) * _MULTIPLE for length in parts)
    return (
        lengths
        if len(lengths) <= _MOST_TRACED
        else sorted({low, high, *(length for length in between if length < high)})
    )


@dataclass(frozen=True)
class Batching:
    """One way to make batches: its steps' shapes with the number of each in an epoch, and the worst one.

    `size` are the sequences of a batch, or for `packed` and `tokens` its most tokens.
    """

    name: str
    shapes: Mapping[StepShape, float]
    size: int
    worst: StepShape | None = None  # None: the one with the highest peak

    @property
    def is_padded(self) -> bool:
        """Return True if the sequences of a batch are padded to one length."""
        return self.name not in ("unpadded", "packed")


class Data:
    """The number of sequences of each length, the shortest first."""

    def __init__(self, counts: dict[int, int]) -> None:
        self.counts, self.total, self.longest = counts, sum(counts.values()), max(counts)
        self.tokens = sum(length * count for length, count in counts.items())
        # The mean length, rounded up to a multiple of 8.
        self.even = min(-(-self.tokens // self.total // _MULTIPLE) * _MULTIPLE, self.longest)

    @cached_property
    def shuffled(self) -> list[int]:
        """Return the lengths in a random order, always the same."""
        lengths = [length for length, count in self.counts.items() for _ in range(count)]
        random.Random(0).shuffle(lengths)  # noqa: S311
        return lengths

    def batchings(self, batch: int, unpadded: int, packed: int, padded: int) -> Iterator[Batching]:
        """Yield the ways to make batches of that many sequences, and of that many tokens; 0 leaves a way out."""
        if batch:
            worst = (min(batch, self.total), self.longest)
            parts = (batch, self.total // batch), (self.total % batch, 1)
            sizes = {size: steps for size, steps in parts if size and steps}
            yield Batching("fixed", {(size, self.longest): steps for size, steps in sizes.items()}, batch, worst)
            yield Batching("dynamic", dict(self._dynamic(sizes)), batch, worst)
            yield Batching("grouped", self._grouped(batch), batch, worst)
        if unpadded:
            steps = -(-self.total // unpadded)
            most, rest = 0, unpadded  # the tokens of the longest sequences, and how many of these are yet to add
            for length in reversed(self.counts):
                most, rest = most + min(rest, self.counts[length]) * length, max(rest - self.counts[length], 0)
            yield Batching("unpadded", {self._even(-(-self.tokens // steps)): steps}, unpadded, self._even(most))
        if 0 < max(packed, padded) < self.longest:
            raise SelectionError(
                f"a sequence has {self.longest:,} tokens, more than {name_of('tokens_per_batch')} {padded:,}; give "
                f"more, or cut the sequences with {name_of('seq')}"
            )
        if packed >= self.longest:
            shapes = self._packed(packed)
            yield Batching("packed", shapes, packed, max(shapes))
        if padded >= self.longest:
            yield Batching("tokens", self._by_tokens(padded), padded)

    def most_unpadded(self, tokens: int) -> int:
        """Return the most sequences that never have more than `tokens` together."""
        sequences = 0
        for length in reversed(self.counts):
            taken = min(tokens // length, self.counts[length])
            sequences, tokens = sequences + taken, tokens - taken * length
            if taken < self.counts[length]:
                break
        return sequences

    def _even(self, tokens: int) -> StepShape:
        return -(-tokens // self.even), self.even

    def _dynamic(self, sizes: Mapping[int, int]) -> Iterator[tuple[StepShape, float]]:
        """Yield the expected number of random batches of these sizes with each longest sequence.

        The chance that all `size` of a batch are among the `below` shortest is C(below, size) / C(total, size).
        """
        for size, steps in sizes.items():
            before, among_all = 0.0, lgamma(self.total + 1) - lgamma(self.total - size + 1)
            for length, below in zip(self.counts, accumulate(self.counts.values()), strict=True):
                if below >= size:
                    share = exp(lgamma(below + 1) - lgamma(below - size + 1) - among_all)
                    yield (size, length), steps * (share - before)
                    before = share

    def _grouped(self, batch: int) -> Counter[StepShape]:
        together = batch * max(min(self.total // (4 * batch), _MEGABATCHES), 1)
        shapes: Counter[StepShape] = Counter()
        for start in range(0, self.total, together):
            group = sorted(self.shuffled[start : start + together], reverse=True)
            shapes.update((min(batch, len(group) - first), group[first]) for first in range(0, len(group), batch))
        return shapes

    def _packed(self, tokens: int) -> Counter[StepShape]:
        """Return the batches of a random order, each filled until the next sequence does not fit."""
        shapes, filled = Counter[StepShape](), 0
        for length in self.shuffled:
            if filled + length > tokens:
                shapes[self._even(filled)] += 1
                filled = 0
            filled += length
        shapes[self._even(filled)] += 1
        return shapes

    def _by_tokens(self, tokens: int) -> Counter[StepShape]:
        """Return the batches of all sequences, the longest first, padded to at most that many tokens."""
        lengths, begun = sorted(self.shuffled, reverse=True), 0
        shapes: Counter[StepShape] = Counter()
        while begun < self.total:
            size = min(tokens // lengths[begun], self.total - begun)
            shapes[size, lengths[begun]] += 1
            begun += size
        return shapes


class LengthSteps:
    """A run's steps at other lengths: their peaks, FLOPs and largest batches."""

    def __init__(self, simulator: Simulator, run: RunConfig, data: Data, *, is_exact: bool = True) -> None:
        self.is_exact = is_exact
        self.without_limit = {"limit_bytes": None, "shortfall": None} if simulator.limit_bytes is None else {}
        self.simulator = simulator.limited(run, _ANY) if self.without_limit else simulator
        self.data = data
        self.traced = traced_lengths(list(data.counts))
        # The lengths from which others are scaled: multiples of what a kernel of attention rounds up to.
        long = data.longest // _ROUNDED * _ROUNDED
        self.ends = (long // 2 // _ROUNDED * _ROUNDED, long) if long > _ROUNDED else (self.traced[0], self.traced[-1])
        padding = run.padding or 1 - data.tokens / (data.total * data.longest)
        # A mask hides padding next to token ids, which a BERT takes.
        inputs = {"input_ids": None} if simulator.source.bert_config is not None else simulator.traces.inputs(run)
        takes_mask = run.padding or (isinstance(inputs, dict) and "input_ids" in inputs)
        self.padded, self.unpadded = replace(run, padding=padding if takes_mask else 0.0), replace(run, padding=0.0)

        @cache
        def peak_bytes(run: RunConfig, batch: int, seq: int) -> int:
            return self.trace(run, batch, seq).peak_bytes

        @cache
        def sequence_flops(seq: int) -> float:
            return self.simulator.flops(replace(run, batch=1, seq=seq)) / run.accumulate

        self._bytes, self._flops, self._between = peak_bytes, sequence_flops, cache(self._with_slopes)

    def _with_slopes(self, run: RunConfig, batch: int) -> MemoryTrace | None:
        short, long = (self.simulator.trace(replace(run, batch=batch, seq=seq)).fixed() for seq in self.ends)
        return short.with_slopes(long, max(self.ends[1] - self.ends[0], 1), 0)

    def trace(self, run: RunConfig, batch: int, seq: int) -> MemoryTrace:
        """Return the trace of a step at any length; where its sizes do not grow evenly, at the next one that ran."""
        if (between := self._between(run, batch)) is not None:
            return between.with_more(seq - self.ends[0])
        seq = self.traced[bisect_left(self.traced, seq)]
        return self.simulator.trace(replace(run, batch=batch, seq=seq))

    def histories(self, batching: Batching, seeds: int, steps: int = _HISTORY) -> Iterator[RunHistory]:
        """Yield what torch reserves in as many steps with random batches of an epoch, for each seed."""
        run = self.padded if batching.is_padded else self.unpadded
        laid, *_ = self.simulator.placements(run) or ((),)  # none on a CPU, which has no seeds either
        shapes = list(batching.shapes)
        requests_of = cache(lambda shape: requests(self.trace(run, *shape), laid))
        for seed in range(seeds):
            progress(f"seed {seed + 1} of {seeds}")
            drawn = random.Random(seed).choices(shapes, list(batching.shapes.values()), k=steps)  # noqa: S311
            yield history(list(map(requests_of, drawn)), expandable_segments=run.expandable_segments)

    @cached_property
    def is_fused(self) -> bool:
        """Return True if a token needs no more memory in a longer sequence: attention saves no scores."""

        def token_bytes(seq: int) -> float:
            fewer, more = (self._bytes(self.unpadded, batch, seq) for batch in (_LARGE, _LARGE + 1))
            return (more - fewer) / seq

        return token_bytes(self.data.longest) <= (1 + _NO_SCORES) * token_bytes(self.data.even)

    def peak(self, shape: StepShape) -> float:
        """Return a step's peak with padding, in tensors."""
        return self._bytes(self.padded, *shape)

    def flops(self, seq: int) -> float:
        """Return one sequence's FLOPs."""
        near = sorted(self.traced, key=lambda traced: abs(traced - seq))[:3]
        return sum(
            self._flops(length) * prod((seq - other) / (length - other) for other in near if other != length)
            for length in near
        )

    def row(self, batching: Batching, seeds: int = 0) -> LengthsRow:
        """Return what an epoch of these batches needs."""
        is_padded, by_tokens = batching.is_padded, batching.name in ("packed", "tokens")
        run, (batch, seq) = self.unpadded, batching.worst or max(batching.shapes, key=self.peak)
        counted: list[tuple[float, int]] = [(count, length) for length, count in self.data.counts.items()]
        if is_padded:
            run, counted = self.padded, [(count * size, length) for (size, length), count in batching.shapes.items()]
        peak = self.peak if is_padded else lambda shape: self._bytes(run, *shape)
        worst, steps = replace(run, batch=batch, seq=seq), sum(batching.shapes.values())
        mean_bytes = round(sum(count * peak(shape) for shape, count in batching.shapes.items()) / steps)
        row = LengthsRow(
            name=batching.name,
            batch=0 if by_tokens else batching.size,
            tokens_per_batch=batching.size * by_tokens,
            batches=round(steps),
            padding=1 - self.data.tokens / sum(count * length for count, length in counted),
            expected_bytes=min(mean_bytes, self._bytes(run, batch, seq)),  # `peak` has two sequences at least
            worst_batch=batch,
            worst_seq=seq,
            cost=self.simulator.cost(worst, **self.without_limit),
            epoch_flops=round(sum(count * self.flops(length) for count, length in counted)),
            histories=tuple(self.histories(batching, seeds)),
        )
        return replace(row, cost=replace(row.cost, time=self._time(row)))

    def _time(self, row: LengthsRow) -> StepTime | None:
        """Return an epoch's time from a step of mean length, scaled by FLOPs."""
        mean = self.data.tokens / self.data.total / (1 - row.padding)
        seq = min(self.traced, key=lambda traced: abs(traced - mean))
        run = replace(self.padded, batch=max(round(self.data.total / row.batches), 1), seq=seq)
        time = self.simulator.timer.time(self.simulator, run) if self.simulator.timer else None
        if time is None:
            return None
        return time.over(row.epoch_flops * run.accumulate / self.simulator.flops(run))

    def table(self) -> Iterator[LengthBatch]:
        """Yield the largest batch for the lengths up to each one that ran."""
        for low, high in zip([0, *self.traced], self.traced):  # noqa: B905
            row = fit_row(self.simulator, replace(self.padded, seq=high), is_exact=self.is_exact)
            count = sum(count for length, count in self.data.counts.items() if low < length <= high)
            yield LengthBatch(
                low=low + 1, high=high, sequences=count, batch=row.batch, cost=row.cost, exact_batch=row.exact_batch
            )

    def largest_unpadded(self) -> int:
        """Return the most tokens of a batch without padding; 0 if attention saves scores."""
        return (
            self.is_fused and fit_row(self.simulator, replace(self.unpadded, seq=self.data.even)).batch * self.data.even
        )
