"""`report`: every report about one model, or about two side by side."""

import time
from collections.abc import Sequence
from contextlib import nullcontext

from bertscope.analyses.diagram.forward import Given, forward_diagram
from bertscope.analyses.flops.sweep import FlopsRun, flops_model
from bertscope.analyses.memory.estimate import estimate_report
from bertscope.analyses.memory.fit import Steps, fit_report, on_card
from bertscope.analyses.page.diff import diff
from bertscope.analyses.params.count import count
from bertscope.analyses.params.tree import tree
from bertscope.analyses.tracing.inputs import positions
from bertscope.gpus import Gpu
from bertscope.model import BertPreTrainedModel, PeftModel
from bertscope.model.lora import base_model_of
from bertscope.progress import stage
from bertscope.reports.diagram import GraphReport
from bertscope.reports.memory import FitReport
from bertscope.reports.page import ModelPart, PageReport
from bertscope.settings.rows import MAX_SIZE
from bertscope.settings.run_config import INFERENCE, RunConfig
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import nn
from bertscope.units import FP32

LENGTHS = (64, 128, 256, 384, 512)
STAGES = ("parameters", "FLOPs", "fit", "memory")


def page_report(
    sources: Sequence[ModelSource], variants: Sequence[Sequence[RunConfig]], limit: int | Gpu | None,
    context_bytes: int | None = None,
) -> PageReport:  # fmt: skip
    """Return the page of one source, or of two with their differences; without a limit it has no `fit` table.

    The fit table has all `variants` of a source. The other parts describe the step of those in the first precision.
    """
    models = tuple(_model(source, runs, limit, context_bytes) for source, runs in zip(sources, variants, strict=True))
    differences = None
    if len(sources) == 2:
        first = variants[0][0]
        differences = diff(sources[0], sources[1], batch=first.batch, seq=first.seq)
    return PageReport(models=models, diff=differences, written=time.strftime("%Y-%m-%d"))


def _model(
    source: ModelSource, variants: Sequence[RunConfig], limit: int | Gpu | None, context_bytes: int | None
) -> ModelPart:
    run_config = variants[0]
    of_first = [variant for variant in variants if variant.precision == run_config.precision]
    batch, seq, inputs = run_config.batch, run_config.seq, run_config.input
    with stage(f"{source.name}, parameters"):
        model = source.build()
        tensors = count(model, by="parameter", name=source.name, dtype=FP32.name)
        modules = tree(model, name=source.name)
    most = positions(base_model_of(model))
    lengths = tuple(length for length in LENGTHS if length <= most < MAX_SIZE)  # an own module may have any limit
    sizes = tuple(dict.fromkeys((seq, *lengths)))
    work = FlopsRun(source=source, run=RunConfig(mode=INFERENCE, input=inputs))
    training = FlopsRun(source=source, run=RunConfig(input=inputs, freeze=run_config.freeze))
    with stage(f"{source.name}, FLOPs"):
        flops, training_flops = flops_model(work, (batch,), sizes), flops_model(training, (batch,), (seq,))
    given, first = Given(batch=batch, seq=seq), f"{source.layer_path}.0"
    steps = Steps(source, grown_from=batch)
    card = limit if isinstance(limit, Gpu) else None

    def fits(asked: int | None = None) -> FitReport | None:
        """Return the largest batch of each variant, or if the asked batch fits."""
        if limit is None:
            return None
        return fit_report(source, variants, (seq,), limit, batch=asked, context_bytes=context_bytes,
                          known_steps={source.architecture: steps}, tries_other_head=False)  # fmt: skip

    # The search verifies that layers repeat with fewer runs than the estimate, which then needs none.
    with stage(f"{source.name}, fit") if limit is not None else nullcontext():
        fit, asked = fits(), fits(batch)
    with stage(f"{source.name}, memory"):
        memory = estimate_report(source, [on_card(variant, card) for variant in of_first], steps.trace)
    return ModelPart(
        batch=batch,
        seq=seq,
        tensors=tensors,
        tree=modules,
        flops=flops,
        training=training_flops,
        memory=memory,
        fit=fit,
        asked=asked,
        forward=_dataflow(model, "", source.name, given),
        layer=_dataflow(model, first, source.name, given) if source.layers else None,
    )


def _dataflow(model: nn.Module, path: str, name: str, given: Given) -> GraphReport | None:
    if not isinstance(model, (BertPreTrainedModel, PeftModel)):
        return None
    return forward_diagram(model, path, name=name, given=given)
