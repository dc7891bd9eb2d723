"""Real ranks: their launcher, a child of `profile` that estimates the step and starts them, and one of them.

A rank builds its part of the model, runs steps with the others, and writes messages to the file `RANK.messages` in the
folder of the job. torch's elastic agent is not used: it listens to every network, and unpickles what it is sent.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from bertscope.errors import SelectionError, name_of
from bertscope.measure.profile_job import Job, RankLaunch, Say, printed_file
from bertscope.measure.profile_worker import (
    answer_job,
    estimate_job,
    high_water,
    job_error,
    load_for_jobs,
    machine_name,
    set_memory_limit,
    set_up_process,
    stages,
)
from bertscope.measure.profiler_run import measured_device, real_step, step_seconds
from bertscope.memory.caching_allocator import snapshot
from bertscope.memory.fake_run import StepDevice, StepRecorder
from bertscope.memory.ranks import layers_of, make_meshes, parallelize
from bertscope.memory.step import ModelStep, Phase
from bertscope.memory.summary import NAMESPACES, kind_of, memory, traffic
from bertscope.memory.trace import MemoryTrace
from bertscope.processes.child import can_fork, child_command, run_and_end
from bertscope.reports.memory import ALL_REDUCE, BACKWARD, RankRow, Timing
from bertscope.settings.parallelism import ONE_PROCESS
from bertscope.torch_access import in_backward, nn, operator_name, storage_key, torch, tree_leaves
from bertscope.torch_access.distributed import drain, gloo_in_one_thread, process_group
from bertscope.tracing.module_tree import row_paths
from bertscope.tracing.record import Device, Recorder

RANK_ENTRY = "bertscope.measure.rank:run_command"
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_LOOK_SECONDS = 0.05  # between two looks of the launcher at the ranks
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
        """Return an operator's result."""
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


def run_command() -> None:
    """Run a rank; the argument is the job's folder."""
    run_rank(sys.argv[1])


