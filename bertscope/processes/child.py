"""Child processes that import nothing from the working directory, forks of one, and the supervisor of a child."""

from __future__ import annotations

import ctypes
import json
import math
import os
import pkgutil
import queue
import select
import signal
import site
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TextIO

import bertscope
from bertscope.errors import BertscopeError, SelectionError, WorkerError, one_line, told
from bertscope.processes import signals
from bertscope.processes.folders import compile_environment

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# `-I` leaves the working directory, PYTHONPATH and the user's site-packages out of sys.path. The bootstrap adds the
# last two, and imports this package from the parent's folder.
_BOOTSTRAP = """
import json, site, sys
from importlib.util import module_from_spec, spec_from_file_location
entry, package, user_site, paths = json.loads(sys.argv.pop(1))
sys.path[:] = paths + [path for path in sys.path if path not in paths]
if user_site:
    site.addsitedir(user_site)
spec = spec_from_file_location("bertscope", package)
sys.modules["bertscope"] = module_from_spec(spec)
spec.loader.exec_module(sys.modules["bertscope"])
from bertscope.processes.child import run_entry
run_entry(entry)
"""
ERROR = "error"  # the kind of the message that a BertscopeError is


def child_command(entry: str) -> list[str]:
    """Return the arguments that start a Python process which calls `entry`, a `module:function`.

    The child sees the packages that this process sees: PYTHONPATH, editable installs, the user's site-packages.
    It imports from the working directory only if PYTHONPATH or an installed package names that directory.
    """
    user_site = site.USER_SITE if site.ENABLE_USER_SITE else None
    settings = json.dumps([entry, bertscope.__file__, user_site, _paths()])
    flags = ["-I", "-B"] if sys.dont_write_bytecode else ["-I"]
    return [sys.executable, *flags, "-c", _BOOTSTRAP, settings]


def _paths() -> list[str]:
    """Return the absolute paths of sys.path without the working directory, which `python -m` adds."""
    absolute = [path for path in sys.path if os.path.isabs(path)]
    try:
        here = os.path.realpath(os.getcwd())
    except FileNotFoundError:  # the working directory was deleted
        return absolute
    environment = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    if here in (os.path.realpath(path) for path in environment.split(os.pathsep) if path):
        return absolute
    return [path for path in absolute if os.path.realpath(path) != here]


class Child(subprocess.Popen[bytes]):
    """A new process that calls `entry`, with pipes, and the leader of its process group."""

    def __init__(self, entry: str) -> None:
        super().__init__(
            child_command(entry),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # only the parent receives Ctrl-C
            env=os.environ | compile_environment(),
        )
        signals.children.add(self)

    def kill_group(self) -> None:
        """Kill the process and those that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class ForkServer:
    """A process that imports the modules of `imports`, and forks children which call `entry`; see `can_fork`.

    A fork saves its child the imports, which are 2 s of CPU time for torch. Nothing runs in the server, so that it has
    no threads. It ends with this process, and its children end with it.
    """

    def __init__(self, imports: str, entry: str) -> None:
        self.socket, theirs = socket.socketpair()
        names = f"{imports} {entry} {theirs.fileno()} {os.getpid()}"
        self.process = subprocess.Popen(  # noqa: S603 words of this program
            child_command("bertscope.processes.child:serve"), stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
            env=os.environ | compile_environment(),
        )  # fmt: skip
        with suppress(OSError):
            self.process.stdin.write(names.encode() + b"\n")  # type: ignore[union-attr]
            self.process.stdin.close()  # type: ignore[union-attr]
        theirs.close()

    def close(self) -> None:
        """End the server."""
        self.socket.close()
        self.process.kill()
        self.process.wait()


class ForkedChild:
    """A child of a server, with what is used of `Child`; it runs as soon as the server has imported its modules."""

    def __init__(self, server: ForkServer) -> None:
        (stdin, to_stdin), *outputs = (os.pipe() for _ in range(4))
        theirs = [stdin, *(writer for _, writer in outputs)]
        with suppress(OSError):  # the server has ended, and so has the child
            socket.send_fds(server.socket, [b"."], theirs)
        for descriptor in theirs:
            os.close(descriptor)
        self.stdin = os.fdopen(to_stdin, "wb", 0)
        # Only the status is unbuffered, for `select`: a line of an unbuffered stream is read byte by byte.
        self.stdout, self.stderr, self._status = (
            os.fdopen(reader, "rb", buffering) for (reader, _), buffering in zip(outputs, (-1, -1, 0), strict=True)
        )
        self._server = server
        self.returncode: int | None = None
        signals.children.add(self)

    @cached_property
    def pid(self) -> int:
        """The process id, which is known when the server has imported its modules; 0 if it has ended before."""
        return self._number() or 0

    def poll(self) -> int | None:
        """Return the exit code if `wait` has found it."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative for a signal; raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            is_born = "pid" in vars(self) or self._is_said(timeout)
            if not is_born or (self.pid and not self._is_said(timeout)):
                raise subprocess.TimeoutExpired("a child", timeout or 0.0)
            status = self._number()
            self.returncode = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
            self._status.close()
        return self.returncode

    def kill_group(self) -> None:
        """Kill the process and those that it started; the server, if it has not forked the process yet."""
        if self.returncode is not None:
            return
        if "pid" not in vars(self) and not self._is_said(0.0):
            self._server.process.kill()
        elif self.pid:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)  # it may not lead its group yet
                os.killpg(self.pid, signal.SIGKILL)

    def _is_said(self, timeout: float | None) -> bool:
        return bool(select.select([self._status], [], [], timeout)[0])

    def _number(self) -> int | None:
        sent = self._status.read(4)
        return int(struct.unpack("i", sent)[0]) if sent else None


