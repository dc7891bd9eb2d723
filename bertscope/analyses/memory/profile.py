"""`profile`: the measurement of each run in a new child process, whose failure does not end the parent."""

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
    """The results of all children; a snapshot is a file for PyTorch's memory viewer."""

    variants: tuple[Variant, ...]
    machine: str
    snapshots: tuple[bytes | None, ...]


def profile_report(
    jobs: Sequence[Job], *, timeout_seconds: float = 600.0, progress: _Progress = lambda text: None
) -> tuple[MemoryReport, tuple[bytes | None, ...]]:
    """Return the measurements of one model's step for each job, and their snapshots."""
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
        torch_version=version("torch"),  # this process does not import torch
        bertscope_version=__version__,
        obtained="measured",
    )
    return MemoryReport(subject=about, run=run, machine=found.machine, variants=found.variants), found.snapshots


@dataclass
class _Sent:
    """The messages that a child has sent so far."""

    stage: str = "starting"
    taken: int = 0  # bytes of the memory limit that torch and Python use
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
    """Run each job in a separate child, one after the other.

    If a child cannot finish, its variant has a `failure`; an interruption skips the jobs that follow. Raises
    SelectionError for a job that the child refuses.
    """
    children: list[_Sent] = []
    for job in jobs:
        children.append(_ask(job, timeout_seconds, progress))
        if children[-1].problem == INTERRUPTED:
            break
    return Profiled(
        variants=tuple(_variant(job, sent) for job, sent in zip(jobs, children, strict=False)),
        machine=next((sent.found.machine for sent in children if sent.found), ""),
        snapshots=tuple(b64decode(sent.snapshot) if sent.snapshot else None for sent in children),
    )


def _ask(job: Job, timeout_seconds: float, progress: _Progress) -> _Sent:
    question = job.to_json().encode()
    child = subprocess.Popen(  # noqa: S603 words of this program
        child_command("bertscope.analyses.memory.profile_worker:main"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # only the parent receives Ctrl-C, and it can kill the whole group
        env=os.environ | _cache_folder(),
    )
    sent = _Sent()
    try:
        with suppress(BrokenPipeError):
            child.stdin.write(question)  # type: ignore[union-attr]
            child.stdin.close()  # type: ignore[union-attr]
        _listen(child, sent, time.monotonic() + timeout_seconds, timeout_seconds, job, progress)
    except KeyboardInterrupt:
        sent.problem = INTERRUPTED
    finally:
        _stop(child)
    if sent.result is None and sent.problem is None:
        sent.problem = ("died", _death(child, sent))
    if sent.problem is not None and sent.problem[0] == "refused":
        raise SelectionError(sent.problem[1])
    return sent


def _cache_folder() -> dict[str, str]:
    """Return an environment that names an existing cache folder, since torch would create one."""
    return {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())}


def _listen(
    child: subprocess.Popen[bytes], sent: _Sent, deadline: float, timeout: float, job: Job, progress: _Progress
) -> None:
    messages: queue.Queue[tuple[str, Any] | None] = queue.Queue()
    threading.Thread(target=_receive, args=(child.stdout, messages), daemon=True).start()
    threading.Thread(target=_collect, args=(child.stderr, sent.stderr), daemon=True).start()
    while True:
        try:
            message = messages.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            if time.monotonic() > deadline:
                sent.problem = ("timeout", f"ran for longer than {timeout:g} s")
                return
            progress(f"{job.run_config.checkpointing}: {sent.stage}")
            continue
        if message is None:
            return
        _note(sent, *message)
        if sent.problem is not None:
            return
        progress(f"{job.run_config.checkpointing}: {sent.stage}")


def _note(sent: _Sent, kind: str, content: Any) -> None:
    if kind in vars(sent):
        setattr(sent, kind, content)
    else:
        sent.problem = (kind, content)


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
    """Wait briefly for the child to end, kill its process group, and close its streams."""
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


def _death(child: subprocess.Popen[bytes], sent: _Sent) -> str:
    code = child.returncode
    if code < 0:
        name = signal.Signals(-code).name
        hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        return f"was killed by {name}{hint}"
    last = b"".join(sent.stderr).decode(errors="replace").strip().splitlines()
    return f"ended with exit code {code}" + (f": {one_line(last[-1], limit=200)}" if last else "")


def _variant(job: Job, sent: _Sent) -> Variant:
    run_config = job.run_config
    variant = Variant(
        checkpointing=run_config.checkpointing,
        reentrant=run_config.reentrant,
        estimated=sent.estimated,
        outlook=sent.outlook,
    )
    if sent.found is not None:
        variant = replace(variant, measured=sent.found.measured, process=sent.found.process)
    if sent.found is None or sent.result is None:
        return replace(variant, failure=_failure(job, sent))
    median, flops = sent.result.median_seconds, sent.result.flops
    return replace(
        variant,
        timing=Timing(
            warmup_seconds=sent.found.warmup_seconds,
            step_seconds=sent.result.step_seconds,
            median_seconds=median,
            tokens_per_second=run_config.batch * run_config.seq / median if median else 0.0,
            flops=flops,
            flops_per_second=flops / median if median else 0.0,
        ),
    )


def _taken(sent: _Sent) -> str:
    return f", of which torch and Python take {bytes_text(sent.taken)}" if sent.taken else ""


def _failure(job: Job, sent: _Sent) -> str:
    """Return a text on the failure, the stage that it happened in, and a remedy."""
    kind, text = sent.problem or ("died", "ended")
    limit = f" (limit {bytes_text(job.memory_limit_bytes)}{_taken(sent)})" if job.memory_limit_bytes else ""
    words = {"out of memory": f"ran out of memory{limit}", "failed": f"failed: {text}", "died": f"{text}{limit}"}
    happened = words.get(kind, text)
    expected = f"; the estimate is {bytes_text(sent.estimated.peak.peak_bytes)}" if sent.estimated is not None else ""
    others = {"interrupted": "run it again to measure",
              "garbled": "remove what prints when Python starts (a .pth file, sitecustomize)"}  # fmt: skip
    if kind in others:
        return f"the child {happened} while {sent.stage}{expected}; {others[kind]}"
    remedy = "a smaller --batch or --seq"
    if job.run_config.checkpointing == NONE and job.run_config.mode != "inference":
        remedy += ", --checkpointing"
    if kind == "timeout":
        remedy += ", or a longer --timeout"
    elif job.memory_limit_bytes:
        remedy += ", or a higher --memory-limit"
    return f"the child {happened} while {sent.stage}{expected}; try {remedy}"