def run_rank(folder: str) -> None:
    """Run the folder's job as the rank that the environment names."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # that of the launcher, which a fork has too, ends no collective
    faulthandler.register(signal.SIGUSR1)  # the parent asks for the place where a rank hangs
    set_up_process()
    with open(Path(folder) / f"{os.environ['RANK']}.messages", "wb", 0) as out:

        def send(kind: str, content: Any) -> None:
            """Write one message."""
            out.write(json.dumps([kind, content], default=vars).encode() + b"\n")

        send("pid", os.getpid())
        job = Job.from_json((Path(folder) / "job.json").read_bytes())
        try:
            _run(job, job.launch or RankLaunch(nproc=1), send)
        except Exception as error:
            send(*job_error(error, job))
            time.sleep(_LAST_SECONDS)
            raise


def _run(job: Job, launch: RankLaunch, send: Say) -> None:
    dist, device = torch.distributed, job.run_config.device
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(job.threads or max((os.cpu_count() or 1) // launch.nproc, 1))
    torch.manual_seed(job.seed)
    send("stage", "joining the others")
    # The ranks meet at a file in the folder of the job, which other users cannot read.
    dist.init_process_group(
        "nccl" if device == "cuda" else gloo_in_one_thread(_LOOPBACK),
        init_method=f"file://{launch.folder}/store",
        rank=int(os.environ["RANK"]),
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
        row = _measured(step, job, send)
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


def _measured(step: Any, job: Job, send: Say) -> RankRow:
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
    if int(os.environ["LOCAL_RANK"]) == 0:
        if job.wants_snapshot:
            send("snapshot", b64encode(snapshot(trace)).decode())
        send("machine", machine_name(step.device))
        if process is not None:
            send("process", process)
        send("traffic", sent)
        send("measured", measured)
    return RankRow(
        ranks=(int(os.environ["RANK"]),),
        state_bytes=trace.state_bytes,
        cost=measured.cost,
        phases=measured.phases,
        traffic=sent,
        process_high_water_bytes=process.run_high_water_bytes if process else 0,
    )


# ---- the launcher ----


def launcher() -> None:
    """Read a job from standard input and run its ranks."""
    answer_job(launch_ranks)


def launch_ranks(job: Job, send: Say) -> None:
    """Send the estimate, start the ranks of this machine, and send the exit codes of those that failed, {} if none."""
    launch = job.launch
    assert launch is not None  # noqa: S101 the caller has looked
    if not torch.distributed.is_available():
        raise SelectionError("this build of torch has no torch.distributed; install one that has")
    device = job.run_config.device
    if device == "cuda" and torch.cuda.device_count() < launch.nproc:
        raise SelectionError(
            f"torch finds {torch.cuda.device_count()} CUDA devices here, and each of {launch.nproc} ranks needs one; "
            f"use {name_of('device')} cpu, or a smaller {name_of('nproc')}"
        )
    is_forking = device == "cpu" and can_fork()
    if is_forking:
        load_for_ranks()
        if not _estimate_in_fork(job, send):
            return
    else:
        _estimate(job, send)
    send("stage", "starting the ranks")
    send("ended", run_ranks(launch, is_forking=is_forking))


def load_for_ranks() -> None:
    """Import what every rank needs, without running anything that starts a thread: forks then need not import it."""
    load_for_jobs()
    from torch.distributed import fsdp, optim  # noqa: F401
    from torch.distributed.tensor import parallel  # noqa: F401


def _estimate_in_fork(job: Job, send: Say) -> bool:
    """Estimate in a fork: the ranks are forked from this process too, which must have run no operator.

    Return False if there is a reason not to run the ranks, which was sent.
    """

    def estimate() -> None:
        try:
            _estimate(job, send)
        except Exception as error:
            send(*job_error(error, job))
            sys.exit(1)

    pid = os.fork()
    if not pid:
        run_and_end(estimate)
    return os.waitpid(pid, 0)[1] == 0


def _estimate(job: Job, send: Say) -> None:
    flops = estimate_job(job, send)
    parallelism = job.run_config.parallelism
    send("timing", Timing(warmup_seconds=0.0, flops=flops * parallelism.batches))


def run_ranks(launch: RankLaunch, *, is_forking: bool) -> dict[str, int]:
    """Run the ranks of this machine until all have ended or one has failed; return the exit codes of those that failed.

    No port is opened for that, and the processes exchange no objects: a rank writes its messages to a file.
    """
    started: dict[int, int] = {}  # process id -> rank
    failed: dict[str, int] = {}
    start = _forked if is_forking else _spawned
    try:
        for rank in range(launch.nproc):
            started[start(launch, rank)] = rank
        while started and not failed:
            for pid, rank in list(started.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    del started[pid]
                    if code := os.waitstatus_to_exitcode(status):
                        failed[str(rank)] = code
            time.sleep(_LOOK_SECONDS)
    finally:
        for pid in started:
            os.kill(pid, signal.SIGKILL)
        for pid in started:
            os.waitpid(pid, 0)
    return failed


def _environment(launch: RankLaunch, rank: int) -> dict[str, str]:
    """Return a rank's variables, as torchrun sets them; gloo and NCCL listen to loopback only."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": launch.nproc}
    # NCCL's RAS subsystem (from 2.24 on) would open a port too.
    sockets = {"GLOO_SOCKET_IFNAME": _LOOPBACK, "NCCL_SOCKET_IFNAME": _LOOPBACK, "NCCL_RAS_ENABLE": "0"}
    return {name: str(value) for name, value in numbers.items()} | sockets


def _forked(launch: RankLaunch, rank: int) -> int:
    def run() -> None:
        with open(printed_file(launch.folder, rank), "wb", 0) as printed, open(os.devnull, "rb") as nothing:
            for number, file in enumerate((nothing, printed, printed)):
                os.dup2(file.fileno(), number)
        os.environ |= _environment(launch, rank)
        run_rank(launch.folder)

    pid = os.fork()
    if not pid:
        run_and_end(run)
    return pid


def _spawned(launch: RankLaunch, rank: int) -> int:
    environment = os.environ | _environment(launch, rank)
    with open(printed_file(launch.folder, rank), "wb", 0) as printed:
        process = subprocess.Popen(  # noqa: S603 words of this program
            [*child_command(RANK_ENTRY), launch.folder],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            env=environment,
        )
    return process.pid
