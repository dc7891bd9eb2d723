"""`bertscope report`."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from bertscope.commands.fit import Context, DeviceOfBudget
from bertscope.commands.model_options import Inputs, ModelOptions, complete_model
from bertscope.commands.output import Progress, note, output_option, show, write
from bertscope.commands.registry import command, size
from bertscope.commands.run_options import AllocatorOptions, Kernel, StepOptions
from bertscope.errors import MissingExtraError, SelectionError
from bertscope.gpus import GPUS, find_gpu
from bertscope.render.texts import language
from bertscope.reports.memory import Gpu
from bertscope.reports.page import ModelPart, PageReport
from bertscope.run_config import COMPARED, EXAMPLE_STRATEGIES, FIT_PRECISIONS, RunConfig
from bertscope.units import FP32

EXAMPLES = """
  bertscope report bert-large-zh -o report.html
  bertscope report bert-tiny --gpu t4 --precision autocast-fp16 -o t4.html
  bertscope report bert-base-uncased --compare bert-base-cased -o two.html
  bertscope report bert-tiny --batch 32 --seq 512 --budget 8GiB -o tiny.html
  bertscope report bert-tiny --format json --no-fit
"""
BUDGET = "16GiB"


@command(place=70, examples=EXAMPLES, short_help="Write everything about a model on one page.")
def report(
    *,
    output: Annotated[
        Path | None, output_option("the page (.html) and json", ".html", text="The page, such as report.html.")
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="A second model to show.", autocompletion=complete_model),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", "-b", metavar="N", min=1, help="The batch size.")] = 8,
    seq: Annotated[int, typer.Option("--seq", "-s", metavar="N", min=1, help="The sequence length.")] = 128,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="GPU", help=f"A GPU instead of a budget: {', '.join(GPUS)}.",
                     autocompletion=lambda: list(GPUS)),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The memory budget.", show_default=BUDGET)
    ] = None,
    fit: Annotated[bool, typer.Option("--fit/--no-fit", help="With or without the fit table.")] = True,
    checkpointing: Annotated[
        str | None,
        typer.Option(metavar="STRATEGY[,...]", help="The strategies to compare.", show_default=COMPARED,
                     autocompletion=lambda: [*EXAMPLE_STRATEGIES, COMPARED]),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(metavar="PRECISION[,...]", show_default=FP32.name, autocompletion=lambda: list(FIT_PRECISIONS),
                     help="The precision, as for fit; of several the fit table has all, the page the first."),
    ] = None,
    step: StepOptions,
    device: DeviceOfBudget = None,
    kernel: Kernel = RunConfig.sdpa_kernel,
    allocator: AllocatorOptions,
    context: Context = None,
    inputs: Inputs = None,
    model: ModelOptions,
    fmt: Annotated[
        Literal["html", "json"], typer.Option("--format", "-f", help="The page, or the numbers on it.")
    ] = "html",
) -> None:  # fmt: skip
    """Write everything about a model on one page that works offline: fit, parameters, FLOPs, memory, diagram.

    The page begins with the answer: if the step fits in the budget or on the GPU. It is one file with light and dark
    colours, for screen, print and phone; its tables can be sorted and searched. Each section names the command that
    gives its numbers.
    """
    if fmt == "html":
        if output is None:
            raise SelectionError("the page goes into a file; name it with -o report.html")
        if find_spec("plotly") is None:
            raise MissingExtraError("report", "plot", otherwise="; --format json needs nothing")
    if gpu is not None and budget is not None:
        raise SelectionError("give either --budget, such as 16GiB, or --gpu, such as t4")
    card = find_gpu(gpu) if gpu is not None else None
    limit: int | Gpu | None = (card or size("--budget", budget or BUDGET)) if fit else None
    run_config = step.run_config(batch=batch, seq=seq, device=device or ("cuda" if card else RunConfig.device),
                                 sdpa_kernel=kernel, alloc_conf=allocator.text, inputs=tuple(inputs or ()))  # fmt: skip
    reentrant = step.training_file is not None and step.training_file.fields.get("reentrant", RunConfig.reentrant)
    sources = [replace(model, model=name).found() for name in (model.model, compare) if name]
    from bertscope.analyses.page.report import STAGES, page_report
    from bertscope.render.page import report as renderer

    with Progress(len(sources) * (len(STAGES) if fit else len(STAGES) - 1)) as progress:
        found = page_report(
            sources, run_config, limit, checkpointing=checkpointing, precision=precision,
            context_bytes=size("--context", context), reentrant=reentrant, progress=progress,
        )  # fmt: skip
    found = _with_file(found, step, run_config)
    if fmt == "html":
        write(renderer.html(found, language()), output)
        note(f"the page is in {output}")
    else:
        show(found, renderer, fmt, output)


def _with_file(report: PageReport, step: StepOptions, run_config: RunConfig) -> PageReport:
    """Return the report with the file of --from, if there is one, and print notes on the effect of its keys."""
    models: list[ModelPart] = []
    for model in report.models:
        run = {name: value for name, value in model.memory.run.items() if name not in ("freeze", "inputs")}
        runs = [
            replace(run_config, **run, checkpointing=variant.checkpointing, reentrant=variant.reentrant)
            for variant in model.memory.variants
        ]
        memory = step.with_training_file(model.memory, runs, is_noted=not models)
        models.append(replace(model, memory=memory))
    return replace(report, models=tuple(models))
