"""A run's recorder: all that it does on a device becomes rows, of which every report is a function.

A recorder is the one dispatch mode around a training program. The device says what an operator does there: a real one
runs it, a fake one answers with layouts. The rows are equal on both.
"""

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partial
from threading import RLock, get_ident
from typing import Any
from unittest.mock import patch

import bertscope
from bertscope.reports.memory import BACKWARD, EVALUATING, FORWARD, OPTIMIZER
from bertscope.torch_access import (
    DispatchMode,
    autograd_node,
    close_library,
    fake_device,
    has_kernel,
    in_backward,
    key_of,
    nn,
    operator_name,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
    replace_kernel,
    running_frames,
    storage_key,
    torch,
    uncompiled_modules,
    use_counts,
)
from bertscope.torch_access.distributed import is_wrapper, watched_resizes
from bertscope.tracing.log import Call, ModuleRun, Position, RunLog, SeenTensor, tensors

_LABEL = "bertscope_module"
SETUP, BETWEEN = "setup", "between"  # phases besides those of a step
_ADD, _LINEAR = torch.ops.aten.add.Tensor, torch.ops.aten.linear.default
# Formulas of autograd that write into zeros in place, except while a mode is active: areAnyTensorSubclassLike in
# FunctionsManual.cpp and TensorAdvancedIndexing.cpp.
_INTO_ZEROS = ("Cummax", "Cummin", "Gather", "Index", "IndexSelect", "Kthvalue", "MaskedSelect", "Max", "Median", "Min",
               "Mode", "Sort", "Take", "Topk", "Trace")  # fmt: skip
_WRITING = ("index_add", "index_fill", "index_put", "masked_scatter", "put", "scatter", "scatter_add")
_MOST_WAITED = 8  # steps of other optimizers, such as the critic's between two of a generator


class CopyableHook(partial[Any]):
    """A hook on a user's module; a copy and a pickle of the module have one that does nothing."""

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")


