"""`bertscope why`."""

from pathlib import Path
from typing import Annotated

import typer

from bertscope.commands.model_options import Model, ModelOptions
from bertscope.commands.output import DetailedOutputOptions, note, print_notes, progress_shown, write_file
from bertscope.commands.registry import command
from bertscope.commands.run_options import CommandSettings, Takes
from bertscope.errors import SelectionError
from bertscope.frozen import dataclass

EXAMPLES = """
  bertscope why oom.log
  bertscope why snapshot.pickle
  bertscope why snapshot.pickle --plot history.svg --format json
  bertscope why snapshot.pickle bert-base-uncased --gpu t4 --batch 32 --seq 512
  python train.py 2>&1 | bertscope why - bert-base-uncased --batch 32 --seq 512
exit codes: 0 the file is explained, 2 it is none of these, or is not there
"""


@dataclass(frozen=True, kw_only=True)
class _ModelOrNone(ModelOptions):
    model: Model = ""


@command(examples=EXAMPLES)
def why(
    *,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="What torch.cuda.memory._dump_snapshot wrote (.pickle), or a text with an out-of-memory message; - is "
            "standard input.",
        ),
    ],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw the history of the memory by part.")
    ] = None,
    run: Annotated[CommandSettings, Takes(command="why")],
    model: _ModelOrNone,
    out: DetailedOutputOptions,
) -> None:
    """Explain what filled a card, and the one change that frees most.

    The blocks of a snapshot are shown by part, line of code and module; leaks, second models and fragmentation are
    named. With MODEL, the estimate of its step is next to them. No code in a file runs: snapshots are read as plain
    values, in a process with limits.
    """
    if plot is not None and plot.suffix.lower() != ".svg":
        raise SelectionError(f"{plot.name}: the history is drawn as an .svg file")
    source = model.found() if model.model else None
    from bertscope.api.why import why as explain

    with progress_shown():
        report = explain(file, source, **run.keywords)
    if plot is not None and not report.timeline:
        raise SelectionError(
            f"{report.name} has no history to draw: record it with torch.cuda.memory._record_memory_history()"
        )
    print_notes(report)
    out.show(report)
    if plot is not None:
        from bertscope.render.why import history_svg

        write_file(plot, history_svg(report))
        note(f"the history is in {plot}")
