"""`bertscope estimate`."""

from __future__ import annotations

from typing import Annotated

import typer

from bertscope.commands import model_options, run_options
from bertscope.commands.model_options import found_model
from bertscope.commands.output import Format, Output, write_bytes
from bertscope.commands.registry import command
from bertscope.commands.run_options import WithBareCheckpointing
from bertscope.errors import SelectionError
from bertscope.sources.find import DEFAULT_MODEL
from bertscope.sources.other_models import OtherSource

EPILOG = """\b
examples:
  bertscope estimate bert-large-zh --batch 32 --seq 512 --autocast
  bertscope estimate --checkpointing --batch 8 --seq 512
  bertscope estimate --device cuda --dtype bf16 --autocast --attention sdpa
  bertscope estimate bert-tiny --checkpointing none,full,selective --format json
"""


@command(
    place=40,
    epilog=EPILOG,
    cls=WithBareCheckpointing,
    short_help="Estimate a step's memory: its peak, its parts, where it stands.",
)
def estimate(
    model: model_options.Model = DEFAULT_MODEL,
    batch: Annotated[int, typer.Option("--batch", "-b", metavar="N", help="The batch size.")] = 8,
    seq: Annotated[int, typer.Option("--seq", "-s", metavar="N", help="The sequence length.")] = 128,
    mode: run_options.Mode = "training",
    checkpointing: run_options.Strategies = "none",
    reentrant: run_options.Reentrant = False,
    dtype: run_options.Dtype = None,
    autocast: run_options.Autocast = False,
    optimizer: run_options.Optimizer = "adamw",
    implementation: run_options.Implementation = "default",
    device: run_options.Device = "cpu",
    kernel: run_options.Kernel = "auto",
    padding: run_options.Padding = 0.0,
    no_dropout: run_options.NoDropout = False,
    architecture: model_options.Architecture = None,
    attention: model_options.Attention = None,
    pooler: model_options.Pooler = None,
    freeze: model_options.Freeze = None,
    rows: run_options.Rows = 10,
    timeline: run_options.Timeline = None,
    snapshot: run_options.Snapshot = None,
    download: model_options.Download = False,
    fmt: Format = "table",
    output: Output = None,
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
    run_configs = run_options.run_configs(run, checkpointing, dtype, autocast)
    run_options.check_timeline(timeline)
    source = found_model(model, architecture, attention, pooler, download)
    if snapshot is not None and isinstance(source, OtherSource):
        raise SelectionError(f"{source.name} is {source.family}; --snapshot is of BERTs built here alone")
    from bertscope.analyses.memory.estimate import MemoryTraces
    from bertscope.analyses.memory.estimate_other import estimate_any

    with run_options.Progress() as progress:
        report = estimate_any(source, run_configs, progress)
    run_options.show_memory(report, fmt, output, rows)
    run_options.write_timeline(report, timeline)
    if snapshot is not None:
        from bertscope.analyses.memory.snapshot import snapshot as picture

        write_bytes(snapshot, picture(MemoryTraces(source).trace(run_configs[-1])[0]))  # type: ignore[arg-type]