@contextmanager
def hooks(scope: nn.Module, path: str, enter: Callable[..., None], leave: Callable[..., Any]) -> Iterator[None]:
    """Install hooks on `scope`, whose path is `path`, and on every module below it; remove them at the end.

    Modules of TorchScript take no hooks, nor do compiled ones, which would compile them; their operators belong to the
    module around them.

    `enter(path, module, args, kwargs)` runs before each forward, `leave(path, module, args, kwargs, out)` after it.
    """
    with ExitStack() as stack:
        for name, module in uncompiled_modules(scope):
            if isinstance(module, torch.jit.ScriptModule):
                continue
            at = f"{path}.{name}".strip(".")
            stack.enter_context(_entered_again(module, partial(enter, at), partial(leave, at)))
            before, after = CopyableHook(enter, at), CopyableHook(leave, at)
            stack.enter_context(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
            stack.enter_context(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        yield


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """Compute aten::linear; the bias of inputs that are not contiguous is added in place, as without a mode."""
    if bias is None or input.dim() < 3 or input.is_contiguous():
        return _LINEAR.decompose(input, weight, bias)
    return torch.matmul(input, weight.t()).add_(bias)


@contextmanager
def _entered_again(module: nn.Module, enter: Callable[..., None], leave: Callable[..., Any]) -> Iterator[None]:
    """Call `enter` and `leave` around the repetition of a forward pass, which is no call of `module`."""
    forward = vars(module).get("forward")
    if not isinstance(forward, partial) or getattr(forward.func, "__name__", "") != "checkpoint":
        yield
        return
    run = forward.args[0]

    def repeated(*args: Any, **kwargs: Any) -> Any:
        if not in_backward():
            return run(*args, **kwargs)
        enter(module, args, kwargs)
        out = None
        try:
            out = run(*args, **kwargs)
        finally:
            leave(module, args, kwargs, out)
        return out

    module.forward = partial(forward.func, repeated, *forward.args[1:], **forward.keywords)
    try:
        yield
    finally:
        module.forward = forward


def _label(outputs: list[torch.Tensor], path: str) -> None:
    """Label the nodes that computed the outputs; a table of nodes would keep their saved tensors alive."""
    pending: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    while pending:
        node = pending.pop()
        if node is not None and _LABEL not in node.metadata:
            node.metadata[_LABEL] = path
            pending += [following for following, _ in node.next_functions]


class Device:
    """A real CPU: what the recorder asks of a device."""

    kind = "cpu"
    has_memory = True  # whose blocks the recorder follows
    has_lines = True  # of the user's code, which the log names
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
        """Return the value of a one-element tensor."""
        return torch.ops.aten._local_scalar_dense.default(tensor)

    def has(self, tensor: Any) -> bool:
        """Return True for a tensor in the device's memory."""
        return bool(tensor.device.type == "cpu")

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

    A dispatch mode does not see four things, which are added: autograd's sum of a second gradient into the first and
    its writes into zeros, in place only while no mode is active (`_writes_in_place`); the random state that
    checkpointing saves; the beginning of backward, before which the loss's gradient is made; and what kernels and
    libraries allocate (`Device`).
    """

    def __init__(self, device: Device, model: nn.Module | None = None, *, keeps_args: bool = False) -> None:
        super().__init__()
        self.device, self.model, self.keeps_args, self.log = device, model, keeps_args, RunLog()
        self.is_recording, device.recorder = True, self
        self.inside: list[str] = []  # the modules that run, the outermost one first
        self.recomputations = 0  # that began
        self.running: list[ModuleRun] = []  # the calls of modules that have not ended
        self.numbers: dict[int, int] = {}  # storage -> block
        self.ends: dict[int, Any] = {}  # storage -> the reference that notes its end
        self.living: dict[int, Any] = {}  # block -> the allocator's
        self.names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self.phase, self.steps, self.is_updated, self.owner = SETUP, 0, False, ""
        self.updates = 0  # optimizer steps that ended
        self.updating = 0  # that run
        self.first_optimizer: Any = None  # of several the first one counts the steps
        self.waited = 0  # steps of others since its last one
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
                library = torch.library.Library("aten", "IMPL")
                stack.callback(close_library, library)
                for key in ("CPU", "CUDA", "Meta"):
                    replace_kernel(library, _LINEAR, _linear, f"Autograd{key}")
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
        kind = torch.optim.Optimizer
        stack.enter_context(patch.object(kind, "__init__", self._with_first_optimizer(kind.__init__)))

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
        is_root = not self.inside and not in_backward()
        if is_root and self.model is None:  # a transform of a loader is a module too, and has nothing on the device
            is_root = any(map(self.device.has, (*tensors((args, kwargs)), *module.parameters(), *module.buffers())))
        if is_root:
            for run in self.on_root:
                run(module)
            if module not in self.names:
                for run in self.on_new_root:
                    run(module)
                self.names.update({inner: path for path, inner in module.named_modules()})
                self.hold("parameters", module.named_parameters())
                self.hold("buffers", module.named_buffers())
            outside = (tensor for tensor in tensors(args) if tensor.grad_fn is None)  # else of another model: logits
            for number in (self.numbers.get(storage_key(tensor), -1) for tensor in outside):
                if number >= 0 and not self.log.blocks[number].part:
                    self.log.blocks[number].part = "inputs"
            trains = is_training(module)
            if trains:
                self.steps += self.is_updated  # a step ends where the next forward pass begins
                self.is_updated = False
            self._begin(FORWARD if trains else EVALUATING)
        path = self._name(path, module)
        self._enter(path, module, args, kwargs or {})
        if self.keeps_args:
            inputs = list(map(self._seen, tensors((args, kwargs or {}))))
            self.running.append(ModuleRun(path, inputs, len(self.log.calls)))
            self.log.modules.append(self.running[-1])

    def _left(self, path: str | None, module: nn.Module, args: Any, *rest: Any) -> None:
        path, out = self._name(path, module), rest[-1]  # without or with keywords
        if self.keeps_args:
            while self.running and (run := self.running.pop()).path != path:
                pass  # recomputation may stop in the middle of a module
            run.outputs, run.ended = list(map(self._seen, tensors(out))), len(self.log.calls)
        self._leave(path, module, args, {}, out)

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.inside:  # the operators so far belong to the enclosing module
            _label(tensors((args, kwargs)), self.inside[-1])
        elif in_backward():
            self.recomputations += 1
        self.inside.append(path)

    def _leave(self, path: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        while self.inside and self.inside.pop() != path:
            pass  # recomputation may stop in the middle of a module
        _label(tensors(out), path)

    def path(self) -> str:
        """Return the innermost module's path; in backward, the path of the module whose node autograd evaluates."""
        if self.inside:
            return self.inside[-1]
        node = autograd_node() if in_backward() else None
        return "" if node is None else str(node.metadata.get(_LABEL, ""))

    @property
    def recomputation(self) -> int:
        """Return the number of the running recomputation; 0 outside."""
        return self.recomputations if self.inside and in_backward() else 0

    def _name(self, path: str | None, module: nn.Module) -> str:
        return self.names.get(module, type(module).__name__) if path is None else path

    def _with_first_optimizer(self, initialize: Any) -> Callable[..., None]:
        def noted(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self.first_optimizer = self.first_optimizer or weakref.ref(optimizer)
            initialize(optimizer, *args, **kwargs)

        return noted

    def _stepping(self, optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                number = self.numbers.get(storage_key(parameter), -1)
                block = -1 if parameter.grad is None else self.numbers.get(storage_key(parameter.grad), -1)
                if min(number, block) >= 0:
                    self.log.name(block, "gradients", self.log.blocks[number].owner)
        self._begin(OPTIMIZER)
        self.updating += 1

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        self.owner, self.phase, self.updating = "", BETWEEN, max(self.updating - 1, 0)
        counting = None if self.first_optimizer is None else self.first_optimizer()
        if counting is None or self.waited == _MOST_WAITED:  # the script made another one, or never calls its `step`
            counting, self.first_optimizer = optimizer, weakref.ref(optimizer)
        self.waited = 0 if counting is optimizer else self.waited + 1
        if counting is optimizer:
            self._updated()

    def _updated(self) -> None:
        self.is_updated, self.updates = True, self.updates + 1
        for run in self.on_update:
            run(self.updates)

    def _backward(self, run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._begin(BACKWARD)
        run(*args, **kwargs)
        self.phase = OPTIMIZER if self.updating else BETWEEN  # a closure runs inside the optimizer step
        if self.first_optimizer is None:  # a loop that updates its parameters by hand
            self._updated()

    def _begin(self, phase: str) -> None:
        self.phase = phase
        self.log.begun.setdefault((self.steps, phase), len(self.log.events))

    def position(self) -> Position:
        """Return where the run is."""
        phase = BACKWARD if in_backward() else self.phase
        path = self.owner if phase == OPTIMIZER else self.path()
        return Position(self.steps, phase, path, self.recomputation)

    def line(self) -> str:
        """Return the line of the user's code that runs: in this thread, as in a recomputation, else in the main one.

        For a GPU autograd works in a separate thread. Empty where the device has no lines.
        """
        if not (self.device.has_lines and self.device.has_memory):
            return ""
        for frame in running_frames(self.main):
            while frame is not None:
                code = frame.f_code
                if code not in self.libraries:
                    self.libraries[code] = is_library(frame)
                if not self.libraries[code]:
                    return f"{code.co_filename}:{frame.f_lineno}"
                frame = frame.f_back
        return ""

    # ---- operators ----

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented  # the operators on the tensors inside come next
        if (device_of_fake := fake_device(operator, args)) is not None:
            return device_of_fake
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
                return (_linear if operator is _LINEAR else operator.decompose)(*args, **kwargs)
        summed = storage_key(args[0]) if self._writes_in_place(operator, args) else None
        if self.phase == OPTIMIZER:
            self.owner = self._owner(args[0], self.owner) if args and isinstance(args[0], torch.Tensor) else ""
        at = self.position()
        seen = (self._seen(args), self._seen(kwargs)) if self.keeps_args else ()
        out = device.run(operator, args, kwargs)
        self.log.calls.append(call := Call(operator, at, self.line(), *seen))
        if self.phase in (EVALUATING, BETWEEN):
            call.reads = tuple(self.numbers.get(storage_key(tensor), -1) for tensor in tensors(args))
        if self.running:
            self.running[-1].calls.append(len(self.log.calls) - 1)
        if device.has_memory:
            self._allocated(call, args, kwargs, out, summed)
        call.out = self._seen(out) if self.keeps_args else None
        return out

    def _allocated(self, call: Call, args: Any, kwargs: Any, out: Any, summed: int | None) -> None:
        device, operator, at = self.device, call.operator, call.position
        if summed in self.numbers:
            self._follow(self.numbers.pop(summed), out.untyped_storage())
        results = tensors(out)
        numbers = range(len(results))
        if device.kind == "cuda" and operator_name(operator) == "native_dropout":
            numbers = numbers[::-1]  # CUDA's kernel allocates the mask first
        for number in numbers:
            tensor = results[number]
            if storage_key(tensor) not in self.numbers and device.has(tensor):
                owner = self._owner_of(args, number, len(results)) if at.phase == OPTIMIZER else at.path
                inputs = tensors(args) if at.phase != OPTIMIZER else []
                part = "inputs" if inputs and not any(map(device.has, inputs)) else ""  # moved to the device
                self._watch(tensor, owner, at, part, device.true_bytes(operator, args, number, tensor))
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
        self, tensor: torch.Tensor, owner: str, at: Position | None = None, part: str = "", size: int | None = None
    ) -> None:
        """Add the block of a tensor whose storage is new; `size` for another one than the storage says."""
        stored = tensor.untyped_storage().nbytes()
        if stored and storage_key(tensor) not in self.numbers:
            dtype = "float32" if size else _dtype_name(tensor.dtype)
            number = self._allocate(
                stored if size is None else size, tensor.shape, dtype, owner, at or self.position(), part
            )
            self._follow(number, tensor.untyped_storage())

    def _allocate(self, size: int, shape: Any, dtype: str, owner: str, at: Position, part: str = "") -> int:
        block = self.device.malloc(size)
        number = self.log.born(size, shape, dtype, owner, at, part, self._held())
        self.living[number] = block
        return number

    def _held(self) -> tuple[int, int]:
        allocator = self.device.allocator
        return (0, 0) if allocator is None else (allocator.allocated_bytes, allocator.reserved_bytes)

    def _free(self, number: int, at: Position) -> None:
        if number not in self.living:
            return
        block = self.living.pop(number)
        if self.device.allocator is not None:
            self.device.allocator.free(block)
        self.log.freed(number, at, self._held())

    def _follow(self, number: int, storage: Any) -> None:
        key = key_of(storage)

        def end(_: object) -> None:
            self.ends.pop(key, None)
            self._free(self.numbers.pop(key, -1), self.position())

        self.numbers[key] = number
        self.ends[key] = weakref.ref(storage, end)

    def _resized(self, key: int, storage: Any, before_bytes: int) -> None:
        """Note the new size of a storage: FSDP frees and allocates gathered parameters so."""
        size, number = storage.nbytes(), self.numbers.get(key)
        if number is None or size == before_bytes:
            return
        at, block = self.position(), self.log.blocks[number]
        self._free(number, at)
        if size:
            self.numbers[key] = self._allocate(size, (size,), block.dtype, block.owner, at)

    def _owner(self, tensor: torch.Tensor, otherwise: str = "") -> str:
        number = self.numbers.get(storage_key(tensor), -1)
        return self.log.blocks[number].owner if number >= 0 else otherwise

    def _owner_of(self, args: Any, number: int, results: int) -> str:
        lists = (arg for arg in args if isinstance(arg, (list, tuple)) and len(arg) == results)
        owners = (self._owner(arg[number]) for arg in lists if isinstance(arg[number], torch.Tensor))
        return next(filter(None, owners), self.owner)

    # ---- what no mode sees ----

    def _writes_in_place(self, operator: Any, args: Any) -> bool:
        is_write = operator_name(operator) in _WRITING
        if not (is_write or operator is _ADD) or torch.is_grad_enabled() or (node := autograd_node()) is None:
            return False
        if is_write:
            return node.name().partition("Backward")[0] in _INTO_ZEROS
        is_owned = self.own_counts is not None and use_counts(args[0]) == self.own_counts
        return is_owned and bool(torch.ops.aten.is_non_overlapping_and_dense(args[0]))

    def _random_state(self, get_state: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def watched() -> torch.Tensor:
            state = get_state()
            if self.is_recording and self.device.counts_random_states:
                at = self.position()
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
def _is_composite(operator: Any) -> bool:
    # With a kernel besides the formula, as for silu_backward, a device computes it at once.
    has_own = has_kernel(operator, "CPU") or has_kernel(operator, "CUDA")
    return has_kernel(operator, "CompositeImplicitAutograd") and not has_own


def is_training(module: nn.Module) -> bool:
    """Return True for a call in training: with gradients, or of a module with parameters that trains."""
    return torch.is_grad_enabled() or any(
        inner.training and next(inner.parameters(recurse=False), None) is not None for inner in module.modules()
    )


def is_library(frame: Any) -> bool:
    """Return True for code of Python, of an installed package or this one, but the program itself."""
    name = frame.f_code.co_filename
    if name.startswith("<") or frame.f_globals.get("__name__") != "__main__":
        return name.startswith(_OWN) or any(folder in name for folder in ("/site-packages/", "/dist-packages/"))
    return False


_OWN = (
    "<",
    f"{os.path.dirname(os.__file__)}/",
    f"{os.path.dirname(os.path.dirname(torch.__file__))}/",
    f"{os.path.dirname(bertscope.__file__)}/",
)
