"""`estimate`: the memory of a step from fake tensors, with nothing allocated.

Forward, backward, recomputation and the optimizer's step are really dispatched. Where layers are alike,
two shallow models run and stand for the deep one, if the rule that lengthens the first gives the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from bertscope.analyses.memory import cpu_scratch as host
from bertscope.analyses.memory.caching_allocator import replayed
from bertscope.analyses.memory.cuda_kernels import CONTEXT_BYTES, cuda_semantics, scratch_bytes, workspace_bytes
from bertscope.analyses.memory.events import Tape
from bertscope.analyses.memory.fake_run import recorded
from bertscope.analyses.memory.repeat_events import same_course, unrolled
from bertscope.analyses.memory.step import Loss, bert_inputs, bert_model, call_with_keywords, make_step
from bertscope.analyses.memory.summary import memory
from bertscope.analyses.modules.totals import subject
from bertscope.analyses.tracing.fake_tensors import fake_copy, fake_like, fake_tensors
from bertscope.analyses.tracing.inputs import loss_of
from bertscope.errors import SelectionError
from bertscope.reports.memory import DeviceTerms, Memory, MemoryReport, Outlook, Variant
from bertscope.run_config import Checkpointing, RunSpec
from bertscope.sources.presets import Source
from bertscope.torch_access import nn

RUN_UNITS = 3
# What can be asked of a module that is given as it is; sizes, precision and checkpointing are its own.
MODULE_FIELDS = ("mode", "autocast", "optimizer", "implementation", "device", "sdpa_kernel", "padding")


def estimate_memory(source: Source, spec: RunSpec) -> Memory:
    """The memory of a step of the model that `source` names."""
    tape, ran = Tapes(source).tape(spec)
    return memory(tape, "estimated", device_terms(tape, spec), ran)


def device_terms(tape: Tape, spec: RunSpec) -> DeviceTerms | None:
    """What a CUDA device holds beside the tensors; None for the host."""
    if spec.device != "cuda":
        return None
    workspaces = workspace_bytes(spec)
    return DeviceTerms(
        allocated_bytes=tape.peak_bytes + workspaces,
        workspace_bytes=workspaces,
        reserved_bytes=replayed(tape).peak_reserved_bytes + workspaces,
        context_low_bytes=CONTEXT_BYTES[0],
        context_high_bytes=CONTEXT_BYTES[1],
    )


@dataclass
class Tapes:
    """The tapes of one source's steps; it remembers for which runs few layers have proved to stand for all."""

    source: Source
    proved: dict[RunSpec, bool] = field(default_factory=dict)

    def tape(self, spec: RunSpec) -> tuple[Tape, int | None]:
        """The tape of the step, and how many layers ran where not all did."""
        layers = self.source.config.num_hidden_layers
        period = _period(self.source, spec)
        units, rest = divmod(layers, period) if period else (0, 0)
        if units > 2 * RUN_UNITS + 1:
            ran = RUN_UNITS * period + rest
            short = _run(self.source, spec, ran)
            kind = replace(spec, batch=1, seq=1)
            if kind not in self.proved:
                longer = _run(self.source, spec, ran + period)
                self.proved[kind] = same_course(unrolled(short, RUN_UNITS, RUN_UNITS + 1, period), longer)
            if self.proved[kind]:
                return unrolled(short, RUN_UNITS, units, period), ran
        return _run(self.source, spec, layers), None


def _period(source: Source, spec: RunSpec) -> int:
    """After how many layers a model repeats itself; 0 where nothing says that it does."""
    chosen = Checkpointing.parse(spec.checkpointing)
    if spec.freeze or source.config.pruned_heads or spec.reentrant or (chosen and chosen.layers is not None):
        return 0
    return chosen.every if chosen else 1


def _run(source: Source, spec: RunSpec, layers: int) -> Tape:
    model = bert_model(source, spec, "meta", layers)
    with _fakes(spec):
        return _fake_tape(fake_copy(model), bert_inputs(model, spec, "cpu"), spec, call_with_keywords)


def _fake_tape(module: nn.Module, inputs: dict[str, Any], spec: RunSpec, loss: Loss) -> Tape:
    """The tape of one step of a module and inputs that are fake already."""
    if spec.device != "cuda":
        return recorded(make_step(module, inputs, spec, loss=loss), scratch=host.scratch_bytes)
    # On CUDA torch's optimizers go over all parameters at once, but for Adafactor, which is there to save memory.
    if spec.implementation == "default" and spec.optimizer != "adafactor":
        spec = replace(spec, implementation="foreach")
    return recorded(make_step(module, inputs, spec, loss=loss), on_device=True, scratch=scratch_bytes)


@contextmanager
def _fakes(spec: RunSpec) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(fake_tensors())
        if spec.device == "cuda":
            stack.enter_context(cuda_semantics(spec))
        yield


