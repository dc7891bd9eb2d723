"""A dry run from outside: the process that runs the script, its time, and what it sent."""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from bertscope.errors import SelectionError, SourceError, WorkerError, name_of
from bertscope.files import open_file
from bertscope.frozen import Record
from bertscope.gpus import Gpu
from bertscope.processes.child import ENDED, ERROR, GARBLED, Child, ForkedChild, Worker, starting
from bertscope.processes.folders import OwnFolder
from bertscope.progress import progress
from bertscope.reports.json import typed
from bertscope.reports.run import NOTHING_RAN, UNRECORDED, RunFit, RunFitReport, RunReport
from bertscope.reports.step import YES, ByteRange

_RANGE = re.compile(r"([A-Za-z_][\w.-]*)=([0-9]{1,9})\.\.([0-9]{1,9})", re.ASCII)
_Start = Callable[[], Child | ForkedChild]


class ScriptRun(Record):
    """A script with its arguments, and the GPU that it finds."""

    script: str  # its path, or the name of a module
    arguments: tuple[str, ...] = ()
    folder: str = ""  # of the script, absolute
    is_module: bool = False
    steps: int = 3
    gpu: Gpu | None = None
    budget_bytes: int | None = None
    limit_bytes: int | None = None  # what torch may reserve
    context: ByteRange = ByteRange()  # of CUDA
    margin: float = 0.0  # the share of the budget that a script which fits leaves free
    expandable_segments: bool = False
    network: bool = False
    sandbox: str = ""  # an empty folder, for the mounts; none for a run without
    memory_limit_bytes: int | None = None
    wants_snapshot: bool = False  # of the step with the peak, for PyTorch's memory viewer
    seed: int | None = None  # added to every seed that the script sets; its history is wanted
    token: str = ""  # the kind of the message with the report, so that no line a script prints is one

    @property
    def name(self) -> str:
        """Return the name of the script's file."""
        return os.path.basename(self.script)


def starting_runs(script_run: ScriptRun) -> AbstractContextManager[_Start]:
    """Return a context with a function that starts a run's process: a fork of one that has imported torch."""
    if not script_run.is_module and not Path(script_run.script).is_file():
        hint = f"name a Python file, or a module with {name_of('module')}"
        if script_run.script == "python" or " " in script_run.script:
            hint = "give the file, then its arguments, without quotes and without python"
        raise SourceError(f"there is no script {script_run.script!r}; {hint}")
    return starting("bertscope.dry_run.child:load_what_runs_need", "bertscope.dry_run.child:main")


def dry_run(
    script_run: ScriptRun, *, start: _Start, timeout_seconds: float, is_contained: bool = True
) -> tuple[RunReport, bytes | None]:
    """Run a script in a separate process, and return what it would hold on the GPU, and a snapshot if it is wanted.

    Raises BertscopeError for a fault of the script, with its line, and WorkerError for one of the run: an operator
    without a rule, the time, the end of the process.
    """
    with ExitStack() as stack:
        if is_contained:
            folder = OwnFolder()
            stack.callback(folder.cleanup)
            inside = os.path.join(folder.name, "sandbox")
            os.mkdir(inside)
            script_run = replace(script_run, sandbox=inside)
        script_run = replace(script_run, token=secrets.token_hex())
        worker = Worker(start(), partial(_message, script_run.token), echo=sys.stderr)
        stack.callback(worker.stop)
        worker.send(asdict(script_run))
        begun = time.monotonic()
        while True:
            seconds = time.monotonic() - begun
            progress(f"running {script_run.name}: {seconds:.0f} s")
            if message := worker.receive(min(max(timeout_seconds - seconds, 0.0), 1.0)):
                break
            if seconds >= timeout_seconds:
                raise WorkerError(
                    f"{script_run.name} ran for longer than {timeout_seconds:g} s; give a longer {name_of('timeout')}"
                )
        kind, content = message
        if kind == ERROR:
            raise content
        if kind in (ENDED, GARBLED):
            reason = content if kind == GARBLED else worker.death()
            raise WorkerError(f"the process of {script_run.name} {reason}")
    report = as_asked(script_run, content[0])
    return report, base64.b64decode(content[1]) if content[1] else None


def _message(token: str, line: bytes) -> tuple[str, Any]:
    """Return the report in a line of the process, which runs a user's code: plain data of its types, with the token."""
    kind, (report, picture) = json.loads(line)
    if kind != token:
        raise ValueError("the line is not the report")
    return kind, (typed(RunReport, report, "the report of the script"), str(picture or ""))


