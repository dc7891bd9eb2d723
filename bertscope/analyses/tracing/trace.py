"""A record of one run of a module: its operators by module and phase, and the shapes of inputs and outputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bertscope.analyses.tracing.module_tracker import ModuleTracker
from bertscope.analyses.tracing.operator_costs import bytes_moved, cost, numel, tensors
from bertscope.reports.base import TensorShape
from bertscope.reports.flops import Work
from bertscope.torch_access import TorchDispatchMode, nn, operator_packet


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
    inputs: dict[str, tuple[TensorShape, ...]] = field(default_factory=dict)
    outputs: dict[str, tuple[TensorShape, ...]] = field(default_factory=dict)


def trace(model: nn.Module, run: Callable[[], Any]) -> Trace:
    """Run `run`, which calls `model`, and record its operators and shapes."""
    recorder = _Recorder()
    with recorder.tracker.track(model), recorder:
        run()
    return recorder.trace


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.tracker = ModuleTracker(
            entered=lambda path, tree: _keep(self.trace.inputs, path, tree),
            left=lambda path, tree: _keep(self.trace.outputs, path, tree),
        )

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = operator(*args, **kwargs)
        path, phase = self.tracker.current()
        calls = self.trace.calls[path, phase, str(operator_packet(operator))]
        calls.role, matmul, elementwise = cost(operator, args, kwargs, out)
        calls.calls += 1
        calls.elements += sum(numel(tensor) for tensor in tensors(out)[:1])
        moved = bytes_moved(operator, args, kwargs, out)
        calls.work += Work(matmul_flops=matmul, elementwise_flops=elementwise, bytes_moved=moved)
        return out


def _keep(shapes: dict[str, tuple[TensorShape, ...]], path: str, tree: Any) -> None:
    shapes.setdefault(path, _shapes(tree))


def _shapes(tree: Any) -> tuple[TensorShape, ...]:
    return tuple(
        TensorShape(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for tensor in tensors(tree)
    )
