"""`explain` of any model: its modules that own parameters or compute matrix products, in the order of the forward."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from bertscope.analyses.explain.rules import (
    MOST_TERMS,
    OWN_SUM,
    Run,
    flops_formula,
    params_formula,
    rule_of,
    tensor_name,
)
from bertscope.analyses.flops.count import flops_report, run_as_it_is
from bertscope.analyses.modules.module_tree import Node, fold, read
from bertscope.analyses.modules.totals import subject
from bertscope.analyses.params.tree import tree
from bertscope.analyses.tracing.fake_tensors import META_ATTENTION, run_without_values
from bertscope.analyses.tracing.inputs import inputs_for
from bertscope.analyses.tracing.trace import Trace
from bertscope.errors import BertscopeError, SelectionError, suggestion
from bertscope.reports.base import Note
from bertscope.reports.explain import Dims, ExplainReport, Step, Sum
from bertscope.reports.layer_ranges import expand
from bertscope.settings.checkpointing import NONE
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import nn

_OWN = "(own)"  # the name of the root, and of the group of its own tensors and products


def explain_modules(
    source: ModelSource,
    model: nn.Module,
    path: str | None,
    *,
    batch: int,
    seq: int,
    inputs: Sequence[str] = (),
) -> ExplainReport:
    """Return the steps of the model of a source, or those at and below `path`, and the sums of its root's children.

    Without `inputs` a model whose forward pass cannot run is explained without shapes and FLOPs; the note has the
    reason. Raises SelectionError for a path that no module has, and the error of the run with `inputs`.
    """
    recorded, runs, notes = None, dict[str, Run](), tuple[Note, ...]()

    def made(device: str) -> nn.Module:
        """Return the model on a device."""
        return source.build(device=device, attention=META_ATTENTION)

    try:
        given = inputs_for(model, batch, seq, given=inputs)
        recorded = run_without_values(source, model, given, _run, made, inputs)
        runs = _runs(recorded)
    except BertscopeError as error:
        if inputs:
            raise
        notes = (Note(key="explain_no_forward", values={"reason": error.message}),)
    root = read(model, lambda path: runs.get(path, Run()))
    walk = _Walk(model, fold(root), tuple(runs))
    return ExplainReport(
        subject=subject(model, source.name),
        batch=None if recorded is None else batch,
        seq=None if recorded is None else seq,
        steps=tuple(walk.steps(walk.root if path is None else _at(root, walk, path))),
        sums=tuple(_sums(model, walk, recorded)),
        questions=(),
        notes=notes,
    )


def _run(model: nn.Module, inputs: Any) -> Trace:
    """Run the model without dropout; return the trace."""
    return run_as_it_is(model.eval(), inputs, training=False)[0]


def _runs(recorded: Trace) -> dict[str, Run]:
    """Return what was recorded of each module, in the order of the forward pass."""
    flops, calls = Counter[str](), Counter(call.path for call in recorded.modules)
    for (path, _, _), made in recorded.calls.items():
        flops[path] += made.work.matmul_flops
    shapes = recorded.shapes()
    found = {path: shapes.get(path, ((), ())) for path in (*shapes, *flops)}  # the root of TorchScript has no hooks
    return {
        path: Run(
            tuple(given.shape for given in inputs), tuple(out.shape for out in outputs), flops[path], calls[path] or 1
        )
        for path, (inputs, outputs) in found.items()
    }


def _at(root: Node, walk: "_Walk", path: str) -> Node:
    """Return the folded node at a path, of one layer (`encoder.layer.1`) or of a range as reports write it.

    The path may lack the names of wrappers, such as `base_model.model` of peft.
    """
    for start in ("", f"{walk.top.path}."):
        single, several = root.descend(start + path), walk.root.descend(start + path)
        if path and (single or several):
            return fold(single) if single else several  # type: ignore[return-value]  # one of them is a node
    known = [node.path for node in walk.root.walk() if node.path]
    raise SelectionError(f"no module is called {path[:100]!r}; {suggestion(path, known)}")


class _Walk:
    """Maker of the steps of a folded tree."""

    def __init__(self, model: nn.Module, root: Node, order: Sequence[str]) -> None:
        self.root = root
        self.modules = dict(model.named_modules())
        self.order = {path: place for place, path in enumerate(order)}
        top = root
        while len(top.children) == 1 and top.children[0].children and top.children[0].copies == 1 and not top.held:
            (top,) = top.children
        self.top = top
        self.groups = {single: child for child in top.children for single in expand(child.path)}

    def steps(self, root: Node) -> Iterator[Step]:
        """Yield the steps at and below a node; a module that did not run follows the module that has it."""
        places: dict[str, int] = {}
        rows = []
        for node, _, copies, _ in root.rows():
            above = places.get(node.path.rpartition(".")[0], 0)
            places[node.path] = self.order.get(next(expand(node.path)), above)
            if node.note.flops or any(held.is_parameter and held.counts for held in node.held):
                rows.append((node, copies))
        for node, copies in sorted(rows, key=lambda row: places[row[0].path]):
            yield self.step(node, copies)

    def group(self, path: str) -> str:
        """Return the path of the group of a module: of a child of the root, "" for the root itself."""
        parts = next(expand(path)).split(".")
        starts = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return next((self.groups[start].path for start in starts if start in self.groups), "")

    def step(self, node: Node, copies: int) -> Step:
        """Return the step of a module."""
        module, run = self.modules[next(expand(node.path))], node.note
        own = [held for held in node.held if held.is_parameter]
        rule = rule_of(module, own, run)
        keys = [rule.key, *([OWN_SUM] if own and not rule.tensors and rule.flops else [])]
        said = [Note(key=key) for key in keys]
        said += [
            Note(key="tied", values={"name": tensor_name(held), "tied_to": held.tied_to})
            for held in own
            if held.tied_to
        ]
        said += [Note(key="unknown")] if any(held.shape is None for held in own) else []
        said += [Note(key="not_called")] if self.order and not run.outputs else []
        return Step(
            group=self.group(node.path) or _OWN,
            name=node.path or _OWN,
            path=node.path,
            tf_name="",
            type=node.type,
            inputs=tuple(map(_dims, run.inputs)),
            output=_dims(run.outputs[0]) if run.outputs else (),
            params=params_formula(module, rule, [item for item in own if not item.tied_to and item.shape is not None]),
            flops=flops_formula(module, rule, run) if run.flops else None,
            copies=copies,
            sentences=tuple(said),
        )


def _dims(shape: tuple[int, ...]) -> Dims:
    return tuple(map(str, shape))


# ---- sums ----


def _sums(model: nn.Module, walk: _Walk, recorded: Trace | None) -> Iterator[Sum]:
    """Yield each group by its steps and as counted, then all."""
    steps = list(walk.steps(walk.root))
    counted = tree(model, folded=False)
    params = {row.path: row.distinct_params for row in counted.rows}
    flops: dict[str, int] = {}
    if recorded is not None:
        about: dict[str, Any] = {"mode": "inference", "checkpointing": NONE, "batch": None, "seq": None, "loss": ""}
        for row in flops_report(model, recorded, None, **about).rows:
            flops |= dict.fromkeys(expand(row.path), row.forward.matmul_flops // row.copies)
    whole = [counted.totals.distinct_params, flops.get("", 0)]
    own = list(whole)
    for path in dict.fromkeys(child.path for child in walk.groups.values()):
        below = [sum(found.get(single, 0) for single in expand(path)) for found in (params, flops)]
        own = [left - part for left, part in zip(own, below, strict=True)]
        if any(below):
            yield _sum(path, [step for step in steps if step.group == path], *below)
    if any(own):
        yield _sum(_OWN, [step for step in steps if step.group == _OWN], *own)
    yield _sum("total", steps, *whole)


def _sum(group: str, steps: Sequence[Step], counted_params: int, counted_flops: int) -> Sum:
    terms = [step.params.value * step.copies for step in steps if step.params]
    return Sum(
        group=group,
        symbols=" + ".join(f"{term:,}" for term in terms) if len(terms) <= MOST_TERMS else "",
        params=sum(terms),
        counted_params=counted_params,
        flops=sum(step.flops.value * step.copies for step in steps if step.flops),
        counted_flops=counted_flops,
    )
