"""The workers of a sweep: processes that compute one task after another, and the pool of those of this machine."""

from __future__ import annotations

import json
import os
import pkgutil
import selectors
import signal
import subprocess
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bertscope.analyses.memory.child import Child, ForkedChild, child_command, die_with_parent, output_for_parent
from bertscope.analyses.sweep.tasks import Task
from bertscope.errors import WorkerError, one_line
from bertscope.reports.base import FAILED
from bertscope.reports.sweep import SweepRow

ATTEMPTS = 2  # a point whose worker ends is computed once more
_STARTS = 3  # workers that end before they are ready, one after another, before the sweep stops
_CHUNK = 2**16
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


class _Worker:
    """A process of the pool and the task that it computes."""

    def __init__(self, child: Child | ForkedChild, functions: Functions) -> None:
        self.child = child
        self.task: Task | None = None
        self.is_ready = False
        self.received, self.last_words = b"", b""
        self.send(json.dumps(vars(functions)))

    def send(self, line: str) -> None:
        """Write a line; a process that has ended is noticed when its output ends."""
        with suppress(OSError):
            self.child.stdin.write(line.encode() + b"\n")  # type: ignore[union-attr]
            self.child.stdin.flush()  # type: ignore[union-attr]

    def end(self) -> str:
        """Wait for the process, and return the reason of its end in a few words."""
        try:
            code = self.child.wait(_SECONDS)
        except subprocess.TimeoutExpired:  # it has only closed its output
            self.child.kill_group()
            code = self.child.wait()
        self.last_words += _rest(self.child.stderr)
        words = self.last_words.decode(errors="replace").strip().splitlines()
        return f"{_reason(code)}: {one_line(words[-1], limit=200)}" if words else _reason(code)


def _rest(stream: Any) -> bytes:
    """Return what is left in a pipe; a process that outlives the worker may still hold its other end."""
    os.set_blocking(stream.fileno(), False)
    found = b""
    with suppress(BlockingIOError):
        while data := os.read(stream.fileno(), _CHUNK):
            found += data
    return found


class Pool:
    """Processes that compute tasks; `start` starts one."""

    def __init__(self, tasks: Sequence[Task], start: Callable[[], Child | ForkedChild], functions: Functions) -> None:
        self.queue, self.start, self.functions = Queue(tasks), start, functions
        self.attempts: dict[str, int] = defaultdict(int)
        self.in_vain = 0  # starts one after another
        self.workers: list[_Worker] = []
        self.children: list[Child | ForkedChild] = []  # those that have ended too
        self.selector = selectors.DefaultSelector()

    def rows(self, workers: int) -> Iterator[SweepRow]:
        """Yield the row of each task, in the order in which the workers complete them."""
        try:
            for _ in range(min(workers, len(self.queue))):
                self._start()
            while self.workers:
                for key, _ in self.selector.select():
                    worker, is_output = key.data
                    if worker not in self.workers:
                        continue
                    data = os.read(key.fd, _CHUNK)
                    if not is_output:
                        worker.last_words = (worker.last_words + data)[-_CHUNK:]
                        if not data:
                            self.selector.unregister(key.fd)
                    elif data:
                        yield from self._received(worker, data)
                    else:
                        yield from self._ended(worker)
        finally:
            for child in self.children:
                if child.returncode is None:
                    child.kill_group()
            for child in self.children:
                child.wait()
            self.selector.close()

    def _start(self) -> None:
        child = self.start()
        self.children.append(child)
        worker = _Worker(child, self.functions)
        self.workers.append(worker)
        self.selector.register(worker.child.stdout, selectors.EVENT_READ, (worker, True))  # type: ignore[arg-type]
        self.selector.register(worker.child.stderr, selectors.EVENT_READ, (worker, False))  # type: ignore[arg-type]

    def _received(self, worker: _Worker, data: bytes) -> Iterator[SweepRow]:
        """Yield the row that a worker has sent, and give it the next task."""
        *lines, worker.received = (worker.received + data).split(b"\n")
        for line in lines:
            worker.task, worker.is_ready, self.in_vain = None, True, 0
            if line.decode() != _READY:
                yield SweepRow.from_line(line)
            worker.task = self.queue.next(worker)
            if worker.task is None:
                self._remove(worker)
            else:
                worker.send(worker.task.to_json())

    def _ended(self, worker: _Worker) -> Iterator[SweepRow]:
        """Replace a worker that ended by itself; yield a row if it was the last attempt at its task."""
        self._remove(worker)
        words, task = worker.end(), worker.task
        if task is not None:
            self.attempts[task.key] += 1
            if self.attempts[task.key] < ATTEMPTS:
                self.queue.again(task)
            else:
                yield task.row(outcome=FAILED, error=f"its worker ended {ATTEMPTS} times, {words}")
        elif not worker.is_ready:
            self.in_vain += 1
            if self.in_vain == _STARTS:
                raise WorkerError(
                    f"{_STARTS} workers ended before their first point, {words}; free memory, or use fewer --workers"
                )
        if len(self.queue):
            self._start()

    def _remove(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        self.queue.busy.pop(worker, None)
        for stream in (worker.child.stdout, worker.child.stderr):
            with suppress(KeyError):
                self.selector.unregister(stream)  # type: ignore[arg-type]
        with suppress(OSError):
            worker.child.stdin.close()  # type: ignore[union-attr]  # the end of a worker without a task


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
        reason = _reason(child.process.wait())
    return Task.from_json(text).row(outcome=FAILED, error=f"its worker ended {ATTEMPTS} times, {reason}").to_line()


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


def _reason(code: int) -> str:
    """Return the reason of the end of a process in a few words."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
