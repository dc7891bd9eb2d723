"""`fit`: the largest batch that a memory budget holds, for each variant of a run.

Two traces give the memory growth, from which the search computes a batch. The traces of this batch and of the
next one then verify it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from bertscope.analyses.memory.caching_allocator import replayed
from bertscope.analyses.memory.cuda_kernels import CONTEXT_BYTES, workspace_bytes
from bertscope.analyses.memory.estimate import MemoryTraces
from bertscope.analyses.memory.growth import LARGEST_BATCH, growth_of, largest
from bertscope.analyses.memory.step import run_model, step_flops
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
    budget_bytes: int
    overhead_bytes: int = 0

    def __post_init__(self) -> None:
        self.trace = lru_cache(maxsize=4)(MemoryTraces(self.source).trace)  # a row needs the last traces of its search
        self.tensor_bytes = self.budget_bytes - self.overhead_bytes
        self.flops: dict[tuple[str, int], int] = {}  # of one sequence

    def row(self, run_config: RunConfig, batch: int | None = None) -> FitRow:
        """Return the result for this batch, by default for the largest that fits."""
        run_config = replace(run_config, batch=batch or max(self._search(run_config), 1))
        peak = self.peak_bytes(run_config)
        fits = peak <= self.budget_bytes
        is_replayed = fits and run_config.device == "cuda"
        flops, plain = self._flops(run_config), self._flops(replace(run_config, checkpointing=NONE))
        return FitRow(
            seq=run_config.seq,
            checkpointing=run_config.checkpointing,
            precision=run_config.precision,
            batch=run_config.batch if fits else 0,
            peak_bytes=peak,
            next_bytes=self.peak_bytes(replace(run_config, batch=run_config.batch + 1)) if fits else peak,
            fits=fits,
            is_tight=is_replayed and replayed(self.trace(run_config), self.tensor_bytes).missing_bytes > 0,
            step_flops=flops,
            extra_flops=flops / plain - 1 if plain else 0.0,
        )

    def peak_bytes(self, run_config: RunConfig) -> int:
        """Return the bytes that the budget must hold at the peak of this step."""
        return self.trace(run_config).peak_bytes + self.overhead_bytes

    def _search(self, run_config: RunConfig) -> int:
        """Return the largest batch that fits, 0 for none: computed from the growth, then verified by traces."""
        growth = growth_of(self.trace, run_config)

        def fits(batch: int) -> bool:
            """Return True if the trace of that batch fits into the budget."""
            return self.peak_bytes(replace(run_config, batch=batch)) <= self.budget_bytes

        batch = largest(lambda size: growth.peak_bytes(size) <= self.tensor_bytes) if growth else largest(fits)
        while batch and not fits(batch):
            batch -= 1
        while batch < LARGEST_BATCH and fits(batch + 1):
            batch += 1
        return batch

    def _flops(self, run_config: RunConfig) -> int:
        """Return the FLOPs of the step: those of one sequence, times the batch."""
        key = run_config.checkpointing, run_config.seq
        if key not in self.flops:
            self.flops[key] = step_flops(self.source, replace(run_config, batch=1))
        return run_config.batch * self.flops[key]


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
    fitter = Fitter(source, budget_bytes, overhead)
    rows = []
    for variant in variants:
        kernel = variant.sdpa_kernel
        if known is not None and kernel == "auto":
            kernel = sdpa_kernel(known, variant.autocast or variant.dtype)
        for seq in seqs:
            progress(f"{variant.checkpointing}, {variant.precision}, seq {seq}")
            rows.append(fitter.row(replace(variant, seq=seq, sdpa_kernel=kernel), batch))
    if batch:  # the variants that fit first, those with the fewest FLOPs before the others
        rows.sort(key=lambda row: (row.seq, not row.fits, row.extra_flops, row.precision != FP32.name))
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
