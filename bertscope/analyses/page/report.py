"""`report`: every report about one model, or about two side by side."""

from collections.abc import Sequence
from dataclasses import replace

from bertscope.analyses.diagram.forward import Given, forward_diagram
from bertscope.analyses.flops.sweep import FlopsRun, flops_model
from bertscope.analyses.memory.estimate import estimate_report
from bertscope.analyses.memory.fit import Progress, fit_report
from bertscope.analyses.page.diff import diff
from bertscope.analyses.params.count import count
from bertscope.analyses.params.tree import tree
from bertscope.analyses.tracing.inputs import positions
from bertscope.model import BertPreTrainedModel, PeftModel
from bertscope.model.lora import base_model_of
from bertscope.reports.diagram import GraphReport
from bertscope.reports.memory import FitReport
from bertscope.reports.page import ModelPart, PageReport
from bertscope.run_config import FULL, MAX_SIZE, NONE, STORED, RunConfig
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import nn
from bertscope.units import BF16, FP32

LENGTHS = (64, 128, 256, 384, 512)


def page_report(
    sources: Sequence[ModelSource],
    batch: int,
    seq: int,
    budget_bytes: int | None,
    progress: Progress,
    inputs: tuple[str, ...] = (),
) -> PageReport:
    """Return the page of one source, or of two with their differences; without a budget it has no `fit` table.

    `inputs` as those of a RunConfig, for each of the models.
    """
    models = tuple(_model(source, batch, seq, budget_bytes, progress, inputs) for source in sources)
    differences = diff(sources[0], sources[1], batch=batch, seq=seq) if len(sources) == 2 else None
    return PageReport(models=models, diff=differences)


def _model(
    source: ModelSource, batch: int, seq: int, budget_bytes: int | None, progress: Progress, inputs: tuple[str, ...]
) -> ModelPart:
    def say(text: str) -> None:
        progress(f"{source.name}: {text}")

    say("parameters")
    model = source.build()
    tensors = count(model, by="parameter", name=source.name, dtype=FP32.name)
    modules = tree(model, name=source.name)
    say("FLOPs")
    most = positions(base_model_of(model))
    lengths = tuple(length for length in LENGTHS if length <= most < MAX_SIZE)  # an own module may have any limit
    sizes = tuple(dict.fromkeys((seq, *lengths)))
    dtype = STORED if source.has_own_dtypes else RunConfig.dtype
    strategies = [strategy for strategy in (NONE, FULL) if strategy in source.strategies(model)]
    steps = [
        RunConfig(batch=batch, seq=seq, dtype=dtype, checkpointing=strategy, inputs=inputs) for strategy in strategies
    ]
    given = Given(batch=batch, seq=seq)
    first = f"{source.layer_path}.0"
    return ModelPart(
        batch=batch,
        seq=seq,
        tensors=tensors,
        tree=modules,
        flops=flops_model(FlopsRun(source=source, inputs=inputs), (batch,), sizes),
        training=flops_model(FlopsRun(source=source, mode="training", inputs=inputs), (batch,), (seq,)),
        memory=estimate_report(source, steps, say),
        fit=_fit(source, steps, lengths[-1] if lengths else seq, budget_bytes, say),
        forward=_dataflow(model, "", source.name, given),
        layer=_dataflow(model, first, source.name, given) if source.layers else None,
    )


def _dataflow(model: nn.Module, path: str, name: str, given: Given) -> GraphReport | None:
    if not isinstance(model, (BertPreTrainedModel, PeftModel)):
        return None
    return forward_diagram(model, path, name=name, given=given)


def _fit(
    source: ModelSource, steps: list[RunConfig], longest: int, budget_bytes: int | None, progress: Progress
) -> FitReport | None:
    if budget_bytes is None:
        return None
    variants = [*steps, *(replace(step, autocast=BF16.name) for step in steps)]
    lengths = tuple(dict.fromkeys((min(128, longest), longest)))
    return fit_report(source, variants, lengths, budget_bytes, progress=lambda text: progress(f"fit, {text}"))
