"""The engines of a sweep, which compute one task after another, and the file of its results.

An engine is the processes of this machine, or a cluster of dask. An interrupted sweep goes on from its file.
"""

from __future__ import annotations

import json
import os
import pkgutil
import re
import signal
import sys
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Queue as SimpleQueue
from typing import Any, TextIO

from bertscope.analyses.sweep.grid import Task, are_kept
from bertscope.errors import (
    BertscopeError,
    SelectionError,
    SourceError,
    WorkerError,
    name_of,
    needs_extra,
    one_line,
)
from bertscope.files import open_file, write_file
from bertscope.processes import child
from bertscope.processes.child import starting
from bertscope.progress import notify
from bertscope.reports.base import FAILED, SCHEMA
from bertscope.reports.json import not_negative
from bertscope.reports.memory import COMPUTED, REFUSED, SweepRow

ATTEMPTS = 2  # a point whose worker ends is computed once more
_STARTS = 3  # workers that end before they are ready, one after another, before the sweep stops
_READY = "ready"
Group = tuple[str, ...]  # of `Task.group`


@dataclass(frozen=True)
class Functions:
    """The function that returns the row of a task, both as lines of JSON, and the one that imports what it needs.

    Each is named as `module:function`.
    """

    compute: str = "bertscope.analyses.sweep.grid:compute"
    load: str = "bertscope.analyses.sweep.grid:load_torch"


POINT = Functions()
KEPT_POINT = Functions(load="bertscope.analyses.sweep.grid:load_nothing")  # for points whose traces are kept


def be_worker() -> None:
    """Be a worker of a pool: compute the task of each line of standard input until it ends."""
    out = child.output_for_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    child.die_with_parent()
    lines = sys.stdin.buffer
    names = json.loads(lines.readline())
    pkgutil.resolve_name(names["load"])()
    compute = pkgutil.resolve_name(names["compute"])
    answer = _READY
    while True:
        out.write(answer.encode() + b"\n")
        out.flush()
        line = lines.readline()
        if not line:
            return
        answer = compute(line.decode())


ENTRY = f"{be_worker.__module__}:{be_worker.__name__}"


class Queue:
    """The tasks that no worker has begun, by group: a worker stays in its group as long as there are tasks in it.

    What two workers both need, each computes. So a worker goes on with what is nearest to its group and
    farthest from the groups of other workers.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.left: dict[Group, deque[Task]] = defaultdict(deque)
        for task in tasks:
            self.left[task.group].append(task)
        self.busy: dict[object, Group] = {}  # the group of each worker

    def __len__(self) -> int:
        return sum(map(len, self.left.values()))

    def next(self, worker: object) -> Task | None:
        """Return the next task for a worker, or None if there is none left."""
        current, taken = self.busy.get(worker), [group for other, group in self.busy.items() if other is not worker]
        left = {group: tasks for group, tasks in self.left.items() if tasks}
        if not left:
            return None

        def preference(group: Group) -> tuple[bool, bool, int, int, int]:
            near_others = max((_common(group, other) for other in taken), default=0)
            return group == current, group not in taken, _common(group, current), -near_others, len(left[group])

        self.busy[worker] = chosen = max(left, key=preference)
        return left[chosen].popleft()

    def put_first(self, task: Task) -> None:
        """Put a task in front of the others of its group."""
        self.left[task.group].appendleft(task)


def _common(group: Group, other: Group | None) -> int:
    same = [one == another for one, another in zip(group, other or (), strict=False)]
    return (*same, False).index(False)


def _message(line: bytes) -> tuple[str, Any]:
    return (_READY, None) if line.strip().decode() == _READY else ("row", SweepRow.from_line(line))


class Pool:
    """Processes that compute a queue's tasks; `start` starts one, and what it prints goes to `echo` too."""

    def __init__(
        self,
        queue: Queue,
        start: Callable[[], child.Child | child.ForkedChild],
        functions: Functions,
        echo: TextIO | None = None,
    ) -> None:
        self.queue, self.start, self.functions, self.echo = queue, start, functions, echo
        self.attempts: Counter[str] = Counter()
        self.in_vain = 0  # starts one after another
        self.inbox: child.Inbox = SimpleQueue()
        self.started: list[child.Worker] = []
        self.tasks: dict[child.Worker, Task | None] = {}  # of each worker that has not ended; None before it is ready

    def rows(self, workers: int) -> Iterator[SweepRow]:
        """Yield the row of each task, in the order in which the workers complete them.

        A worker gets its next task when the row of its last one is taken.
        """
        try:
            for _ in range(min(workers, len(self.queue))):
                self._start()
            while self.tasks:
                worker, kind, row = self.inbox.get()
                if kind == child.ERROR:
                    raise row
                if worker not in self.tasks:
                    continue
                if kind in (child.ENDED, child.GARBLED):
                    yield from self._ended(worker)
                    continue
                self.in_vain = 0
                if row is not None:
                    yield row
                if task := self.queue.next(worker):
                    self.tasks[worker] = task
                    worker.send(task.to_json())
                else:
                    self._remove(worker)
        finally:
            for worker in self.started:
                worker.process.kill_group()
            for worker in self.started:
                worker.stop()

    def _start(self) -> None:
        worker = child.Worker(self.start(), _message, self.inbox, self.echo)
        self.started.append(worker)
        self.tasks[worker] = None
        worker.send(vars(self.functions))

    def _ended(self, worker: child.Worker) -> Iterator[SweepRow]:
        task, reason = self._remove(worker), worker.death()
        if task is None:
            self.in_vain += 1
            if self.in_vain == _STARTS:
                raise WorkerError(
                    f"{_STARTS} workers ended before their first point, the last {reason}; free memory, or use fewer "
                    "--workers"
                )
        else:
            self.attempts[task.key] += 1
            if self.attempts[task.key] < ATTEMPTS:
                self.queue.put_first(task)
            else:
                yield task.row(outcome=FAILED, error=f"its worker ended {ATTEMPTS} times: it {reason}")
        if len(self.queue):
            self._start()

    def _remove(self, worker: child.Worker) -> Task | None:
        self.queue.busy.pop(worker, None)
        with suppress(OSError):
            worker.process.stdin.close()  # type: ignore[union-attr]  # the end of a worker without a task
        return self.tasks.pop(worker)


