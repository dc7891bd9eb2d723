"""`report`: every report about one model, or about two side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bertscope.analyses.diagram.forward import Given, forward_diagram
from bertscope.analyses.flops.sweep import FlopsRun, flops_model
from bertscope.analyses.memory.estimate import estimate_report
from bertscope.analyses.memory.fit import Progress, fit_report
from bertscope.analyses.page.diff import diff
from bertscope.analyses.params.count import count
from bertscope.analyses.params.tree import tree
from bertscope.reports.memory import FitReport
from bertscope.reports.page import ModelPart, PageReport
from bertscope.run_config import FULL, NONE, RunConfig
from bertscope.sources.bert import BertSource
from bertscope.sources.model_source import ModelSource
from bertscope.units import BF16, FP32

LENGTHS = (64, 128, 256, 384, 512)


@dataclass(frozen=True, kw_only=True)
class PageRun:
    """The sizes on the page, and the budget of its `fit` table (None: no table)."""

    batch: int = 8
    seq: int = 128
    budget_bytes: int | None = 16 * 2**30
    strategies: tuple[str, ...] = (NONE, FULL)


def page_report(sources: Sequence[ModelSource], run: PageRun, progress: Progress = lambda text: None) -> PageReport:
    """Return the page of one source, or of two with their differences."""
    models = tuple(_model(source.require("report"), run, progress) for source in sources)
    differences = diff(sources[0], sources[1], batch=run.batch, seq=run.seq) if len(sources) == 2 else None
    return PageReport(models=models, diff=differences)


def _model(source: BertSource, run: PageRun, progress: Progress) -> ModelPart:
    def say(text: str) -> None:
        progress(f"{source.name}: {text}")

    say("parameters")
    model = source.build()
    tensors = count(model, by="parameter", name=source.name, dtype=FP32.name)
    modules = tree(model, name=source.name)
    say("FLOPs")
    lengths = tuple(seq for seq in LENGTHS if seq <= source.config.max_position_embeddings)
    sizes = tuple(dict.fromkeys((run.seq, *lengths)))
    steps = [RunConfig(batch=run.batch, seq=run.seq, checkpointing=strategy) for strategy in run.strategies]
    given = Given(batch=run.batch, seq=run.seq)
    first = f"{source.layer_path}.0"
    return ModelPart(
        batch=run.batch,
        seq=run.seq,
        tensors=tensors,
        tree=modules,
        flops=flops_model(FlopsRun(source=source), (run.batch,), sizes),
        training=flops_model(FlopsRun(source=source, mode="training"), (run.batch,), (run.seq,)),
        memory=estimate_report(source, steps, say),
        fit=_fit(source, steps, lengths[-1] if lengths else run.seq, run.budget_bytes, say),
        forward=forward_diagram(model, name=source.name, given=given),
        layer=forward_diagram(model, first, name=source.name, given=given) if source.layers else None,
    )


def _fit(
    source: BertSource, steps: list[RunConfig], longest: int, budget_bytes: int | None, progress: Progress
) -> FitReport | None:
    if budget_bytes is None:
        return None
    variants = [*steps, *(replace(step, autocast=BF16.name) for step in steps)]
    lengths = tuple(dict.fromkeys((min(128, longest), longest)))
    return fit_report(source, variants, lengths, budget_bytes, progress=lambda text: progress(f"fit, {text}"))
