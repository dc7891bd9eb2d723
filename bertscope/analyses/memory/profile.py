"""`profile`: the measurement of each run in a new child process, whose failure does not end the parent."""

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

from bertscope import __version__
from bertscope.analyses.memory.child import child_command
from bertscope.analyses.memory.profile_worker import MESSAGES, Job
from bertscope.errors import SelectionError, SourceError, one_line
from bertscope.reports.base import Subject
from bertscope.reports.json import typed
from bertscope.reports.memory import BreakEven, Memory, MemoryReport, ProcessMemory, Timing, Variant
from bertscope.run_config import COMMON_FIELDS, NONE, implementation_name
from bertscope.units import bytes_text

_Progress = Callable[[str], None]
_POLL_SECONDS = 0.2
_MAX_MESSAGE_BYTES = 2**27  # a step of 100,000 events needs 20 MiB
INTERRUPTED = ("interrupted", "was interrupted")


def profile_report(
    jobs: Sequence[Job], *, timeout_seconds: float = 600.0, progress: _Progress = lambda text: None
) -> tuple[MemoryReport, tuple[bytes | None, ...]]:
    """Run one model's step for each job in a separate child; return the measurements, and snapshots as files.

    If a child cannot finish, its variant has a `failure`; an interruption skips the jobs that follow. Raises
    SelectionError for a job that the child refuses.
    """
    children: list[_Sent] = []
    for job in jobs:
        children.append(_ask(job, timeout_seconds, progress))
        if children[-1].problem == INTERRUPTED:
            break
    first = jobs[0]
    about = next((sent.subject for sent in children if sent.subject), None) or _subject(first)
    report = MemoryReport(
        subject=replace(about, obtained="measured"),
        run={name: value for name, value in first.run_config.to_dict().items() if name in COMMON_FIELDS},
        machine=next((sent.machine for sent in children if sent.machine), ""),
        variants=tuple(_variant(job, sent) for job, sent in zip(jobs, children, strict=False)),
    )
    return report, tuple(b64decode(sent.snapshot) if sent.snapshot else None for sent in children)


def _subject(job: Job) -> Subject:
    """Return the subject by the source; that of the built model comes from a child, unless it is a BERT's."""
    source, config = job.source, job.source.bert_config
    return Subject(
        name=source.name,
        architecture=source.architecture or source.name,
        dtype=job.run_config.dtype,
        attention=config.attn_implementation if config else None,
        implementation=implementation_name(job.run_config.model_implementation) if config else None,
        lora=source.settings.get("lora") if config else None,
        config=config.to_dict() if config else dict(source.settings) or None,
        ignored_fields=config.ignored if config else (),
        torch_version=version("torch"),  # this process does not import torch
        bertscope_version=__version__,
    )


@dataclass
class _Sent:
    """The messages that a child has sent so far."""

    subject: Subject | None = None
    stage: str = "starting"
    taken: int = 0  # bytes of the memory limit that torch and Python use
    estimated: Memory | None = None
    machine: str = ""
    process: ProcessMemory | None = None
    measured: Memory | None = None
    timing: Timing | None = None
    snapshot: str | None = None  # base64
    outlook: BreakEven | None = None
    problem: tuple[str, str] | None = None
    stderr: deque[bytes] = field(default_factory=lambda: deque(maxlen=21))  # its last lines


def _start() -> subprocess.Popen[bytes]:
    """Start a child that waits for its job."""
    return subprocess.Popen(  # noqa: S603 words of this program
        child_command("bertscope.analyses.memory.profile_worker:main"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # only the parent receives Ctrl-C, and it can kill the whole group
        env={"TORCHINDUCTOR_CACHE_DIR": tempfile.gettempdir(), **os.environ},  # torch would create a cache folder
    )


def _ask(job: Job, timeout_seconds: float, progress: _Progress) -> _Sent:
    question = job.to_json().encode()
    child = _start()
    sent = _Sent()
    try:
        with suppress(BrokenPipeError):
            child.stdin.write(question)  # type: ignore[union-attr]
            child.stdin.close()  # type: ignore[union-attr]
        _listen(child, sent, timeout_seconds, lambda: progress(f"{job.run_config.checkpointing}: {sent.stage}"))
    except KeyboardInterrupt:
        sent.problem = INTERRUPTED
    finally:
        _stop(child)
    if sent.timing is None and sent.problem is None:
        sent.problem = ("died", _death(child, sent))
    if sent.problem is not None and sent.problem[0] == "refused":
        raise SelectionError(sent.problem[1])
    return sent


def _listen(child: subprocess.Popen[bytes], sent: _Sent, timeout: float, progress: Callable[[], None]) -> None:
    deadline = time.monotonic() + timeout
    messages: queue.Queue[tuple[str, Any] | None] = queue.Queue()
    threading.Thread(target=_receive, args=(child.stdout, messages), daemon=True).start()
    threading.Thread(target=_collect, args=(child.stderr, sent.stderr), daemon=True).start()
    while sent.problem is None:
        try:
            message = messages.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            if time.monotonic() > deadline:
                sent.problem = ("timeout", f"ran for longer than {timeout:g} s")
        else:
            if message is None:
                return
            kind, content = message
            if kind in vars(sent):
                setattr(sent, kind, content)
            else:
                sent.problem = message
        if sent.problem is None:
            progress()


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


def _collect(stream: Any, lines: deque[bytes]) -> None:
    with suppress(OSError, ValueError):
        while line := stream.readline(2**16):
            lines.append(line)


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
    return Variant(
        checkpointing=job.run_config.checkpointing,
        reentrant=job.run_config.reentrant,
        estimated=sent.estimated,
        measured=sent.measured,
        timing=sent.timing,
        process=sent.process,
        outlook=sent.outlook,
        failure="" if sent.timing else _failure(job, sent),
    )


def _failure(job: Job, sent: _Sent) -> str:
    """Return a text on the failure, the stage that it happened in, and a remedy."""
    kind, text = sent.problem or ("died", "ended")
    taken = f", of which torch and Python take {bytes_text(sent.taken)}" if sent.taken else ""
    limit = f" (limit {bytes_text(job.memory_limit_bytes)}{taken})" if job.memory_limit_bytes else ""
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
