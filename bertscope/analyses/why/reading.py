"""The file of `why`, read in a child process: the only place of the package that unpickles.

A snapshot of torch is a pickle of dicts, lists, tuples, texts and numbers. `PlainUnpickler` makes nothing else: every
name of code in the file is an error. Memory and time of the child are limited, and its parent gets a report as JSON.
"""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from bertscope.analyses.why.findings import message_report, snapshot_report
from bertscope.errors import BertscopeError, SourceError, one_line
from bertscope.files import open_file
from bertscope.processes.child import ask, limit_child, sender
from bertscope.progress import progress
from bertscope.reports.base import to_json
from bertscope.reports.json import from_json
from bertscope.reports.why import STDIN, TEXT, WhyReport

MAX_SNAPSHOT_BYTES = 250_000_000
MAX_LOG_BYTES = 32 << 20  # of a text: the end of a longer file is read, and the beginning of standard input
MAX_SECONDS = 15  # of CPU time of the child
_WAIT_SECONDS = 60.0  # for a child that waits for a disk, or for a CPU
_LESS = "record fewer events: torch.cuda.memory._record_memory_history(max_entries=100000)"
_READS = "'why' reads a snapshot that torch.cuda.memory._dump_snapshot wrote, or a text with an out-of-memory message"
_GIVE = "give a memory snapshot or a log, or - for standard input"


class PlainUnpickler(pickle.Unpickler):
    """A reader of pickles that hold plain values only."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        """Raise UnpicklingError: no plain value needs a name of code."""
        raise pickle.UnpicklingError("names code")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Raise UnpicklingError: no plain value has a persistent id."""
        raise pickle.UnpicklingError("has a persistent id")


def read_why(file: str) -> WhyReport:
    """Return the report of a file, of the text on standard input for `-`, or of a message instead of a file.

    Raises SourceError for anything else.
    """
    if file == "-":
        return message_report(sys.stdin.buffer.read(MAX_LOG_BYTES).decode(errors="replace"), STDIN)
    path = Path(file)
    try:
        path.stat()
    except (OSError, ValueError) as error:
        if "out of memory" in file:
            return message_report(file[:MAX_LOG_BYTES], TEXT)
        reason = getattr(error, "strerror", None) or str(error)
        raise SourceError(f"{one_line(file, limit=80)}: {reason}; {_GIVE}") from None
    question, entry = [os.path.abspath(path), path.name], "bertscope.analyses.why.reading:explain_file"
    kind, content, code = ask(entry, question, lambda: progress(f"reading {path.name}"), _WAIT_SECONDS)
    if kind == "report" and isinstance(report := from_json(content), WhyReport):
        return report
    if kind == "refused":
        raise SourceError(str(content))
    if not kind or code == -signal.SIGXCPU:
        content = f"it takes more than {MAX_SECONDS} s"
    raise SourceError(f"it cannot be read: {content}; {_LESS}", where=path.name)


def explain_file() -> None:
    """Read the file that the parent names on standard input, and send its report, or the reason why there is none."""
    path, name = json.loads(sys.stdin.readline())
    send = sender()
    limit_child(MAX_SECONDS)
    gc.disable()  # of millions of dicts none is part of a cycle
    with suppress(MemoryError):
        send(*answer_of(path, name))
    os._exit(0)  # freeing millions of objects takes a second


def answer_of(path: str, name: str) -> tuple[str, str]:
    """Return "report" and the report of a file as JSON, or "refused" and the reason on one line."""
    try:
        with open_file(path, _GIVE) as file:
            return "report", to_json(report_of(file, name))
    except BertscopeError as error:
        return "refused", str(error)
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes raise many kinds
        what = one_line(f"{type(error).__name__}: {str(error)[:80]}")
        return "refused", f"{name}: damaged, or not a file that 'why' reads ({what}); {_GIVE}"


def report_of(file: BinaryIO, name: str) -> WhyReport:
    """Return the report of a snapshot or a text; raises an error for anything else."""
    start = file.read(64).lstrip()
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    try:
        if start[:1] == b"\x80":
            if size > MAX_SNAPSHOT_BYTES:
                raise SourceError(f"larger than {MAX_SNAPSHOT_BYTES:,} bytes; {_LESS}")
            return snapshot_report(PlainUnpickler(file).load(), name)
        if start[:2] == b"\x1f\x8b":
            raise SourceError(f"a gzip file, such as a memory timeline of torch's profiler; {_READS}")
        file.seek(max(size - MAX_LOG_BYTES, 0))
        return message_report(file.read(MAX_LOG_BYTES).decode(errors="replace"), name)
    except SourceError as error:
        what = f"a list of lists, such as a memory timeline of torch's profiler; {_READS}"
        raise (SourceError(what) if start[:2] == b"[[" else error).at(name) from None
