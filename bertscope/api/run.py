"""`bertscope.run`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any

from bertscope.api.memory import gpu_for
from bertscope.api.requests import public_function, request_of, resolved
from bertscope.dry_run.script import ScriptRun, dry_run, fitted, starting_runs
from bertscope.errors import BertscopeError, SelectionError
from bertscope.gpus import CONTEXT_BYTES
from bertscope.reports.run import ENDED_BY, RunFitReport, RunReport
from bertscope.reports.step import ByteRange
from bertscope.settings.request import Request

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertscope.settings.keywords import DryRunSettings


@public_function()
def run(
    script: str | PathLike[str] | Callable[[], Any] | Request,
    args: Sequence[Any] = (),
    *,
    module: bool = False,
    fit: str = "",
    **settings: Unpack[DryRunSettings],
) -> RunReport | RunFitReport:
    """Run a training script, unchanged, on a simulated GPU, and return its peak memory with the line of code.

    The script's code runs in its process, with `args`; with `module` it is a module's name. What it puts
    on `cuda` has no values there. A function runs in this process, which must not have run a backward pass before, and
    without a sandbox. `fit` is `NAME=low..high`: find a script argument's largest value that fits. Raises
    SelectionError and SourceError for a wrong question, BertscopeError with the line for an error in the script, and
    WorkerError where the simulated GPU cannot be installed, an operator has no rule, or the time ends.

    >>> report = bertscope.run("train.py", gpu="t4")
    >>> report.answer, report.peak.phase, report.peak.line
    ('yes', 'evaluation', 'train.py:33')
    """
    request = request_of("run", script, settings)
    code: Any = request.subject
    ((run_config, limit, dry),) = resolved(request)
    gpu = gpu_for(limit, None)
    budget = gpu.memory_bytes if gpu is not None else limit.budget
    low, high = CONTEXT_BYTES if limit.context is None else (limit.context, limit.context)
    low, high = (gpu.context_low_bytes, gpu.context_high_bytes) if gpu is not None else (low, high)
    if budget is not None and budget <= high:
        raise request.error("{budget} holds not even the context of CUDA; give more", "budget")
    wanted = ScriptRun(
        script=code.__name__ if callable(code) else os.fspath(code),
        folder=os.getcwd() if callable(code) or module else os.path.dirname(os.path.abspath(code)),
        arguments=tuple(map(str, args)),
        is_module=module, steps=dry.steps, gpu=gpu, budget_bytes=budget,
        limit_bytes=None if budget is None else budget - high,
        context=ByteRange(low_bytes=low, high_bytes=high), margin=limit.margin, network=dry.network,
        expandable_segments=run_config.expandable_segments, memory_limit_bytes=dry.memory_limit,
        wants_snapshot="snapshot" in (request.wants or ()),
    )  # fmt: skip
    if callable(code):
        options = {"args": args, "module": module, "fit": fit}
        options |= {name: name in request.named for name in ("network", "seeds", "sandbox", "memory_limit", "timeout")}
        if unused := next((name for name, value in options.items() if value), ""):
            raise SelectionError(f"{unused} is for a script, and a function runs in this process; leave it out")
        from bertscope.dry_run.child import run_here  # imports torch

        return request.answer(run_here(code, wanted))
    if fit and dry.seeds > 1:
        raise request.error("{fit} searches with one seed; leave {seeds} out", "seeds")
    if fit and budget is None:
        raise request.error("{fit} needs a limit; give {gpu}, such as t4, or {budget}, such as 16GiB", "gpu")
    with starting_runs(wanted) as start:
        once = partial(dry_run, start=start, timeout_seconds=dry.timeout, is_contained=dry.sandbox)
        if fit and budget is not None:
            return request.answer(fitted(wanted, fit, lambda one: once(one)[0], budget))
        report, snapshot = once(replace(wanted, seed=0 if dry.seeds > 1 else None))
        if report.failure and len(report.refused_bytes) == 1:  # without a limit it shows what it needs
            with suppress(BertscopeError):
                unlimited = once(replace(wanted, limit_bytes=None, wants_snapshot=False))[0]
                report = replace(unlimited, **{name: getattr(report, name) for name in ENDED_BY})
        reports = (once(replace(wanted, seed=seed, wants_snapshot=False))[0] for seed in range(1, dry.seeds))
        histories = report.histories + tuple(history for other in reports for history in other.histories)
        return request.answer(replace(report, histories=histories), snapshot=snapshot)
