"""Live storages under dispatch: a trace of a step that allocates nothing, on fake tensors.

Two things that torch does without telling a dispatch mode are put back: autograd adds a second gradient
into the first where nobody else holds it (never while a mode is on), and checkpointing keeps the random
state of the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bertscope.analyses.memory.events import Allocation, Block, MemoryTrace, MemoryTraceRecorder
from bertscope.analyses.memory.step import OPTIMIZER, ModelStep
from bertscope.analyses.tracing.fake_tensors import DataDependentAnswers
from bertscope.analyses.tracing.module_tracker import FORWARD, ModuleTracker
from bertscope.analyses.tracing.operator_costs import tensors
from bertscope.torch_access import TorchDispatchMode, autograd_node, operator_name, storage_key, torch, use_counts

Scratch = Callable[[Any, Any], int]
DEVICE_GRANULE_BYTES = 512  # CUDA's caching allocator, c10/core/AllocatorConfig.h: kMinBlockSize


def recorded(step: ModelStep, *, on_device: bool = False, scratch: Scratch | None = None) -> MemoryTrace:
    """The trace of one steady step on fake tensors; the caller has FakeTensorMode on.

    `on_device`: the fake host tensors stand for a device's, so that what stays on the host is left out.
    `scratch` tells the bytes that an operator with these arguments takes only while it runs.
    """
    signature = _owned_by_autograd()
    with _AnsweringMode(step):
        step.make_optimizer_state()
    live = _FakeRunMode(step, signature, on_device, scratch)
    with live.tracker.track(step.model), live, live.random_states():
        step.run(live.phase)
    return live.recorder.trace(DEVICE_GRANULE_BYTES if on_device else 1)


class _AnsweringMode(TorchDispatchMode):
    """Answers what a program reads off a tensor without values: whether anything is masked, or a step counter."""

    def __init__(self, step: ModelStep) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step, self.name = step, OPTIMIZER
        self.answers = DataDependentAnswers(is_masked=step.run_config.padding > 0)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is torch.ops.aten._local_scalar_dense.default:
            return 1 if self.name == OPTIMIZER else self.answers.truth(operator, args[0])
        out = self.run(operator, args, kwargs or {})
        self.answers.note(operator, args, out)
        return out

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Every other operator."""
        return operator(*args, **kwargs)


