"""A dry run from outside: the process that runs the script, its time, and what it sent."""

from __future__ import annotations

import base64
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bertscope.dry_run.child import ScriptRun, record
from bertscope.errors import BertscopeError, SelectionError, SourceError, WorkerError, name_of, one_line
from bertscope.processes.child import ENDED, ERROR, GARBLED, Child, Worker
from bertscope.processes.folders import OwnFolder
from bertscope.progress import progress
from bertscope.reports.json import typed
from bertscope.reports.run import RunFit, RunFitReport, RunReport
from bertscope.reports.step import YES

_UNCONTAINED = (
    "what the script writes would stay, since namespaces are not allowed here ({reason}); {option} runs it all the "
    "same, without a sandbox"
)
_RANGE = re.compile(r"([A-Za-z_][\w.-]*)=([0-9]{1,9})\.\.([0-9]{1,9})", re.ASCII)


def dry_run(asked: ScriptRun, *, timeout_seconds: float, is_contained: bool = True) -> tuple[RunReport, bytes | None]:
    """Run a script in a process of its own, and return what it would hold on the card, and a snapshot if it is wanted.

    Raises BertscopeError for a fault of the script, with its line, and WorkerError for one of the run: an operator
    without a rule, the time, the end of the process.
    """
    if not asked.is_module and not Path(asked.script).is_file():
        raise SourceError(f"there is no script {asked.script!r}; name a Python file, or a module with -m")
    with ExitStack() as stack:
        if is_contained:
            folder = OwnFolder()
            stack.callback(folder.cleanup)
            inside = os.path.join(folder.name, "sandbox")
            os.mkdir(inside)
            asked = replace(asked, sandbox=inside)
        worker = Worker(Child("bertscope.dry_run.child:main"), _message, echo=sys.stderr)
        stack.callback(worker.stop)
        worker.send(asdict(asked))
        end, begun = time.monotonic() + timeout_seconds, time.monotonic()
        name = os.path.basename(asked.script)
        while True:
            progress(f"running {name}: {time.monotonic() - begun:.0f} s")
            message = worker.receive(min(max(end - time.monotonic(), 0.0), 1.0))
            if message is None and time.monotonic() < end:
                continue
            if message is None:
                raise WorkerError(
                    f"{name} ran for longer than {timeout_seconds:g} s; give a longer {name_of('timeout')}"
                )
            kind, content = message
            if kind == ERROR:
                raise content
            if kind in (ENDED, GARBLED):
                reason = content if kind == GARBLED else worker.death()
                raise WorkerError(f"the process of {name} {reason}")
            break
    if kind == "report":
        return _report(asked, content)
    if kind == "uncontained":
        raise WorkerError(
            _UNCONTAINED.format(reason=one_line(str(content), limit=120), option=name_of("sandbox=False"))
        )
    raise _error(kind, content)


def run_here(function: Callable[[], Any], asked: ScriptRun) -> tuple[RunReport, bytes | None]:
    """Run a function in this process on the fake card, and put everything back."""
    kind, content = record(asked, function)
    if kind != "report":
        raise _error(kind, content)
    return _report(asked, content)


def _report(asked: ScriptRun, found: dict[str, Any]) -> tuple[RunReport, bytes | None]:
    picture = found.pop("snapshot", None)
    report = RunReport(
        script=asked.script, arguments=asked.arguments, card=asked.gpu, budget_bytes=asked.budget_bytes, **found
    )
    if not report.phases:
        raise SelectionError(
            f"{os.path.basename(asked.script)} put nothing on a CUDA device; does it choose the device by "
            "torch.cuda.is_available()?"
        )
    return report, None if picture is None else base64.b64decode(picture)


def _message(line: bytes) -> tuple[str, Any]:
    """Return a message of the process, which runs a user's code: only plain data of the report's types is taken."""
    import json

    kind, content = json.loads(line)
    if kind == "report":
        picture = content.pop("snapshot", None)
        plain = {"script": "", "arguments": [], "card": None, "budget_bytes": None} | content
        found: RunReport = typed(RunReport, plain, "the report of the script")
        fields = {name: value for name, value in vars(found).items() if name not in _ASKED}
        return kind, fields | ({} if picture is None else {"snapshot": str(picture)})
    return str(kind), [str(item) for item in content] if isinstance(content, list) else str(content)


