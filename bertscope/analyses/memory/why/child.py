"""The process that reads a file of `why`: the only place of the package that unpickles.

A snapshot of torch is a pickle of dicts, lists, tuples, texts and numbers. `PlainUnpickler` makes nothing else: every
name of code in the file is an error. Memory and time of this process are limited, and its parent gets a report as JSON.
"""

from __future__ import annotations

import gc
import gzip
import io
import json
import os
import pickle
import stat
import sys
from contextlib import suppress
from typing import Any, BinaryIO, NoReturn

from bertscope.analyses.memory.why.explained import snapshot_report, timeline_report
from bertscope.analyses.memory.why.messages import message_report
from bertscope.errors import BertscopeError, SourceError
from bertscope.processes.child import die_with_parent, sender
from bertscope.reports.base import to_json
from bertscope.reports.why import WhyReport

MAX_SNAPSHOT_BYTES = 250_000_000  # of a pickle, or of JSON
MAX_LOG_BYTES = 32 << 20  # of a text: the end of a longer one is read
MEMORY_BYTES, MAX_SECONDS = 5 << 29, 15  # of this process, and of CPU time
_NO_SNAPSHOT = "a pickle that is no memory snapshot; give what torch.cuda.memory._dump_snapshot wrote"
_LARGE = (
    "larger than {limit:,} bytes; record fewer events: torch.cuda.memory._record_memory_history(max_entries=100000), "
    "or stacks='python'"
)


class PlainUnpickler(pickle.Unpickler):
    """A reader of pickles that hold plain values only."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        """Raise UnpicklingError: no plain value needs a name of code."""
        raise pickle.UnpicklingError("names code")

    def persistent_load(self, pid: Any) -> NoReturn:
        """Raise UnpicklingError: no plain value has a persistent id."""
        raise pickle.UnpicklingError("has a persistent id")


def explain_file() -> None:
    """Read the file that the parent names on standard input, and send its report, or the reason why there is none."""
    die_with_parent(os.getppid())
    path, name = json.loads(sys.stdin.readline())
    say = sender()
    _limit()
    gc.disable()  # of millions of dicts none is part of a cycle
    try:
        say("report", to_json(_report(path, name)))
    except BertscopeError as error:
        say("refused", str(error))
    except MemoryError:
        say("memory", "")
    sys.stdout.flush()
    os._exit(0)  # freeing millions of objects takes a second


def _limit() -> None:
    """Limit the memory and the time of this process, and the file that the system writes when it is killed."""
    with suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS + 1))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))


def _report(path: str, name: str) -> WhyReport:
    with open(path, "rb", opener=lambda file, flags: os.open(file, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise SourceError("no regular file", where=name)
        return report_of(file, name)


def report_of(file: BinaryIO, name: str) -> WhyReport:
    """Return the report of a snapshot, a timeline or a text; raises SourceError for anything else."""
    start = file.read(64)
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    if start[:1] == b"\x80":
        _check_size(size, name)
        return snapshot_report(_unpickled(file, name), name)
    if start[:2] == b"PK":
        raise SourceError("a zip file, such as a checkpoint; give a memory snapshot, a timeline or a log", where=name)
    if start[:2] == b"\x1f\x8b":
        return _of_json(_unpacked(file, name), name)
    if start.lstrip()[:1] in (b"[", b"{") and size <= MAX_SNAPSHOT_BYTES:
        with suppress(ValueError):
            return _of_json(file.read(), name)
    file.seek(max(size - MAX_LOG_BYTES, 0))
    return message_report(file.read(MAX_LOG_BYTES).decode(errors="replace"), name)


def _check_size(size: int, name: str) -> None:
    if size > MAX_SNAPSHOT_BYTES:
        raise SourceError(_LARGE, where=name, limit=MAX_SNAPSHOT_BYTES)


def _unpickled(file: BinaryIO, name: str) -> Any:
    try:
        return PlainUnpickler(file).load()
    except MemoryError:
        raise
    except Exception as error:  # the unpickler raises many kinds for damaged bytes
        raise SourceError(f"{_NO_SNAPSHOT} ({type(error).__name__}: {str(error)[:80]})", where=name) from None


def _unpacked(file: BinaryIO, name: str) -> bytes:
    try:
        with gzip.open(file) as packed:
            content = packed.read(MAX_SNAPSHOT_BYTES + 1)
    except (OSError, EOFError, ValueError) as error:
        raise SourceError(f"a gzip file that is damaged ({error})", where=name) from None
    _check_size(len(content), name)
    return content


def _of_json(content: bytes, name: str) -> WhyReport:
    """Return the report of a timeline; raises ValueError for what is no JSON."""
    try:
        return timeline_report(json.loads(content), name)
    except RecursionError:
        raise SourceError("JSON that is nested too deep for a memory timeline", where=name) from None
