"""The matrix products of a layer, with what it costs to keep the output of each, or to compute it again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bertscope.analyses.memory.estimate import module_trace
from bertscope.analyses.memory.step import meta_inputs, run_model
from bertscope.analyses.modules.repeat import layer_stacks
from bertscope.analyses.tracing.inputs import running
from bertscope.analyses.tracing.operator_costs import bytes_moved, cost, tensors
from bertscope.analyses.tracing.trace import ModuleTracker
from bertscope.model.keep import call_name, keep_operators
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


def layer_costs(source: ModelSource, run_config: RunConfig) -> list[LayerCosts]:
    """Return the costs of the layers of each list of the model, from a run of few layers on fake tensors."""
    counts = {stack.field: len(stack.few(_UNITS)) for stack in layer_stacks(source)}
    found = layer_lists(source.build())
    deep = {path: layers for path, layers in found.items() if len(layers) > 1} or found
    few = source.with_layer_counts(counts) if counts else source
    # A layer costs the same for the texts of an example together as one after the other.
    texts = run_config.batch * run_config.texts
    run_config = run_config.changed(checkpointing=NONE, batch=texts, loss=MODEL, compile=False)
    model = run_model(few, run_config)
    keep_operators(model, {})  # no layer yet: it switches the cache of keys off
    records = {path: _Recorder(model.get_submodule(layers[-1]))
               for path, layers in layer_lists(model).items() if path in deep}  # fmt: skip
    inputs = meta_inputs(model, run_config)
    with running(few, model, "fake tensors", run_config.input):
        module_trace(model, inputs, run_config, None, few.layer_path)
    return [record.costs(path, deep[path]) for path, record in records.items() if record.operators and record.again]


class _Recorder(DispatchMode):
    """The operators of a layer in forward, and the number of those that run again in backward.

    The layer is recomputed, up to the last operator whose output backward needs.
    """

    def __init__(self, layer: Any) -> None:
        from torch.utils.checkpoint import checkpoint

        super().__init__()
        self.operators: list[PlanOperator] = []
        self.moved: list[int] = []  # bytes, for each operator
        self.overwritten: set[int] = set()  # operators whose output a later one changes, as relu_ does
        self.again = 0
        self.calls: Counter[str] = Counter()
        self.makers: dict[Any, int] = {}  # storage -> the operator whose output it is
        self.tracker = ModuleTracker()
        layer.forward = partial(checkpoint, partial(self.run, layer.forward), use_reentrant=False)

    def __deepcopy__(self, memo: object) -> _Recorder:
        """Return the same: a copy of the layer adds to its record."""
        return self

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the layer, and record its first call and its repetition."""
        if in_backward():
            self.again = 0
        elif self.operators:  # a later call, such as that of shared layers
            return forward(*args, **kwargs)
        with self.tracker.track(forward.__self__), self:  # type: ignore[attr-defined]  # a bound method
            return forward(*args, **kwargs)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = operator(*args, **kwargs)
        # Not what torch adds to a repetition: questions such as prim::device, and detach of what it saves.
        if operator.name().startswith(("prim::", "aten::detach")):
            return out
        if in_backward():
            self.again += 1
            return out
        name = call_name(operator)
        given = {storage_key(tensor) for tensor in tensors((args, kwargs))}
        made = {storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in tensors(out)}
        written = {storage_key(tensor) for tensor in written_tensors(operator, args, or_returned=True)}
        self.overwritten.update(self.makers[key] for key in written if key in self.makers)
        self.makers.update({key: len(self.operators) for key in made if key not in given})
        self.operators.append(
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
        self.moved.append(bytes_moved(operator, args, kwargs, out))
        self.calls[name] += 1
        return out

    def costs(self, path: str, layers: Sequence[str]) -> LayerCosts:
        """Return the costs of a layer of the list at this path."""
        ran = [replace(operator, again=number < self.again, calls=self.calls[operator.name])
               for number, operator in enumerate(self.operators)]  # fmt: skip
        lost = [ran[number] for number in self.overwritten]
        moved = zip(ran, self.moved, strict=True)
        return LayerCosts(
            path=path,
            layer_paths=tuple(layers),
            operators=tuple(product for product in ran if product.flops and product.kept_bytes and product not in lost),
            flops=sum(operator.flops for operator in ran),
            always_flops=sum(product.flops for product in lost if product.again),
            moved_bytes=sum(size for operator, size in moved if operator.again and not operator.flops),
        )
