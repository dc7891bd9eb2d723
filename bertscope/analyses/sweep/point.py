"""One point of a sweep: a task in, its row out, as plain data. Each engine runs this function and no other."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from bertscope.analyses.sweep.grid import Task, versions
from bertscope.errors import BertscopeError, MissingExtraError, one_line
from bertscope.memory.parallel.collectives import traffic
from bertscope.memory.simulator import Simulator
from bertscope.memory.summary import device_cost, on_card, step_cost
from bertscope.memory.trace import SMALLEST
from bertscope.reports.base import FAILED
from bertscope.reports.sweep import REFUSED, SweepRow
from bertscope.sources.find import source_from_data
from bertscope.tracing.saved import choose_threads

KEPT_MODELS = 4  # whose traces a worker keeps


def load_torch() -> None:
    """Import what every point needs, before a process forks its workers."""
    from bertscope.tracing.fake_tensors import load_fake_tensors

    load_fake_tensors()
    gc.collect()
    gc.freeze()  # collections over torch's objects take as long as an estimate


def load_nothing() -> None:
    """Import nothing: what was traced before is kept, and a point that lacks something imports torch itself."""


def are_kept(tasks: Sequence[Task]) -> bool:
    """Return True if the cache has what all points need."""
    kinds = {}
    for task in tasks:
        run = replace(on_card(task.run_config, task.card), batch=min(task.run_config.batch, SMALLEST))
        kinds[task.group[0], task.threads, run] = task
    return all(_steps_of(task).is_kept(run, threads) for (_, threads, run), task in kinds.items())


def _steps_of(task: Task) -> Simulator:
    return _steps(task.source[0], json.dumps(task.source[1]), task.threads, task.permits)


def compute(text: str) -> str:
    """Return the row of a task, both as lines of JSON; an error of the task is a row too."""
    task = Task.from_json(text)
    try:
        row = _row(task)
    except MissingExtraError as error:
        row = task.row(outcome=FAILED, error=str(error))
    except BertscopeError as error:
        row = task.row(outcome=REFUSED, error=str(error))
    except Exception as error:
        row = task.row(outcome=FAILED, error=one_line(f"{type(error).__name__}: {error}"))
    return row.to_line()


@lru_cache(maxsize=KEPT_MODELS)
def _steps(kind: str, data: str, threads: int, permits: tuple[str, ...]) -> Simulator:
    """Return the steps of a model, which its points with so many threads share: each thread has temporaries."""
    return Simulator(source_from_data(kind, json.loads(data), permits))


def _row(task: Task) -> SweepRow:
    here = versions(*task.versions)
    if here != task.versions:
        found, asked = (", ".join(map(" ".join, named.items())) for named in (here, task.versions))
        return task.row(outcome=FAILED, error=f"the worker has {found}; the sweep began with {asked}")
    choose_threads(task.threads)
    steps = _steps_of(task)
    run_config = on_card(task.run_config, task.card)
    facts, trace = steps.facts(run_config), steps.trace(run_config)
    calls = traffic(trace.collectives, {}, facts.buckets, run_config.parallelism, run_config.accumulate)
    moved: dict[str, int] = {}
    for call in calls:
        moved[call.collective] = moved.get(call.collective, 0) + call.full_bytes
    cost = step_cost(trace, facts.rows, **device_cost(trace, run_config, task.card))
    memory = task.card or task.budget_bytes
    if memory is not None:
        cost = steps.limited(run_config, memory, task.context_bytes).cost(run_config, cost)
    return task.row(
        cost=replace(cost, step_flops=steps.flops(run_config)),
        phases={moment.phase: moment.live_bytes for moment in trace.peaks()},
        traffic=moved,
        sent_bytes=sum(call.sent_bytes for call in calls) if run_config.parallelism.world_size > 1 else None,
        parameters=facts.params,
    )
