"""The memory trace of a real step, from the allocator's events in torch's profiler.

Sizes, order and addresses are the allocator's; modules, phases and gradients come from hooks on the model.
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
from bertscope.analyses.memory.step import Loss, ModelStep, make_step
from bertscope.analyses.memory.summary import memory
from bertscope.analyses.modules.module_tree import row_paths
from bertscope.analyses.tracing.module_tracker import BACKWARD, FORWARD
from bertscope.errors import SelectionError
from bertscope.reports.memory import DeviceTerms, MemoryReport, Timing, Variant
from bertscope.torch_access import has_kernel, nn, profiled_events, record_name, storage_key, torch

_PHASE, _MODULE = "bertscope phase ", "bertscope module "
_NODE = "autograd::engine::evaluate_function: "


def measured(step: ModelStep, on_phase: Callable[[str], None] = lambda phase: None, device: str = "cpu") -> MemoryTrace:
    """Run one step under the profiler and return its trace; its optimizer state must exist.

    `on_phase` is called with each phase as it begins.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device == "cuda" else [])
    marks = _Marks(step, on_phase)
    state = tuple(_state(step, device))
    with marks.around(step.model), profile(activities=activities, profile_memory=True) as profiler:
        step.run(marks.phase)
    reader = _Reader(marks.gradients, device)
    for event in profiled_events(profiler):
        reader.read(event, _Place())
    reader.recorder.state.extend(state)
    return reader.trace()


def profile(
    module: nn.Module, inputs: Any, *, loss: Loss | None = None, steps: int = 3, name: str | None = None, **run: Any
) -> MemoryReport:
    """Run steps of any module in this process, and measure memory and time next to the estimate.

    `inputs`, `loss` and `run` as in `estimate`; module and inputs must be on the device of `run`. The
    optimizer has a learning rate of 0. Gradients and mode of the module are restored, but what a forward pass
    changes by itself (running statistics, the random state) stays changed. Raises SelectionError for fields
    that `run` does not have, and for a device that torch does not find.
    """
    from bertscope.analyses.memory.estimate import module_memory, module_report, module_run, named_inputs

    run_config = module_run(run)
    if run_config.device == "cuda" and not torch.cuda.is_available():
        raise SelectionError("torch finds no CUDA device here; use device cpu, or estimate with device cuda")
    given, how = named_inputs(inputs, loss)
    estimated = module_memory(module, inputs, run_config, loss)
    with _restored(module):
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
def _restored(module: nn.Module) -> Iterator[None]:
    """Restore the modes and gradients of a module at the end."""
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


def _seconds(step: ModelStep) -> float:
    started = time.perf_counter()
    step.run()
    if step.kind == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _state(step: ModelStep, device: str) -> Iterator[tuple[Block, int]]:
    seen: set[int] = set()
    for part, path, tensor in step.state():
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key not in seen and storage.nbytes() and tensor.device.type == device:
            seen.add(key)
            yield Block(part, path, "", tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")), storage.nbytes()


class _Marks:
    """Marks of phases and modules in the profile, and the addresses of the gradients after each phase."""

    def __init__(self, step: ModelStep, on_phase: Callable[[str], None]) -> None:
        self.step, self.on_phase = step, on_phase
        self.gradients: dict[str, set[int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Mark a phase of the step."""
        self.on_phase(name)
        with torch.profiler.record_function(_PHASE + name):
            yield
        grads = (param.grad for param in self.step.model.parameters())
        self.gradients[name] = {grad.untyped_storage().data_ptr() for grad in grads if grad is not None}

    @contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """Mark the forward of every module."""
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
            name = record_name(_MODULE + path)
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
    """The phase, module and operator that enclose an event of the profile."""

    phase: str = ""
    path: str = ""
    operator: str = ""
    recompute: int = 0
    in_module: bool = False


@dataclass
class _Reader:
    """A reader that walks the profiler's tree in order and records the trace."""

    gradients: dict[str, set[int]]
    device: str
    recorder: MemoryTraceRecorder = field(default_factory=MemoryTraceRecorder)
    modules: dict[int, str] = field(default_factory=dict)  # sequence number of an autograd node -> module
    recomputations: int = 0
    after: str = FORWARD  # the last phase that ended: frees between two phases belong to the first

    def read(self, event: Any, place: _Place) -> None:
        """Read one event and its children."""
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
                self.recomputations += 1
                place = place._replace(recompute=self.recomputations)
            return place._replace(path=name.removeprefix(_MODULE), in_module=True, operator="")
        number = getattr(event.extra_fields, "sequence_number", -1)
        if name.startswith(_NODE):
            return place._replace(path=self.modules.get(number, place.path), operator="")
        if number >= 0 and (place.in_module or place.phase == FORWARD):
            self.modules[number] = place.path  # of several operators with this number, the last made the node
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
        """Return the recorded trace."""
        return self.recorder.trace(512 if self.device == "cuda" else 1)


@cache
def _is_made_of_others(operator: str) -> bool:
    """Return True if torch decomposes the operator before a dispatch mode sees it: linear, dropout, reshape ..."""
    packet = getattr(torch.ops.aten, operator.removeprefix("aten::"), None)
    overloads = packet.overloads() if packet else ()
    return any(has_kernel(getattr(packet, overload, None), "CompositeImplicitAutograd") for overload in overloads)


def measured_device_terms(step: ModelStep) -> DeviceTerms:
    """Run one step and return the allocator's own statistics; the step's optimizer state must exist."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step.run()
    torch.cuda.synchronize()
    free, whole = torch.cuda.mem_get_info()
    context = max(whole - free - torch.cuda.memory_reserved(), 0)  # includes the memory of other processes
    return DeviceTerms(
        allocated_bytes=torch.cuda.max_memory_allocated(),
        workspace_bytes=0,  # part of the allocated bytes
        reserved_bytes=torch.cuda.max_memory_reserved(),
        context_low_bytes=context,
        context_high_bytes=context,
    )
