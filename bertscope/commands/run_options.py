"""The options of commands that run a model, generated from the rows of settings, and the layers that they give."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertscope.commands.output import note, print_notes, progress_shown, write_file
from bertscope.commands.project import WithProjectDefaults, project
from bertscope.errors import SelectionError
from bertscope.frozen import dataclass
from bertscope.reports.memory import TrainingFile
from bertscope.settings.checkpointing import COMPARED, STRATEGIES, are_strategies
from bertscope.settings.generate import OPTIONS
from bertscope.settings.resolve import Layer, used_settings
from bertscope.settings.rows import Row, Settings, rows
from bertscope.settings.run_config import DEFAULTS, ESTIMATED, UNUSED

if TYPE_CHECKING:
    from bertscope.commands.model_options import ModelOptions
    from bertscope.reports.memory import LengthsReport, MemoryReport

_FROM = (
    "Take the loop from TrainingArguments (the JSON of to_json_string()) or from an accelerate config; options replace "
    "its settings."
)

WITHOUT = "Use what is published of the card, and no calibration."
PLAN = "Recompute as the plan in the JSON of 'bertscope plan --emit json' says; its run is the default."


@dataclass(frozen=True)
class CommandSettings:
    """The settings of a command line: layers of the options and of the project, and the files of --from and --plan."""

    layers: tuple[Layer, ...]
    training_file: TrainingFile | None = None
    plan: Path | None = None

    @property
    def keywords(self) -> dict[str, Any]:
        """Return the keywords of a public function."""
        own = {} if self.plan is None else {"plan": self.plan}
        return {"_layers": self.layers, "training_file": self.training_file, **own}


@dataclass(frozen=True, kw_only=True)
class Takes:
    """The settings that a command takes; `compared` take several values."""

    command: str
    records: tuple[type[Settings], ...] = ESTIMATED
    compared: Collection[str] = ()
    without: Collection[str] = ()
    has_file: bool = True  # --from
    usual: Mapping[str, str] = field(default_factory=dict)  # what the command takes for a setting, in words

    @property
    def table(self) -> dict[str, Row]:
        """Return the rows of the settings."""
        others = {*self.without, *UNUSED.get(self.command, ())}
        return {name: own for name, own in rows(*self.records).items() if name not in others}

    def parameters(self) -> list[inspect.Parameter]:
        """Return a parameter for each option; None is an option that is not given."""
        found = [_parameter(name, *self._option(own)) for name, own in self.table.items()]
        if "calibration" in self.table:
            without = typer.Option("--no-calibration", help=WITHOUT, show_default=False, rich_help_panel="card")
            found.append(_parameter("no_calibration", bool, without))
        files = [("training_file", "--from", _FROM), ("plan", "--plan", PLAN)][: 1 + ("checkpointing" in self.table)]
        return found + [
            _parameter(name, Path, typer.Option(option, metavar="FILE", help=text, rich_help_panel="loop"))
            for name, option, text in files * self.has_file
        ]

    def _option(self, own: Row) -> tuple[Any, Any]:
        option, is_compared = OPTIONS[own.name], own.name in self.compared
        is_flag = own.kind is bool and not own.or_file
        names = [f"{option}/--no-{option[2:]}"] if is_flag else [option, *filter(None, [own.flag])]
        usual = self.usual.get(own.name, DEFAULTS.get(self.command, {}).get(own.name, own.default))
        metavar = own.metavar or ("N" if own.kind is int else own.name.rpartition("_")[2].upper())
        is_listed = not own.words or bool(own.bare) or all(f"{word}: " in own.help for word in own.words)
        parts = [own.help, "" if is_listed else f"One of {', '.join(own.words)}."]
        without_value = f"; without a value {own.bare}" if is_compared else ""
        parts += [f"Strategies: {STRATEGIES}{without_value}." if own.bare else ""]
        parts += ["Repeatable." if own.is_list else ""]
        parts += ["" if usual in (None, (), "") or isinstance(usual, bool) else f"[default: {usual}]"]
        info = typer.Option(
            *names, help=" ".join(filter(None, parts)), rich_help_panel=own.section,
            show_default=False,
            metavar=None if is_flag else f"{metavar}[,...]" if is_compared else metavar,
            autocompletion=(lambda: [*own.words, *filter(None, [own.bare])]) if own.words else None,
        )  # fmt: skip
        return (bool if is_flag else list[str] if own.is_list else str), info

    def value(self, given: dict[str, Any]) -> CommandSettings:
        """Return the settings that options, --from and pyproject.toml give; print which of the project are used."""
        asked = {name: given[name] for name in self.table if given.get(name) is not None}
        if given.get("no_calibration"):
            if "calibration" in asked:
                raise SelectionError("--calibration FILE names a calibration and --no-calibration uses none; give one")
            asked["calibration"] = False
        layer = Layer(asked, compared=self.compared, forms=OPTIONS, is_text=True, records=self.records, permit=True)
        file = given.get("training_file")
        found = project()
        own = {} if found is None else self._of_project(found.settings)
        if file is not None:
            from bertscope.sources.training_files import read_training_file

            file = read_training_file(file)
            own.pop("precision", None)
        layers = [layer, *([] if found is None else [found.layer(own, self.compared, self.records)])]
        if own and found is not None:
            stronger = [layer, Layer(file.fields, is_default=True)] if file else [layer]
            found.note_used([str(own[name]) for name in used_settings(layers[-1], stronger, self.records)])
        return CommandSettings(tuple(layers), file, given.get("plan"))

    def _of_project(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of a project that the command takes; of several values only where it compares them."""
        return {
            name: value for name, value in settings.items()
            if name in self.table
            and (name in self.compared or len(self.table[name].values(value, is_compared=True)) == 1)
        }  # fmt: skip


