"""`profile`: each way to run a step in a fresh child process, which may die without taking the answer with it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

from bertscope import __version__
from bertscope.analyses.memory.child import child_command
from bertscope.analyses.memory.profile_job import MESSAGES, Found, Job, Timed
from bertscope.errors import SelectionError, SourceError, one_line
from bertscope.reports.base import Subject
from bertscope.reports.memory import BreakEven, Memory, MemoryReport, Timing, Variant
from bertscope.reports.reader import typed
from bertscope.run_config import NONE
from bertscope.units import bytes_text

_Progress = Callable[[str], None]
_POLL_SECONDS = 0.2
_MAX_MESSAGE_BYTES = 2**27  # a step of 100,000 events needs 20 MiB
INTERRUPTED = ("interrupted", "was interrupted")


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """What the children brought back; a snapshot is a file for PyTorch's memory viewer."""

    variants: tuple[Variant, ...]
    machine: str
    snapshots: tuple[bytes | None, ...]


def profile_report(
    jobs: Sequence[Job], *, timeout_seconds: float = 600.0, progress: _Progress = lambda text: None
) -> tuple[MemoryReport, tuple[bytes | None, ...]]:
    """The measurements of one model's step in several ways, and their snapshots."""
    found = profile_variants(jobs, timeout_seconds=timeout_seconds, progress=progress)
    first = jobs[0]
    run = {
        name: value for name, value in first.run_config.to_dict().items() if name not in ("checkpointing", "reentrant")
    }
    config = first.source.config
    about = Subject(
        name=first.source.name,
        architecture=first.source.architecture,
        dtype=first.run_config.dtype,
        attention=config.attn_implementation,
        config=config.to_dict(),
        ignored_fields=config.ignored,
        torch_version=version("torch"),  # this process does without torch
        bertscope_version=__version__,
        obtained="measured",
    )
    return MemoryReport(subject=about, run=run, machine=found.machine, variants=found.variants), found.snapshots


@dataclass
class _Told:
    """What a child has said so far."""

    stage: str = "starting"
    taken: int = 0  # by torch and Python, of the memory limit
    estimated: Memory | None = None
    found: Found | None = None
    result: Timed | None = None
    snapshot: str | None = None  # base64
    outlook: BreakEven | None = None
    problem: tuple[str, str] | None = None
    closed: bool = False
    stderr: list[bytes] = field(default_factory=list)


def profile_variants(
    jobs: Sequence[Job], *, timeout_seconds: float = 600.0, progress: _Progress = lambda text: None
) -> Profiled:
    """Every job in a child of its own, one after the other.

    A child that cannot finish leaves a variant with its `failure`; after an interruption no further one is
    started. Raises SelectionError for a question that the child refuses.
    """
    heard: list[_Told] = []
    for job in jobs:
        heard.append(_ask(job, timeout_seconds, progress))
        if heard[-1].problem == INTERRUPTED:
            break
    return Profiled(
        variants=tuple(_variant(job, told) for job, told in zip(jobs, heard, strict=False)),
        machine=next((told.found.machine for told in heard if told.found), ""),
        snapshots=tuple(b64decode(told.snapshot) if told.snapshot else None for told in heard),
    )


def _ask(job: Job, timeout_seconds: float, progress: _Progress) -> _Told:
    question = job.to_json().encode()
    child = subprocess.Popen(  # noqa: S603 words of this program
        child_command("bertscope.analyses.memory.profile_worker:main"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches the parent alone, and the whole group can be stopped
        env=os.environ | _cache_folder(),
    )
    told = _Told()
    try:
        with suppress(BrokenPipeError):
            child.stdin.write(question)  # type: ignore[union-attr]
            child.stdin.close()  # type: ignore[union-attr]
        _listen(child, told, time.monotonic() + timeout_seconds, timeout_seconds, job, progress)
    except KeyboardInterrupt:
        told.problem = INTERRUPTED
    finally:
        _stop(child)
    if told.result is None and told.problem is None:
        told.problem = ("died", _death(child, told))
    if told.problem is not None and told.problem[0] == "refused":
        raise SelectionError(told.problem[1])
    return told


def _cache_folder() -> dict[str, str]:
    """Name a folder that exists for the cache of torch, which would make one."""
    return {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())}


