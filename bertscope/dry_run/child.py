"""A dry run's process: it runs a script as `python train.py` does, on the fake GPU, and sends the report."""

import base64
import builtins
import contextlib
import ctypes
import json
import logging
import os
import random
import resource
import runpy
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest.mock import patch

from bertscope.dry_run import sandbox
from bertscope.dry_run.device import FakeGpu, lacks_kernel
from bertscope.dry_run.limits import Limits, Stop
from bertscope.dry_run.recording import Recording, log_requests, short_line
from bertscope.dry_run.script import ScriptRun, as_asked
from bertscope.dry_run.stubs import NO_FAST_PATH, fit_modules, stubbed
from bertscope.errors import BertscopeError, WorkerError, name_of, one_line, told
from bertscope.memory.caching_allocator import history, snapshot
from bertscope.memory.summary import memory
from bertscope.processes.child import ERROR, error_message, sender
from bertscope.reports.json import typed
from bertscope.reports.memory import EVALUATING
from bertscope.reports.run import RunReport
from bertscope.reports.step import ByteRange, usable
from bertscope.torch_access import fake_tensor_mode, torch
from bertscope.torch_access.fake_gpu import NoRule, Put, fake_gpu
from bertscope.tracing.module_tree import row_paths
from bertscope.tracing.record import SETUP, Recorder, is_library

_DEBUG, _LONGEST = "BERTSCOPE_DEBUG", 400  # letters of an error
_UNCONTAINED = (
    "the files that the script writes would stay, since namespaces are not allowed here ({reason}); {option} runs it "
    "anyway, without a sandbox"
)
_OF_NETWORK = ("connect", "resol", "offline", "urlopen", "HTTP", "huggingface")  # in the text of an error


def load_what_runs_need() -> None:
    """Import what the first fake tensor needs, before the runs are forked: 0.5 s for each."""
    with fake_tensor_mode():
        torch.ones(1)


def main() -> None:
    """Run the script that the parent names on standard input, and send its report to standard output."""
    send = sender()
    script_run: ScriptRun = typed(ScriptRun, json.loads(sys.stdin.readline()), "the run")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if script_run.sandbox:
        try:
            sandbox.enter(script_run.sandbox, network=script_run.network)
        except OSError as error:
            reason = one_line(error.strerror or str(error), limit=120)
            reason = _UNCONTAINED.format(reason=reason, option=name_of("sandbox=False"))
            raise WorkerError(reason) from None
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    if script_run.memory_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (script_run.memory_limit_bytes, script_run.memory_limit_bytes))
    # The driver counts the GPUs now, and finds none whatever the script sets afterwards.
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES="-1"), suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuInit(0)

    needed = [(vars(module), {**vars(module)}) for module in (builtins, os, json, json.encoder, contextlib)]
    pid, write, end = os.getpid(), os.write, os._exit
    spoiled = b"the script replaced what Python itself needs, and no report could be made\n"

    def restore() -> None:
        """Put back what a script may have replaced and the answer needs."""
        for now, before in needed:
            now.update(before)

    def run() -> None:
        try:
            _run_file(script_run)
        finally:
            restore()

    def leave(answer: Callable[[], Any]) -> None:
        """Send the result, and end without what a script has left to do: it may catch every exception.

        A fork that the script made ends here too, and sends nothing.
        """
        code = 1
        try:
            restore()
            try:
                message = script_run.token, answer()
            except BaseException as error:
                message = error_message(told(error) or WorkerError(_text(error)))
            for stream in (sys.stdout, sys.stderr):
                with suppress(BaseException):  # a script may have closed or replaced it
                    stream.flush()
            if os.getpid() == pid:
                send(*message)
            code = int(message[0] == ERROR)
        except BaseException:
            write(2, spoiled)
        finally:
            end(code)

    leave(lambda: record(script_run, run, leave))


def run_here(function: Callable[[], Any], script_run: ScriptRun) -> RunReport:
    """Run a function in this process on the fake GPU, and put everything back."""
    report = as_asked(script_run, record(script_run, function)[0])
    return replace(report, remarks=(*report.remarks, "the function ran in this process, without a sandbox"))