@contextmanager
def starting(imports: str, entry: str, *, forks: bool = True) -> Iterator[Callable[[], Child | ForkedChild]]:
    """Yield a function that starts a process which calls `entry`: if possible a fork of one that has imported."""
    if not (forks and can_fork()):
        yield partial(Child, entry)
        return
    servers = [ForkServer(imports, entry)]

    def start() -> ForkedChild:
        if servers[-1].process.poll() is not None:
            servers.append(ForkServer(imports, entry))
        return ForkedChild(servers[-1])

    try:
        yield start
    finally:
        for server in servers:
            server.close()


def can_fork() -> bool:
    """Return True if a process that has imported torch can be forked: libraries of macOS forbid it."""
    return sys.platform == "linux"


def die_with_parent(parent: int | None = None) -> None:
    """Have the system kill this process when its parent dies; end it if the parent, whose id this is, has died."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def output_for_parent() -> BinaryIO:
    """Return the standard output of this child; what libraries and models print from now on goes to standard error."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return out


def sender() -> Callable[[str, Any], None]:
    """Return the function that sends a message to the parent by `output_for_parent`: its kind and content as JSON."""
    out = output_for_parent()

    def send(kind: str, content: Any) -> None:
        out.write(json.dumps([kind, content], default=vars).encode() + b"\n")
        out.flush()

    return send


def error_message(error: BertscopeError) -> tuple[str, Any]:
    """Return the message by which the parent of this process raises the error too."""
    return ERROR, [error.message.marked, error.where, error.exit_code]


def run_entry(entry: str, failure: BertscopeError | None = None) -> None:
    """Be a child: call `entry`; an error from it, or from the imports before it, that one line tells is a message."""
    out = os.dup(sys.stdout.fileno())  # `output_for_parent` changes standard output
    try:
        if failure is not None:
            raise failure
        pkgutil.resolve_name(entry)()
    except Exception as error:
        if (known := told(error)) is None:
            raise
        with suppress(OSError):
            os.write(out, json.dumps(error_message(known)).encode() + b"\n")
        sys.exit(known.exit_code)


def serve() -> None:
    """Be the server: import, and fork a child for each request until the parent closes its socket."""
    imports, entry, number, parent = sys.stdin.readline().split()
    die_with_parent(int(parent))
    failure = None
    try:
        pkgutil.resolve_name(imports)()
    except Exception as error:
        if (failure := told(error)) is None:
            raise
    requests = socket.socket(fileno=int(number))
    server = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system removes the watchers that have ended
    while True:
        try:
            request, files, _, _ = socket.recv_fds(requests, 1, 4)
        except OSError:
            return
        if not request:
            return
        if not os.fork():
            requests.close()
            _watch(partial(run_entry, entry, failure), files, server)
        for descriptor in files:
            os.close(descriptor)


def _watch(run: Callable[[], None], files: list[int], server: int) -> None:
    """Fork the child, write its process id, wait for its end, and write its exit status: several children may live."""
    die_with_parent(server)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    watcher = os.getpid()
    pid = os.fork()
    if not pid:
        die_with_parent(watcher)
        _be_child(run, files)
    with suppress(OSError):  # the parent has closed its end
        os.write(files[3], struct.pack("i", pid))
    for descriptor in files[:3]:
        os.close(descriptor)
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):  # end what the child has left, which is this process's now, until nothing is left
        while True:
            for left in Path(f"/proc/self/task/{watcher}/children").read_text().split():
                os.kill(int(left), signal.SIGKILL)
            os.waitpid(-1, 0)
    with suppress(OSError):
        os.write(files[3], struct.pack("i", status))
    os._exit(0)


