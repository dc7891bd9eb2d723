"""The memory trace of a real step, from the allocator's events in torch's profiler.

Sizes, order and addresses are the allocator's; modules, phases and gradients come from hooks on the model.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import ref

from bertscope.errors import SelectionError, UnknownValueError
from bertscope.memory.estimate import module_memory, named_inputs
from bertscope.memory.fake_run import StepLog
from bertscope.memory.step import ModelStep, Phase, real_inputs, run_model, waiting_inputs
from bertscope.memory.summary import memory, memory_report
from bertscope.memory.trace import MemoryTrace
from bertscope.reports.memory import BACKWARD, FORWARD, MemoryReport, Timing, Variant
from bertscope.reports.step import ByteRange
from bertscope.settings.run_config import STORED, RunConfig, timed_steps
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import has_kernel, is_of_device, nn, profiled_events, record_name, torch
from bertscope.tracing.inputs import running_module
from bertscope.tracing.log import Call, Position
from bertscope.tracing.losses import loss_function
from bertscope.tracing.module_tree import row_paths, subject
from bertscope.tracing.record import hooks
from bertscope.units import FP32

_PHASE, _MODULE = "bertscope phase ", "bertscope module "
_RESTART = "bertscope restart"
_NODE = "autograd::engine::evaluate_function: "


def real_step(
    source: ModelSource, run_config: RunConfig, device: str, prepare: Callable[[nn.Module], None] = lambda model: None
) -> ModelStep:
    """Return a step with real tensors on the device; `prepare` gets the model when its inputs are made."""
    # A model in 16 bits comes from the CPU, as an estimate assumes, and not from one in fp32 on the GPU.
    model = run_model(source, run_config, device if run_config.dtype in (FP32.name, STORED) else "cpu").to(device)
    inputs, loss = named_inputs(real_inputs(model, run_config, device), loss_function(run_config))
    prepare(model)
    waiting = waiting_inputs(inputs, run_config)
    held_out = lambda: real_inputs(model, run_config.evaluation, device)  # noqa: E731  # an inference has no evaluation
    return ModelStep(model, inputs, run_config, device, loss, waiting=waiting, held_out=held_out)


def measured(step: ModelStep, phase: Phase = nullcontext) -> MemoryTrace:
    """Run two steps under the profiler and return the trace of the second; its optimizer state must exist.

    `phase` is entered with each phase too.
    """
    reader = _EventReader(step.device)
    mark = torch.profiler.record_function
    held = ((block, tensor.untyped_storage()) for block, tensor in step.state() if tensor.device.type == step.device)
    state = [(block, storage.nbytes(), ref(storage)) for block, storage in held]

    @contextmanager
    def marked(name: str) -> Iterator[None]:
        with phase(name), mark(_PHASE + name):
            yield
        grads = (param.grad for param in step.model.parameters())
        reader.gradients.append({grad.untyped_storage().data_ptr() for grad in grads if grad is not None})

    # torch.profiler.profile starts the same profiler and loads torch._inductor (1 s of CPU time) for a setting.
    device = step.device if step.device == "cuda" else None
    profiler = torch.autograd.profiler.profile(use_device=device, profile_memory=True, use_kineto=True)
    with _marked_modules(step.called), profiler:
        step.run(marked)  # what it leaves, the measured step finds
        for block, size, storage in state:
            if storage() is not None:  # the profiler does not log the end of what was allocated before it started
                reader.log.hold(block, size)
        with mark(_RESTART):
            pass
        step.run(marked)
    reader.read_all(profiled_events(profiler))
    return reader.log.trace(step.device)


def _marked_modules(model: nn.Module) -> AbstractContextManager[None]:
    entered: list[tuple[str, Any]] = []

    def enter(path: str, *_: object) -> None:
        mark = record_name(_MODULE + path)
        mark.__enter__()
        entered.append((path, mark))

    def leave(path: str, *_: object) -> None:
        left = ""
        while entered and left != path:
            left, mark = entered.pop()
            mark.__exit__(None, None, None)

    return hooks(model, "", enter, leave)


def device_of(run_config: RunConfig) -> str:
    """Return a run's device; raises SelectionError if torch does not find it."""
    if run_config.device == "cuda" and not torch.cuda.is_available():
        raise SelectionError("torch finds no CUDA device here; use device cpu, or estimate with device cuda")
    return run_config.device


def profile(
    module: nn.Module, inputs: Any, run_config: RunConfig, *, steps: int | None = None, name: str | None = None
) -> MemoryReport:
    """Run steps of any module in this process, and measure memory and time next to the estimate.

    `inputs` and the loss are as in `estimate`; module and inputs must be on the run's device. The
    optimizer has a learning rate of 0. Gradients and mode of the module are restored, but what a forward pass
    changes by itself (running statistics, the random state) stays changed. A step that reads values of tensors has
    no estimate.
    """
    batch, how = named_inputs(inputs, loss_function(run_config))
    estimated = None
    with suppress(UnknownValueError):  # then there is only the measurement
        estimated = module_memory(module, inputs, run_config)
    with _restored(module):
        module.train(not run_config.is_eval)
        waiting = waiting_inputs(batch, run_config)
        step = ModelStep(module, batch, run_config, run_config.device, how, waiting=waiting)
        with running_module(type(module).__name__, module, run_config.device):
            step.run_first_steps()
        started = time.perf_counter()
        trace = measured(step)
        warmup = time.perf_counter() - started
        seconds = [step_seconds(step) for _ in range(timed_steps(steps, [warmup]))]
    variant = Variant(
        checkpointing=run_config.checkpointing,
        reentrant=run_config.reentrant,
        estimated=estimated,
        measured=memory(trace, "measured", row_paths(module)),
        timing=Timing(warmup_seconds=warmup).of_steps(seconds),
    )
    machine = f"this process, {torch.get_num_threads()} threads"
    about = subject(module, name, run_config.dtype)
    return replace(memory_report(about, run_config, (variant,), machine=machine), inputs_given=True)


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
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


