"""`fit`: the largest batch that a memory budget holds, for each variant of a run.

Two traces give the memory growth, from which the search computes a batch. The traces of this batch and of the
next one then verify it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from bertscope.analyses.flops.sweep import FlopsRun
from bertscope.analyses.memory.caching_allocator import replayed
from bertscope.analyses.memory.cuda_kernels import CONTEXT_BYTES, workspace_bytes
from bertscope.analyses.memory.estimate import MemoryTraces
from bertscope.analyses.memory.events import MemoryTrace
from bertscope.analyses.memory.growth import LARGEST_BATCH, growth_of, largest
from bertscope.analyses.memory.step import run_model
from bertscope.analyses.modules.totals import subject
from bertscope.gpus import capability, sdpa_kernel
from bertscope.reports.memory import FitReport, FitRow, Gpu
from bertscope.run_config import NONE, RunConfig
from bertscope.sources.model_source import ModelSource
from bertscope.units import FP32

_VARIED = ("batch", "seq", "checkpointing", "reentrant", "dtype", "autocast")
Progress = Callable[[str], None]


def overhead_bytes(run_config: RunConfig, context_bytes: int | None, known: Gpu | None = None) -> int:
    """Return the bytes a device needs besides tensors: on CUDA workspaces and the context (default: mid-range)."""
    if run_config.device != "cuda":
        return context_bytes or 0
    workspaces = workspace_bytes(run_config, None if known is None else capability(known))
    return workspaces + (sum(CONTEXT_BYTES) // 2 if context_bytes is None else context_bytes)


@dataclass
class Fitter:
    """Search for the batches of one model that fit into one budget."""

    source: ModelSource
    run_config: RunConfig
    budget_bytes: int
    overhead_bytes: int = 0
    progress: Progress = lambda text: None
    traces: MemoryTraces = field(init=False)
    flops: dict[tuple[str, int], int] = field(default_factory=dict)
    recent: dict[RunConfig, MemoryTrace] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.traces = MemoryTraces(self.source)

    def largest_batches(self, seqs: Sequence[int], variants: Iterable[RunConfig]) -> Iterator[FitRow]:
        """Yield for each length and variant the largest batch that fits."""
        for variant in variants:
            for seq in seqs:
                self.progress(f"{variant.checkpointing}, {variant.precision}, seq {seq}")
                run_config = replace(variant, seq=seq)
                batch = self._search(run_config)
                yield self._row(replace(run_config, batch=max(batch, 1)), batch)

    def at_batch(self, batch: int, seqs: Sequence[int], variants: Iterable[RunConfig]) -> list[FitRow]:
        """Return the variants with the result if the batch fits, those with the fewest FLOPs first."""
        rows = []
        for variant in variants:
            for seq in seqs:
                self.progress(f"{variant.checkpointing}, {variant.precision}, seq {seq}")
                run_config = replace(variant, seq=seq, batch=batch)
                rows.append(self._row(run_config, batch if self.peak_bytes(run_config) <= self.budget_bytes else 0))
        return sorted(rows, key=lambda row: (row.seq, not row.fits, row.extra_flops, row.precision != FP32.name))

    def peak_bytes(self, run_config: RunConfig) -> int:
        """Return the bytes that the budget must hold at the peak of this step."""
        return self._trace(run_config).peak_bytes + self.overhead_bytes

    def _trace(self, run_config: RunConfig) -> MemoryTrace:
        """Return the trace of a step; the last few are cached, since the rows need them again."""
        if run_config not in self.recent:
            for old in list(self.recent)[:-3]:
                del self.recent[old]
            self.recent[run_config] = self.traces.trace(run_config)[0]
        return self.recent[run_config]

    def _search(self, run_config: RunConfig) -> int:
        """Return the largest batch that fits, 0 for none: computed from the growth, then verified by traces."""
        growth = growth_of(lambda run: self.traces.trace(run)[0], run_config)
        limit = self.budget_bytes - self.overhead_bytes

        def fits(batch: int) -> bool:
            """Return True if the trace of that batch fits into the budget."""
            return self.peak_bytes(replace(run_config, batch=batch)) <= self.budget_bytes

        return _verified(largest(lambda batch: growth.peak_bytes(batch) <= limit), fits) if growth else largest(fits)

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
        """Return the FLOPs of the step: those of one sequence, times the batch."""
        training = run_config.mode == "training"
        checkpointing = run_config.checkpointing if training else NONE
        if (checkpointing, run_config.seq) not in self.flops:
            mode = "training" if training else "inference"
            run = FlopsRun(source=self.source, mode=mode, checkpointing=checkpointing, freeze=run_config.freeze)
            self.flops[checkpointing, run_config.seq] = run.at(1, run_config.seq).rows[0].total.matmul_flops
        return run_config.batch * self.flops[checkpointing, run_config.seq]


def _verified(guess: int, fits: Callable[[int], bool]) -> int:
    """Return the largest batch that fits, searched from the guess on."""
    while guess and not fits(guess):
        guess -= 1
    while guess < LARGEST_BATCH and fits(guess + 1):
        guess += 1
    return guess


def _on_gpu(known: Gpu | None, variant: RunConfig) -> RunConfig:
    """Return the variant with the kernel of fused attention that torch chooses on this GPU."""
    if known is None or variant.sdpa_kernel != "auto":
        return variant
    return replace(variant, sdpa_kernel=sdpa_kernel(known, variant.autocast or variant.dtype))


def fit_report(
    source: ModelSource,
    variants: Sequence[RunConfig],
    seqs: Sequence[int],
    budget: int | Gpu,
    *,
    batch: int | None = None,
    context_bytes: int | None = None,
    progress: Progress = lambda text: None,
) -> FitReport:
    """Return the largest batches that fit in a budget of bytes or on a GPU, or with `batch` the variants that fit.

    Raises SelectionError for a length that the model does not have.
    """
    source = source.require("fit")
    known = budget if isinstance(budget, Gpu) else None
    budget_bytes = budget.memory_bytes if isinstance(budget, Gpu) else budget
    overhead = overhead_bytes(variants[0], context_bytes, known)
    fitter = Fitter(source, variants[0], budget_bytes, overhead, progress)
    asked = [_on_gpu(known, variant) for variant in variants]
    rows = fitter.at_batch(batch, seqs, asked) if batch else list(fitter.largest_batches(seqs, asked))
    run = {name: value for name, value in variants[0].to_dict().items() if name not in _VARIED}
    about = subject(run_model(source, replace(variants[0], dtype=FP32.name, checkpointing=NONE)), source.name)
    return FitReport(
        subject=replace(about, obtained="estimated"),
        run=run,
        budget_bytes=budget_bytes,
        overhead_bytes=overhead,
        card=known,
        asked_batch=batch,
        rows=tuple(rows),
    )
