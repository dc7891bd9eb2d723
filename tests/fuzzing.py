"""The judgement of what a command does with an input of `tests/corpus.py`.

`tests/test_fuzz.py` runs a few with a fixed seed, `benchmarks/fuzz.py` any number. A command runs in this process, and
the points of a sweep too; ranks and profiles run in forks of a server that has torch loaded.
"""

import contextlib
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bertscope import BertscopeError, from_json
from bertscope.errors import one_line
from tests.conftest import Result, run_cli
from tests.corpus import RAN

SECONDS, MEMORY_BYTES = 10, 1 << 30  # of the processor, and above the memory before, for one command
WALL_SECONDS = 120  # for a command that waits
GONE_SECONDS = 5  # until the last process of a command has ended
PROGRESS = re.compile(r" \((\d+ of \d+, )?\d+ s\)$")  # a line of a command that takes longer
STARTS = ("profile",)  # commands that start processes


@dataclass(frozen=True)
class Verdict:
    """The result of one command, and its faults."""

    code: int
    err: str
    seconds: float
    grown: int
    faults: tuple[str, ...]


class _TooLong(BaseException):
    """More time of the processor than a command may take; no `except Exception` catches it."""


def judged(arguments: list[Any], folder: Path) -> Verdict:
    """Run a command in `folder` and judge it: exit code, lines, text, time, memory, files, sockets and processes."""
    (folder / "loop").unlink(missing_ok=True)
    (folder / "loop").symlink_to("loop")
    files, processes, before = _files(folder), descendants(), _memory(peak=False)
    began = time.process_time()
    result = Result(-1, "", "")  # of a command that is ended
    with _surroundings(folder), _listeners(str(arguments[0]) in STARTS) as listeners:
        with contextlib.suppress(_TooLong), _limited():
            result = _read(arguments[-1]) if arguments[0] == "read" else run_cli(*arguments)
        seconds, grown = time.process_time() - began, _memory(peak=True) - before
    after = _files(folder)
    reports_errors = arguments[0] == "check"  # a file that cannot be checked is a row among the others
    faults = [
        *_faults_of_text(result.code, result.out, result.err, reports_errors, "--nproc" in arguments),
        *([f"{seconds:.1f} s of the processor"] if seconds > SECONDS or result.code < 0 else []),
        *([f"{grown >> 20} MiB of memory"] if grown > MEMORY_BYTES else []),
        *([f"a child is left: {left}"] if (left := remaining(processes)) else []),
        *([f"it listens to the network: {sorted(listeners)}"] if listeners else []),
        *_faults_of_files(result.code, files, after, arguments, folder),
    ]
    for name in after.keys() - files.keys():
        (folder / name).unlink()
    for name in (name for name, content in files.items() if after.get(name) != content):
        (folder / name).write_bytes(files[name])
    return Verdict(result.code, result.err, seconds, grown, tuple(faults))


def _read(path: Path | str) -> Result:
    """Do what a program does with a report that somebody sent it."""
    try:
        report = from_json(Path(path).read_bytes())
        return Result(0, f"{report}\n{report.to_json()}", "")
    except BertscopeError as error:
        return Result(error.exit_code, "", f"error: {one_line(str(error), limit=2000)}\n")
    except Exception as error:
        return Result(70, "", f"error: {error!r}\n")


@contextlib.contextmanager
def _surroundings(folder: Path) -> Iterator[None]:
    """Make the folder the working directory with the user's calibrations; compute a sweep's points in this process."""
    from bertscope.analyses.sweep import grid, pool
    from bertscope.commands import call
    from bertscope.reports.memory import SweepRow

    def rows(tasks: Any, *_: object) -> Iterator[SweepRow]:
        return (SweepRow.from_line(grid.compute(task.to_json())) for task in tasks)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_DATA_HOME", str(folder))
        patch.setattr(pool, "local_rows", rows)
        patch.setattr(sys, "path", [*sys.path])
        call._read.cache_clear()
        try:
            yield
        finally:
            call._read.cache_clear()
            for name in ("evil", "own"):
                sys.modules.pop(name, None)


def _faults_of_text(code: int, out: str, err: str, reports_errors: bool, is_measured: bool) -> Iterator[str]:
    errors = [line for line in err.splitlines() if not (line.startswith("note: ") or PROGRESS.search(line))]
    if code not in ((0, 1, 2, 3) if is_measured else (0, 1, 2)):
        yield f"exit code {code}"
    if "Traceback" in out + err or "unexpected error" in out + err:
        yield "a traceback, or an error that check reports for one file"
    if code == 2 and not (errors and all(line.startswith(("error: ", '{"error": ')) for line in errors)):
        yield "an error without its line"
    if code == 2 and len(errors) > 1 and not reports_errors:
        yield f"{len(errors)} lines on stderr"
    if code == 2 and out and not reports_errors:
        yield "text on stdout and an error"
    if not (out + err).replace("\n", "").isprintable():
        yield "unprintable characters"


