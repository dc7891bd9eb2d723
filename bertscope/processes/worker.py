"""The supervisor of a child process: messages in both directions, a deadline, and its end in words."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from bertscope.errors import BertscopeError, SelectionError, WorkerError, one_line
from bertscope.processes.child import ERROR, Child, ForkedChild

ENDED, GARBLED = "no more messages", "garbled"  # kinds of messages that the supervisor makes itself
_MAX_MESSAGE_BYTES = 2**27  # a step of 100,000 events needs 20 MiB
_ERROR_START = f'["{ERROR}", '.encode()
_LAST_LINES = 21
_DRAIN_SECONDS = 0.5
Message = tuple[str, Any]  # its kind and its content
Inbox = queue.Queue[tuple["Worker", str, Any]]


def read_error(line: bytes) -> BertscopeError | None:
    """Return the error whose message (`child.error_message`) the line is; None for another line."""
    if not line.startswith(_ERROR_START):
        return None
    text, where, exit_code = json.loads(line)[1]
    kind = WorkerError if exit_code == WorkerError.exit_code else SelectionError
    return kind(str(text), where=str(where))


class Worker:
    """A child process that sends messages, one a line; `read` makes a message of a line, and raises for other lines.

    A BertscopeError that ends the process is a message of the kind ERROR, whose content is the error.

    Several workers may share an inbox. The last message is of the kind ENDED, also of a process that is killed. What
    the process prints goes to `echo` as well, if there is one.
    """

    def __init__(
        self, process: Child | ForkedChild, read: Callable[[bytes], Message], inbox: Inbox | None = None,
        echo: TextIO | None = None,
    ):  # fmt: skip
        self.process, self.read, self.echo = process, read, echo
        self.inbox: Inbox = queue.Queue() if inbox is None else inbox
        self.last_lines: deque[bytes] = deque(maxlen=_LAST_LINES)
        self.is_stopped = False
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._receive, self._collect)]
        for thread in self._threads:
            thread.start()

    def send(self, line: Any) -> None:
        """Send a line: a text, or data as JSON. That the process has ended is told by the next message."""
        text = line if isinstance(line, str) else json.dumps(line)
        with suppress(OSError, ValueError):
            self.process.stdin.write(text.encode() + b"\n")  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]

    def receive(self, timeout_seconds: float) -> Message | None:
        """Return the next message; None if there is none in time."""
        try:
            worker, kind, content = self.inbox.get(timeout=timeout_seconds)
        except queue.Empty:
            return None
        if kind == ENDED:
            self.inbox.put((worker, kind, content))  # the next question gets this answer too, at once
        return kind, content

    def _receive(self) -> None:
        """Put each message into the inbox, and ENDED after the last; a dying process may leave half a line."""
        with suppress(OSError, ValueError):
            while line := self.process.stdout.readline(_MAX_MESSAGE_BYTES):  # type: ignore[union-attr]
                if line.endswith(b"\n") or len(line) == _MAX_MESSAGE_BYTES:
                    self.inbox.put((self, *self._message(line)))
        self.inbox.put((self, ENDED, None))

    def _message(self, line: bytes) -> Message:
        try:
            error = read_error(line)
            return self.read(line) if error is None else (ERROR, error)
        except (ValueError, KeyError, TypeError, RecursionError, BertscopeError):
            shown = one_line(line[:100].decode(errors="replace").strip(), limit=80)
            return GARBLED, f"printed {shown!r} where its parent expected a message"

    def _collect(self) -> None:
        with suppress(OSError, ValueError):
            while line := self.process.stderr.readline(2**16):  # type: ignore[union-attr]
                self.last_lines.append(line)
                if self.echo is not None:
                    self.echo.write(line.decode(errors="replace"))
                    self.echo.flush()

    def stop(self, wait_seconds: float = 0.5) -> None:
        """Close the input of the process, wait briefly for its end, kill its process group, and close its streams."""
        if self.is_stopped:
            return
        self.is_stopped = True
        with suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        if self.process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(wait_seconds)
        self.process.kill_group()
        self.process.wait()
        for thread in self._threads:  # a process that outlives the child may still hold the other end
            thread.join(_DRAIN_SECONDS)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def death(self, wait_seconds: float = 0.5) -> str:
        """Stop the process, and return how it ended, with the last line of its standard error."""
        self.stop(wait_seconds)
        code = self.process.returncode or 0
        words = b"".join(self.last_lines).decode(errors="replace").strip().splitlines()
        end = end_text(code)
        return f"{end}: {one_line(words[-1], limit=200)}" if words and code >= 0 else end


def end_text(exit_code: int) -> str:
    """Return how a process ended, from its exit code, which is negative for a signal."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
