"""`bertscope explore`."""

import gc
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from bertscope.commands.model_options import ModelOptions
from bertscope.commands.registry import command
from bertscope.commands.run_options import CommandSettings, Takes, WithBareCheckpointing
from bertscope.errors import BertscopeError, MissingExtraError, SelectionError, one_line
from bertscope.reports.layer_ranges import expand
from bertscope.settings.run_config import RunConfig
from bertscope.sources.model_source import ModelSource

EXAMPLES = """
  bertscope explore bert-large-zh --batch 8 --seq 512
  bertscope explore bert-base-uncased --architecture BertForMaskedLM --unfold
  bertscope explore --checkpointing selective --precision autocast-bf16

keys: arrows move, / filters, p f m sort by parameters, FLOPs and memory, b l d change batch size, length and precision,
e explains the module under the cursor, c copies its path, ? lists all keys, q quits.
"""


@command(examples=EXAMPLES, cls=WithBareCheckpointing)
def explore(
    *,
    run: Annotated[
        CommandSettings,
        Takes(
            command="explore", only=("batch", "seq", "checkpointing", "precision", "freeze", "input"), has_file=False
        ),
    ],
    unfold: Annotated[bool, typer.Option("--unfold", help="Show equal layers one by one.")] = False,
    model: ModelOptions,
) -> None:
    """Explore the module tree in the terminal: parameters, FLOPs, shapes and memory of every module.

    FLOPs and memory are those of a training step at --batch and --seq; they appear as soon as they are computed.
    Needs the extra 'explore'.
    """
    _check_terminal()
    source = model.found()
    loading = one_line(f"loading torch, and building {source.name} ...", limit=78)
    print(loading, end="\r", file=sys.stderr, flush=True)  # seconds before the first screen
    from bertscope.analyses.page import explore as analyse
    from bertscope.api.asked import Asked
    from bertscope.render.explore.app import run_app as show

    run_config = Asked.of({}, run.layers).resolved(source).runs[0]

    def again(**changes: Any) -> Iterator[Any]:
        """Return the reports of the same run with other sizes or another precision."""
        return settled(analyse(source, replace(run_config, **changes), folded=not unfold))

    reports = again()
    first = next(reports)
    print("\x1b[2K", end="", file=sys.stderr, flush=True)
    show(first, reports, again, partial(steps_at, source, run_config))


def steps_at(source: ModelSource, run_config: RunConfig, path: str, run: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the steps of a module, or of the nearest module around it that has steps, and the path that has them.

    A row of equal layers, such as `encoder.layer.0-11`, has the steps of these; of layers that differ, those of the
    first.
    """
    from bertscope.analyses.explain.steps import explain

    for tried in around(path):
        try:
            return tried, explain(source, tried, inputs=run_config.input, batch=run["batch"], seq=run["seq"])
        except SelectionError:
            continue
    return "", explain(source, inputs=run_config.input, batch=run["batch"], seq=run["seq"])


def around(path: str) -> Iterator[str]:
    """Yield a path, the single path of its first layer, and the same of every module around it."""
    while path:
        yield from dict.fromkeys((path, next(expand(path))))
        path = path.rpartition(".")[0]


def settled(reports: Iterator[Any]) -> Iterator[Any]:
    """Yield the reports; then enable garbage collection, except for the objects of torch.

    Scanning those would delay a key press by 0.3 s.
    """
    yield from reports
    gc.freeze()
    gc.enable()


def _check_terminal() -> None:
    """Raise an error without Textual or without a terminal."""
    if find_spec("textual") is None:
        raise MissingExtraError("explore", "explore")
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM") == "dumb":
        raise BertscopeError("explore needs a terminal; 'bertscope tree --shapes' writes the same modules to a pipe")
