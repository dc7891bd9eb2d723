"""The job of a child of `profile`, its messages, and what the children of one process and of several ranks share."""

from __future__ import annotations

import ctypes
import errno
import gc
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

from bertscope.errors import BertscopeError, UnknownValueError, is_out_of_memory
from bertscope.measure.system_memory import proc_bytes
from bertscope.processes.child import ERROR, die_with_parent, error_message
from bertscope.processes.worker import read_error
from bertscope.reports.base import Subject
from bertscope.reports.calibration import CardWork, Machine
from bertscope.reports.json import typed
from bertscope.reports.memory import BreakEven, Memory, ProcessMemory, RankRow, Timing, TrafficRow
from bertscope.settings.rows import permits_of, with_permits
from bertscope.settings.run_config import RunConfig
from bertscope.sources.find import source_from_data
from bertscope.sources.model_source import ModelSource

_TOO_MANY = os.strerror(errno.EMFILE)
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
Say = Callable[[str, Any], None]


@dataclass(frozen=True, kw_only=True)
class RankLaunch:
    """The real ranks of a job; the folder has their files."""

    nproc: int
    timeout_seconds: float = 600.0
    folder: str = ""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of one child."""

    source: ModelSource
    run_config: RunConfig
    steps: int | None = 3  # None: as many as `timed_steps` returns
    threads: int | None = None
    seed: int = 0
    memory_limit_bytes: int | None = None
    beside: RunConfig | None = None  # the run of the first job, for the break-even batch
    beside_peak_bytes: int = 0  # its estimate
    wants_snapshot: bool = False  # the trace for PyTorch's memory viewer
    wants_card: bool = False  # what a calibration has of it
    launch: RankLaunch | None = None  # of real ranks; None: the child itself runs the step

    def to_json(self) -> str:
        """Return the job with its source as JSON; raise SelectionError for a model that only this process has."""
        source = type(self.source).__name__, self.source.to_data()
        permits = permits_of(self.source, self.run_config, self.beside)
        return json.dumps(vars(self) | {"source": source, "permits": permits}, default=vars)

    @classmethod
    def from_json(cls, text: str | bytes) -> Job:
        """Return the job that `to_json` wrote."""
        data = json.loads(text)
        permits, (kind, content) = data.pop("permits"), data.pop("source")
        source = source_from_data(kind, content, permits)
        runs = {name: typed(RunConfig | None, data.pop(name), name) for name in ("run_config", "beside")}
        run_configs: Any = {name: run and with_permits(run, permits) for name, run in runs.items()}
        launch = typed(RankLaunch | None, data.pop("launch"), "launch")
        return cls(source=source, launch=launch, **run_configs, **data)


def printed_file(folder: str, rank: int) -> Path:
    """Return the file with what a rank prints."""
    return Path(folder) / f"{rank}.printed"


@dataclass
class Sent:
    """The messages that a child has sent so far. The type of a message is the type of its field."""

    subject: Subject | None = None
    stage: str = "loading torch"
    taken: int = 0  # bytes of the memory limit that torch and Python use
    estimated: Memory | None = None
    machine: str = ""
    process: ProcessMemory | None = None
    measured: Memory | None = None
    timing: Timing | None = None  # without steps; sent when the child is ready to run them
    snapshot: str | None = None  # base64
    outlook: BreakEven | None = None  # None is a message too: the growth says nothing
    seconds: list[float] = field(default_factory=list)  # of each timed step, a message each
    card: Machine | None = None  # this and the next two for a calibration
    work: CardWork | None = None
    rates: dict[str, float] = field(default_factory=dict)
    ended: dict[str, int] | None = None  # of a launcher: the exit codes of the ranks that failed
    traffic: tuple[TrafficRow, ...] = ()  # of the first rank
    ranks: tuple[RankRow, ...] = ()  # what the messages of the ranks say


MESSAGES: dict[str, Any] = {  # kind -> type of its content
    **{
        name: get_args(hint)[0] if type(None) in get_args(hint) else hint for name, hint in get_type_hints(Sent).items()
    },
    "outlook": BreakEven | None,
    "seconds": float,
    "pid": int,  # this and the next of a rank
    "row": RankRow,
    **dict.fromkeys(("out of memory", "files", "failed"), str),
}


def read_message(line: bytes) -> tuple[str, Any]:
    """Return the kind and the content of a message; raises an error for any other line."""
    if (error := read_error(line)) is not None:
        return ERROR, error
    kind, content = json.loads(line)
    return kind, typed(MESSAGES[kind], content, kind)


def stages(send: Say, step_name: str) -> Callable[[str], AbstractContextManager[None]]:
    """Return a function that sends the phase of a step that begins."""

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        send("stage", f"in the {name} phase of {step_name}")
        yield

    return stage


def load_what_jobs_need() -> None:
    """Import what every job needs, without running anything that starts a thread."""
    from bertscope.measure import profiler_run  # noqa: F401
    from bertscope.memory import estimate  # noqa: F401
    from bertscope.tracing.fake_tensors import load_fake_tensors

    load_fake_tensors()


def set_up_process() -> None:
    """Have the system kill this process when the parent dies, and first when memory runs out."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    die_with_parent()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def set_memory_limit(job: Job, send: Say) -> None:
    """Set the memory limit; of a process without a GPU, send the bytes of it that torch and Python already use.

    The limit starts after the imports: a library that runs out of memory while it loads may hang.
    """
    from bertscope.torch_access import torch

    if job.memory_limit_bytes is None:
        return
    if job.run_config.device == "cuda":
        whole = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(job.memory_limit_bytes / whole, 1.0))
        return
    import resource

    torch.ones(2**20).add_(1)  # starts the threads now: OpenMP ends the process if it has no memory for them
    send("taken", status_bytes("VmData") or 0)
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
    """Send the estimate, and return the FLOPs of a step."""
    from bertscope.memory.simulator import Simulator

    send("stage", "estimating")
    steps = Simulator(job.source)
    if job.source.bert_config is None:
        send("subject", steps.facts(job.run_config).subject)
    with suppress(UnknownValueError):  # then there is only the measurement
        found = steps.memory(job.run_config)
        send("estimated", found)
        if job.beside is not None and job.source.layer_path and found.cost.peak_bytes >= job.beside_peak_bytes:
            send("outlook", steps.break_even(job.beside, job.run_config))
    return steps.flops(job.run_config)


def machine_name(device: str) -> str:
    """Return the name of the processor or the GPU that runs the step."""
    from bertscope.torch_access import torch

    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    model = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or 'CPU'}, {torch.get_num_threads()} threads"


def set_malloc(option: int, value: int) -> None:
    """Set an option of glibc's malloc."""
    with suppress(OSError, AttributeError):  # a C library other than glibc
        ctypes.CDLL(None).mallopt(option, value)


def high_water(run: Callable[[], None]) -> ProcessMemory | None:
    """Return the high-water mark of this process over one step; None if the system does not report it."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    life = status_bytes("VmHWM")
    before = status_bytes("VmRSS")
    if before is None or life is None:
        run()
        return None
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the mark
    run()
    mark = status_bytes("VmHWM") or 0
    return ProcessMemory(resident_before_bytes=before, high_water_bytes=mark, run_high_water_bytes=max(life, mark))


def status_bytes(field: str) -> int | None:
    """Return a field of /proc/self/status in bytes; None without it."""
    return proc_bytes("/proc/self/status", field)
