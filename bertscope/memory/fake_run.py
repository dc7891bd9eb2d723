"""A run of a step under FakeTensorMode, which allocates nothing, and its memory trace.

A dispatch mode does not see two things, which are added here: autograd adds a second gradient in place into
the first one if nothing else references it (never while a mode is active), and checkpointing saves the random
state of the CPU.
"""

import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import repeat
from typing import Any, NamedTuple

from bertscope.memory.kernel_rules import Scratch, resident_threads
from bertscope.memory.kernels import cpu_scratch, cuda_scratch, statistics_bytes
from bertscope.memory.parallel.collectives import NAMESPACES, Collective, kind_of
from bertscope.memory.step import ModelStep, dtype_name
from bertscope.memory.trace import (
    CAT,
    GRANULE_BYTES,
    RETURN,
    STACK,
    UPDATE,
    Block,
    MemoryEvent,
    MemoryTrace,
)
from bertscope.reports.memory import FORWARD, OPTIMIZER
from bertscope.settings.run_config import FORWARD as FORWARD_ONLY
from bertscope.torch_access import (
    DispatchMode,
    fake_device,
    operator_name,
    storage_key,
    torch,
    tree_leaves,
)
from bertscope.torch_access.compiled import compiled_paths
from bertscope.torch_access.distributed import (
    group_size,
    held_tensors,
    is_wrapper,
    tensors_in,
    watched_gathers,
    watched_resizes,
)
from bertscope.tracing.fake_tensors import DataDependentAnswers, OperatorResults, all_valid, mark_valid
from bertscope.tracing.operator_costs import tensors
from bertscope.tracing.record import Recorder, owned_by_autograd
from bertscope.tracing.trace import ModuleTracker

_RESULTS = OperatorResults()
_GATHER, _REDUCE = "_allgather_base_", "_reduce_scatter_base_"  # of FSDP2
# Optimizer steps by what decides their events, which is neither the batch nor the length: state and events.
_Rows = list[list[Any]]  # of the state, the events and the collectives
_UPDATES: dict[Hashable, _Rows] = {}
_MOST_UPDATES = 16
# The fields of RunConfig that change the optimizer step only by the gradients that they leave.
_GRADIENT_FIELDS = {"batch", "seq", "checkpointing", "reentrant"}


def fake_run(step: ModelStep) -> MemoryTrace:
    """Return the trace of one step in the steady state on fake tensors; the caller enters FakeTensorMode.

    If the step is for CUDA, the fake CPU tensors represent CUDA tensors. Of several micro-batches one is recorded that
    begins with the gradients of another. The state of the optimizer exists for the parameters that get a gradient:
    a first optimizer step, which is not recorded, creates it after the backward pass.
    """
    mode = RunMode(step)
    is_parallel = step.run_config.parallelism.world_size > 1
    step.assign = mode.assigned  # type: ignore[method-assign]  # nothing outlives its use; `in_loop` adds what does
    if compiled_paths(step.called):  # by a step outside of the mode, in which torch compiles nothing
        step.run_micro_batch()
        step.model.zero_grad()
        mode.run_compiled()
    with mode.watching():
        if is_parallel:  # FSDP allocates in its first step what it keeps
            step.run(mode.unrecorded_phase)
        if step.run_config.has_gradients_before:
            step.run_micro_batch(mode.unrecorded_phase, is_last=step.run_config.accumulate == 1)
        mode.add_state()
        step.run_micro_batch(mode.phase)
        if step.optimizer is None:
            return mode.trace()
        before, known = mode.rows(), mode.update_key()
        if known not in _UPDATES:
            with mode.unrecorded_phase(OPTIMIZER):
                step.optimizer.step()
            mode.add_state()
            step.update(mode.phase)
            while len(_UPDATES) >= _MOST_UPDATES:
                _UPDATES.pop(next(iter(_UPDATES)))
            _UPDATES[known] = [rows[len(own) :] for rows, own in zip(mode.rows(), before, strict=True)]
    state, events, calls = (own + rows for own, rows in zip(before, _UPDATES[known], strict=True))
    return MemoryTrace.of(state, events, GRANULE_BYTES[step.run_config.device], calls)


