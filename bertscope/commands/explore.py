"""`bertscope explore`."""

import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Annotated, Any

import typer

from bertscope.commands.model_options import Freeze, Inputs, ModelOptions
from bertscope.commands.registry import command
from bertscope.commands.run_options import PrecisionOptions, SizeOptions, Strategy, by_strategy
from bertscope.errors import BertscopeError, MissingExtraError
from bertscope.run_config import STORED, RunConfig

EXAMPLES = """
  bertscope explore bert-large-zh --batch 8 --seq 512
  bertscope explore bert-base-uncased --architecture BertForMaskedLM --unfold
  bertscope explore --checkpointing every-2 --autocast

keys: arrows and enter move, / searches, n and N find next and previous, p f m sort by parameters, FLOPs and memory,
o restores the model's order, x opens or closes all, tab goes to the details, q quits.
"""


@command(place=90, examples=EXAMPLES, short_help="Explore the module tree in the terminal.")
def explore(
    *,
    sizes: SizeOptions,
    unfold: Annotated[bool, typer.Option("--unfold", help="Show equal layers one by one.")] = False,
    checkpointing: Strategy = RunConfig.checkpointing,
    precision: PrecisionOptions,
    freeze: Freeze = None,
    inputs: Inputs = None,
    model: ModelOptions,
) -> None:
    """Explore the module tree in the terminal: parameters, FLOPs, shapes and memory of every module.

    FLOPs and memory are those of a training step at --batch and --seq; they appear as soon as they are computed.
    Needs the extra 'explore'.
    """
    _check_terminal()
    run_config = RunConfig(
        batch=sizes.batch, seq=sizes.seq, freeze=tuple(freeze or ()), inputs=tuple(inputs or ()),
        **precision.precision(),
    )  # fmt: skip
    (run_config, *others) = by_strategy(run_config, checkpointing)
    if others:
        raise BertscopeError("explore shows one strategy at a time; 'bertscope estimate' compares several")
    source = model.found()
    if source.has_own_dtypes and (precision.dtype is None or precision.autocast):
        run_config = replace(run_config, dtype=STORED)
    from bertscope.analyses.page.explore import explore as analyse
    from bertscope.render.explore.app import run as show

    reports = analyse(source, run_config, folded=not unfold)
    show(next(reports), settled(reports))


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
