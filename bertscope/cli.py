"""The command line: the Typer app, and how an error becomes one line and an exit code."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import warnings
from typing import Annotated, NoReturn

import typer

from bertscope import __version__
from bertscope.commands import (
    check,
    count,
    diagram,
    diff,
    estimate,
    explain,
    explore,
    fit,
    flops,
    presets,
    print_model,
    profile,
    tree,
)
from bertscope.commands.running import WithBareCheckpointing
from bertscope.errors import BertscopeError, BertscopeWarning, one_line

app = typer.Typer(
    name="bertscope",
    help="Everything about a BERT before you run it: parameters, FLOPs, tree, diagrams, and expected counts checked.",
    epilog="Run 'bertscope COMMAND --help' for examples of each command.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

app.command(epilog=count.EPILOG)(count.count)
app.command(epilog=tree.EPILOG)(tree.tree)
app.command(epilog=flops.EPILOG)(flops.flops)
app.command(epilog=estimate.EPILOG, cls=WithBareCheckpointing)(estimate.estimate)
app.command(epilog=profile.EPILOG, cls=WithBareCheckpointing)(profile.profile)
app.command(epilog=fit.EPILOG)(fit.fit)
app.command(epilog=explain.EPILOG)(explain.explain)
app.command(epilog=explore.EPILOG)(explore.explore)
app.command(epilog=diagram.EPILOG)(diagram.diagram)
app.command(epilog=diff.EPILOG)(diff.diff)
app.command(name="print", epilog=print_model.EPILOG)(print_model.print_model)
app.command(epilog=presets.EPILOG)(presets.presets)
app.command(epilog=check.EPILOG)(check.check)


def _show_version(value: bool) -> None:
    if value:
        print(f"bertscope {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of bertscope itself."""


def main() -> None:
    """Run the command line; every expected error is one line on stderr."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell (`>&-`)
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        stream = getattr(sys, name)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a pipe in the C locale has no '│'
    warnings.showwarning = _show_warning
    gc.disable()  # a short process over the million objects of torch: collecting them only costs time
    _leave(_run())


def _leave(code: int) -> NoReturn:
    """Exit without taking apart the million objects of torch one by one, which costs 0.1 s or more."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader may have gone, and has been told of it
            stream.flush()
    os._exit(code)


def _show_warning(message: Warning | str, category: type[Warning], *place: object, **options: object) -> None:
    """Our own warnings are notes for the person; what torch says of itself is kept as it is."""
    print(f"note: {one_line(str(message))}" if issubclass(category, BertscopeWarning) else message, file=sys.stderr)


def _run() -> int:
    try:
        return app(prog_name="bertscope", standalone_mode=False) or 0
    except BertscopeError as error:
        return _complain(str(error), error.exit_code)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        # Typer's own usage errors; their class lives in a private module, their two attributes do not.
        if not hasattr(error, "format_message") or not hasattr(error, "exit_code"):
            raise
        return _usage(error)


def _usage(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message(), file=sys.stderr)  # type: ignore[attr-defined]
        return 2
    command = context.command_path if context is not None else "bertscope"
    message = " ".join(error.format_message().split()).rstrip(".")  # type: ignore[attr-defined]
    return _complain(f"{message}; see '{command} --help'", error.exit_code)  # type: ignore[attr-defined]


def _complain(message: str, code: int) -> int:
    print(f"error: {one_line(message, limit=2000)}", file=sys.stderr)
    return code
