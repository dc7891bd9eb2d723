"""The time of a step on a calibrated GPU, from its matrix products and the bytes that its other operators move.

A step without idle time takes the sum of FLOPs / rate over the precisions, plus bytes / bandwidth: elementwise
operators, normalization, softmax, copies and the optimizer read and write memory, which matters for recomputation too.
A small step takes the time in which one thread starts its operators. The rates are measured with large products and a
large copy. One measured step of each precision and strategy of checkpointing corrects for what smaller operators do not
reach: FLOPs alone make recomputation too cheap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bertscope.gpus import Gpu, bandwidth, peak_flops
from bertscope.memory.estimate import named_inputs
from bertscope.memory.fake_run import FakeDevice, StepRecorder
from bertscope.memory.kernels import cuda_semantics
from bertscope.memory.simulator import Simulator
from bertscope.memory.step import STEP_END, ModelStep, meta_inputs, run_model
from bertscope.memory.summary import host_cost
from bertscope.reports.memory import OPTIMIZER
from bertscope.reports.step import StepTime, TimeRange
from bertscope.reports.tool import COPY, CalibrationReport, CardWork
from bertscope.settings.checkpointing import NONE
from bertscope.settings.run_config import FREED, TRAINING, RunConfig
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import operator_name, written_tensors
from bertscope.tracing.fake_tensors import fake_copy, fake_like, fake_tensors
from bertscope.tracing.flops import step_flops
from bertscope.tracing.inputs import running
from bertscope.tracing.log import Call, bytes_moved, cost, tensors
from bertscope.tracing.losses import loss_function
from bertscope.tracing.repeat import RAN, layer_stacks, shortened
from bertscope.units import PRECISIONS

PUBLISHED_RANGE = (1.2, 2.5)
_SHORT_SECONDS = 0.025  # below which a step waits for the CPU that starts its operators
_MOVED, _MOVED_AGAIN = 4, 6  # the times that saved tensors are read or written, without and with recomputation
_NAMES = {row.torch_name: row.name for row in PRECISIONS.values()}


def step_work(source: ModelSource, run_config: RunConfig) -> CardWork:
    """Return the work of one step on CUDA; of equal layers few run, and the others count as the middle one."""
    stacks = layer_stacks(source, checkpointing=run_config.checkpointing, frozen=run_config.freeze)
    repeated = [run.units for stack in stacks for run in stack.runs if run.units > RAN + 1]
    if len(repeated) != 1 or len(stacks) != 1:
        return _work(source, run_config)
    few = (stacks[0].few(RAN), stacks[0].few(RAN + 1))
    some, more = (_work(source.with_layer_counts({stacks[0].field: len(kinds)}),
                        replace(run_config, checkpointing=shortened(run_config.checkpointing, {stacks[0].path: kinds})))
                  for kinds in few)  # fmt: skip
    return _sum(some, _sum(more, some, -1), repeated[0] - RAN)


def predicted(source: ModelSource, run_config: RunConfig, rates: Rates, gpu: Gpu) -> StepTime | None:
    """Return a step's time in one process; None for a precision that was not measured.

    The FLOPs are counted without recomputation.
    """
    precision = run_config.compute_precision
    seconds = rates.seconds(step_work(source, run_config), precision, run_config.checkpointing)
    if not seconds or run_config.parallelism.world_size > 1:
        return None
    tokens = run_config.accumulate * run_config.batch * run_config.texts * run_config.seq
    flops = step_flops(source, run_config.changed(checkpointing=NONE))
    return replace(achieved(seconds, flops, precision, gpu), tokens_per_second=tokens / seconds)


def achieved(seconds: float, flops: int, precision: str, gpu: Gpu | None) -> StepTime:
    """Return a step's time with its FLOPs per second, and with its MFU if the GPU's peak is known."""
    peak, peak_source = (peak_flops(gpu, precision) if gpu else None) or (None, "")
    return StepTime(
        step=TimeRange(low_seconds=seconds, high_seconds=seconds),
        flops=flops,
        flops_per_second=flops / seconds,
        mfu=flops / seconds / peak if peak else None,
        peak_flops=peak,
        peak_source=peak_source,
    )


def data_sheet_seconds(source: ModelSource, run_config: RunConfig, saved_bytes: int, gpu: Gpu) -> TimeRange | None:
    """Return the range of the time of a training step without a calibration; None for one that may be below 25 ms.

    None also for a GPU or a precision without rates. The range holds 97 of 106 published steps of BERT of 25 ms and
    more (docs/accuracy.md), as multiples of FLOPs by the peak, plus four times `saved_bytes`, those without
    checkpointing, by the bandwidth: they are written and read in forward and backward. A recomputation writes and reads
    them once more.
    """
    bound = data_sheet_bound(source, run_config, saved_bytes, gpu)
    low, high = PUBLISHED_RANGE
    if bound is None or low * bound < _SHORT_SECONDS or run_config.mode != TRAINING:
        return None
    return TimeRange(low_seconds=low * bound, high_seconds=high * bound)


def data_sheet_bound(source: ModelSource, run_config: RunConfig, saved_bytes: int, gpu: Gpu) -> float | None:
    """Return a step's seconds at a data sheet's rates; None without rates, and for several ranks."""
    peak, moved = peak_flops(gpu, run_config.compute_precision), bandwidth(gpu)
    if peak is None or moved is None or run_config.parallelism.world_size > 1:
        return None
    times = _MOVED if run_config.checkpointing == NONE else _MOVED_AGAIN
    return step_flops(source, run_config) / peak[0] + times * run_config.accumulate * saved_bytes / moved


@dataclass(frozen=True, kw_only=True)
class Timer:
    """The times of the steps of a model on a GPU: by its calibration, without one by its data sheet."""

    gpu: Gpu
    calibration: CalibrationReport | None
    sequences: int | None = None  # of an epoch
    hour_price: float | None = None
    currency: str = ""

    def byte_flops(self, run_config: RunConfig) -> float:
        """Return the FLOPs of products that take as long as moving a byte; 0 if they were not measured."""
        rates = rates_of(self.calibration) if self.calibration else None
        return rates.products.get(run_config.compute_precision, 0.0) / rates.moved if rates else 0.0

    def time(self, simulator: Simulator, run_config: RunConfig) -> StepTime | None:
        """Return the time of a step and of an epoch; None if it is not known."""
        time: StepTime | None = None
        copied_bytes = host_cost(simulator.trace(run_config), run_config).get("copied_bytes", 0)
        if self.calibration is None:
            plain = run_config.changed(checkpointing=NONE, offload_activations=False)
            span = data_sheet_seconds(simulator.source, run_config, simulator.trace(plain).saved_bytes, self.gpu)
            time = StepTime(step=span.plus(TimeRange.of_copies(copied_bytes))) if span else None
        elif (rates := rates_of(self.calibration)) and not copied_bytes:  # a calibration measures no copies
            time = predicted(simulator.source, run_config, rates, self.gpu)
        if time is None or not self.sequences:
            return time
        priced = replace(time, hour_price=self.hour_price, currency=self.currency)
        return priced.over(-(-self.sequences // (run_config.batch * run_config.accumulate)))


def _sum(one: CardWork, other: CardWork, times: int = 1) -> CardWork:
    names = {**one.matmul_flops, **other.matmul_flops}
    return CardWork(
        matmul_flops={name: one.matmul_flops.get(name, 0) + times * other.matmul_flops.get(name, 0) for name in names},
        moved_bytes=one.moved_bytes + times * other.moved_bytes,
        calls=one.calls + times * other.calls,
    )


def _work(source: ModelSource, run_config: RunConfig) -> CardWork:
    model = run_model(source, run_config)
    inputs = meta_inputs(model, run_config)
    batch, how = named_inputs(inputs, loss_function(run_config))
    with running(source, model, "fake tensors", run_config.input), fake_tensors(), cuda_semantics(run_config):
        step = ModelStep(fake_copy(model).train(not run_config.is_eval), fake_like(batch), run_config, loss=how)
        device = FakeDevice(step)
        device.has_memory = False
        recorder = StepRecorder(step, device, keeps_args=True)
        with recorder.watching():
            step.start(run_config.changed(loop=FREED, accumulate=1))
            step.advance(recorder.recorded, OPTIMIZER, STEP_END)
            work = _sum(CardWork(), _counted(recorder.log.calls), run_config.accumulate)
            if step.optimizer is None:
                return work
            recorder.log.calls.clear()
            recorder.record_update()
            return _sum(work, _counted(recorder.log.calls))


def _counted(log: Sequence[Call]) -> CardWork:
    """Return the work of operators: FLOPs for matrix products, bytes for all others."""
    flops: Counter[str] = Counter()
    moved_bytes, calls = 0, 0
    for call in log:
        operator, args, out = call.operator, call.args, call.out
        role, products, _ = cost(operator, args, call.kwargs, out)
        moved = bytes_moved(operator, args, call.kwargs, out)
        if role == "matmul":
            dtype = tensors((out, args))[0].dtype
            flops[_NAMES.get(dtype, dtype)] += products
        elif operator_name(operator) == "embedding":  # it reads the rows of its ids
            moved_bytes += 2 * out.nbytes + args[1].nbytes
        else:
            moved_bytes += moved + sum(tensor.nbytes for tensor in written_tensors(operator, args))
        calls += bool(moved)
    return CardWork(matmul_flops=dict(flops), moved_bytes=moved_bytes, calls=calls)


@dataclass(frozen=True)
class Rates:
    """A GPU's rates: FLOP/s of products by precision, bytes per second, and operators per second.

    `scale` is the measured over the computed time of one step of each precision and strategy of checkpointing.
    """

    products: dict[str, float]
    moved: float
    calls: float = float("inf")
    scale: dict[tuple[str, str], float] = field(default_factory=dict)

    def seconds(self, work: CardWork, precision: str, checkpointing: str = NONE) -> float | None:
        """Return a step's time in this precision; None for one that was not measured.

        A strategy that was not measured has a step's correction without recomputation.
        """
        busy = self.busy_seconds(work)
        scale = self.scale.get((precision, checkpointing), self.scale.get((precision, NONE)))
        return None if busy is None or scale is None else max(scale * busy, work.calls / self.calls)

    def busy_seconds(self, work: CardWork) -> float | None:
        """Return a step's time by the rates only; None for products without a rate."""
        total = work.moved_bytes / self.moved
        for dtype, flops in work.matmul_flops.items():
            rate = self.products.get(dtype)
            if not rate:
                return None
            total += flops / rate
        return total


def rates_of(report: CalibrationReport) -> Rates | None:
    """Return a calibration's rates; None if the GPU was not measured.

    The step with the longest computed time corrects its precision and strategy. Operators start as fast as in the step
    with the most operators per second.
    """
    products = dict(report.rates)
    moved = products.pop(COPY, 0.0)
    if not moved:
        return None
    rates = Rates(products, moved)
    steps = [(step, step.work, step.median_seconds) for step in report.steps]
    timed = [(step, work, seconds) for step, work, seconds in steps if work is not None and seconds]
    longest: dict[tuple[str, str], float] = {}
    scale: dict[tuple[str, str], float] = {}
    for step, work, seconds in timed:
        busy, key = rates.busy_seconds(work), (step.precision, step.checkpointing)
        if busy and busy > longest.get(key, 0.0):
            longest[key], scale[key] = busy, seconds / busy
    calls = max((work.calls / seconds for _, work, seconds in timed), default=0.0)
    return replace(rates, calls=calls or float("inf"), scale=scale)
