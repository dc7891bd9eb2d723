"""The process of a dry run: it runs a script as `python train.py` does, on the fake card, and sends the report."""

import base64
import builtins
import contextlib
import ctypes
import json
import os
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
from bertscope.dry_run.device import FakeCard, lacks_kernel
from bertscope.dry_run.limits import Limits, Stop
from bertscope.dry_run.recording import WORKSPACES, Recording, short_line
from bertscope.dry_run.script import ScriptRun, as_asked
from bertscope.dry_run.stubs import remark_on_modules, stubbed
from bertscope.errors import BertscopeError, WorkerError, name_of, one_line, told
from bertscope.memory.caching_allocator import snapshot
from bertscope.memory.summary import memory
from bertscope.processes.child import ERROR, error_message, sender
from bertscope.reports.json import typed
from bertscope.reports.run import RunReport
from bertscope.reports.step import ByteRange, usable
from bertscope.torch_access import torch
from bertscope.torch_access.fake_card import NoRule, Put, fake_card
from bertscope.tracing.module_tree import row_paths
from bertscope.tracing.record import SETUP, Recorder, is_library

_DEBUG, _LONGEST = "BERTSCOPE_DEBUG", 400  # letters of an error
_UNCONTAINED = (
    "what the script writes would stay, since namespaces are not allowed here ({reason}); {option} runs it all the "
    "same, without a sandbox"
)
_OF_NETWORK = ("connect", "resol", "offline", "urlopen", "HTTP", "huggingface")  # in the text of an error


def load_what_runs_need() -> None:
    """Do nothing: the import of this module is what the process needs that the runs are forks of."""


def main() -> None:
    """Run the script that the parent names on standard input, and send its report to standard output."""
    send = sender()
    asked: ScriptRun = typed(ScriptRun, json.loads(sys.stdin.readline()), "the run")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if asked.sandbox:
        try:
            sandbox.enter(asked.sandbox, network=asked.network)
        except OSError as error:
            reason = _UNCONTAINED.format(reason=one_line(str(error), limit=120), option=name_of("sandbox=False"))
            raise WorkerError(reason) from None
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    if asked.memory_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (asked.memory_limit_bytes, asked.memory_limit_bytes))
    # The driver counts the cards now, and finds none whatever the script sets afterwards.
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES="-1"), suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuInit(0)

    needed = [(vars(module), {**vars(module)}) for module in (builtins, os, json, json.encoder, contextlib)]
    own, write, end = os.getpid(), os.write, os._exit
    spoiled = b"the script replaced what Python itself needs, and no report could be made\n"

    def restore() -> None:
        """Put back what a script may have replaced and the answer needs."""
        for now, before in needed:
            now.update(before)

    def run() -> None:
        try:
            _run_file(asked)
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
                message = asked.token, answer()
            except BaseException as error:
                message = error_message(told(error) or WorkerError(_text(error)))
            for stream in (sys.stdout, sys.stderr):
                with suppress(BaseException):  # a script may have closed or replaced it
                    stream.flush()
            if os.getpid() == own:
                send(*message)
            code = int(message[0] == ERROR)
        except BaseException:
            write(2, spoiled)
        finally:
            end(code)

    leave(lambda: record(asked, run, leave))


def run_here(function: Callable[[], Any], asked: ScriptRun) -> RunReport:
    """Run a function in this process on the fake card, and put everything back."""
    return as_asked(asked, record(asked, function)[0])


@dataclass
class Installed:
    """A fake card with what records the run on it and ends the script."""

    asked: ScriptRun
    card: FakeCard
    recorder: Recorder
    limits: Limits
    rows: dict[str, str] = field(default_factory=dict)  # module -> its row in a folded tree of the script's models
    assumed: dict[str, None] = field(default_factory=dict)  # lines that asked for a value that is not known

    def report(self, failure: str = "") -> tuple[RunReport, str | None]:
        """Return the report, and the snapshot if it is wanted; with a failure the card had no room.

        Raises WorkerError for what is not recorded.
        """
        self.recorder.close()
        if self.recorder.refusal:
            raise WorkerError(self.recorder.refusal)
        asked, card, log = self.asked, self.card, self.recorder.log
        made = RunReport(
            script=asked.script, arguments=asked.arguments, card=asked.gpu, budget_bytes=asked.budget_bytes,
            updates=self.recorder.updates, failure=failure, assumed=tuple(self.assumed), remarks=tuple(card.remarks),
            phases=(),
        )  # fmt: skip
        if not log.events:
            return made, None
        start = log.refused[-1][2] if log.refused and not failure else 0
        found = Recording(log, card.kind, start if start < len(log.events) else 0, asked.folder, self.rows)
        context = asked.context
        phases = found.phases(context)
        top = max(range(found.start, len(found.live)), key=found.live.__getitem__)
        step = log.events[top].position
        trace = found.trace(step.step) if step.phase != SETUP else None
        more = found.evaluation(self.limits)
        beyond = 0 if more is None else max(more.highest_bytes - found.live[top], 0)
        reserved = beyond + max(event.reserved_bytes for event in log.events[found.start :])
        device: dict[str, Any] = {
            "max_allocated_bytes": beyond + max(event.allocated_bytes for event in log.events[found.start :]),
            "context": context, "gpu_bytes": reserved + context.high_bytes,
            "workspace_bytes": sum(block.size_bytes for block in log.blocks if block.part == WORKSPACES),
            "reserved": ByteRange(low_bytes=reserved, high_bytes=reserved),
        }  # fmt: skip
        cost = replace(max(phases, key=lambda phase: (phase.peak_bytes, phase.step)).cost, **device)
        sizes = tuple(size for size, _, _ in log.refused)
        made = replace(made, phases=phases)
        if asked.budget_bytes is not None and made.has_run:
            most = asked.budget_bytes, usable(asked.budget_bytes, asked.margin)
            lacking = [max(reserved + size - own, 0) for size, own in zip(vars(context).values(), most, strict=True)]
            if failure and sizes:
                lacking = [sizes[-1], max(sizes[-1], lacking[1])]
            shortfall = ByteRange(low_bytes=lacking[0], high_bytes=lacking[1])
            cost = replace(cost, limit_bytes=asked.budget_bytes, margin=asked.margin, shortfall=shortfall)
        made = replace(
            made, held=found.held(top), evaluation=more, cost=cost, refused_bytes=sizes,
            memory=None if trace is None else memory(trace, "estimated", self.rows, **device),
            refused_lines=tuple(short_line(line, asked.folder) for _, line, _ in log.refused),
        )  # fmt: skip
        picture = base64.b64encode(snapshot(trace)).decode() if asked.wants_snapshot and trace is not None else None
        return made, picture


