"""Children of `profile` for tests, forked from a server that has torch loaded: each saves 2 s of CPU time.

The tests of the child itself (tests/analyses/memory/test_profile.py) start it as the program does.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib import import_module

from bertscope.analyses.memory.child import _paths

_FILES = 4  # stdin, stdout, stderr, and the pipe on which the server writes the exit status


class ForkedChild:
    """A child of the server, with what `profile` uses of subprocess.Popen."""

    def __init__(self) -> None:
        (stdin, to_stdin), *outputs = (os.pipe() for _ in range(_FILES))
        theirs = [stdin, *(writer for _, writer in outputs)]
        settings = json.dumps({"folder": os.getcwd(), "environment": dict(os.environ), "paths": _paths()}).encode()
        server = _server()
        socket.send_fds(server, [struct.pack("i", len(settings))], theirs)
        server.sendall(settings)
        (self.pid,) = struct.unpack("i", _received(server, 4))
        for descriptor in theirs:
            os.close(descriptor)
        self.stdin = os.fdopen(to_stdin, "wb", 0)
        self.stdout, self.stderr, self._status = (os.fdopen(reader, "rb") for reader, _ in outputs)
        self.returncode: int | None = None

    def poll(self) -> None:
        """Return None: the caller then waits, and the end is soon."""

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, negative for a signal."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(struct.unpack("i", self._status.read(4))[0])
            self._status.close()
        return self.returncode


def _received(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError("the server of children has ended")
        data += part
    return data


@cache
def _server() -> socket.socket:
    """Start the server of this process."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", "from tests.child_server import serve; serve()", str(theirs.fileno())]
    process = subprocess.Popen(
        command, pass_fds=[theirs.fileno()], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


def serve() -> None:
    """Fork a child for each request, until the tests end."""
    from bertscope.analyses.memory import estimate, profile_worker, profiler_run  # noqa: F401
    from bertscope.torch_access import fake_tensor_mode

    fake_tensor_mode()  # imports torch._dynamo; nothing runs here, so that there are no threads to fork
    with suppress(ImportError):
        import_module("transformers.modeling_utils")
    gc.collect()
    gc.freeze()  # the children collect often; torch's objects stay
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system removes the watchers that have ended
    sock = socket.socket(fileno=int(sys.argv[1]))
    while True:
        try:
            size, files, _, _ = socket.recv_fds(sock, 4, _FILES)
        except OSError:
            return
        if not size:
            return
        settings = json.loads(_received(sock, struct.unpack("i", size)[0]))
        if not os.fork():
            _watch(sock, settings, files)
        for descriptor in files:
            os.close(descriptor)


def _watch(sock: socket.socket, settings: dict, files: list[int]) -> None:
    """Fork the child, send its process id, wait for its end, and write its exit status: several children may live."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if not pid:
        _run(settings, files)
    sock.sendall(struct.pack("i", pid))
    for descriptor in files[:3]:
        os.close(descriptor)
    _, status = os.waitpid(pid, 0)
    os.write(files[3], struct.pack("i", status))
    os._exit(0)


def _run(settings: dict, files: list[int]) -> None:
    """Be the child: run its main function, and end."""
    from bertscope.analyses.memory.profile_worker import main

    code = 1
    try:
        os.setsid()
        os.chdir(settings["folder"])
        os.environ.clear()
        os.environ.update(settings["environment"])
        sys.path[:] = settings["paths"]
        for number, descriptor in enumerate(files[:3]):
            os.dup2(descriptor, number)
        sys.stdin = os.fdopen(0, "r")
        main()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
