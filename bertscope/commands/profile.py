"""`bertscope profile`."""

from dataclasses import replace
from typing import Annotated

import typer

from bertscope.commands.model_options import Inputs, ModelOptions
from bertscope.commands.output import DetailedOutputOptions, Progress, note, write_file
from bertscope.commands.parallel_options import LaunchOptions
from bertscope.commands.process import INTERRUPT
from bertscope.commands.registry import command, size
from bertscope.commands.run_options import RunOptions, ViewOptions, WithBareCheckpointing
from bertscope.errors import SelectionError
from bertscope.gpus import may_have_cuda
from bertscope.render import memory as renderer
from bertscope.run_config import STORED

EXAMPLES = """
  bertscope profile
  bertscope profile --checkpointing
  bertscope profile bert-tiny --batch 8 --checkpointing none,full,every-2,selective
  bertscope profile bert-tiny --seq 512 --checkpointing --timeline step.html
  bertscope profile bert-tiny --mode inference --memory-limit 2GiB
  bertscope profile bert-tiny --nproc 2 --strategy fsdp
"""


@command(
    place=50, examples=EXAMPLES, cls=WithBareCheckpointing, short_help="Run the real step; measure its memory and time."
)
def profile(
    *,
    run: RunOptions,
    model: ModelOptions,
    steps: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="The number of timed steps.")] = 3,
    threads: Annotated[int | None, typer.Option(metavar="N", min=1, max=1024, help="The threads of torch.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="The seed of weights and inputs.")] = 0,
    memory_limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The memory limit of the process, such as 4GiB.")
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="The time limit of each run.")] = 600,
    ranks: LaunchOptions,
    inputs: Inputs = None,
    view: ViewOptions,
    out: DetailedOutputOptions,
) -> int:
    """Run the real step and measure its memory and time, each strategy in a separate process, next to the estimate.

    torch's profiler records the allocator's peak; separate steps without it give the times. With --nproc real
    ranks run the step, on gloo or with CUDA on NCCL; ranks that agree are one row. Exit code 3 if a run could not
    be measured: out of memory, killed, too slow; 130 if it was interrupted.
    """
    run_configs = run.run_configs(inputs=tuple(inputs or ()), parallelism=ranks.parallelism())
    view.check_timeline()
    if run.device == "cuda" and not may_have_cuda():  # else the child says it, after 3 s of loading torch
        raise SelectionError("torch finds no CUDA device here; use --device cpu, or estimate --device cuda")
    source = model.found()
    if source.has_own_dtypes and (run.dtype is None or run.autocast):
        run_configs = [replace(run_config, dtype=STORED) for run_config in run_configs]
    from bertscope.analyses.memory.profile import INTERRUPTED, profile_report
    from bertscope.analyses.memory.profile_job import Job, Launch

    launch = None
    if ranks.nproc is not None:
        launch = Launch(
            nproc=ranks.nproc,
            nnodes=ranks.nnodes,
            node_rank=ranks.node_rank or 0,
            rdzv_endpoint=ranks.rdzv_endpoint or "",
            timeout_seconds=timeout,
        )
    if launch is not None and launch.nnodes > 1:
        note(
            "several machines: the ports of torch's store and of gloo or NCCL have no authentication; use a trusted "
            "network, or a firewall (SECURITY.md)"
        )
    limit = size("--memory-limit", memory_limit)
    jobs = [
        Job(source=source, run_config=run_config, steps=steps, threads=threads, seed=seed, memory_limit_bytes=limit,
            beside=run_configs[0] if place else None,
            wants_snapshot=view.snapshot is not None and run_config is run_configs[-1], launch=launch)
        for place, run_config in enumerate(run_configs)
    ]  # fmt: skip
    with Progress(len(jobs) + (steps if len(jobs) > 1 and launch is None else 0)) as progress:
        report, pictures = profile_report(jobs, timeout_seconds=timeout, progress=progress)
    report = run.with_training_file(report, run_configs)
    is_shown = out.fmt != "table" or any(variant.measured for variant in report.variants)
    failures = [variant.failure for variant in report.variants if variant.failure]
    try:  # the table first; an output that fails does not prevent the others
        if is_shown:
            out.show(report, renderer, shown_rows=view.rows)
        for variant in report.variants:
            if variant.failure:
                note(f"{variant.checkpointing} could not be measured: {variant.failure}")
    finally:
        try:
            if view.snapshot is not None and pictures[-1] is not None:
                write_file(view.snapshot, pictures[-1])
        finally:
            if is_shown:
                view.write_timeline(report)
    if any(INTERRUPTED[1] in failure for failure in failures):
        return INTERRUPT
    return 3 if failures else 0