@dataclass
class Installed:
    """A fake GPU with what records the run on it and ends the script."""

    script_run: ScriptRun
    device: FakeGpu
    recorder: Recorder
    limits: Limits
    rows: dict[str, str] = field(default_factory=dict)  # module -> its row in a folded tree of the script's models
    assumed: dict[str, None] = field(default_factory=dict)  # lines that asked for a value that is not known

    def report(self, failure: str = "") -> tuple[RunReport, str | None]:
        """Return the report, and the snapshot if it is wanted; with a failure the GPU had no room.

        Raises WorkerError for what is not recorded.
        """
        self.recorder.close()
        if self.recorder.refusal:
            raise WorkerError(self.recorder.refusal)
        script_run, log, context = self.script_run, self.recorder.log, self.script_run.context
        report = RunReport(
            script=script_run.script, arguments=script_run.arguments, gpu=script_run.gpu, phases=(),
            budget_bytes=script_run.budget_bytes, updates=self.recorder.updates or self.recorder.waited,
            failure=failure, assumed=tuple(self.assumed), remarks=tuple(self.device.remarks),
        )  # fmt: skip
        if not log.events:
            return report, None
        # Where the script went on after an error, what that freed comes before its next allocation.
        after = log.refused[-1][2] if log.refused and not failure else len(log.events)
        start = next((number for number in range(after, len(log.events)) if log.events[number].block >= 0), 0)
        recording = Recording(log, self.device.kind, start, script_run.folder, self.rows, self.limits)
        report = replace(report, phases=recording.phases(context))
        if not any(phase.phase == EVALUATING for phase in report.phases):
            report = replace(report, remarks=tuple(text for text in report.remarks if text != NO_FAST_PATH))
        if script_run.seed is not None:
            steps = log_requests(log, self.device.laid)
            one = history(steps, expandable_segments=script_run.expandable_segments)
            report = replace(report, histories=(one,))
        top = max(range(start, len(log.events)), key=recording.live.__getitem__)
        position = log.events[top].position
        trace = recording.trace(position.step) if position.phase != SETUP else None
        totals = list(zip(log.events[start:], recording.grown[start:], strict=True))
        reserved = max(event.reserved_bytes + more for event, more in totals)
        on_gpu: dict[str, Any] = {
            "max_allocated_bytes": max(event.allocated_bytes + more for event, more in totals),
            "context": context,
            "workspace_bytes": sum(self.device.workspaces.values()),
            "reserved": ByteRange(low_bytes=reserved, high_bytes=reserved),
        }
        cost = replace(max(report.phases, key=lambda phase: (phase.peak_bytes, phase.step)).cost, **on_gpu)
        sizes = tuple(size for size, _, _ in log.refused)
        if script_run.budget_bytes is not None and report.has_run:
            limits = script_run.budget_bytes, usable(script_run.budget_bytes, script_run.margin)
            low, high = max(cost.least_bytes - limits[0], 0), max(cost.gpu_bytes - limits[1], 0)
            if failure and sizes:
                low, high = sizes[-1], max(sizes[-1], high)
            shortfall = ByteRange(low_bytes=low, high_bytes=high)
            cost = replace(cost, limit_bytes=limits[0], margin=script_run.margin, shortfall=shortfall)
        report = replace(
            report, held=recording.held(top), evaluation=recording.evaluation, cost=cost, refused_bytes=sizes,
            memory=None if trace is None else memory(trace, "estimated", self.rows, **on_gpu),
            refused_lines=tuple(short_line(line, script_run.folder) for _, line, _ in log.refused),
        )  # fmt: skip
        wants = script_run.wants_snapshot
        return report, base64.b64encode(snapshot(trace)).decode() if trace is not None and wants else None


