"""Typer commands made from the rows in table.py: options, help, and words before parsing."""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Iterable
from textwrap import indent
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from bertscope.commands.table import COMMANDS, REMOVED, Command
from bertscope.errors import SelectionError, nearest
from bertscope.settings.rows import near_word
from bertscope.views.console import choose_color, command_lines

# Section of an option -> its heading in the help. A help that would be longer shows only the first three.
HEADINGS = {
    "arguments": "Arguments", "common": "Common options", "options": "Options", "model": "Model", "sizes": "Sizes",
    "loop": "Training loop", "gpu": "GPU", "ranks": "Several GPUs", "measurement": "Measurement", "output": "Output",
}  # fmt: skip
_MOST_LINES = 25
_ALL = "bertscope.all_options"  # key of ctx.meta
_HYPHEN = "\u2011"  # at which no line ends


def _show_all_options(ctx: typer.Context, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        print(ctx.get_help())
        raise typer.Exit


_of_output = functools.partial(typer.Option, show_default=False, rich_help_panel="output")
Color = Annotated[
    Literal["auto", "always", "never"] | None,
    _of_output(metavar="WHEN", help="Use colour: auto, always or never. auto obeys NO_COLOR and FORCE_COLOR."),
]
Debug = Annotated[bool, _of_output("--debug", help="Show tracebacks and all progress.")]
NoCache = Annotated[bool, _of_output("--no-cache", help="Use no cached results. 'bertscope doctor' names the folder.")]
_HelpAll = Annotated[
    bool, _of_output("--help-all", callback=_show_all_options, is_eager=True, help="Show the help with all options.")
]
# The options of all commands: `exit_codes` reads --debug, since errors may precede parsing, and `cli` --no-cache.
OF_ALL = {"color": Color, "debug": Debug, "no_cache": NoCache, "help_all": _HelpAll}
_OF_ALL_COMMANDS = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=None if name == "color" else False)
    for name, kind in OF_ALL.items()
]


class CommandGroup(TyperGroup):
    """The commands in the table. Only the modules that a called command needs are imported."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands in order."""
        return [*COMMANDS]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command, or None."""
        if cmd_name in COMMANDS and self.commands.get(cmd_name) is None:
            self.commands[cmd_name] = typer_command(COMMANDS[cmd_name])
        return self.commands.get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name; the error for another name says what to type."""
        if args[0] not in COMMANDS and not args[0].startswith("-") and not ctx.resilient_parsing:
            near = nearest(args[0], [*COMMANDS, *REMOVED], cutoff=0.7)
            if near in REMOVED:
                raise SelectionError(f"no command {args[0][:60]!r}; type 'bertscope {REMOVED[near]}'")
            known = f"did you mean {near!r}?" if near else f"known: {', '.join(sorted(COMMANDS))}"
            ctx.fail(f"no command {args[0][:60]!r}; {known}")
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete a command's name, for which no command is made."""
        self.commands = {name: TyperCommand(name, short_help=row.line) for name, row in COMMANDS.items()}
        return super().shell_complete(ctx, incomplete)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, then the options."""
        self.format_commands(ctx, formatter)
        with formatter.section("Options"):
            formatter.write_dl([record for param in self.get_params(ctx) if (record := param.get_help_record(ctx))])

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands by group, for which no command is made."""
        width = max(map(len, COMMANDS))
        for group in dict.fromkeys(row.group for row in COMMANDS.values()):
            with formatter.section(group):
                lines = [(name.ljust(width), row.line) for name, row in COMMANDS.items() if row.group == group]
                formatter.write_dl(lines)


def typer_command(command: Command) -> Any:
    """Return the Typer command, which calls the function with its name in the module `body`."""

    from bertscope.commands.options import parameters

    def function(**options: Any) -> None:
        from bertscope.commands.call import execute

        if options["color"] is not None:
            choose_color(options["color"])
        for name in (name for name in joined if options[name] is not None):
            options[name] = ",".join(options[name])
        if code := execute(command, {name: value for name, value in options.items() if name not in OF_ALL}):
            raise typer.Exit(code)

    listed = [*parameters(command), *_OF_ALL_COMMANDS]
    joined = [item.name for item in listed if "[," in str(item.annotation.__metadata__[0].metavar)]
    function.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
    function.__annotations__ = {item.name: item.annotation for item in listed}
    text, _, examples = command.text.strip().partition("\n\nexamples:\n")
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(command.name, cls=TableCommand, help=text, epilog=f"examples:\n{examples}")(function)
    return typer.main.get_command(app)


