"""`bertscope.watch`, `TrainerCallback` and `LightningCallback`: a running training, measured next to its estimate.

The optimizer's first step makes its state. On a CPU the recorder sees the second and the third, which is reported; on
CUDA torch's own counters measure the second. The next ones are only timed, and then every hook is gone. An error in
here is a warning.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from inspect import currentframe
from itertools import pairwise
from pathlib import Path
from threading import Lock, get_ident
from typing import Any
from weakref import WeakValueDictionary, ref

from bertscope.api.explain import flops
from bertscope.api.memory import estimate
from bertscope.api.requests import batch_of, module_records, request_of
from bertscope.calibrations import with_saved
from bertscope.dry_run.recording import Recording
from bertscope.errors import BertscopeWarning, SelectionError, one_line
from bertscope.files import write_file
from bertscope.gpus import find_device
from bertscope.measure.profile import calibration_step
from bertscope.measure.profile_job import this_gpu
from bertscope.measure.profile_worker import gpu_rates, machine_name, machine_of_gpu
from bertscope.measure.profiler_run import allocator_counters
from bertscope.memory.kernels import cpu_scratch
from bertscope.memory.step_time import achieved, step_work
from bertscope.memory.summary import memory, memory_report
from bertscope.reports.memory import EVALUATING, OPTIMIZER, Memory, MemoryReport, Timing, Variant
from bertscope.reports.step import Parts, PhasePeak, StepCost
from bertscope.reports.tool import CalibrationReport
from bertscope.settings.checkpointing import NONE
from bertscope.settings.rows import rows
from bertscope.settings.run_config import AUTOCAST, CPU, CUDA, LIGHTNING, STORED, Measurement, RunConfig
from bertscope.sources.find import source_of
from bertscope.torch_access import in_backward, is_view, nn, storage_key, torch
from bertscope.tracing.fake_tensors import fake_like, state_tensors
from bertscope.tracing.log import tensors
from bertscope.tracing.module_tree import row_paths, subject
from bertscope.tracing.record import CopyableHook, Device, Recorder
from bertscope.units import PRECISIONS

_PRECISIONS = {row.torch_name: name for name, row in PRECISIONS.items()}


_ONE_RECORDS = Lock()
_STEP = torch.optim.Optimizer.profile_hook_step(print).__code__  # of the function around a class's step, with its hooks


def _warn(text: str) -> None:
    with suppress(Exception):  # where warnings are errors
        warnings.warn(BertscopeWarning(one_line(text, limit=400)), stacklevel=4)


class _Cpu(Device):
    """A CPU whose kernels' scratch follows the rules of an estimate, and on which a data set is no part of a step."""

    has_lines = False

    def __init__(self) -> None:
        self.outside: Any = WeakValueDictionary()  # storages from before the recording, of which a view was made
        self.results = list[Any]()  # of the operator that runs
        self.error = 0  # the identity of the last operator's error, whose frames would keep tensors alive

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        if not self.recorder.is_recording:
            return operator(*args, **kwargs)
        if is_view(operator) and operator is not torch.ops.aten.lift_fresh.default:  # of torch.tensor(...)
            known = self.recorder.numbers
            storages = {storage_key(one): one.untyped_storage() for one in tensors(args)}
            self.outside |= {key: storage for key, storage in storages.items() if key not in known}
        try:
            self.results.append(operator(*args, **kwargs))
        except Exception as error:
            self.error = id(error)
            raise
        return self.results[-1]

    def has(self, tensor: Any) -> bool:
        return super().has(tensor) and storage_key(tensor) not in self.outside

    def scratch(self, operator: Any, args: Any) -> Any:
        return cpu_scratch(operator, args)