def _parameter(name: str, kind: Any, info: Any) -> inspect.Parameter:
    annotation = Annotated[kind | None, info]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


@dataclass(frozen=True, kw_only=True)
class ViewOptions:
    """Options for the output of a report of memory, except its format."""

    rows: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Show N saved tensors; 0: all; default: none, with -v 10.",
            rich_help_panel="output",
        ),
    ] = None
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw allocated bytes over the step: .html, .svg, .png, .csv or .json.",
            rich_help_panel="output",
        ),
    ] = None
    snapshot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the step for PyTorch's memory viewer (.pickle).", rich_help_panel="output"
        ),
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


@dataclass(frozen=True, kw_only=True)
class LengthOptions:
    """Options for the lengths of real data."""

    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", rich_help_panel="sizes", help="Estimate an epoch of sequences of these lengths: one number "
            "a line, .jsonl, .csv, .parquet, or normal:256,64,16,512 (mean, deviation, least, most). --seq cuts longer "
            "ones.",
        ),
    ] = None  # fmt: skip
    lengths_field: Annotated[
        str, typer.Option(metavar="NAME", help="The field with numbers, token ids or texts.", rich_help_panel="sizes")
    ] = ""
    tokenizer: Annotated[
        str, typer.Option(metavar="PATH", help="The folder with tokenizer.json for texts.", rich_help_panel="sizes")
    ] = ""
    tokens_per_batch: Annotated[
        int, typer.Option(metavar="N", min=0, help="The tokens of packed batches.", rich_help_panel="sizes")
    ] = 0

    def report(self, model: ModelOptions, others: Mapping[str, Any], **keywords: Any) -> LengthsReport | None:
        """Return the report on the lengths, None without any; raises SelectionError for options without effect."""
        own: dict[str, Any] = {"field": self.lengths_field, "tokenizer": self.tokenizer,
                               "tokens_per_batch": self.tokens_per_batch}  # fmt: skip
        options = ("--lengths-field", "--tokenizer", "--tokens-per-batch")
        given = dict(zip(options, own.values(), strict=True)) if self.lengths is None else others
        if name := next((name for name, value in given.items() if value), ""):
            words = "without" if self.lengths is None else "with"
            raise SelectionError(f"{name} has no effect {words} --lengths")
        if self.lengths is None:
            return None
        from bertscope.api.memory import lengths

        with progress_shown():
            found = lengths(model.found(), self.lengths, **own, **keywords)
        print_notes(found)
        return found


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
                f"unexpected word {unclear[0][:40]!r} after --checkpointing, which takes {STRATEGIES}; "
                "put several MODELs before it"
            )
        if rest and not ctx.resilient_parsing:
            raise SelectionError(
                f"unexpected word {rest[0][:40]!r}: there is one MODEL, and --checkpointing takes {STRATEGIES}"
            )
        return rest
