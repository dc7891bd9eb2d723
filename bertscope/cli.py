"""The command line: the Typer app, and the conversion of an error to one line and an exit code."""

import gc
import os
import re
import sys
import warnings
from functools import partial
from typing import Annotated, Any, Literal

import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]

from bertscope import __version__
from bertscope.commands.exit_codes import EXIT_CODES, CompileFolder, complain, failure, form_of_option
from bertscope.commands.registry import Color, CommandGroup, Debug, NoCache
from bertscope.errors import BertscopeWarning, SelectionError, in_a_sentence, naming, nearest, one_line
from bertscope.settings.rows import near_word, rows
from bertscope.settings.run_config import CACHE_VARIABLE, SWEPT
from bertscope.views.console import choose_color, program_folders

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
_INSTRUCTION = re.compile("((complete|source)_(bash|zsh|fish|powershell|pwsh))?")
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
    sys.meta_path.insert(0, CompileFolder())
    os.environ["PATH"] = program_folders()  # for git, nvidia-smi and compilers, and for child processes
    if "--download" not in sys.argv:  # no library uses the network
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.showwarning = partial(_show_warning, set())
    gc.disable()  # the process is short: scanning the million objects of torch takes time and frees little
    return _run()


def _show_warning(
    shown: set[str], message: Warning | str, category: type[Warning], *position: object, **options: object
) -> None:
    """Print a warning once, of bertscope as a note and any other unchanged."""
    text = f"note: {one_line(message.args[0])}" if isinstance(message, BertscopeWarning) else str(message)
    if text not in shown:
        shown.add(text)
        print(text, file=sys.stderr)


def _run() -> int:
    """Return the exit code of the command line; every error is one line on stderr."""
    try:
        try:
            if "--no-cache" in sys.argv:
                os.environ[CACHE_VARIABLE] = ""  # for child processes too
            if not _INSTRUCTION.fullmatch(os.environ.get(_COMPLETE, "")):
                raise ValueError(_COMPLETE)
            with naming(form_of_option):
                code = app(prog_name="bertscope", standalone_mode=False) or 0
        except SystemExit as end:  # of Typer, after shell completion: `with_bundles` reports those of commands
            code = int(end.code or 0)
        except (KeyError, ValueError) as error:
            if not os.environ.get(_COMPLETE):
                raise
            text = f"{_COMPLETE} is set, but not as the script of --show-completion sets it; unset it"
            raise SelectionError(text) from error
        sys.stdout.flush()
    except BaseException as error:
        # Typer's usage errors: the class is private, these two attributes are public.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            return _usage(error)
        return failure((isinstance(error, typer.Abort) and error.__cause__) or error)  # Abort: Typer's EOFError
    return code


def _usage(error: Any) -> int:
    message = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")  # of pydantic
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message(), file=sys.stderr)
        return 2
    ctx = getattr(error, "ctx", None)
    if type(error).__name__ == "NoSuchOption" and ctx is not None:
        return complain(_no_option(error.option_name, ctx), error.exit_code)
    if wrong := re.search(r"'(--?[^']*)'.*: '(.*)' is not one of ('.*')", message):
        known = re.findall(r"'([^']*)'", wrong[3])
        near = near_word(wrong[2], known)
        takes = f"takes one of {', '.join(known)}; got {wrong[2]!r}"
        message = f"{wrong[1]} {f'has no value {wrong[2]!r}; did you mean {near!r}?' if near else takes}"
    elif wrong := re.search(r"'(--?[^']*)'.*: '?(.*?)'? is not (?:in the range x>=([0-9]+)|a valid int)", message):
        low = f" of at least {wrong[3]}" if wrong[3] else ""
        dashes = f"; write {wrong[1]} with two dashes" * (wrong[1] == f"--{wrong[1][2]}{wrong[2]}")
        message = f"{wrong[1]} takes a whole number{low}; got {wrong[2]}{dashes}"
    elif wrong := re.search(r"'(--?[^']*)' requires an argument", message):
        texts = [_first(row.help) for row in (ctx.command.params if ctx else ()) if wrong[1] in row.opts]
        message = f"{wrong[1]} needs a value: {in_a_sentence(texts[0] if texts else 'write it after the option')}"
    elif wrong := re.search(r"'(--?[^']*)' does not take a value", message):
        message = f"{wrong[1]} takes no value; write {wrong[1]} alone"
    elif wrong := re.search(r"unexpected extra arguments?(?:\(s\))? \((.*)\)", message):
        quoted = "put a message in quotes, or " * (ctx is not None and ctx.info_name == "why")
        message = f"unexpected word {wrong[1]!r}; {quoted}write {_usage_line(ctx)}"
    elif missing := [item for item in ctx.command.params if f"'{item.metavar}'" in message] if ctx else []:
        message = f"{missing[0].metavar} is missing; give {in_a_sentence(_first(missing[0].help))}"
    else:
        stop, command = "" if message.endswith("?") else ";", ctx.command_path if ctx else "bertscope"
        message = f"{message}{stop} see '{command} --help'"
    return complain(message, error.exit_code)


def _first(text: str) -> str:
    return text.partition(". ")[0].rstrip(".")


def _usage_line(ctx: Any) -> str:
    arguments = [piece.strip("{}") for piece in ctx.command.collect_usage_pieces(ctx)[1:]]
    return " ".join([ctx.command_path, *arguments])


def _no_option(option: str, ctx: Any) -> str:
    """Return the message about an option that a command lacks, with its name here or the commands that have it."""
    from bertscope.commands.options import commands_with
    from bertscope.settings.request import new_name

    word, name = option.strip("-").replace("-", "_"), ctx.command_path.partition(" ")[2]
    word = "model" if re.fullmatch("(hf_|pretrained_)?model(_(name|name_or_path|id|path))?|pretrained", word) else word
    params = ctx.command.params
    negated = ("dropout", "sandbox")
    forms = {row.name: f"--no-{row.name}" if row.name in negated else max(row.opts, key=len) for row in params}
    forms |= {form.lstrip("-").replace("-", "_"): form for form in forms.values()}
    lacks = f"{name or 'bertscope'} has no option {option}"
    if new := new_name(word, forms, forms.__getitem__):
        return f"{lacks}; {new}"
    if word in forms and not forms[word].startswith("-"):
        return f"{lacks}; write {word.upper()} without it: {_usage_line(ctx)}"
    new = new_name(word, form=form_of_option).removeprefix("use ") or option
    if name == "sweep" and (key := new[2:].replace("-", "_")) in rows(*SWEPT):
        return f"{lacks}; write a line such as '{key}: [...]' in the GRID that --init writes"
    having = commands_with(new.split()[0]) if name else []
    if having:
        return f"{lacks}; {new} is an option of {', '.join(having)}"
    forms_of_all = (form for row in params for form in row.opts)
    near = nearest(option.strip("-"), [form[2:] for form in forms_of_all if form.startswith("--")], cutoff=0.7)
    lists = f"{ctx.command_path} --help-all lists the options"
    lists = lists if name else "write an option of a command after the command"
    return f"{lacks}; {f'did you mean --{near}?' if near else lists}"
