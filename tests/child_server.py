"""Processes for tests, forked from a server that has torch loaded: each saves 2 s of CPU time.

`ForkedChild` is a child of `profile`, `run` or `sweep`; `loaded` is the beginning of a command that runs a module. The
tests of what a process does until torch is loaded start it as a user does.
"""

import atexit
import fcntl
import gc
import os
import pkgutil
import runpy
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bertscope.processes.child import _paths, die_with_parent
from tests.loaded_python import number, request

_CLIENT = Path(__file__).with_name("loaded_python.py")
_ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # before any test changes them


class ForkedChild:
    """A child of the server, with what its parents use of subprocess.Popen; it calls `entry`."""

    def __init__(self, entry: str) -> None:
        (stdin, to_stdin), (from_stdout, stdout), (from_stderr, stderr) = (os.pipe() for _ in range(3))
        self._server = request(_server(), {"paths": _paths(), "entry": entry}, [stdin, stdout, stderr])
        self.pid = number(self._server)
        for descriptor in (stdin, stdout, stderr):
            os.close(descriptor)
        self.stdin = os.fdopen(to_stdin, "wb", 0)
        self.stdout, self.stderr = os.fdopen(from_stdout, "rb"), os.fdopen(from_stderr, "rb")
        self.returncode: int | None = None

    def poll(self) -> None:
        """Return None: the caller then waits, and the end is soon."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative for a signal."""
        if self.returncode is None:
            if timeout is not None and not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("child", timeout)
            try:
                self.returncode = os.waitstatus_to_exitcode(number(self._server))
            except EOFError:  # the child has killed its watcher, and has died with it
                self.returncode = -signal.SIGKILL
            self._server.close()
        return self.returncode

    def kill_group(self) -> None:
        """Kill the process and those that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


@contextmanager
def forking() -> Iterator[None]:
    """Fork the children of `profile`, `run` and `sweep` from the server."""
    from bertscope.analyses.sweep import pool
    from bertscope.dry_run import script
    from bertscope.measure import profile

    with pytest.MonkeyPatch.context() as patch:
        for module in (profile, pool, script):
            patch.setattr(module, "starting", lambda imports, entry, **_: nullcontext(partial(ForkedChild, entry)))
        yield


def loaded(module: str, *, without: str = "") -> list[str]:
    """Return the arguments that run `python -m MODULE`, or `python -c`, in a process that has torch loaded.

    It loads the packages in `without` anew: those that read the environment while they are imported.
    """
    return [sys.executable, "-I", "-S", str(_CLIENT), _server(), without, module]


def run_loaded(code: str, *words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run code as `run_python` does, in a process that has torch loaded and has run nothing with it."""
    options = {"capture_output": True, "text": True, "check": False, **options}
    return subprocess.run([*loaded("-c"), code, *map(str, words)], **options)


@cache
def _server() -> str:
    """Return the address of the server of all workers; the first that asks starts it, and it ends with the last."""
    base = "/tmp" if os.path.isdir("/tmp") else tempfile.gettempdir()  # an address has at most 107 characters
    folder = Path(base, f"bertscope-tests-{os.environ.get('PYTEST_XDIST_TESTRUNUID') or uuid.uuid4().hex}")
    folder.mkdir(mode=0o700, exist_ok=True)
    address, users, lock = str(folder / "server"), folder / "users", os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not os.path.exists(address):
        os.mkfifo(users)
        with socket.socket(socket.AF_UNIX) as listener, os.fdopen(os.open(users, os.O_RDONLY | os.O_NONBLOCK)) as stdin:
            listener.bind(address)
            listener.listen(64)
            process = subprocess.Popen(
                [sys.executable, "-c", "from tests.child_server import serve; serve()", str(listener.fileno())],
                stdin=stdin, pass_fds=[listener.fileno()], env=_ENVIRONMENT,
            )  # fmt: skip
        atexit.register(shutil.rmtree, folder)
        atexit.register(process.wait)
    atexit.register(os.close, os.open(users, os.O_WRONLY | os.O_NONBLOCK))
    os.close(lock)
    return address


def serve() -> None:
    """Fork a child for each request, until no worker has stdin open."""
    from bertscope import cli  # noqa: F401
    from bertscope.dry_run.child import load_what_runs_need
    from bertscope.measure.rank import load_for_ranks

    load_what_runs_need()
    load_for_ranks()  # nothing runs here, so that there are no threads to fork
    with suppress(ImportError):
        import_module("transformers.modeling_utils")
    gc.collect()
    gc.freeze()  # the children collect often; torch's objects stay
    listener = socket.socket(fileno=int(sys.argv[1]))
    while listener in select.select([listener, sys.stdin], [], [])[0]:
        client, _ = listener.accept()
        if not os.fork():
            listener.close()
            _watch(client)
        client.close()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    with suppress(ChildProcessError):
        while True:
            os.wait()


def _watch(client: socket.socket) -> None:
    """Fork the child, send its process id and, when it has ended, its exit status: several children may live."""
    import json

    size, files, _, _ = socket.recv_fds(client, 4, 3)
    with client.makefile("rb") as stream:
        settings = json.loads(stream.read(struct.unpack("i", size)[0]))
    watcher, pid = os.getpid(), os.fork()
    if not pid:
        client.close()
        die_with_parent(watcher)
        _run(settings, files)
    for descriptor in files:
        os.close(descriptor)
    with suppress(BrokenPipeError):
        client.sendall(struct.pack("i", pid))
        client.sendall(struct.pack("i", os.waitpid(pid, 0)[1]))
    os._exit(0)


def _run(settings: dict, files: list[int]) -> None:
    """Be the child: call the entry, or run the module that the words name; and end."""
    code = 1
    try:
        os.environ.clear()
        os.environ.update(settings["environment"])
        os.chdir(settings["folder"])
        for wanted, descriptor in enumerate(files):
            os.dup2(descriptor, wanted)
        sys.stdin = os.fdopen(0, "r")
        if "words" in settings:
            without, module, *sys.argv[1:] = settings["words"]
            for name in [name for name in sys.modules if name.partition(".")[0] in without.split()]:
                del sys.modules[name]
            own = settings["environment"].get("PYTHONPATH", "").split(os.pathsep)
            sys.path[:] = [os.getcwd(), *filter(None, own), *sys.path]
            signal.signal(signal.SIGINT, signal.default_int_handler)
            if module == "-c":
                exec(sys.argv.pop(1), {"__name__": "__main__"})
            else:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            os.setsid()
            sys.path[:] = settings["paths"]
            pkgutil.resolve_name(settings["entry"])()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
