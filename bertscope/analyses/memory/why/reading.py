"""The parent of the process that reads a file of `why`: it starts it, waits, and checks what it sends."""

from __future__ import annotations

import json
import os
import signal
import stat
import sys
import time
from pathlib import Path
from typing import Any

from bertscope.analyses.memory.why.child import MAX_SECONDS
from bertscope.analyses.memory.why.messages import message_report
from bertscope.errors import SourceError, Text
from bertscope.processes.child import Child
from bertscope.processes.worker import ENDED, GARBLED, Worker
from bertscope.progress import progress
from bertscope.reports.json import from_json
from bertscope.reports.why import WhyReport

_WAIT_SECONDS = 60.0  # for a child that waits for a disk, or for a CPU
MAX_INPUT_BYTES = 32 << 20  # of standard input
_POLL_SECONDS = 0.5
_LESS = "record fewer events: torch.cuda.memory._record_memory_history(max_entries=100000)"


def read_why(file: str) -> WhyReport:
    """Return the report of a file, or of the text on standard input for `-`; raises SourceError for any other."""
    if file == "-":
        content = sys.stdin.buffer.read(MAX_INPUT_BYTES)
        return message_report(content.decode(errors="replace"), "standard input")
    path = Path(file)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SourceError("{file}: {words}; give a memory snapshot, a timeline or a log, or - for standard input",
                          file=file, words=reason) from None  # fmt: skip
    if not stat.S_ISREG(mode):
        raise SourceError("{file} is a folder, a pipe or a device; give a file, or - for standard input", file=file)
    worker = Worker(Child("bertscope.analyses.memory.why.child:explain_file"), _message)
    try:
        worker.send([os.path.abspath(path), path.name])
        return _answer(worker, path.name)
    finally:
        worker.stop(0.0)


def _message(line: bytes) -> tuple[str, Any]:
    kind, content = json.loads(line)
    return str(kind), content


def _answer(worker: Worker, name: str) -> WhyReport:
    """Return the report that the child sends in time; raises SourceError for any other end."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        message = worker.receive(_POLL_SECONDS)
        progress(Text("reading {name}", name=name))
        if message is None:
            continue
        kind, content = message
        if kind == "report":
            found = from_json(content)
            if isinstance(found, WhyReport):
                return found
        if kind == "refused":
            raise SourceError(str(content))
        if kind == "memory":
            raise SourceError("it needs more than 2.5 GiB of memory to read; {less}", where=name, less=_LESS)
        if kind == ENDED and worker.death() and worker.process.returncode == -signal.SIGXCPU:
            break
        if kind in (ENDED, GARBLED):
            raise SourceError("it cannot be read (the process that reads it {words}); {less}", where=name,
                              words=worker.death() if kind == ENDED else content, less=_LESS)  # fmt: skip
    raise SourceError("it takes more than {seconds} s to read; {less}", where=name, seconds=MAX_SECONDS, less=_LESS)
