"""`estimate`: the memory of a step from fake tensors, with nothing allocated.

Forward, backward, recomputation and the optimizer's step are really dispatched. Where layers are alike,
two shallow models run and stand for the deep one, if the rule that lengthens the first gives the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from bertscope._torch import nn
from bertscope.analyses.allocator import replayed
from bertscope.analyses.cuda import CONTEXT_BYTES, WORKSPACE_BYTES, cuda_semantics, scratch_bytes
from bertscope.analyses.fake import fake_copy
from bertscope.analyses.live import recorded
from bertscope.analyses.memory import memory
from bertscope.analyses.step import Step, bert_inputs, bert_model, make_step
from bertscope.analyses.tape import Tape
from bertscope.analyses.unroll import same_course, unrolled
from bertscope.memory_reports import DeviceTerms, Memory, Variant
from bertscope.presets import Source
from bertscope.spec import Checkpointing, RunSpec

RUN_UNITS = 3


def estimate_memory(source: Source, spec: RunSpec) -> Memory:
    """The memory of a step of the model that `source` names."""
    tape, ran = Tapes(source).tape(spec)
    return memory(tape, "estimated", device_terms(tape, spec), ran)


def device_terms(tape: Tape, spec: RunSpec) -> DeviceTerms | None:
    """What a CUDA device holds beside the tensors; None for the host."""
    if spec.device != "cuda":
        return None
    return DeviceTerms(
        allocated_bytes=tape.peak_bytes + WORKSPACE_BYTES,
        workspace_bytes=WORKSPACE_BYTES,
        reserved_bytes=replayed(tape).peak_reserved_bytes + WORKSPACE_BYTES,
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
    return fake_tape(lambda: (fake_copy(model), bert_inputs(model, spec, "cpu")), spec)


def fake_tape(make: Callable[[], tuple[nn.Module, dict[str, Any]]], spec: RunSpec) -> Tape:
    """The tape of one step of what `make` gives under FakeTensorMode."""
    with _fakes(spec):
        module, inputs = make()
        on_device = spec.device == "cuda"
        return recorded(_device_step(module, inputs, spec), on_device=on_device,
                        scratch=scratch_bytes if on_device else None)  # fmt: skip


def _device_step(module: nn.Module, inputs: dict[str, Any], spec: RunSpec) -> Step:
    """On CUDA torch's optimizers go over all parameters at once unless told otherwise."""
    if spec.device == "cuda" and spec.implementation == "default":
        spec = replace(spec, implementation="foreach")
    return make_step(module, inputs, spec)


@contextmanager
def _fakes(spec: RunSpec) -> Iterator[None]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        if spec.device == "cuda":
            stack.enter_context(cuda_semantics(spec))
        yield


def estimated_variant(source: Source, spec: RunSpec) -> Variant:
    """One line of a report: the estimate for one strategy."""
    return Variant(checkpointing=spec.checkpointing, reentrant=spec.reentrant, estimated=estimate_memory(source, spec))
