"""The launcher of real ranks: a child of `profile` that estimates the step, and runs torch's elastic agent."""

import os
import sys
import tempfile

from bertscope.analyses.memory.child import can_fork, child_command
from bertscope.analyses.memory.profile_job import Job, Launch, Say, estimate_job, explained, load
from bertscope.analyses.memory.ranks.rank import RANK_ENTRY, run_rank
from bertscope.errors import SelectionError
from bertscope.reports.memory import Timing

_POLL_SECONDS = 0.1  # between two looks of the agent at its ranks


def launch_ranks(job: Job, say: Say) -> None:
    """Send the estimate, start the ranks of this machine, and send the exit codes of those that failed, {} if none."""
    say("stage", "loading torch")
    from bertscope.torch_access import torch

    launch = job.launch
    assert launch is not None  # noqa: S101 the caller has looked
    if not torch.distributed.is_available():
        raise SelectionError("this build of torch has no torch.distributed; install one that has")
    device = job.run_config.device
    if device == "cuda" and torch.cuda.device_count() < launch.nproc:
        raise SelectionError(
            f"torch finds {torch.cuda.device_count()} CUDA devices here, and each of {launch.nproc} ranks needs one; "
            "use --device cpu, or a smaller --nproc"
        )
    is_forking = device == "cpu" and can_fork()
    if is_forking:
        load_for_ranks()
        if not _estimate_in_fork(job, say):
            return
    else:
        _estimate(job, say)
    say("stage", "starting the ranks")
    say("ended", _run_agent(launch, is_forking=is_forking))


def load_for_ranks() -> None:
    """Import what every rank needs, without running anything that starts a thread: forks then need not import it."""
    load()
    from torch.distributed import fsdp, optim  # noqa: F401
    from torch.distributed.tensor import parallel  # noqa: F401


def _estimate_in_fork(job: Job, say: Say) -> bool:
    """Estimate in a fork: the ranks are forked from this process too, which must have run no operator.

    Return False if there is a reason not to run the ranks, which was sent.
    """
    pid = os.fork()
    if not pid:
        code = 1
        try:
            _estimate(job, say)
            code = 0
        except Exception as error:
            say(*explained(error, job))
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def _estimate(job: Job, say: Say) -> None:
    """Send the estimate of one rank, and the FLOPs of all."""
    flops = estimate_job(job, say)
    parallelism = job.run_config.parallelism
    say("timing", Timing(warmup_seconds=0.0, flops=flops * parallelism.batches))


def _run_agent(launch: Launch, *, is_forking: bool) -> dict[str, int]:
    """Run the ranks until all have ended or one has failed."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    tempfile.tempdir = launch.folder
    is_alone = launch.nnodes == 1
    config = LaunchConfig(
        min_nodes=launch.nnodes,
        max_nodes=launch.nnodes,
        nproc_per_node=launch.nproc,
        run_id=launch.rdzv_id or "bertscope",
        rdzv_backend=launch.rdzv_backend,
        rdzv_endpoint=launch.rdzv_endpoint or "localhost:0",
        rdzv_configs={"timeout": int(launch.timeout_seconds)},
        max_restarts=0,
        monitor_interval=_POLL_SECONDS,
        start_method="fork",
        local_addr="127.0.0.1" if is_alone else None,
        logs_specs=DefaultLogsSpecs(log_dir=launch.folder, redirects=Std.ALL),
    )
    try:
        if is_forking:
            elastic_launch(config, run_rank)(launch.folder)
        else:
            program, *words = child_command(RANK_ENTRY)
            elastic_launch(config, program)(*words, launch.folder)
    except ChildFailedError as error:
        sys.stderr.flush()
        return {str(rank): failure.exitcode for rank, failure in error.failures.items()}
    return {}