def step_seconds(step: ModelStep) -> float:
    """Run one step, and return its time in seconds."""
    started = time.perf_counter()
    step.run()
    if step.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


class _Place(NamedTuple):
    """The phase, module, operator and recomputation that run at one time."""

    phase: str = ""
    path: str = ""
    operator: str = ""
    recomputation: int = 0


@dataclass
class _EventReader:
    """A reader that walks the profiler's trees in order and fills the step's log."""

    device: str
    gradients: list[set[int]] = field(default_factory=list)  # addresses at the end of each phase
    log: StepLog = field(default_factory=StepLog)
    living: dict[int, int] = field(default_factory=dict)  # address -> block
    modules: dict[int, str] = field(default_factory=dict)  # sequence number of an autograd node -> module
    recomputations: int = 0
    after: str = FORWARD  # the last phase that ended: frees between two phases belong to the first
    elsewhere: list[Any] = field(default_factory=list)  # events of other threads: on CUDA, autograd's runs backward

    def read_all(self, events: Sequence[Any]) -> None:
        """Read all trees; what runs in other threads than the loop's when the phase is read in which it began.

        torch hangs all events of such a thread into the phase in which the first began.
        """
        thread = next((event.start_tid for event in events if event.name.startswith(_PHASE)), None)
        self.elsewhere = sorted(_in_other_threads(events, thread), key=attrgetter("start_time_ns"))
        for event in events:
            if event.start_tid == thread:
                self.read(event, _Place())

    def read(self, event: Any, position: _Place) -> None:
        name = event.name
        if name == "[memory]":
            self._memory(event.extra_fields, position)
            return
        if is_of_device(event):
            return
        position = self._inside(name, event, position)
        children = [child for child in event.children if child.start_tid == event.start_tid]
        if name.startswith(_PHASE):
            begun = sum(other.start_time_ns <= event.end_time_ns for other in self.elsewhere)
            children = sorted([*children, *self.elsewhere[:begun]], key=attrgetter("start_time_ns"))
            del self.elsewhere[:begun]
        for child in children:
            self.read(child, position)
        if name.startswith(_PHASE):
            if position.phase == FORWARD:
                self.log.end_forward()
            for address in self.gradients.pop(0) & self.living.keys():
                self.log.blocks[self.living[address]].part = "gradients"
            self.after = position.phase
        elif name == _RESTART:
            self.log.restart()
            self.after = FORWARD

    def _inside(self, name: str, event: Any, position: _Place) -> _Place:
        if name.startswith(_PHASE):
            return _Place(name.removeprefix(_PHASE))
        if name.startswith(_MODULE):
            if position.phase == BACKWARD and not position.recomputation:
                self.recomputations += 1
                position = position._replace(recomputation=self.recomputations)
            return position._replace(path=name.removeprefix(_MODULE), operator="")
        number = getattr(event.extra_fields, "sequence_number", -1)
        if name.startswith(_NODE):
            return position._replace(path=self.modules.get(number, position.path), operator="")
        if number >= 0 and (position.recomputation or position.phase == FORWARD):
            self.modules[number] = position.path  # of several operators with this number, the last made the node
        is_first = name.startswith("aten::") and not position.operator and not _is_made_of_others(name)
        return position._replace(operator=name.removeprefix("aten::")) if is_first else position

    def _memory(self, block: Any, position: _Place) -> None:
        if block.device.type != self.device:
            return
        at = Position(0, position.phase or self.after, position.path, position.recomputation)
        self.log.calls.append(Call(position.operator, at, ""))
        if block.alloc_size > 0:
            self.living[block.ptr] = self.log.born(block.alloc_size, (), "", position.path, at)
        elif block.ptr in self.living:
            self.log.freed(self.living.pop(block.ptr), at)


def _in_other_threads(events: Sequence[Any], thread: int | None) -> Iterator[Any]:
    """Yield the events whose parent ran in another thread; roots have `thread` as their parent's thread."""
    for event in events:
        if is_of_device(event):
            continue
        if event.start_tid != thread:
            yield event
        yield from _in_other_threads(event.children, event.start_tid)


@cache
def _is_made_of_others(operator: str) -> bool:
    """Return True if torch decomposes the operator before a dispatch mode sees it: linear, dropout, reshape ..."""
    packet = getattr(torch.ops.aten, operator.removeprefix("aten::"), None)
    overloads = packet.overloads() if packet else ()
    return any(has_kernel(getattr(packet, overload, None), "CompositeImplicitAutograd") for overload in overloads)


def measured_device(step: ModelStep) -> dict[str, Any]:
    """Run one step and return the allocator's own statistics as fields of a cost; the optimizer state must exist."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step.run()
    return allocator_counters()


def allocator_counters() -> dict[str, Any]:
    """Return the allocator's own statistics since they were reset, as fields of a cost."""
    torch.cuda.synchronize()
    free, whole = torch.cuda.mem_get_info()
    context = max(whole - free - torch.cuda.memory_reserved(), 0)  # includes the memory of other processes
    reserved = torch.cuda.max_memory_reserved()
    return {
        "max_allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved": ByteRange(low_bytes=reserved, high_bytes=reserved),
        "context": ByteRange(low_bytes=context, high_bytes=context),
    }
