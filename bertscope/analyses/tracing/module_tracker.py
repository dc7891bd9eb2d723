"""Where a run is: the innermost module and the phase, followed by hooks on every module.

Autograd nodes are labelled with the innermost module whose output they lead to, so that the backward
pass is told by the module whose forward it undoes. Work inside a module's forward while a backward pass
is under way is recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from bertscope.analyses.tracing.operator_costs import tensors
from bertscope.torch_access import autograd_node, in_backward, nn, torch

FORWARD, BACKWARD, RECOMPUTE = "forward", "backward", "recompute"
_LABEL = "bertscope_module"
Seen = Callable[[str, Any], None]  # a module's path and what went in, or what came out


def _nothing(path: str, tree: Any) -> None:
    """Nobody asks for shapes."""


class ModuleTracker:
    """The stack of modules that are running; `entered` and `left` are told what goes in and comes out."""

    def __init__(self, entered: Seen = _nothing, left: Seen = _nothing) -> None:
        self.stack: list[str] = []
        self.stretches = 0  # how often recomputation has begun
        self.entered, self.left = entered, left

    def current(self) -> tuple[str, str]:
        """The path of the innermost module, and the phase."""
        if self.stack:
            return self.stack[-1], RECOMPUTE if in_backward() else FORWARD
        if in_backward():
            node = autograd_node()
            return ("" if node is None else node.metadata.get(_LABEL, "")), BACKWARD
        return "", FORWARD

    @property
    def recomputation(self) -> int:
        """The number of the stretch of recomputation that is under way; 0 outside."""
        return self.stretches if self.stack and in_backward() else 0

    @contextmanager
    def track(self, model: nn.Module) -> Iterator[None]:
        """Hooks on every module of `model` for as long as this lasts."""
        with ExitStack() as stack:
            for path, module in model.named_modules():
                enter = module.register_forward_pre_hook(self._enter(path), with_kwargs=True, prepend=True)
                leave = module.register_forward_hook(self._leave(path), always_call=True)
                stack.callback(enter.remove)
                stack.callback(leave.remove)
            yield

    def _enter(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self.stack:  # what came before belongs to the module around this one
                _label(tensors((args, kwargs)), self.stack[-1])
            elif in_backward():
                self.stretches += 1
            self.stack.append(path)
            self.entered(path, (args, kwargs))

        return hook

    def _leave(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            while self.stack and self.stack.pop() != path:
                pass  # recomputation may stop in the middle of a module
            self.left(path, out)
            _label(tensors(out), path)

        return hook


def _label(outputs: list[torch.Tensor], path: str) -> None:
    """The label lies in the node itself: a table of nodes would keep what they saved alive."""
    pending: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    while pending:
        node = pending.pop()
        if node is not None and _LABEL not in node.metadata:
            node.metadata[_LABEL] = path
            pending += [following for following, _ in node.next_functions]
