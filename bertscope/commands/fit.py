"""`bertscope fit`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer

from bertscope.commands import model_options, run_options
from bertscope.commands.output import Format, Output, show
from bertscope.commands.registry import command
from bertscope.errors import SelectionError
from bertscope.gpus import GPUS, find_gpu
from bertscope.run_config import RunConfig, parse_strategies
from bertscope.sources.find import DEFAULT_MODEL, load

EPILOG = """\b
examples:
  bertscope fit bert-large-uncased --budget 16GiB --seq 512
  bertscope fit --gpu t4 --precision fp32,autocast-bf16 --checkpointing none,full
  bertscope fit bert-base-chinese --budget 8GiB --seq 512 --batch 32
  bertscope fit bert-tiny --budget 2GiB --seq 64,128,256,384,512 --checkpointing none
"""
PRECISIONS = ("fp32", "bf16", "fp16", "autocast-bf16", "autocast-fp16")


@command(place=60, epilog=EPILOG, short_help="Find the largest batch that a memory budget holds.")
def fit(
    model: model_options.Model = DEFAULT_MODEL,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What there is: 16GiB (on CUDA its context included).")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="CARD", help=f"A card instead of a budget: {', '.join(GPUS)}.",
                     autocompletion=lambda incomplete: [name for name in GPUS if name.startswith(incomplete)]),
    ] = None,
    seq: Annotated[str, typer.Option("--seq", "-s", metavar="N[,N...]", help="Sequence lengths.")] = "512",
    batch: Annotated[
        int | None, typer.Option("--batch", "-b", metavar="N", min=1, help="This batch: which ways hold it?")
    ] = None,
    checkpointing: Annotated[
        str, typer.Option(metavar="STRATEGY[,...]", help="The strategies to try.")
    ] = "none,selective,every-2,full",
    precision: Annotated[
        str, typer.Option(metavar="PRECISION[,...]", help=f"The precisions to try: {', '.join(PRECISIONS)}.")
    ] = "fp32,autocast-bf16",
    mode: run_options.Mode = "training",
    optimizer: run_options.Optimizer = "adamw",
    implementation: run_options.Implementation = "default",
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda", help="Whose semantics; cuda with --gpu, else cpu.")
    ] = None,
    kernel: run_options.Kernel = "auto",
    context: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What the CUDA context takes, if you know it for your card.")
    ] = None,
    padding: run_options.Padding = 0.0,
    no_dropout: run_options.NoDropout = False,
    architecture: model_options.Architecture = None,
    attention: model_options.Attention = None,
    pooler: model_options.Pooler = None,
    freeze: model_options.Freeze = None,
    download: model_options.Download = False,
    fmt: Format = "table",
    output: Output = None,
) -> None:  # fmt: skip
    """Find the largest batch that a memory budget holds, for each checkpointing strategy and precision.

    With --batch it is turned around: what must be switched on to hold that batch, cheapest first. Exit code
    1 when nothing fits.
    """
    known = find_gpu(gpu) if gpu else None
    if (known is None) == (budget is None):
        raise SelectionError("give either --budget, such as 16GiB, or --gpu, such as t4")
    run_config = RunConfig(
        mode=mode, optimizer=optimizer, implementation=implementation, device=device or ("cuda" if known else "cpu"),
        sdpa_kernel=kernel, padding=padding, dropout=not no_dropout, freeze=tuple(freeze or ()),
    )  # fmt: skip
    variants = [variant for name in precision.split(",") for variant in _ways(run_config, name.strip(), checkpointing)]
    source = load(model, architecture=architecture, attention=attention, add_pooling_layer=pooler, download=download)
    from bertscope.analyses.memory.fit import fit_report
    from bertscope.render import fit as renderer

    size = run_options.size("--budget", budget)
    with run_options.Progress() as progress:
        report = fit_report(
            source, variants, run_options.numbers("--seq", seq), known if known is not None else size or 0,
            batch=batch, context_bytes=run_options.size("--context", context), progress=progress,
        )  # fmt: skip
    show(report, renderer, fmt, output)
    if not report.fits:
        raise typer.Exit(1)


def _ways(run_config: RunConfig, precision: str, strategies: str) -> list[RunConfig]:
    if precision not in PRECISIONS:
        raise SelectionError(f"--precision takes {', '.join(PRECISIONS)}; got {precision[:40]!r}")
    kind = "autocast" if precision.startswith("autocast-") else "dtype"
    chosen = parse_strategies(strategies) if run_config.mode != "inference" else ("none",)
    changes: dict[str, Any] = {kind: precision.removeprefix("autocast-")}
    return [replace(run_config, checkpointing=strategy, **changes) for strategy in chosen]
