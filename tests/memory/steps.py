"""One step twice: estimated on fake tensors, and really run under torch's profiler."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bertscope import load
from bertscope.measure.profiler_run import measured
from bertscope.memory import fit
from bertscope.memory.derived_traces import in_loop
from bertscope.memory.estimate import MemoryTraces, source_trace
from bertscope.memory.simulator import Simulator
from bertscope.memory.step import ModelStep, real_inputs, run_model
from bertscope.memory.trace import MemoryTrace
from bertscope.reports.memory import FitReport
from bertscope.settings.run_config import RunConfig
from bertscope.sources.bert import BertSource
from bertscope.torch_access import has_bf16_products

SMALL = {
    "vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40,
    "max_position_embeddings": 32,
}  # fmt: skip
SMALL_YAML = """architecture: BertForMaskedLM
config: {vocab_size: 99, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 40}
"""
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")


def small(architecture: str = "BertForMaskedLM", attention: str = "sdpa", **fields: Any) -> BertSource:
    """A model of one layer, 16 wide, or as `fields` say."""
    source = load("bert-tiny", architecture=architecture, attention=attention)
    return replace(source, config=replace(source.config, **{**SMALL, **fields}))


def fit_report(
    source: Any, runs: Sequence[RunConfig], seqs: Sequence[int], memory: Any, *, batch: int | None = None,
    context_bytes: int | None = None, known: Simulator | None = None,
) -> FitReport:  # fmt: skip
    """The report of `fit` for these runs at each length, in a budget or on a GPU."""
    simulator = (known or Simulator(source)).limited(runs[0], memory, context_bytes)
    return fit.fit_report(simulator, [replace(run, seq=seq) for run in runs for seq in seqs], batch=batch)


def estimated_trace(source: BertSource, run_config: RunConfig) -> MemoryTrace:
    """The trace from fake tensors."""
    return MemoryTraces(source).trace(run_config)


def whole_trace(source: Any, run_config: RunConfig) -> MemoryTrace:
    """The trace of a run of all layers, without the one that repeats a few."""
    return in_loop(source_trace(source, replace(run_config, loop="freed")), run_config)


def real_trace(source: BertSource, run_config: RunConfig) -> MemoryTrace:
    """The allocator's own trace of the same step, really run, of which both CPUs with and without AMX are witnesses."""
    model = run_model(source, run_config, "cpu")
    step = ModelStep(model, real_inputs(model, run_config, "cpu"), run_config)
    step.run_first_steps()
    return without_scratch(measured(step), run_config.precision)


def without_scratch(trace: MemoryTrace, precision: str) -> MemoryTrace:
    """The trace without what a matrix product takes and gives back before anything else happens.

    oneDNN lays 16-bit operands out anew for its own use. It is estimated in bf16 on CPUs with AVX-512 for bf16 only,
    where the trace stays whole; in fp16, which CPUs with AVX-512 for fp16 compute so too, it is not estimated.
    """
    if has_bf16_products() and not precision.endswith("fp16"):
        return trace
    events, kept = list(trace.events), []
    place = 0
    while place < len(events):
        here, following = events[place], events[place + 1] if place + 1 < len(events) else None
        passes = following is not None and following.size_bytes == -here.size_bytes < 0
        if passes and here.operator in _PRODUCTS and here.block == following.block:
            place += 2
            continue
        kept.append(here)
        place += 1
    return MemoryTrace.of(trace.state, kept, trace.granule_bytes, trace.collectives)
