"""The modules that run: hooks on them, and the stack of those that have not returned."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from bertscope.reports.memory import BACKWARD, FORWARD, RECOMPUTE
from bertscope.torch_access import autograd_node, in_backward, nn, torch
from bertscope.torch_access.compiled import uncompiled_modules
from bertscope.tracing.operator_costs import tensors

_LABEL = "bertscope_module"
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
