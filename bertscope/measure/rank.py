"""A child of `profile --nproc`: it estimates the step of a rank, or is one of the real ranks.

A rank builds its part of the model, runs steps with the others, and sends messages as any child does. torch's elastic
agent is not used: it listens to every network, and unpickles what it is sent.
"""

import faulthandler
import os
import signal
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

from bertscope.errors import SelectionError, name_of
from bertscope.measure.profile_job import Job, RankLaunch, Say
from bertscope.measure.profile_worker import (
    answer_job,
    estimate_job,
    high_water,
    job_error,
    load_for_jobs,
    machine_name,
    set_memory_limit,
    stages,
)
from bertscope.measure.profiler_run import measured_device, real_step, step_seconds
from bertscope.memory.caching_allocator import snapshot
from bertscope.memory.fake_run import StepDevice, StepRecorder
from bertscope.memory.ranks import layers_of, make_meshes, parallelize
from bertscope.memory.step import ModelStep, Phase
from bertscope.memory.summary import NAMESPACES, kind_of, memory, traffic
from bertscope.memory.trace import MemoryTrace
from bertscope.reports.memory import ALL_REDUCE, BACKWARD, RankRow, Timing
from bertscope.settings.parallelism import ONE_PROCESS
from bertscope.torch_access import in_backward, nn, operator_name, storage_key, torch, tree_leaves
from bertscope.torch_access.distributed import drain, gloo_in_one_thread, process_group
from bertscope.tracing.module_tree import row_paths
from bertscope.tracing.record import Device, Recorder

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# A rank that fails waits before it ends, so that the others, which wait for it, do not fail too.
_LAST_SECONDS = 20.0
_MORE_SECONDS = 60.0  # beyond the timeout of the job, which names the rank that hangs


def live_run(step: ModelStep, phase: Phase) -> MemoryTrace:
    """Return a step's trace with its collectives; the step must be in the steady state.

    `phase` is entered with each phase too.
    """
    recorder = StepRecorder(step, _LiveDevice(step))

    @contextmanager
    def recorded(name: str) -> Iterator[None]:
        with phase(name), recorder.recorded(name):
            yield

    with recorder.watching():
        recorder.hold_state()
        step.run(recorded)  # what it leaves, the next step finds
        recorder.log.restart()
        step.run(recorded)
    return recorder.log.trace(step.run_config.device)


