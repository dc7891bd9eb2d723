"""`bertscope.why`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any

from bertscope.analyses.why.findings import main_first
from bertscope.analyses.why.reading import read_why
from bertscope.api.memory import ModelRequest, fit, noted
from bertscope.api.requests import public_function, request_of
from bertscope.errors import BertscopeError, SelectionError
from bertscope.gpus import Gpu
from bertscope.memory.summary import for_gpu
from bertscope.progress import expect
from bertscope.reports.step import YES
from bertscope.reports.why import BEFORE, MESSAGE, OOM, WhyFinding, WhyPart, WhyReport
from bertscope.settings.checkpointing import FULL, NONE
from bertscope.settings.generate import changed
from bertscope.settings.request import Request
from bertscope.settings.run_config import RunConfig
from bertscope.sources.find import Model, source_of
from bertscope.sources.model_source import ModelSource

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertscope.settings.keywords import RunSettings

_BEYOND, _LEAST = 1.25, 64 * 2**20  # an excess over the estimate that is named: a share, and bytes
_EXPLAINED = {  # parts whose excess a finding explains
    "parameters": {"why_models", "why_copy"},
    "optimizer_state": {"why_optimizers"},
    "gradients": {"why_gradients"},
    "activations": {"why_graph", "why_grad_eval", "why_outputs", "why_previous", "why_cache"},
}


@public_function()
def why(file: str | PathLike[str], model: Model | Request | None = None, **settings: Unpack[RunSettings]) -> WhyReport:
    """Explain what filled a GPU: a memory snapshot, or a log with the error message.

    The snapshot is what `torch.cuda.memory._dump_snapshot` wrote; `-` reads a message from standard input. With a
    model, the report has its step's estimate with the settings, and names what the step does not explain. Raises
    SourceError for another file, and SelectionError for settings without a model.

    >>> report = bertscope.why("oom.log")
    >>> report.findings[0].key, report.tried_bytes == 3 * 2**30
    ('why_fragmentation', True)
    """
    report = read_why(str(file))
    request = request_of("why", model, settings)
    has_file = request.training_file is not None or request.plan is not None
    if request.subject is None:
        if request.named or has_file:
            raise SelectionError("settings describe a model's step; name the model after FILE, or leave them out")
        return report
    if report.source == MESSAGE and not has_file and not {"batch", "seq"} <= request.named:
        raise request.error(
            "the step of a model depends on {batch} and {seq}; give the values that failed, and the {architecture} "
            "if the model's name does not tell it",
            "batch",
            "seq",
        )
    source = source_of(request.subject)
    work = ModelRequest.of(request, source)
    gpu = work.gpu
    if gpu is not None and report.moment == OOM and report.source != MESSAGE and report.free_bytes is not None:
        outside = report.free_bytes + (report.reserved_bytes or report.allocated_bytes) + gpu.context_high_bytes
        report = replace(report, total_bytes=gpu.memory_bytes, other_bytes=max(gpu.memory_bytes - outside, 0))
    return replace(_compared(report, work), training_file=noted(request, work.runs))


def _compared(report: WhyReport, work: ModelRequest) -> WhyReport:
    """Return the report with a step's estimate, and with findings on what the step does not explain."""
    run, gpu, simulator = for_gpu(work.run, work.gpu), work.gpu, work.simulator(is_limited=False)
    runs = [run, *([run.changed(checkpointing=FULL)] if run.checkpointing == NONE else [])]
    expect(len(runs))
    if len(runs) > 1 and FULL not in simulator.facts(run).strategies:
        runs = [run]
    estimate = simulator.report(runs)
    memories = [variant.estimated for variant in estimate.variants if variant.estimated is not None]
    held = {part.part: part for part in report.parts}
    of_phase = {phase.phase: phase for phase in memories[0].phases}.get(report.phase, memories[0].peak)
    sizes = {part: size for part, size in vars(of_phase.parts).items() if size or part in held}
    parts = tuple(
        replace(held.get(part, WhyPart(part=part, held_bytes=0, blocks=0)), estimated_bytes=sizes.get(part))
        for part in dict.fromkeys((*held, *sizes))
    )
    report = replace(report, parts=parts, subject=estimate.subject, run=run, gpu=gpu)
    frees = max(memories[0].cost.peak_bytes - memories[-1].cost.peak_bytes, 0)  # by checkpointing
    findings = [
        finding for finding in report.findings if finding.key != "why_full"
    ]  # estimates say how full the GPU is
    for number, finding in enumerate(findings):
        if finding.key == "why_activations" and len(memories) > 1:
            values = {**finding.values, "size_frees": frees}
            findings[number] = replace(finding, frees_bytes=frees, values=values)
    findings += [*_beyond(report), *_fitting(report, work.source, run, gpu)]
    return replace(report, findings=main_first(findings, report.allocated_bytes))


