"""The process around the command line: standard streams, signals, unexpected errors and the exit code.

At module level it imports the standard library only, so that it can report any other module that fails to import.
"""

import atexit
import contextlib
import errno
import io
import os
import re
import select
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from bertscope.errors import Reason, SourceError, naming, one_line, shown, told
from bertscope.processes.folders import compile_cache
from bertscope.processes.signals import Leave, catch, is_debug, received

INTERNAL, HANGUP, INTERRUPT, READER_GONE, TERMINATED = 70, 129, 130, 141, 143
EXIT_CODES = {
    0: "fine",
    1: "the answer is no",
    2: "the input is wrong (one line on stderr says how to correct it)",
    3: "the measurement failed (out of memory, killed, too slow)",
    INTERNAL: "bertscope or its installation failed (one line names the error; --debug shows the traceback)",
    HANGUP: "the terminal was closed (SIGHUP)",
    INTERRUPT: "interrupted (Ctrl-C, SIGINT)",
    READER_GONE: "the reader of stdout has gone (SIGPIPE), as in 'bertscope ... | head'",
    TERMINATED: "terminated (SIGTERM)",
}


def run(command: Callable[[], int]) -> NoReturn:
    """Run the command and exit with its code; report any error in one line."""
    try:
        try:
            _prepare()
            code = command()
        except BaseException as error:
            code = failure(error)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
    except KeyboardInterrupt:
        code = INTERRUPT
    _leave(128 + received[0] if received else code)


def failure(error: BaseException) -> int:
    """Report an error in one line on stderr, with its traceback under --debug; return the exit code."""
    if isinstance(error, KeyboardInterrupt) or received:
        return INTERRUPT
    if isinstance(error, Leave):
        return int(error.code or 0)
    if is_debug():
        import traceback

        traceback.print_exception(type(error), error, error.__traceback__)
    if (known := told(error)) is not None:
        return complain(known.message, known.exit_code, known.where)
    text = one_line(" ".join(str(error).split()), limit=200)
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return complain(f"{text}; raise the limit (ulimit -n)", 3)
    if isinstance(error, PermissionError) and isinstance(error.filename, str):  # also of Path.is_file
        return complain(f"{one_line(error.filename, limit=200)}: {error.strerror}; check its permissions", 2)
    remedy = "run 'bertscope --debug ...' or set BERTSCOPE_DEBUG=1 for the traceback, and report it"
    if isinstance(error, ImportError):
        remedy = f"'bertscope doctor' checks the installation; {remedy}"
    name, trace = f"{type(error).__name__}{': ' if text else ''}{text}", error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next  # the last frame raised; without the installation's folders
    frame = f"{'/'.join(trace.tb_frame.f_code.co_filename.split(os.sep)[-3:])}:{trace.tb_lineno}" if trace else ""
    return complain(f"internal error: {name} ({frame or 'unknown place'}); {remedy}", INTERNAL)


def form_of_option(name: str) -> str:
    """Return a setting's option, by which command-line messages name it."""
    with contextlib.suppress(Exception):  # the package may be what is broken
        from bertscope.settings import generate

        return generate.option_form(name)
    return name


def complain(message: str, code: int, where: str = "") -> int:
    """Print an error as one line, or as JSON if --format json is asked for; return the exit code."""
    # The words of the command line may ask for JSON even if they cannot be parsed.
    formats = re.findall(r"^(?:--format[=\n]|-f\n?)(.*)$", "\n".join(sys.argv[1:]), re.MULTILINE)
    with naming(form_of_option):
        text, (what, remedy) = shown(message), Reason(message).parts()
    if formats[-1:] == ["json"]:
        print(_as_json(what, remedy, code, where), file=sys.stderr)
        return code
    line = f"error: {one_line(f'{where}: {text}' if where else text, limit=2000)}"
    with contextlib.suppress(Exception):  # the package may be what is broken
        if sys.stderr.isatty():  # which shows it in lines of its width
            from bertscope.views import console

            line = console.message(line)
    print(line, file=sys.stderr)
    return code


def _as_json(what: str, remedy: str, code: int, where: str) -> str:
    """Return an error for a program."""
    import json

    named = None if where else re.match(r"(\S+:[0-9]+): ", what)
    where, what = (named[1], what[named.end() :]) if named else (where, what)
    location = re.fullmatch(r"(.*):([0-9]+)", where)
    file, line = (location[1], int(location[2])) if location else (where or None, None)
    what, remedy = one_line(what), one_line(remedy)
    fields = {"code": code, "message": what, "file": file, "line": line, "remedy": remedy or None}
    return json.dumps({"error": fields}, ensure_ascii=False)


def _prepare() -> None:
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:  # closed by the shell (`>&-`); the next file that is opened takes the lowest number
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout, sys.stderr = _stream(sys.stdout, 1), _stream(sys.stderr, 2)
    catch()


def _stream(stream: Any, number: int) -> Any:
    """Return the stream over `_Stream`; backslashreplace is for the C locale, which cannot encode '│'."""
    if stream is None:
        return open(os.devnull, "w")
    buffer = getattr(stream, "buffer", None)
    if type(getattr(buffer, "raw", buffer)) is not io.FileIO:  # a console of Windows, or a replaced stream
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(_Stream(number, "w", closefd=False)), encoding=stream.encoding, errors="backslashreplace",
        line_buffering=stream.line_buffering, write_through=stream.write_through,
    )  # fmt: skip


class _Stream(io.FileIO):
    """A standard stream that drops all output after an error; one of standard output ends the run, of a message not."""

    failed = False

    def write(self, data: Any) -> int:
        """Write all or part; wait if the descriptor is non-blocking."""
        if self.failed:
            return len(data)
        try:
            while (written := super().write(data)) is None:
                select.select([], [self], [])
        except OSError as error:
            self.failed = True
            if self.fileno() == 2:
                return len(data)
            if isinstance(error, BrokenPipeError):
                raise Leave(READER_GONE) from None
            raise SourceError(f"standard output cannot be written: {error.strerror}; write to a file") from None
        return written


def _leave(code: int) -> NoReturn:
    """Exit without freeing torch's million objects one by one, which takes 0.1 s or more."""
    with contextlib.suppress(Exception):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


class CompileFolder:
    """A finder that finds no module: it names a folder for torch.compile before torch imports its compiler.

    The import makes the folder, by default one with a name that any user could make first.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Set the variable before the module that reads it."""
        if name == "torch._inductor.runtime.cache_dir_utils":
            os.environ.update(compile_cache())
