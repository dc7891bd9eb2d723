"""The command line: the Typer app, and the conversion of an error to one line and an exit code."""

import gc
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any, Literal

import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]

from bertscope import __version__
from bertscope.commands.exit_codes import EXIT_CODES, complain, failure, option_forms
from bertscope.commands.registry import Color, CommandGroup, Debug, NoCache
from bertscope.errors import BertscopeWarning, SelectionError, naming, one_line
from bertscope.settings.run_config import CACHE_VARIABLE
from bertscope.views.console import choose_color

_CODES = ", ".join(f"{code} {text.partition(' (')[0]}" for code, text in EXIT_CODES.items())
app = typer.Typer(
    cls=CommandGroup,
    name="bertscope",
    help="Know what a PyTorch model costs before you train it: parameters, FLOPs, peak memory, the largest batch that "
    "fits.",
    epilog=f"'bertscope COMMAND --help' shows examples and options. Exit codes: {_CODES}.",
    no_args_is_help=True,
    add_completion=False,  # Typer's --install-completion rewrites start files, and sets more in them than completion
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

_COMPLETE = "_BERTSCOPE_COMPLETE"  # the environment variable that a shell sets for Tab
completion_init()


def _show_completion(ctx: typer.Context, value: str | None) -> None:
    if value and not ctx.resilient_parsing:  # True while a shell completes a later word
        print(get_completion_script(prog_name="bertscope", complete_var=_COMPLETE, shell=value))
        raise typer.Exit


def _show_version(ctx: typer.Context, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        print(f"bertscope {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    show_completion: Annotated[
        Literal["bash", "zsh", "fish", "powershell"] | None,
        typer.Option(
            callback=_show_completion,
            is_eager=True,
            metavar="SHELL",
            help="Print the completion script of bash, zsh, fish or powershell, to append to a file such as ~/.bashrc.",
        ),
    ] = None,
    color: Color = None,
    debug: Debug = False,
    no_cache: NoCache = False,
) -> None:
    """Set the options before the command."""
    choose_color(color or "auto")


def start() -> int:
    """Set environment variables for libraries, run the command line, and return its exit code."""
    if "--download" not in sys.argv:  # no library uses the network
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.showwarning = partial(_show_warning, set())
    gc.disable()  # the process is short: scanning the million objects of torch takes time and frees little
    return _run()


def _show_warning(
    notes: set[str], message: Warning | str, category: type[Warning], *place: object, **options: object
) -> None:
    """Print a warning of bertscope as a note, once, and any other warning unchanged."""
    if not isinstance(message, BertscopeWarning):
        print(message, file=sys.stderr)
    elif (note := f"note: {one_line(message.args[0])}") not in notes:
        notes.add(note)
        print(note, file=sys.stderr)


@contextmanager
def _without_cache(is_asked: bool) -> Iterator[None]:
    """Switch the cache off, for child processes too, and restore it at the end."""
    given = os.environ.get(CACHE_VARIABLE)
    if is_asked:
        os.environ[CACHE_VARIABLE] = ""
    try:
        yield
    finally:
        if is_asked:
            os.environ.pop(CACHE_VARIABLE)
            os.environ.update({} if given is None else {CACHE_VARIABLE: given})


def _run() -> int:
    """Return the exit code of the command line; every error is one line on stderr."""
    try:
        try:
            with naming(option_forms), _without_cache("--no-cache" in sys.argv):
                code = app(prog_name="bertscope", standalone_mode=False) or 0
        except SystemExit as end:  # of Typer, after shell completion: `with_bundles` reports those of commands
            code = int(end.code or 0)
        except (KeyError, ValueError) as error:
            if not os.environ.get(_COMPLETE):
                raise
            text = f"{_COMPLETE} is set without the words that the script of --show-completion sets; unset it"
            raise SelectionError(text) from error
        sys.stdout.flush()
    except BaseException as error:
        # Typer's usage errors: the class is private, these two attributes are public.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            return _usage(error)
        return failure((isinstance(error, typer.Abort) and error.__cause__) or error)  # Abort: Typer's EOFError
    return code


def _usage(error: Any) -> int:
    remedy = _other_option(error)
    message = error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message, file=sys.stderr)
        return 2
    message = " ".join(message.replace("Value error, ", "").split()).rstrip(".")  # of pydantic
    if names := getattr(error, "possibilities", None):
        message = f"No such option: {error.option_name} (Possible options: {', '.join(sorted(names))})"
    message = f"{message}{_near_choice(message)}{remedy}"
    command = error.ctx.command_path if getattr(error, "ctx", None) else "bertscope"
    return complain(f"{message}{'' if message.endswith('?') else ';'} see '{command} --help'", error.exit_code)


def _near_choice(message: str) -> str:
    """Return a suggestion for a value that is none of the choices of an option: a near one, or torch's name of one."""
    found = re.search(r"'([^']*)' is not one of ('.*')", message)
    if found is None:
        return ""
    from bertscope.settings.rows import near_word

    near = near_word(found[1], re.findall(r"'([^']*)'", found[2]))
    return f"; did you mean {near!r}?" if near else ""


def _other_option(error: Any) -> str:
    """Return what an option is called here that this command lacks, or the commands that have it."""
    option, ctx = getattr(error, "option_name", ""), getattr(error, "ctx", None)
    if type(error).__name__ != "NoSuchOption" or ctx is None or ctx.parent is None:
        return ""
    from bertscope.commands.options import commands_with
    from bertscope.settings.generate import OPTIONS
    from bertscope.settings.request import new_name

    word, forms = option.strip("-").replace("-", "_"), {row.name: max(row.opts, key=len) for row in ctx.command.params}
    if new := new_name(word, forms, forms):
        error.possibilities = None
        return f"; {option} is {new} here"
    if (new := new_name(word, OPTIONS, OPTIONS)) and (having := commands_with(new.split()[0])):
        error.possibilities = None
        return f"; {option} is {new} of {', '.join(having)}"
    if having := commands_with(option):
        error.possibilities = None
    return f"; {option} is an option of {', '.join(having)}" if having else ""
