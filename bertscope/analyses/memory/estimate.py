"""`estimate`: the memory of a step on fake tensors, which allocate nothing.

Forward, backward, recomputation and the optimizer step are dispatched as in a real run. If all layers are equal,
two shallow models run instead of the deep one; the repetition of a layer must turn the first trace into the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from bertscope.analyses.memory.caching_allocator import replayed
from bertscope.analyses.memory.cpu_scratch import cpu_scratch_bytes
from bertscope.analyses.memory.cuda_kernels import CONTEXT_BYTES, cuda_scratch_bytes, cuda_semantics, workspace_bytes
from bertscope.analyses.memory.events import MemoryTrace
from bertscope.analyses.memory.fake_run import recorded
from bertscope.analyses.memory.growth import break_even
from bertscope.analyses.memory.repeat_events import repeated_events, same_events
from bertscope.analyses.memory.step import (
    Loss,
    call_with_keywords,
    make_step,
    meta_inputs,
    run_model,
)
from bertscope.analyses.memory.summary import memory
from bertscope.analyses.modules.module_tree import row_paths
from bertscope.analyses.modules.repeat import RAN, period
from bertscope.analyses.modules.totals import subject
from bertscope.analyses.tracing.fake_tensors import fake_copy, fake_like, fake_tensors
from bertscope.analyses.tracing.inputs import loss_of
from bertscope.errors import SelectionError
from bertscope.reports.memory import BreakEven, DeviceTerms, Memory, MemoryReport, Variant
from bertscope.run_config import RunConfig
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import nn, value_errors

# Fields of RunConfig that apply to a given module, which itself determines sizes, precision and checkpointing.
MODULE_FIELDS = ("mode", "autocast", "optimizer", "implementation", "device", "sdpa_kernel", "padding")


def estimate_memory(source: ModelSource, run_config: RunConfig) -> Memory:
    """Return the memory of a step of the model of `source`."""
    trace, ran = MemoryTraces(source).trace(run_config)
    rows = row_paths(run_model(source, run_config))
    return memory(trace, "estimated", device_terms(trace, run_config), ran, rows)


def device_terms(trace: MemoryTrace, run_config: RunConfig) -> DeviceTerms | None:
    """Return the memory of a CUDA device besides the tensors; None for the CPU."""
    if run_config.device != "cuda":
        return None
    workspaces = workspace_bytes(run_config)
    return DeviceTerms(
        allocated_bytes=trace.peak_bytes + workspaces,
        workspace_bytes=workspaces,
        reserved_bytes=replayed(trace).peak_reserved_bytes + workspaces,
        context_low_bytes=CONTEXT_BYTES[0],
        context_high_bytes=CONTEXT_BYTES[1],
    )


@dataclass
class MemoryTraces:
    """The memory traces of one source, with a cache of the runs for which repeated events are verified."""

    source: ModelSource
    verified: dict[RunConfig, bool] = field(default_factory=dict)

    def trace(self, run_config: RunConfig) -> tuple[MemoryTrace, int | None]:
        """Return the trace of the step, and the number of layers that ran; None for all."""
        repeats = period(self.source, checkpointing=run_config.checkpointing, freeze=run_config.freeze,
                         reentrant=run_config.reentrant)  # fmt: skip
        units, rest = divmod(self.source.layers, repeats) if repeats else (0, 0)
        if units > 2 * RAN + 1:
            ran, path = RAN * repeats + rest, self.source.layer_path
            short = source_trace(self.source.with_layers(ran), run_config)
            kind = replace(run_config, batch=1, seq=1)
            if kind not in self.verified:
                longer = source_trace(self.source.with_layers(ran + repeats), run_config)
                self.verified[kind] = same_events(repeated_events(short, path, RAN, RAN + 1, repeats), longer)
            if self.verified[kind]:
                return repeated_events(short, path, RAN, units, repeats), ran
        return source_trace(self.source, run_config), None


def source_trace(source: ModelSource, run_config: RunConfig) -> MemoryTrace:
    """Return the trace of a step with every layer of the source."""
    model = run_model(source, run_config)
    inputs = meta_inputs(model, run_config)
    with source.running("fake tensors"):
        return module_trace(model, inputs, run_config, None)


def _fake_trace(module: nn.Module, inputs: dict[str, Any], run_config: RunConfig, loss: Loss) -> MemoryTrace:
    """Return the trace of one step of a fake module with fake inputs."""
    if run_config.device != "cuda":
        return recorded(make_step(module, inputs, run_config, loss=loss), scratch=cpu_scratch_bytes)
    return recorded(make_step(module, inputs, run_config, loss=loss), on_device=True, scratch=cuda_scratch_bytes)


@contextmanager
def _fakes(run_config: RunConfig) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(fake_tensors())
        if run_config.device == "cuda":
            stack.enter_context(cuda_semantics(run_config))
        yield


def estimated_variant(source: ModelSource, run_config: RunConfig) -> Variant:
    """Return the estimate for one run as a variant of a report."""
    return Variant(
        checkpointing=run_config.checkpointing,
        reentrant=run_config.reentrant,
        estimated=estimate_memory(source, run_config),
    )


def estimate_report(
    source: ModelSource, run_configs: Sequence[RunConfig], progress: Callable[[str], None] = lambda text: None
) -> MemoryReport:
    """Return the estimates of one model's step for several run configurations."""
    variants: list[Variant] = []
    for run_config in run_configs:
        progress(f"estimating {run_config.checkpointing}")
        variant = estimated_variant(source, run_config)
        if variants and source.layer_path and _peak_bytes(variant) >= _peak_bytes(variants[0]):
            variant = replace(variant, outlook=estimated_break_even(source, run_configs[0], run_config))
        variants.append(variant)
    return memory_report(run_model(source, run_configs[0]), run_configs[0], tuple(variants), name=source.name)


