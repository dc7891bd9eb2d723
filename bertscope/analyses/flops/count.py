"""`flops`: the work of inference or of a training step, by module, from the operators that are dispatched."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from bertscope.analyses.modules.module_tree import Node, fold, read, tensors_of
from bertscope.analyses.modules.repeat import Repeated
from bertscope.analyses.modules.totals import subject
from bertscope.analyses.tracing.fake_tensors import on_meta
from bertscope.analyses.tracing.inputs import arguments, loss_of, running_module
from bertscope.analyses.tracing.trace import BACKWARD, FORWARD, RECOMPUTE, Trace, trace
from bertscope.errors import SelectionError
from bertscope.reports.flops import FlopsReport, FlopsRow, OperatorRow, Work
from bertscope.settings.checkpointing import NONE
from bertscope.torch_access import nn, torch

MODES = ("inference", "training")
PHASES = (FORWARD, BACKWARD, RECOMPUTE)


def flops(module: nn.Module, inputs: Any, *, mode: str = "inference", name: str | None = None) -> FlopsReport:
    """Count the work of one run of any module; `inputs` is a tensor, a tuple, or a dictionary of keywords.

    The module runs on meta tensors, which compute and allocate nothing; a module that cannot run on meta runs on its
    own tensors. One multiply-add counts as 2 FLOPs in `matmul_flops`, as in torch.utils.flop_counter. Mode
    "training" adds the operators of the backward pass.
    """
    if mode not in MODES:
        raise SelectionError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
    training = mode == "training"
    args, kwargs = on_meta(arguments(inputs))
    state = _meta_state(module)

    def call() -> Any:
        """Run the module on meta; with `tie_weights`, `functional_call` would not restore a module with two paths."""
        return torch.func.functional_call(module, state, args, kwargs, tie_weights=False)

    with running_module(name or type(module).__name__, module, "meta tensors"):
        try:
            recorded, loss = _step(module, call, training)
        except (RuntimeError, TypeError):  # of torch, for tensors without values
            if any(parameter.is_meta for parameter in module.parameters()):
                raise
            recorded, loss = run_as_it_is(module, inputs, training)
    return flops_report(module, recorded, name, mode=mode, checkpointing=NONE, batch=None, seq=None, loss=loss)


def run_as_it_is(module: nn.Module, inputs: Any, training: bool) -> tuple[Trace, str]:
    """Run any module on its own tensors; return the trace, and the name of the loss that backward starts from."""
    args, kwargs = arguments(inputs)
    return _step(module, lambda: module(*args, **kwargs), training)


def _step(module: nn.Module, forward: Callable[[], Any], training: bool) -> tuple[Trace, str]:
    def step() -> str:
        with torch.set_grad_enabled(training):
            output = forward()
        if not training:
            return ""
        loss, name = loss_of(output)
        if not loss.requires_grad:
            raise SelectionError("the loss depends on nothing that is trained; freeze less, or use --mode inference")
        loss.backward()
        return name

    return trace(module, step)


def _meta_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a meta tensor for every tensor, by the first path of its module; shared tensors stay shared."""
    held = {
        f"{path}.{name}".lstrip("."): tensor
        for path, inner in module.named_modules()
        for name, tensor, _ in tensors_of(inner)
    }
    alike = {id(tensor): _meta_like(tensor) for tensor in held.values()}
    return {path: alike[id(tensor)] for path, tensor in held.items()}


def _meta_like(tensor: torch.Tensor) -> torch.Tensor:
    if nn.parameter.is_lazy(tensor):
        raise SelectionError("a lazy module has no shapes yet; run it once before its FLOPs are counted")
    return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)


def flops_report(
    module: nn.Module, recorded: Trace, name: str | None, tree: Repeated | None = None, **about: Any
) -> FlopsReport:
    """Return the report on a recorded run; `tree` counts more layers than ran, `about` has the other fields."""
    tree = tree or Repeated(work_tree(module, recorded))
    return FlopsReport(
        subject=subject(module, name),
        rows=tuple(_rows(tree.root)),
        operators=_operators(recorded, tree),
        traced_layers=tree.ran if tree.path else None,
        **about,
    )


def work_tree(module: nn.Module, recorded: Trace) -> Node:
    """Return the module tree with the work of each module itself, by phase, as its note."""
    own: dict[str, list[Work]] = defaultdict(lambda: [Work()] * len(PHASES))
    for (path, phase, _), calls in recorded.calls.items():
        own[path][PHASES.index(phase)] += calls.work
    return fold(read(module, own.__getitem__))


def _subtree(node: Node) -> list[Work]:
    """Return the work in each phase at and below one copy of the node."""
    works: list[Work] = node.note
    for child in node.children:
        works = [own + below * child.copies for own, below in zip(works, _subtree(child), strict=True)]
    return works


def _rows(root: Node) -> Iterator[FlopsRow]:
    whole = sum(work.matmul_flops for work in _subtree(root)) or 1
    for node, depth, copies, is_last in root.rows():
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


def _operators(recorded: Trace, tree: Repeated) -> tuple[OperatorRow, ...]:
    found: dict[tuple[str, str], OperatorRow] = {}
    for (path, phase, operator), calls in recorded.calls.items():
        empty = OperatorRow(operator=operator, phase=phase, calls=0, role=calls.role, elements=0, work=Work())
        row = found.get((operator, phase), empty)
        found[operator, phase] = replace(
            row,
            calls=row.calls + tree.scaled(path, calls.calls),
            elements=row.elements + tree.scaled(path, calls.elements),
            work=row.work + tree.scaled(path, calls.work),
        )
    return tuple(
        sorted(found.values(), key=lambda row: (PHASES.index(row.phase), -row.work.matmul_flops, row.operator))
    )