class _Buckets(Device):
    """A device that notes the buckets of DDP: it makes views of them when it is built, and reduces them in backward."""

    has_memory = False

    def __init__(self) -> None:
        self.found: dict[int, torch.Tensor] = {}

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        if in_backward():
            is_use = operator.namespace in NAMESPACES and kind_of(operator_name(operator)) == ALL_REDUCE
        else:
            is_use = operator is torch.ops.aten.as_strided.default
        if is_use:
            self.found |= {storage_key(leaf): leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        return operator(*args, **kwargs)


class _LiveDevice(StepDevice):
    """A device of real tensors."""

    def run(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Return an operator's result; on a CPU what a collective holds ends with it, however busy the machine."""
        out = super().run(operator, args, kwargs)
        if self.kind == "cpu" and operator.namespace in NAMESPACES and kind_of(operator_name(operator)):
            drain(process_group(args))
        return out

    def has(self, tensor: Any) -> bool:
        """Return False for a tensor on another device, such as a step counter on the CPU."""
        return tensor.device.type == self.kind and super().has(tensor)


def load_for_ranks() -> None:
    """Import what every rank needs, without running anything that starts a thread: forks then need not import it."""
    load_for_jobs()
    from torch.distributed import fsdp, optim  # noqa: F401
    from torch.distributed.tensor import parallel  # noqa: F401


def answer_rank() -> None:
    """Read a job from standard input: estimate its step, or run it as a rank."""
    faulthandler.register(signal.SIGUSR1)  # the parent asks for the place where a rank hangs
    answer_job(run_rank)


def run_rank(job: Job, send: Say) -> None:
    """Answer a job."""
    launch, device = job.launch or RankLaunch(nproc=1), job.run_config.device
    if launch.rank is None:
        if not torch.distributed.is_available():
            raise SelectionError("this build of torch has no torch.distributed; install one that has")
        if device == "cuda" and torch.cuda.device_count() < launch.nproc:
            raise SelectionError(
                f"torch finds {torch.cuda.device_count()} CUDA devices here, and each of {launch.nproc} ranks needs "
                f"one; use {name_of('device')} cpu, or a smaller {name_of('nproc')}"
            )
        flops = estimate_job(job, send)
        send("timing", Timing(warmup_seconds=0.0, flops=flops * job.run_config.parallelism.batches))
        return
    try:
        _run(job, launch, launch.rank, send)
    except Exception as error:
        send(*job_error(error, job))
        time.sleep(_LAST_SECONDS)


def _run(job: Job, launch: RankLaunch, rank: int, send: Say) -> None:
    dist, device = torch.distributed, job.run_config.device
    # As torchrun sets them; gloo and NCCL listen to loopback only, and NCCL's RAS subsystem (from 2.24 on) nowhere.
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": launch.nproc}
    sockets = {"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK, "NCCL_RAS_ENABLE": "0"}
    os.environ |= {name: str(value) for name, value in numbers.items()} | sockets
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_num_threads(job.threads or max((os.cpu_count() or 1) // launch.nproc, 1))
    torch.manual_seed(job.seed)
    send("stage", "joining the others")
    # The ranks meet at a file in the folder of the job, which other users cannot read.
    dist.init_process_group(
        "nccl" if device == "cuda" else gloo_in_one_thread(_LOOPBACK),
        init_method=f"file://{launch.folder}/store",
        rank=rank,
        world_size=launch.nproc,
        timeout=timedelta(seconds=launch.timeout_seconds + _MORE_SECONDS),
    )
    set_memory_limit(job, send)
    send("stage", "building the model")
    parallelism, path = job.run_config.parallelism, job.source.layer_path
    meshes = make_meshes(parallelism, device)

    def divide(model: nn.Module) -> None:
        parallelize(model, layers_of(model, path), parallelism, meshes)

    step = real_step(job.source, job.run_config, device, divide)
    with job.source.confined():
        if parallelism.row.has_buckets:
            _put_in_ddp(step)
        row = _measured(step, job, rank, send)
        send("row", row)
        seconds = []
        for number in range(3 if job.steps is None else job.steps):
            send("stage", f"timing step {number + 1} of {job.steps}")
            dist.barrier()  # all ranks begin together
            seconds.append(step_seconds(step))
    send("row", replace(row, step_seconds=tuple(seconds)))
    send("stage", "waiting for the others to end")
    dist.barrier()
    dist.destroy_process_group()


def _put_in_ddp(step: Any) -> None:
    """Have DDP average a step's gradients.

    DDP has to know if parameters get no gradient, such as those of a pooler: one backward without it shows that. After
    its first backward DDP makes its buckets anew.
    """
    from torch.nn.parallel import DistributedDataParallel

    is_training = step.run_config.mode == "training"
    if is_training:
        step.run_backward()
    has_unused = any(param.grad is None for param in step.model.parameters() if param.requires_grad)
    step.model.zero_grad(set_to_none=True)
    buckets = _Buckets()
    with Recorder(buckets):
        wrapped = DistributedDataParallel(step.model, find_unused_parameters=is_training and has_unused)
    step.wrapper, loss = wrapped, step.loss
    step.loss = lambda _, inputs: loss(wrapped, inputs)
    if is_training:
        step.run()
        buckets = _Buckets()
        with Recorder(buckets):
            step.run()
    step.buckets = {str(number): bucket for number, bucket in enumerate(buckets.found.values())}


def _measured(step: Any, job: Job, rank: int, send: Say) -> RankRow:
    step.run_first_steps(stages(send, "the first steps"))
    trace = live_run(step, stages(send, "the measured step"))
    send("stage", "measuring the process")
    device = measured_device(step) if step.device == "cuda" else {}
    process = None if device else high_water(step.run)
    rows, parallelism = row_paths(step.model), job.run_config.parallelism
    measured = memory(trace, "measured", rows, **device)
    in_buckets = (BACKWARD, ALL_REDUCE) if parallelism.row.has_buckets else ()  # which belong to no module
    calls = (call._replace(path="") if call[:2] == in_buckets else call for call in trace.collectives)
    sent = traffic(calls, rows, 0, ONE_PROCESS)
    if rank == 0:
        if job.wants_snapshot:
            send("snapshot", b64encode(snapshot(trace)).decode())
        send("machine", machine_name(step.device))
        if process is not None:
            send("process", process)
        send("traffic", sent)
        send("measured", measured)
    return RankRow(
        ranks=(rank,),
        state_bytes=trace.state_bytes,
        cost=measured.cost,
        phases=measured.phases,
        traffic=sent,
        process_high_water_bytes=process.run_high_water_bytes if process else 0,
    )
