"""`report`: every report about one model, or about two side by side."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bertscope.analyses.diagram.forward import Given, forward_diagram
from bertscope.analyses.flops.sweep import FlopsRun, flops_model
from bertscope.analyses.memory.estimate import estimate_report
from bertscope.analyses.memory.fit import Progress, Steps, fit_report, fit_variants, on_card
from bertscope.analyses.page.diff import diff
from bertscope.analyses.params.count import count
from bertscope.analyses.params.tree import tree
from bertscope.analyses.tracing.derived_inputs import positions
from bertscope.model import BertPreTrainedModel, PeftModel
from bertscope.model.lora import base_model_of
from bertscope.reports.diagram import GraphReport
from bertscope.reports.memory import FitReport, Gpu
from bertscope.reports.page import ModelPart, PageReport
from bertscope.run_config import FULL, MAX_SIZE, NONE, RunConfig
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import nn
from bertscope.units import FP32

LENGTHS = (64, 128, 256, 384, 512)
STAGES = ("parameters", "FLOPs", "fit", "memory")


def page_report(
    sources: Sequence[ModelSource],
    run_config: RunConfig,
    budget: int | Gpu | None,
    *,
    checkpointing: str | None = None,
    precision: str | None = None,
    context_bytes: int | None = None,
    reentrant: bool = False,
    progress: Progress = lambda text: None,
) -> PageReport:
    """Return the page of one source, or of two with their differences; without a budget it has no `fit` table.

    `checkpointing` and `precision` are comma-separated strategies and precisions to compare in the fit table, by
    default none and full, and the first of `fit_variants`. The other parts describe the step of `run_config` in the
    first precision. `progress` gets the model and one of STAGES before a colon.
    """
    asked = _Asked(run_config, budget, checkpointing, precision, context_bytes, reentrant)
    models = tuple(_model(source, asked, progress) for source in sources)
    differences = None
    if len(sources) == 2:
        differences = diff(sources[0], sources[1], batch=run_config.batch, seq=run_config.seq)
    return PageReport(models=models, diff=differences, written=time.strftime("%Y-%m-%d"))


@dataclass(frozen=True)
class _Asked:
    run_config: RunConfig
    budget: int | Gpu | None
    checkpointing: str | None
    precision: str | None
    context_bytes: int | None
    reentrant: bool

    @property
    def card(self) -> Gpu | None:
        return self.budget if isinstance(self.budget, Gpu) else None


def _model(source: ModelSource, asked: _Asked, progress: Progress) -> ModelPart:
    def say(stage: str) -> Progress:
        progress(f"{source.name}, {stage}")
        return lambda text: progress(f"{source.name}, {stage}: {text}")

    say("parameters")
    run_config = asked.run_config
    batch, seq, inputs = run_config.batch, run_config.seq, run_config.inputs
    model = source.build()
    tensors = count(model, by="parameter", name=source.name, dtype=FP32.name)
    modules = tree(model, name=source.name)
    variants = _variants(source, model, asked)
    say("FLOPs")
    most = positions(base_model_of(model))
    lengths = tuple(length for length in LENGTHS if length <= most < MAX_SIZE)  # an own module may have any limit
    sizes = tuple(dict.fromkeys((seq, *lengths)))
    work = FlopsRun(source=source, inputs=inputs)
    training = replace(work, mode="training", freeze=run_config.freeze)
    given = Given(batch=batch, seq=seq)
    first = f"{source.layer_path}.0"
    steps = Steps(source, grown_from=batch)
    usual = RunConfig().to_dict()
    of_step = [on_card(variant, asked.card) for variant in _first_precision(variants)]
    # The search verifies that layers repeat with fewer runs than the estimate, which then needs none.
    fit = _fit(source, variants, asked, steps, say("fit")) if asked.budget else None
    return ModelPart(
        batch=batch,
        seq=seq,
        tensors=tensors,
        tree=modules,
        flops=flops_model(work, (batch,), sizes),
        training=flops_model(training, (batch,), (seq,)),
        memory=estimate_report(source, of_step, say("memory"), steps.trace),
        fit=fit,
        asked=_fit(source, variants, asked, steps, batch=batch) if asked.budget else None,
        forward=_dataflow(model, "", source.name, given),
        layer=_dataflow(model, first, source.name, given) if source.layers else None,
        options={name: value for name, value in run_config.to_dict().items() if value != usual[name]},
    )


def _variants(source: ModelSource, model: nn.Module, asked: _Asked) -> list[RunConfig]:
    """Return the runs of the fit table; those in the first precision are the runs of the other parts."""
    strategies = asked.checkpointing or ",".join(name for name in (NONE, FULL) if name in source.strategies(model))
    found = fit_variants(source, asked.run_config, asked.card, precision=asked.precision, checkpointing=strategies,
                         reentrant=asked.reentrant)  # fmt: skip
    return found if asked.precision else _first_precision(found)


def _first_precision(variants: list[RunConfig]) -> list[RunConfig]:
    return [variant for variant in variants if variant.precision == variants[0].precision]


def _dataflow(model: nn.Module, path: str, name: str, given: Given) -> GraphReport | None:
    if not isinstance(model, (BertPreTrainedModel, PeftModel)):
        return None
    return forward_diagram(model, path, name=name, given=given)


def _fit(
    source: ModelSource, variants: list[RunConfig], asked: _Asked, steps: Steps,
    progress: Progress = lambda text: None, *, batch: int | None = None,
) -> FitReport:  # fmt: skip
    """Return the largest batch of each variant, or if the batch fits."""
    return fit_report(
        source, variants, (asked.run_config.seq,), asked.budget or 0, batch=batch, context_bytes=asked.context_bytes,
        progress=progress, known_steps={source.architecture: steps}, tries_other_head=False,
    )  # fmt: skip