def _beyond(report: WhyReport) -> Iterator[WhyFinding]:
    """Yield the parts that hold more than in the estimate, unless a finding explains them."""
    keys = {finding.key for finding in report.findings}
    if report.source == MESSAGE:
        needed = sum(part.estimated_bytes or 0 for part in report.parts)
        more = report.allocated_bytes - needed
        if more > (_BEYOND - 1) * needed + _LEAST:
            sizes = {"size": more, "size_needed": needed, "size_held": report.allocated_bytes}
            yield WhyFinding(key="why_more", values=sizes, frees_bytes=more)
        return
    unknown = sum(part.held_bytes for part in report.parts if part.part == BEFORE)
    other = report.other_bytes or 0
    if other > _LEAST:
        yield WhyFinding(key="why_other", values={"size": other, "size_total": report.total_bytes}, frees_bytes=other)
    for part in report.parts:
        expected = part.estimated_bytes or 0
        excess = part.held_bytes - expected
        if part.part == BEFORE:  # the parameters and the state of the optimizer exist before a recording
            excess = unknown - sum(max((p.estimated_bytes or 0) - p.held_bytes, 0) for p in report.parts)
            expected = unknown - excess
        is_much = excess > _LEAST and part.held_bytes > _BEYOND * expected
        if is_much and not keys & _EXPLAINED.get(part.part, set()):
            sizes = {"size": part.held_bytes, "size_estimated": expected}
            yield WhyFinding(key="why_beyond", frees_bytes=excess, values={"part": part.part, **sizes})


def _fitting(report: WhyReport, source: ModelSource, run: RunConfig, gpu: Gpu | None) -> Iterator[WhyFinding]:
    """Yield the largest batches that fit on the GPU alone; that the step needs more than the GPU has comes first."""
    memory = gpu.memory_bytes if gpu else report.total_bytes
    if memory is None or report.moment != OOM:
        return
    left_out = {"batch", "reentrant", *(("device", "sdpa_kernel") if gpu else ())}
    settings: Any = {name: value for name, value in changed(run).items() if name not in left_out}
    settings |= {"gpu": gpu.name} if gpu else {"budget": memory}
    settings |= {"seq": run.seq, "precision": run.precision}
    settings["checkpointing"] = [NONE, FULL] if run.checkpointing == NONE else [run.checkpointing]
    try:
        batches = {row.checkpointing: row.batch for row in fit(source, **settings).rows}
        cost = fit(source, batch=run.batch, **settings | {"checkpointing": [run.checkpointing]}).rows[0].cost
    except BertscopeError:  # a strategy that the model does not have
        return
    values: dict[str, Any] = {"size": cost.gpu_bytes, "size_total": memory, "size_least": cost.least_bytes}
    values |= {"asked": run.batch, "batches": batches, "verdict": cost.verdict}
    yield WhyFinding(key="why_fits", frees_bytes=0 if cost.verdict == YES else cost.gpu_bytes, values=values)
