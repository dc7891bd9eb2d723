"""One point of a sweep: a task in, its row out, as plain data. Each engine runs this function and no other."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from bertscope.analyses.memory.estimate import estimate_memory, on_card
from bertscope.analyses.memory.fit import Fitter, Steps
from bertscope.analyses.memory.kernels.cuda_kernels import overhead
from bertscope.analyses.memory.step import run_model, step_flops
from bertscope.analyses.modules.totals import subject
from bertscope.analyses.parallel.collectives import traffic
from bertscope.analyses.sweep.grid import Task, versions
from bertscope.analyses.tracing.fake_tensors import load_fake_tensors
from bertscope.errors import BertscopeError, MissingExtraError, one_line
from bertscope.reports.base import FAILED
from bertscope.reports.sweep import REFUSED, SweepRow
from bertscope.settings.run_config import RunConfig
from bertscope.sources.find import source_from_data
from bertscope.torch_access import torch

KEPT_MODELS = 4  # whose traces a worker keeps


def load_torch() -> None:
    """Import what every point needs, before a process forks its workers."""
    load_fake_tensors()
    gc.collect()
    gc.freeze()  # collections over torch's objects take as long as an estimate


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


class _SweptModel:
    """The traces and FLOPs of one model, which its points share."""

    def __init__(self, kind: str, data: Mapping[str, Any]) -> None:
        self.source = source_from_data(kind, data)
        self.steps = Steps(self.source)
        self.sequence_flops = lru_cache(maxsize=64)(self._sequence_flops)

    def _sequence_flops(self, run_config: RunConfig) -> int:
        """Return the FLOPs of a step with one sequence."""
        return step_flops(self.source, run_config)

    def flops(self, run_config: RunConfig) -> int:
        """Return the FLOPs of the step: those of one sequence, times the batch."""
        names = ("seq", "mode", "checkpointing", "freeze", "implementation", "input", "accumulate")
        one = RunConfig(batch=1, **{name: getattr(run_config, name) for name in names})
        return run_config.batch * self.sequence_flops(one)


@lru_cache(maxsize=KEPT_MODELS)
def _model(source: str) -> _SweptModel:
    return _SweptModel(*json.loads(source))


def _row(task: Task) -> SweepRow:
    here = versions(*task.versions)
    if here != task.versions:
        found, asked = (", ".join(map(" ".join, named.items())) for named in (here, task.versions))
        return task.row(outcome=FAILED, error=f"the worker has {found}; the sweep began with {asked}")
    torch.set_num_threads(task.threads)
    model = _model(json.dumps(task.source))
    run_config = on_card(task.run_config, task.card)
    built = run_model(model.source, run_config)
    memory = estimate_memory(model.source, run_config, built, model.steps.trace)
    collectives = model.steps.trace(run_config).collectives
    calls = traffic(collectives, {}, built, run_config.parallelism, run_config.accumulate)
    moved: dict[str, int] = {}
    for call in calls:
        moved[call.collective] = moved.get(call.collective, 0) + call.full_bytes
    fits = None
    if task.budget_bytes is not None:
        attention = subject(built, model.source.name).attention
        room = overhead(run_config, task.context_bytes, task.card, attention)
        fits = Fitter(model.steps, task.budget_bytes, room).answer(run_config)
    return task.row(
        fits=fits,
        peak_bytes=memory.peak.peak_bytes,
        phases={phase.phase: phase.peak_bytes for phase in memory.phases},
        parts=memory.peak.parts,
        saved_bytes=memory.kept_bytes,
        reserved_bytes=memory.device.reserved_bytes if memory.device else None,
        traffic=moved,
        sent_bytes=sum(call.sent_bytes for call in calls) if run_config.parallelism.world_size > 1 else None,
        parameters=sum(param.numel() for param in built.parameters()),
        flops=model.flops(run_config),
    )