def record(
    script_run: ScriptRun, run: Callable[[], Any], leave: Callable[[Callable[[], Any]], None] | None = None
) -> tuple[RunReport, str | None]:
    """Run a function on the fake GPU, and return the report and the snapshot.

    When the last step has ended, `leave` gets the function that returns them, or without it the function is left by an
    exception. Raises BertscopeError for a fault of the function, with the line, and WorkerError for a GPU that cannot
    be installed and for an operator without a rule.
    """
    with installed(script_run) as here:
        if leave is not None:
            here.limits.stop = partial(leave, here.report)
        failure = where = remedy = ""
        try:
            with suppress(Stop):
                run()
        except SystemExit as end:
            if end.code is not None and end.code != 0:
                is_number = isinstance(end.code, int)
                failure = f"{script_run.name} ended with exit code {int(end.code)}" if is_number else _text(end.code)
        except BaseException as error:
            if isinstance(error.__cause__ or error, StopIteration) and here.recorder.updates >= script_run.steps:
                return here.report()  # the script takes batches by `next`, of a loader that has ended
            if os.environ.get(_DEBUG, "0") not in ("", "0"):
                traceback.print_exc()
            failure, where = _text(error), _place(error, script_run.folder)
            if isinstance(error, NoRule) or lacks_kernel(failure):
                reason = one_line(f"{failure}; no memory can be told after it", limit=_LONGEST)
                raise WorkerError(reason, where=where) from None
            if isinstance(error, OSError) and not script_run.network and any(sign in failure for sign in _OF_NETWORK):
                failure, remedy = one_line(failure, limit=150), f"; let it download with {name_of('network')}"
        is_full = bool(here.recorder.log.refused) and "out of memory" in failure
        if failure and not is_full and here.recorder.updates >= script_run.steps:  # its values may be why
            what = f"the script failed after its last step{f' at {where}' * bool(where)}; what it does then is missing"
            what += ". For an evaluation after all epochs let it have at most 4" * bool(here.limits.skipped)
            here.device.note(one_line(f"{what}: {failure}", limit=_LONGEST))
            return here.report()
        if failure and not is_full:
            raise BertscopeError(one_line(failure, limit=_LONGEST) + remedy, where=where)
        return here.report(failure and f"{where}: {failure}")


@contextmanager
def installed(script_run: ScriptRun, kind: type[FakeGpu] = FakeGpu) -> Iterator[Installed]:
    """Install the GPU, what a script finds of it, the recorder and the limits; all is put back at the end."""
    with ExitStack() as stack:
        stack.enter_context(fake_gpu(kind.kind))
        device = kind(script_run.gpu, script_run.limit_bytes, expandable=script_run.expandable_segments)
        recorder = Recorder(device)
        limits = Limits(recorder, script_run.steps)
        here = Installed(script_run, device, recorder, limits)
        put, start_thread = Put(stack), threading.Thread.start

        def start(thread: threading.Thread) -> None:
            """Start a thread of the script: it finds the GPU, as a loader of weights that works in threads needs."""
            run_thread = thread.run

            def run() -> None:
                with recorder:
                    run_thread()

            thread.run = run  # type: ignore[method-assign]
            start_thread(thread)

        def seen(model: torch.nn.Module) -> None:
            here.rows.update(row_paths(model))
            fit_modules(put, device, model)

        if script_run.seed:  # what a script seeds with its own number gets another one
            for module, name in ((torch, "manual_seed"), (random, "seed")):
                seed = getattr(module, name)
                seed(script_run.seed)
                put(module, **{name: partial(_seeded, seed, script_run.seed)})
        put(threading.Thread, start=start)
        if os.environ.get(_DEBUG, "0") in ("", "0"):  # else its log comes before the script's error
            put(logging.getLogger("torch._subclasses.fake_tensor"), disabled=True)
        folder = script_run.folder
        device.on_unknown = lambda what: here.assumed.setdefault(f"{short_line(recorder.line(), folder)} ({what})")
        recorder.on_new_root.append(seen)
        stack.enter_context(stubbed(script_run, device, limits.followed()))
        limits.limit(put)
        stack.enter_context(recorder.watching())
        yield here


def _seeded(seed: Callable[[Any], Any], more: int, number: Any = None, *args: Any) -> Any:
    return seed(number + more if isinstance(number, int) else number, *args)


def _run_file(script_run: ScriptRun) -> None:
    sys.argv = [script_run.script, *script_run.arguments]
    if script_run.is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script_run.script, run_name="__main__", alter_sys=True)
    else:
        path = os.path.join(script_run.folder, os.path.basename(script_run.script))
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
        runpy.run_path(path, run_name="__main__")


def _text(error: object) -> str:
    """Return the text of an error of the script with its class, or of what it exits with: code that may fail itself."""
    parts = []
    with suppress(BaseException):
        if isinstance(error, BaseException) and not isinstance(error, (NoRule, torch.OutOfMemoryError)):
            parts.append(type(error).__name__)
    with suppress(BaseException):
        parts.append(str(error))
    return ": ".join(filter(None, parts)) or "an error without a text"


def _place(error: BaseException, folder: str) -> str:
    frames = ((frame, number) for frame, number in traceback.walk_tb(error.__traceback__) if not is_library(frame))
    lines = [f"{frame.f_code.co_filename}:{number}" for frame, number in frames]
    if isinstance(error, SyntaxError) and error.filename:
        lines.append(f"{error.filename}:{error.lineno}")
    return short_line(lines[-1], folder) if lines else ""