def _be_child(run: Callable[[], None], files: list[int]) -> NoReturn:
    """Run a function and end this fork: with 0, the code of an exit, or 1 after another error's traceback."""
    code = 1
    try:
        os.setsid()
        os.close(files[3])
        for number, descriptor in enumerate(files[:3]):
            os.dup2(descriptor, number)
            os.close(descriptor)
        sys.stdin = os.fdopen(0, "r")
        run()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


ENDED, GARBLED = "no more messages", "garbled"  # kinds of messages that the supervisor makes itself
_MAX_MESSAGE_BYTES = 2**27  # a step of 100,000 events needs 20 MiB
_ERROR_START = f'["{ERROR}", '.encode()
_LAST_LINES = 200  # with the stack of each thread
_DRAIN_SECONDS = 0.5
Message = tuple[str, Any]  # its kind and its content
Inbox = queue.Queue[tuple["Worker", str, Any]]


# ---- the supervisor: messages in both directions, a deadline, and the end in words ----


class Worker:
    """A child process that sends messages, one a line; `read` makes a message of a line, and raises for other lines.

    A BertscopeError that ends the process is a message of the kind ERROR, whose content is the error.

    Several workers may share an inbox. The last message is of the kind ENDED, also of a process that is killed. What
    the process prints goes to `echo` as well, if there is one.
    """

    def __init__(
        self,
        process: Child | ForkedChild,
        read: Callable[[bytes], Message],
        inbox: Inbox | None = None,
        echo: TextIO | None = None,
    ):
        self.process, self.read, self.echo = process, read, echo
        self.inbox: Inbox = queue.Queue() if inbox is None else inbox
        self.last_lines: deque[bytes] = deque(maxlen=_LAST_LINES)
        self.is_stopped = False
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._receive, self._collect)]
        for thread in self._threads:
            thread.start()

    def send(self, line: Any) -> None:
        """Send a line: a text, or data as JSON. The next message says that the process has ended."""
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
            if not line.startswith(_ERROR_START):
                return self.read(line)
            text, where, exit_code = json.loads(line)[1]  # of `error_message`
            kind = WorkerError if exit_code == WorkerError.exit_code else SelectionError
            return ERROR, kind(str(text), where=str(where))
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
        """Close the process's input, wait briefly for its end, kill its process group, and close its streams."""
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
        # A process that outlives the child may still hold the other end; to close a stream waits for its reader.
        for thread, stream in zip(self._threads, (self.process.stdout, self.process.stderr), strict=True):
            thread.join(_DRAIN_SECONDS)
            if stream is not None and not thread.is_alive():
                with suppress(OSError):
                    stream.close()

    def death(self, wait_seconds: float = 5.0) -> str:
        """Return how the process ended, with the last line of its standard error; it may end slowly under load."""
        self.stop(wait_seconds)
        code = self.process.returncode or 0
        lines = b"".join(self.last_lines).decode(errors="replace").strip().splitlines()
        end = end_text(code)
        return f"{end}: {one_line(lines[-1], limit=200)}" if lines and "killed" not in end else end


MEMORY_BYTES = 5 << 29  # of a child that reads a file with a parser that others wrote, or that unpickles


def limit_child(cpu_seconds: int = 0) -> None:
    """Limit this child to MEMORY_BYTES and, if they are not 0, to seconds of CPU time; it dies with its parent."""
    die_with_parent(os.getppid())
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # no file of a child that is killed
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        if cpu_seconds:
            resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))


def ask(
    entry: str, question: Any, waiting: Callable[[], None], wait_seconds: float = math.inf
) -> tuple[str, Any, int | None]:
    """Return a child's answer: its kind and content, ENDED and how it ended, or an empty kind; and its exit code.

    Raises the child's BertscopeError. `waiting` is called twice a second.
    """
    worker = Worker(Child(entry), lambda line: tuple(json.loads(line)))
    deadline, message = time.monotonic() + wait_seconds, None
    try:
        worker.send(question)
        while message is None and time.monotonic() < deadline:
            waiting()
            message = worker.receive(0.5)
        kind, content = message or ("", None)
        if kind == ERROR and isinstance(content, BertscopeError):
            raise content
        return kind, worker.death() if kind == ENDED else content, worker.process.returncode
    finally:
        worker.stop(0.0)


def end_text(exit_code: int) -> str:
    """Return how a process ended, from its exit code: negative for a signal, or above 128 as a shell has it."""
    if 128 < exit_code <= 128 + max(signal.Signals):
        exit_code = 128 - exit_code
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
