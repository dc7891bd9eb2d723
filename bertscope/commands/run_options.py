"""Options that `estimate`, `profile` and `fit` share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from bertscope.commands.model_options import Batch, Freeze, SizeOptions
from bertscope.commands.output import note, write_file
from bertscope.commands.project import PRECISION_OPTIONS, WithProjectDefaults
from bertscope.commands.registry import OneOf
from bertscope.errors import SelectionError
from bertscope.render.memory_words import training_file_notes
from bertscope.reports.memory import FitReport, MemoryReport
from bertscope.reports.training import TrainingFile, TrainingKey
from bertscope.run_config import (
    AUTOCAST,
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
    takers,
    takes_reentrant,
)  # fmt: skip
from bertscope.units import BF16, FP32, PRECISIONS

Report = TypeVar("Report", MemoryReport, FitReport)
Kernel = Annotated[
    str,
    OneOf(KERNELS),
    typer.Option("--sdpa-kernel", help="CUDA's kernel for fused attention; auto: torch's choice by dtype and mask."),
]


def use_training_file(context: typer.Context, path: Any) -> TrainingFile | None:
    """Read a training file; its settings become the defaults of the options that the command line does not give.

    An option for the precision replaces that of the file as a whole, and one for the optimizer its implementation too.
    """
    if path is None or context.resilient_parsing:
        return None
    from bertscope.sources.training_files import read_training_file

    file = read_training_file(path)
    options = {"precision": FP32.name, **file.fields}  # precision is an option of fit
    if "autocast" in options:
        options |= {"dtype": options["autocast"], "precision": f"{AUTOCAST}{options['autocast']}", "autocast": True}

    def unless_given(others: Collection[str], value: Any, otherwise: Any) -> Any:
        """Return the value unless one of the other options is given; given options are evaluated before the rest."""
        sources = [context.get_parameter_source(name) for name in others]
        return otherwise if any(source and source.name == "COMMANDLINE" for source in sources) else value

    for name, others, otherwise in (
        ("autocast", ("dtype", "precision"), False),
        ("grad_scaler", ("dtype", "precision"), RunConfig.grad_scaler),
        ("implementation", ("optimizer",), RunConfig.implementation),
    ):
        if name in options:
            options[name] = partial(unless_given, others, options[name], otherwise)
    of_project = (context.default_map or {}).items()
    context.default_map = {name: value for name, value in of_project if name not in PRECISION_OPTIONS} | options
    return file


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

    training_file: Annotated[
        TrainingFile | None,
        typer.Option(
            "--from",
            metavar="FILE",
            parser=Path,
            callback=use_training_file,
            is_eager=True,
            help="Take the loop from TrainingArguments (the JSON of to_json_string()) or from an accelerate config; "
            "options given as well replace its settings.",
        ),
    ] = None
    mode: Annotated[
        str,
        OneOf(MODES),
        typer.Option(
            help="inference: forward in eval mode; forward: forward in train mode; "
            "training: forward, backward and optimizer step."
        ),
    ] = RunConfig.mode
    optimizer: Annotated[
        str,
        OneOf((NO_OPTIMIZER, *OPTIMIZERS)),
        typer.Option(
            metavar="OPTIMIZER", help=f"The optimizer, with its defaults: {', '.join((NO_OPTIMIZER, *OPTIMIZERS))}."
        ),
    ] = RunConfig.optimizer
    implementation: Annotated[
        str,
        OneOf(IMPLEMENTATIONS),
        typer.Option("--optimizer-implementation", help="The optimizer's implementation."),
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
    momentum: Annotated[
        float, typer.Option(metavar="SHARE", help=f"The momentum of {' and '.join(takers('momentum'))}.")
    ] = RunConfig.momentum
    amsgrad: Annotated[bool, typer.Option("--amsgrad", help=f"AMSGrad, for {' and '.join(takers('amsgrad'))}.")] = (
        RunConfig.amsgrad
    )
    ema: Annotated[bool, typer.Option("--ema", help="Keep a moving average of the weights.")] = RunConfig.ema
    clip_grad_norm: Annotated[
        bool,
        typer.Option("--clip-grad-norm/--no-clip-grad-norm", help="Clip the norm of the gradients before the step."),
    ] = RunConfig.clip_grad_norm
    hold_outputs: Annotated[
        bool, typer.Option("--hold-outputs", help="Keep the model's output in a variable during backward.")
    ] = RunConfig.hold_outputs
    grad_scaler: Annotated[
        bool,
        typer.Option("--grad-scaler/--no-grad-scaler", help="Scale the loss with torch.amp.GradScaler, for fp16."),
    ] = RunConfig.grad_scaler

    def run_config(self, **others: Any) -> RunConfig:
        """Return the run by these options and the other fields of RunConfig; raises SelectionError."""
        own = {field.name: getattr(self, field.name) for field in fields(StepOptions) if field.name != "training_file"}
        own["dropout"], own["freeze"] = not own.pop("no_dropout"), tuple(self.freeze or ())
        return RunConfig(**own, **others)

    def with_training_file(
        self, report: Report, run_configs: Sequence[RunConfig], searched: str = "", *, is_noted: bool = True
    ) -> Report:
        """Return the report with the file of --from, if there is one, and print notes on the effect of its keys.

        `searched` is the field that the command searches a value for. `is_noted` is False if the notes are printed.
        """
        if self.training_file is None:
            return report
        replaced = []
        for name, value in self.training_file.fields.items():
            used = list(dict.fromkeys(getattr(run_config, name) for run_config in run_configs))
            if name == searched or value not in used:
                words = ", ".join(str(item).lower() for item in used)
                effect = "it is searched" if name == searched else f"an option sets {words}"
                replaced.append(TrainingKey(key=name, value=value, effect=effect))
        file = replace(self.training_file, replaced=tuple(replaced))
        for line in training_file_notes(file) if is_noted else ():
            note(line)
        return replace(report, training_file=file)


@dataclass(frozen=True, kw_only=True)
class RunOptions(StepOptions, PrecisionOptions, SizeOptions):
    """The options of a step at one size, by one or several strategies of checkpointing."""

    batch: Batch = 8  # checkpointing lowers the peak of a base model from 4 sequences on
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
    reentrant: Annotated[
        bool, typer.Option("--reentrant/--no-reentrant", help="Use torch's reentrant checkpointing.")
    ] = RunConfig.reentrant
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

    rows: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Show N saved tensors; 0: all; default: none, with -v 10.")
    ] = None
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


class WithBareCheckpointing(WithProjectDefaults):
    """A command whose `--checkpointing` may have no value, which means none and full."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words, with the default value after an option whose next word is not a list of strategies."""
        full: list[str] = []
        unclear: list[str] = []  # a model or an unknown strategy
        for word, following in zip(args, [*args, ""][1:], strict=True):
            full.append(word)
            if word == "--checkpointing" and not are_strategies(following):
                full.append(COMPARED)
                unclear += [following] if following and not following.startswith("-") else []
        ctx.allow_extra_args = True  # such as an unknown strategy; Typer's message would not list the strategies
        rest = super().parse_args(ctx, full)
        if unclear and ctx.params.get("others") and not ctx.resilient_parsing:
            raise SelectionError(
                f"unexpected word {unclear[0][:40]!r} after --checkpointing, which takes {STRATEGIES}; put several "
                "MODELs before it"
            )
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
