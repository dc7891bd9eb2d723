"""The engines of a sweep: processes of this machine, a cluster of ray, or one of dask; all run the same function."""

from __future__ import annotations

import os
import pkgutil
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
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
    Raises RuntimeError if workers end before they are ready.
    """
    with _starting(functions) as start:
        yield from Pool(tasks, start, functions).rows(workers)


@contextmanager
def _starting(functions: Functions) -> Iterator[Callable[[], Child | ForkedChild]]:
    """Yield the function that starts a worker, forked from a process that has imported what all of them need."""
    if not can_fork():
        yield lambda: Child(ENTRY)
        return
    with closing(ForkServer(functions.load, ENTRY)) as server:
        yield server.start


def ray_rows(
    tasks: Sequence[Task], workers: int, address: str | None, functions: Functions = POINT
) -> Iterator[SweepRow]:
    """Yield the rows of tasks as a cluster of ray completes them.

    The cluster is that at `address` or in RAY_ADDRESS, else a local one with this number of workers.
    """
    try:
        import ray
    except ImportError:
        raise MissingExtraError("--engine ray", "ray", otherwise="; --engine local needs nothing") from None
    is_own = not address and not os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False} if is_own else {}
    with _explained("ray", address):
        ray.init(address="local" if is_own else address, log_to_driver=False, logging_level="ERROR", **options)
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


def dask_rows(
    tasks: Sequence[Task], workers: int, address: str | None, functions: Functions = POINT
) -> Iterator[SweepRow]:
    """Yield the rows of tasks as a cluster of dask completes them.

    The cluster is that at `address` or in DASK_SCHEDULER_ADDRESS, else a local one with this number of workers.
    """
    try:
        import dask
        from distributed import Client, LocalCluster, as_completed
    except ImportError:
        raise MissingExtraError("--engine dask", "dask", otherwise="; --engine local needs nothing") from None
    address = address or dask.config.get("scheduler-address", None)
    dask.config.set({"distributed.scheduler.allowed-failures": ATTEMPTS - 1})  # of a local cluster
    with _explained("dask", address):
        cluster = None if address else LocalCluster(
            n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=":0"
        )  # fmt: skip
        client = Client(address or cluster)
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
        if cluster is not None:
            cluster.close()


def _by_group(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks with those of a group next to each other: a worker keeps the last traces."""
    return sorted(tasks, key=lambda task: task.group)


@contextmanager
def _explained(engine: str, address: str | None) -> Iterator[None]:
    """Raise SelectionError for a cluster that does not answer."""
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        place = f"the cluster at {address}" if address else "a local cluster"
        reason = one_line(f"{type(error).__name__}: {error}", limit=200)
        raise SelectionError(
            f"{engine} cannot reach {place}: {reason}; check --address, or use --engine local"
        ) from None


def _lost(task: Task, error: BaseException) -> SweepRow:
    """Return the row of a task whose worker on the cluster ended."""
    return task.row(outcome=FAILED, error=one_line(f"its worker ended: {type(error).__name__}"))
