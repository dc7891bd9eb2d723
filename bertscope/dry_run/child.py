"""The process of a dry run: it runs a script as `python train.py` does, on the fake card, and sends the record."""

from __future__ import annotations

import base64
import json
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from bertscope.frozen import dataclass
from bertscope.gpus import Gpu

if TYPE_CHECKING:
    from bertscope.dry_run.device import FakeCard
    from bertscope.dry_run.limits import Limits
    from bertscope.tracing.record import Recorder


_DEBUG = "BERTSCOPE_DEBUG"
_OF_NETWORK = ("connect", "resol", "offline", "urlopen", "HTTP", "huggingface")  # in the text of an error


@dataclass(frozen=True, kw_only=True)
class ScriptRun:
    """A script with its arguments, and the card that it finds."""

    script: str  # its path, or the name of a module
    arguments: tuple[str, ...] = ()
    folder: str = ""  # of the script, absolute
    is_module: bool = False
    steps: int = 3
    gpu: Gpu | None = None
    budget_bytes: int | None = None
    limit_bytes: int | None = None  # what torch may reserve
    context_bytes: int | None = None
    expandable_segments: bool = False
    network: bool = False
    sandbox: str = ""  # an empty folder, for the mounts; none for a run without
    memory_limit_bytes: int | None = None
    wants_snapshot: bool = False  # of the step with the peak, for PyTorch's memory viewer


def main() -> None:
    """Run the script that the parent names on standard input, and send its report to standard output."""
    from bertscope.processes.child import die_with_parent, sender
    from bertscope.reports.json import typed

    send, die = sender(), die_with_parent
    die()
    asked: ScriptRun = typed(ScriptRun, json.loads(sys.stdin.readline()), "the run")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    if asked.sandbox:
        from bertscope.dry_run import sandbox

        try:
            sandbox.enter(asked.sandbox, network=asked.network)
        except OSError as error:
            send("uncontained", str(error))
            os._exit(0)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    if asked.memory_limit_bytes is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (asked.memory_limit_bytes, asked.memory_limit_bytes))
    _hide_cards()

    def leave(kind: str, content: Any) -> None:
        """Send the result, and end without what a script has left to do: it may catch every exception."""
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # a script may have closed it
                stream.flush()
        send(kind, content)
        os._exit(0)

    leave(*record(asked, lambda: _run_file(asked), leave))


def record(
    asked: ScriptRun, run: Callable[[], Any], leave: Callable[[str, Any], None] | None = None
) -> tuple[str, Any]:
    """Run a function on the fake card; return `report` with the fields of one, or `failed` with the reason.

    `refused` stands for a card that cannot be installed and for an operator without a rule. When the last step has
    ended, `leave` gets the result, or without it the function is left by an exception.
    """
    from bertscope.dry_run.device import lacks_kernel
    from bertscope.dry_run.limits import Stop
    from bertscope.dry_run.recording import short_line, summary
    from bertscope.errors import BertscopeError, name_of, one_line
    from bertscope.memory.caching_allocator import snapshot
    from bertscope.torch_access import torch
    from bertscope.torch_access.fake_card import NoRule

    failure = where = ""
    try:
        with installed(asked) as (card, recorder, limits, rows):
            assumed: dict[str, None] = {}
            card.asked = lambda what: assumed.setdefault(f"{short_line(recorder.line(), asked.folder)} ({what})")

            def fields(failure: str = "") -> dict[str, Any]:
                """Return the fields of the report."""
                recorder.close()
                if recorder.refusal:
                    raise NoRule(recorder.refusal)
                found, trace = summary(recorder, limits, card, rows, asked.context_bytes, asked.budget_bytes,
                                       bool(failure), asked.folder)  # fmt: skip
                if asked.wants_snapshot and trace is not None:
                    found["snapshot"] = base64.b64encode(snapshot(trace)).decode()
                return found | {"failure": failure, "assumed": tuple(assumed), "remarks": tuple(card.remarks)}

            def stop() -> None:
                """Send the report, or why there is none."""
                try:
                    leave("report", fields())  # type: ignore[misc]
                except BaseException as error:  # a script may catch every exception, and would go on
                    leave("refused", [f"{type(error).__name__}: {error}", ""])  # type: ignore[misc]

            if leave is not None:
                limits.stop = stop
            try:
                run()
            except Stop:
                pass
            except SystemExit as end:
                if end.code not in (None, 0):
                    name = os.path.basename(asked.script)
                    failure = f"{name} ended with exit code {end.code}" if isinstance(end.code, int) else str(end.code)
            except torch.OutOfMemoryError as error:
                failure, where = str(error), _place(error, asked.folder)
            except (Exception, KeyboardInterrupt) as error:
                if isinstance(error, NoRule) or lacks_kernel(error):
                    return "refused", [f"{error}; no memory can be told after it", _place(error, asked.folder)]
                if os.environ.get(_DEBUG, "0") not in ("", "0"):
                    traceback.print_exc()
                failure, where = f"{type(error).__name__}: {error}", _place(error, asked.folder)
                if isinstance(error, OSError) and not asked.network and any(sign in failure for sign in _OF_NETWORK):
                    failure = f"{one_line(failure, limit=150)}; let it download with {name_of('network')}"
            is_full = bool(recorder.log.refused) and "out of memory" in failure
            if failure and not is_full:
                return "failed", [failure, where]
            return "report", fields(failure and f"{where}: {failure}")
    except NoRule as error:
        return "refused", [str(error), ""]
    except BertscopeError as error:
        return "refused", [error.text, error.where]


