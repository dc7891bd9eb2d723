"""The steps of an epoch for sequences of real lengths: their shapes, memory and FLOPs for each way to make batches.

A step of few lengths runs on fake tensors. Between two of them a peak is that of the straight line, which is not below
it: a peak grows with the length at most as a matrix of length x length does. FLOPs are those of the parabola through
the three nearest lengths, exact for attention over whole sequences. A batch without padding needs the memory of as many
tokens in sequences of equal length, since fused attention has no matrix of length x length.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from math import exp, lgamma, prod

from bertscope.analyses.memory.fit import Fitter
from bertscope.errors import SelectionError
from bertscope.reports.lengths import LengthBatch, LengthsRow
from bertscope.settings.run_config import RunConfig

MOST_TRACED = 5  # each takes about 0.5 s
_MULTIPLE = 8
_MEGABATCHES = 50  # batches that group_by_length sorts together: get_length_grouped_indices of transformers
_LARGE = 1024  # a batch in which activations decide the peak
_NO_SCORES = 0.002  # the share by which a token's memory may grow with the length, such as by a kernel's scratch
Shape = tuple[int, int]  # sequences, tokens of each


def traced_lengths(lengths: list[int]) -> tuple[int, ...]:
    """Return the lengths that run: all if they are few, else the shortest, the longest and multiples of 8 between."""
    if len(lengths) <= MOST_TRACED:
        return tuple(lengths)
    low, high = lengths[0], lengths[-1]
    parts = (low + (high - low) * number // (MOST_TRACED - 1) for number in range(1, MOST_TRACED - 1))
    between = (-(-length // _MULTIPLE) * _MULTIPLE for length in parts)
    return tuple(sorted({low, high, *(length for length in between if length < high)}))


@dataclass(frozen=True)
class Batching:
    """One way to make batches: the shapes of its steps with the number of each in an epoch, and the worst one."""

    name: str
    shapes: Mapping[Shape, float]
    worst: Shape | None  # None: the one with the highest peak
    tokens_per_batch: int = 0

    @property
    def is_padded(self) -> bool:
        """Return True if the sequences of a step have one length."""
        return self.name not in ("unpadded", "packed")


@dataclass(frozen=True)
class Data:
    """The number of sequences of each length, the shortest first."""

    counts: dict[int, int]

    @cached_property
    def total(self) -> int:
        """Return the number of sequences."""
        return sum(self.counts.values())

    @cached_property
    def tokens(self) -> int:
        """Return the tokens of an epoch without padding."""
        return sum(length * count for length, count in self.counts.items())

    @cached_property
    def shuffled(self) -> list[int]:
        """Return the lengths in a random order, always the same."""
        found = list(chain.from_iterable([length] * count for length, count in self.counts.items()))
        random.Random(0).shuffle(found)  # noqa: S311
        return found

    @property
    def even(self) -> int:
        """Return the mean length, rounded up to a multiple of 8 if no longer than the longest sequence."""
        return min(-(-self.tokens // self.total // _MULTIPLE) * _MULTIPLE, max(self.counts))

    def batchings(self, batch: int, unpadded: int, packed: int, padded_tokens: int) -> Iterator[Batching]:
        """Yield the ways to make batches; each with this batch or these tokens, 0 to leave it out."""
        longest, worst = max(self.counts), (min(batch, self.total), max(self.counts))
        if batch:
            parts = [(batch, self.total // batch), (self.total % batch, 1)]
            sizes = {size: steps for size, steps in parts if size and steps}
            yield Batching("fixed", {(size, longest): steps for size, steps in sizes.items()}, worst)
            yield Batching("dynamic", self._dynamic(sizes), worst)
            yield Batching("grouped", self._grouped(batch), worst)
        if unpadded:
            steps = -(-self.total // unpadded)
            mean = -(-self.tokens // (steps * self.even))
            most = -(-self.longest_tokens(unpadded) // self.even)
            yield Batching("unpadded", {(mean, self.even): steps}, (most, self.even))
        if packed:
            shapes = self._packed(packed)
            yield Batching("packed", shapes, max(shapes), packed)
        if padded_tokens:
            yield Batching("tokens", self._by_tokens(padded_tokens), None, padded_tokens)

    def longest_tokens(self, sequences: int) -> int:
        """Return the tokens of so many of the longest sequences together."""
        tokens = 0
        for length in reversed(self.counts):
            taken = min(sequences, self.counts[length])
            tokens, sequences = tokens + taken * length, sequences - taken
        return tokens

    def most_unpadded(self, tokens: int) -> int:
        """Return the most sequences whose tokens are never more than `tokens` together."""
        found = 0
        for length in reversed(self.counts):
            taken = min(tokens // length, self.counts[length])
            found, tokens = found + taken, tokens - taken * length
            if taken < self.counts[length]:
                return found
        return found

    def _dynamic(self, sizes: Mapping[int, int]) -> dict[Shape, float]:
        """Return the expected number of batches with each longest sequence, of random batches of these sizes."""
        shapes: dict[Shape, float] = {}
        for size, steps in sizes.items():
            before = 0.0
            for length, below in zip(self.counts, accumulate(self.counts.values()), strict=True):
                share = _all_among(below, size, self.total)
                if share > before:
                    shapes[size, length] = steps * (share - before)
                before = share
        return shapes

    def _grouped(self, batch: int) -> Counter[Shape]:
        """Return the batches of transformers' group_by_length for a random order."""
        together = batch * max(min(self.total // (4 * batch), _MEGABATCHES), 1)
        shapes: Counter[Shape] = Counter()
        for start in range(0, self.total, together):
            own = sorted(self.shuffled[start : start + together], reverse=True)
            shapes.update((min(batch, len(own) - first), own[first]) for first in range(0, len(own), batch))
        return shapes

    def _packed(self, tokens: int) -> Counter[Shape]:
        """Return the batches of a random order, each filled until the next sequence does not fit; by whole tokens."""
        self._check(tokens)
        found, own = Counter[int](), 0
        for length in self.shuffled:
            if own + length > tokens:
                found[own], own = found[own] + 1, 0
            own += length
        found[own] += bool(own)
        shapes: Counter[Shape] = Counter()
        for own, count in found.items():
            shapes[-(-own // self.even), self.even] += count
        return +shapes

    def _by_tokens(self, tokens: int) -> Counter[Shape]:
        """Return the batches of all sequences, the longest first, padded to at most so many tokens."""
        self._check(tokens)
        shapes: Counter[Shape] = Counter()
        room, shorter = 0, self.total  # of the batch before, sequences that it has yet to take
        for length in reversed(self.counts):
            taken = min(room, self.counts[length])
            count, room, shorter = self.counts[length] - taken, room - taken, shorter - self.counts[length]
            full, rest = divmod(count, tokens // length)
            shapes[tokens // length, length] += full
            if rest:
                size = min(tokens // length, rest + shorter)
                shapes[size, length] += 1
                room = size - rest
        return +shapes

    def _check(self, tokens: int) -> None:
        if tokens < max(self.counts):
            raise SelectionError("a sequence has {most:,} tokens, more than --tokens-per-batch {tokens:,}; give more, "
                                 "or cut the sequences with --seq", most=max(self.counts), tokens=tokens)  # fmt: skip


def _all_among(below: int, size: int, total: int) -> float:
    """Return the chance that `size` of `total` are all among `below` of them: C(below, size) / C(total, size)."""
    if below < size:
        return 0.0
    return exp(lgamma(below + 1) - lgamma(below - size + 1) - lgamma(total + 1) + lgamma(total - size + 1))


class LengthSteps:
    """The steps of a run at other lengths: their peaks, FLOPs and largest batches."""

    def __init__(self, fitter: Fitter, run: RunConfig, data: Data, *, is_limited: bool) -> None:
        self.fitter, self.data, self.is_limited = fitter, data, is_limited
        self.traced = traced_lengths(list(data.counts))
        padding = run.padding or (0.0 if len(data.counts) == 1 else 1 - data.tokens / data.total / max(data.counts))
        self.padded, self.unpadded = replace(run, padding=padding), replace(run, padding=0.0)
        self._peak = lru_cache(None)(lambda batch, seq: self._bytes(replace(self.padded, batch=batch, seq=seq)))
        self._flops = lru_cache(None)(lambda seq: fitter.steps.flops(replace(run, batch=1, seq=seq)) / run.accumulate)

    def _bytes(self, run: RunConfig) -> int:
        return self.fitter.trace(run).peak_bytes

    @cached_property
    def is_fused(self) -> bool:
        """Return True if a token needs as much memory in a longer sequence: attention saves no scores."""

        def token_bytes(seq: int) -> float:
            """Return what a token of one more sequence adds to the peak of a large batch."""
            runs = (replace(self.unpadded, batch=batch, seq=seq) for batch in (_LARGE, _LARGE + 1))
            fewer, more = map(self._bytes, runs)
            return (more - fewer) / seq

        short, long = token_bytes(self.data.even), token_bytes(self.traced[-1])
        return long <= (1 + _NO_SCORES) * short or self.traced[-1] == self.traced[0]

    def peak(self, shape: Shape, *, is_padded: bool = True) -> float:
        """Return the peak of a step in tensors."""
        batch, seq = max(shape[0], 2), shape[1]  # the step of one sequence would run at each length
        if not is_padded:
            return self._bytes(replace(self.unpadded, batch=batch, seq=seq))
        place = bisect_left(self.traced, seq)
        high = self.traced[place]
        if high == seq or not place:
            return self._peak(batch, high)
        low = self.traced[place - 1]
        first, second = self._peak(batch, low), self._peak(batch, high)
        return first + (second - first) * (seq - low) / (high - low)

    def flops(self, seq: int) -> float:
        """Return the FLOPs of one sequence."""
        near = sorted(sorted(self.traced, key=lambda traced: abs(traced - seq))[:3])
        if seq in near:
            return self._flops(seq)
        return sum(self._flops(own) * prod((seq - other) / (own - other) for other in near if other != own)
                   for own in near)  # fmt: skip

    def row(self, found: Batching, batch: int) -> LengthsRow:
        """Return what an epoch of these batches needs."""
        run = self.padded if found.is_padded else self.unpadded
        batch_size, seq = found.worst or max(found.shapes, key=self.peak)
        worst = replace(run, batch=batch_size, seq=seq)
        steps = sum(found.shapes.values())
        expected = sum(count * self.peak(shape, is_padded=found.is_padded) for shape, count in found.shapes.items())
        processed = sum(count * shape[0] * shape[1] for shape, count in found.shapes.items())
        padded = ((count * shape[0], shape[1]) for shape, count in found.shapes.items())
        own = padded if found.is_padded else ((count, length) for length, count in self.data.counts.items())
        return LengthsRow(
            name=found.name, batch=batch, tokens_per_batch=found.tokens_per_batch, batches=round(steps),
            padding=1 - self.data.tokens / processed if found.is_padded else 0.0,
            expected_bytes=round(expected / steps), worst_bytes=self._bytes(worst),
            reserved_bytes=self.fitter.reserved_bytes(worst, is_limited=False), worst_batch=worst.batch,
            worst_seq=worst.seq, epoch_flops=round(sum(count * self.flops(length) for count, length in own)),
            answer=self.fitter.answer(worst) if self.is_limited else "",
        )  # fmt: skip

    def largest(self, seq: int, *, is_padded: bool = True) -> int:
        """Return the largest batch of sequences of this length."""
        return self.fitter.row(replace(self.padded if is_padded else self.unpadded, seq=seq)).batch

    def table(self) -> Iterator[LengthBatch]:
        """Yield the largest batch for the lengths up to each one that ran."""
        low = 0
        for high in self.traced:
            batch = self.largest(high)
            count = sum(count for length, count in self.data.counts.items() if low < length <= high)
            run = replace(self.padded, batch=max(batch, 1), seq=high)
            yield LengthBatch(low=low + 1, high=high, sequences=count, batch=batch, peak_bytes=self._bytes(run))
            low = high
