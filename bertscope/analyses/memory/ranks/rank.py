"""A rank of a real job: it builds its part of the model, runs steps with the others, and writes messages to a file.

The file is `RANK.messages` in the folder of the job, and what the rank prints is in `RANK.printed`.
"""

import faulthandler
import json
import os
import signal
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from bertscope.analyses.memory.events import MemoryTrace
from bertscope.analyses.memory.fake_run import RunMode
from bertscope.analyses.memory.profile_job import (
    Job,
    RankLaunch,
    Say,
    high_water,
    job_error,
    machine_name,
    set_memory_limit,
    set_up_process,
)
from bertscope.analyses.memory.step import ModelStep, Phase
from bertscope.analyses.parallel.collectives import NAMESPACES, kind_of
from bertscope.reports.memory import ALL_REDUCE, RankRow
from bertscope.settings.parallelism import ONE_PROCESS
from bertscope.torch_access import DispatchMode, in_backward, operator_name, storage_key, torch, tree_leaves
from bertscope.torch_access.distributed import is_wrapper

_PAUSE_SECONDS = 0.05  # for the threads of gloo to free what they hold of the last collective
_STEPS = 2  # such a thread may be late all the same: of several steps the one with the lowest peaks counts


def live_run(step: ModelStep, phase: Phase) -> MemoryTrace:
    """Return the trace of a step with its collectives; the step must be in the steady state.

    `phase` is entered with each phase too.
    """
    return min(_live_runs(step, phase), key=lambda trace: sum(moment.live_bytes for moment in trace.peaks()))


def _live_runs(step: ModelStep, phase: Phase) -> Iterator[MemoryTrace]:
    mode = _LiveRunMode(step)

    @contextmanager
    def recorded(name: str) -> Iterator[None]:
        time.sleep(_PAUSE_SECONDS)
        with phase(name), mode.phase(name):
            yield

    with mode.watching():
        mode.add_state()
        step.run(recorded)  # what it leaves, the next step finds
        for _ in range(_STEPS):
            mode.restart()
            step.run(recorded)
            yield mode.trace()


class BucketMode(DispatchMode):
    """A mode that finds the buckets of DDP: it makes views of them when it is built, and reduces them in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if in_backward():
            is_use = operator.namespace in NAMESPACES and kind_of(operator_name(operator)) == ALL_REDUCE
        else:
            is_use = operator is torch.ops.aten.as_strided.default
        if is_use:
            self.found |= {storage_key(leaf): leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        return operator(*args, **(kwargs or {}))

    @property
    def buckets(self) -> dict[str, torch.Tensor]:
        """Return the buckets by number."""
        return {str(number): bucket for number, bucket in enumerate(self.found.values())}


class _LiveRunMode(RunMode):
    """A mode that records the memory of real tensors."""

    def __init__(self, step: ModelStep) -> None:
        super().__init__(step)
        self.scratch_bytes = lambda operator, args: 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented  # the operators on the tensors inside come next
        run = self.recorded if self.is_recording else self.result
        return run(operator, args, kwargs or {})

    def result(self, operator: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator."""
        return operator(*args, **kwargs)

    def true_bytes(self, operator: Any, args: Any, number: int, tensor: torch.Tensor) -> int | None:
        """Return None, for the true size; 0 for a tensor on another device, such as a step counter beside a GPU."""
        return None if tensor.device.type == self.step.device else 0


RANK_ENTRY = "bertscope.analyses.memory.ranks.rank:run_command"
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# A rank that fails waits before it ends, so that the others, which wait for it, do not fail too.
_LAST_SECONDS = 20.0
_MORE_SECONDS = 60.0  # beyond the timeout of the job, which names the rank that hangs


def printed_file(folder: str, rank: int) -> Path:
    """Return the file with what a rank prints."""
    return Path(folder) / f"{rank}.printed"


def run_command() -> None:
    """Run a rank; the argument is the folder of the job."""
    run_rank(sys.argv[1])


