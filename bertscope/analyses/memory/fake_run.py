"""A run of a step under FakeTensorMode, which allocates nothing, and its memory trace.

A dispatch mode does not see two things, which are added here: autograd adds a second gradient in place into
the first one if nothing else references it (never while a mode is active), and checkpointing saves the random
state of the CPU.
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
    """Return the trace of one step on fake tensors after a first step; the caller enters FakeTensorMode.

    `on_device`: the fake CPU tensors represent CUDA tensors, and tensors that stay on the CPU are left out.
    `scratch` returns the temporary bytes that an operator with these arguments allocates.
    """
    signature = _owned_by_autograd()
    with _AnsweringMode(step):
        step.make_optimizer_state()
    mode = _FakeRunMode(step, signature, on_device, scratch)
    with mode.tracker.track(step.model), mode, mode.random_states():
        step.run(mode.phase)
    return mode.recorder.trace(DEVICE_GRANULE_BYTES if on_device else 1)


class _AnsweringMode(TorchDispatchMode):
    """A mode that answers data-dependent questions such as `mask.any()`, which fake tensors cannot answer."""

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
        """Run any other operator."""
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
            # A step counter is on the CPU, unless a fused kernel reads it.
            is_counter = on_device and path.endswith(".step") and not step.run_config.is_fused
            if not is_counter and self._watch(tensor) is not None:
                block = Block(part, path, "", tuple(tensor.shape), _dtype(tensor))
                self.recorder.state.append((block, tensor.untyped_storage().nbytes()))
                owner = path.rpartition(".")[0] if part == "optimizer_state" else path
                self.owners[storage_key(tensor)] = owner

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Run the operator, and record its allocations and frees."""
        self.operator = operator_name(operator)
        if self.name == OPTIMIZER:
            self._find_updated(args)
        reused = storage_key(args[0]) if self._adds_in_place(operator, args) else None
        out = operator(*args, **kwargs)
        if reused is not None:
            self._reuse(reused, out)
        itemsize = self._statistics_itemsize(operator, args)
        for number, tensor in enumerate(tensors(out)):
            self._add(tensor, self._path(out, number), itemsize if number else None)
        if self.scratch is not None and (extra := self.scratch(operator, args)):
            self._add_scratch(extra)  # in addition to the results
        return out

    def _find_updated(self, args: Any) -> None:
        """Find by the optimizer's state the parameter that it updates; it updates one after the other."""
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        self.updated = "" if first is None else self.owners.get(storage_key(first), self.updated)

    def _where(self) -> tuple[str, str, str]:
        """Return the module, or in the optimizer step the parameter; the operator; the phase."""
        path = self.updated if self.name == OPTIMIZER else self.tracker.current()[0]
        return path, self.operator, self.name

    def _path(self, out: Any, number: int) -> str:
        """Return the path of a result; an optimizer's operator over all parameters returns one tensor for each."""
        if self.name == OPTIMIZER and isinstance(out, (list, tuple)) and len(out) == len(self.trained) > 1:
            return self.trained[number]
        return self._where()[0]

    def _adds_in_place(self, operator: Any, args: Any) -> bool:
        """Return True if autograd, without a mode, adds in place into the first argument."""
        if operator is not torch.ops.aten.add.Tensor or torch.is_grad_enabled() or self.signature is None:
            return False
        is_autograd = autograd_node() is not None
        return is_autograd and use_counts(args[0]) == self.signature and _is_dense(args[0])

    def _reuse(self, key: int, out: torch.Tensor) -> None:
        """Assign the block of the first argument to the result."""
        if key in self.recorder.living:
            self.recorder.living[self._watch(out) or 0] = self.recorder.living.pop(key)

    def _watch(self, tensor: torch.Tensor) -> int | None:
        """Return the key of a new storage; None for a known one, or an empty one."""
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
        """Return the item size of LayerNorm's statistics, which are fp32 on CUDA, and on the CPU for fp32 weights.

        torch's shape function returns the input's dtype.
        """
        if operator is not torch.ops.aten.native_layer_norm.default or args[0].itemsize == 4:
            return None
        return 4 if self.on_device or (args[2] is not None and args[2].itemsize == 4) else None

    def _add(self, tensor: torch.Tensor, path: str, itemsize: int | None = None) -> None:
        if self.on_device and tensor.dim() == 0 and self.name == OPTIMIZER:
            return  # a step counter on the CPU
        key = self._watch(tensor)
        if key is not None:
            size = tensor.untyped_storage().nbytes() if itemsize is None else itemsize * tensor.numel()
            made = self._allocation(size, path)
            made.shape, made.dtype = tuple(tensor.shape), "float32" if itemsize else _dtype(tensor)
            self.recorder.allocate(key, made, *self._where())

    def _allocation(self, size_bytes: int, path: str) -> Allocation:
        return Allocation(size_bytes, self.name, path, self.operator, self.tracker.recomputation)

    def _add_scratch(self, size_bytes: int) -> None:
        where = self._where()
        self.recorder.allocate(0, self._allocation(size_bytes, where[0]), *where)
        self.recorder.free(0, *where, self.tracker.recomputation)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Set the phase; at its end mark saved activations and gradients."""
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
        """Record the random state of the CPU, which checkpointing saves for each layer."""
        original = torch.get_rng_state

        def watched() -> torch.Tensor:
            """Return the random state, and record it."""
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
    """A mode that notes the use counts of the sums that autograd adds to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[int, int] | None] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operator is torch.ops.aten.add.Tensor and autograd_node() is not None:
            self.seen.append(use_counts(args[0]))
        return operator(*args, **(kwargs or {}))


def _owned_by_autograd() -> tuple[int, int] | None:
    """Return the use counts of a gradient sum that only autograd references, in the third of three contributions.

    None if torch has no use counts: sums then count as new tensors, and an estimate may be too high.
    """
    trial = _Trial()
    with torch.enable_grad(), trial:
        start = torch.ones(8, requires_grad=True).clone()
        torch.autograd.backward(start * 2 + start * 3 + start * 4, torch.ones(8))
    return trial.seen[-1] if trial.seen else None
