"""The matrix products of a layer, with what it costs to keep the output of each, or to compute it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from bertscope.analyses.memory.estimate import module_trace
from bertscope.analyses.memory.step import meta_inputs, run_model
from bertscope.analyses.modules.repeat import layer_stacks
from bertscope.analyses.tracing.inputs import running
from bertscope.analyses.tracing.operator_costs import bytes_moved, cost, tensors
from bertscope.analyses.tracing.trace import ModuleTracker
from bertscope.model.keep import call_name
from bertscope.model.lists import layer_lists
from bertscope.reports.plan import PlanOperator
from bertscope.settings.checkpointing import NONE
from bertscope.settings.losses import MODEL
from bertscope.settings.run_config import RunConfig
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import DispatchMode, in_backward, storage_key, written_tensors

_UNITS = 2  # of layers that run: the first may do what the others do not, such as the position bias of T5


@dataclass(frozen=True)
class LayerCosts:
    """The costs of one layer of a list in a step; all layers of the list count as equal."""

    path: str
    layer_paths: tuple[str, ...]
    operators: tuple[PlanOperator, ...] = ()  # its matrix products
    flops: int = 0  # of its forward pass
    always_flops: int = 0  # of products that run again in each plan: a later operator overwrites their output
    moved_bytes: int = 0  # by what the recomputation runs besides matrix products
    whole: int = 0  # the last layers, which are not recomputed

    @property
    def layers(self) -> int:
        """Return the number of layers."""
        return len(self.layer_paths)

    @property
    def recomputed(self) -> int:
        """Return the number of layers that are recomputed, the first ones."""
        return self.layers - self.whole


@dataclass
class _Record:
    """The operators of a layer in forward, and again in backward; a copy of the layer has the same record."""

    operators: list[PlanOperator] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)  # bytes, for each operator of forward
    again: int = 0  # operators that ran again, from the first on
    overwritten: set[int] = field(default_factory=set)  # those whose output a later operator changes, as relu_ does

    def __deepcopy__(self, memo: object) -> _Record:
        return self


def layer_costs(source: ModelSource, run_config: RunConfig) -> list[LayerCosts]:
    """Return the costs of the layers of each list of the model, from a run of few layers on fake tensors."""
    counts = {stack.field: len(stack.few(_UNITS)) for stack in layer_stacks(source)}
    deep = _repeated_lists(source.build())
    few = source.with_layer_counts(counts) if counts else source
    # A layer costs the same for the texts of an example together as one after the other.
    run_config = run_config.changed(checkpointing=NONE, batch=run_config.batch * run_config.texts, loss=MODEL)
    model = run_model(few, run_config)
    records = {path: _recording(model, layers[-1]) for path, layers in layer_lists(model).items() if path in deep}
    inputs = meta_inputs(model, run_config)
    with running(few.implemented_by(run_config.implementation), model, "fake tensors", run_config.input):
        module_trace(model, inputs, run_config, None, few.layer_path)
    return [_costs(path, deep[path], record) for path, record in records.items() if record.operators and record.again]


def _repeated_lists(model: Any) -> dict[str, list[str]]:
    """Return the lists of several layers with their paths; all lists of a model without such a list."""
    found = layer_lists(model)
    return {path: layers for path, layers in found.items() if len(layers) > 1} or found


def _recording(model: Any, path: str) -> _Record:
    """Have the layer recomputed, and return the record of what it runs."""
    from torch.utils.checkpoint import checkpoint

    layer, record = model.get_submodule(path), _Record()
    layer.forward = partial(checkpoint, partial(_recorded, layer.forward, record), use_reentrant=False)
    return record


def _recorded(forward: Callable[..., Any], record: _Record, *args: Any, **kwargs: Any) -> Any:
    tracker = ModuleTracker()
    layer = forward.__self__  # type: ignore[attr-defined]  # a bound method
    if in_backward():
        with _Counting(record):
            return forward(*args, **kwargs)
    if record.operators:  # a later call, such as that of shared layers
        return forward(*args, **kwargs)
    with tracker.track(layer), _Recorder(record, tracker):
        return forward(*args, **kwargs)


class _Recorder(DispatchMode):
    """Records the operators of a layer's forward pass."""

    def __init__(self, record: _Record, tracker: ModuleTracker) -> None:
        super().__init__()
        self.record, self.tracker = record, tracker
        self.calls: Counter[str] = Counter()
        self.makers: dict[Any, int] = {}  # storage -> the operator whose output it is

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = operator(*args, **kwargs)
        if not _computes(operator):
            return out
        name = call_name(operator)
        given = {storage_key(tensor) for tensor in tensors((args, kwargs))}
        made = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors(out)}
        written = {storage_key(tensor) for tensor in written_tensors(operator, args, or_returned=True)}
        self.record.overwritten.update(self.makers[key] for key in written if key in self.makers)
        self.makers.update({key: len(self.record.operators) for key in made if key not in given})
        self.record.operators.append(
            PlanOperator(
                name=name,
                number=self.calls[name],
                torch_name=operator.name().removeprefix("aten::"),
                module=self.tracker.current()[0],
                kept_bytes=sum(size for key, size in made.items() if key not in given),
                flops=cost(operator, args, kwargs, out)[1],
                again=False,
            )
        )
        self.record.moved.append(bytes_moved(operator, args, kwargs, out))
        self.calls[name] += 1
        return out


class _Counting(DispatchMode):
    """Counts the operators of a recomputation, which ends in the middle of the layer."""

    def __init__(self, record: _Record) -> None:
        super().__init__()
        self.record = record
        record.again = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **(kwargs or {}))
        self.record.again += _computes(operator)
        return out


def _computes(operator: Any) -> bool:
    """Return False for what torch adds to a repetition: questions such as prim::device, and detach of what it saves."""
    return not operator.name().startswith(("prim::", "aten::detach"))


def _costs(path: str, layers: Sequence[str], record: _Record) -> LayerCosts:
    calls = Counter(operator.name for operator in record.operators)
    ran = [replace(operator, again=number < record.again, calls=calls[operator.name])
           for number, operator in enumerate(record.operators)]  # fmt: skip
    moved = zip(ran, record.moved, strict=True)
    lost = [ran[number] for number in record.overwritten]
    return LayerCosts(
        path=path,
        layer_paths=tuple(layers),
        operators=tuple(product for product in ran if product.flops and product.kept_bytes and product not in lost),
        flops=sum(operator.flops for operator in ran),
        always_flops=sum(product.flops for product in lost if product.again),
        moved_bytes=sum(size for operator, size in moved if operator.again and not operator.flops),
    )
