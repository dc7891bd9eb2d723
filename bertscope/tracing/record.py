"""The recorder of a run: all that it does on a device becomes rows, of which every report is a function.

A recorder is the one dispatch mode around a training program. The device says what an operator does there: a real one
runs it, a fake one answers with layouts. The rows are equal on both.
"""

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from threading import RLock, get_ident
from typing import Any, NamedTuple
from unittest.mock import patch

import bertscope
from bertscope.reports.memory import BACKWARD, EVALUATING, FORWARD, OPTIMIZER
from bertscope.torch_access import (
    DispatchMode,
    autograd_node,
    fake_device,
    has_kernel,
    in_backward,
    key_of,
    nn,
    operator_name,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
    running_frames,
    storage_key,
    torch,
    use_counts,
)
from bertscope.torch_access.distributed import is_wrapper, watched_resizes
from bertscope.tracing.operator_costs import SeenTensor, tensors
from bertscope.tracing.trace import ModuleTracker, hooks

SETUP, BETWEEN = "setup", "between"  # phases besides those of a step
_ADD = torch.ops.aten.add.Tensor


class RunPlace(NamedTuple):
    """The place of a run: the optimizer steps that ended, the phase, the module or parameter, the recomputation."""

    step: int
    phase: str
    path: str
    recomputation: int = 0  # its number; 0 outside


@dataclass
class Call:
    """A row: a call of an operator. Arguments and results are there if the recorder keeps them."""

    operator: Any  # or the name of what allocates and is no operator
    place: RunPlace
    line: str  # of the user's code: file and number
    args: tuple[Any, ...] = ()  # each tensor as `SeenTensor`
    kwargs: Any = None
    out: Any = None


@dataclass
class ModuleRun:
    """A row: a call of a module, which begins before the operator of that number and ends before the last one."""

    path: str
    inputs: list[SeenTensor]
    begun: int
    outputs: list[SeenTensor] = field(default_factory=list)
    ended: int = -1
    own: list[int] = field(default_factory=list)  # the operators that run in no module inside it


@dataclass
class LoggedBlock:
    """A row: a block of memory on the device."""

    size_bytes: int
    shape: tuple[int, ...]  # of scratch: the numbers of its rule
    dtype: str  # of scratch: its rule
    call: int  # that allocated it; -1 before the first
    born: int  # the event
    owner: str  # its parameter, else the module that allocated it
    part: str = ""  # parameters, buffers, inputs, gradients, workspaces; "" is for the reader of the log to say
    freed: int = -1  # the event; -1 while it lives


class Event(NamedTuple):
    """A row: a block is allocated, or freed (`~block`)."""

    block: int
    place: RunPlace
    call: int  # that ran last
    allocated_bytes: int  # by the allocator afterwards, and reserved; 0 without one
    reserved_bytes: int


@dataclass
class RunLog:
    """The rows of a run, and the marks that the program's loaders set."""

    calls: list[Call] = field(default_factory=list)
    modules: list[ModuleRun] = field(default_factory=list)  # if the recorder keeps arguments
    blocks: list[LoggedBlock] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    begun: dict[tuple[int, str], int] = field(default_factory=dict)  # step and phase -> the event when it first began
    refused: list[tuple[int, str, int]] = field(default_factory=list)  # requests without room: bytes, line, event

    def born(
        self,
        size: int,
        shape: Any,
        dtype: str,
        owner: str,
        at: RunPlace,
        part: str = "",
        held: tuple[int, int] = (0, 0),
    ) -> int:
        """Add a block, and return its number; `held` are the allocator's bytes."""
        number, call = len(self.blocks), len(self.calls) - 1
        self.blocks.append(LoggedBlock(size, tuple(shape), dtype, call, len(self.events), owner, part))
        self.events.append(Event(number, at, call, *held))
        return number

    def freed(self, number: int, at: RunPlace, held: tuple[int, int] = (0, 0)) -> None:
        """Free a block."""
        self.blocks[number].freed = len(self.events)
        self.events.append(Event(~number, at, len(self.calls) - 1, *held))

    def name(self, number: int, part: str, owner: str) -> None:
        """Name the use of a block, and the parameter or buffer that it is."""
        self.blocks[number].part, self.blocks[number].owner = part, owner

    def operator(self, call: int) -> str:
        """Return the name of the operator of a call; "" before the first."""
        operator = self.calls[call].operator if call >= 0 else ""
        return operator if isinstance(operator, str) else _name(operator)