class Place(NamedTuple):
    """The phase, module and operator that run at one time."""

    phase: str = ""
    path: str = ""
    operator: str = ""
    recompute: int = 0  # the number of the recomputation; 0 for none


@dataclass
class Allocation:
    """A storage while its trace is recorded, with the place that allocated it."""

    size_bytes: int
    place: Place
    shape: tuple[int, ...] = ()
    dtype: str = ""
    part: str = ""
    is_saved: bool = False  # freed after the forward pass or the recomputation that allocated it
    variable: str = ""  # that refers to it
    stream: str = ""

    @cached_property
    def block(self) -> Block:
        """Return its kind of block, which is known at the end of the step."""
        part = self.part or ("activations" if self.is_saved else "temporaries")
        is_recomputed = self.place.recompute > 0
        return Block(part, *self.place[1:3], self.shape, self.dtype, is_recomputed, self.variable, self.stream)


@dataclass
class MemoryTraceRecorder:
    """A recorder of allocations and frees."""

    state: list[tuple[Block, int]] = field(default_factory=list)
    log: list[tuple[int, Allocation, Place]] = field(default_factory=list)
    living: dict[int, Allocation] = field(default_factory=dict)  # by key; only storages that the step allocated
    left: int = 0  # last entries of the state, which the step before allocated

    def allocate(self, key: int, made: Allocation, place: Place) -> None:
        """Record an allocation."""
        self.living[key] = made
        self.log.append((made.size_bytes, made, place))

    def free(self, key: int, place: Place) -> None:
        """Record a free; ignore a key that was allocated before the step."""
        made = self.living.pop(key, None)
        if made is None:
            return
        if made.place.recompute and place.recompute != made.place.recompute:
            made.is_saved = True
        self.log.append((-made.size_bytes, made, place))

    def end_forward(self) -> None:
        """Mark every allocated block as saved for backward."""
        for made in self.living.values():
            made.is_saved = True

    def refer(self, keys: Iterable[int], variable: str) -> None:
        """Note the variable of the loop that refers to allocated blocks; the first output of several calls counts."""
        for key in keys:
            if key in self.living:
                self.living[key].variable = self.living[key].variable or variable

    def mark(self, place: Place, paths: Iterable[str], counts: Iterable[int] = repeat(1)) -> None:
        """Mark a place by an event of no bytes for each path, with a number of elements.

        That is the return of the model's forward; the parameters with a gradient, before their update; and the tensors
        that are stacked or concatenated, by their parameters or buffers.
        """
        for path, count in zip(paths, counts, strict=False):
            self.log.append((0, Allocation(0, place._replace(path=path), (count,)), place))

    def restart(self, known: Collection[int] = ()) -> None:
        """Begin a step: the blocks that the one before leaves are its state, with those that were state `known`."""
        left = [(made.block, made.size_bytes) for key, made in self.living.items() if key not in known]
        del self.state[len(self.state) - self.left :]
        self.state += left
        self.left = len(left)
        self.log.clear()

    def name(self, keys: Iterable[int], part: str) -> None:
        """Assign allocated blocks to a part."""
        for key in keys:
            if key in self.living:
                self.living[key].part = part

    def events(self) -> list[MemoryEvent]:
        """Return the events of the step until now."""
        return [MemoryEvent(size, made.block, *place[:3]) for size, made, place in self.log]

    def trace(self, device: str, calls: Iterable[Collective] = ()) -> MemoryTrace:
        """Return the trace, with the sizes of the device's allocator."""
        return MemoryTrace.of(self.state, self.events(), GRANULE_BYTES[device], calls)


