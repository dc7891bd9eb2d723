"""A step under the recorder and its memory trace, which is a function of the log.

On fake tensors a step allocates nothing. If it is for CUDA, fake CPU tensors represent CUDA tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import methodcaller
from typing import Any

from bertscope.errors import SelectionError
from bertscope.memory.extension_kernels import note_on, row_of
from bertscope.memory.kernels import cpu_scratch, cuda_scratch, resident_threads, result_bytes
from bertscope.memory.step import STEP_END, ModelStep
from bertscope.memory.summary import NAMESPACES, kind_of
from bertscope.memory.trace import (
    CAT,
    GRANULE_BYTES,
    ON_HOST,
    RETURN,
    STACK,
    TO_GPU,
    TO_HOST,
    UPDATE,
    Block,
    Collective,
    MemoryEvent,
    MemoryTrace,
)
from bertscope.reports.memory import BACKWARD, FORWARD, OPTIMIZER
from bertscope.settings.checkpointing import NONE
from bertscope.settings.run_config import CUDA, FREED, LIGHTNING
from bertscope.settings.run_config import FORWARD as FORWARD_ONLY
from bertscope.settings.training import MODEL, OPTIMIZERS
from bertscope.torch_access import (
    compiled_paths,
    operator_name,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
    saved_tensors,
    storage_key,
    torch,
    tree_leaves,
    tree_map,
)
from bertscope.torch_access.distributed import held_tensors, process_group, tensors_in, watched_gathers
from bertscope.tracing.fake_tensors import (
    DataDependentAnswers,
    OperatorResults,
    all_valid,
    fake_as,
    mark_valid,
    mark_whole,
    selects_inputs,
)
from bertscope.tracing.inputs import missing_rule
from bertscope.tracing.log import Call, Event, Position, RunLog, tensors
from bertscope.tracing.record import SETUP, Device, Recorder, hooks

_RESULTS = OperatorResults()
_GATHER, _REDUCE = "_allgather_base_", "_reduce_scatter_base_"  # of FSDP2
_MOVES = ("_to_copy", "copy_")  # between GPU and host
_SAVED, _TEMPORARY = "activations", "temporaries"


def is_on_host(tensor: Any) -> bool:
    """Return True for a tensor in the host's memory: that is meta, as fake CPU tensors represent CUDA tensors."""
    return bool((getattr(tensor, "fake_device", None) or tensor.device).type == "meta")  # its `device` takes time


def nodes_of(ends: Iterable[Any]) -> set[Any]:
    """Return the nodes of autograd's graph from the last ones on."""
    nodes, pending = set[Any](), list(ends)
    while pending:
        if (node := pending.pop()) is not None and node not in nodes:
            nodes.add(node)
            pending += [following for following, _ in node.next_functions]
    return nodes


