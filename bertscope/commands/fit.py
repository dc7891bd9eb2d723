"""`bertscope fit`."""

from typing import Annotated

import typer

from bertscope.commands.calibration_options import CalibrationOptions
from bertscope.commands.model_options import Inputs, ModelOptions
from bertscope.commands.output import DetailedOutputOptions, Progress
from bertscope.commands.parallel_options import ParallelOptions
from bertscope.commands.registry import command, numbers, size
from bertscope.commands.run_options import AllocatorOptions, Kernel, StepOptions
from bertscope.errors import SelectionError
from bertscope.gpus import GPUS, find_gpu
from bertscope.parallelism import ONE_PROCESS, SINGLE, TRIED, WORLD_SIZES
from bertscope.render import fit as renderer
from bertscope.reports.memory import FitReport, Gpu
from bertscope.run_config import CHEAPEST_FIRST, COMPARED, DEVICES, EXAMPLE_STRATEGIES, FIT_PRECISIONS, RunConfig
from bertscope.units import BF16, FP16, FP32

EXAMPLES = """
  bertscope fit bert-large-uncased --gpu a100-40gb --world-size 8 --strategy fsdp --checkpointing full
  bertscope fit bert-large-uncased --gpu t4 --batch-total 64 --seq 128 --precision autocast-fp16
  bertscope fit bert-large-uncased --budget 16GiB --seq 512
  bertscope fit --gpu t4 --precision fp32,autocast-fp16 --checkpointing none,full
  bertscope fit bert-large-uncased --gpu t4,a10,h100 --batch 32 --checkpointing none,full --precision autocast-fp16
  bertscope fit bert-base-chinese --budget 8GiB --seq 512 --batch 32
  bertscope fit bert-tiny --budget 2GiB --seq 64,128,256,384,512 --checkpointing none
"""

DeviceOfBudget = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(DEVICES),
        help="The device; default cuda with --gpu, else cpu.",
        autocompletion=lambda: list(DEVICES),
    ),
]
Context = Annotated[
    str | None, typer.Option(metavar="SIZE", help="The memory of the CUDA context; default: as published.")
]


