"""The child process of `profile`, which builds one real model, runs its step, and reports on standard output.

It imports torch before it reads its job. A separate process starts with clean memory, confines the memory limit, and
may die without harm to the parent. A message is a line of JSON, [kind, content]: a stage, the estimate, a result, or
the reason for a failure. After the memory is measured, the parent asks for each timed step with a line on standard
input, and with a last line for what a calibration has of the GPU. The ranks of `rank.py` share what is here.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import signal
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import bertscope
from bertscope.errors import BertscopeError, SelectionError, UnknownValueError, is_out_of_memory, name_of
from bertscope.measure.profile_job import Job, Say, proc_bytes, this_gpu
from bertscope.measure.profiler_run import measured, measured_device, real_step, step_seconds
from bertscope.memory.caching_allocator import snapshot
from bertscope.memory.simulator import Simulator
from bertscope.memory.step_time import step_work
from bertscope.memory.summary import memory
from bertscope.processes.child import die_with_parent, error_message, sender
from bertscope.reports.memory import FORWARD, ProcessMemory, Timing
from bertscope.reports.tool import COPY, Machine
from bertscope.torch_access import torch
from bertscope.tracing.fake_tensors import load_fake_tensors
from bertscope.tracing.inputs import running
from bertscope.tracing.module_tree import row_paths
from bertscope.units import PRECISIONS

_TOO_MANY = os.strerror(errno.EMFILE)
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # options of glibc's malloc
_STATUS = "/proc/self/status"


def load_for_jobs() -> None:
    """Load what every job needs, without running anything that starts a thread."""
    load_fake_tensors()


def main() -> None:
    """Read a job from standard input and run it."""
    answer_job(run)


def answer_job(answer: Callable[[Job, Say], None]) -> None:
    """Read a job from standard input and answer it; an error is a message too."""
    send = sender()
    job = Job.from_json(sys.stdin.buffer.readline())
    set_up_process()
    gc.disable()  # until the real model is built: collections over torch's objects double the time of an estimate
    try:
        answer(job, send)
    except Exception as error:
        send(*job_error(error, job))


def run(job: Job, send: Say) -> None:
    """Run every stage: the estimate, the memory of the real step, then the steps without the profiler."""
    if job.run_config.device == "cuda" and not torch.cuda.is_available():
        raise SelectionError(f"torch finds no CUDA device here; use {name_of('device')} cpu, or estimate with it")
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    flops = estimate_job(job, send)
    gc.enable()
    gc.collect()
    _set_malloc(_MMAP_THRESHOLD, 2**16)  # larger blocks are mapped separately: a free returns them to the system
    torch.manual_seed(job.seed)
    set_memory_limit(job, send)
    send("stage", "building the model")
    step = real_step(job.source, job.run_config, job.run_config.device)
    with running(job.source, step.model, f"this machine's {job.run_config.device.upper()}", job.run_config.input):
        warmup = _measure(step, job, send)
        if job.memory_limit_bytes is None:  # malloc keeps freed memory, as it does by default
            _set_malloc(_MMAP_THRESHOLD, 2**25)  # the thresholds that glibc reaches after frees of large blocks
            _set_malloc(_TRIM_THRESHOLD, 2**26)
        send("timing", Timing(warmup_seconds=warmup, flops=flops))
        step.start(step.run_config.changed(eval_batch=None))  # times are of training steps
        for line in sys.stdin.buffer:
            if line == b"gpu\n":
                measure_gpu(job, step.device, send)
            else:
                send("seconds", step_seconds(step))


def _measure(step: Any, job: Job, send: Say) -> float:
    """Measure the process in a step and the allocator's events in the next one; return the time of the first."""

    def of_process(run: Callable[[], None]) -> None:
        send("stage", "measuring the process")
        if process := high_water(run):
            send("process", process)

    is_cuda, warmup, accumulate = job.run_config.device == "cuda", 0.0, job.run_config.accumulate
    if is_cuda or step.optimizer is None:
        step.run_first_steps(stages(send, "the first steps", accumulate))
    else:  # the second step has the optimizer's state from its beginning
        started = time.perf_counter()

        def expect(begun: int) -> None:
            if begun == 2:  # the first has ended
                send("expected_seconds", (time.perf_counter() - started) * accumulate)

        step.run(stages(send, "the first steps", accumulate, expect))
        send("first_seconds", warmup := time.perf_counter() - started)
        of_process(step.run)
    started = time.perf_counter()
    trace = measured(step, stages(send, "the measured step", accumulate))
    if step.device == "cuda":
        torch.cuda.synchronize()
    warmup = warmup or time.perf_counter() - started
    device = measured_device(step) if is_cuda else {}
    if not is_cuda and step.optimizer is None:
        of_process(step.run)
    if job.wants_snapshot:
        send("snapshot", b64encode(snapshot(trace)).decode())
    send("machine", machine_name(step.device))
    send("measured", memory(trace, "measured", row_paths(step.model), **device))
    return warmup


# ---- what a rank does too ----


def stages(
    send: Say, step_name: str, micro_batches: int = 1, on_micro_batch: Callable[[int], None] = lambda begun: None
) -> Callable[[str], AbstractContextManager[None]]:
    """Return a function that sends the phase of a step that begins, and the number of its micro-batch."""
    begun = 0

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        nonlocal begun
        if name == FORWARD:
            begun += 1
            on_micro_batch(begun)
        number = f", micro-batch {(begun - 1) % micro_batches + 1} of {micro_batches}" if micro_batches > 1 else ""
        send("stage", f"in the {name} phase of {step_name}{number}")
        yield

    return stage


