"""The parent of `calibrate`: it has a new process measure each point, one at a time, while the next ones prepare."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from bertscope.errors import SelectionError, one_line
from bertscope.processes.child import Child
from bertscope.processes.worker import ENDED, Worker
from bertscope.reports.base import FAILED
from bertscope.reports.calibration import (
    CONTEXT,
    LIMIT,
    MEASURED,
    PLANNED,
    RATES,
    SKIPPED,
    STEP,
    WORKSPACES,
    CalibrationPoint,
    CalibrationReport,
    CalibrationRow,
    Machine,
)
from bertscope.reports.json import typed
from bertscope.settings.checkpointing import CHEAPEST_FIRST, FULL, NONE
from bertscope.settings.optimizers import OPTIMIZERS
from bertscope.settings.run_config import AUTOCAST, KERNELS, RunConfig
from bertscope.units import BF16, FP16, FP32

POINT_SECONDS = 60.0  # of one point; most take 3 s
_FIRST_SECONDS = 300.0  # of the first import of torch for CUDA, which reads some GB that no cache has yet
# Processes that load torch and estimate while another one measures: a quarter of the processors at most.
_PREPARED = max(1, min(4, (os.cpu_count() or 1) // 4))
_MESSAGES: dict[str, Any] = {
    "machine": Machine, "free": int, "ready": type(None), "row": CalibrationRow, "failed": str,
}  # fmt: skip
# Variables that change what torch's allocator and libraries do; the processes measure torch's defaults.
_REMOVED = (
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE",
    "TORCH_CUBLAS_WORKSPACE_CACHE", "TORCH_BLAS_PREFER_CUBLASLT", "DISABLE_ADDMM_CUDA_LT", "PYTORCH_TUNABLEOP_ENABLED",
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_CUDNN_SDPA_PREFERRED",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
)  # fmt: skip
Start = Callable[[dict[str, str | None]], Any]


def planned_report() -> CalibrationReport:
    """Return the plan."""
    return CalibrationReport(machine=None, rows=tuple(CalibrationRow(point=point) for point in points()))


def _start(environment: dict[str, str | None]) -> Any:
    return Child("bertscope.analyses.calibrate.worker:work", environment)


class Session:
    """A calibration of the first CUDA device; `start` starts a process with variables of its environment.

    Use it in a `with` statement, which ends the processes. Raises SelectionError if no device answers.
    """

    def __init__(self, *, timeout_seconds: float = POINT_SECONDS, start: Start | None = None) -> None:
        self.timeout_seconds, self.start = timeout_seconds, start or _start
        self.workers: deque[_PointWorker] = deque()
        self.observer = _PointWorker(None, {}, self.start)
        try:
            kind, content = self.observer.answer(max(timeout_seconds, _FIRST_SECONDS))
            if kind != "machine":
                raise SelectionError(f"no CUDA device answers: {one_line(str(content), limit=300)}")
        except BaseException:
            self.close()
            raise
        self.machine: Machine = content

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        for worker in (*self.workers, self.observer):
            worker.stop()

    def begun(self, earlier: CalibrationReport | None) -> CalibrationReport:
        """Return the report to continue: the plan, with the results of an earlier one on this machine.

        A point that failed is measured again.
        """
        rows = planned_report().rows
        known = {}
        if earlier is not None and earlier.machine is not None and earlier.machine.is_like(self.machine):
            known = {row.point: row for row in earlier.rows if row.outcome in (MEASURED, SKIPPED)}
        return CalibrationReport(machine=self.machine, rows=tuple(known.get(row.point, row) for row in rows))

    def results(
        self, report: CalibrationReport, progress: Callable[[str], None] = lambda text: None
    ) -> Iterator[CalibrationReport]:
        """Measure the points that are left; yield the report after each."""
        left = [row for row in report.rows if row.outcome == PLANNED]
        cannot = {row.point: why_not(row.point, self.machine.capability) for row in left}
        waiting = iter([row.point for row in left if not cannot[row.point]])
        try:
            for row in left:
                progress(row.name)
                if reason := cannot[row.point]:
                    found = replace(row, outcome=SKIPPED, reason=reason)
                else:
                    more = islice(waiting, _PREPARED + 1 - len(self.workers))
                    self.workers.extend(self._prepare(point) for point in more)
                    found = self._measured(row, self.workers[0])
                    self.workers.popleft().stop()
                report = report.with_row(found)
                yield report
        finally:
            while self.workers:
                self.workers.pop().stop()

    def _prepare(self, point: CalibrationPoint) -> _PointWorker:
        worker = _PointWorker(point, {**dict.fromkeys(_REMOVED), **_allocator(point)}, self.start)
        worker.send(
            {"point": vars(point), "capability": self.machine.capability, "memory_bytes": self.machine.memory_bytes}
        )
        return worker

    def _measured(self, row: CalibrationRow, worker: _PointWorker) -> CalibrationRow:
        """Return the result of a process; a failure if it ends or is silent for too long."""
        kind, content = worker.answer(self.timeout_seconds)
        if kind == "ready":
            self.observer.send("free")
            free, before = self.observer.answer(self.timeout_seconds)
            if free != "free":
                return replace(row, outcome=FAILED, reason=f"the device does not answer: {one_line(str(before))}")
            worker.send(f"go {before}")
            kind, content = worker.answer(self.timeout_seconds)
        if kind == "row" and content.point == row.point:
            return content  # type: ignore[no-any-return]
        return replace(row, outcome=FAILED, reason=one_line(str(content), limit=300))


def _allocator(point: CalibrationPoint) -> dict[str, str]:
    """Return the variable with the settings of the allocator, which torch reads before the first allocation."""
    return {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if point.expandable else {}


class _PointWorker(Worker):
    """A process of the calibration; without a point the observer of the free memory."""

    def __init__(self, point: CalibrationPoint | None, environment: dict[str, str | None], start: Start) -> None:
        super().__init__(start(environment), _message)
        if point is None:
            self.send({"point": None})

    def answer(self, timeout_seconds: float) -> tuple[str, Any]:
        """Return the next message; `failed` with a text if the process ends or is silent."""
        found = self.receive(timeout_seconds)
        if found is None:
            return "failed", f"ran for longer than {timeout_seconds:g} s"
        return ("failed", self.death()) if found[0] == ENDED else found


def _message(line: bytes) -> tuple[str, Any]:
    """Return the kind and the content of a message; raises an error for any other line."""
    kind, content = json.loads(line)
    return kind, typed(_MESSAGES[kind], content, kind)


# ---- the points of `calibrate`. Nothing here needs torch ----


TF32 = "tf32"  # fp32 tensors, whose matrix products run in TF32: torch.set_float32_matmul_precision("high")
PRECISIONS = (FP32.name, TF32, FP16.name, BF16.name)
CUDNN = "cudnn"  # a kernel that only the card's torch can choose; it saves what flash does
_FLASH, _EFFICIENT, _MATH = (name for name in KERNELS if name != RunConfig.sdpa_kernel)
_SELECTIVE = next(name for name in CHEAPEST_FIRST.split(",") if name not in (NONE, FULL))
_WITHOUT_STATE = next(name for name, row in OPTIMIZERS.items() if not row.state)
_TINY, _BASE, _LARGE = "bert-tiny", "bert-base-uncased", "bert-large-uncased"
_INFERENCE = "inference"
_GIB = 2**30


def points() -> tuple[CalibrationPoint, ...]:
    """Return all points in the order of their measurement; the first ones are needed by the others."""
    found = [
        CalibrationPoint(kind=CONTEXT),
        *(CalibrationPoint(kind=WORKSPACES, precision=name) for name in PRECISIONS),
        CalibrationPoint(kind=RATES),
    ]
    return tuple(dict.fromkeys((*found, *_steps(), *_limits())))


def _steps() -> Iterator[CalibrationPoint]:
    """Yield the grid of steps; those that follow a base point differ from it as written."""
    base = CalibrationPoint(
        kind=STEP, model=_BASE, attention="sdpa", precision=FP32.name, checkpointing=NONE, mode=RunConfig.mode,
        optimizer=RunConfig.optimizer, implementation=RunConfig.optimizer_implementation, batch=16, seq=128,
    )  # fmt: skip
    half = replace(base, precision=BF16.name)
    eager = replace(half, attention="eager")
    large = replace(half, model=_LARGE, batch=8)
    tiny = replace(base, model=_TINY, batch=32)
    for point in (base, half):
        yield point
        yield replace(point, model=_TINY, batch=32)
        yield replace(point, model=_LARGE, batch=8)
        yield replace(point, attention="eager")
        yield replace(point, batch=4, seq=512)
        yield replace(point, mode=_INFERENCE)
        yield replace(point, expandable=True)
        yield from (replace(point, kernel=name) for name in (_EFFICIENT, _MATH))
        yield from (replace(point, checkpointing=name) for name in (FULL, _SELECTIVE))
        yield from (replace(point, implementation=name) for name in ("loop", "foreach", "fused"))
        yield replace(point, optimizer=_WITHOUT_STATE)
    yield from (replace(base, precision=name) for name in (TF32, FP16.name))
    yield from (replace(half, kernel=name) for name in (_FLASH, CUDNN))
    # pairs that interact: the scores of eager attention with all that saves or recomputes them; the temporaries of the
    # optimizer with the size of the model; fragmentation with checkpointing
    yield from (replace(eager, checkpointing=name) for name in (FULL, _SELECTIVE))
    yield from (replace(eager, precision=FP16.name), replace(eager, mode=_INFERENCE), replace(eager, batch=4, seq=512))
    yield from (replace(eager, model=_LARGE, batch=8), replace(eager, expandable=True))
    yield from (replace(half, precision=FP16.name, kernel=name) for name in (_FLASH, _EFFICIENT))
    yield from (replace(large, checkpointing=name) for name in (FULL, _SELECTIVE))
    yield from (replace(large, implementation=name) for name in ("loop", "fused"))
    yield from (replace(large, mode=_INFERENCE), replace(large, expandable=True))
    yield from (replace(tiny, attention="eager"), replace(tiny, mode=_INFERENCE))
    yield from (replace(half, checkpointing=FULL, expandable=True), replace(half, mode=_INFERENCE, expandable=True))
    yield replace(base, implementation="loop", expandable=True)
    # the times: enough work that the card is not idle between two operators
    long = replace(base, batch=16, seq=512)
    yield from (replace(long, precision=name) for name in PRECISIONS)
    yield replace(long, checkpointing=FULL)
    yield from (replace(long, precision=BF16.name, checkpointing=name) for name in (FULL, _SELECTIVE))
    yield from (replace(long, precision=BF16.name, model=_LARGE, checkpointing=name) for name in (NONE, FULL))


def _limits() -> Iterator[CalibrationPoint]:
    """Yield the three limits of memory, each with the largest batch of `fit` and with one more."""
    first = CalibrationPoint(
        kind=LIMIT, model=_BASE, attention="sdpa", precision=BF16.name, checkpointing=NONE, mode=RunConfig.mode,
        optimizer=RunConfig.optimizer, implementation=RunConfig.optimizer_implementation, seq=128, limit_bytes=6 * _GIB,
    )  # fmt: skip
    others = (
        replace(first, attention="eager", precision=FP32.name, seq=512, limit_bytes=8 * _GIB),
        replace(first, model=_LARGE, checkpointing=FULL, seq=512, limit_bytes=10 * _GIB),
    )
    for point in (first, *others):
        yield from (point, replace(point, more=1))


def run_config(point: CalibrationPoint, capability: tuple[int, int] = (8, 0)) -> RunConfig:
    """Return the run of a point on a card of this compute capability; a limit has the batch 1, before its search."""
    usual = RunConfig.sdpa_kernel if capability >= (8, 0) else _EFFICIENT  # as gpus.sdpa_kernel
    kernel = _FLASH if point.kernel == CUDNN else point.kernel
    return RunConfig(
        batch=point.batch or 1,
        seq=point.seq,
        mode=point.mode,
        precision=f"{AUTOCAST}{point.precision}" if point.precision in (FP16.name, BF16.name) else FP32.name,
        optimizer=point.optimizer,
        optimizer_implementation=point.implementation,
        checkpointing=point.checkpointing,
        device="cuda",
        sdpa_kernel=kernel or usual,
        expandable_segments=point.expandable,
    )


def why_not(point: CalibrationPoint, capability: tuple[int, int]) -> str:
    """Return why a card of this compute capability cannot run the point; empty if it can.

    Source: as `gpus.sdpa_kernel`, and torch's sdp_utils.cpp for cuDNN's kernel.
    """
    newer = next((name for name in (point.precision, point.kernel) if name in (BF16.name, TF32, _FLASH, CUDNN)), "")
    return f"{newer} needs compute capability 8.0" if newer and capability < (8, 0) else ""
