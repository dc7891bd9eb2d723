"""Child processes: a Python process that imports nothing from the working directory, and forks of one."""

from __future__ import annotations

import ctypes
import json
import os
import pkgutil
import select
import signal
import site
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import Any, BinaryIO, NoReturn

import bertscope
from bertscope.errors import BertscopeError
from bertscope.processes import signals
from bertscope.processes.folders import compile_environment

_PR_SET_PDEATHSIG = 1
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

    def start(self) -> ForkedChild:
        """Return a child, which runs as soon as the server has imported its modules."""
        return ForkedChild(self)

    def close(self) -> None:
        """End the server."""
        self.socket.close()
        self.process.kill()
        self.process.wait()


class ForkedChild:
    """A child of a server, with what is used of `Child`."""

    def __init__(self, server: ForkServer) -> None:
        (stdin, to_stdin), *outputs = (os.pipe() for _ in range(4))
        theirs = [stdin, *(writer for _, writer in outputs)]
        with suppress(OSError):  # the server has ended, and so has the child
            socket.send_fds(server.socket, [b"."], theirs)
        for descriptor in theirs:
            os.close(descriptor)
        self.stdin = os.fdopen(to_stdin, "wb", 0)
        self.stdout, self.stderr, self._status = (os.fdopen(reader, "rb", 0) for reader, _ in outputs)
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
        return servers[-1].start()

    try:
        yield start
    finally:
        for server in servers:
            server.close()


def can_fork() -> bool:
    """Return True if a process that has imported torch can be forked: macOS forbids it to its own libraries."""
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
    return ERROR, [error.text, error.where, error.exit_code]


def run_entry(entry: str, failure: BertscopeError | None = None) -> None:
    """Be a child: call `entry`; a BertscopeError from it, or from the imports before it, is a message to the parent."""
    out = os.dup(sys.stdout.fileno())  # `output_for_parent` changes standard output
    try:
        if failure is not None:
            raise failure
        pkgutil.resolve_name(entry)()
    except BertscopeError as error:
        with suppress(OSError):
            os.write(out, json.dumps(error_message(error)).encode() + b"\n")
        sys.exit(error.exit_code)


def serve() -> None:
    """Be the server: import, and fork a child for each request until the parent closes its socket."""
    imports, entry, number, parent = sys.stdin.readline().split()
    die_with_parent(int(parent))
    failure = None
    try:
        pkgutil.resolve_name(imports)()
    except BertscopeError as error:
        failure = error
    requests = socket.socket(fileno=int(number))
    server = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system removes the watchers that have ended
    while True:
        try:
            asked, files, _, _ = socket.recv_fds(requests, 1, 4)
        except OSError:
            return
        if not asked:
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
    watcher = os.getpid()
    pid = os.fork()
    if not pid:
        die_with_parent(watcher)
        run_and_end(partial(_be_child, run, files))
    with suppress(OSError):  # the parent has closed its end
        os.write(files[3], struct.pack("i", pid))
    for descriptor in files[:3]:
        os.close(descriptor)
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):
        os.write(files[3], struct.pack("i", status))
    os._exit(0)


def _be_child(run: Callable[[], None], files: list[int]) -> None:
    os.setsid()
    os.close(files[3])
    for number, descriptor in enumerate(files[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = os.fdopen(0, "r")
    run()


def run_and_end(run: Callable[[], Any]) -> NoReturn:
    """Run a function and end this fork: with 0, the code of an exit, or 1 after the traceback of another error."""
    code = 1
    try:
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