def record(
    asked: ScriptRun, run: Callable[[], Any], leave: Callable[[Callable[[], Any]], None] | None = None
) -> tuple[RunReport, str | None]:
    """Run a function on the fake card, and return the report and the snapshot.

    When the last step has ended, `leave` gets the function that returns them, or without it the function is left by an
    exception. Raises BertscopeError for a fault of the function, with the line, and WorkerError for a card that cannot
    be installed and for an operator without a rule.
    """
    with installed(asked) as here:
        if leave is not None:
            here.limits.stop = partial(leave, here.report)
        failure = where = ""
        try:
            run()
        except Stop:
            pass
        except SystemExit as end:
            if end.code is not None and end.code != 0:
                is_number = isinstance(end.code, int)
                failure = f"{asked.name} ended with exit code {int(end.code)}" if is_number else _text(end.code)
        except BaseException as error:
            if os.environ.get(_DEBUG, "0") not in ("", "0"):
                traceback.print_exc()
            failure, where = _text(error), _place(error, asked.folder)
            if isinstance(error, NoRule) or lacks_kernel(failure):
                reason = one_line(f"{failure}; no memory can be told after it", limit=_LONGEST)
                raise WorkerError(reason, where=where) from None
            if isinstance(error, OSError) and not asked.network and any(sign in failure for sign in _OF_NETWORK):
                failure = f"{one_line(failure, limit=150)}; let it download with {name_of('network')}"
        is_full = bool(here.recorder.log.refused) and "out of memory" in failure
        if failure and not is_full:
            raise BertscopeError(one_line(failure, limit=_LONGEST), where=where)
        return here.report(failure and f"{where}: {failure}")


@contextmanager
def installed(asked: ScriptRun, kind: type[FakeCard] = FakeCard) -> Iterator[Installed]:
    """Install the card, what a script finds of it, the recorder and the limits; all is put back at the end."""
    with ExitStack() as stack:
        stack.enter_context(fake_card(has_foreach=kind.has_foreach))
        card = kind(asked.gpu, asked.limit_bytes, expandable=asked.expandable_segments)
        recorder = Recorder(card)
        limits = Limits(recorder, asked.steps)
        here = Installed(asked, card, recorder, limits)
        put, given = Put(stack), threading.Thread.start

        def start(thread: threading.Thread) -> None:
            """Start a thread of the script: it finds the card, as a loader of weights that works in threads needs."""
            own = thread.run

            def run() -> None:
                with recorder:
                    own()

            thread.run = run  # type: ignore[method-assign]
            given(thread)

        def seen(model: torch.nn.Module) -> None:
            here.rows.update(row_paths(model))
            remark_on_modules(card, model)

        put(threading.Thread, start=start)
        card.asked = lambda what: here.assumed.setdefault(f"{short_line(recorder.line(), asked.folder)} ({what})")
        recorder.on_new_root.append(seen)
        stack.enter_context(stubbed(card, limits.followed(), network=asked.network))
        limits.limit(put)
        stack.enter_context(recorder.watching())
        yield here


def _run_file(asked: ScriptRun) -> None:
    sys.argv = [asked.script, *asked.arguments]
    if asked.is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(asked.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, asked.folder)
        runpy.run_path(os.path.join(asked.folder, os.path.basename(asked.script)), run_name="__main__")


def _text(error: object) -> str:
    """Return the text of an error of the script with its class, or of what it exits with: code that may fail itself."""
    words = []
    with suppress(BaseException):
        if isinstance(error, BaseException) and not isinstance(error, (NoRule, torch.OutOfMemoryError)):
            words.append(type(error).__name__)
    with suppress(BaseException):
        words.append(str(error))
    return ": ".join(filter(None, words)) or "an error without a text"


def _place(error: BaseException, folder: str) -> str:
    lines = [f"{frame.f_code.co_filename}:{number}" for frame, number in traceback.walk_tb(error.__traceback__)
             if not is_library(frame.f_code.co_filename)]  # fmt: skip
    if isinstance(error, SyntaxError) and error.filename:
        lines.append(f"{error.filename}:{error.lineno}")
    return short_line(lines[-1], folder) if lines else ""
