"""What `estimate`, `profile` and `fit` share: how a step is run, and progress while it is."""

from __future__ import annotations

import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from bertscope.commands.output import note, show, write_bytes
from bertscope.errors import SelectionError, one_line
from bertscope.run_config import STRATEGIES, RunConfig, parse_strategies
from bertscope.sources.presets import preset_paths
from bertscope.units import parse_bytes

BARE = "none,full"
Mode = Annotated[
    Literal["inference", "forward", "training"],
    typer.Option(help="Eval; or train and what is kept for backward; or forward, backward and optimizer."),
]
Dtype = Annotated[
    Literal["fp32", "bf16", "fp16"] | None,
    typer.Option(help="Of the parameters; with --autocast of the matrix products.", show_default="fp32"),
]
Autocast = Annotated[
    bool, typer.Option("--autocast", help="Keep the parameters in fp32 and compute in --dtype (bf16 if not given).")
]
Optimizer = Annotated[
    Literal["none", "sgd", "adam", "adamw", "adafactor"], typer.Option(help="torch's own class, with its defaults.")
]
Implementation = Annotated[
    Literal["default", "loop", "foreach", "fused"],
    typer.Option("--optimizer-implementation", help="How the optimizer goes over the parameters."),
]
Strategies = Annotated[
    str,
    typer.Option(
        "--checkpointing",
        metavar="[STRATEGY[,...]]",
        help=f"Alone: without and with. Else one or several of {STRATEGIES}.",
        autocompletion=lambda incomplete: [
            word for word in ("none", "full", "every-2", "selective", "none,full") if word.startswith(incomplete)
        ],
    ),
]
Reentrant = Annotated[bool, typer.Option("--reentrant", help="Checkpoint by torch's reentrant implementation.")]
Padding = Annotated[
    float, typer.Option(metavar="SHARE", help="The share of each sequence that is padding, from 0 to below 1.")
]
NoDropout = Annotated[bool, typer.Option("--no-dropout", help="Set every dropout to 0.")]
Device = Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the step runs, or whose semantics are estimated.")]
Kernel = Annotated[
    Literal["auto", "flash", "efficient", "math"],
    typer.Option("--sdpa-kernel", help="CUDA's kernel for fused attention; auto: what torch takes for dtype and mask."),
]
Rows = Annotated[int, typer.Option(metavar="N", min=0, help="How many kinds of kept tensors are listed; 0: all.")]
Timeline = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw live bytes over the step: .html, .svg, .png, .csv or .json."),
]
Snapshot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the step for PyTorch's memory viewer (.pickle).")
]


class WithBareCheckpointing(TyperCommand):
    """`--checkpointing` with nothing after it means without and with."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments, with the value that was left out put in."""
        full: list[str] = []
        for place, word in enumerate(args):
            full.append(word)
            if word == "--checkpointing" and _is_no_strategy(args[place + 1 : place + 2]):
                full.append(BARE)
        return super().parse_args(ctx, full)


def _is_no_strategy(following: list[str]) -> bool:
    if not following or following[0].startswith("-"):
        return True
    word = following[0]
    return word in preset_paths() or "/" in word or word.endswith((".yaml", ".yml", ".json")) or os.path.exists(word)


def run_configs(run_config: dict[str, Any], strategies: str, dtype: str | None, autocast: bool) -> list[RunConfig]:
    """One run for each strategy; raises SelectionError or ConfigError for what cannot be run."""
    if autocast and dtype == "fp32":
        raise SelectionError("autocast computes in bf16 or fp16; give --dtype bf16, or leave --dtype out")
    precision: dict[str, Any] = {"autocast": dtype or "bf16"} if autocast else {"dtype": dtype or "fp32"}
    if run_config.get("mode") == "inference" and strategies != "none":
        raise SelectionError("--checkpointing concerns what is kept for backward; use --mode forward or training")
    first = RunConfig(**run_config, **precision)
    chosen = parse_strategies(strategies)
    reentrant = {strategy: first.reentrant and strategy not in ("none", "selective") for strategy in chosen}
    return [replace(first, checkpointing=strategy, reentrant=reentrant[strategy]) for strategy in chosen]


def size(option: str, text: str | None) -> int | None:
    """Bytes from an option such as --memory-limit 4GiB."""
    if text is None:
        return None
    try:
        return parse_bytes(text)
    except ValueError:
        raise SelectionError(f"{option} takes a size such as 16GiB or 800MB; got {text[:40]!r}") from None


class Progress:
    """Where long work is, on stderr: one line that changes in a terminal, a line for each stage elsewhere."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.shown = ""
        self.is_terminal = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        """Say it, unless the work has hardly begun or this has been said."""
        seconds = time.monotonic() - self.started
        if seconds < 1 or (text == self.shown and not self.is_terminal):
            return
        self.shown = text
        line = f"{one_line(text, limit=60)} ({seconds:.0f} s)"
        print(f"\r\x1b[K{line}" if self.is_terminal else line, end="" if self.is_terminal else "\n", file=sys.stderr)
        sys.stderr.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_terminal and self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers from `64,128,256`; raises SelectionError for anything else."""
    if not re.fullmatch(r"\s*\d{1,10}\s*(,\s*\d{1,10}\s*)*", text, re.ASCII):
        raise SelectionError(f"{option} takes a number, or several with commas: 128,256,512; got {text[:40]!r}")
    return tuple(dict.fromkeys(int(part) for part in text.split(",")))


def check_timeline(path: Path | None) -> None:
    """Refuse a picture that could not be drawn before the work for it begins."""
    if path is not None:
        from bertscope.render.timeline.timeline import check_suffix

        check_suffix(path.suffix)


def show_memory(report: Any, fmt: str, output: Path | None, rows: int) -> None:
    """Show the report in the format asked for."""
    from functools import partial
    from types import SimpleNamespace

    from bertscope.render import memory as renderer

    table = partial(renderer.table, shown_rows=rows or None)
    show(report, SimpleNamespace(table=table, csv=renderer.csv, markdown=renderer.markdown), fmt, output)


def write_timeline(report: Any, path: Path | None) -> None:
    """Write the picture of the report, if there is a path for it."""
    if path is not None:
        from bertscope.render.timeline.timeline import timeline as picture

        write_bytes(path, picture(report, path.suffix))
        note(f"the timeline is in {path}")
