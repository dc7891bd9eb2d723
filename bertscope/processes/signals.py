"""Signals that end the process, with the exit code that a shell reports for them. Standard library only."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any
from weakref import WeakSet

received: list[int] = []  # signals; a library may replace or drop the exception of one
children: WeakSet[Any] = WeakSet()  # processes with the method `poll`
cleanups: list[Callable[[], None]] = []  # what a process that ends at once does before
_holds: list[None] = []  # blocks of `uninterrupted` that run
_SHOW_CURSOR = b"\r\x1b[2K\x1b[?25h"  # and clear the line of a progress bar


class Leave(SystemExit):
    """An exit with a code and without a message."""


def catch() -> None:
    """Handle the signals that end a process, except those that it was started to ignore, such as SIGHUP by nohup."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = int(getattr(signal, name, 0))
        if number and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    sys.unraisablehook = _ignored


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Run a short block to its end, such as a file's writing, before the first signal has its effect."""
    before = len(received)
    _holds.append(None)
    try:
        yield
    finally:
        _holds.pop()
        if len(received) > before and not _holds:
            _end(received[0])


def end(number: int, _: FrameType | None) -> None:
    """End the run, after a block of `uninterrupted` that runs; a second signal does not wait for it."""
    received.append(number)
    if not _holds or len(received) > 1:
        _end(number)


def _end(number: int) -> None:
    """Raise the exception by which `finally` stops children and removes files, or end the process at once.

    torch calls Python from destructors and other functions that must not raise: an exception there aborts the process
    ("terminate called after throwing an instance of 'python_error'", exit code 134). So a process that has imported
    torch raises nothing, with two exceptions: while it only waits for children that run torch, and in `tree
    --interactive`, which runs no torch any more and whose event loop restores the terminal.
    """
    runs_torch = "torch" in sys.modules and "textual" not in sys.modules
    if runs_torch and all(child.poll() is not None for child in list(children)):
        with contextlib.suppress(Exception):
            sys.stderr.flush()
            if sys.stderr.isatty():
                os.write(sys.stderr.fileno(), _SHOW_CURSOR)
        for cleanup in cleanups:
            with contextlib.suppress(Exception):
                cleanup()
        os._exit(128 + number)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    signal.signal(number, signal.SIG_IGN)
    raise Leave(128 + number)


def is_debug() -> bool:
    """Return True if tracebacks are wanted: by --debug, even before it is parsed, or by BERTSCOPE_DEBUG."""
    return os.environ.get("BERTSCOPE_DEBUG", "0") not in ("", "0") or "--debug" in sys.argv[1:]


def _ignored(what: Any) -> None:
    """Send a signal again that arrived during a destructor or callback, where Python drops exceptions."""
    if is_debug():
        sys.__unraisablehook__(what)
    if received and isinstance(what.exc_value, (KeyboardInterrupt, Leave)):
        import threading

        signal.signal(received[0], end)
        threading.Timer(0.05, os.kill, (os.getpid(), received[0])).start()
