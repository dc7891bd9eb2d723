"""The command line: the Typer app, and the conversion of an error to one line and an exit code."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import warnings
from contextlib import suppress
from typing import Annotated

import typer

from bertscope import __version__
from bertscope.commands import (
    check,
    convert,
    count,
    diagram,
    diff,
    doctor,
    estimate,
    explain,
    explore,
    fit,
    flops,
    presets,
    print_model,
    profile,
    report,
    schema,
    tree,
    verify,
)  # fmt: skip
from bertscope.commands.options import Color, Debug, with_shared_options
from bertscope.commands.process import EXIT_CODES, Unexpected, complain, failure, run
from bertscope.commands.running import WithBareCheckpointing
from bertscope.errors import BertscopeWarning, one_line
from bertscope.render.console import choose_color

_CODES = ", ".join(f"{code} {text.partition(' (')[0]}" for code, text in EXIT_CODES.items())
app = typer.Typer(
    name="bertscope",
    help="Everything about a BERT before you run it: parameters, FLOPs, memory, diagrams, and what you expect.",
    epilog=f"Run 'bertscope COMMAND --help' for examples of each command. Exit codes: {_CODES}.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

app.command(epilog=count.EPILOG, short_help="Count the parameters, layer by layer, or what a checkpoint stores.")(
    count.count
)
app.command(epilog=tree.EPILOG)(tree.tree)
app.command(epilog=flops.EPILOG, short_help="Count the FLOPs of a forward pass or a training step.")(flops.flops)
app.command(
    epilog=estimate.EPILOG,
    cls=WithBareCheckpointing,
    short_help="Estimate a step's memory: its peak, its parts, where it stands.",
)(estimate.estimate)
app.command(
    epilog=profile.EPILOG, cls=WithBareCheckpointing, short_help="Run the real step; measure its memory and time."
)(profile.profile)
app.command(epilog=fit.EPILOG, short_help="Find the largest batch that a memory budget holds.")(fit.fit)
app.command(epilog=report.EPILOG, short_help="Write everything about a model on one page.")(report.report)
app.command(epilog=explain.EPILOG, short_help="Walk through a model step by step, every number a formula.")(
    explain.explain
)
app.command(epilog=explore.EPILOG, short_help="Walk through the module tree in the terminal.")(explore.explore)
app.command(epilog=diagram.EPILOG, short_help="Draw its classes, the dataflow of a forward pass, or its tree.")(
    diagram.diagram
)
app.command(epilog=diff.EPILOG, short_help="Compare two models: settings, parameters, totals, FLOPs.")(diff.diff)
app.command(name="print", epilog=print_model.EPILOG)(print_model.print_model)
app.command(epilog=presets.EPILOG)(presets.presets)
app.command(
    epilog=check.EPILOG, cls=check.WithFilesLikeOptions, short_help="Verify what files expect of their models."
)(check.check)
app.command(epilog=verify.EPILOG, short_help="Hold a model against a checkpoint's header.")(verify.verify)
app.command(epilog=convert.EPILOG, short_help="Turn a preset into a config.json, or the other way round.")(
    convert.convert
)
app.command(epilog=schema.EPILOG, short_help="Print the JSON Schema of what --format json writes.")(schema.schema)
app.command(epilog=doctor.EPILOG, short_help="Say what it runs on: versions, devices, extras, presets.")(doctor.doctor)


def _show_version(value: bool) -> None:
    if value:
        print(f"bertscope {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    color: Color = None,
    debug: Debug = False,
) -> None:
    """Set the options of bertscope itself."""
    choose_color(color or "auto")


for _command in app.registered_commands:
    _command.callback = with_shared_options(_command.callback)  # type: ignore[arg-type]


def main() -> None:
    """Run the command line and exit with its code."""
    run(start)


def start() -> int:
    """Set what the libraries read, run the command line, and return its exit code."""
    if "--download" not in sys.argv:  # no library fetches anything
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with suppress(OSError):  # no folder for temporary files
        # torch makes a folder for a cache that bertscope does not use; with an existing folder it makes none.
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
    warnings.showwarning = _show_warning
    gc.disable()  # the process is short: visiting the million objects of torch takes time and frees little
    return _run()


def _show_warning(message: Warning | str, category: type[Warning], *place: object, **options: object) -> None:
    """Print a warning of bertscope as a note, and any other warning unchanged."""
    print(f"note: {one_line(str(message))}" if issubclass(category, BertscopeWarning) else message, file=sys.stderr)


def _run() -> int:
    """Return the exit code of the command line; every error is one line on stderr."""
    try:
        code = app(prog_name="bertscope", standalone_mode=False) or 0
        sys.stdout.flush()
    except BaseException as error:
        # Typer's usage errors: their class is private, their two attributes are public.
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            return _usage(error)
        carried = (
            isinstance(error, (Unexpected, typer.Abort)) and error.__cause__
        )  # Abort: Typer's name for an EOFError
        return failure(carried or error)
    return code


def _usage(error: BaseException) -> int:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        print(error.format_message(), file=sys.stderr)  # type: ignore[attr-defined]
        return 2
    command = context.command_path if context is not None else "bertscope"
    message = " ".join(error.format_message().split()).rstrip(".")  # type: ignore[attr-defined]
    return complain(f"{message}; see '{command} --help'", error.exit_code)  # type: ignore[attr-defined]