class TableCommand(TyperCommand):
    """A command in the table: what it does with its words before Typer parses them, and its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words; an error names this command."""
        if self.name == "check":
            # pre-commit passes the files of a repository, whose names anyone may choose: `-oother.bertscope.yaml` would
            # have the report overwrite another file.
            files = [word for word in args if word.startswith("-") and os.path.lexists(word)
                     and word.lower().endswith((".yaml", ".yml", ".json"))]  # fmt: skip
            args = [f"./{word}" if word in files else word for word in args]
        ctx.allow_interspersed_args = self.name != "run"  # whose words after the script are the script's
        takes_bare = any(param.name == "checkpointing" and "[," in str(param.metavar) for param in self.params)
        try:
            return self._with_bare(ctx, args) if takes_bare else super().parse_args(ctx, args)
        except Exception as error:
            if getattr(error, "ctx", ctx) is None:  # Typer's error for an option without its value
                error.ctx = ctx  # type: ignore[attr-defined]
            raise

    def _with_bare(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse a command line whose `--checkpointing` may have no value, which means none and full."""
        from bertscope.settings import checkpointing

        changed, unclear = list(args), []  # a model or an unknown strategy
        for index, (word, following) in enumerate(zip(args, [*args, ""][1:], strict=True)):
            if word == "--checkpointing" and not checkpointing.are_strategies(following):
                changed[index] = f"{word}={checkpointing.COMPARED}"
                unclear += [following] if following and not following.startswith("-") else []
        ctx.allow_extra_args = True  # such as an unknown strategy; Typer's message would not list the strategies
        rest = super().parse_args(ctx, changed)
        if unclear and ctx.params.get("others") and not ctx.resilient_parsing:
            near = near_word(unclear[0], [checkpointing.FULL])
            hint = f"did you mean {near!r}?" if near else "name several models before it"
            raise SelectionError(f"--checkpointing takes {checkpointing.STRATEGIES}; got {unclear[0][:40]!r}; {hint}")
        if rest and not ctx.resilient_parsing:
            raise SelectionError(
                f"unexpected word {rest[0][:40]!r}; {self.name} takes one MODEL, a list has commas (--seq 128,512), "
                f"and --checkpointing takes {checkpointing.STRATEGIES}"
            )
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the usage, the text, the examples and the options; without --help-all at most 25 option lines."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        self.format_epilog(ctx, formatter)
        shown = self._options(ctx, HEADINGS, has_details=_ALL in ctx.meta)
        if _ALL not in ctx.meta and len(shown.splitlines()) > _MOST_LINES:
            shown = self._options(ctx, [*HEADINGS][:3])
            number = sum(not is_argument(param) for param in self.get_params(ctx))
            shown += f"\nAll {number} options: {ctx.command_path} --help-all\n"
        formatter.write(f"\n{shown}")

    def _options(self, ctx: Any, sections: Iterable[str], *, has_details: bool = False) -> str:
        formatter = ctx.make_formatter()
        records: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            section = getattr(param, "rich_help_panel", None) or ("output" if param.name == "help" else "options")
            if record := param.get_help_record(ctx):
                records.setdefault("arguments" if is_argument(param) else section, []).append(
                    (re.sub(r"--(\S+) / --no-\1", r"--[no-]\1", record[0]), _help_text(record[1], has_details))
                )
        for section in filter(records.get, sections):
            with formatter.section(HEADINGS[section]):
                formatter.write_dl(records[section])
        return str(formatter.getvalue())

    def get_help(self, ctx: Any) -> str:
        """Return the help, in which no name is broken at its hyphens."""
        return super().get_help(ctx).replace(_HYPHEN, "-")

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples; wide ones take several shell lines."""
        lines = (command_lines(line, formatter.width - 2) for line in (self.epilog or "").split("\n"))
        formatter.write("\n" + indent("\n".join(lines), "  ") + "\n")


def is_argument(param: Any) -> bool:
    """Return True for an argument, which has no option."""
    return bool(param.param_type_name == "argument")


def _help_text(text: str, has_details: bool) -> str:
    """Return an option's help without Typer's ranges: its first sentence and default, or everything."""
    text = re.sub(r"; x>=[0-9]+|x>=[0-9]+; |  \[x>=[0-9]+\]", "", text).replace("  [", " [")
    first, end, rest = text.partition(". ")
    default = re.search(r"\[default: [^]]*\]$", rest)
    shown = text if has_details or not end else f"{first}. {default[0]}" if default else f"{first}."
    return re.sub(r"(?<=\w)-(?=\w)", _HYPHEN, shown)