def _peak_bytes(variant: Variant) -> int:
    return variant.memory.peak.peak_bytes if variant.memory else 0


def estimated_break_even(source: ModelSource, plain: RunConfig, other: RunConfig) -> BreakEven | None:
    """Return the batch from which `other` needs less memory than `plain`."""
    traces = MemoryTraces(source)
    return break_even(lambda run_config: traces.trace(run_config)[0], plain, other)


def estimate(
    module: nn.Module, inputs: Any, *, loss: Loss | None = None, name: str | None = None, **run: Any
) -> MemoryReport:
    """Estimate the memory of a step of any module, without allocating it or changing the module.

    `inputs` is a tensor, a tuple, or a dictionary of keyword arguments, real or on meta. Backward starts from
    `loss(module, inputs)`; by default from the output's loss, or the sum of its first tensor. `run` are fields of
    RunConfig: mode, autocast, optimizer, implementation, device, sdpa_kernel, padding; with padding above 0,
    questions such as `mask.all()` are answered as for a mask that hides positions. Raises SelectionError for other
    fields, for a module that cannot be copied, and for one whose operators depend on the values of tensors.
    """
    run_config = module_run(run)
    found = module_memory(module, inputs, run_config, loss)
    variant = Variant(checkpointing=run_config.checkpointing, reentrant=run_config.reentrant, estimated=found)
    return module_report(module, run_config, variant, name=name)


def module_run(run: Mapping[str, Any]) -> RunConfig:
    """Return the RunConfig for a given module; raise SelectionError for fields that the module itself determines."""
    for name in run:
        if name not in MODULE_FIELDS:
            raise SelectionError(
                f"{name} is determined by the module, or no field of a run; allowed: {', '.join(MODULE_FIELDS)}"
            )
    return RunConfig(**run)


def module_report(
    module: nn.Module, run_config: RunConfig, variant: Variant, *, name: str | None = None, machine: str = ""
) -> MemoryReport:
    """Return the report on one variant of a given module, with only the fields of the run that apply to it."""
    report = memory_report(module, run_config, (variant,), name=name, machine=machine)
    return replace(report, run={name: value for name, value in report.run.items() if name in MODULE_FIELDS})


def memory_report(
    module: nn.Module,
    run_config: RunConfig,
    variants: tuple[Variant, ...],
    *,
    name: str | None = None,
    machine: str = "",
) -> MemoryReport:
    """Return the report on these variants of a module."""
    return MemoryReport(
        subject=replace(subject(module, name, run_config.dtype), obtained="measured" if machine else "estimated"),
        run={
            field: value for field, value in run_config.to_dict().items() if field not in ("checkpointing", "reentrant")
        },
        machine=machine or f"{run_config.device} semantics, on fake tensors",
        variants=variants,
    )


def module_memory(module: nn.Module, inputs: Any, run_config: RunConfig, loss: Loss | None) -> Memory:
    """Return the memory of a step of any module."""
    trace = module_trace(module, inputs, run_config, loss)
    return memory(trace, "estimated", device_terms(trace, run_config), rows=row_paths(module))


def module_trace(module: nn.Module, inputs: Any, run_config: RunConfig, loss: Loss | None) -> MemoryTrace:
    """Return the trace of a step of any module."""
    given, how = named_inputs(inputs, loss)
    with _fakes(run_config):
        copied = fake_copy(module).train(run_config.mode != "inference")
        try:
            return _fake_trace(copied, fake_like(given), run_config, how)
        except value_errors() as error:
            raise SelectionError(
                f"what {type(module).__name__} does depends on the values of its tensors ({error}); measure it instead"
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
