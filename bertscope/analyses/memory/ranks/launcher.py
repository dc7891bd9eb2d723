"""The launcher of real ranks: a child of `profile` that estimates the step, and starts the ranks of this machine.

torch's elastic agent is not used: it listens to every network, and unpickles what it is sent.
"""

import os
import signal
import subprocess
import sys
import time

from bertscope.analyses.memory.profile_job import Job, RankLaunch, Say, estimate_job, job_error, load_what_jobs_need
from bertscope.analyses.memory.ranks.rank import RANK_ENTRY, printed_file, run_rank
from bertscope.errors import SelectionError, name_of
from bertscope.processes.child import can_fork, child_command
from bertscope.reports.memory import Timing

_POLL_SECONDS = 0.05  # between two looks at the ranks


def launch_ranks(job: Job, send: Say) -> None:
    """Send the estimate, start the ranks of this machine, and send the exit codes of those that failed, {} if none."""
    send("stage", "loading torch")
    from bertscope.torch_access import torch

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
    load_what_jobs_need()
    from torch.distributed import fsdp, optim  # noqa: F401
    from torch.distributed.tensor import parallel  # noqa: F401


def _estimate_in_fork(job: Job, send: Say) -> bool:
    """Estimate in a fork: the ranks are forked from this process too, which must have run no operator.

    Return False if there is a reason not to run the ranks, which was sent.
    """
    pid = os.fork()
    if not pid:
        code = 1
        try:
            _estimate(job, send)
            code = 0
        except Exception as error:
            send(*job_error(error, job))
        finally:
            os._exit(code)
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
            time.sleep(_POLL_SECONDS)
    finally:
        for pid in started:
            os.kill(pid, signal.SIGKILL)
        for pid in started:
            os.waitpid(pid, 0)
    return failed


def _environment(launch: RankLaunch, rank: int) -> dict[str, str]:
    """Return the variables of a rank, as torchrun sets them; gloo and NCCL listen to loopback only."""
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": launch.nproc}
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    # NCCL's RAS subsystem (from 2.24 on) would open a port too.
    return (
        {name: str(value) for name, value in found.items()} | dict.fromkeys(names, loopback) | {"NCCL_RAS_ENABLE": "0"}
    )


def _forked(launch: RankLaunch, rank: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        with open(printed_file(launch.folder, rank), "wb", 0) as printed, open(os.devnull, "rb") as nothing:
            for number, file in enumerate((nothing, printed, printed)):
                os.dup2(file.fileno(), number)
        os.environ |= _environment(launch, rank)
        run_rank(launch.folder)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _spawned(launch: RankLaunch, rank: int) -> int:
    environment = os.environ | _environment(launch, rank)
    with open(printed_file(launch.folder, rank), "wb", 0) as printed:
        process = subprocess.Popen(  # noqa: S603 words of this program
            [*child_command(RANK_ENTRY), launch.folder], stdin=subprocess.DEVNULL, stdout=printed, stderr=printed,
            env=environment,
        )  # fmt: skip
    return process.pid