def _listen(
    child: subprocess.Popen[bytes], told: _Told, deadline: float, timeout: float, job: Job, progress: _Progress
) -> None:
    messages: queue.Queue[tuple[str, Any] | None] = queue.Queue()
    threading.Thread(target=_receive, args=(child.stdout, messages), daemon=True).start()
    threading.Thread(target=_collect, args=(child.stderr, told.stderr), daemon=True).start()
    while True:
        try:
            message = messages.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            if time.monotonic() > deadline:
                told.problem = ("timeout", f"ran for longer than {timeout:g} s")
                return
            progress(f"{job.run_config.checkpointing}: {told.stage}")
            continue
        if message is None:
            return
        _note(told, *message)
        if told.problem is not None:
            return
        progress(f"{job.run_config.checkpointing}: {told.stage}")


def _note(told: _Told, kind: str, content: Any) -> None:
    if kind in vars(told):
        setattr(told, kind, content)
    else:
        told.problem = (kind, content)


def _receive(stream: Any, messages: queue.Queue[tuple[str, Any] | None]) -> None:
    """Put each message in the queue, and None after the last; a dying child may leave half a line."""
    with suppress(OSError, ValueError):
        while line := stream.readline(_MAX_MESSAGE_BYTES):
            if line.endswith(b"\n") or len(line) == _MAX_MESSAGE_BYTES:
                messages.put(_message(line))
    messages.put(None)


def _message(line: bytes) -> tuple[str, Any]:
    """Return the kind and the content of a message; of any other line, `garbled` and its beginning."""
    try:
        kind, content = json.loads(line)
        return kind, typed(MESSAGES[kind], content, kind)
    except (ValueError, KeyError, TypeError, RecursionError, SourceError):
        shown = one_line(line[:100].decode(errors="replace").strip(), limit=80)
        return "garbled", f"printed {shown!r} where its parent expected a message"


def _collect(stream: Any, lines: list[bytes]) -> None:
    with suppress(OSError, ValueError):
        while line := stream.readline(2**16):
            lines[:] = [*lines[-20:], line]


def _stop(child: subprocess.Popen[bytes]) -> None:
    """No child outlives its parent's interest in it."""
    with suppress(ProcessLookupError, PermissionError):
        if child.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                child.wait(0.5)
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            with suppress(OSError):
                stream.close()


def _death(child: subprocess.Popen[bytes], told: _Told) -> str:
    code = child.returncode
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    last = b"".join(told.stderr).decode(errors="replace").strip().splitlines()
    return f"ended with exit code {code}" + (f": {one_line(last[-1], limit=200)}" if last else "")


def _variant(job: Job, told: _Told) -> Variant:
    run_config = job.run_config
    variant = Variant(
        checkpointing=run_config.checkpointing,
        reentrant=run_config.reentrant,
        estimated=told.estimated,
        outlook=told.outlook,
    )
    if told.found is not None:
        variant = replace(variant, measured=told.found.measured, process=told.found.process)
    if told.found is None or told.result is None:
        return replace(variant, failure=_failure(job, told))
    median, flops = told.result.median_seconds, told.result.flops
    return replace(
        variant,
        timing=Timing(
            warmup_seconds=told.found.warmup_seconds,
            step_seconds=told.result.step_seconds,
            median_seconds=median,
            tokens_per_second=run_config.batch * run_config.seq / median if median else 0.0,
            flops=flops,
            flops_per_second=flops / median if median else 0.0,
        ),
    )


def _taken(told: _Told) -> str:
    return f", of which torch and Python take {bytes_text(told.taken)}" if told.taken else ""


def _failure(job: Job, told: _Told) -> str:
    """What happened, what had been reached, and what to try."""
    kind, text = told.problem or ("died", "ended")
    limit = f" (limit {bytes_text(job.memory_limit_bytes)}{_taken(told)})" if job.memory_limit_bytes else ""
    words = {"out of memory": f"ran out of memory{limit}", "failed": f"failed: {text}", "died": f"{text}{limit}"}
    happened = words.get(kind, text)
    expected = f"; the estimate is {bytes_text(told.estimated.peak.peak_bytes)}" if told.estimated is not None else ""
    others = {"interrupted": "run it again to measure",
              "garbled": "remove what prints when Python starts (a .pth file, sitecustomize)"}  # fmt: skip
    if kind in others:
        return f"the child {happened} while {told.stage}{expected}; {others[kind]}"
    remedy = "a smaller --batch or --seq"
    if job.run_config.checkpointing == NONE and job.run_config.mode != "inference":
        remedy += ", --checkpointing"
    if kind == "timeout":
        remedy += ", or a longer --timeout"
    elif job.memory_limit_bytes:
        remedy += ", or a higher --memory-limit"
    return f"the child {happened} while {told.stage}{expected}; try {remedy}"
