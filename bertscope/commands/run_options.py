"""Options that `estimate`, `profile` and `fit` share, and the display of progress."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from bertscope.commands.model_options import Freeze
from bertscope.commands.output import note, write_file
from bertscope.commands.registry import OneOf
from bertscope.errors import SelectionError, one_line
from bertscope.run_config import (
    COMPARED,
    DEVICES,
    EXAMPLE_STRATEGIES,
    IMPLEMENTATIONS,
    KERNELS,
    MODEL_IMPLEMENTATIONS,
    MODES,
    NO_OPTIMIZER,
    NONE,
    OPTIMIZERS,
    STRATEGIES,
    RunConfig,
    are_strategies,
    parse_strategies,
    takes_reentrant,
)  # fmt: skip
from bertscope.units import BF16, PRECISIONS, parse_bytes

if TYPE_CHECKING:
    from bertscope.reports.memory import MemoryReport

Batch = Annotated[int, typer.Option("--batch", "-b", metavar="N", help="The batch size.")]
Seq = Annotated[int, typer.Option("--seq", "-s", metavar="N", help="The sequence length.")]
Kernel = Annotated[
    str,
    OneOf(KERNELS),
    typer.Option("--sdpa-kernel", help="CUDA's kernel for fused attention; auto: torch's choice by dtype and mask."),
]


Strategy = Annotated[
    str,
    typer.Option(
        metavar="STRATEGY",
        help=f"The layers to recompute in backward: {STRATEGIES}.",
        autocompletion=lambda: [*EXAMPLE_STRATEGIES, COMPARED],
    ),
]


ModelImplementation = Annotated[
    str,
    OneOf(MODEL_IMPLEMENTATIONS),
    typer.Option(
        "--implementation",
        help="Whose BERT: transformers: as in transformers 4.43.4, without needing it; transformers-installed: the "
        "class of the installed version; bertscope: the built-in model, which adds no mask.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """Options for the sizes of the inputs."""

    batch: Batch = RunConfig.batch
    seq: Seq = RunConfig.seq


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions:
    """Options for the precision of a run."""

    dtype: Annotated[
        str | None,
        OneOf(PRECISIONS),
        typer.Option(
            help="The dtype of the parameters; with --autocast, of matrix products.", show_default=RunConfig.dtype
        ),
    ] = None
    autocast: Annotated[
        bool,
        typer.Option(
            "--autocast",
            help=f"Keep the parameters in {RunConfig.dtype} and compute in --dtype ({BF16.name} if not given).",
        ),
    ] = False

    def precision(self) -> dict[str, Any]:
        """Return the field of RunConfig that --dtype and --autocast set."""
        if self.autocast and self.dtype == RunConfig.dtype:
            words = " or ".join(name for name, row in PRECISIONS.items() if row.autocast)
            raise SelectionError(f"autocast computes in {words}; give --dtype {BF16.name}, or leave --dtype out")
        return {"autocast": self.dtype or BF16.name} if self.autocast else {"dtype": self.dtype or RunConfig.dtype}


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of a step: what is computed and trained."""

    mode: Annotated[
        str,
        OneOf(MODES),
        typer.Option(
            help="inference: forward in eval mode; forward: forward in train mode; "
            "training: forward, backward and optimizer step."
        ),
    ] = RunConfig.mode
    optimizer: Annotated[
        str, OneOf((NO_OPTIMIZER, *OPTIMIZERS)), typer.Option(help="The torch.optim class, with its defaults.")
    ] = RunConfig.optimizer
    implementation: Annotated[
        str,
        OneOf(IMPLEMENTATIONS),
        typer.Option("--optimizer-implementation", help="The optimizer's implementation in torch."),
    ] = RunConfig.implementation
    model_implementation: ModelImplementation = RunConfig.model_implementation
    padding: Annotated[
        float, typer.Option(metavar="SHARE", help="The share of each sequence that is padding, from 0 to below 1.")
    ] = RunConfig.padding
    no_dropout: Annotated[bool, typer.Option("--no-dropout", help="Set every dropout to 0.")] = False
    freeze: Freeze = None
    accumulate: Annotated[
        int, typer.Option(metavar="N", help="The number of micro-batches of --batch for each optimizer step.")
    ] = RunConfig.accumulate
    keep_gradients: Annotated[
        bool,
        typer.Option("--keep-gradients", help="Zero the gradients after a step, as zero_grad(set_to_none=False)."),
    ] = RunConfig.keep_gradients
    momentum: Annotated[float, typer.Option(metavar="SHARE", help="The momentum of sgd.")] = RunConfig.momentum
    amsgrad: Annotated[bool, typer.Option("--amsgrad", help="AMSGrad, for adam and adamw.")] = RunConfig.amsgrad
    ema: Annotated[bool, typer.Option("--ema", help="Keep a moving average of the weights.")] = RunConfig.ema
    clip_grad_norm: Annotated[
        bool, typer.Option("--clip-grad-norm", help="Clip the norm of the gradients before the optimizer step.")
    ] = RunConfig.clip_grad_norm
    hold_outputs: Annotated[
        bool, typer.Option("--hold-outputs", help="Keep the model's output in a variable during backward.")
    ] = RunConfig.hold_outputs

    def run_config(self, **others: Any) -> RunConfig:
        """Return the run by these options and the other fields of RunConfig; raises SelectionError."""
        own = {field.name: getattr(self, field.name) for field in fields(StepOptions)}
        own["dropout"], own["freeze"] = not own.pop("no_dropout"), tuple(self.freeze or ())
        return RunConfig(**own, **others)