class _LoopRecorder(Recorder):
    """A recorder in a user's loop: an error of the recorder is a `problem`, and the loop goes on.

    Another thread, or from an optimizer step to the next forward pass this one, may train another model. The problem
    ends what is watched when no operator runs: torch's stack of modes is free then.
    """

    def __init__(self, watched: watch) -> None:
        self.cpu, self.watched = _Cpu(), watched
        self.problem: Exception | None = None
        super().__init__(self.cpu, watched.model)

    def _stop(self, problem: Exception) -> None:
        self.is_recording, self.problem = False, problem

    def _safely(self, run: Callable[..., Any], *args: Any) -> None:
        try:
            if self.is_recording and get_ident() == self.main:
                run(*args)
        except Exception as error:
            self._stop(error)

    def _backward(self, run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        if get_ident() == self.main:
            super()._backward(run, *args, **kwargs)
        else:
            run(*args, **kwargs)

    def _entered(self, *args: Any) -> None:
        self._safely(super()._entered, *args)
        if self.problem is not None:
            self.watched._fail(self.problem)

    def _left(self, *args: Any) -> None:
        self._safely(super()._left, *args)

    def _stepping(self, *args: Any) -> None:
        self._safely(super()._stepping, *args)

    def _stepped(self, *args: Any) -> None:
        self._safely(super()._stepped, *args)

    def _recorded(self, operator: Any, args: Any, kwargs: Any) -> Any:
        if not self.watched.is_running():
            self._stop(SelectionError("the loop has ended with an exception"))
            return operator(*args, **kwargs)
        self.cpu.results = results = list[Any]()
        try:
            if (
                self.is_updated
                and self.phase != EVALUATING
                and (self.phase == OPTIMIZER or in_backward() or any(one.requires_grad for one in tensors(args)))
            ):
                return self.cpu.run(operator, args, kwargs)
            return super()._recorded(operator, args, kwargs)
        except Exception as error:
            if id(error) == self.cpu.error:
                raise
            self._stop(error)
            return results[0] if results else operator(*args, **kwargs)
        finally:
            results.clear()


class watch:
    """Measure the memory and time of the first optimizer steps in a loop next to their estimate, and print both.

    `report` is what `profile` returns; `show` takes its text, by default `print`. `steps` are timed after the recorded
    one. `save` is the file for `calibration=`, on CUDA. Further keywords go to `estimate`, such as a `loss` function.
    An exception of the loop passes unchanged; one in here becomes a warning, and the training goes on. Raises
    SelectionError at once for a keyword that has no effect here.

    >>> model, data = torch.nn.Linear(100, 10), torch.randn(8, 100)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> with bertscope.watch(model, optimizer, show=None) as watched:
    ...     for step in range(5):
    ...         output = model(data)
    ...         loss = output.sum()
    ...         loss.backward()
    ...         optimizer.step()
    ...         optimizer.zero_grad()
    >>> watched.report["none"].error
    0.0
    """

    def __init__(
        self, model: nn.Module, optimizer: Any, *, steps: int = 3, save: str | os.PathLike[str] | None = None,
        show: Callable[[str], Any] | None = print, **settings: Any,
    ) -> None:  # fmt: skip
        while not hasattr(optimizer, "_optimizer_step_post_hooks") and hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer  # of accelerate and others around it
        keywords = {name: value for name, value in settings.items() if name != "training_file"}
        module_records(request_of("estimate", model, keywords), model)
        steps = rows(Measurement)["steps"].read(steps)
        self.model, self.optimizer, self.timed, self.save, self.show = model, optimizer, steps, save, show
        self.given, self.recording = settings, ExitStack()
        self.hook: Any = None  # on the optimizer
        self.index = -1  # of the GPU
        self.frame: Any = None  # of a loop that may end with an exception and not tell
        self._reset()

    def _reset(self) -> None:
        self.settings, self.inputs = self.given, None
        self.passes, self.ends, self.is_recording, self.is_first = 0, list[float](), False, True
        self.is_over, self.other = False, ""  # the class of another model that a recorded step runs
        self.recorder: _LoopRecorder | None = None
        self.measured: Memory | None = None
        self.report: MemoryReport | None = None

    def __enter__(self) -> watch:
        self._guarded(self._begin)
        return self

    def __exit__(self, *_: object) -> None:
        self._guarded(self._stop_recording)
        self._guarded(self._finish)
        self._guarded(self._save, lambda error: _warn(f"no calibration is written: {type(error).__name__}: {error}"))
        if self.hook is not None:
            self.hook.remove()

    def _guarded(self, run: Callable[[], Any], fail: Callable[[Exception], Any] | None = None) -> None:
        try:
            with torch.cuda.device(self.index):  # whose counters torch reads; the loop may leave another one current
                run()
        except Exception as error:
            (fail or self._fail)(error)

    def _fail(self, error: Exception) -> None:
        with suppress(Exception):
            self.recording.close()
        self._end()
        self.recorder = self.measured = self.report = None
        _warn(f"this training is no longer watched: {type(error).__name__}: {error}")

    def _end(self) -> None:
        """Take no further part in steps. A hook before others of the optimizer stays: torch goes through them now."""
        self.is_over = True
        hooks = self.hook and self.hook.hooks_dict_ref()
        if hooks and next(reversed(hooks)) == self.hook.id:
            self.hook.remove()

    def _begin(self) -> None:
        self._reset()
        param = next(self.model.parameters())
        self.device, self.index = (CUDA, param.get_device()) if param.is_cuda else (CPU, -1)
        self.precision = _PRECISIONS.get(str(param.dtype).removeprefix("torch."), "")
        self.hook = self.optimizer.register_step_post_hook(lambda *_: self._guarded(self._stepped))

    def is_running(self) -> bool:
        """Return False when an exception has ended the loop of `frame`."""
        frame = currentframe()
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return self.frame is None or frame is not None

    def _stop_recording(self) -> None:
        self.recording.close()
        if self.recorder is not None and self.recorder.problem is not None:
            raise self.recorder.problem

    def _stepped(self) -> None:
        """Go on at the end of an optimizer step: record the second, time those that follow."""
        if self.is_over or self._is_inner():
            return
        if self.measured is None and not self.is_recording:
            self._record()
            return
        if self.measured is None:
            if not self.passes:
                raise SelectionError("the loop does not call the model that is watched")
            if self.is_first and self.recorder is not None and self.recorder.problem is None:
                self.is_first, self.passes = False, 0  # the next step finds what this one leaves in variables
                return
            self._stop_recording()
            self.measured = self._memory()
            self._predict()
        self._synchronize()
        self.ends.append(time.perf_counter())
        if len(self.ends) > self.timed:
            self._finish()

    def _is_inner(self) -> bool:
        """Return True at the end of `super().step()` in a step, which has hooks too."""
        frame, steps = currentframe(), 0
        while frame is not None:
            steps += frame.f_code is _STEP and frame.f_locals.get("self") is self.optimizer
            frame = frame.f_back
        return steps > 1

    def _record(self) -> None:
        if not _ONE_RECORDS.acquire(blocking=False):  # another one in this process, which replaces functions of torch
            return
        self.recording.callback(_ONE_RECORDS.release)
        called = CopyableHook(lambda _, args, kwargs=(): self._guarded(lambda: self.calls(args, kwargs)))
        self.recording.enter_context(self.model.register_forward_pre_hook(called, with_kwargs=True))
        params_of_model, main = set(self.model.parameters()), get_ident()

        def entered(module: nn.Module, _: Any) -> None:
            is_in_step = self.passes and not self.other and get_ident() == main
            if is_in_step and any(param not in params_of_model for param in module.parameters()):
                self.other = type(module).__name__

        self.recording.callback(nn.modules.module.register_module_forward_pre_hook(entered).remove)
        self.recording.callback(setattr, self, "is_recording", False)
        self.is_recording = True
        if self.device == CUDA:
            self._synchronize()
            torch.cuda.reset_peak_memory_stats()
            return
        self.recorder = recorder = _LoopRecorder(self)
        recorder.first_optimizer, recorder.is_updated, recorder.steps = ref(self.optimizer), True, -1
        params = {param: path for path, param in self.model.named_parameters()}
        state = (
            (f"{params.get(param, '')}.{name}".strip("."), tensor)
            for param, name, tensor in state_tensors(self.optimizer)
        )
        recorder.hold("parameters", self.model.named_parameters())
        recorder.hold("buffers", self.model.named_buffers())
        recorder.hold("optimizer_state", state)
        recorder.hold("gradients", ((path, param.grad) for param, path in params.items() if param.grad is not None))
        self.recording.enter_context(recorder.watching())

    def calls(self, args: Any, kwargs: Any) -> None:
        """Note a micro-batch: its inputs on meta, and the dtype of autocast."""
        if not torch.is_grad_enabled():  # of an evaluation
            return
        self.passes += 1
        if self.recorder is not None:
            self.recorder.hold("inputs", (("", tensor) for tensor in tensors((args, kwargs))))
        if self.passes == 1:
            self.inputs = fake_like(dict(kwargs) if kwargs and not args else args, "meta")
            if torch.is_autocast_enabled(self.device):
                self.precision = _PRECISIONS[str(torch.get_autocast_dtype(self.device)).removeprefix("torch.")]
                self.settings = {"precision": AUTOCAST + self.precision, **self.settings}

    def _memory(self) -> Memory:
        rows = row_paths(self.model)
        if self.recorder is not None:
            return memory(Recording(self.recorder.log, CPU).trace(self.recorder.steps), "measured", rows)
        counters = allocator_counters()
        most = counters["max_allocated_bytes"]
        params = sum(param.nbytes for param in self.model.parameters())
        parts = Parts(parameters=params, temporaries=most - params)
        peak = PhasePeak(phase="the step", peak_bytes=most, path="", operator="", parts=parts)
        return Memory(obtained="measured", cost=StepCost(peak=peak, **counters), phases=(peak,), saved=())

    def _predict(self) -> None:
        """Estimate the recorded step and count its FLOPs; what cannot be estimated is only measured."""
        variant = Variant(checkpointing=NONE, reentrant=False, measured=self.measured)
        run, self.flops = RunConfig(device=self.device, precision=STORED), 0
        accumulate = {"accumulate": self.passes} if self.passes > 1 else {}
        try:
            if self.other:
                raise SelectionError(f"its step also runs a {self.other}, whose memory is not counted")
            settings = {"device": self.device, **accumulate, **self.settings}
            estimated = estimate(self.model, self.inputs, optimizer=self.optimizer, **settings)
            run, variant = estimated.run, replace(variant, estimated=estimated.variants[0].estimated)
        except Exception as error:
            _warn(f"this training is measured without its estimate: {error}")
        with suppress(Exception):
            self.flops = self.passes * flops(self.model, self.inputs, mode="training").total
        report = memory_report(subject(self.model, None, STORED), run, (variant,), machine=machine_name(self.device))
        self.report = replace(report, inputs_given=True)

    def _synchronize(self) -> None:
        if self.device == CUDA:
            torch.cuda.synchronize()

    def _finish(self) -> None:
        self._end()
        if self.measured is None or self.report is None or self.report.variants[0].timing:
            return
        seconds = [after - before for before, after in pairwise(self.ends)]
        timing = Timing(warmup_seconds=0.0, flops=self.flops or None).of_steps(seconds, 0)
        timing = replace(timing, tokens_per_second=None)
        variant = replace(self.report.variants[0], timing=timing)
        here = this_gpu() if self.device == CUDA else None
        gpu = find_device(*here) if here else None
        is_timed = timing.median_seconds and self.flops
        took = achieved(timing.median_seconds, self.flops, self.precision, gpu) if is_timed else None
        if took and took.mfu:
            cost = replace(self.measured.cost, time=took)
            variant = replace(variant, measured=replace(self.measured, cost=cost))
        self.report = replace(self.report, variants=(variant,))
        if (show := self.show) is not None:
            self._guarded(lambda: show(f"{self.report}"), lambda error: _warn(f"the report is not shown: {error!r}"))

    def _save(self) -> None:
        """Write the calibration, with the GPU's rates, which are measured when the training is over."""
        if self.save is None or self.report is None:
            return
        if self.device != CUDA:
            raise SelectionError("a calibration is for a GPU, and this training is on a CPU; leave save out")
        row, work, path = self.report.variants[0], None, Path(self.save)
        run = self.report.run.changed(batch=batch_of(self.inputs), precision=self.precision)
        with suppress(Exception):
            work = step_work(source_of(self.model, inputs=self.inputs), self.report.run)
        costs = [part and part.cost for part in (row.measured, row.estimated)]
        seconds = row.timing.step_seconds if row.timing else ()
        step = calibration_step(self.report.subject.name, run, costs[0], costs[1], work, seconds)  # type: ignore[arg-type]
        rates = gpu_rates({self.precision, *(work.matmul_flops if work else ())})
        report = CalibrationReport(machine=machine_of_gpu(), rates=rates, steps=(step,))
        write_file(path, with_saved(report, path).to_json())


def TrainerCallback(**options: Any) -> Any:
    """Return a callback for transformers' Trainer that watches its first steps, with the options of `watch`.

    The settings of the training are read from its arguments. Raises SelectionError without transformers.

    >>> callback = bertscope.TrainerCallback(save="h200.json")  # Trainer(..., callbacks=[callback])
    """
    try:
        from transformers import TrainerCallback as Base
    except ImportError:
        raise SelectionError("bertscope.TrainerCallback needs the package transformers; install it") from None

    class Callback(Base):  # type: ignore[misc]
        watched: Any = None

        def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            if self.watched is not None:  # of a training that an exception has ended
                self.watched.__exit__()
            self.watched = watch(parts["model"], parts["optimizer"], **{"training_file": args, **options})
            self.watched.frame = caller = currentframe()
            while caller and caller.f_globals.get("__name__") in (__name__, Base.__module__):
                self.watched.frame = caller = caller.f_back
            self.watched.__enter__()

        def on_train_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            self.watched.__exit__()

    return Callback()


def LightningCallback(**options: Any) -> Any:
    """Return a callback for Lightning's Trainer that watches its first steps, with the options of `watch`.

    It is for automatic optimization with one optimizer. Raises SelectionError without lightning.

    >>> callback = bertscope.LightningCallback()  # doctest: +SKIP
    """
    try:
        from lightning.pytorch import Callback as Base
    except ImportError:
        raise SelectionError("bertscope.LightningCallback needs the package lightning; install it") from None

    class Step(nn.Module):
        """A LightningModule whose forward pass is its training step."""

        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

        def forward(self, batch: Any) -> Any:
            return self.module.training_step(batch, 0)

    class Callback(Base):  # type: ignore[misc]
        watched: watch

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            clips = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"
            scales = getattr(trainer.precision_plugin, "scaler", None) is not None
            settings = {"loop": LIGHTNING, "clip_grad_norm": clips, "grad_scaler": scales, **options}
            self.watched = watch(Step(pl_module), trainer.optimizers[0], **settings)
            self.watched.__enter__()

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            """Note the batch of a training step, which is no call of the module, and the step's autocast."""
            if self.watched.is_recording:
                self.watched._guarded(lambda: self._calls(trainer, batch))

        def _calls(self, trainer: Any, batch: Any) -> None:
            with trainer.precision_plugin.train_step_context():
                self.watched.calls((batch,), {})

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            """End with what is known; the exception passes on."""
            self.watched.__exit__()

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.watched.__exit__()

    return Callback()
