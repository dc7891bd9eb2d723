"""The workers of a sweep: processes that compute one task after another, and the pool of those of this machine."""

from __future__ import annotations

import json
import os
import pkgutil
import signal
import subprocess
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from queue import Queue as SimpleQueue
from typing import Any

from bertscope.analyses.sweep.grid import Task
from bertscope.analyses.sweep.point import are_kept
from bertscope.errors import MissingExtraError, SelectionError, WorkerError, one_line
from bertscope.processes.child import (
    ERROR,
    Child,
    ForkedChild,
    child_command,
    die_with_parent,
    output_for_parent,
    starting,
)
from bertscope.processes.worker import ENDED, GARBLED, Inbox, Worker, end_text
from bertscope.reports.base import FAILED
from bertscope.reports.sweep import SweepRow

ATTEMPTS = 2  # a point whose worker ends is computed once more
_STARTS = 3  # workers that end before they are ready, one after another, before the sweep stops
_SECONDS = 5.0  # for the end of a worker that has closed its output
_READY = "ready"
Group = tuple[str, ...]  # of `Task.group`


@dataclass(frozen=True)
class Functions:
    """The function that returns the row of a task, both as lines of JSON, and the one that imports what it needs.

    Each is named as `module:function`.
    """

    compute: str = "bertscope.analyses.sweep.point:compute"
    load: str = "bertscope.analyses.sweep.point:load_torch"


POINT = Functions()
KEPT_POINT = Functions(load="bertscope.analyses.sweep.point:load_nothing")  # for points whose traces are kept


def be_worker() -> None:
    """Be a worker of the local pool: compute the task of each line of standard input until it ends."""
    out = output_for_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    die_with_parent()
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


