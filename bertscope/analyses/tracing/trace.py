"""A record of one run of a module: its operators by module and phase, and the shapes of inputs and outputs."""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bertscope.analyses.modules.module_tree import Node, read
from bertscope.analyses.tracing.fake_tensors import META_ATTENTION, DataDependentAnswers, run_without_values
from bertscope.analyses.tracing.inputs import arguments, inputs_for
from bertscope.analyses.tracing.module_tracker import ModuleTracker
from bertscope.analyses.tracing.operator_costs import bytes_moved, cost, shape_of, tensors
from bertscope.reports.base import TensorShape
from bertscope.reports.flops import Work
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import DispatchMode, load_dynamo_later, nn, operator_packet, torch

_Result = TypeVar("_Result")
Shapes = tuple[TensorShape, ...]
InOut = tuple[Shapes, Shapes]


@dataclass
class Calls:
    """The calls of one operator in one module and phase."""

    role: str = ""
    calls: int = 0
    elements: int = 0
    work: Work = field(default_factory=Work)


@dataclass
class Trace:
    """The calls by (path, phase, operator), and the shapes of each module's inputs and outputs by path."""

    calls: dict[tuple[str, str, str], Calls] = field(default_factory=lambda: defaultdict(Calls))
    inputs: dict[str, Shapes] = field(default_factory=dict)
    outputs: dict[str, Shapes] = field(default_factory=dict)


def trace(model: nn.Module, run: Callable[[], _Result]) -> tuple[Trace, _Result]:
    """Run `run`, which calls `model`; return the record of its operators and shapes, and its result."""
    load_dynamo_later()
    recorder = _Recorder()
    with recorder.tracker.track(model), recorder:
        result = run()
    return recorder.trace, result


class _Recorder(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self.answers = DataDependentAnswers(is_masked=False)
        self.tracker = ModuleTracker(
            entered=lambda path, tree: _keep(self.trace.inputs, path, tree),
            left=lambda path, tree: _keep(self.trace.outputs, path, tree),
        )

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            out = operator(*args, **kwargs)
        except RuntimeError:  # tensors on meta and fake tensors have no value
            if operator is torch.ops.aten._local_scalar_dense.default and self.answers.knows(args[0]):
                return self.answers.value(operator, args[0])
            raise
        self.answers.note(operator, args, out)
        path, phase = self.tracker.current()
        calls = self.trace.calls[path, phase, str(operator_packet(operator))]
        calls.role, matmul, elementwise = cost(operator, args, kwargs, out)
        calls.calls += 1
        calls.elements += sum(tensor.numel() for tensor in tensors(out)[:1])
        moved = bytes_moved(operator, args, kwargs, out)
        calls.work += Work(matmul_flops=matmul, elementwise_flops=elementwise, bytes_moved=moved)
        return out


def _keep(shapes: dict[str, Shapes], path: str, tree: Any) -> None:
    shapes.setdefault(path, tuple(map(shape_of, tensors(tree))))


class RunShapes(dict[str, InOut]):
    """The shapes of a run by the path of the module, and the FLOPs of its matrix products."""

    matmul_flops: int = 0


def shapes(model: nn.Module, batch: int = 1, seq: int = 128) -> RunShapes:
    """Return the shapes and dtypes of each module's inputs and outputs by path, without computing values.

    A module that does not run is absent. Raises SelectionError for sizes that the model cannot run.
    """
    return shapes_of(model, inputs_for(model, batch, seq))


def source_shapes(source: ModelSource, batch: int, seq: int, given: Collection[str] = ()) -> RunShapes:
    """Return the same for the model of a source, with the `given` inputs of `inputs_for`."""

    def made(device: str = "meta") -> nn.Module:
        """Return the model on a device."""
        return source.build(device=device, attention=META_ATTENTION).eval()

    model = made()
    return run_without_values(source, model, inputs_for(model, batch, seq, given=given), shapes_of, made)


def shapes_of(model: nn.Module, inputs: Any) -> RunShapes:
    """Return the same for given inputs."""
    args, kwargs = arguments(inputs)
    recorded, _ = trace(model, lambda: model(*args, **kwargs))
    found = RunShapes((path, (given, recorded.outputs.get(path, ()))) for path, given in recorded.inputs.items())
    found.matmul_flops = sum(calls.work.matmul_flops for calls in recorded.calls.values())
    return found


def read_with(model: nn.Module, found: Mapping[str, InOut] | None) -> Node:
    """Return the tree of a model with the shapes of each module, or no shapes, as its note."""
    nothing: InOut = ((), ())
    return read(model, lambda path: (found or {}).get(path, nothing))