_ASKED = ("script", "arguments", "card", "budget_bytes")  # fields that the process does not say


def _error(kind: str, content: Sequence[str]) -> BertscopeError:
    text, where = (*content, "")[:2] if isinstance(content, list) else (str(content), "")
    made = BertscopeError if kind == "failed" else WorkerError
    return made(one_line(text, limit=400), where=where)


def fitted(asked: ScriptRun, wanted: str, run: Callable[[ScriptRun], RunReport], budget_bytes: int) -> RunFitReport:
    """Return the largest value of an argument with which a script fits; `wanted` is NAME=low..high.

    The bytes on the card at the two largest values that fit give a line, and where it ends is the next guess; a guess
    above a value that does not fit gives way to the middle.
    """
    found = _RANGE.fullmatch(wanted)
    if found is None or int(found[2]) < 1 or int(found[2]) > int(found[3]):
        raise SelectionError(f"a search is NAME=low..high, such as batch_size=1..512; got {wanted[:60]!r}")
    name, low, high = found[1], int(found[2]), int(found[3])
    rows: dict[int, RunFit] = {}

    def fits(value: int) -> bool:
        if value not in rows:
            progress(f"running with {name} {value}")
            report = run(replace(asked, arguments=tuple(with_value(asked.arguments, name, value))))
            if report.cost is None:
                raise SelectionError(f"{os.path.basename(asked.script)} allocates nothing on a CUDA device")
            rows[value] = RunFit(value=value, cost=report.cost)
        return rows[value].answer == YES

    least, most = (low, high + 1) if fits(low) else (low - 1, low)
    while most - least > 1:
        *_, one, two = (None, *(rows[value] for value in sorted(rows) if rows[value].answer == YES))
        value = min(least * 8, high)
        if one is not None and two is not None and two.cost.gpu_bytes > one.cost.gpu_bytes:
            slope = (two.cost.gpu_bytes - one.cost.gpu_bytes) / (two.value - one.value)
            value = int(two.value + (budget_bytes - two.cost.gpu_bytes) / slope)
        if value >= most or value <= least + 1:  # the card's bytes grow in steps of 2 MiB
            value = (least + most) // 2 if most <= high else min(max(value, least + least // 32 + 1), high)
        least, most = (value, most) if fits(value) else (least, value)
    ordered = tuple(rows[value] for value in sorted(rows))
    remarks = []
    peaks = [row.peak_bytes for row in ordered if row.answer == YES]
    if len(peaks) > 1 and len(set(peaks)) == 1:
        remarks.append(f"the peak does not change with {name}: is it an argument of the script?")
    if peaks != sorted(peaks):
        remarks.append(f"the peak does not grow evenly with {name}; a value between may not fit")
    return RunFitReport(
        script=asked.script, arguments=asked.arguments, argument=name, low=low, high=high,
        largest=least if least >= low else 0, card=asked.gpu, budget_bytes=budget_bytes, rows=ordered,
        remarks=tuple(remarks),
    )  # fmt: skip


def with_value(arguments: Sequence[str], name: str, value: int) -> list[str]:
    """Return arguments in which a name has this value: where it stands, as `--name 8`, `--name=8` or `name=8`."""
    plain = name.lstrip("-").replace("-", "_")
    found, is_next, is_there = [], False, False
    for word in arguments:
        key, equals, _ = word.partition("=")
        is_it = key.lstrip("-").replace("-", "_") == plain and (key.startswith("-") or bool(equals))
        if is_next:
            found.append(str(value))
        elif is_it and equals:
            found.append(f"{key}={value}")
        else:
            found.append(word)
        is_there |= is_it
        is_next = is_it and not equals
    return found if is_there else [*found, f"--{name}", str(value)]