def estimated_variant(source: Source, spec: RunSpec) -> Variant:
    """One line of a report: the estimate for one strategy."""
    return Variant(checkpointing=spec.checkpointing, reentrant=spec.reentrant, estimated=estimate_memory(source, spec))


def estimate_report(
    source: Source, specs: Sequence[RunSpec], progress: Callable[[str], None] = lambda text: None
) -> MemoryReport:
    """The estimates of one model's step in several ways."""
    variants: list[Variant] = []
    for spec in specs:
        progress(f"estimating {spec.checkpointing}")
        variant = estimated_variant(source, spec)
        if variants and _peak_bytes(variant) >= _peak_bytes(variants[0]):
            variant = replace(variant, outlook=outlook(source, specs[0], spec))
        variants.append(variant)
    return memory_report(bert_model(source, specs[0], "meta"), specs[0], tuple(variants), name=source.name)


def _peak_bytes(variant: Variant) -> int:
    return variant.memory.peak.peak_bytes if variant.memory else 0


def outlook(source: Source, plain: RunSpec, other: RunSpec) -> Outlook | None:
    """How the peaks of two ways compare at other batches."""
    from bertscope.analyses.memory.fit import outlook_of  # which asks this room for tapes

    return outlook_of(Tapes(source), plain, other)


def estimate(
    module: nn.Module, inputs: Any, *, loss: Loss | None = None, name: str | None = None, **run: Any
) -> MemoryReport:
    """The memory of a step of any module, with nothing allocated; the module stays as it is.

    `inputs` is a tensor, a tuple, or a dictionary of keywords, real or on meta. `loss(module, inputs)` tells
    what the step goes back from; without it the output's loss, or the sum of its first tensor. `run` are
    fields of RunSpec: mode, autocast, optimizer, implementation, device, sdpa_kernel; with `padding` above 0
    a module that asks whether anything is masked is told that it is. Raises SelectionError for other fields,
    where the module cannot be copied, or where what it does depends on values.
    """
    spec = module_run(run)
    found = module_memory(module, inputs, spec, loss)
    variant = Variant(checkpointing=spec.checkpointing, reentrant=spec.reentrant, estimated=found)
    return module_report(module, spec, variant, name=name)


def module_run(run: Mapping[str, Any]) -> RunSpec:
    """The RunSpec for a module that is given as it is; raises SelectionError for what the module itself settles."""
    for name in run:
        if name not in MODULE_FIELDS:
            raise SelectionError(
                f"{name} is the module's own affair, or no field of a run; allowed: {', '.join(MODULE_FIELDS)}"
            )
    return RunSpec(**run)


def module_report(
    module: nn.Module, spec: RunSpec, variant: Variant, *, name: str | None = None, machine: str = ""
) -> MemoryReport:
    """One variant of a module that is given as it is: of the run only what concerns it."""
    report = memory_report(module, spec, (variant,), name=name, machine=machine)
    return replace(report, run={name: value for name, value in report.run.items() if name in MODULE_FIELDS})


def memory_report(
    module: nn.Module, spec: RunSpec, variants: tuple[Variant, ...], *, name: str | None = None, machine: str = ""
) -> MemoryReport:
    """The variants with what they are about."""
    return MemoryReport(
        subject=replace(subject(module, name, spec.dtype), obtained="measured" if machine else "estimated"),
        run={field: value for field, value in spec.to_dict().items() if field not in ("checkpointing", "reentrant")},
        machine=machine or f"{spec.device} semantics, on fake tensors",
        variants=variants,
    )


def module_memory(module: nn.Module, inputs: Any, spec: RunSpec, loss: Loss | None) -> Memory:
    """The memory of a step of any module."""
    tape = module_tape(module, inputs, spec, loss)
    return memory(tape, "estimated", device_terms(tape, spec))


def module_tape(module: nn.Module, inputs: Any, spec: RunSpec, loss: Loss | None) -> Tape:
    """The tape of a step of any module."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    given, how = named_inputs(inputs, loss)
    with _fakes(spec):
        copied = fake_copy(module).train(spec.mode != "inference")
        try:
            return _fake_tape(copied, fake_like(given), spec, how)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise SelectionError(
                f"what {type(module).__name__} does depends on the values of its tensors ({error}); measure it instead"
            ) from None


def named_inputs(inputs: Any, loss: Loss | None) -> tuple[dict[str, Any], Loss]:
    """Inputs under names, and how the step is computed from them."""
    if isinstance(inputs, Mapping):
        return dict(inputs), loss or call_with_keywords
    given = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)

    def call(module: nn.Module, named: dict[str, Any]) -> Any:
        """The module on its inputs in their order."""
        return loss_of(module(*named.values()))[0]

    return {f"input {number}": value for number, value in enumerate(given)}, loss or call
