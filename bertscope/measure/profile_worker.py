"""The child process of `profile`, which builds one real model, runs its step, and reports on standard output.

It imports torch before it reads its job. A separate process starts with clean memory, confines the memory limit, and
may die without harm to the parent. A message is a line of JSON, [kind, content]: a stage, the estimate, a result, or
the reason for a failure. After the memory is measured, the parent asks for each timed step with a line on standard
input, and with a last line for what a calibration has of the card.
"""

from __future__ import annotations

import gc
import sys
import time
from base64 import b64encode
from collections.abc import Callable
from typing import Any

from bertscope.errors import SelectionError, name_of
from bertscope.measure.profile_job import (
    M_MMAP_THRESHOLD,
    M_TRIM_THRESHOLD,
    Job,
    Say,
    estimate_job,
    high_water,
    job_error,
    machine_name,
    set_malloc,
    set_memory_limit,
    set_up_process,
    stages,
)
from bertscope.measure.profiler_run import measured, measured_device, real_step, step_seconds
from bertscope.memory.caching_allocator import snapshot
from bertscope.memory.summary import memory
from bertscope.processes.child import sender
from bertscope.reports.memory import Timing
from bertscope.torch_access import torch
from bertscope.tracing.inputs import running
from bertscope.tracing.module_tree import row_paths


def main() -> None:
    """Read a job from standard input and run it."""
    send = sender()
    job = Job.from_json(sys.stdin.buffer.readline())
    set_up_process()
    gc.disable()  # until the real model is built: collections over torch's objects double the time of an estimate
    try:
        if job.launch is None:
            run(job, send)
        else:
            from bertscope.measure.rank import launch_ranks

            launch_ranks(job, send)
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
    set_malloc(M_MMAP_THRESHOLD, 2**16)  # larger blocks are mapped separately: a free returns them to the system
    torch.manual_seed(job.seed)
    set_memory_limit(job, send)
    send("stage", "building the model")
    step = real_step(job.source, job.run_config, job.run_config.device)
    with running(job.source, step.model, f"this machine's {job.run_config.device.upper()}", job.run_config.input):
        _time(step, job, send, Timing(warmup_seconds=_measure(step, job, send), flops=flops))


def _measure(step: Any, job: Job, send: Say) -> float:
    """Measure the process in a step and the allocator's events in the next one; return the time of the first."""

    def of_process(run: Callable[[], None]) -> None:
        send("stage", f"measuring the process{f', a step takes {warmup:.1f} s' if warmup else ''}")
        if process := high_water(run):
            send("process", process)

    is_cuda, warmup = job.run_config.device == "cuda", 0.0
    if is_cuda or step.optimizer is None:
        step.run_first_steps(stages(send, "the first steps"))
    else:  # the second step has the optimizer's state from its beginning
        started = time.perf_counter()
        step.run(stages(send, "the first steps"))
        warmup = time.perf_counter() - started
        of_process(step.run)
    started = time.perf_counter()
    trace = measured(step, lambda name: send("stage", f"in the {name} phase of the measured step"))
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


def _time(step: Any, job: Job, send: Say, timing: Timing) -> None:
    """Time a step without the profiler for each line of input, but measure the card for the line `card`.

    Unless memory is limited, malloc keeps freed memory as it does by default.
    """
    if job.memory_limit_bytes is None:
        set_malloc(M_MMAP_THRESHOLD, 2**25)  # the thresholds that glibc reaches after frees of large blocks
        set_malloc(M_TRIM_THRESHOLD, 2**26)
    send("timing", timing)
    for line in sys.stdin.buffer:
        if line == b"card\n":
            from bertscope.measure.calibration import measure_card

            measure_card(job, step.device, send)
        else:
            send("seconds", step_seconds(step))