def kept_by_functions(outputs: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors that functions of Python keep besides what they save: they live as long as the graph."""
    for node in nodes_of(tensor.grad_fn for tensor in outputs):
        yield from tensors(list(getattr(node, "__dict__", {}).values()))


def fake_run(step: ModelStep) -> MemoryTrace:
    """Return one step's trace in the steady state on fake tensors; the caller enters FakeTensorMode.

    Of several micro-batches one is recorded that begins with the gradients of another. The state of the optimizer
    exists for the parameters that get a gradient: a first optimizer step, which is not recorded, creates it after the
    backward pass.
    """
    recorder = StepRecorder(step, FakeDevice(step))
    run_config = step.run_config
    step.offloading = recorder.offloading  # type: ignore[method-assign]
    step.assign = recorder.assigned  # type: ignore[method-assign]  # nothing outlives its use; `in_loop` adds what does
    # What lives on between micro-batches and steps is added by `derived_traces.in_loop`.
    loop = LIGHTNING if run_config.zeroes_between else FREED
    micro_batches = 2 if run_config.has_gradients_before else 1
    if compiled_paths(step.called):  # by a step outside of the mode, in which torch compiles nothing
        step.run_backward()
        step.model.zero_grad()
        recorder.run_compiled()
    with recorder.watching():
        step.start(run_config.changed(loop=loop, accumulate=micro_batches))
        if run_config.parallelism.world_size > 1 or run_config.objects or run_config.step_in_backward:
            # FSDP, a caller's optimizer, or one in backward allocates in its first step what it keeps.
            step.run(recorder.unrecorded)
            if run_config.zeroes_between:  # in the next forward pass
                step.model.zero_grad()
        if run_config.has_gradients_before:
            step.advance(recorder.unrecorded, FORWARD)
        recorder.hold_state()
        step.advance(recorder.recorded, OPTIMIZER, STEP_END)
        if step.optimizer is not None and not run_config.step_in_backward:
            recorder.record_update()
        return recorder.log.trace(run_config.device)


# ---- a memory trace as a function of a log ----


def block_of(log: RunLog, number: int, part: str) -> Block:
    """Return the origin of a block of a log."""
    row = log.blocks[number]
    is_recomputed = log.events[row.born].position.recomputation > 0
    return Block(part, row.owner, log.operator(row.call), row.shape, row.dtype, is_recomputed, row.variable, row.stream)


def events_of(log: RunLog, numbers: Iterable[int], block: Callable[[int], Block]) -> Iterator[MemoryEvent]:
    """Yield these events of a log as memory events; `block` returns a block's origin.

    The order of frees at one place changes from run to run, as when autocast ends: they come as they were allocated.
    """

    def place(event: Event) -> Position | None:
        row = log.blocks[~event.block]
        return event.position if event.block < 0 and row.freed > row.born + 1 else None  # scratch is freed at once

    for freed_at, run in groupby(map(log.events.__getitem__, numbers), key=place):
        for event in sorted(run, key=lambda event: ~event.block) if freed_at else run:
            number, (_, phase, path, _) = max(event.block, ~event.block), event.position
            size = log.blocks[number].size_bytes * (1 if event.block >= 0 else -1)
            yield MemoryEvent(size, block(number), phase, path, log.operator(event.call))


@dataclass
class StepLog(RunLog):
    """The log of a step, with what exists before it."""

    held: list[int] = field(default_factory=list)  # the blocks that exist before all recorded steps
    left: list[int] = field(default_factory=list)  # those that the step before leaves
    begun_at: int = 0  # the first event of the step
    marks: list[tuple[int, MemoryEvent]] = field(default_factory=list)  # events of no bytes, before that event
    collectives: list[Collective] = field(default_factory=list)
    moved: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # bytes between GPU and host, or on the host
    notes: dict[str, None] = field(default_factory=dict)  # on kernels whose rules no test holds
    origins: dict[int, Block] = field(default_factory=dict)

    def hold(self, block: Block, size: int) -> int:
        """Add a block that exists before the step, and return its number."""
        number = self.born(size, block.shape, block.dtype, block.path, Position(0, SETUP, ""), block.part)
        self.blocks[number].call = -1
        self.held.append(number)
        return number

    def alive(self) -> list[int]:
        """Return the blocks that were allocated and not freed since the first step began."""
        held = set(self.held)
        return [number for number, row in enumerate(self.blocks) if row.freed < 0 and number not in held]

    def end_forward(self) -> None:
        """Mark every allocated block as saved for backward."""
        for number in self.alive():
            self.blocks[number].part = self.blocks[number].part or _SAVED

    def restart(self) -> None:
        """Begin a step: the blocks that the one before leaves are its state."""
        self.left, self.begun_at = self.alive(), len(self.events)
        self.held = [number for number in self.held if self.blocks[number].freed < 0]
        self.marks.clear()
        self.collectives.clear()
        self.moved.clear()

    def mark(self, position: Position, operator: str, paths: Iterable[str], counts: Iterable[int]) -> None:
        """Mark a position by a zero-byte event for each path, with a number of elements.

        Marked are where the model's forward returns; parameters with a gradient, before their update; and tensors that
        are stacked or concatenated, by their parameters or buffers.
        """
        for path, count in zip(paths, counts, strict=True):
            origin = Block(_TEMPORARY, path, operator, (count,), "", position.recomputation > 0)
            self.marks.append((len(self.events), MemoryEvent(0, origin, position.phase, position.path, operator)))

    def block(self, number: int) -> Block:
        """Return a block's origin: one that is freed after the recomputation that allocated it is saved."""
        if number not in self.origins:
            row = self.blocks[number]
            ended = self.events[row.freed].position.recomputation if row.freed >= 0 else None
            is_saved = self.events[row.born].position.recomputation not in (0, ended) and ended is not None
            part = row.part or (_SAVED if is_saved else _TEMPORARY)
            self.origins[number] = block_of(self, number, part)
        return self.origins[number]

    def trace(self, device: str) -> MemoryTrace:
        """Return the trace of the step, with the sizes of the device's allocator."""
        state = [(self.block(number), self.blocks[number].size_bytes) for number in self.held + self.left]
        begun, births = self.begun_at, {self.blocks[number].born for number in self.held}
        events: list[MemoryEvent] = []
        for stop, row in (*self.marks, (len(self.events), None)):
            events += events_of(self, (number for number in range(begun, stop) if number not in births), self.block)
            events += [] if row is None else [row]
            begun = stop
        moved = [Collective(*key, size) for key, size in self.moved.items()]
        trace = MemoryTrace.of(state, events, GRANULE_BYTES[device], self.collectives + moved)
        return replace(trace, notes=list(self.notes))


# ---- the recorder of a step ----


class StepDevice(Device):
    """A step's device: what its kernels allocate besides their results follows rules, as no mode sees it."""

    has_lines = False  # a step is code of this package
    has_host = False  # whose memory holds a part of the step

    def __init__(self, step: ModelStep) -> None:
        self.step, self.kind = step, step.run_config.device
        self.counts_random_states = self.kind != CUDA
        # A run on the CPU need not ask for this machine's GPU.
        self.threads = resident_threads(step.run_config) if self.kind == CUDA else 0

    def has(self, tensor: Any) -> bool:
        """Return True for a tensor that is on the device in a real step: an optimizer's numbers are on the CPU."""
        return not ((self.kind == CUDA and tensor.dim() == 0 and self.is_update) or is_on_host(tensor))

    @property
    def is_update(self) -> bool:
        """Return True in an optimizer step, which may be in backward."""
        return bool(self.recorder.phase == OPTIMIZER or self.recorder.updating)

    def scratch(self, operator: Any, args: Any) -> Any:
        return cuda_scratch(operator, args, self.threads) if self.kind == CUDA else cpu_scratch(operator, args)


class FakeDevice(StepDevice):
    """A device of fake tensors, which answers questions such as `mask.any()`, that fake tensors cannot answer."""

    def __init__(self, step: ModelStep) -> None:
        super().__init__(step)
        self.answers = DataDependentAnswers(is_masked=step.run_config.padding > 0)
        self.has_objects = bool(step.run_config.objects)
        self.has_host = step.run_config.offload_activations or step.run_config.offload_optimizer
        self.outside: dict[int, tuple[Any, Any]] = {}  # a real tensor's id -> the tensor, and the fake one for it
        mark_valid(step.inputs, step.run_config.padding)
        if any("label" in name for name in step.inputs):  # the code of the model or its loss selects the valid ones
            mark_whole(step.inputs)

    def takes(self, operator: Any, args: Any, kwargs: Any) -> bool:
        return True

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        is_update = self.is_update
        if is_update and operator is torch.ops.aten.lift_fresh.default:
            out: Any = torch.empty(args[0].shape, dtype=args[0].dtype)  # a step counter, of which no value is needed
        else:
            out = self.answers.valid(operator, args)
        if out is None and not kwargs and selects_inputs(operator, args):
            out = all_valid(operator, args)
        if out is None and self.has_objects:
            args, kwargs = tree_map(self._fake, (args, kwargs))
        if out is None and self.has_host and ("device" in kwargs or any(map(is_on_host, tensors((args, kwargs))))):
            out = operator(*args, **kwargs)
        if out is None:
            try:
                out = _RESULTS.run(operator, args, kwargs)
            except (RuntimeError, NotImplementedError):
                if row_of(operator) is None:
                    raise
                raise SelectionError(missing_rule(operator)) from None
        if note := note_on(operator):
            self.recorder.log.notes[note] = None
        if not (is_update and operator is torch.ops.aten.any.default and args[0].is_floating_point()):  # Prodigy's
            self.answers.note(operator, args, out)
        if is_update and operator_name(operator) in ("mul_", "_foreach_mul_"):
            self.answers.note_products(args[0])
        return out

    def _fake(self, value: Any) -> Any:
        """Return the fake tensor for a real one to which the caller's code refers, such as labels: a further input."""
        if not isinstance(value, torch.Tensor) or hasattr(value, "fake_mode"):
            return value
        if id(value) not in self.outside:
            fake = fake_as(value, torch.empty(0))
            self.outside[id(value)] = value, fake
            size = fake.untyped_storage().nbytes()
            number = self.recorder.log.hold(Block("inputs", "", "", tuple(fake.shape), str(fake.dtype)[6:]), size)
            self.recorder._follow(number, fake.untyped_storage())
        return self.outside[id(value)][1]

    def number(self, tensor: Any) -> Any:
        """Return the value of a one-element tensor; other numbers that an optimizer reads are step counters."""
        return self.answers.value(tensor, otherwise=1 if self.is_update else None)

    def true_bytes(self, operator: Any, args: Any, number: int, tensor: Any) -> int | None:
        return result_bytes(operator, args, number, tensor, on_cuda=self.kind == CUDA)


class StepRecorder(Recorder):
    """The recorder of a step that says where its phases begin and end."""

    log: StepLog
    device: StepDevice

    def __init__(self, step: ModelStep, device: StepDevice, *, keeps_args: bool = False) -> None:
        super().__init__(device, keeps_args=keeps_args)
        self.step, self.log, self.is_recording = step, StepLog(), False
        self.parameters: dict[int, str] = {}  # block of state or a gradient -> its parameter
        self.gathered: str | None = None  # the module whose parameters FSDP gathers
        # The ends of the graphs of the outputs and of the loss. What dies when such a graph is let go lives as long as
        # the variable: what no loss uses, and what selective checkpointing saves and does not need.
        self.graphs: dict[str, list[Any]] = {"output": [], "loss": []}

    def _watch_modules(self, stack: ExitStack) -> None:
        stack.enter_context(hooks(self.step.called, "", self._enter, self._leave))

    def _watch_phases(self, stack: ExitStack) -> None:
        def updating(*_: Any) -> None:
            if self.is_recording:
                paths = [path for path, param in self.step.model.named_parameters() if param.grad is not None]
                self.log.mark(self.position()._replace(path=""), UPDATE, paths, [1] * len(paths))

        row = self.step.run_config.parallelism.row
        if self.step.run_config.step_in_backward:
            stack.callback(register_optimizer_step_pre_hook(self._stepping).remove)
            stack.callback(register_optimizer_step_post_hook(self._stepped).remove)
        if self.step.optimizer is not None and row.divides_optimizer:
            self.step.optimizer.register_step_pre_hook(updating)
        if row.is_sharded:
            stack.enter_context(watched_gathers(self._gathering))

    def _stepping(self, optimizer: Any, *rest: Any) -> None:
        super()._stepping(optimizer, *rest)
        self.phase = BACKWARD  # in which the step is

    def _stepped(self, optimizer: Any, *rest: Any) -> None:
        self.updating -= 1

    def offloading(self) -> AbstractContextManager[Any]:
        """Return the context in which all that is saved for backward moves to the host, as in torch's save_on_cpu."""
        to_host = methodcaller("to", "meta", memory_format=torch.contiguous_format)
        return torch.autograd.graph.saved_tensors_hooks(to_host, methodcaller("to", "cpu"))

    @contextmanager
    def _gathering(self, path: str) -> Iterator[None]:
        self.gathered = path
        yield
        self.gathered = None

    @contextmanager
    def recorded(self, phase: str) -> Iterator[None]:
        """Record a phase; at its end mark saved activations and gradients."""
        self.phase, self.is_recording = phase, True
        yield
        living, variable = list(self.living), "output" if phase == FORWARD else "loss"
        self.graphs[variable].clear()
        self._refer((number for number in living if number not in self.living), variable)
        self.is_recording = False
        if phase == FORWARD and self.step.run_config.mode == FORWARD_ONLY:  # the graph lives as long as the output
            self._refer(self.living, "output")
        if phase == FORWARD:
            self.log.end_forward()
        for path, param in self.step.model.named_parameters():
            for grad in held_tensors(param.grad) if param.grad is not None else ():
                if (number := self.numbers.get(storage_key(grad), -1)) >= 0:
                    self.parameters[number], self.log.blocks[number].part = path, "gradients"

    @contextmanager
    def unrecorded(self, phase: str) -> Iterator[None]:
        """Run a phase without recording it."""
        self.phase = phase
        yield

    def record_update(self) -> None:
        """Record an optimizer step after the first one, which creates the optimizer's state."""
        if not self.step.run_config.objects:  # else a whole step has run
            with self.unrecorded(OPTIMIZER):
                self.step.optimizer.step()
            self.hold_state()
        self.step.run(self.recorded)

    def hold_state(self) -> None:
        """Record what is allocated now and not known yet as state, which exists before the step."""
        run_config = self.step.run_config
        row = OPTIMIZERS.get(run_config.optimizer)
        is_apart = self.device.kind == CUDA and run_config.optimizer_implementation != "fused"
        host_state = row.host_state if row and is_apart else ()  # such as step counters
        for block, tensor in self.step.state():
            is_number = block.part == "optimizer_state" and block.path.rpartition(".")[2] in host_state
            if is_on_host(tensor):
                self.log.moved[OPTIMIZER, ON_HOST, block.path] = tensor.nbytes
            elif not is_number and storage_key(tensor) not in self.numbers:
                number = self.log.hold(block, tensor.untyped_storage().nbytes())
                self._follow(number, tensor.untyped_storage())
                is_state = block.part == "optimizer_state"
                self.parameters[number] = block.path.rpartition(".")[0] if is_state else block.path
                if block.part == "gradients" or run_config.objects:  # the step may free them
                    self.living[number] = None

    def assigned(self, name: str, value: Any, number: int = 0) -> None:
        """Note the blocks that a variable of the loop refers to; an output may have a graph that no backward frees."""
        if not self.is_recording:
            return
        known = list(tensors_in(value))
        known += kept_by_functions(known) if name == "output" else ()
        numbers = (self.numbers.get(storage_key(tensor), -1) for tensor in known)
        self._refer((number for number in numbers if number in self.living), name)
        ends, run_config = [tensor.grad_fn for tensor in tensors_in(value)], self.step.run_config
        if name == "loss" and run_config.checkpointing == NONE and not run_config.offload_activations:
            # What the graph of an output saves that the loss does not use lives as long as the output.
            unused = nodes_of(self.graphs["output"]) - nodes_of(ends)
            saved = {storage_key(tensor) for node in unused for tensor in saved_tensors(node)}
            numbers = (number for key, number in self.numbers.items() if key in saved and number in self.living)
            self._refer((number for number in numbers if not self.log.blocks[number].part), "output")
        if name == "loss" or run_config.loss == MODEL:  # else a variable of the criterion
            self.graphs[name] += ends
        if name == "output":
            position = self.position()
            self.log.mark(position, RETURN, [position.path], [1])

    def _refer(self, numbers: Iterable[int], variable: str) -> None:
        """Note the variable of the loop that refers to blocks; the first output of several calls counts."""
        for number in numbers:
            self.log.blocks[number].variable = self.log.blocks[number].variable or variable

    def _owner(self, tensor: torch.Tensor, otherwise: str = "") -> str:
        number = self.numbers.get(storage_key(tensor), -1)
        if number >= 0 and self.log.events[self.log.blocks[number].born].position.phase == OPTIMIZER:
            return self.log.blocks[number].owner or otherwise
        return self.parameters.get(number) or otherwise

    def _allocated(self, call: Call, args: Any, kwargs: Any, out: Any, summed: int | None) -> None:
        name, position = self.log.operator(len(self.log.calls) - 1), call.position
        if call.operator.namespace in NAMESPACES and (kind := kind_of(name)):
            self._note_collective(kind, name, args, (args, kwargs, out))
        if (name == STACK and self.phase == OPTIMIZER) or (name == CAT and not position.path):
            owners = list(map(self._owner, args[0]))
            if any(owners):  # a loss may join tensors that are no parameter's
                self.log.mark(position, name, owners, [tensor.numel() for tensor in args[0]])
        super()._allocated(call, args, kwargs, out, summed)
        if name in _MOVES and self.device.has_host:
            self._note_move(position, args[name == "copy_"], out)
        results = tensors(out) if self.phase == OPTIMIZER and self.device.kind == CUDA else []
        for index, tensor in enumerate(results):  # numbers, such as norms, are no blocks and belong to a parameter
            if storage_key(tensor) not in self.numbers:
                number = -2 - len(self.parameters)
                self.parameters[number] = self._owner_of(args, index, len(results))
                self._follow(number, tensor.untyped_storage())

    def _note_move(self, position: Position, moved: Any, out: Any) -> None:
        """Record a copy between GPU and host, and name the block of a gradient, or of what was saved."""
        is_down = is_on_host(out)
        if is_down == is_on_host(moved):
            return
        number = self.numbers.get(storage_key(moved if is_down else out), -1)
        if position.phase == BACKWARD and number >= 0:
            self.log.blocks[number].part = "gradients" if is_down else _SAVED
        self.log.moved[position.phase, TO_HOST if is_down else TO_GPU, position.path] += moved.nbytes

    def _note_collective(self, kind: str, name: str, args: Any, tree: Any) -> None:
        """Record a collective of these arguments, and mark the tensors' blocks in `tree`.

        FSDP2 allocates the result of each in another stream than computation (foreach_all_gather and
        foreach_reduce of _fsdp_collectives.py).
        """
        leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        size = max((leaf.nbytes for leaf in leaves), default=0)
        path = self.path() if self.gathered is None else self.gathered
        group = process_group(args)
        self.log.collectives.append(Collective(self.phase, kind, path, size, group.size() if group else 1))
        for leaf in leaves:
            number = self.numbers.get(storage_key(leaf), -1)
            if number in self.living and not self.log.blocks[number].part:
                self.log.blocks[number].part = "communication"
                is_own = name == _GATHER or (name == _REDUCE and leaf.nbytes < size)
                self.log.blocks[number].stream = name if is_own else ""

    def _resized(self, key: int, storage: Any, before_bytes: int) -> None:
        """Record the new size of a storage: FSDP frees and allocates gathered parameters so."""
        size = storage.nbytes()
        if not self.is_recording or size == before_bytes:
            return
        at = self.position()._replace(recomputation=0)
        self.log.calls.append(Call("resize_", at, ""))
        if before_bytes:
            self._free(self.numbers.get(key, -1), at)
        if size:
            self._follow(self._allocate(size, (size,), "uint8", at.path, at, "gathered_parameters"), storage)
