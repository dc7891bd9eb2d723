"""The matrix products of a layer, with what it costs to save the output of each, or to recompute it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bertscope.memory.estimate import module_trace
from bertscope.memory.step import meta_inputs, run_model
from bertscope.model.modules import layer_lists
from bertscope.model.save_policy import call_name, save_operators
from bertscope.reports.plan import PlanOperator
from bertscope.settings.checkpointing import NONE
from bertscope.settings.run_config import RunConfig
from bertscope.settings.training import MODEL
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import in_backward, written_tensors
from bertscope.tracing.inputs import running
from bertscope.tracing.log import Call, RunLog, bytes_moved, cost, tensors
from bertscope.tracing.record import Device, Recorder
from bertscope.tracing.repeat import layer_stacks

_UNITS = 2  # of layers that run: the first may do what the others do not, such as the position bias of T5


@dataclass(frozen=True)
class LayerCosts:
    """One layer's costs in a step; all layers in its list count as equal."""

    path: str
    layer_paths: tuple[str, ...]
    operators: tuple[PlanOperator, ...] = ()  # its matrix products
    flops: int = 0  # of its forward pass
    always_flops: int = 0  # of products that each plan recomputes: a later operator overwrites their output
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
    """Return what the layers in each list cost, from a run of few layers on fake tensors."""
    counts = {stack.field: len(stack.few(_UNITS)) for stack in layer_stacks(source)}
    lists = layer_lists(source.build())
    deep = {path: layers for path, layers in lists.items() if len(layers) > 1} or lists
    few = source.with_layer_counts(counts) if counts else source
    # A layer costs the same for the texts of an example together as one after the other.
    texts = run_config.batch * run_config.texts
    run_config = run_config.changed(checkpointing=NONE, batch=texts, loss=MODEL, compile=False, eval_batch=None)
    model = run_model(few, run_config)
    save_operators(model, {})  # no layer yet: it switches the cache of keys off
    last_layers = {path: layers[-1] for path, layers in layer_lists(model).items() if path in deep}
    records = {path: _LayerRuns(model.get_submodule(last)) for path, last in last_layers.items()}
    inputs = meta_inputs(model, run_config)
    with running(few, model, "fake tensors", run_config.input):
        module_trace(model, inputs, run_config, None, few.layer_path)
    return [
        record.costs(path, deep[path])
        for path, record in records.items()
        if record.first is not None and record.recomputed
    ]


class _LayerRuns:
    """The logs of a layer's first call and of its repetition, up to the last operator whose output backward needs."""

    def __init__(self, layer: Any) -> None:
        from torch.utils.checkpoint import checkpoint

        self.first: RunLog | None = None
        self.recomputed = 0  # operators of the repetition
        layer.forward = partial(checkpoint, partial(self.run, layer.forward), use_reentrant=False)

    def __deepcopy__(self, memo: object) -> _LayerRuns:
        """Return the same: a copy of the layer adds to its record."""
        return self

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the layer, and record its first call and its repetition."""
        if self.first is not None and not in_backward():  # a later call, such as of shared layers
            return forward(*args, **kwargs)
        recorder = Recorder(Device(), forward.__self__, keeps_args=True)  # type: ignore[attr-defined]  # a bound method
        recorder.hold("inputs", (("", tensor) for tensor in tensors((args, kwargs))))
        try:
            with recorder.watching():
                return forward(*args, **kwargs)
        finally:
            recorder.close()
            if in_backward():
                self.recomputed = sum(map(_counts, recorder.log.calls))
            else:
                self.first = recorder.log

    def costs(self, path: str, layers: Sequence[str]) -> LayerCosts:
        """Return the costs of a layer of the list at this path."""
        assert self.first is not None  # noqa: S101 the caller has looked
        log, saved, calls = self.first, Counter[int](), Counter[str]()
        for block in log.blocks:
            saved[block.call] += block.size_bytes
        overwritten = {
            log.blocks[seen.block].call
            for call in log.calls  # by a later operator, as relu_ does
            for seen in written_tensors(call.operator, call.args, or_returned=True)
        }
        ran, lost, moved = list[PlanOperator](), list[PlanOperator](), 0
        for number, call in enumerate(log.calls):
            if not _counts(call):
                continue
            name, row = call_name(call.operator), (call.operator, call.args, call.kwargs, call.out)
            operator = PlanOperator(
                name=name,
                number=calls[name],
                torch_name=call.operator.name().removeprefix("aten::"),
                module=call.position.path,
                output_bytes=saved[number],
                flops=cost(*row)[1],
                recomputed=len(ran) < self.recomputed,
            )
            ran.append(operator)
            calls[name] += 1
            moved += bytes_moved(*row) if operator.recomputed and not operator.flops else 0
            if number in overwritten:
                lost.append(operator)
        products = [product for product in ran if product.flops and product.output_bytes and product not in lost]
        return LayerCosts(
            path=path,
            layer_paths=tuple(layers),
            operators=tuple(replace(product, calls=calls[product.name]) for product in products),
            flops=sum(operator.flops for operator in ran),
            always_flops=sum(product.flops for product in lost if product.recomputed),
            moved_bytes=moved,
        )


def _counts(call: Call) -> bool:
    """Return False for what torch adds to a repetition: detach of what it saves."""
    return not call.operator.name().startswith("aten::detach")
