"""The engines of a sweep: processes of this machine, the user's cluster of ray, or that of dask; all run one function.

No engine starts a cluster: those of ray and dask have no authentication, and listen to every user of the machine.
"""

from __future__ import annotations

import os
import pkgutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bertscope.analyses.memory.child import Child, ForkedChild, ForkServer, can_fork
from bertscope.analyses.sweep.pool import ATTEMPTS, POINT, Functions, Pool, be_worker, compute_apart
from bertscope.analyses.sweep.tasks import Task
from bertscope.errors import MissingExtraError, SelectionError, one_line
from bertscope.reports.base import FAILED
from bertscope.reports.sweep import SweepRow

ENTRY = f"{be_worker.__module__}:{be_worker.__name__}"  # of a worker
_SUBMITTED = 1000  # tasks that ray has at one time: it is asked about each of them whenever one is done


def local_rows(tasks: Sequence[Task], workers: int, functions: Functions = POINT) -> Iterator[SweepRow]:
    """Yield the rows of tasks as processes of this machine complete them.

    A worker that ends is replaced; its task is tried again, and has the outcome `failed` if that worker ends too.
    Raises WorkerError if workers end before they are ready.
    """
    with _starting(functions) as start:
        yield from Pool(tasks, start, functions).rows(workers)


@contextmanager
def _starting(functions: Functions) -> Iterator[Callable[[], Child | ForkedChild]]:
    """Yield the function that starts a worker, forked from a process that has imported what all of them need."""
    if not can_fork():
        yield lambda: Child(ENTRY)
        return
    servers = [ForkServer(functions.load, ENTRY)]

    def start() -> ForkedChild:
        """Return a worker of the server, or of a new one if that has ended."""
        if servers[-1].process.poll() is not None:
            servers.append(ForkServer(functions.load, ENTRY))
        return servers[-1].start()

    try:
        yield start
    finally:
        for server in servers:
            server.close()


def cluster_address(engine: str, address: str | None) -> str:
    """Return the address of the user's cluster; raises SelectionError without one."""
    variable = {"ray": "RAY_ADDRESS", "dask": "DASK_SCHEDULER_ADDRESS"}[engine]
    found = address or os.environ.get(variable) or ""
    if not found or found == "local":  # ray would start a cluster
        raise SelectionError(
            f"--engine {engine} computes on a cluster that runs already; give its address by --address or {variable}, "
            "or use --engine local"
        )
    return found


def ray_rows(tasks: Sequence[Task], address: str, functions: Functions = POINT) -> Iterator[SweepRow]:
    """Yield the rows of tasks as a cluster of ray completes them."""
    try:
        import ray
    except ImportError:
        raise MissingExtraError("--engine ray", "ray", otherwise="; --engine local needs nothing") from None
    with _explained("ray", address):
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    try:
        remote = ray.remote(num_cpus=1, max_retries=ATTEMPTS - 1)(pkgutil.resolve_name(functions.compute))
        left, waiting = deque(_by_group(tasks)), dict[Any, Task]()
        while left or waiting:
            while left and len(waiting) < _SUBMITTED:
                task = left.popleft()
                waiting[remote.remote(task.to_json())] = task
            (done,), _ = ray.wait(list(waiting))
            task = waiting.pop(done)
            try:
                row = SweepRow.from_line(ray.get(done))
            except ray.exceptions.RayError as error:
                row = _lost(task, error)
            yield row
    finally:
        ray.shutdown()


def dask_rows(tasks: Sequence[Task], address: str, functions: Functions = POINT) -> Iterator[SweepRow]:
    """Yield the rows of tasks as a cluster of dask completes them."""
    try:
        from distributed import Client, as_completed
    except ImportError:
        raise MissingExtraError("--engine dask", "dask", otherwise="; --engine local needs nothing") from None
    with _explained("dask", address):
        client = Client(address)
    try:
        futures = {
            client.submit(compute_apart, task.to_json(), functions, key=task.key, pure=False): task
            for task in _by_group(tasks)
        }
        for future in as_completed(list(futures)):
            task, error = futures.pop(future), future.exception()
            yield SweepRow.from_line(future.result()) if error is None else _lost(task, error)
    finally:
        client.close()


def _by_group(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks with those of a group next to each other: a worker keeps the last traces."""
    return sorted(tasks, key=lambda task: task.group)


@contextmanager
def _explained(engine: str, address: str) -> Iterator[None]:
    """Raise SelectionError for a cluster that does not answer."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        reason = one_line(f"{type(error).__name__}: {error}", limit=200)
        raise SelectionError(
            f"{engine} cannot reach the cluster at {address}: {reason}; check --address, or use --engine local"
        ) from None


def _lost(task: Task, error: BaseException) -> SweepRow:
    """Return the row of a task whose worker on the cluster ended."""
    return task.row(outcome=FAILED, error=one_line(f"its worker ended: {type(error).__name__}"))
