"""One run of a module on meta tensors: every operator, the module it ran in and the phase; every shape.

Autograd nodes are labelled with the innermost module whose output they lead to, so that the backward
pass is told by the module whose forward it undoes. Work inside a module's forward while a backward pass
is under way is recomputation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from bertscope._torch import nn, torch
from bertscope.analyses.operators import bytes_moved, cost, numel, tensors
from bertscope.flops_reports import Work
from bertscope.reports import TensorShape

FORWARD, BACKWARD, RECOMPUTE = "forward", "backward", "recompute"


@dataclass
class Calls:
    """What one operator did in one module and phase."""

    role: str = ""
    calls: int = 0
    elements: int = 0
    work: Work = field(default_factory=Work)


@dataclass
class Trace:
    """(path, phase, operator) -> calls; path -> shapes of the module's inputs and outputs."""

    calls: dict[tuple[str, str, str], Calls] = field(default_factory=lambda: defaultdict(Calls))
    inputs: dict[str, tuple[TensorShape, ...]] = field(default_factory=dict)
    outputs: dict[str, tuple[TensorShape, ...]] = field(default_factory=dict)


def trace(model: nn.Module, run: Callable[[], Any]) -> Trace:
    """Run `run`, which calls `model`, and record what happens."""
    recorder = _Recorder()
    with recorder.hooked(model), recorder:
        run()
    return recorder.trace


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self.stack: list[str] = []
        # Labelled nodes are kept alive: autograd would otherwise forget their Python side.
        self.labels: dict[Any, str] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = operator(*args, **kwargs)
        path, phase = self._where()
        calls = self.trace.calls[path, phase, str(operator._overloadpacket)]
        calls.role, matmul, elementwise = cost(operator, args, kwargs, out)
        calls.calls += 1
        calls.elements += sum(numel(tensor) for tensor in tensors(out)[:1])
        moved = bytes_moved(operator, args, kwargs, out)
        calls.work += Work(matmul_flops=matmul, elementwise_flops=elementwise, bytes_moved=moved)
        return out

    def _where(self) -> tuple[str, str]:
        in_backward = torch._C._current_graph_task_id() != -1
        if self.stack:
            return self.stack[-1], RECOMPUTE if in_backward else FORWARD
        if in_backward:
            return self.labels.get(torch._C._current_autograd_node(), ""), BACKWARD
        return "", FORWARD

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        """Hooks on every module that follow where the run is."""
        with ExitStack() as stack:
            for path, module in model.named_modules():
                enter = module.register_forward_pre_hook(self._enter(path), with_kwargs=True, prepend=True)
                leave = module.register_forward_hook(self._leave(path), always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            yield
        self.labels.clear()

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.stack:  # what came before belongs to the module around this one
                self._label(tensors((args, kwargs)), self.stack[-1])
            self.stack.append(path)
            self.trace.inputs.setdefault(path, _shapes((args, kwargs)))

        return hook

    def _leave(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            while self.stack and self.stack.pop() != path:
                pass  # recomputation may stop in the middle of a module
            self.trace.outputs.setdefault(path, _shapes(out))
            self._label(tensors(out), path)

        return hook

    def _label(self, outputs: list[torch.Tensor], path: str) -> None:
        pending: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
        while pending:
            node = pending.pop()
            if node is not None and node not in self.labels:
                self.labels[node] = path
                pending += [following for following, _ in node.next_functions]


def _shapes(tree: Any) -> tuple[TensorShape, ...]:
    return tuple(
        TensorShape(shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
        for tensor in tensors(tree)
    )
