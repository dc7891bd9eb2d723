"""The child process of `calibrate`, which measures one point.

It prepares on the CPU all that needs no card (the import of torch, the estimate, the search of a batch) while another
child measures, and starts to use the card when its parent says so. A process measures one point only: the segments
of the allocator, the workspaces and the loaded kernels of an earlier point would stay.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from bertscope.analyses.calibrate.session import CUDNN, PRECISIONS, TF32, run_config
from bertscope.analyses.memory.profile_job import set_up_process
from bertscope.processes.child import sender
from bertscope.reports.base import FAILED
from bertscope.reports.calibration import (
    CONTEXT,
    COPY,
    LIMIT,
    MEASURED,
    RATES,
    SKIPPED,
    STEP,
    WORKSPACES,
    CalibrationPoint,
    CalibrationRow,
)
from bertscope.reports.json import typed
from bertscope.units import BF16, FP16
from bertscope.units import PRECISIONS as DTYPES

TIMED_STEPS = 5
_SQUARE = 8192  # of the matrices for the rates: 256 MiB in fp32
_COPIED_BYTES = 2**30
_REPEATS = 10
_SIDE = 1024  # of the matrices for the workspaces
_BLOCK = 512  # bytes, to which the allocator rounds
_SHARE = 0.9  # of the card's memory that an estimate may need
_WITHOUT_KERNEL = ("No available kernel", "No viable backend")  # torch's sdp_utils.cpp, attention.cpp


def work() -> None:
    """Read the point and the card from standard input, prepare, wait for the word to go, and measure."""
    from bertscope.analyses.calibrate.card import Card

    say = sender()
    set_up_process()
    gc.disable()  # until the point is measured: collections over torch's objects double the time of an estimate
    measure_point(sys.stdin.buffer.readline, say, Card())


def measure_point(read: Callable[[], bytes], say: Callable[[str, Any], None], card: Any) -> None:
    """Measure the point of the first line, which is empty for the observer of the free memory."""
    job = json.loads(read())
    if job["point"] is None:
        _observe(read, say, card)
        return
    from bertscope.analyses.calibrate.card import hidden_card

    row = CalibrationRow(point=typed(CalibrationPoint, job["point"], "point"))
    try:
        with hidden_card():
            prepared = Preparation(row, tuple(job["capability"]), job["memory_bytes"])
        say("ready", None)
        words = read().split()
        if words:
            gc.enable()
            gc.collect()
            say("row", _measured(prepared, card, int(words[1])))
    except Exception as error:
        say("row", replace(row, outcome=FAILED, reason=f"{type(error).__name__}: {error}"[:300]))


def _observe(read: Callable[[], bytes], say: Callable[[str, Any], None], card: Any) -> None:
    """Send the machine, then the free memory of the device for each line."""
    try:
        card.start()
        say("machine", card.machine())
        while read():
            say("free", card.free_bytes())
    except Exception as error:
        say("failed", str(error))


class Preparation:
    """The estimate of a point, its run and its model, without the card."""

    def __init__(self, row: CalibrationRow, capability: tuple[int, int], memory_bytes: int) -> None:
        self.row, self.memory_bytes = row, memory_bytes
        self.source: Any = None
        if row.point.kind not in (STEP, LIMIT):
            return
        from bertscope.analyses.calibrate.step_time import step_work
        from bertscope.analyses.memory.fit import Fitter
        from bertscope.analyses.memory.kernels.overhead import Overhead, workspace_bytes
        from bertscope.analyses.memory.steps import Steps
        from bertscope.analyses.memory.summary import allocator_bytes
        from bertscope.sources.find import load

        point = row.point
        self.source = load(point.model, architecture="BertForMaskedLM", attention=point.attention)
        self.run_config = run_config(point, capability)
        workspaces = workspace_bytes(self.run_config, capability)
        if point.kind == LIMIT:
            found = Fitter(Steps(self.source), point.limit_bytes, Overhead(workspaces)).row(self.run_config)
            self.run_config = replace(self.run_config, batch=found.batch + point.more)
            self.row = replace(row, batch=self.run_config.batch)
            return
        trace = Steps(self.source).trace(self.run_config)
        allocated, reserved = allocator_bytes(trace, self.run_config, workspaces)
        self.row = replace(
            row,
            estimated_allocated_bytes=allocated,
            estimated_reserved_bytes=reserved,
            work=step_work(self.source, self.run_config),
            batch=point.batch,
        )

    @property
    def is_too_large(self) -> bool:
        """Return True if the card has not enough memory for the estimate."""
        most = max(self.row.estimated_reserved_bytes or 0, self.row.point.limit_bytes)
        return most > _SHARE * self.memory_bytes


def _measured(prepared: Preparation, card: Any, free_before_bytes: int) -> CalibrationRow:
    """Return the row with its measurements; skipped if torch has no such kernel or the card too little memory."""
    if prepared.is_too_large:
        return replace(prepared.row, outcome=SKIPPED, reason="the card has too little memory for it")
    kind = prepared.row.point.kind
    measure = {CONTEXT: _context, WORKSPACES: _workspaces, RATES: _rates, STEP: _step, LIMIT: _at_limit}[kind]
    try:
        card.start()
        row: CalibrationRow = measure(prepared, card)
    except RuntimeError as error:
        if any(words in str(error) for words in _WITHOUT_KERNEL):
            return replace(prepared.row, outcome=SKIPPED, reason="torch has no such kernel for this card")
        raise
    outside = max(free_before_bytes - card.free_bytes() - card.reserved_bytes(), 0)
    return replace(row, outcome=MEASURED, context_bytes=outside, smi_bytes=card.smi_bytes())


def _context(prepared: Preparation, card: Any) -> CalibrationRow:
    """Return the row as it is: the smallest tensor exists already."""
    return prepared.row


@contextmanager
def _products_in(precision: str) -> Iterator[None]:
    """Have matrix products of fp32 tensors run in TF32 or not."""
    from bertscope.torch_access import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == TF32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _dtype(precision: str) -> Any:
    from bertscope.torch_access import torch

    return getattr(torch, DTYPES[precision].torch_name) if precision in DTYPES else torch.float32


def _workspaces(prepared: Preparation, card: Any) -> CalibrationRow:
    """Return the growth of the allocated bytes by products, and by cuDNN's attention, in forward and in backward."""
    from bertscope.analyses.calibrate.card import chosen_kernel
    from bertscope.torch_access import torch

    precision = prepared.row.point.precision
    options: dict[str, Any] = {"device": card.device, "dtype": _dtype(precision), "requires_grad": True}
    left, right = (torch.randn(_SIDE, _SIDE, **options) for _ in range(2))
    bias, query = torch.randn(_SIDE, **options), torch.randn(4, 8, 128, 64, **options)
    live: list[Any] = [left, right, bias, query]
    found: dict[str, int] = {}

    def note(name: str, *new: Any) -> None:
        """Note the bytes that are neither of a tensor nor noted before."""
        live.extend(new)
        card.synchronize()
        tensors = sum(-(-tensor.numel() * tensor.itemsize // _BLOCK) * _BLOCK for tensor in live)
        found[name] = max(card.allocated_bytes() - started - tensors - sum(found.values()), 0)

    card.synchronize()
    started = card.allocated_bytes() - sum(tensor.numel() * tensor.itemsize for tensor in live)
    functional = torch.nn.functional
    with _products_in(precision):
        product = left @ right
        note("cuBLAS forward", product)
        sums = functional.linear(left, right, bias)
        note("cuBLASLt forward", sums)
        torch.autograd.backward(product, torch.ones_like(product))
        note("cuBLAS backward", left.grad, right.grad)
        torch.autograd.backward(sums, torch.ones_like(sums))
        note("cuBLASLt backward", bias.grad)
        if precision in (FP16.name, BF16.name):
            with suppress(RuntimeError), chosen_kernel(CUDNN):  # there may be no such kernel
                out = functional.scaled_dot_product_attention(query, query, query)
                note("cuDNN forward", out)
                torch.autograd.backward(out, torch.ones_like(out))
                note("cuDNN backward", query.grad)
    forward, backward = (sum(size for name, size in found.items() if name.endswith(way)) for way in _WAYS)
    return replace(prepared.row, workspaces=found, workspace_forward_bytes=forward, workspace_backward_bytes=backward)


_WAYS = ("forward", "backward")


def _rates(prepared: Preparation, card: Any) -> CalibrationRow:
    """Return the FLOP/s of a large product in each precision, and the bytes per second of a large copy."""
    from bertscope.torch_access import torch

    side = min(_SQUARE, int((prepared.memory_bytes / 64) ** 0.5) // 128 * 128)
    rates = {}
    for precision in PRECISIONS:
        one, other = (torch.randn(side, side, device=card.device, dtype=_dtype(precision)) for _ in range(2))
        with _products_in(precision), torch.no_grad():
            rates[precision] = 2 * side**3 / _seconds(lambda: one @ other, card)  # noqa: B023 it runs now
    size = min(_COPIED_BYTES, prepared.memory_bytes // 8)
    source, target = (torch.zeros(size, device=card.device, dtype=torch.uint8) for _ in range(2))
    rates[COPY] = 2 * size / _seconds(lambda: target.copy_(source), card)
    return replace(prepared.row, rates=rates)


def _seconds(call: Callable[[], Any], card: Any) -> float:
    """Return the time of one of several calls, after some that are not counted."""
    for _ in range(3):
        call()
    card.synchronize()
    started = time.perf_counter()
    for _ in range(_REPEATS):
        call()
    card.synchronize()
    return (time.perf_counter() - started) / _REPEATS


@contextmanager
def _model_step(prepared: Preparation, card: Any) -> Iterator[Any]:
    """Yield the real step of the point on the card."""
    from bertscope.analyses.calibrate.card import chosen_kernel
    from bertscope.analyses.memory.estimate import named_inputs
    from bertscope.analyses.memory.step import ModelStep, real_inputs, run_model
    from bertscope.torch_access import torch

    given, point = prepared.run_config, prepared.row.point
    torch.manual_seed(0)
    with (
        prepared.source.confined(),
        _products_in(point.precision),
        chosen_kernel(point.kernel),
    ):
        model: Any = run_model(prepared.source, given, card.device)
        card.forget_build()
        inputs, loss = named_inputs(real_inputs(model, given, card.device), None)
        yield ModelStep(model, inputs, given, card.device, loss)


def _step(prepared: Preparation, card: Any) -> CalibrationRow:
    """Return the peaks of the third step, the reserved bytes since the first one, and the times of later steps."""
    from bertscope.analyses.memory.profiler_run import step_seconds

    with _model_step(prepared, card) as step:
        step.run_first_steps()
        card.synchronize()
        reserved = card.peaks()[1]
        card.reset_peaks()
        step.run()
        card.synchronize()
        peaks = card.peaks()
        seconds = tuple(step_seconds(step) for _ in range(TIMED_STEPS))
    return replace(prepared.row, allocated_bytes=peaks[0], reserved_bytes=max(reserved, peaks[1]), step_seconds=seconds)


def _at_limit(prepared: Preparation, card: Any) -> CalibrationRow:
    """Return if three steps have enough memory under the limit."""
    card.limit(prepared.row.point.limit_bytes, prepared.memory_bytes)
    try:
        with _model_step(prepared, card) as step:
            step.run_first_steps()
            step.run()
            card.synchronize()
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        return replace(prepared.row, ran=False, reserved_bytes=card.peaks()[1])
    return replace(prepared.row, ran=True, reserved_bytes=card.peaks()[1])
