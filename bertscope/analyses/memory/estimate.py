"""`estimate`: the memory of a step on fake tensors, which allocate nothing.

Forward, backward, recomputation and the optimizer step are dispatched as in a real run. If all layers are equal,
two shallow models run instead of the deep one; the repetition of a layer must turn the first trace into the second.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any

from bertscope.analyses.memory.caching_allocator import HISTORIES, MOVED, AllocatorSettings, replayed, requests
from bertscope.analyses.memory.events import MemoryTrace, in_loop, repeated_events, same_events
from bertscope.analyses.memory.fake_run import fake_run
from bertscope.analyses.memory.growth import MemoryGrowth, TraceOf, break_even, growth_of, memory_growth
from bertscope.analyses.memory.kernels.cuda_kernels import by_thread, card_workspace_bytes, cuda_semantics
from bertscope.analyses.memory.step import Loss, ModelStep, call_with_keywords, meta_inputs, run_model
from bertscope.analyses.memory.summary import memory
from bertscope.analyses.modules.module_tree import row_paths
from bertscope.analyses.modules.repeat import RAN, LayerStack, layer_stacks, shortened
from bertscope.analyses.modules.totals import subject
from bertscope.analyses.parallel.collectives import traffic
from bertscope.analyses.parallel.fake_ranks import fake_ranks, parallelize_fakes
from bertscope.analyses.parallel.strategies import layers_of, rank_groups, units_text, zero_ranks
from bertscope.analyses.saved import saved
from bertscope.analyses.tracing.fake_tensors import fake_copy, fake_like, fake_tensors
from bertscope.analyses.tracing.inputs import loss_of, running, running_module
from bertscope.errors import SelectionError, Text, UnknownValueError, one_line
from bertscope.gpus import CONTEXT_BYTES, Gpu, sdpa_kernel
from bertscope.progress import progress
from bertscope.reports.memory import DeviceTerms, Memory, MemoryReport, Variant
from bertscope.settings.checkpointing import NONE
from bertscope.settings.run_config import FREED, RunConfig
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import nn, value_errors

KEPT_TRACES = 32  # of about 1 MiB: a search needs its last traces, and the next budget those of the same runs
KEPT_DEEP_TRACES = 4  # those of one run with and without recomputation, and of their verification


def estimate_memory(
    source: ModelSource, run_config: RunConfig, model: nn.Module | None = None, trace_of: TraceOf | None = None
) -> Memory:
    """Return the memory of a step of the model of `source`; `model` is this model on meta, if it is built already."""
    trace_of = trace_of or MemoryTraces(source).trace
    rows = row_paths(run_model(source, run_config) if model is None else model)
    return _estimated(trace_of, run_config, rows)


def _estimated(trace_of: TraceOf, run_config: RunConfig, rows: Mapping[str, str], card: Gpu | None = None) -> Memory:
    """Return the memory of a step, and the peak of the same step in another loop."""
    trace = trace_of(run_config)
    found = memory(trace, "estimated", rows, with_histories(device_terms(trace, run_config, card), trace, run_config))
    return replace(found, other_loop_bytes=trace_of(replace(run_config, loop=run_config.other_loop)).peak_bytes)


def allocator_bytes(trace: MemoryTrace, run_config: RunConfig, workspaces: int) -> tuple[int, int]:
    """Return the peaks of the allocated and the reserved bytes of the simulated allocator, workspaces included.

    The allocated bytes are those of the last step, the reserved ones those of the whole run.
    """
    run = requests(trace, by_thread(run_config, workspaces))
    allocator = replayed(run, settings=AllocatorSettings.of(run_config))
    return allocator.peak_allocated_bytes, allocator.peak_reserved_bytes


def device_terms(trace: MemoryTrace, run_config: RunConfig, card: Gpu | None = None) -> DeviceTerms | None:
    """Return the memory of a CUDA device besides the tensors, of a GPU or of any; None for the CPU."""
    if run_config.device != "cuda":
        return None
    workspaces = card_workspace_bytes(run_config, card)
    allocated, reserved = allocator_bytes(trace, run_config, workspaces)
    return DeviceTerms(
        allocated_bytes=allocated,
        workspace_bytes=workspaces,
        reserved_bytes=reserved,
        context_low_bytes=card.context_low_bytes if card else CONTEXT_BYTES[0],
        context_high_bytes=card.context_high_bytes if card else CONTEXT_BYTES[1],
    )


def with_histories(terms: DeviceTerms | None, trace: MemoryTrace, run_config: RunConfig) -> DeviceTerms | None:
    """Return the terms with the range of the allocated bytes over what a process may do before the run."""
    if terms is None:
        return None
    run, settings = requests(trace, by_thread(run_config, terms.workspace_bytes)), AllocatorSettings.of(run_config)
    others = [
        replayed(run, settings=settings, history=name).peak_allocated_bytes for name in HISTORIES if name != MOVED
    ]
    found = [terms.allocated_bytes, *others]
    return replace(terms, allocated_low_bytes=min(found), allocated_high_bytes=max(found))


@dataclass
class MemoryTraces:
    """The memory traces of one source, with a cache of shallow runs and of what is verified for a kind of run."""

    source: ModelSource
    verified: dict[RunConfig, bool] = field(default_factory=dict)
    # Growths of runs whose kind is not verified yet, with their first batch.
    expected: dict[RunConfig, tuple[int, MemoryGrowth]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.freed = lru_cache(maxsize=KEPT_TRACES)(self._freed)  # whatever the loop of the run is
        self.repeated = lru_cache(maxsize=KEPT_DEEP_TRACES)(self._repeated_freed)  # for every loop too
        self.stacks = cache(partial(layer_stacks, self.source))

    def trace(self, run_config: RunConfig) -> MemoryTrace:
        """Return the trace of the step."""
        if not self._repeats(run_config):
            return self._whole(run_config)
        found, kind = self._repeated(run_config, RAN), _kind(run_config)
        if kind not in self.verified:
            batch, growth = self.expected.get(replace(run_config, batch=1), (run_config.batch, None))
            if growth is not None and batch != run_config.batch and growth.gives(found, run_config.batch):
                self.verified[kind] = True
            else:
                longer = self._repeated(run_config, RAN, RAN + 1)
                self.verified[kind] = same_events(longer, in_loop(self._shallow(run_config, RAN + 1), run_config.loop))
        return found if self.verified[kind] else self._whole(run_config)

    def growth(self, run_config: RunConfig, batch: int) -> MemoryGrowth | None:
        """Return the growth of a step's memory from a batch to the next; None if its events change with the batch.

        For a kind of run that is not verified yet, the second run has one unit of layers more than the first. Then the
        trace of any other batch verifies both: that layers repeat, and that bytes grow linearly.
        """
        if _kind(run_config) in self.verified or not self._repeats(run_config):
            return growth_of(self.trace, run_config, batch)
        one, other = (replace(run_config, batch=size) for size in (batch, batch + 1))
        growth = memory_growth(self._repeated(one, RAN), self._repeated(other, RAN + 1), batch)
        if growth is not None:
            self.expected[replace(run_config, batch=1)] = batch, growth
        return growth

    def _repeats(self, run_config: RunConfig) -> tuple[LayerStack, ...]:
        """Return the stacks of layers of which few run, if that takes less time; () if every layer has to run."""
        if run_config.parallelism.row.divides_optimizer:  # the ranks have different layers
            return ()
        stacks = self.stacks(checkpointing=run_config.checkpointing, frozen=run_config.freeze)
        some, more = (sum(len(stack.few(units)) for stack in stacks) for units in (RAN, RAN + 1))
        runs_twice = 2 * some + more < 2 * sum(len(stack.kinds) for stack in stacks)  # such as with another batch
        return stacks if runs_twice else ()

    def _shallow(self, run_config: RunConfig, units: int) -> MemoryTrace:
        """Return the trace of a model of which each run of equal layers has at most so many units.

        Nothing outlives its use in it.
        """
        few = {stack.field: stack.few(units) for stack in self._repeats(run_config)}
        run_config = replace(run_config, checkpointing=shortened(run_config.checkpointing, *few.values()))
        counts = tuple((field, len(kinds)) for field, kinds in few.items())
        return self.freed(replace(run_config, loop=FREED), counts)

    def _whole(self, run_config: RunConfig) -> MemoryTrace:
        """Return the trace of a run of all layers."""
        return in_loop(self.freed(replace(run_config, loop=FREED)), run_config.loop)

    def _freed(self, run_config: RunConfig, counts: tuple[tuple[str, int], ...] = ()) -> MemoryTrace:
        return source_trace(self.source.with_layer_counts(dict(counts)) if counts else self.source, run_config)

    def _repeated(self, run_config: RunConfig, ran: int, wanted: int | None = None) -> MemoryTrace:
        """Return the trace of runs of `wanted` units of layers, by default of all, from those of `ran` units."""
        return in_loop(self.repeated(replace(run_config, loop=FREED), ran, wanted), run_config.loop)

    def _repeated_freed(self, run_config: RunConfig, ran: int, wanted: int | None) -> MemoryTrace:
        trace, stacks = self._shallow(run_config, ran), self._repeats(run_config)
        for stack in stacks:
            trace = repeated_events(trace, stack.path, stack.copies(ran, wanted))
        return replace(trace, traced_layers=sum(len(stack.few(ran)) for stack in stacks))


def _kind(run_config: RunConfig) -> RunConfig:
    """Return what runs of all sizes and loops have in common."""
    return replace(run_config, batch=1, seq=1, loop=FREED)


def source_trace(source: ModelSource, run_config: RunConfig) -> MemoryTrace:
    """Return the trace of a step with every layer of the source, in which nothing outlives its use."""
    compute = partial(_traced, source, run_config)
    return saved("trace", source, run_config, compute, MemoryTrace.to_data, MemoryTrace.from_data)


def _traced(source: ModelSource, run_config: RunConfig) -> MemoryTrace:
    model = run_model(source, run_config)
    inputs = meta_inputs(model, run_config)
    with running(source.implemented_by(run_config.implementation), model, "fake tensors", run_config.input):
        return module_trace(model, inputs, run_config, None, source.layer_path)


def estimate_report(
    source: ModelSource,
    run_configs: Sequence[RunConfig],
    trace_of: TraceOf | None = None,
    card: Gpu | None = None,
) -> MemoryReport:
    """Return the estimates of one model's step for run configurations that differ only in checkpointing.

    `trace_of` returns the trace of a run, by default that of new MemoryTraces. On CUDA the context and the workspaces
    are those of `card`.
    """
    model = run_model(source, run_configs[0])
    trace_of, rows = trace_of or MemoryTraces(source).trace, row_paths(model)
    variants: list[Variant] = []
    for run_config in run_configs:
        progress(Text("estimating {strategy}", strategy=run_config.checkpointing))
        found, collectives = _estimated(trace_of, run_config, rows, card), trace_of(run_config).collectives
        variant = Variant(
            checkpointing=run_config.checkpointing,
            reentrant=run_config.reentrant,
            estimated=found,
            traffic=traffic(collectives, rows, model, run_config.parallelism, run_config.accumulate),
        )
        first = variants[0].estimated if variants else None
        if first and source.layer_path and found.peak.peak_bytes >= first.peak.peak_bytes:
            variant = replace(variant, outlook=break_even(trace_of, run_configs[0], run_config))
        variants.append(variant)
    report = replace(memory_report(model, run_configs[0], tuple(variants), name=source.name), card=card)
    parallelism = run_configs[0].parallelism
    is_one = parallelism.world_size == 1
    if is_one:
        return report
    units = units_text(model, parallelism, source.layer_path)
    return replace(report, ranks=rank_groups(model, parallelism, source.layer_path), units=units)


def estimate(
    module: nn.Module, inputs: Any, run_config: RunConfig, *, loss: Loss | None = None, name: str | None = None
) -> MemoryReport:
    """Estimate the memory of a step of any module, without allocating it or changing the module.

    `inputs` is a tensor, a tuple, or a dictionary of keyword arguments, real or on meta. Backward starts from
    `loss(module, inputs)`; by default from the output's loss, or the sum of its first tensor. The module determines
    sizes and dtypes; with padding above 0, questions such as `mask.all()` are answered as for a mask that hides
    positions. Raises SelectionError for a module that cannot be copied, and for one whose operators depend on the
    values of tensors.
    """
    found = module_memory(module, inputs, run_config, loss)
    variant = Variant(checkpointing=run_config.checkpointing, reentrant=run_config.reentrant, estimated=found)
    return replace(memory_report(module, run_config, (variant,), name=name), inputs_given=True)


def memory_report(
    module: nn.Module,
    run_config: RunConfig,
    variants: tuple[Variant, ...],
    *,
    name: str | None = None,
    machine: str = "",
) -> MemoryReport:
    """Return the report on these variants of a module, with the run that they share."""
    return MemoryReport(
        subject=replace(subject(module, name, run_config.dtype), obtained="measured" if machine else "estimated"),
        run=run_config.changed(checkpointing=NONE),
        machine=machine or "estimated on fake tensors",
        variants=variants,
    )


def module_memory(module: nn.Module, inputs: Any, run_config: RunConfig, loss: Loss | None) -> Memory:
    """Return the memory of a step of any module."""
    with running_module(type(module).__name__, module, "fake tensors"):
        trace = module_trace(module, inputs, run_config, loss)
    return _estimated(lambda run: in_loop(trace, run.loop), run_config, row_paths(module))


def module_trace(
    module: nn.Module,
    inputs: Any,
    run_config: RunConfig,
    loss: Loss | None,
    layer_path: str = "",
) -> MemoryTrace:
    """Return the trace of a step of any module, of one rank of a job; `layer_path` is that of its layers.

    Nothing outlives its use in it; `in_loop` adds what does.
    """
    parallelism = zero_ranks(module, run_config.parallelism)
    given, how = named_inputs(inputs, loss)
    with ExitStack() as stack:
        meshes = stack.enter_context(fake_ranks(parallelism)) if parallelism.world_size > 1 else None
        stack.enter_context(fake_tensors())
        if run_config.device == "cuda":
            stack.enter_context(cuda_semantics(run_config))
        copied = fake_copy(module).train(run_config.mode != "inference")
        buckets = {}
        if meshes is not None:
            buckets = parallelize_fakes(copied, layers_of(copied, layer_path), parallelism, meshes)
        try:
            trace = fake_run(ModelStep(copied, fake_like(given), run_config, loss=how, buckets=buckets))
            if parallelism == run_config.parallelism:
                return trace
            calls = (call._replace(ranks=run_config.parallelism.world_size) for call in trace.collectives)
            return replace(trace, collectives=tuple(calls))
        except value_errors() as error:
            raise UnknownValueError(
                f"the operators of {type(module).__name__} depend on the values of its tensors ({error}), which an "
                "estimate does not have; 'bertscope profile' measures a step"
            ) from None
        except (RuntimeError, NotImplementedError) as error:  # of DTensor, for an operator that it does not divide
            if meshes is None:
                raise
            raise SelectionError(
                f"torch does not run this step with {parallelism.strategy} ({one_line(str(error), limit=160)}); choose "
                "another optimizer, option or strategy"
            ) from None


def named_inputs(inputs: Any, loss: Loss | None) -> tuple[dict[str, Any], Loss]:
    """Return the inputs by name, and the function that computes the loss from them."""
    if isinstance(inputs, Mapping):
        return dict(inputs), loss or call_with_keywords
    given = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)

    def call(module: nn.Module, named: dict[str, Any]) -> Any:
        """Return the loss of the module on its inputs in their order."""
        return loss_of(module(*named.values()))[0]

    return {f"input {number}": value for number, value in enumerate(given)}, loss or call


def on_card(run_config: RunConfig, card: Gpu | None) -> RunConfig:
    """Return the run with the attention kernel that torch chooses on the GPU, unless another one is asked for."""
    if card is None or run_config.sdpa_kernel != "auto":
        return run_config
    return replace(run_config, sdpa_kernel=sdpa_kernel(card, run_config.compute_precision))