def run_rank(folder: str) -> None:
    """Run the job of the folder as the rank that the environment names."""
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
    from bertscope.torch_access import torch

    dist, device = torch.distributed, job.run_config.device
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(job.threads or max((os.cpu_count() or 1) // launch.nproc, 1))
    torch.manual_seed(job.seed)
    send("stage", "joining the others")
    # The ranks meet at a file in the folder of the job, which other users cannot read.
    dist.init_process_group(
        BACKENDS[device], init_method=f"file://{launch.folder}/store", rank=int(os.environ["RANK"]),
        world_size=launch.nproc, timeout=timedelta(seconds=launch.timeout_seconds + _MORE_SECONDS),
    )  # fmt: skip
    set_memory_limit(job, send)
    send("stage", "building the model")
    step = _built(job)
    with job.source.confined():
        if job.run_config.parallelism.row.has_buckets:
            _put_in_ddp(step)
        row = _measured(step, job, send)
        send("row", row)
        seconds = [_timed(step, number, job, send) for number in range(3 if job.steps is None else job.steps)]
    row = replace(row, step_seconds=tuple(seconds))
    send("row", row)
    send("stage", "waiting for the others to end")
    dist.barrier()
    dist.destroy_process_group()


def _built(job: Job) -> Any:
    """Return the step of this rank's part of the model."""
    from bertscope.analyses.memory.profiler_run import real_step
    from bertscope.analyses.parallel.strategies import layers_of, make_meshes, parallelize

    parallelism, path = job.run_config.parallelism, job.source.layer_path
    meshes = make_meshes(parallelism, job.run_config.device)
    return real_step(job.source, job.run_config, job.run_config.device,
                     lambda model: parallelize(model, layers_of(model, path), parallelism, meshes))  # fmt: skip


def _put_in_ddp(step: Any) -> None:
    """Have DDP average the gradients of a step.

    DDP has to know if parameters get no gradient, such as those of a pooler: one backward without it shows that. After
    its first backward DDP makes its buckets anew.
    """
    from torch.nn.parallel import DistributedDataParallel

    is_training = step.run_config.mode == "training"
    if is_training:
        step.run_micro_batch()
    has_unused = any(param.grad is None for param in step.model.parameters() if param.requires_grad)
    step.model.zero_grad(set_to_none=True)
    with BucketMode() as mode:
        wrapped = DistributedDataParallel(step.model, find_unused_parameters=is_training and has_unused)
    step.wrapper, loss = wrapped, step.loss
    step.loss = lambda _, inputs: loss(wrapped, inputs)
    if is_training:
        step.run()
        with BucketMode() as mode:
            step.run()
    step.buckets = mode.buckets


def _measured(step: Any, job: Job, send: Say) -> RankRow:
    """Measure the memory and the traffic of a step; the first rank of a machine sends its whole report."""
    from bertscope.analyses.memory.profiler_run import measured_device
    from bertscope.analyses.memory.snapshot import snapshot
    from bertscope.analyses.memory.summary import memory
    from bertscope.analyses.modules.module_tree import row_paths
    from bertscope.analyses.parallel.collectives import traffic
    from bertscope.reports.memory import BACKWARD

    step.run_first_steps(_stages(send, "the first steps"))
    trace = live_run(step, _stages(send, "the measured step"))
    send("stage", "measuring the process")
    device = measured_device(step) if step.device == "cuda" else {}
    process = None if device else high_water(step.run)
    rows, parallelism = row_paths(step.model), job.run_config.parallelism
    found = memory(trace, "measured", rows, **device)
    in_buckets = (BACKWARD, ALL_REDUCE) if parallelism.row.has_buckets else ()  # which belong to no module
    calls = (call._replace(path="") if call[:2] == in_buckets else call for call in trace.collectives)
    sent = traffic(calls, rows, step.model, ONE_PROCESS)
    if int(os.environ["LOCAL_RANK"]) == 0:
        if job.wants_snapshot:
            send("snapshot", b64encode(snapshot(trace)).decode())
        send("machine", machine_name(step.device))
        if process is not None:
            send("process", process)
        send("traffic", sent)
        send("measured", found)
    return RankRow(
        ranks=(int(os.environ["RANK"]),),
        state_bytes=trace.state_bytes,
        cost=found.cost,
        phases=found.phases,
        traffic=sent,
        process_high_water_bytes=process.run_high_water_bytes if process else 0,
    )


def _stages(send: Say, step_name: str) -> Callable[[str], Any]:
    """Return a function that sends the phase which begins."""

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        """Send the phase."""
        send("stage", f"in the {name} phase of {step_name}")
        yield

    return stage


def _timed(step: Any, number: int, job: Job, send: Say) -> float:
    """Return the seconds of a step that all ranks begin together."""
    from bertscope.analyses.memory.profiler_run import step_seconds
    from bertscope.torch_access import torch

    send("stage", f"timing step {number + 1} of {job.steps}")
    torch.distributed.barrier()
    return step_seconds(step)
