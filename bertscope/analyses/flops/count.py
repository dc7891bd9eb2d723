"""`flops`: the work of inference or of a training step, by module, from the operators that are dispatched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from bertscope.analyses.modules.module_tree import Node, fold, read
from bertscope.analyses.modules.repeat import Repeated
from bertscope.analyses.modules.totals import subject
from bertscope.analyses.tracing.fake_tensors import on_meta
from bertscope.analyses.tracing.inputs import arguments, loss_of
from bertscope.analyses.tracing.module_tracker import BACKWARD, FORWARD, RECOMPUTE
from bertscope.analyses.tracing.trace import Trace, trace
from bertscope.errors import SelectionError
from bertscope.reports.flops import FlopsReport, FlopsRow, OperatorRow, Work
from bertscope.run_config import NONE
from bertscope.torch_access import nn, torch

MODES = ("inference", "training")
PHASES = (FORWARD, BACKWARD, RECOMPUTE)


def flops(
    module: nn.Module,
    inputs: Any,
    *,
    mode: str = "inference",
    name: str | None = None,
    checkpointing: str = NONE,
    batch: int | None = None,
    seq: int | None = None,
) -> FlopsReport:
    """Count the work of one run of any module; `inputs` is a tensor, a tuple, or a dictionary of keywords.

    The module runs on meta tensors, which compute and allocate nothing; a module that cannot run on meta runs on its
    own tensors. One multiply-add counts as 2 FLOPs in `matmul_flops`, as in torch.utils.flop_counter. Mode
    "training" adds the operators of the backward pass.
    """
    if mode not in MODES:
        raise SelectionError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
    losses: list[str] = []
    recorded = _recorded(module, inputs, mode == "training", losses)
    return flops_report(module, recorded, mode, name=name, checkpointing=checkpointing, batch=batch, seq=seq,
                  loss=losses[-1] if losses else "")  # fmt: skip


def _recorded(module: nn.Module, inputs: Any, training: bool, losses: list[str]) -> Trace:
    args, kwargs = arguments(inputs)
    meta_args, meta_kwargs = on_meta((args, kwargs))
    state = _meta_state(module)

    def call() -> Any:
        """Run the module on meta; with `tie_weights`, `functional_call` would not restore a module with two paths."""
        return torch.func.functional_call(module, state, meta_args, meta_kwargs, tie_weights=False)

    try:
        return trace(module, lambda: _step(call, training, losses))
    except (RuntimeError, NotImplementedError):
        if all(tensor.is_meta for tensor in state.values()) and not any(p.is_meta for p in module.parameters()):
            return trace(module, lambda: _step(lambda: module(*args, **kwargs), training, losses))
        raise


def _step(forward: Callable[[], Any], training: bool, losses: list[str]) -> None:
    with torch.set_grad_enabled(training):
        output = forward()
    if training:
        loss, what = loss_of(output)
        losses.append(what)
        loss.backward()


def _meta_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a meta tensor for every tensor, by the first path of its module; shared tensors stay shared."""
    held = [
        (f"{path}.{name}".lstrip("."), tensor)
        for path, inner in module.named_modules()
        for name, tensor in (*inner._parameters.items(), *inner._buffers.items())
        if tensor is not None
    ]
    alike = {id(tensor): _meta_like(tensor) for _, tensor in held}
    return {path: alike[id(tensor)] for path, tensor in held}


def _meta_like(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)


def flops_report(
    module: nn.Module,
    recorded: Trace,
    mode: str,
    *,
    name: str | None,
    checkpointing: str,
    batch: int | None,
    seq: int | None,
    loss: str,
    tree: Repeated | None = None,
) -> FlopsReport:
    """Return the report on a recorded run; `tree` counts more layers than ran."""
    tree = tree or Repeated(work_tree(module, recorded))
    whole = sum(work.matmul_flops for work in _subtree(tree.root))
    return FlopsReport(
        subject=subject(module, name),
        mode=mode,
        checkpointing=checkpointing,
        batch=batch,
        seq=seq,
        rows=tuple(_rows(tree.root, whole or 1)),
        operators=_operators(recorded, tree),
        loss=loss,
        traced_layers=tree.ran if tree.path else None,
    )


def work_tree(module: nn.Module, recorded: Trace) -> Node:
    """Return the module tree with the work of each module as its note, so that modules with equal work fold."""
    return fold(_noted(read(module), _own_work(recorded)))


def _own_work(recorded: Trace) -> dict[str, dict[str, Work]]:
    """Return the work of each module itself, by path and phase."""
    own: dict[str, dict[str, Work]] = {}
    for (path, phase, _), calls in recorded.calls.items():
        phases = own.setdefault(path, {})
        phases[phase] = phases.get(phase, Work()) + calls.work
    return own


def _noted(node: Node, own: dict[str, dict[str, Work]]) -> Node:
    phases = own.get(node.path, {}) if node.same_as is None else {}
    return replace(
        node,
        note=tuple(phases.get(phase, Work()) for phase in PHASES),
        children=tuple(_noted(child, own) for child in node.children),
    )


def _subtree(node: Node) -> tuple[Work, Work, Work]:
    """Return the forward, backward and recomputation work at and below one copy of the node."""
    own: Sequence[Work] = node.note if isinstance(node.note, tuple) else (Work(),) * 3
    below = [_subtree(child) for child in node.children]
    sums = [
        sum((works[phase] * child.copies for child, works in zip(node.children, below, strict=True)), own[phase])
        for phase in range(3)
    ]
    return sums[0], sums[1], sums[2]


def _rows(node: Node, whole: int, depth: int = 0, copies: int = 1, is_last: bool = True) -> Iterator[FlopsRow]:
    copies *= node.copies
    forward, backward, recompute = (work * copies for work in _subtree(node))
    total = forward + backward + recompute
    yield FlopsRow(
        name=node.name,
        path=node.path,
        type=node.type,
        depth=depth,
        copies=copies,
        is_last=is_last,
        forward=forward,
        backward=backward,
        recompute=recompute,
        total=total,
        macs=total.macs,
        intensity=total.intensity,
        share=total.matmul_flops / whole,
    )
    for place, child in enumerate(node.children, start=1):
        yield from _rows(child, whole, depth + 1, copies, place == len(node.children))


def _operators(recorded: Trace, tree: Repeated) -> tuple[OperatorRow, ...]:
    found: dict[tuple[str, str], OperatorRow] = {}
    for (path, phase, operator), calls in recorded.calls.items():
        times = tree.times(path)
        empty = OperatorRow(operator=operator, phase=phase, calls=0, role=calls.role, elements=0, work=Work())
        row = found.get((operator, phase), empty)
        found[operator, phase] = replace(
            row,
            calls=row.calls + calls.calls * times[0] // times[1],
            elements=row.elements + calls.elements * times[0] // times[1],
            work=row.work + calls.work * times[0] // times[1],
        )
    return tuple(
        sorted(found.values(), key=lambda row: (PHASES.index(row.phase), -row.work.matmul_flops, row.operator))
    )


def run_as_it_is(module: nn.Module, inputs: Any, training: bool) -> tuple[Trace, str]:
    """Run any module on its own tensors; return the trace, and the name of the loss that backward starts from."""
    args, kwargs = arguments(inputs)
    losses: list[str] = []
    recorded = trace(module, lambda: _step(lambda: module(*args, **kwargs), training, losses))
    return recorded, losses[-1] if losses else ""