class Device:
    """A real CPU: what the recorder asks of a device."""

    kind = "cpu"
    has_memory = True  # whose blocks the recorder follows
    counts_random_states = True  # checkpointing saves that of the CPU
    allocator: Any = None
    recorder: Any = None  # that asks it

    def takes(self, operator: Any, args: Any, kwargs: Any) -> bool:
        """Return True for an operator that runs on the device, and is no mark of a profile."""
        return bool(operator.namespace != "profiler")

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator on the device."""
        return operator(*args, **kwargs)

    def elsewhere(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of any other operator."""
        return operator(*args, **kwargs)

    def number(self, tensor: Any) -> Any:
        """Return the value of a tensor of one element."""
        return torch.ops.aten._local_scalar_dense.default(tensor)

    def has(self, tensor: Any) -> bool:
        """Return True for a tensor in the device's memory."""
        return bool(tensor.device.type == "cpu")

    def laid_down(self, operator: Any) -> list[tuple[str, int]]:
        """Return the workspaces that libraries lay down at this call and keep: name and bytes."""
        return []

    def true_bytes(self, operator: Any, args: Any, number: int, tensor: Any) -> int | None:
        """Return the bytes of a result that torch's shape function gets wrong; None for any other."""
        return None

    def scratch(self, operator: Any, args: Any) -> Any:
        """Return the bytes that a kernel allocates while it runs, or `Scratch` with their rule."""
        return 0

    def malloc(self, size: int) -> Any:
        """Return the allocator's block for a request; raises torch.OutOfMemoryError if there is no room."""
        return None


