"""The trace of a step that really runs on the host: the allocator's own events, from torch's profiler.

Sizes, order and addresses are the allocator's; only what a block is, is read from the run around it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from bertscope.analyses.memory.events import Allocation, Block, MemoryTrace, MemoryTraceRecorder
from bertscope.analyses.memory.step import BACKWARD, FORWARD, Loss, Step, make_step
from bertscope.analyses.memory.summary import memory
from bertscope.analyses.modules.module_tree import row_paths
from bertscope.errors import SelectionError
from bertscope.reports.memory import DeviceTerms, MemoryReport, Timing, Variant
from bertscope.torch_access import nn, torch

_PHASE, _MODULE = "bertscope phase ", "bertscope module "
_NODE = "autograd::engine::evaluate_function: "


def measured(step: Step, told: Callable[[str], None] = lambda phase: None, device: str = "cpu") -> MemoryTrace:
    """The trace of one step, run for real under the profiler; its optimizer state must be there.

    `told` hears of each phase as it begins.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    marks = _Marks(step, told)
    state = tuple(_state(step, device))
    with marks.around(step.model), profile(activities=activities, profile_memory=True) as profiler:
        step.run(marks.phase)
    reader = _Reader(marks.gradients, device)
    for event in profiler.profiler.kineto_results.experimental_event_tree():
        reader.read(event, _Place())
    reader.recorder.state.extend(state)
    return reader.trace()


def profile(
    module: nn.Module, inputs: Any, *, loss: Loss | None = None, steps: int = 3, name: str | None = None, **run: Any
) -> MemoryReport:
    """Run steps of any module here and now, and measure memory and time beside the estimate.

    `inputs`, `loss` and `run` as in `estimate`; module and inputs must lie on the device of `run`. The
    optimizer has a learning rate of 0, and gradients and mode of the module are put back, but what a forward
    pass changes by itself (running statistics, the random state) stays changed. Raises SelectionError for a
    wrong question.
    """
    from bertscope.analyses.memory.estimate import module_memory, module_report, module_run, named_inputs

    run_config = module_run(run)
    if run_config.device == "cuda" and not torch.cuda.is_available():
        raise SelectionError("torch finds no CUDA device here; use device cpu, or estimate with device cuda")
    given, how = named_inputs(inputs, loss)
    estimated = module_memory(module, inputs, run_config, loss)
    with _put_back(module):
        step = make_step(module.train(run_config.mode != "inference"), given, run_config, run_config.device, how)
        step.make_optimizer_state()
        started = time.perf_counter()
        trace = measured(step, device=run_config.device)
        warmup = time.perf_counter() - started
        seconds = tuple(_seconds(step) for _ in range(steps))
    timing = Timing(
        warmup_seconds=warmup,
        step_seconds=seconds,
        median_seconds=statistics.median(seconds) if seconds else 0.0,
    )
    variant = Variant(
        checkpointing=run_config.checkpointing,
        reentrant=run_config.reentrant,
        estimated=estimated,
        measured=memory(trace, "measured", rows=row_paths(module)),
        timing=timing,
    )
    machine = f"this process, {torch.get_num_threads()} threads"
    return module_report(module, run_config, variant, name=name, machine=machine)


@contextmanager
def _put_back(module: nn.Module) -> Iterator[None]:
    """Modes and gradients as they were, whatever happens in between."""
    modes = {part: part.training for part in module.modules()}
    gradients = [(param, param.grad) for param in module.parameters()]
    module.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode
        for param, gradient in gradients:
            param.grad = gradient


