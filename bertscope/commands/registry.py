"""Registration of commands, bundles of options that become parameters of a command, and the values of options."""

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from bertscope.commands.output import check_outputs
from bertscope.commands.process import failure
from bertscope.commands.project import WithProjectDefaults
from bertscope.errors import SelectionError, suggestion
from bertscope.render.console import choose_color
from bertscope.units import parse_bytes

_of_output = functools.partial(typer.Option, show_default=False, rich_help_panel="output")
Color = Annotated[
    Literal["auto", "always", "never"] | None,
    _of_output(help="Use colour; auto: as the terminal, NO_COLOR and FORCE_COLOR allow."),
]
Debug = Annotated[
    bool, _of_output("--debug", help="Show the traceback of an error, and all progress; as BERTSCOPE_DEBUG=1.")
]
NoCache = Annotated[bool, _of_output(
    "--no-cache", help="Neither read nor write what earlier commands computed ('bertscope doctor' names the folder)."
)]  # fmt: skip


def _show_whole_help(ctx: typer.Context, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        print(ctx.command.whole_help(ctx))  # type: ignore[attr-defined]
        raise typer.Exit


HelpAll = Annotated[bool, _of_output(
    "--help-all", callback=_show_whole_help, is_eager=True,
    help="Show this message with every option explained, and exit.",
)]  # fmt: skip
# The groups of commands in the order of `--help`, each command with its line there. A command is in the module of its
# name.
GROUPS = {
    "Model": {
        "count": "Count the parameters of a model or checkpoint, layer by layer.",
        "tree": "Show the module tree with parameters and shares.",
        "flops": "Count the FLOPs of a forward pass or a training step.",
        "explain": "Explain a model step by step, with formulas for every number.",
        "diagram": "Draw a model's classes, forward pass or module tree.",
        "diff": "Compare two models, or a model with a checkpoint.",
        "report": "Write everything about a model on one page.",
        "presets": "List the presets with their counts, without importing torch.",
    },
    "Memory": {
        "estimate": "Estimate a step's memory: the peak, its parts and operator.",
        "profile": "Run the real step; measure its memory and time.",
        "run": "Run your training script on a GPU that is not there.",
        "fit": "Find the largest batch that fits in a memory budget.",
        "plan": "Find what to recompute so that a step fits, and print the code.",
        "why": "Explain what filled a card, from a snapshot or an error message.",
        "sweep": "Estimate every point of a grid, and go on after an interruption.",
    },
    "CI": {"check": "Verify the expectations in files."},
    "Tools": {
        "schema": "Print the JSON Schema of the output of --format json.",
        "doctor": "Show the environment: versions, devices, extras, presets.",
    },
}
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}
# Commands that earlier versions had, and what to type instead.
# Words that are no command: former names, and those of other tools.
REMOVED = {
    "summary": "tree MODEL --style torchinfo", "params": "count MODEL", "parameters": "count MODEL",
    "info": "count MODEL", "show": "tree MODEL", "memory": "estimate MODEL", "vram": "estimate MODEL --gpu t4",
    "compare": "diff MODEL MODEL", "macs": "flops MODEL", "flop": "flops MODEL", "list": "presets", "oom": "why FILE",
    "calibrate": "profile --device cuda --save FILE",
    "convert": "presets NAME --config",
    "explore": "tree --interactive",
    "print": "tree --style torch",
    "verify": "diff MODEL CHECKPOINT",
}  # fmt: skip
INPUTS = ("training_file", "plan")  # options with files that are read
_REGISTERED: dict[str, typer.Typer] = {}


class OneOf(tuple[str, ...]):
    """The words that an option allows, from a table: `Annotated[str, OneOf(TABLE), typer.Option(...)]`."""