class _FakeRunMode(_AnsweringMode):
    def __init__(self, step: ModelStep, signature: object, on_device: bool, scratch: Scratch | None) -> None:
        super().__init__(step)
        self.signature, self.on_device, self.scratch = signature, on_device, scratch
        self.tracker, self.recorder = ModuleTracker(), MemoryTraceRecorder()
        self.watched: dict[int, weakref.ref[Any]] = {}
        self.name, self.operator, self.updated = "", "", ""
        self.owners: dict[int, str] = {}  # storage of optimizer state or gradient -> its parameter
        self.trained = [path for path, param in step.model.named_parameters() if param.requires_grad]
        for part, path, tensor in step.state():
            # A step counter lives on the host, unless a fused kernel reads it.
            is_counter = on_device and path.endswith(".step") and step.run_config.implementation != "fused"
            if not is_counter and self._watch(tensor) is not None:
                block = Block(part, path, "", tuple(tensor.shape), _dtype(tensor))
                self.recorder.state.append((block, tensor.untyped_storage().nbytes()))
                owner = path.rpartition(".")[0] if part == "optimizer_state" else path
                self.owners[storage_key(tensor)] = owner

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """The operator, and what came and went with it."""
        self.operator = operator_name(operator)
        if self.name == OPTIMIZER:
            self._find_updated(args)
        reused = storage_key(args[0]) if self._adds_in_place(operator, args) else None
        out = operator(*args, **kwargs)
        if reused is not None:
            self._hand_over(reused, out)
        itemsize = self._statistics_itemsize(operator, args)
        for number, tensor in enumerate(tensors(out)):
            self._add(tensor, self._path(out, number), itemsize if number else None)
        if self.scratch is not None and (extra := self.scratch(operator, args)):
            self._passing(extra)  # beside the results
        return out

    def _find_updated(self, args: Any) -> None:
        """The optimizer works on one parameter after the other; which, is told by its state."""
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        self.updated = "" if first is None else self.owners.get(storage_key(first), self.updated)

    def _where(self) -> tuple[str, str, str]:
        """The module, or while it is updated the parameter; the operator; the phase."""
        path = self.updated if self.name == OPTIMIZER else self.tracker.current()[0]
        return path, self.operator, self.name

    def _path(self, out: Any, number: int) -> str:
        """An optimizer's operator over all parameters gives one tensor for each."""
        if self.name == OPTIMIZER and isinstance(out, (list, tuple)) and len(out) == len(self.trained) > 1:
            return self.trained[number]
        return self._where()[0]

    def _adds_in_place(self, operator: Any, args: Any) -> bool:
        """Whether autograd, with no mode watching, would have added into the first argument."""
        if operator is not torch.ops.aten.add.Tensor or torch.is_grad_enabled() or self.signature is None:
            return False
        is_autograd = autograd_node() is not None
        return is_autograd and use_counts(args[0]) == self.signature and _is_dense(args[0])

    def _hand_over(self, key: int, out: torch.Tensor) -> None:
        """The result lies where the first argument lay."""
        if key in self.recorder.living:
            self.recorder.living[self._watch(out) or 0] = self.recorder.living.pop(key)

    def _watch(self, tensor: torch.Tensor) -> int | None:
        """The key of a storage that was not known; None for an old one, or an empty one."""
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key in self.watched or storage.nbytes() == 0:
            return None

        def free(_: object) -> None:
            del self.watched[key]
            self.owners.pop(key, None)
            self.recorder.free(key, *self._where(), self.tracker.recomputation)

        self.watched[key] = weakref.ref(storage, free)
        return key

    def _statistics_itemsize(self, operator: Any, args: Any) -> int | None:
        """LayerNorm's mean and deviation are in fp32 on a device, and on the host beside weights in fp32.

        torch's shape function says the input's dtype.
        """
        if operator is not torch.ops.aten.native_layer_norm.default or args[0].itemsize == 4:
            return None
        return 4 if self.on_device or (args[2] is not None and args[2].itemsize == 4) else None

    def _add(self, tensor: torch.Tensor, path: str, itemsize: int | None = None) -> None:
        if self.on_device and tensor.dim() == 0 and self.name == OPTIMIZER:
            return  # a counter on the host
        key = self._watch(tensor)
        if key is not None:
            size = tensor.untyped_storage().nbytes() if itemsize is None else itemsize * tensor.numel()
            made = self._allocation(size, path)
            made.shape, made.dtype = tuple(tensor.shape), "float32" if itemsize else _dtype(tensor)
            self.recorder.allocate(key, made, *self._where())

    def _allocation(self, size_bytes: int, path: str) -> Allocation:
        return Allocation(size_bytes, self.name, path, self.operator, self.tracker.recomputation)

    def _passing(self, size_bytes: int) -> None:
        where = self._where()
        self.recorder.allocate(0, self._allocation(size_bytes, where[0]), *where)
        self.recorder.free(0, *where, self.tracker.recomputation)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Named until it ends; then what has lasted has proved what it is."""
        self.name = name
        yield
        if name == FORWARD:
            self.recorder.end_forward()
        for path, param in self.step.model.named_parameters():
            if param.grad is not None:
                key = storage_key(param.grad)
                self.owners[key] = path
                self.recorder.name((key,), "gradients")

    @contextmanager
    def random_states(self) -> Iterator[None]:
        """The host's random state, which checkpointing keeps for each layer, is counted where it lies."""
        original = torch.get_rng_state

        def watched() -> torch.Tensor:
            """The state, counted."""
            state = original()
            if not self.on_device:
                self.operator = "get_rng_state"
                self._add(state, self._where()[0])
            return state

        torch.get_rng_state = watched
        try:
            yield
        finally:
            torch.get_rng_state = original


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_dense(tensor: torch.Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


class _Trial(TorchDispatchMode):
    """Notes the holders of what autograd adds to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[int, int] | None] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is torch.ops.aten.add.Tensor and autograd_node() is not None:
            self.seen.append(use_counts(args[0]))
        return operator(*args, **(kwargs or {}))


def _owned_by_autograd() -> tuple[int, int] | None:
    """The holders of a gradient sum that autograd alone has, in the third of three contributions.

    None where torch no longer tells: sums are then counted as new tensors, and an estimate may be high.
    """
    trial = _Trial()
    with torch.enable_grad(), trial:
        start = torch.ones(8, requires_grad=True).clone()
        torch.autograd.backward(start * 2 + start * 3 + start * 4, torch.ones(8))
    return trial.seen[-1] if trial.seen else None
