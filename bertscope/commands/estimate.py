"""`bertscope estimate`."""

from dataclasses import replace
from functools import partial
from typing import Annotated

import typer

from bertscope.calibrations import Calibration, card_of
from bertscope.commands.calibration_options import CalibrationOptions
from bertscope.commands.model_options import Inputs, ModelOptions, ModelsOptions
from bertscope.commands.output import DetailedOutputOptions, Progress, write_file
from bertscope.commands.parallel_options import ParallelOptions
from bertscope.commands.registry import command
from bertscope.commands.run_options import (
    AllocatorOptions,
    Kernel,
    RunOptions,
    ViewOptions,
    WithBareCheckpointing,
)
from bertscope.gpus import GPUS, find_gpu
from bertscope.render import memory as renderer
from bertscope.reports.memory import Gpu, MemoryReport
from bertscope.run_config import STORED, RunConfig
from bertscope.sources.model_source import ModelSource

EXAMPLES = """
  bertscope estimate bert-large-zh --batch 32 --seq 512 --autocast
  bertscope estimate --checkpointing --batch 8 --seq 512
  bertscope estimate bert-large-uncased --gpu t4 --batch 16 --seq 512 --checkpointing
  bertscope estimate --device cuda --dtype bf16 --autocast --attention sdpa
  bertscope estimate bert-tiny --checkpointing none,full,selective --format json
  bertscope estimate bert-tiny bert-mini --seq 512 --format markdown
  bertscope estimate bert-large-uncased --world-size 8 --strategy fsdp --checkpointing
  bertscope estimate bert-base-uncased --lora r=8,alpha=16,dropout=0.05,target=query+value
"""


@command(
    place=40,
    examples=EXAMPLES,
    cls=WithBareCheckpointing,
    short_help="Estimate a step's memory: the peak, its parts and operator.",
)
def estimate(
    *,
    run: RunOptions,
    kernel: Kernel = RunConfig.sdpa_kernel,
    allocator: AllocatorOptions,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="GPU", help="The GPU of a step on cuda: whether it fits there.",
                     autocompletion=lambda: list(GPUS)),
    ] = None,
    calibration: CalibrationOptions,
    ranks: ParallelOptions,
    inputs: Inputs = None,
    model: ModelsOptions,
    view: ViewOptions,
    out: DetailedOutputOptions,
) -> None:  # fmt: skip
    """Estimate the memory of a step: the peak, its parts and the operator that runs there. It allocates nothing.

    torch dispatches forward, backward, recomputation and the optimizer step on tensors without memory. The
    peak on a CPU is exact or nearly exact. CUDA's kernels and allocator are simulated. Several models are one row
    each.
    """
    known = None if gpu is None else find_gpu(gpu)
    run = run if known is None else replace(run, device="cuda")
    model.only_one({"--timeline": view.timeline is not None, "--snapshot": view.snapshot is not None})
    run_configs = run.run_configs(
        sdpa_kernel=kernel, alloc_conf=allocator.text, inputs=tuple(inputs or ()), parallelism=ranks.parallelism()
    )
    view.check_timeline()
    found = calibration.found(known) if run.device == "cuda" else None
    card = card_of(found) if found else known
    estimates = model.each(partial(_estimate, run, run_configs, card, has_snapshot=view.snapshot is not None))
    if calibration.time:
        estimates = tuple((source, used, _timed(source, used, report, found)) for source, used, report in estimates)
        has_times = any(variant.predicted for _, _, report in estimates for variant in report.variants)
        calibration.note_no_time(found, known, has_times=has_times, on_cuda=run.device == "cuda")
    reports = [
        run.with_training_file(report, used, is_noted=place == 0) for place, (_, used, report) in enumerate(estimates)
    ]
    out.show_all(reports, renderer, **({} if model.others else {"shown_rows": view.rows}))
    if model.others:
        return
    ((source, used, _),) = estimates
    view.write_timeline(reports[0])
    if view.snapshot is not None:
        from bertscope.analyses.memory.estimate import MemoryTraces
        from bertscope.analyses.memory.snapshot import snapshot as picture

        write_file(view.snapshot, picture(MemoryTraces(source).trace(used[-1])))


def _timed(
    source: ModelSource, run_configs: list[RunConfig], report: MemoryReport, found: Calibration | None
) -> MemoryReport:
    """Return the report with predicted times, if there is a calibration."""
    if found is None:
        return report
    from bertscope.analyses.calibrate.step_time import with_times

    return with_times(report, source, run_configs, found.report)


def _estimate(
    run: RunOptions, run_configs: list[RunConfig], card: Gpu | None, model: ModelOptions, *, has_snapshot: bool
) -> tuple[ModelSource, list[RunConfig], MemoryReport]:
    """Return the source of one model, its runs in the dtype of its parameters, and their report."""
    source = model.found()
    if source.has_own_dtypes and (run.dtype is None or run.autocast):
        run_configs = [replace(run_config, dtype=STORED) for run_config in run_configs]
    if has_snapshot:
        source.require("--snapshot")
    from bertscope.analyses.memory.fit import estimate_on

    with Progress(len(run_configs)) as progress:
        used, report = estimate_on(source, run_configs, card, progress)
    return source, used, report