def _faults_of_files(
    code: int, before: dict[str, bytes], after: dict[str, bytes], arguments: list[Any], folder: Path
) -> Iterator[str]:
    words = [str(argument) for argument in arguments]
    outputs = [word for option, word in pairwise(words) if option in ("--output", "-o")]
    outputs += [word.removeprefix("--output=").removeprefix("-o") for word in words]  # as in -ofile
    asked = {os.path.relpath(folder / word, folder) for word in outputs}
    new = after.keys() - before.keys()
    changed = {name for name, content in before.items() if after.get(name) != content}
    if RAN in new:
        yield "code ran"
    if left := {name for name in new - asked - {RAN} if not name.endswith(".pyc")}:
        yield f"files are left: {left}"
    if code == 2 and new & asked and arguments[0] != "check":
        yield f"an output file in spite of an error: {new & asked}"
    if changed - asked or (code == 2 and changed):
        yield f"files of the user are changed: {changed}"
    for name in changed & asked:
        if lost := _lost(before[name], after.get(name, b"")):
            yield f"lines of {name} are lost: {lost[:3]!a}"


def _lost(before: bytes, after: bytes) -> list[bytes]:
    """Return the lines of a results file that are gone: not those of a point computed again, nor a cut last row."""
    lines = before.splitlines(keepends=True)
    cut = lines[1:] and not lines[-1].endswith(b"\n")
    return [line for line in (lines[:-1] if cut else lines) if line not in after and line[:41] not in after]


def _files(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder with their contents."""
    return {
        str(path.relative_to(folder)): b"" if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*") if path.is_symlink() or path.is_file()
    }  # fmt: skip


# ---- processes and sockets ----


def descendants(parent: str = "self") -> set[str]:
    """Return the ids of the processes that this one and they have started; none where the system does not list them.

    One that has ended, and whose parent has not asked for its exit code, is left out. So are the server that forks the
    children of all workers' tests, which may be a child of this one, and whatever those children have started.
    """
    found: set[str] = set()
    for path in Path(f"/proc/{parent}/task").glob("*/children"):
        pids: list[str] = []
        with contextlib.suppress(OSError):  # a thread that has ended
            pids = path.read_text().split()
        for pid in pids:
            with contextlib.suppress(OSError):  # a process that has ended; the others have not
                if "tests.child_server" in Path(f"/proc/{pid}/cmdline").read_text(errors="replace"):
                    continue
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    found |= {pid} | descendants(pid)
    return found


def remaining(known: set[str]) -> set[str]:
    """Return the processes that are left of a command, after some time for the last to end."""
    until = time.monotonic() + GONE_SECONDS
    while (left := {_described(pid) for pid in descendants() - known}) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def _described(pid: str) -> str:
    """Return a process's id and command, which is empty for one that has ended."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
        return f"{pid} {words[:200]!r}"
    return pid


@contextlib.contextmanager
def _listeners(is_watched: bool) -> Iterator[set[str]]:
    """Yield the addresses beyond loopback at which this process and its descendants listen meanwhile."""
    found: set[str] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            found.update(listening({"self", *descendants()}))

    watcher = threading.Thread(target=watch)
    if is_watched:
        watcher.start()
    try:
        yield found
    finally:
        done.set()
        if is_watched:
            watcher.join()


def listening(pids: set[str]) -> set[str]:
    """Return the addresses beyond loopback at which these processes listen, as the kernel writes them."""
    addresses = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for fields in map(str.split, Path(table).read_text().splitlines()[1:]):
                is_loopback = fields[1].partition(":")[0].endswith(("0100007F", "00000000000000000000000001000000"))
                if fields[3] == "0A" and not is_loopback:
                    addresses[f"socket:[{fields[9]}]"] = fields[1]
    sockets = set()
    for pid in pids if addresses else ():
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(link))
    return {addresses[name] for name in sockets & addresses.keys()}


def _memory(peak: bool) -> int:
    """Return the resident bytes now, from when on the peak counts, or the peak since then."""
    status = Path("/proc/self/status")
    try:
        if not peak:
            Path("/proc/self/clear_refs").write_text("5")
        name = "VmHWM:" if peak else "VmRSS:"
        return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith(name))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """End a command that takes more time of the processor than it may."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _TooLong

    timers = ((signal.SIGPROF, signal.ITIMER_PROF, SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, WALL_SECONDS))
    old = {number: signal.signal(number, stop) for number, _, _ in timers}
    for _, timer, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for number, timer, _ in timers:
            signal.setitimer(timer, 0)
            signal.signal(number, old[number])
