"""`bertscope estimate`."""

from __future__ import annotations

from typing import Annotated

import typer

from bertscope.commands import options, running
from bertscope.commands.options import found_model
from bertscope.commands.output import write_bytes

EPILOG = """\b
examples:
  bertscope estimate bert-large-zh --batch 32 --seq 512 --autocast
  bertscope estimate --checkpointing --batch 8 --seq 512
  bertscope estimate --device cuda --dtype bf16 --autocast --attention sdpa
  bertscope estimate bert-tiny --checkpointing none,full,selective --format json
"""


def estimate(
    model: options.Model = options.DEFAULT_MODEL,
    batch: Annotated[int, typer.Option("--batch", "-b", metavar="N", help="The batch size.")] = 8,
    seq: Annotated[int, typer.Option("--seq", "-s", metavar="N", help="The sequence length.")] = 128,
    mode: running.Mode = "training",
    checkpointing: running.Strategies = "none",
    reentrant: running.Reentrant = False,
    dtype: running.Dtype = None,
    autocast: running.Autocast = False,
    optimizer: running.Optimizer = "adamw",
    implementation: running.Implementation = "default",
    device: running.Device = "cpu",
    kernel: running.Kernel = "auto",
    padding: running.Padding = 0.0,
    no_dropout: running.NoDropout = False,
    architecture: options.Architecture = None,
    attention: options.Attention = None,
    pooler: options.Pooler = None,
    freeze: options.Freeze = None,
    rows: running.Rows = 10,
    timeline: running.Timeline = None,
    snapshot: running.Snapshot = None,
    download: options.Download = False,
    fmt: options.Format = "table",
    output: options.Output = None,
) -> None:
    """Estimate the memory of a step: its peak, what it is made of, where it stands. Nothing is allocated.

    Forward, backward, recomputation and the optimizer's step are really dispatched, on tensors without
    memory; the peak on a CPU is found to the byte or nearly so. CUDA's kernels and allocator are imitated.
    """
    run = {
        "batch": batch, "seq": seq, "mode": mode, "reentrant": reentrant, "optimizer": optimizer,
        "implementation": implementation, "device": device, "sdpa_kernel": kernel, "padding": padding,
        "dropout": not no_dropout, "freeze": tuple(freeze or ()),
    }  # fmt: skip
    run_configs = running.run_configs(run, checkpointing, dtype, autocast)
    running.check_timeline(timeline)
    source = found_model(model, architecture, attention, pooler, download)
    if snapshot is not None:
        source.require("--snapshot")
    from bertscope.analyses.memory.estimate import MemoryTraces, estimate_report

    with running.Progress() as progress:
        report = estimate_report(source, run_configs, progress)
    running.show_memory(report, fmt, output, rows)
    running.write_timeline(report, timeline)
    if snapshot is not None:
        from bertscope.analyses.memory.snapshot import snapshot as picture

        write_bytes(snapshot, picture(MemoryTraces(source).trace(run_configs[-1])[0]))