def as_asked(script_run: ScriptRun, sent: RunReport) -> RunReport:
    """Return the report that was sent, with what was asked for as this process knows it."""
    if not sent.phases:
        raise SelectionError(
            f"{script_run.name} put nothing on a CUDA device; does it choose the device with torch.cuda.is_available()?"
            f" {UNRECORDED.capitalize()}"
        )
    known = {name: getattr(script_run, name) for name in ("script", "arguments", "gpu", "budget_bytes")}
    return replace(sent, **known)


def fitted(
    script_run: ScriptRun, wanted: str, run: Callable[[ScriptRun], RunReport], budget_bytes: int
) -> RunFitReport:
    """Return the largest value of an argument with which a script fits; `wanted` is NAME=low..high.

    The bytes on the GPU at the two largest values that fit give a line, and where it ends is the next guess; a guess
    above a value that does not fit gives way to the middle.
    """
    match = _RANGE.fullmatch(wanted)
    if match is None or int(match[2]) < 1 or int(match[2]) > int(match[3]):
        raise SelectionError(f"a search is NAME=low..high, such as batch_size=1..512; got {wanted[:60]!r}")
    name, low, high = match[1], int(match[2]), int(match[3])
    rows: dict[int, RunFit] = {}
    path = Path(script_run.script)
    text = ""
    if path.is_file():
        with open_file(path, "name a script") as file:
            text = file.read().decode(errors="replace")
    dashed = name.replace("_", "-")
    option = dashed if f"--{dashed}" in text and f"--{name}" not in text else name
    costs: list[Any] = []

    def fits(value: int) -> bool:
        if value not in rows:
            progress(f"running with {name} {value}")
            report = run(replace(script_run, arguments=tuple(with_value(script_run.arguments, option, value))))
            if report.cost is None:
                raise SelectionError(f"{script_run.name} allocates nothing on a CUDA device")
            if not report.has_run:
                raise WorkerError(f"{script_run.name}: {NOTHING_RAN}")
            costs.append((report.phases, report.cost))
            if len(costs) == 2 and costs[0] == costs[1] and value >= 2 * low and report.cost.verdict == YES:
                same = f"{script_run.name} takes the same memory in every phase with {name} {low:,} and {value:,}"
                raise SelectionError(f"{same}; does it read --{option}? Name an argument that it reads")
            rows[value] = RunFit(value=value, cost=report.cost)
        return rows[value].answer == YES

    if fits(low):
        least, most = low, high + 1
    else:  # memory may shrink with the argument, such as a number of chunks
        least, most = (high, high + 1) if high > low and fits(high) else (low - 1, low)
    while most - least > 1:
        *_, one, two = (None, *(rows[value] for value in sorted(rows) if rows[value].answer == YES))
        value = min(least * 16, high)
        if one is not None and two is not None and two.cost.gpu_bytes > one.cost.gpu_bytes:
            slope = (two.cost.gpu_bytes - one.cost.gpu_bytes) / (two.value - one.value)
            value = int(two.value + (two.cost.usable_bytes - two.cost.gpu_bytes) / slope)
        if value >= most or value <= least + 1:  # the bytes on the GPU grow in steps of 2 MiB
            value = (least + most) // 2 if most <= high else min(max(value, least + least // 32 + 1), high)
        least, most = (value, most) if fits(value) else (least, value)
    ordered = tuple(rows[value] for value in sorted(rows))
    peaks = [row.peak_bytes for row in ordered if row.answer == YES]
    answers = [row.answer == YES for row in ordered]
    is_uneven = peaks != sorted(peaks) or answers != sorted(answers, reverse=True)
    return RunFitReport(
        script=script_run.script, arguments=script_run.arguments, argument=name, low=low, high=high,
        largest=least if least >= low else 0, gpu=script_run.gpu, budget_bytes=budget_bytes, rows=ordered,
        remarks=(f"the peak does not grow evenly with {name}; a value between may not fit",) * is_uneven,
    )  # fmt: skip


def with_value(arguments: Sequence[str], name: str, value: int) -> list[str]:
    """Return arguments in which a name has this value: where it is, as `--name 8`, `--name=8` or `name=8`."""
    plain = name.lstrip("-").replace("-", "_")
    changed, is_there = list(arguments), False
    for number, word in enumerate(arguments):
        key, equals, _ = word.partition("=")
        if key.lstrip("-").replace("-", "_") == plain and (equals or key.startswith("-")):
            changed[number : number + (1 if equals else 2)] = [f"{key}={value}"] if equals else [word, str(value)]
            is_there = True
    return changed if is_there else [*changed, f"--{name}", str(value)]
