"""`bertscope profile`."""

from __future__ import annotations

from typing import Annotated

import typer

from bertscope.commands import model_options, run_options
from bertscope.commands.output import Format, Output, note, write_bytes
from bertscope.commands.registry import command
from bertscope.commands.run_options import WithBareCheckpointing
from bertscope.sources.find import DEFAULT_MODEL, load

EPILOG = """\b
examples:
  bertscope profile
  bertscope profile --checkpointing
  bertscope profile bert-tiny --batch 8 --checkpointing none,full,every-2,selective
  bertscope profile bert-tiny --seq 512 --checkpointing --timeline step.html
  bertscope profile bert-tiny --mode inference --memory-limit 2GiB
"""


@command(
    place=50,
    epilog=EPILOG,
    cls=WithBareCheckpointing,
    short_help="Run the real step; measure its memory and time.",
)
def profile(
    model: model_options.Model = DEFAULT_MODEL,
    batch: Annotated[int, typer.Option("--batch", "-b", metavar="N", help="The batch size.")] = 1,
    seq: Annotated[int, typer.Option("--seq", "-s", metavar="N", help="The sequence length.")] = 128,
    mode: run_options.Mode = "training",
    checkpointing: run_options.Strategies = "none",
    reentrant: run_options.Reentrant = False,
    dtype: run_options.Dtype = None,
    autocast: run_options.Autocast = False,
    optimizer: run_options.Optimizer = "adamw",
    implementation: run_options.Implementation = "default",
    device: run_options.Device = "cpu",
    padding: run_options.Padding = 0.0,
    no_dropout: run_options.NoDropout = False,
    architecture: model_options.Architecture = None,
    attention: model_options.Attention = None,
    pooler: model_options.Pooler = None,
    freeze: model_options.Freeze = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="How many bare steps are timed.")] = 3,
    threads: Annotated[int | None, typer.Option(metavar="N", min=1, max=1024, help="torch's threads.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the weights and inputs.")] = 0,
    memory_limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The most that the process may take: 4GiB.")
    ] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", min=1, help="For each way to run.")] = 600,
    rows: run_options.Rows = 10,
    timeline: run_options.Timeline = None,
    snapshot: run_options.Snapshot = None,
    download: model_options.Download = False,
    fmt: Format = "table",
    output: Output = None,
) -> None:
    """Run the real step and measure its memory and time, each way in a process of its own, beside the estimate.

    The peak is the allocator's own, by torch's profiler; times are of bare steps, run apart. Exit code 3 when
    a way to run could not be measured: out of memory, killed, too slow; 130 when it was interrupted.
    """
    run = {
        "batch": batch, "seq": seq, "mode": mode, "reentrant": reentrant, "optimizer": optimizer,
        "implementation": implementation, "device": device, "padding": padding,
        "dropout": not no_dropout, "freeze": tuple(freeze or ()),
    }  # fmt: skip
    run_configs = run_options.run_configs(run, checkpointing, dtype, autocast)
    run_options.check_timeline(timeline)
    source = load(model, architecture=architecture, attention=attention, add_pooling_layer=pooler, download=download)
    from bertscope.analyses.memory.profile import INTERRUPTED, profile_report
    from bertscope.analyses.memory.profile_job import Job

    limit = run_options.size("--memory-limit", memory_limit)
    jobs = [
        Job(source=source, run_config=run_config, steps=steps, threads=threads, seed=seed, memory_limit_bytes=limit,
            beside=run_configs[0] if place else None,
            wants_snapshot=snapshot is not None and run_config is run_configs[-1])
        for place, run_config in enumerate(run_configs)
    ]  # fmt: skip
    with run_options.Progress() as progress:
        report, pictures = profile_report(jobs, timeout_seconds=timeout, progress=progress)
    is_shown = fmt != "table" or any(variant.measured for variant in report.variants)
    failures = [variant.failure for variant in report.variants if variant.failure]
    try:  # the table first; no output that fails takes another one with it
        if is_shown:
            run_options.show_memory(report, fmt, output, rows)
        for variant in report.variants:
            if variant.failure:
                note(f"{variant.checkpointing} could not be measured: {variant.failure}")
    finally:
        try:
            if snapshot is not None and pictures[-1] is not None:
                write_bytes(snapshot, pictures[-1])
        finally:
            if is_shown:
                run_options.write_timeline(report, timeline)
    if any(INTERRUPTED[1] in failure for failure in failures):
        raise typer.Exit(130)
    if failures:
        raise typer.Exit(3)
