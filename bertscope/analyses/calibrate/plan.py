"""The points of `calibrate`. Nothing here needs torch.

The grid is no full product: it has base points, changes of one factor at a time around them, and pairs of factors that
interact in memory or time. The factors: model, length, attention and its kernel, precision, checkpointing,
optimizer, mode, segments of the allocator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bertscope.reports.calibration import CONTEXT, LIMIT, RATES, STEP, WORKSPACES, CalibrationPoint
from bertscope.settings.checkpointing import CHEAPEST_FIRST, FULL, NONE
from bertscope.settings.optimizers import OPTIMIZERS
from bertscope.settings.run_config import AUTOCAST, KERNELS, RunConfig
from bertscope.units import BF16, FP16, FP32

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