@command(place=60, examples=EXAMPLES, short_help="Find the largest batch that fits in a memory budget.")
def fit(
    *,
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The memory budget, such as 16GiB (on CUDA, including the context).")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="GPU[,...]", help=f"A GPU instead of a budget, or several: {', '.join(GPUS)}.",
                     autocompletion=lambda: list(GPUS)),
    ] = None,
    seq: Annotated[str, typer.Option("--seq", "-s", metavar="N[,N...]", help="Sequence lengths.")] = "512",
    asked_batch: Annotated[  # not `batch`: a training file does not set it
        int | None,
        typer.Option("--batch", "-b", metavar="N", min=1, help="Find the settings with which this batch fits.")
    ] = None,
    batch_total: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Find the fewest GPUs on which this batch of all ranks together fits, by "
                     f"{', '.join(TRIED)}, or by --strategy; at most {max(WORLD_SIZES):,}.")
    ] = None,
    checkpointing: Annotated[
        str | None,
        typer.Option(metavar="STRATEGY[,...]", help="The strategies to try.",
                     autocompletion=lambda: [*EXAMPLE_STRATEGIES, COMPARED],
                     show_default=f"{CHEAPEST_FIRST}; of another model than a BERT those that it takes"),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(metavar="PRECISION[,...]", help=f"The precisions to try: {', '.join(FIT_PRECISIONS)}.",
                     autocompletion=lambda: list(FIT_PRECISIONS),
                     show_default=f"{FP32.name} and autocast in {BF16.name}, on GPUs before Ampere in {FP16.name}"),
    ] = None,
    step: StepOptions,
    device: DeviceOfBudget = None,
    kernel: Kernel = RunConfig.sdpa_kernel,
    allocator: AllocatorOptions,
    context: Context = None,
    calibration: CalibrationOptions,
    ranks: ParallelOptions,
    inputs: Inputs = None,
    model: ModelOptions,
    out: DetailedOutputOptions,
) -> int:  # fmt: skip
    """Find the largest batch that fits in a memory budget, for each checkpointing strategy and precision.

    On a GPU the allocator is simulated, with the largest CUDA context that was published for it or that calibrate
    measured. With --batch, find the strategies and precisions with which it fits, cheapest first. Exit code 1 if
    nothing fits for certain. Several GPUs are in one table with the answer for each GPU first. With --world-size the
    batch is that of one rank of a job; with --batch-total find the number of ranks.
    """
    if (gpu is None) == (budget is None):
        raise SelectionError("give either --budget, such as 16GiB, or --gpu, such as t4")
    limits: list[int | Gpu] = [size("--budget", budget) or 0]
    if gpu is not None:
        named = dict.fromkeys(find_gpu(name.strip()) for name in gpu.split(","))
        limits = [calibration.of_gpu(known) for known in named]
    if batch_total is not None:
        _check_total(asked_batch, ranks)
    parallelism = ranks.parallelism() if batch_total is None else ONE_PROCESS
    seqs, context_bytes = numbers("--seq", seq), size("--context", context)
    reentrant = step.training_file is not None and step.training_file.fields.get("reentrant", RunConfig.reentrant)
    source = model.found()
    from bertscope.analyses.calibrate.step_time import with_fit_times
    from bertscope.analyses.memory.fit import Steps, fit_report, fit_variants
    from bertscope.analyses.memory.ranks.fewest import fewest_report

    checkpointing = checkpointing or ",".join(source.strategies(source.build()))
    runs, given = [], tuple(inputs or ())
    for limit in limits:
        known = limit if isinstance(limit, Gpu) else None
        place = device or ("cuda" if known else RunConfig.device)
        run_config = step.run_config(
            device=place, sdpa_kernel=kernel, alloc_conf=allocator.text, inputs=given, parallelism=parallelism
        )
        variants = fit_variants(
            source, run_config, known, precision=precision, checkpointing=checkpointing, reentrant=reentrant
        )
        runs.append((limit, variants))
    reports: list[FitReport] = []
    steps: dict[str | None, Steps] = {}
    tried = TRIED if ranks.strategy == SINGLE else (ranks.strategy,)
    settings = {name: value for name, value in ranks.settings().items() if ranks.strategy != SINGLE}
    sizes = WORLD_SIZES if ranks.world_size is None else (ranks.world_size,)
    trials = sum(len(variants) for _, variants in runs) if batch_total is None else len(runs) * (len(tried) + 1)
    with Progress(len(seqs) * trials) as progress:
        for limit, variants in runs:
            if batch_total is None:
                report = fit_report(source, variants, seqs, limit, batch=asked_batch, context_bytes=context_bytes,
                                    progress=progress, known_steps=steps)  # fmt: skip
            else:
                report = fewest_report(source, variants, seqs, limit, batch_total, strategies=tried, world_sizes=sizes,
                                       settings=settings, context_bytes=context_bytes, progress=progress,
                                       known_steps=steps)  # fmt: skip
            if calibration.time:
                found = calibration.found(limit) if isinstance(limit, Gpu) else None
                if found is not None:
                    report = with_fit_times(report, source, variants, found.report)
                has_times, on_cuda = any(row.predicted for row in report.rows), variants[0].device == "cuda"
                calibration.note_no_time(found, report.card, has_times=has_times, on_cuda=on_cuda)
            reports.append(step.with_training_file(report, variants, searched="batch", is_noted=not reports))
    out.show_all(reports, renderer)
    return 0 if any(report.fits for report in reports) else 1


def _check_total(asked_batch: int | None, ranks: ParallelOptions) -> None:
    """Raise SelectionError for options that say already what --batch-total searches, or that it cannot search."""
    if asked_batch is not None:
        raise SelectionError("--batch is that of one rank and --batch-total that of all; give one of them")
    if ranks.mesh is not None or ranks.strategy not in (SINGLE, *TRIED):
        raise SelectionError(
            f"--batch-total searches the number of ranks of {', '.join(TRIED)}; for a mesh give --batch, that of a rank"
        )