class Queue:
    """The tasks that no worker has begun, by group: a worker stays in its group as long as there are tasks in it.

    What two workers both need, each of them computes. So a worker goes on with what is nearest to its own group and
    farthest from those of the others.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self.left: dict[Group, deque[Task]] = defaultdict(deque)
        for task in tasks:
            self.left[task.group].append(task)
        self.busy: dict[object, Group] = {}  # the group of each worker

    def __len__(self) -> int:
        return sum(map(len, self.left.values()))

    def next(self, worker: object) -> Task | None:
        """Return the next task for a worker, or None if there is none left."""
        own, others = self.busy.get(worker), [group for other, group in self.busy.items() if other is not worker]
        left = {group: tasks for group, tasks in self.left.items() if tasks}
        if not left:
            return None

        def preference(group: Group) -> tuple[bool, bool, int, int, int]:
            near_others = max((_common(group, other) for other in others), default=0)
            return group == own, group not in others, _common(group, own), -near_others, len(left[group])

        self.busy[worker] = chosen = max(left, key=preference)
        return left[chosen].popleft()

    def again(self, task: Task) -> None:
        """Put a task back, in front of the others of its group."""
        self.left[task.group].appendleft(task)


def _common(group: Group, other: Group | None) -> int:
    """Return how much two groups have in common: the number of equal fields from the first on."""
    same = [one == another for one, another in zip(group, other or (), strict=False)]
    return (*same, False).index(False)


class _SweepWorker(Worker):
    """A process of the pool and the task that it computes."""

    task: Task | None = None
    is_ready = False


def _message(line: bytes) -> tuple[str, Any]:
    """Return what a worker sends: that it is ready, or a row; raises an error for any other line."""
    return (_READY, None) if line.strip().decode() == _READY else ("row", SweepRow.from_line(line))


class Pool:
    """Processes that compute tasks; `start` starts one."""

    def __init__(self, tasks: Sequence[Task], start: Callable[[], Child | ForkedChild], functions: Functions) -> None:
        self.queue, self.start, self.functions = Queue(tasks), start, functions
        self.attempts: dict[str, int] = defaultdict(int)
        self.in_vain = 0  # starts one after another
        self.inbox: Inbox = SimpleQueue()
        self.workers: list[_SweepWorker] = []  # those that compute
        self.started: list[_SweepWorker] = []

    def rows(self, workers: int) -> Iterator[SweepRow]:
        """Yield the row of each task, in the order in which the workers complete them."""
        try:
            for _ in range(min(workers, len(self.queue))):
                self._start()
            while self.workers:
                worker, kind, content = self.inbox.get()
                if kind == ERROR:
                    raise content
                if worker in self.workers:
                    yield from self._ended(worker) if kind in (ENDED, GARBLED) else self._received(worker, content)
        finally:
            for worker in self.started:
                worker.process.kill_group()
            for worker in self.started:
                worker.stop()

    def _start(self) -> None:
        worker = _SweepWorker(self.start(), _message, self.inbox)
        self.started.append(worker)
        self.workers.append(worker)
        worker.send(vars(self.functions))

    def _received(self, worker: _SweepWorker, row: SweepRow | None) -> Iterator[SweepRow]:
        """Yield the row that a worker has sent, if it is not only ready, and give it the next task."""
        worker.task, worker.is_ready, self.in_vain = None, True, 0
        if row is not None:
            yield row
        worker.task = self.queue.next(worker)
        if worker.task is None:
            self._remove(worker)
        else:
            worker.send(worker.task.to_json())

    def _ended(self, worker: _SweepWorker) -> Iterator[SweepRow]:
        """Replace a worker that ended by itself; yield a row if it was the last attempt at its task."""
        self._remove(worker)
        words, task = worker.death(_SECONDS), worker.task
        if task is not None:
            self.attempts[task.key] += 1
            if self.attempts[task.key] < ATTEMPTS:
                self.queue.again(task)
            else:
                yield task.row(outcome=FAILED, error=_lost(words))
        elif not worker.is_ready:
            self.in_vain += 1
            if self.in_vain == _STARTS:
                raise WorkerError(
                    f"{_STARTS} workers ended before their first point, the last {words}; free memory, or use fewer "
                    "--workers"
                )
        if len(self.queue):
            self._start()

    def _remove(self, worker: _SweepWorker) -> None:
        self.workers.remove(worker)
        self.queue.busy.pop(worker, None)
        with suppress(OSError):
            worker.process.stdin.close()  # type: ignore[union-attr]  # the end of a worker without a task


def _lost(words: str) -> str:
    return f"its worker ended {ATTEMPTS} times: it {words}"


# ---- a worker of a cluster ----

_of_thread = threading.local()


def compute_apart(text: str, functions: Functions) -> str:
    """Return the row of a task from a child process, which the next tasks of this thread use too.

    A worker of dask has threads that read the frames of the others for a profile, which keeps tensors alive.
    """
    reason = ""
    for _ in range(ATTEMPTS):
        child = getattr(_of_thread, "child", None) or _Apart(functions)
        _of_thread.child = None
        if row := child.row(text):
            _of_thread.child = child
            return row
        reason = end_text(child.process.wait())
    return Task.from_json(text).row(outcome=FAILED, error=_lost(reason)).to_line()


class _Apart:
    """A child that computes one task after another; its messages go to the standard error of this process."""

    def __init__(self, functions: Functions) -> None:
        self.process = subprocess.Popen(  # noqa: S603 words of this program
            child_command(f"{__name__}:be_worker"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.row(json.dumps(vars(functions)))

    def row(self, line: str) -> str:
        """Return the answer to a line; an empty text if the process has ended."""
        with suppress(OSError):
            self.process.stdin.write(line.encode() + b"\n")  # type: ignore[union-attr]
            self.process.stdin.flush()  # type: ignore[union-attr]
        answer: bytes = self.process.stdout.readline()  # type: ignore[union-attr]
        return answer.decode()


# ---- engines ----


ENTRY = f"{be_worker.__module__}:{be_worker.__name__}"  # of a worker


def local_rows(tasks: Sequence[Task], workers: int, functions: Functions | None = None) -> Iterator[SweepRow]:
    """Yield the rows of tasks as processes of this machine complete them; torch is imported only if a trace is lacking.

    A worker that ends is replaced; its task is tried again, and has the outcome `failed` if that worker ends too.
    Raises WorkerError if workers end before they are ready, and the BertscopeError of one.
    """
    functions = functions or (KEPT_POINT if are_kept(tasks) else POINT)
    with _starting(functions) as start:
        yield from Pool(tasks, start, functions).rows(workers)


def _starting(functions: Functions) -> AbstractContextManager[Callable[[], Child | ForkedChild]]:
    """Return a context with the function that starts a worker, a fork of a process with what all of them need."""
    return starting(functions.load, ENTRY)


def cluster_address(address: str | None) -> str:
    """Return the address of the user's cluster; raises SelectionError without one."""
    found = address or os.environ.get("DASK_SCHEDULER_ADDRESS") or ""
    if not found or found == "local":
        raise SelectionError(
            "--engine dask computes on a cluster that runs already; give its address by --address or "
            "DASK_SCHEDULER_ADDRESS, or use --engine local"
        )
    return found


def dask_rows(tasks: Sequence[Task], address: str, functions: Functions = POINT) -> Iterator[SweepRow]:
    """Yield the rows of tasks as a cluster of dask completes them."""
    try:
        from distributed import Client
    except ImportError:
        raise MissingExtraError("--engine dask", "dask", otherwise="; --engine local needs nothing") from None
    try:
        client = Client(address)
    except (OSError, RuntimeError, ValueError) as error:
        reason = one_line(f"{type(error).__name__}: {error}", limit=200)
        raise SelectionError(
            f"dask cannot reach the cluster at {address}: {reason}; check --address, or use --engine local"
        ) from None
    try:
        executor = client.get_executor(pure=False)
        in_groups = sorted(tasks, key=lambda task: task.group)  # a worker keeps the last traces
        futures = {executor.submit(compute_apart, task.to_json(), functions): task for task in in_groups}
        for future in as_completed(list(futures)):
            task, failure = futures.pop(future), future.exception()
            if failure is None:
                yield SweepRow.from_line(future.result())
            else:
                yield task.row(outcome=FAILED, error=one_line(f"its worker ended: {type(failure).__name__}"))
    finally:
        client.close()  # which cancels what is not computed yet