def command(*, examples: str, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the command of its file's name, which COMMANDS lists.

    Its help ends with the examples. `settings` are those of Typer's decorator, such as `cls`.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__module__.rpartition(".")[2]
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        app.command(
            epilog=f"\b\nexamples:{examples}", short_help=COMMANDS[name], **{"cls": WithProjectDefaults, **settings}
        )(with_bundles(function))
        _REGISTERED[name] = app
        return function

    return register


class CommandGroup(TyperGroup):
    """The commands of COMMANDS. Only the module of a called command is imported."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands in their order."""
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command, or None."""
        if cmd_name not in COMMANDS:
            return None
        if self.commands.get(cmd_name) is None:
            import_module(f"{__package__}.{cmd_name}")
            self.commands[cmd_name] = typer.main.get_command(_REGISTERED[cmd_name])
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name; the error for another name says what to type."""
        if args[0] in REMOVED and not ctx.resilient_parsing:
            raise SelectionError(f"no command {args[0]!r}; type 'bertscope {REMOVED[args[0]]}'")
        if args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            near = suggestion(args[0], COMMANDS)
            ctx.fail(f"no command {args[0][:60]!r}; {near}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Return the completions of a command's name with their lines in COMMANDS, which imports none of them."""
        self.commands = {name: TyperCommand(name, short_help=line) for name, line in COMMANDS.items()}
        return super().shell_complete(ctx, incomplete)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands by group, which imports none of them."""
        width = max(map(len, COMMANDS))
        for group, listed in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(name.ljust(width), line) for name, line in listed.items()])


def commands_with(option: str, ctx: Any) -> list[str]:
    """Return the commands that have an option. Only the modules of those that may have it are imported.

    They are those whose files have its name, all for a name in a file that commands share, none for an unknown name.
    """
    from bertscope.settings.generate import OPTIONS

    words = map(re.escape, option.strip("-").split("-"))
    name = re.compile(rf"\b{'[-_]'.join(words)}\b")
    texts = {path.stem: path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py")}
    files = {file for file, text in texts.items() if name.search(text)}
    is_shared = bool(files - COMMANDS.keys())
    if option in OPTIONS.values():
        files |= {file for file, text in texts.items() if "Takes(" in text}
    group = ctx.parent.command
    found = (group.get_command(ctx.parent, file) for file in COMMANDS if is_shared or file in files)
    return [command.name for command in found if any(option in row.opts for row in command.params)]


def with_bundles(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command with a parameter for each field of the bundles (dataclasses) among its parameters.

    If a bundle has a default, its fields are the defaults of the options. The command first checks that every output
    file can be written: each option of type Path names one. The function may return an exit code.
    """
    signature = inspect.signature(function, eval_str=True)
    own = signature.parameters.values()
    bundles: dict[str, Any] = {item.name: item.annotation for item in own if is_dataclass(item.annotation)}
    takes = {item.name: found for item in own if (found := _takes(item)) is not None}

    @functools.wraps(function)
    def run(
        *, color: Any, debug: bool, no_cache: bool, help_all: bool, **given: Any
    ) -> None:  # `process` reads --debug: errors may precede parsing; `cli` reads --no-cache
        if color is not None:
            choose_color(color)
        try:
            check_outputs([value for name, value in given.items() if isinstance(value, Path) and name not in INPUTS])
            for name, bundle in bundles.items():
                given[name] = bundle(**{field.name: given.pop(field.name) for field in fields(bundle)})
            for name, found in takes.items():
                values = {param.name: given.pop(param.name) for param in found.parameters()}
                given[name] = found.value(values)
            code = function(**given)
        except (EOFError, OSError, SystemExit) as error:  # Typer would end with exit codes that mean something else
            code = failure(error)
        if code:
            raise typer.Exit(code)

    of_all = (("color", None, Color), ("debug", False, Debug), ("no_cache", False, NoCache),
              ("help_all", False, HelpAll))  # fmt: skip
    params = [*(param for item in own for param in _options(item)), *(_option(*row) for row in of_all)]
    run.__signature__ = signature.replace(parameters=params)  # type: ignore[attr-defined]
    run.__annotations__ = {param.name: param.annotation for param in params}
    return run


def _takes(item: inspect.Parameter) -> Any:
    """Return what makes the options of a parameter from rows: an object with `parameters` and `value`, or None."""
    metadata = getattr(item.annotation, "__metadata__", ())
    return next((found for found in metadata if hasattr(found, "parameters")), None)


def _options(item: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """Yield the parameter, or one for each field of its bundle."""
    if (takes := _takes(item)) is not None:
        yield from takes.parameters()
        return
    if not is_dataclass(item.annotation):
        yield _option(item.name, item.default, item.annotation)
        return
    annotations = get_type_hints(item.annotation, include_extras=True)
    for field in fields(item.annotation):
        yield _option(field.name, getattr(item.default, field.name, field.default), annotations[field.name])


def _option(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_narrowed(annotation))


def _narrowed(annotation: Any) -> Any:
    """Return the annotation with the words of its `OneOf`, if any, instead of `str`."""
    metadata = getattr(annotation, "__metadata__", ())
    words = next((item for item in metadata if isinstance(item, OneOf)), None)
    if words is None:
        return annotation
    kind: Any = Literal[tuple(words)]
    if type(None) in get_args(annotation.__origin__):
        kind = kind | None
    for item in metadata:
        kind = Annotated[kind, item]
    return kind


def size(option: str, text: str | None) -> int | None:
    """Return the bytes of an option such as --memory-limit 4GiB; raises SelectionError."""
    if text is None:
        return None
    plain = re.fullmatch(r"\s*([0-9]{1,20})\s*", text, re.ASCII)
    if plain and int(plain[1]):
        meant = f"{plain[1]}GiB" if len(plain[1]) < 5 else f"{plain[1]}B"
        raise SelectionError(f"{option} {plain[1]} has no unit; {meant}? B, KiB, MiB and GiB are units of a size")
    try:
        return parse_bytes(text)
    except ValueError:
        raise SelectionError(f"{option} takes a size such as 16GiB or 800MB; got {text[:40]!r}") from None


def numbers(option: str, text: str) -> tuple[int, ...]:
    """Return the whole numbers of `64,128,256`; raises SelectionError for other text."""
    if not re.fullmatch(r"\s*[0-9]{1,10}\s*(,\s*[0-9]{1,10}\s*)*", text, re.ASCII):
        raise SelectionError(f"{option} takes a number, or several with commas: 128,256,512; got {text[:40]!r}")
    return tuple(dict.fromkeys(int(part) for part in text.split(",")))