@contextmanager
def installed(
    asked: ScriptRun, kind: type[FakeCard] | None = None
) -> Iterator[tuple[FakeCard, Recorder, Limits, dict[str, str]]]:
    """Install the card, what a script finds of it, the recorder and the limits; all is put back at the end.

    The last one is filled with the row of each module's path in a folded tree, which ends with the script's models.
    """
    from bertscope.dry_run.device import FakeCard, lacks_kernel
    from bertscope.dry_run.limits import Limits
    from bertscope.dry_run.stubs import remark_on_modules, stubbed
    from bertscope.torch_access.fake_card import Put, fake_card
    from bertscope.tracing.module_tree import row_paths
    from bertscope.tracing.record import Recorder

    kind = kind or FakeCard
    with ExitStack() as stack:
        stack.enter_context(fake_card(has_foreach=kind.has_foreach))
        card = kind(asked.gpu, asked.limit_bytes, expandable=asked.expandable_segments)
        recorder = Recorder(card)
        limits = Limits(recorder, asked.steps)
        put, given = Put(stack), threading.excepthook

        def in_thread(failed: Any) -> None:
            """Note that a thread of the script found no card: it is that of the thread that runs the script."""
            if failed.exc_value is not None and lacks_kernel(failed.exc_value):
                recorder.refusal = (
                    f"another thread than the script's uses the card ({_place(failed.exc_value, asked.folder)})"
                )
            given(failed)

        put(threading, excepthook=in_thread)
        rows: dict[str, str] = {}
        recorder.on_new_root.append(lambda module: rows.update(row_paths(module)))
        recorder.on_new_root.append(lambda module: remark_on_modules(card, module))
        actions = {"transformers.trainer_callback": limits.follow_trainer}
        stack.enter_context(stubbed(card, actions, network=asked.network))
        stack.enter_context(limits.limiting())
        stack.enter_context(recorder.watching())
        yield card, recorder, limits, rows


def _hide_cards() -> None:
    """Have the driver count no cards, whatever the script sets afterwards."""
    import ctypes

    given = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuInit(0)
    del os.environ["CUDA_VISIBLE_DEVICES"]
    os.environ.update({} if given is None else {"CUDA_VISIBLE_DEVICES": given})


def _run_file(asked: ScriptRun) -> None:
    import runpy

    sys.argv = [asked.script, *asked.arguments]
    if asked.is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(asked.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, asked.folder)
        runpy.run_path(os.path.join(asked.folder, os.path.basename(asked.script)), run_name="__main__")


def _place(error: BaseException, folder: str) -> str:
    from bertscope.dry_run.recording import short_line
    from bertscope.tracing.record import is_library

    lines = [f"{frame.f_code.co_filename}:{number}" for frame, number in traceback.walk_tb(error.__traceback__)
             if not is_library(frame.f_code.co_filename)]  # fmt: skip
    if isinstance(error, SyntaxError) and error.filename:
        lines.append(f"{error.filename}:{error.lineno}")
    return short_line(lines[-1], folder) if lines else ""