def local_rows(tasks: Sequence[Task], workers: int, functions: Functions | None = None) -> Iterator[SweepRow]:
    """Yield the rows of tasks as processes of this machine complete them; torch is imported only if a trace is lacking.

    A worker that ends is replaced; its task is tried again, and has the outcome `failed` if that worker ends too.
    Raises WorkerError if workers end before they are ready.
    """
    functions = functions or (KEPT_POINT if are_kept(tasks) else POINT)
    with starting(functions.load, ENTRY) as start:
        yield from Pool(Queue(tasks), start, functions).rows(workers)


# ---- a cluster ----


class _OfThread(threading.local):
    """The pool of one process that each thread has; what the process prints goes to standard error."""

    def __init__(self) -> None:
        self.queue = Queue(())
        self.rows = Pool(self.queue, partial(child.Child, ENTRY), POINT, sys.stderr).rows(1)


_of_thread = _OfThread()


def compute_apart(text: str) -> str:
    """Return the row of a task from a child process, which the next tasks of this thread use too.

    A worker of dask has threads that read the frames of the others for a profile, which keeps tensors alive.
    """
    task = Task.from_json(text)
    _of_thread.queue.put_first(task)
    try:
        return next(_of_thread.rows).to_line()
    except BertscopeError as error:
        _of_thread.__init__()  # type: ignore[misc]
        return task.row(outcome=FAILED, error=one_line(str(error))).to_line()


def cluster_address(address: str | None) -> str:
    """Return the address of the user's cluster; raises SelectionError without one."""
    scheduler = address or os.environ.get("DASK_SCHEDULER_ADDRESS") or ""
    if not scheduler or scheduler == "local":
        raise SelectionError(
            f"{name_of('engine')} dask needs a running cluster; give its address with {name_of('address')} or "
            f"DASK_SCHEDULER_ADDRESS, or use {name_of('engine')} local"
        )
    return scheduler


def dask_rows(tasks: Sequence[Task], address: str) -> Iterator[SweepRow]:
    """Yield the rows of tasks as a cluster of dask completes them."""
    with needs_extra(f"{name_of('engine')} dask", "dask"):
        from distributed import Client
    try:
        client = Client(address)
    except (OSError, RuntimeError, ValueError) as error:
        reason = one_line(f"{type(error).__name__}: {error}", limit=200)
        raise SelectionError(
            f"dask cannot reach the cluster at {address}: {reason}; check {name_of('address')}, or use "
            f"{name_of('engine')} local"
        ) from None
    try:
        executor = client.get_executor(pure=False)
        in_groups = sorted(tasks, key=lambda task: task.group)  # a worker keeps the last traces
        futures = {executor.submit(compute_apart, task.to_json()): task for task in in_groups}
        for future in as_completed(list(futures)):
            task, failure = futures.pop(future), future.exception()
            if failure is None:
                yield SweepRow.from_line(future.result())
            else:
                yield task.row(outcome=FAILED, error=one_line(f"its worker ended: {type(failure).__name__}"))
    finally:
        client.close()  # which cancels what is not computed yet


# ---- the file of the results ----

