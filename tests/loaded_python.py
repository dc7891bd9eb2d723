"""Run `python -m MODULE ARGS` in a child of a server that has torch loaded; argv: SERVER WITHOUT MODULE ARGS.

The child has this process's files, folder, environment and arguments; its exit is this process's. Here nothing of the
packages is imported, so that the start costs no time.
"""

import json
import os
import signal
import socket
import struct
import sys


def request(address: str, settings: dict, files: list[int]) -> socket.socket:
    """Ask the server for a child with these standard files; its process id comes back first, then its exit status."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(address)
    data = json.dumps(settings | {"folder": os.getcwd(), "environment": dict(os.environ)}).encode()
    socket.send_fds(server, [struct.pack("i", len(data))], files)
    server.sendall(data)
    return server


def number(server: socket.socket) -> int:
    """Return the next number that the server sends."""
    data = b""
    while len(data) < 4:
        part = server.recv(4 - len(data))
        if not part:
            raise EOFError("the server of children has ended")
        data += part
    return struct.unpack("i", data)[0]


if __name__ == "__main__":
    _, address, *words = sys.argv
    server = request(address, {"words": words}, [0, 1, 2])
    number(server)
    code = os.waitstatus_to_exitcode(number(server))
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