def set_up_process() -> None:
    """Have the system kill this process when the parent dies, and first when memory runs out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    die_with_parent()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def set_memory_limit(job: Job, send: Say) -> None:
    """Set the memory limit; of a process without a GPU, send its bytes that torch and Python already use.

    The limit starts after the imports: a library that runs out of memory while it loads may hang.
    """
    if job.memory_limit_bytes is None:
        return
    if job.run_config.device == "cuda":
        whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(job.memory_limit_bytes / whole, 1.0))
        return
    import resource

    torch.ones(2**20).add_(1)  # starts the threads now: OpenMP ends the process if it has no memory for them
    send("taken", proc_bytes(_STATUS, "VmData") or 0)
    resource.setrlimit(resource.RLIMIT_DATA, (job.memory_limit_bytes, job.memory_limit_bytes))


def job_error(error: Exception, job: Job) -> tuple[str, Any]:
    """Return the message for an error of a job."""
    if isinstance(error, BertscopeError):
        return error_message(error)
    text = str(error)
    if (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)) or _TOO_MANY in text:
        return "files", "has too many open files"
    is_limited = job.memory_limit_bytes is not None and "could not create a primitive" in text  # by oneDNN
    if is_limited or is_out_of_memory(error):
        return "out of memory", text
    return "failed", f"{type(error).__name__}: {text}"


def estimate_job(job: Job, send: Say) -> int:
    """Send the estimate, and return a step's FLOPs."""
    send("stage", "estimating")
    steps = Simulator(job.source)
    send("subject", steps.facts(job.run_config).subject)
    with suppress(UnknownValueError):  # then there is only the measurement
        memory = steps.memory(job.run_config)
        send("estimated", memory)
        if job.other_run is not None and job.source.layer_path and memory.cost.peak_bytes >= job.beside_peak_bytes:
            send("break_even", steps.break_even(job.other_run, job.run_config))
    return steps.flops(job.run_config)


def machine_name(device: str) -> str:
    """Return the name of the processor or the GPU that runs the step."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    model = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or 'CPU'}, {torch.get_num_threads()} threads"


def _set_malloc(option: int, value: int) -> None:
    with suppress(OSError, AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).mallopt(option, value)


def high_water(run: Callable[[], None]) -> ProcessMemory | None:
    """Return the high-water mark of this process over one step; None if the system does not report it."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    life, before = proc_bytes(_STATUS, "VmHWM"), proc_bytes(_STATUS, "VmRSS")
    if before is None or life is None:
        run()
        return None
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the mark
    run()
    mark = proc_bytes(_STATUS, "VmHWM") or 0
    return ProcessMemory(resident_before_bytes=before, high_water_bytes=mark, run_high_water_bytes=max(life, mark))


# ---- what a calibration has of the GPU: versions, and two rates ----

_SMI_SECONDS = 20
_SIDE = 8192  # of the largest matrices: 256 MiB in fp32
_COPIED_BYTES = 2**30
_REPEATS = 10


def measure_gpu(job: Job, device: str, send: Say) -> None:
    """Send the GPU, the work of the job's step, and the rates of the GPU."""
    send("gpu", machine_of_gpu())
    names = {job.run_config.compute_precision}
    with suppress(UnknownValueError):  # its operators depend on values: no time follows from this step
        work = step_work(job.source, job.run_config)
        send("work", work)
        names |= work.matmul_flops.keys()
    send("rates", gpu_rates(names, job.memory_limit_bytes, device))


def machine_of_gpu() -> Machine:
    """Return the GPU and the versions for a calibration."""
    name, memory_bytes = this_gpu() or ("", 0)
    return Machine(
        gpu=name, memory_bytes=memory_bytes, driver=_driver_version(), torch_version=str(torch.__version__),
        bertscope_version=bertscope.__version__, date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    )  # fmt: skip


def gpu_rates(names: Collection[str], limit_bytes: int | None = None, device: str = "cuda") -> dict[str, float]:
    """Return the rates of a large matrix product in each precision and of a large copy.

    The tensors use at most a quarter of the free memory.
    """
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    if limit_bytes is not None:
        free = min(free, limit_bytes - torch.cuda.memory_reserved())
    side = max(min(_SIDE, int((max(free, 0) / 64) ** 0.5) // 128 * 128), 128)
    rates = {name: _product_rate(side, name, device) for name in sorted(PRECISIONS.keys() & names)}
    size = min(_COPIED_BYTES, max(free // 8, 1))
    source, copied = (torch.zeros(size, device=device, dtype=torch.uint8) for _ in range(2))
    return {**rates, COPY: 2 * size / _seconds(partial(copied.copy_, source))}


def _driver_version() -> str:
    """Return the driver's version by nvidia-smi or by the kernel module; empty if none tells it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True)  # noqa: S603
        return done.stdout.partition("\n")[0].strip()[:40]
    with suppress(OSError):
        fields = Path("/proc/driver/nvidia/version").read_text()[:1000].split()
        return next((word for word in fields if "." in word and set(word) <= set("0123456789.")), "")[:40]
    return ""


def _product_rate(side: int, precision: str, device: str) -> float:
    dtype = getattr(torch, PRECISIONS[precision].torch_name)
    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    with torch.no_grad():
        return 2 * side**3 / _seconds(partial(torch.matmul, one, other))


def _seconds(call: Callable[[], Any]) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(_REPEATS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / _REPEATS