MAX_LINE_BYTES = 2**20  # a row has 1.5 KB
_RESULTS = "name a file that a sweep can resume from"
_START = f'{{"schema":{SCHEMA},"key":"'.encode()
_OTHER_SCHEMA = re.compile(rb'\{(?:"schema":([0-9]{1,9}),)?"key":"[0-9a-f]{32}"')  # rows of schema 1 do not name it
_KEY = re.compile(r"[0-9a-f]{32}", re.ASCII)


class ResultsFile:
    """A file's rows by their keys, and the descriptor to which rows are appended.

    `points` are the settings of the points of the grid by their keys.
    """

    def __init__(self, path: Path, descriptor: int, points: Mapping[str, Mapping[str, Any]]) -> None:
        self.path, self.descriptor, self.points = path, descriptor, points
        self.lines: dict[str, bytes] = {}
        self.rows: dict[str, SweepRow] = {}
        self.size_bytes = 0  # of the file, as far as this process knows

    def append(self, row: SweepRow) -> None:
        """Add a row; one write of a complete line."""
        self._know(row, row.to_line().encode() + b"\n")
        written = os.write(self.descriptor, self.lines[row.key])
        if written != len(self.lines[row.key]):
            raise SourceError(f"{self.path} cannot be written: the disk is full; free some space, and run it again")

    def finish(self, keys: Sequence[str]) -> None:
        """Put the rows in the order of the keys, and behind them the rows of other grids and versions.

        A file that another program has changed stays as it is.
        """
        rest = self.lines.keys() - set(keys)
        content = b"".join(self.lines[key] for key in (*keys, *(key for key in self.lines if key in rest)))
        with open_file(self.path, _RESULTS) as file:
            written = file.read()
        if len(written) != self.size_bytes:
            notify(f"{self.path} was changed by another program; its rows are not sorted")
        elif content != written:
            write_file(self.path, content)

    def _know(self, row: SweepRow, line: bytes) -> None:
        self.lines[row.key], self.rows[row.key] = line, row
        self.size_bytes += len(line)

    def read(self) -> None:
        """Read the rows, and remove what an interrupted run of this grid has left of a line at the end.

        Raises SourceError for a file with other content, which is not changed.
        """
        starts = [_START + key.encode() + b'"' for key in self.points]
        with open_file(self.path, _RESULTS) as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES), b""), 1):
                if line.endswith(b"\n"):
                    self._know(self._row(line, number), line)
                # A line with the complete key of a point proves whose it is, a shorter one does with the first line.
                elif not file.read(1) and any(
                    line.startswith(start) or (next(iter(self.lines), "") in self.points and start.startswith(line))
                    for start in starts
                ):
                    os.ftruncate(self.descriptor, self.size_bytes)
                    notify(f"{self.path}:{number} is incomplete; its point is computed again")
                else:
                    raise self._not_a_row(line, number)

    def _row(self, line: bytes, number: int) -> SweepRow:
        with suppress(BertscopeError, ValueError, RecursionError, OverflowError):
            row = SweepRow.from_line(line)
            point = json.loads(json.dumps(self.points.get(row.key, row.point)))
            is_computed = row.outcome == COMPUTED
            if (
                _KEY.fullmatch(row.key)
                and row.point
                and row.point == point
                and row.outcome in (COMPUTED, REFUSED, FAILED)
                and (row.cost is not None) == is_computed
                and bool(row.error) != is_computed
            ):
                not_negative(json.loads(line))
                return row
        raise self._not_a_row(line, number)

    def _not_a_row(self, line: bytes, number: int) -> SourceError:
        match, what = _OTHER_SCHEMA.match(line), "not a row of a sweep"
        if match and (schema := int(match[1] or 1)) != SCHEMA:
            what = f"a row of schema {schema}; this version resumes from {SCHEMA}"
        return SourceError(f"{what}; name another file", where=f"{self.path}:{number}")

    def done(self) -> set[str]:
        """Return the keys of the rows that need not be computed again: all but those that failed."""
        return {key for key, row in self.rows.items() if row.outcome != FAILED}


@contextmanager
def results_file(path: Path, points: Mapping[str, Mapping[str, Any]]) -> Iterator[ResultsFile]:
    """Open or create a file of rows, which no other sweep may write to at the same time.

    Raises SourceError for a file with other content, and while another sweep writes to it.
    """
    if path.exists():
        open_file(path, _RESULTS).close()
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    except OSError as error:
        raise SourceError(f"{path} cannot be written: {error.strerror}; name a file in a folder that exists") from None
    try:
        with suppress(ImportError):  # Windows
            import fcntl

            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_ours = os.path.samestat(os.fstat(descriptor), path.stat())  # not replaced by another process
            except OSError as error:  # a file system without locks
                is_ours = not isinstance(error, BlockingIOError)
            if not is_ours:
                raise SourceError(f"another sweep is writing to {path}; wait until it ends, or name another file")
        results = ResultsFile(path, descriptor, points)
        results.read()
        yield results
    finally:
        os.close(descriptor)
