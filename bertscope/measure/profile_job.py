"""The job of a child of `profile`, its messages, and the memory of this machine as Linux reports it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_type_hints

from bertscope.reports.base import Subject
from bertscope.reports.json import typed
from bertscope.reports.memory import BreakEven, Memory, ProcessMemory, RankRow, Timing, TrafficRow
from bertscope.reports.tool import CardWork, Machine
from bertscope.settings.rows import permits_of, with_permits
from bertscope.settings.run_config import RunConfig
from bertscope.sources.model_source import ModelSource, source_from_data

_GROUP = Path("/sys/fs/cgroup")  # of a container, version 2
Say = Callable[[str, Any], None]


@dataclass(frozen=True, kw_only=True)
class RankLaunch:
    """The real ranks of a job, and the one that a child is; they meet at a file in the folder."""

    nproc: int
    timeout_seconds: float = 600.0
    rank: int | None = None  # None: the child estimates
    folder: str = ""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One child's work."""

    source: ModelSource
    run_config: RunConfig
    steps: int | None = 3  # None: as many as `timed_steps` returns
    threads: int | None = None
    seed: int = 0
    memory_limit_bytes: int | None = None
    other_run: RunConfig | None = None  # the run of the first job, for the break-even batch
    beside_peak_bytes: int = 0  # its estimate
    wants_snapshot: bool = False  # the trace for PyTorch's memory viewer
    wants_calibration: bool = False  # what a calibration has of it
    launch: RankLaunch | None = None  # of real ranks; None: the child itself runs the step

    def to_json(self) -> str:
        """Return the job with its source as JSON; raise SelectionError for a model that only this process has."""
        source = type(self.source).__name__, self.source.to_data()
        permits = permits_of(self.source, self.run_config, self.other_run)
        return json.dumps(vars(self) | {"source": source, "permits": permits}, default=vars)

    @classmethod
    def from_json(cls, text: str | bytes) -> Job:
        """Return the job that `to_json` wrote."""
        data = json.loads(text)
        permits, (kind, content) = data.pop("permits"), data.pop("source")
        source = source_from_data(kind, content, permits)
        runs = {name: typed(RunConfig | None, data.pop(name), name) for name in ("run_config", "other_run")}
        run_configs: Any = {name: run and with_permits(run, permits) for name, run in runs.items()}
        launch = typed(RankLaunch | None, data.pop("launch"), "launch")
        return cls(source=source, launch=launch, **run_configs, **data)


@dataclass
class Sent:
    """The messages that a child has sent so far. A message's type is its field's type."""

    subject: Subject | None = None
    stage: str = "loading torch"
    taken: int = 0  # bytes of the memory limit that torch and Python use
    estimated: Memory | None = None
    machine: str = ""
    process: ProcessMemory | None = None
    measured: Memory | None = None
    expected_seconds: float = 0.0  # of the first step, by its first micro-batch
    first_seconds: float = 0.0  # of the first step
    timing: Timing | None = None  # without steps; sent when the child is ready to run them
    snapshot: str | None = None  # base64
    break_even: BreakEven | None = None  # None is a message too: the growth says nothing
    seconds: list[float] = field(default_factory=list)  # of each timed step, a message each
    gpu: Machine | None = None  # this and the next two for a calibration
    work: CardWork | None = None
    rates: dict[str, float] = field(default_factory=dict)
    traffic: tuple[TrafficRow, ...] = ()  # of the first rank
    ranks: tuple[RankRow, ...] = ()  # what the messages of the ranks say


MESSAGES: dict[str, Any] = {  # kind -> type of its content
    **{
        name: get_args(hint)[0] if type(None) in get_args(hint) else hint for name, hint in get_type_hints(Sent).items()
    },
    "break_even": BreakEven | None,
    "seconds": float,
    "row": RankRow,
    **dict.fromkeys(("out of memory", "files", "failed"), str),
}


def read_message(line: bytes) -> tuple[str, Any]:
    """Return the kind and the content of a message; raises an error for any other line."""
    kind, content = json.loads(line)
    return kind, typed(MESSAGES[kind], content, kind)


def this_gpu(index: int | None = None) -> tuple[str, int] | None:
    """Return the name and the memory of a CUDA device, by default the current one; None without it."""
    from bertscope.torch_access import torch

    if not torch.cuda.is_available() or (index is not None and index >= torch.cuda.device_count()):
        return None
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
    return gpu.name, gpu.total_memory


# ---- the memory of this machine; None where the system does not report it ----


def proc_bytes(path: str, field: str) -> int | None:
    """Return a field of a file such as /proc/meminfo, whose lines are `MemAvailable:  1024 kB`."""
    with suppress(OSError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None


def machine_bytes() -> int | None:
    """Return the machine's memory, or the limit of its control group."""
    try:
        whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not available on this system
        return None
    limit = _group_bytes("max")
    return whole if limit is None else min(whole, limit)


def available_bytes() -> int | None:
    """Return the memory that a process can still get on the machine and in its control group."""
    available = proc_bytes("/proc/meminfo", "MemAvailable")
    limit, used = _group_bytes("max"), _group_bytes("current")
    return available if None in (available, limit, used) else min(available, limit - used)  # type: ignore[type-var, operator]


def _group_bytes(name: str) -> int | None:
    """Return a number of the control group; None without one, and for `max`, which means no limit."""
    try:
        return int((_GROUP / f"memory.{name}").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