def _seconds(step: Step) -> float:
    started = time.perf_counter()
    step.run()
    if step.kind == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _state(step: Step, device: str) -> Iterator[tuple[Block, int]]:
    seen: set[int] = set()
    for part, path, tensor in step.state():
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and storage.nbytes() and tensor.device.type == device:
            seen.add(storage._cdata)
            yield Block(part, path, "", tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")), storage.nbytes()


class _Marks:
    """Names in the profile: the phases, the modules; and, beside it, where each phase's gradients lie."""

    def __init__(self, step: Step, told: Callable[[str], None]) -> None:
        self.step, self.told = step, told
        self.gradients: dict[str, set[int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One phase of the step."""
        self.told(name)
        with torch.profiler.record_function(_PHASE + name):
            yield
        grads = (param.grad for param in self.step.model.parameters())
        self.gradients[name] = {grad.untyped_storage().data_ptr() for grad in grads if grad is not None}

    @contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """Every module's forward inside a name."""
        open_names: list[tuple[str, Any]] = []
        with ExitStack() as stack:
            for path, module in model.named_modules():
                enter = module.register_forward_pre_hook(self._enter(path, open_names), prepend=True)
                leave = module.register_forward_hook(self._leave(path, open_names), always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            yield

    def _enter(self, path: str, open_names: list[tuple[str, Any]]) -> Callable[..., None]:
        def hook(*_: object) -> None:
            name = torch._C._profiler._RecordFunctionFast(_MODULE + path)  # not dispatched: seen under any mode
            name.__enter__()
            open_names.append((path, name))

        return hook

    def _leave(self, path: str, open_names: list[tuple[str, Any]]) -> Callable[..., None]:
        def hook(*_: object) -> None:
            while open_names:
                name, opened = open_names.pop()
                opened.__exit__(None, None, None)
                if name == path:
                    return

        return hook


class _Place(NamedTuple):
    """Where the reader of the profile is."""

    phase: str = ""
    path: str = ""
    operator: str = ""
    recompute: int = 0
    in_module: bool = False


@dataclass
class _Reader:
    """Walks the profiler's tree in order and writes the trace."""

    gradients: dict[str, set[int]]
    device: str
    recorder: MemoryTraceRecorder = field(default_factory=MemoryTraceRecorder)
    modules: dict[int, str] = field(default_factory=dict)  # sequence number of an autograd node -> module
    stretches: int = 0
    after: str = FORWARD  # the phase that has ended last: what goes between two phases is of the first

    def read(self, event: Any, place: _Place) -> None:
        """One event, and all that happens inside it."""
        name = event.name
        if name == "[memory]":
            self._memory(event.extra_fields, place)
            return
        place = self._inside(name, event, place)
        for child in event.children:
            self.read(child, place)
        if name.startswith(_PHASE):
            self._end(place.phase)
            self.after = place.phase

    def _inside(self, name: str, event: Any, place: _Place) -> _Place:
        if name.startswith(_PHASE):
            return _Place(phase=name.removeprefix(_PHASE))
        if name.startswith(_MODULE):
            if place.phase == BACKWARD and not place.in_module:
                self.stretches += 1
                place = place._replace(recompute=self.stretches)
            return place._replace(path=name.removeprefix(_MODULE), in_module=True, operator="")
        number = getattr(event.extra_fields, "sequence_number", -1)
        if name.startswith(_NODE):
            return place._replace(path=self.modules.get(number, place.path), operator="")
        if number >= 0 and (place.in_module or place.phase == FORWARD):
            self.modules[number] = place.path  # several may bear a number: the last of them made the node
        is_first = name.startswith("aten::") and not place.operator and not _is_made_of_others(name)
        return place._replace(operator=name.removeprefix("aten::")) if is_first else place

    def _memory(self, block: Any, place: _Place) -> None:
        if block.device.type != self.device:
            return
        phase = place.phase or self.after
        if block.alloc_size > 0:
            made = Allocation(block.alloc_size, phase, place.path, place.operator, place.recompute)
            self.recorder.allocate(block.ptr, made, place.path, place.operator, phase)
        else:
            self.recorder.free(block.ptr, place.path, place.operator, phase, place.recompute)

    def _end(self, phase: str) -> None:
        if phase == FORWARD:
            self.recorder.end_forward()
        self.recorder.name(self.gradients.get(phase, ()), "gradients")

    def trace(self) -> MemoryTrace:
        """What was written."""
        return self.recorder.trace(512 if self.device == "cuda" else 1)


@cache
def _is_made_of_others(operator: str) -> bool:
    """Whether torch takes the operator apart before a dispatch mode sees it: linear, dropout, reshape ..."""
    packet = getattr(torch.ops.aten, operator.removeprefix("aten::"), None)
    names = [operator if name == "default" else f"{operator}.{name}" for name in packet.overloads()] if packet else []
    known = (name for name in names if torch._C._dispatch_has_kernel(name))  # some are TorchScript's alone
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd") for name in known)


def device_terms(step: Step) -> DeviceTerms:
    """Run one step and read the allocator's own statistics; the step's optimizer state must be there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step.run()
    torch.cuda.synchronize()
    free, whole = torch.cuda.mem_get_info()
    context = max(whole - free - torch.cuda.memory_reserved(), 0)  # with other processes' memory, if there are any
    return DeviceTerms(
        allocated_bytes=torch.cuda.max_memory_allocated(),
        workspace_bytes=0,  # in what is allocated already
        reserved_bytes=torch.cuda.max_memory_reserved(),
        context_low_bytes=context,
        context_high_bytes=context,
    )
