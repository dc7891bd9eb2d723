"""`fit`: the largest batch that a budget holds, for each way to run a step.

Every block of a trace grows with the batch by a fixed number of bytes. Two traces give the numbers, the
search is arithmetic, and its answer is checked: the peaks at that batch and at the next are really taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby

from bertscope.analyses.flops.sweep import FlopsRun
from bertscope.analyses.memory.caching_allocator import replayed
from bertscope.analyses.memory.cuda_kernels import CONTEXT_BYTES, workspace_bytes
from bertscope.analyses.memory.estimate import MemoryTraces
from bertscope.analyses.memory.events import MemoryEvent, MemoryTrace
from bertscope.analyses.memory.step import bert_model
from bertscope.analyses.modules.totals import subject
from bertscope.gpus import capability, sdpa_kernel
from bertscope.reports.memory import BreakEven, BreakEvenPoint, FitReport, FitRow, Gpu
from bertscope.run_config import NONE, RunConfig
from bertscope.sources.presets import Source
from bertscope.units import FP32

LARGEST_BATCH = 2**20
_SAMPLES = (2, 3)
_OUTLOOK = (8, 32)
_VARIED = ("batch", "seq", "checkpointing", "reentrant", "dtype", "autocast")
Progress = Callable[[str], None]


def overhead_bytes(run_config: RunConfig, context_bytes: int | None, known: Gpu | None = None) -> int:
    """What a device holds beside tensors: on CUDA workspaces and the context, by default the middle of its range."""
    if run_config.device != "cuda":
        return context_bytes or 0
    workspaces = workspace_bytes(run_config, None if known is None else capability(known))
    return workspaces + (sum(CONTEXT_BYTES) // 2 if context_bytes is None else context_bytes)


@dataclass
class MemoryGrowth:
    """The peak of a step as a function of the batch, from traces of two batches."""

    granule_bytes: int
    state: list[tuple[int, int]]  # bytes at batch 0, and by which they grow
    events: list[tuple[int, int]]

    def peak_bytes(self, batch: int) -> int:
        """The peak at a batch."""
        start = sum(self._taken(pair, batch) for pair in self.state)
        return max(accumulate((self._taken(pair, batch) for pair in self.events), initial=start))

    def _taken(self, pair: tuple[int, int], batch: int) -> int:
        size = pair[0] + pair[1] * batch
        granule = self.granule_bytes
        return -(-size // granule) * granule if size > 0 else size // granule * granule


def growth(one: MemoryTrace, other: MemoryTrace, batches: tuple[int, int] = _SAMPLES) -> MemoryGrowth | None:
    """The line through two traces, block by block; None where they do not run alike."""
    pairs = list(zip(_in_order(one), _in_order(other), strict=False))
    if len(one.events) != len(other.events) or any(a.block.path != b.block.path for a, b in pairs):
        return None
    try:
        state = [_line(a, b, batches) for (_, a), (_, b) in zip(one.state, other.state, strict=True)]
        events = [_line(a.size_bytes, b.size_bytes, batches) for a, b in pairs]
    except ArithmeticError:
        return None
    return MemoryGrowth(one.granule_bytes, state, events)


def _in_order(trace: MemoryTrace) -> list[MemoryEvent]:
    """The events; where several blocks go and nothing comes, in an order that the batch does not change."""
    runs = groupby(trace.events, key=lambda event: event.size_bytes < 0)
    return [event for leaving, run in runs for event in (sorted(run, key=_likeness) if leaving else run)]


def _likeness(event: MemoryEvent) -> tuple[str, str, str, int]:
    block = event.block
    return block.path, block.operator, block.dtype, event.size_bytes


def _line(one: int, other: int, batches: tuple[int, int]) -> tuple[int, int]:
    slope, rest = divmod(other - one, batches[1] - batches[0])
    if rest:
        raise ArithmeticError
    return one - slope * batches[0], slope


def break_even(traces: MemoryTraces, plain: RunConfig, other: RunConfig) -> BreakEven | None:
    """The least batch at which `other` has the lower peak, and both peaks at larger ones; None if no line is found."""
    lines = [_line_of(traces, run_config) for run_config in (plain, other)]
    first, second = lines
    if first is None or second is None:
        return None
    behind = _last(lambda batch: second.peak_bytes(batch) >= first.peak_bytes(batch))
    if behind >= LARGEST_BATCH // 2:
        return None
    batches = [batch for batch in _OUTLOOK if batch > max(plain.batch, behind)]
    points = tuple(
        BreakEvenPoint(batch=batch, first_bytes=first.peak_bytes(batch), peak_bytes=second.peak_bytes(batch))
        for batch in batches
    )
    return BreakEven(pays_from_batch=behind + 1, points=points)


def _line_of(traces: MemoryTraces, run_config: RunConfig) -> MemoryGrowth | None:
    one, two = (traces.trace(replace(run_config, batch=batch))[0] for batch in _SAMPLES)
    return growth(one, two)


@dataclass
class Fitter:
    """Answers for one model and budget."""

    source: Source
    run_config: RunConfig
    budget_bytes: int
    overhead_bytes: int = 0
    progress: Progress = lambda text: None
    traces: MemoryTraces = field(init=False)
    flops: dict[tuple[str, int], int] = field(default_factory=dict)
    recent: dict[RunConfig, MemoryTrace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.traces = MemoryTraces(self.source)

    def largest(self, seqs: Sequence[int], variants: Iterable[RunConfig]) -> Iterator[FitRow]:
        """For each length and way the largest batch that fits."""
        for variant in variants:
            for seq in seqs:
                self.progress(f"{variant.checkpointing}, {variant.precision}, seq {seq}")
                run_config = replace(variant, seq=seq)
                batch = self._search(run_config)
                yield self._row(replace(run_config, batch=max(batch, 1)), batch)

    def at_batch(self, batch: int, seqs: Sequence[int], variants: Iterable[RunConfig]) -> list[FitRow]:
        """For each way whether the batch fits, those that cost least first."""
        rows = []
        for variant in variants:
            for seq in seqs:
                self.progress(f"{variant.checkpointing}, {variant.precision}, seq {seq}")
                run_config = replace(variant, seq=seq, batch=batch)
                rows.append(self._row(run_config, batch if self.peak_bytes(run_config) <= self.budget_bytes else 0))
        return sorted(rows, key=lambda row: (row.seq, not row.fits, row.extra_flops, row.precision != FP32.name))

    def peak_bytes(self, run_config: RunConfig) -> int:
        """All that the budget must hold at the peak of this step."""
        return self._trace(run_config).peak_bytes + self.overhead_bytes

    def _trace(self, run_config: RunConfig) -> MemoryTrace:
        """The trace of a step; the last few are kept, since an answer is asked for again to be shown."""
        if run_config not in self.recent:
            for old in list(self.recent)[:-3]:
                del self.recent[old]
            self.recent[run_config] = self.traces.trace(run_config)[0]
        return self.recent[run_config]

    def _search(self, run_config: RunConfig) -> int:
        """The largest batch that fits; 0 for none. Arithmetic first, then really taken."""
        line = _line_of(self.traces, run_config)
        room = self.budget_bytes - self.overhead_bytes

        def really(batch: int) -> bool:
            """Whether the step of that batch fits, by its own trace."""
            return self.peak_bytes(replace(run_config, batch=batch)) <= self.budget_bytes

        return _settled(_last(lambda batch: line.peak_bytes(batch) <= room), really) if line else _last(really)

    def _row(self, run_config: RunConfig, batch: int) -> FitRow:
        trace = self._trace(run_config)
        limit = self.budget_bytes - self.overhead_bytes
        flops = self._flops(run_config)
        plain = self._flops(replace(run_config, checkpointing=NONE))
        return FitRow(
            seq=run_config.seq,
            checkpointing=run_config.checkpointing,
            precision=run_config.precision,
            batch=batch,
            peak_bytes=trace.peak_bytes + self.overhead_bytes,
            next_bytes=self.peak_bytes(replace(run_config, batch=batch + 1))
            if batch
            else trace.peak_bytes + self.overhead_bytes,
            fits=batch > 0,
            is_tight=run_config.device == "cuda" and batch > 0 and bool(replayed(trace, limit).missing_bytes),
            step_flops=flops,
            extra_flops=flops / plain - 1 if plain else 0.0,
        )

    def _flops(self, run_config: RunConfig) -> int:
        """FLOPs of the step, which are those of one sequence as often as there are sequences."""
        training = run_config.mode == "training"
        checkpointing = run_config.checkpointing if training else NONE
        if (checkpointing, run_config.seq) not in self.flops:
            mode = "training" if training else "inference"
            run = FlopsRun(source=self.source, mode=mode, checkpointing=checkpointing, freeze=run_config.freeze)
            self.flops[checkpointing, run_config.seq] = run.at(1, run_config.seq).rows[0].total.matmul_flops
        return run_config.batch * self.flops[checkpointing, run_config.seq]


def _last(holds: Callable[[int], bool]) -> int:
    """The largest number for which it holds, 0 for none; it holds up to somewhere."""
    low, high = 0, 1
    while high < LARGEST_BATCH and holds(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _settled(guess: int, holds: Callable[[int], bool]) -> int:
    """The guess, put right by what really holds."""
    while guess and not holds(guess):
        guess -= 1
    while guess < LARGEST_BATCH and holds(guess + 1):
        guess += 1
    return guess


def _on_card(known: Gpu | None, variant: RunConfig) -> RunConfig:
    """With the kernel of fused attention that torch takes on this card."""
    if known is None or variant.sdpa_kernel != "auto":
        return variant
    return replace(variant, sdpa_kernel=sdpa_kernel(known, variant.autocast or variant.dtype))


def fit_report(
    source: Source,
    variants: Sequence[RunConfig],
    seqs: Sequence[int],
    budget: int | Gpu,
    *,
    batch: int | None = None,
    context_bytes: int | None = None,
    progress: Progress = lambda text: None,
) -> FitReport:
    """What fits in a budget of bytes, or on a card: the largest batches, or with `batch` the ways that hold it.

    Raises SelectionError for a length that the model does not have.
    """
    known = budget if isinstance(budget, Gpu) else None
    budget_bytes = budget.memory_bytes if isinstance(budget, Gpu) else budget
    overhead = overhead_bytes(variants[0], context_bytes, known)
    fitter = Fitter(source, variants[0], budget_bytes, overhead, progress)
    really = [_on_card(known, variant) for variant in variants]
    rows = fitter.at_batch(batch, seqs, really) if batch else list(fitter.largest(seqs, really))
    run = {name: value for name, value in variants[0].to_dict().items() if name not in _VARIED}
    about = subject(bert_model(source, replace(variants[0], dtype=FP32.name, checkpointing=NONE), "meta"), source.name)
    return FitReport(
        subject=replace(about, obtained="estimated"),
        run=run,
        budget_bytes=budget_bytes,
        overhead_bytes=overhead,
        card=known,
        asked_batch=batch,
        rows=tuple(rows),
    )