@dataclass(frozen=True, kw_only=True)
class RunOptions(StepOptions, PrecisionOptions, SizeOptions):
    """The options of a step at one size, by one or several strategies of checkpointing."""

    checkpointing: Annotated[
        str,
        typer.Option(
            "--checkpointing",
            metavar="[STRATEGY[,...]]",
            help=f"The strategies to compare: {STRATEGIES}; without a value {COMPARED}. The next word is its value "
            "when each comma-separated part is a strategy, else it is MODEL.",
            autocompletion=lambda: [*EXAMPLE_STRATEGIES, COMPARED],
        ),
    ] = RunConfig.checkpointing
    reentrant: Annotated[bool, typer.Option("--reentrant", help="Use torch's reentrant checkpointing.")] = (
        RunConfig.reentrant
    )
    device: Annotated[str, OneOf(DEVICES), typer.Option(help="The device of the step, real or estimated.")] = (
        RunConfig.device
    )

    def run_configs(self, **others: Any) -> list[RunConfig]:
        """Return one run for each strategy; raises SelectionError or ConfigError for an impossible one."""
        given = self.precision() | others
        first = self.run_config(batch=self.batch, seq=self.seq, device=self.device, **given)
        return by_strategy(first, self.checkpointing, reentrant=self.reentrant)


@dataclass(frozen=True, kw_only=True)
class AllocatorOptions:
    """Options for the simulated caching allocator of CUDA."""

    alloc_conf: Annotated[
        str,
        typer.Option(
            metavar="TEXT",
            help="Settings of the simulated CUDA allocator, in the form of PYTORCH_CUDA_ALLOC_CONF: "
            "expandable_segments:True, max_split_size_mb:N, roundup_power2_divisions:N. The variable is not read.",
        ),
    ] = RunConfig.alloc_conf
    expandable_segments: Annotated[
        bool, typer.Option("--expandable-segments", help="The same as --alloc-conf expandable_segments:True.")
    ] = False

    @property
    def text(self) -> str:
        """Return the settings of both options."""
        parts = (self.alloc_conf, "expandable_segments:True" if self.expandable_segments else "")
        return ",".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """Options for the output of a report of memory, except its format."""

    rows: Annotated[int, typer.Option(metavar="N", min=0, help="The number of rows of saved tensors; 0: all.")] = 10
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw allocated bytes over the step: .html, .svg, .png, .csv or .json."),
    ] = None
    snapshot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the step for PyTorch's memory viewer (.pickle).")
    ] = None

    def check_timeline(self) -> None:
        """Raise an error before the work begins if the picture cannot be drawn."""
        if self.timeline is not None:
            from bertscope.render.timeline.timeline import check_suffix

            check_suffix(self.timeline.suffix)

    def write_timeline(self, report: MemoryReport) -> None:
        """Write the picture of the report, if it is wanted."""
        if self.timeline is not None:
            from bertscope.render.timeline.timeline import timeline

            write_file(self.timeline, timeline(report, self.timeline.suffix))
            note(f"the timeline is in {self.timeline}")


class WithBareCheckpointing(TyperCommand):
    """A command whose `--checkpointing` may have no value, which means none and full."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words, with the default value after an option whose next word is not a list of strategies."""
        full: list[str] = []
        for word, following in zip(args, [*args, ""][1:], strict=True):
            full.append(word)
            if word == "--checkpointing" and not are_strategies(following):
                full.append(COMPARED)
        ctx.allow_extra_args = True  # such as an unknown strategy; Typer's message would not list the strategies
        rest = super().parse_args(ctx, full)
        if rest and not ctx.resilient_parsing:
            raise SelectionError(
                f"unexpected word {rest[0][:40]!r}: there is one MODEL, and --checkpointing takes {STRATEGIES}"
            )
        return rest


def by_strategy(run_config: RunConfig, strategies: str, *, reentrant: bool = False) -> list[RunConfig]:
    """Return the run by each strategy; raises SelectionError or ConfigError for an impossible one."""
    if run_config.mode == "inference" and strategies != NONE:
        raise SelectionError("--checkpointing concerns what is saved for backward; use --mode forward or training")
    return [
        replace(run_config, checkpointing=strategy, reentrant=reentrant and takes_reentrant(strategy))
        for strategy in parse_strategies(strategies)
    ]


def size(option: str, text: str | None) -> int | None:
    """Return the bytes of an option such as --memory-limit 4GiB; raises SelectionError."""
    if text is None:
        return None
    plain = re.fullmatch(r"\s*(\d{1,20})\s*", text, re.ASCII)
    if plain and int(plain[1]):
        meant = f"{plain[1]}GiB" if len(plain[1]) < 5 else f"{plain[1]}B"
        raise SelectionError(f"{option} {plain[1]} has no unit; {meant}? B, KiB, MiB and GiB are units of a size")
    try:
        return parse_bytes(text)
    except ValueError:
        raise SelectionError(f"{option} takes a size such as 16GiB or 800MB; got {text[:40]!r}") from None


class Progress:
    """Display of progress on stderr: one line that changes in a terminal, a line for each stage elsewhere."""

    def __init__(self) -> None:
        self.started = time.monotonic()
        self.shown = ""
        self.is_terminal = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        """Show the text, except in the first second or, outside a terminal, a second time."""
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
    """Return the whole numbers of `64,128,256`; raises SelectionError for other text."""
    if not re.fullmatch(r"\s*\d{1,10}\s*(,\s*\d{1,10}\s*)*", text, re.ASCII):
        raise SelectionError(f"{option} takes a number, or several with commas: 128,256,512; got {text[:40]!r}")
    return tuple(dict.fromkeys(int(part) for part in text.split(",")))