class Recorder(DispatchMode):
    """The mode that fills a log.

    A dispatch mode does not see four things, which are added: autograd's sum of a second gradient into the first, in
    place only while no mode is active (`_sums_in_place`); the random state that checkpointing saves; the beginning of
    backward, before which the gradient of the loss is made; and what kernels and libraries allocate (`Device`).
    """

    def __init__(self, device: Device, model: nn.Module | None = None, *, keeps_args: bool = False) -> None:
        super().__init__()
        self.device, self.model, self.keeps_args, self.log = device, model, keeps_args, RunLog()
        self.is_recording, device.recorder = True, self
        self.tracker = ModuleTracker(self._begin_module, self._end_module) if keeps_args else ModuleTracker()
        self.running: list[ModuleRun] = []  # the calls of modules that have not ended
        self.numbers: dict[int, int] = {}  # storage -> block
        self.ends: dict[int, Any] = {}  # storage -> the reference that notes its end
        self.living: dict[int, Any] = {}  # block -> the allocator's
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.phase, self.steps, self.is_updated, self.owner = SETUP, 0, False, ""
        self.updates = 0  # optimizer steps that ended
        self.updating = 0  # that run
        self.first_optimizer: Any = None  # of several the first one counts the steps
        self.own_counts = owned_by_autograd() if device.has_memory else None
        self.main, self.refusal, self.lock = get_ident(), "", RLock()
        self.libraries: dict[Any, bool] = {}  # code -> whether it is of a library
        self.on_update: list[Callable[[int], None]] = []  # called with the number of optimizer steps that ended
        # Called before a module that the program calls itself, each time, and the first time.
        self.on_root: list[Callable[[nn.Module], None]] = []
        self.on_new_root: list[Callable[[nn.Module], None]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record what happens in this context."""
        with ExitStack() as stack:
            stack.enter_context(self)
            self._watch_modules(stack)
            if self.device.has_memory:
                stack.enter_context(watched_resizes(self._resized))
                stack.enter_context(patch.object(torch, "get_rng_state", self._random_state(torch.get_rng_state)))
                self._watch_phases(stack)
            yield

    def _watch_modules(self, stack: ExitStack) -> None:
        if self.model is not None:
            stack.enter_context(hooks(self.model, "", self._entered, self._left))
        else:
            of_all, enter, leave = torch.nn.modules.module, partial(self._entered, None), partial(self._left, None)
            stack.callback(of_all.register_module_forward_pre_hook(enter).remove)
            stack.callback(of_all.register_module_forward_hook(leave, always_call=True).remove)

    def _watch_phases(self, stack: ExitStack) -> None:
        stack.callback(register_optimizer_step_pre_hook(self._stepping).remove)
        stack.callback(register_optimizer_step_post_hook(self._stepped).remove)
        stack.enter_context(patch.object(torch.autograd, "backward", partial(self._backward, torch.autograd.backward)))
        stack.enter_context(patch.object(torch.optim.Optimizer, "__init__", self._made(torch.optim.Optimizer.__init__)))

    def close(self) -> None:
        """Note no further ends of blocks: what ends with the program is part of no step."""
        self.ends.clear()

    def hold(self, part: str, named: Any) -> None:
        """Name the blocks of tensors by their part, and add those that exist before the run."""
        for path, tensor in named:
            if self.device.has(tensor):
                self._watch(tensor, path)
                if (number := self.numbers.get(storage_key(tensor))) is not None:
                    self.log.name(number, part, path)

    # ---- where the run is ----

    def _entered(self, path: str | None, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        if get_ident() != self.main and not in_backward():
            self.refusal = f"{type(module).__name__} runs in another thread than the script, where nothing is recorded"
        is_root = not self.tracker.stack and not in_backward()
        if is_root:
            for run in self.on_root:
                run(module)
            if module not in self.names:
                for run in self.on_new_root:
                    run(module)
                self.names.update({inner: path for path, inner in module.named_modules()})
                self.hold("parameters", module.named_parameters())
                self.hold("buffers", module.named_buffers())
            for number in (self.numbers.get(storage_key(tensor), -1) for tensor in tensors(args)):
                if number >= 0 and not self.log.blocks[number].part:
                    self.log.blocks[number].part = "inputs"
            trains = is_training(module)
            if trains:
                self.steps += self.is_updated  # a step ends where the next forward pass begins
                self.is_updated = False
            self._begin(FORWARD if trains else EVALUATING)
        self.tracker._enter(self._name(path, module), module, args, kwargs or {})

    def _left(self, path: str | None, module: nn.Module, args: Any, *rest: Any) -> None:
        self.tracker._leave(self._name(path, module), module, args, {}, rest[-1])  # without or with keywords

    def _name(self, path: str | None, module: nn.Module) -> str:
        return self.names.get(module, type(module).__name__) if path is None else path

    def _begin_module(self, path: str, tree: Any) -> None:
        self.running.append(ModuleRun(path, list(map(self._seen, tensors(tree))), len(self.log.calls)))
        self.log.modules.append(self.running[-1])

    def _end_module(self, path: str, tree: Any) -> None:
        while self.running and (run := self.running.pop()).path != path:
            pass  # recomputation may stop in the middle of a module
        run.outputs, run.ended = list(map(self._seen, tensors(tree))), len(self.log.calls)

    def _made(self, given: Any) -> Callable[..., None]:
        def made(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.first_optimizer = self.first_optimizer or weakref.ref(optimizer)
            given(optimizer, *args, **kwargs)

        return made

    def _stepping(self, optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                number = self.numbers.get(storage_key(parameter), -1)
                grad = parameter.grad
                if number >= 0 and grad is not None and (made := self.numbers.get(storage_key(grad), -1)) >= 0:
                    self.log.name(made, "gradients", self.log.blocks[number].owner)
        self._begin(OPTIMIZER)
        self.updating += 1

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        self.owner, self.phase, self.updating = "", BETWEEN, max(self.updating - 1, 0)
        if self.first_optimizer is None or self.first_optimizer() is optimizer:
            self._updated()

    def _updated(self) -> None:
        self.is_updated, self.updates = True, self.updates + 1
        for run in self.on_update:
            run(self.updates)

    def _backward(self, given: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._begin(BACKWARD)
        given(*args, **kwargs)
        self.phase = OPTIMIZER if self.updating else BETWEEN  # a closure runs inside the optimizer step
        if self.first_optimizer is None:  # a loop that updates its parameters by hand
            self._updated()

    def _begin(self, phase: str) -> None:
        self.phase = phase
        self.log.begun.setdefault((self.steps, phase), len(self.log.events))

    def place(self) -> RunPlace:
        """Return where the run is."""
        is_backward, tracker = in_backward(), self.tracker
        phase = BACKWARD if is_backward else self.phase
        path = self.owner if phase == OPTIMIZER else tracker.current()[0]
        return RunPlace(self.steps, phase, path, tracker.recomputations if is_backward and tracker.stack else 0)

    def line(self) -> str:
        """Return the line of the user's code that runs: in this thread, as in a recomputation, else in the main one.

        For a card autograd works in a thread of its own.
        """
        for frame in running_frames(self.main):
            while frame is not None:
                code = frame.f_code
                is_foreign = self.libraries.get(code)
                if is_foreign is None:
                    is_foreign = self.libraries[code] = is_library(code.co_filename)
                if not is_foreign:
                    return f"{code.co_filename}:{frame.f_lineno}"
                frame = frame.f_back
        return ""

    # ---- operators ----

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented  # the operators on the tensors inside come next
        if (asked := fake_device(operator, args)) is not None:
            return asked
        kwargs = kwargs or {}
        device = self.device
        if not device.takes(operator, args, kwargs):
            return device.elsewhere(operator, args, kwargs)
        if operator is torch.ops.aten._local_scalar_dense.default:
            return device.number(args[0])
        if not self.is_recording:
            return device.run(operator, args, kwargs)
        with self.lock:
            return self._recorded(operator, args, kwargs)

    def _recorded(self, operator: Any, args: Any, kwargs: Any) -> Any:
        device = self.device
        if _is_composite(operator):  # as it is below autograd, in the dispatch of a subclass such as DTensor
            with self:
                return operator.decompose(*args, **kwargs)
        summed = storage_key(args[0]) if self._sums_in_place(operator, args) else None
        if self.phase == OPTIMIZER:
            self.owner = self._owner(args[0], self.owner) if args and isinstance(args[0], torch.Tensor) else ""
        at = self.place()
        given = (self._seen(args), self._seen(kwargs)) if self.keeps_args else ()
        out = device.run(operator, args, kwargs)
        self.log.calls.append(call := Call(operator, at, self.line() if device.has_memory else "", *given))
        if self.running:
            self.running[-1].own.append(len(self.log.calls) - 1)
        if device.has_memory:
            self._allocated(call, args, kwargs, out, summed)
        call.out = self._seen(out) if self.keeps_args else None
        return out

    def _allocated(self, call: Call, args: Any, kwargs: Any, out: Any, summed: int | None) -> None:
        device, operator, at = self.device, call.operator, call.place
        if summed in self.numbers:
            self._follow(self.numbers.pop(summed), out.untyped_storage())
        results = tensors(out)
        numbers = range(len(results))
        if device.kind == "cuda" and _name(operator) == "native_dropout":
            numbers = numbers[::-1]  # CUDA's kernel allocates the mask first
        for number in numbers:
            tensor = results[number]
            if storage_key(tensor) not in self.numbers and device.has(tensor):
                owner = self._owner_of(args, number, len(results)) if at.phase == OPTIMIZER else at.path
                given = tensors(args) if at.phase != OPTIMIZER else []
                part = "inputs" if given and not any(map(device.has, given)) else ""  # moved to the device
                self._watch(tensor, owner, at, part, device.true_bytes(operator, args, number, tensor))
        for name, size in device.laid_down(operator):
            self._allocate(size, (), name, at.path, at, "workspaces")
        if extra := device.scratch(operator, args):
            shape, rule = getattr(extra, "numbers", ()), getattr(extra, "rule", "")
            self._free(self._allocate(getattr(extra, "size_bytes", extra), shape, rule, at.path, at), at)

    def _seen(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            seen = SeenTensor(value.shape)
            seen.dtype, seen.itemsize = _dtype_name(value.dtype), value.itemsize
            seen.block = self.numbers.get(storage_key(value), -1) if self.numbers else -1
            return seen
        if isinstance(value, dict):
            return {name: self._seen(inner) for name, inner in value.items()}
        return tuple(map(self._seen, value)) if isinstance(value, (tuple, list)) else value

    # ---- blocks ----

    def _watch(
        self, tensor: torch.Tensor, owner: str, at: RunPlace | None = None, part: str = "", size: int | None = None
    ) -> None:
        """Add the block of a tensor whose storage is new; `size` for another one than the storage says."""
        stored = tensor.untyped_storage().nbytes()
        if stored and storage_key(tensor) not in self.numbers:
            dtype = "float32" if size else _dtype_name(tensor.dtype)
            number = self._allocate(size or stored, tensor.shape, dtype, owner, at or self.place(), part)
            self._follow(number, tensor.untyped_storage())

    def _allocate(self, size: int, shape: Any, dtype: str, owner: str, at: RunPlace, part: str = "") -> int:
        try:
            block = self.device.malloc(size)
        except torch.OutOfMemoryError:
            self.log.refused.append((size, self.line(), len(self.log.events)))
            raise
        number = self.log.born(size, shape, dtype, owner, at, part, self._held())
        self.living[number] = block
        return number

    def _held(self) -> tuple[int, int]:
        allocator = self.device.allocator
        return (0, 0) if allocator is None else (allocator.allocated_bytes, allocator.reserved_bytes)

    def _free(self, number: int, at: RunPlace) -> None:
        if number not in self.living:
            return
        block = self.living.pop(number)
        if self.device.allocator is not None:
            self.device.allocator.free(block)
        self.log.freed(number, at, self._held())

    def _follow(self, number: int, storage: Any) -> None:
        """Note the end of a storage as that of the block."""
        key = key_of(storage)

        def end(_: object) -> None:
            self.ends.pop(key, None)
            self._free(self.numbers.pop(key, -1), self.place())

        self.numbers[key] = number
        self.ends[key] = weakref.ref(storage, end)

    def _resized(self, key: int, storage: Any, before_bytes: int) -> None:
        """Note the new size of a storage: FSDP frees and allocates gathered parameters so."""
        size, number = storage.nbytes(), self.numbers.get(key)
        if number is None or size == before_bytes:
            return
        at, block = self.place(), self.log.blocks[number]
        self._free(number, at)
        if size:
            self.numbers[key] = self._allocate(size, (size,), block.dtype, block.owner, at)

    def _owner(self, tensor: torch.Tensor, otherwise: str = "") -> str:
        number = self.numbers.get(storage_key(tensor), -1)
        return self.log.blocks[number].owner if number >= 0 else otherwise

    def _owner_of(self, args: Any, number: int, results: int) -> str:
        """Return the parameter of a result in the optimizer step: of several by the place in a list of arguments."""
        lists = (given for given in args if isinstance(given, (list, tuple)) and len(given) == results)
        found = (self._owner(given[number]) for given in lists if isinstance(given[number], torch.Tensor))
        return next(filter(None, found), self.owner)

    # ---- what no mode sees ----

    def _sums_in_place(self, operator: Any, args: Any) -> bool:
        if operator is not _ADD or torch.is_grad_enabled() or autograd_node() is None:
            return False
        is_owned = self.own_counts is not None and use_counts(args[0]) == self.own_counts
        return is_owned and bool(torch.ops.aten.is_non_overlapping_and_dense(args[0]))

    def _random_state(self, given: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def watched() -> torch.Tensor:
            state = given()
            if self.is_recording and self.device.counts_random_states:
                at = self.place()
                self.log.calls.append(Call("get_rng_state", at, self.line()))
                self._watch(state, at.path, at)
            return state

        return watched


class _Trial(Device):
    """A device that notes the use counts of the sums that autograd adds to."""

    has_memory = False

    def __init__(self) -> None:
        self.seen: list[tuple[int, int] | None] = []

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        if operator is _ADD and autograd_node() is not None:
            self.seen.append(use_counts(args[0]))
        return operator(*args, **kwargs)


@cache
def owned_by_autograd() -> tuple[int, int] | None:
    """Return the use counts of a gradient sum that only autograd references, in the third of three contributions.

    None if torch has no use counts: sums then count as new tensors, and an estimate may be too high.
    """
    trial = _Trial()
    with torch.enable_grad(), Recorder(trial):
        start = torch.ones(8, requires_grad=True).clone()
        torch.autograd.backward(start * 2 + start * 3 + start * 4, torch.ones(8))
    return trial.seen[-1] if trial.seen else None


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype)[6:]


@cache
def _name(operator: Any) -> str:
    return operator_name(operator)


@cache
def _is_composite(operator: Any) -> bool:
    # With a kernel of its own, as silu_backward has beside its formula, a device computes it at once.
    return has_kernel(operator, "CompositeImplicitAutograd") and not has_kernel(operator, "CPU")


def is_training(module: nn.Module) -> bool:
    """Return True for a call in training: with gradients, or of a module with parameters that trains."""
    return torch.is_grad_enabled() or any(
        inner.training and next(inner.parameters(recurse=False), None) is not None for inner in module.modules()
    )


def is_library(name: str) -> bool:
    """Return True for a file of Python, of an installed package or of this one."""
    return name.startswith(_OWN) or any(folder in name for folder in ("/site-packages/", "/dist-packages/"))


_OWN = (
    "<", f"{os.path.dirname(os.__file__)}/", f"{os.path.dirname(os.path.dirname(torch.__file__))}/",
    f"{os.path.dirname(bertscope.__file__)}/",
)  # fmt: skip
