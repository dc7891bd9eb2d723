"""A record of one run of a module: its operators by module and phase, the shapes of inputs and outputs, the calls."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from bertscope.analyses.modules.module_tree import InOut, Shapes
from bertscope.analyses.tracing.fake_tensors import (
    META_ATTENTION,
    DataDependentAnswers,
    OperatorResults,
    run_without_values,
)
from bertscope.analyses.tracing.inputs import arguments, inputs_for
from bertscope.analyses.tracing.operator_costs import bytes_moved, cost, shape_of, tensors
from bertscope.analyses.tracing.windows import windows_of
from bertscope.reports.flops import Work
from bertscope.reports.memory import BACKWARD, FORWARD, RECOMPUTE
from bertscope.reports.params import ModuleCall
from bertscope.sources.building import REPEATED, built_for_counting
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import (
    DispatchMode,
    autograd_node,
    fake_device,
    in_backward,
    is_plain_meta,
    load_dynamo_later,
    nn,
    operator_packet,
    torch,
)
from bertscope.torch_access.compiled import uncompiled_modules

_LABEL = "bertscope_module"
_RESULTS = OperatorResults(is_plain_meta)
Seen = Callable[[str, Any], None]  # a module's path, and its inputs or its outputs


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
            stack.enter_context(module.register_forward_pre_hook(partial(enter, at), with_kwargs=True, prepend=True))
            stack.enter_context(module.register_forward_hook(partial(leave, at), with_kwargs=True, always_call=True))
        yield


@contextmanager
def _entered_again(module: nn.Module, enter: Callable[..., None], leave: Callable[..., Any]) -> Iterator[None]:
    """Call `enter` and `leave` around the repetition of a forward pass, which is no call of `module`."""
    forward = vars(module).get("forward")
    if not isinstance(forward, partial) or getattr(forward.func, "__name__", "") != "checkpoint":
        yield
        return
    own = forward.args[0]

    def repeated(*args: Any, **kwargs: Any) -> Any:
        if not in_backward():
            return own(*args, **kwargs)
        enter(module, args, kwargs)
        out = None
        try:
            out = own(*args, **kwargs)
        finally:
            leave(module, args, kwargs, out)
        return out

    module.forward = partial(forward.func, repeated, *forward.args[1:], **forward.keywords)
    try:
        yield
    finally:
        module.forward = forward


class ModuleTracker:
    """The stack of running modules; calls `entered` with a module's inputs and `left` with its outputs."""

    def __init__(self, entered: Seen = lambda *_: None, left: Seen = lambda *_: None) -> None:
        self.stack: list[str] = []
        self.recomputations = 0  # begun so far
        self.entered, self.left = entered, left

    def current(self) -> tuple[str, str]:
        """Return the path of the innermost module, and the phase."""
        if self.stack:
            return self.stack[-1], RECOMPUTE if in_backward() else FORWARD
        if in_backward():
            node = autograd_node()
            return ("" if node is None else node.metadata.get(_LABEL, "")), BACKWARD
        return "", FORWARD

    @property
    def recomputation(self) -> int:
        """Return the number of the running recomputation; 0 outside."""
        return self.recomputations if self.stack and in_backward() else 0

    def track(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which the modules of `model` are tracked."""
        return hooks(model, "", self._enter, self._leave)

    def _enter(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.stack:  # the operators so far belong to the enclosing module
            _label(tensors((args, kwargs)), self.stack[-1])
        elif in_backward():
            self.recomputations += 1
        self.stack.append(path)
        self.entered(path, (args, kwargs))

    def _leave(self, path: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        while self.stack and self.stack.pop() != path:
            pass  # recomputation may stop in the middle of a module
        self.left(path, out)
        _label(tensors(out), path)


def _label(outputs: list[torch.Tensor], path: str) -> None:
    """Label the nodes that computed the outputs; a table of nodes would keep their saved tensors alive."""
    pending: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    while pending:
        node = pending.pop()
        if node is not None and _LABEL not in node.metadata:
            node.metadata[_LABEL] = path
            pending += [following for following, _ in node.next_functions]


_Result = TypeVar("_Result")


@dataclass
class Calls:
    """The calls of one operator in one module and phase."""

    role: str = ""
    calls: int = 0
    elements: int = 0
    work: Work = field(default_factory=Work)


@dataclass
class Running:
    """One call of a module so far; its fields are those of ModuleCall."""

    path: str
    inputs: Shapes
    outputs: Shapes = ()
    matmul_flops: int = 0


@dataclass
class Trace:
    """The calls by (path, phase, operator), and the calls of modules in the order of their beginnings."""

    calls: dict[tuple[str, str, str], Calls] = field(default_factory=lambda: defaultdict(Calls))
    modules: list[Running] = field(default_factory=list)

    def shapes(self) -> dict[str, InOut]:
        """Return the inputs and outputs of each module's first call by path, in the order of these calls."""
        found: dict[str, InOut] = {}
        for call in self.modules:
            found.setdefault(call.path, (call.inputs, call.outputs))
        return found


def trace(model: nn.Module, run: Callable[[], _Result], padding: float = 0.0) -> tuple[Trace, _Result]:
    """Run `run`, which calls `model`; return the record of its operators and shapes, and its result.

    `padding` is the share of each sequence that a mask marked by `mark_valid` hides.
    """
    load_dynamo_later()
    recorder = _OperatorRecorder(model, is_masked=padding > 0)
    with recorder.tracker.track(model), recorder:
        result = run()
    return recorder.trace, result


class _OperatorRecorder(DispatchMode):
    def __init__(self, model: nn.Module, *, is_masked: bool) -> None:
        super().__init__()
        self.trace = Trace()
        self.answers = DataDependentAnswers(is_masked=is_masked)
        self.windows = windows_of(model)
        self.running: list[Running] = []  # the calls of modules that have not ended
        self.tracker = ModuleTracker(self.entered, self.left)

    def entered(self, path: str, tree: Any) -> None:
        """Begin the call of a module."""
        self.running.append(Running(path, _shapes(tree)))
        if (window := self.windows.get(path)) is not None:
            window.enter(self.running[-1].inputs)
        self.trace.modules.append(self.running[-1])

    def left(self, path: str, tree: Any) -> None:
        """End the call of a module."""
        while self.running:
            call = self.running.pop()
            if call.path == path:  # recomputation may stop in the middle of a module
                call.outputs = _shapes(tree)
                return

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (device := fake_device(operator, args)) is not None:
            return device
        try:
            places = self.answers.valid(operator, args)
            out = _RESULTS.run(operator, args, kwargs) if places is None else places
        except RuntimeError:  # tensors on meta and fake tensors have no value
            if operator is torch.ops.aten._local_scalar_dense.default and self.answers.knows(args[0]):
                return self.answers.value(operator, args[0])
            raise
        self.answers.note(operator, args, out)
        path, phase = self.tracker.current()
        calls = self.trace.calls[path, phase, str(operator_packet(operator))]
        calls.role, matmul, elementwise = cost(operator, args, kwargs, out)
        window = self.windows.get(path) if matmul else None
        needed = matmul if window is None else window.needed_flops(operator, args, matmul)
        calls.calls += 1
        calls.elements += sum(tensor.numel() for tensor in tensors(out)[:1])
        if self.running:
            self.running[-1].matmul_flops += matmul
        moved = bytes_moved(operator, args, kwargs, out)
        calls.work += Work(matmul_flops=matmul, elementwise_flops=elementwise, bytes_moved=moved, needed_flops=needed)
        return out


def _shapes(tree: Any) -> Shapes:
    return tuple(map(shape_of, tensors(tree)))


class RunShapes(dict[str, InOut]):
    """The shapes of a run by the path of the module (its first call), the FLOPs of its matrix products, its calls."""

    matmul_flops: int = 0
    calls: tuple[ModuleCall, ...] = ()


def shapes(model: nn.Module, batch: int = 1, seq: int = 128) -> RunShapes:
    """Return the shapes and dtypes of each module's inputs and outputs by path, without computing values.

    A module that does not run is absent. Raises SelectionError for sizes that the model cannot run.
    """
    return shapes_of(model, inputs_for(model, batch, seq))


def source_shapes(source: ModelSource, batch: int, seq: int, given: Collection[str] = ()) -> RunShapes:
    """Return the same for the model of a source, with the `given` inputs of `inputs_for`."""

    def made(device: str = "meta") -> nn.Module:
        """Return the model on a device."""
        if device == "meta":
            return built_for_counting(source, attention=META_ATTENTION).eval()
        return source.build(device=device, attention=META_ATTENTION).eval()

    model = made()
    return run_without_values(source, model, inputs_for(model, batch, seq, given=given), shapes_of, made, given)


def shapes_of(model: nn.Module, inputs: Any) -> RunShapes:
    """Return the same for given inputs; the FLOPs of two layers of `built_for_counting` are those of all."""
    args, kwargs = arguments(inputs)
    stacks = {f"{path}.": vars(module)[REPEATED] for path, module in model.named_modules() if REPEATED in vars(module)}

    def of_all(path: str, flops: int) -> int:
        return flops * next((layers for stack, layers in stacks.items() if path.startswith(stack)), 2) // 2

    recorded, _ = trace(model, lambda: model(*args, **kwargs))
    found = RunShapes(recorded.shapes())
    found.matmul_flops = sum(of_all(path, calls.work.matmul_flops) for (path, *_), calls in recorded.calls.items())
    found.calls = tuple(ModuleCall(**vars(call)) for call in recorded.modules)
    return found