class RunMode(DispatchMode):
    """A mode that records memory, and answers questions such as `mask.any()`, which fake tensors cannot answer."""

    def __init__(self, step: ModelStep) -> None:
        super().__init__()
        self.step = step
        self.answers = DataDependentAnswers(is_masked=step.run_config.padding > 0)
        mark_valid(step.inputs, step.run_config.padding)
        self.own_counts = owned_by_autograd()  # of a gradient sum that only autograd references
        self.on_device = step.run_config.device == "cuda"  # tensors that stay on the CPU are left out
        self.scratch = cpu_scratch
        if self.on_device:  # a run on the CPU need not ask for this machine's GPU
            self.scratch = partial(cuda_scratch, card_threads=resident_threads(step.run_config))
        self.tracker, self.recorder = ModuleTracker(), MemoryTraceRecorder()
        self.has_labels = any("label" in name for name in step.inputs)  # the model's own code may select the valid ones
        self.watched: dict[int, weakref.ref[Any]] = {}
        self.name, self.operator, self.owner = "", "", ""
        self.is_recording = False
        self.known: set[int] = set()  # storages that are state
        self.owners: dict[int, str] = {}  # storage of optimizer state or gradient -> its parameter
        self.collectives: list[Collective] = []
        self.gathered: str | None = None  # the module whose parameters FSDP gathers

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the step: its modules and operators, and what no mode sees."""
        is_sharded = self.step.run_config.parallelism.row.is_sharded
        with ExitStack() as stack:
            stack.enter_context(self.tracker.track(self.step.called))
            stack.enter_context(self)
            stack.enter_context(self.random_states())
            stack.enter_context(watched_resizes(self.resized))
            if self.step.optimizer is not None and self.step.run_config.parallelism.row.divides_optimizer:
                self.step.optimizer.register_step_pre_hook(self.updating)
            if is_sharded:
                stack.enter_context(watched_gathers(self.gathering))
            yield

    def updating(self, *_: Any) -> None:
        """Mark the parameters with a gradient, before their update."""
        if self.is_recording:
            params = self.step.model.named_parameters()
            self.recorder.mark(Place(self.name, "", UPDATE), [path for path, own in params if own.grad is not None])

    @contextmanager
    def gathering(self, path: str) -> Iterator[None]:
        """Attribute collectives to the module whose parameters are gathered."""
        self.gathered = path
        yield
        self.gathered = None

    def rows(self) -> _Rows:
        """Return what was recorded until now."""
        return [list(self.recorder.state), self.recorder.events(), list(self.collectives)]

    def trace(self) -> MemoryTrace:
        """Return the trace of what was recorded until now."""
        return self.recorder.trace(self.step.run_config.device, self.collectives)

    def assigned(self, name: str, value: Any, number: int = 0) -> None:
        """Note the blocks that a variable of the loop refers to; an output may have a graph that no backward frees."""
        if not self.is_recording:
            return
        self.recorder.refer(map(storage_key, tensors_in(value)), name)
        if name == "output":
            place = self._place()._replace(operator=RETURN)
            self.recorder.mark(place, [place.path])
        elif self.step.run_config.mode == FORWARD_ONLY:
            self.recorder.refer(list(self.recorder.living), "output")

    def restart(self) -> None:
        """Begin to record a further step."""
        self.recorder.restart(self.known)
        self.collectives.clear()

    def update_key(self) -> Hashable:
        """Return all that decides the events of the optimizer step: its settings, threads, parameters and gradients."""
        settings = vars(self.step.run_config).items()
        chosen = tuple(value for name, value in settings if name not in _GRADIENT_FIELDS)
        seen: dict[int, int] = {}  # storage -> number of the first parameter or gradient that has it

        def kind(tensor: torch.Tensor | None) -> Hashable:
            """Return the layout of a tensor, and what the recorder knows of its storage."""
            if tensor is None:
                return None
            key = storage_key(tensor)
            made = self.recorder.living.get(key)
            layout = (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
            return layout, seen.setdefault(key, len(seen)), made and (made.block, made.size_bytes)

        params = self.step.model.named_parameters()
        threads = torch.get_num_threads()
        return chosen, threads, tuple((path, kind(param), kind(param.grad)) for path, param in params)

    def add_state(self) -> None:
        """Record what is allocated now and not known yet as state, which exists before the step."""
        is_fused = self.step.run_config.optimizer_implementation == "fused"
        for block, tensor in self.step.state():
            # A step counter is on the CPU, unless a fused kernel reads it.
            is_counter = self.on_device and not is_fused and block.path.endswith(".step")
            key, size = storage_key(tensor), tensor.untyped_storage().nbytes()
            if not is_counter and key not in self.watched:
                self.recorder.state.append((block, size))
                is_state = block.part == "optimizer_state"
                self.owners[key] = block.path.rpartition(".")[0] if is_state else block.path
                self._watch(tensor)
                self.known.add(key)
                if block.part == "gradients":  # the step may free them
                    place = Place(path=block.path)
                    self.recorder.living[key] = Allocation(size, place, block.shape, block.dtype, block.part)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented  # the operators on the tensors inside come next
        if (device := fake_device(operator, args)) is not None:
            return device
        if operator is torch.ops.aten._local_scalar_dense.default:
            # Other numbers that an optimizer reads are step counters.
            return self.answers.value(operator, args[0], otherwise=1 if self.name == OPTIMIZER else None)
        named = kwargs or {}
        out = self.recorded(operator, args, named) if self.is_recording else self.result(operator, args, named)
        self.answers.note(operator, args, out)
        if self.name == OPTIMIZER and operator_name(operator) in ("mul_", "_foreach_mul_"):
            self.answers.note_products(args[0])
        return out

    def result(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator on fake tensors."""
        if self.name == OPTIMIZER and operator is torch.ops.aten.lift_fresh.default:
            return torch.empty(args[0].shape, dtype=args[0].dtype)  # a step counter, of which no value is needed
        if (places := self.answers.valid(operator, args)) is not None:
            return places
        is_own_code = self.has_labels and not kwargs and not self.tracker.current()[0]
        if is_own_code and (bound := all_valid(operator, args)) is not None:
            return bound
        return _RESULTS.run(operator, args, kwargs)

    def recorded(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Run the operator, and record its allocations and frees."""
        self.operator = operator_name(operator)
        if self.name == OPTIMIZER:  # it updates one parameter after the other; their state says which
            self.owner = self._owner(args[0], self.owner) if args and isinstance(args[0], torch.Tensor) else ""
        reused = storage_key(args[0]) if self._sums_in_place(operator, args) else None
        out = self.result(operator, args, kwargs)
        if operator.namespace in NAMESPACES and (kind := kind_of(self.operator)):
            self.note_collective(kind, args, (args, kwargs, out))
        if reused in self.recorder.living:
            self.recorder.living[self._watch(out)] = self.recorder.living.pop(reused)
        results = tensors(out)
        if (self.name == OPTIMIZER and self.operator == STACK) or (self.operator == CAT and not self._place().path):
            owners = list(map(self._owner, args[0]))
            if any(owners):  # a loss may join tensors that are no parameter's
                self.recorder.mark(self._place(), owners, [tensor.numel() for tensor in args[0]])
        numbered = list(enumerate(results))
        if self.on_device and self.operator == "native_dropout":
            numbered.reverse()  # CUDA's kernel allocates the mask first
        for number, tensor in numbered:
            owner = self._owner_of(args, number, len(results)) if self.name == OPTIMIZER else None
            self._add(tensor, self.true_bytes(operator, args, number, tensor), owner)
            if owner:
                self.owners.setdefault(self._watch(tensor), owner)
        if extra := self.scratch(operator, args):  # in addition to the results
            place = self._place()
            by_rule = extra if isinstance(extra, Scratch) else Scratch("", ())  # 0 bytes of a rule are an event too
            size = extra.size_bytes if isinstance(extra, Scratch) else extra
            self.recorder.allocate(0, Allocation(size, place, by_rule.numbers, by_rule.rule), place)
            self.recorder.free(0, place)
        return out

    # A sum of gradients that autograd owns, and the parameter of a result in the optimizer step.
    _sums_in_place: Any = Recorder._sums_in_place
    _owner_of: Any = Recorder._owner_of

    def _owner(self, tensor: torch.Tensor, otherwise: str = "") -> str:
        return self.owners.get(storage_key(tensor), otherwise)

    def _place(self) -> Place:
        """Return the place of the running operator; in the optimizer step its path is that of the parameter."""
        path = self.owner if self.name == OPTIMIZER else self.tracker.current()[0]
        return Place(self.name, path, self.operator, self.tracker.recomputation)

    def _watch(self, tensor: torch.Tensor) -> int:
        """Return the key of a new storage, whose free will be recorded."""
        return self._watch_storage(tensor.untyped_storage(), storage_key(tensor))

    def _watch_storage(self, storage: Any, key: int) -> int:
        if key in self.watched:
            return key

        def free(_: object) -> None:
            del self.watched[key]
            self.owners.pop(key, None)
            self.recorder.free(key, self._place())

        self.watched[key] = weakref.ref(storage, free)
        return key

    def resized(self, key: int, storage: Any, before_bytes: int) -> None:
        """Record the new size of a storage: FSDP frees and allocates gathered parameters so."""
        size = storage.nbytes()
        if not self.is_recording or size == before_bytes:
            return
        place = Place(self.name, self._place().path, "resize_")
        if before_bytes:
            self.recorder.free(key, place)
        if size:
            if key not in self.watched:
                self._watch_storage(storage, key)
            self.recorder.allocate(key, Allocation(size, place, (size,), "uint8", "gathered_parameters"), place)

    def note_collective(self, kind: str, args: Any, tree: Any) -> None:
        """Record a collective of these arguments, and mark the blocks of the tensors in `tree`, its own ones.

        FSDP2 allocates the result of each in another stream than that of computation (foreach_all_gather and
        foreach_reduce of _fsdp_collectives.py).
        """
        given = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        size = max((leaf.nbytes for leaf in given), default=0)
        path = self.tracker.current()[0] if self.gathered is None else self.gathered
        self.collectives.append(Collective(self.name, kind, path, size, group_size(args)))
        for leaf in given:
            made = self.recorder.living.get(storage_key(leaf))
            if made is not None and not made.part:
                made.part = "communication"
                is_own = self.operator == _GATHER or (self.operator == _REDUCE and leaf.nbytes < size)
                made.stream = self.operator if is_own else ""

    def true_bytes(self, operator: Any, args: Any, number: int, tensor: torch.Tensor) -> int | None:
        """Return the bytes of a result that torch's shape function gets wrong; None for any other."""
        return statistics_bytes(operator, args, number, tensor, on_cuda=self.on_device)

    def _add(self, tensor: torch.Tensor, size_bytes: int | None = None, path: str | None = None) -> None:
        """Record a result whose storage is new; `path` is its parameter, by default that of the running operator."""
        size = tensor.untyped_storage().nbytes() if size_bytes is None else size_bytes
        is_counter = self.on_device and tensor.dim() == 0 and self.name == OPTIMIZER  # which is on the CPU
        if is_counter or not size or storage_key(tensor) in self.watched:
            return
        place = self._place()
        made_at = place if path is None else place._replace(path=path)
        dtype = "float32" if size_bytes and tensor.is_floating_point() else dtype_name(tensor)
        self.recorder.allocate(self._watch(tensor), Allocation(size, made_at, tuple(tensor.shape), dtype), place)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record a phase; at its end mark saved activations and gradients."""
        self.name, self.is_recording = name, True
        yield
        self.is_recording = False
        if name == FORWARD:
            self.recorder.end_forward()
        for path, param in self.step.model.named_parameters():
            for grad in held_tensors(param.grad) if param.grad is not None else ():
                key = storage_key(grad)
                self.owners[key] = path
                self.recorder.name((key,), "gradients")

    @contextmanager
    def unrecorded_phase(self, name: str) -> Iterator[None]:
        """Run a phase without recording it."""
        self.name = name
        yield

    @contextmanager
    def random_states(self) -> Iterator[None]:
        """Record the random state of the CPU, which checkpointing saves for each layer."""
        original = torch.get_rng_state

        def watched() -> torch.Tensor:
            state = original()
            if self.is_recording and not self.on_device:
                self.operator = "get_rng_state"
                self._add(state)
                # Reentrant checkpointing runs a layer without gradients; its node keeps the state, the output the node.
                if self.name == FORWARD and not torch.is_grad_enabled():
                    self.recorder.refer([storage_key(state)], "output")
            return state

        torch.get_rng_state = watched
        try:
            yield
        finally:
            torch.get_rng_state = original
