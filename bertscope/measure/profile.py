"""`profile`: each run's measurement in a new child process, whose failure does not end the parent."""

from __future__ import annotations

import time
from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

from bertscope import __version__
from bertscope.errors import one_line
from bertscope.measure.profile_job import Job, Sent, available_bytes, read_message
from bertscope.measure.watch import DIED, RanksWatch
from bertscope.processes.child import ENDED, ERROR, Child, ForkedChild, Worker, starting
from bertscope.progress import expect, progress
from bertscope.reports.base import Subject
from bertscope.reports.memory import MemoryReport, Variant
from bertscope.reports.step import StepCost
from bertscope.reports.tool import CalibrationReport, CalibrationStep, CardWork
from bertscope.settings.checkpointing import NONE
from bertscope.settings.run_config import RunConfig, timed_steps
from bertscope.units import bytes_text

_Start = Callable[[], Child | ForkedChild]
_POLL_SECONDS = 0.2
INTERRUPTED = ("interrupted", "was interrupted")


def profile_report(
    jobs: Sequence[Job], *, timeout_seconds: float = 600.0
) -> tuple[MemoryReport, tuple[bytes | None, ...], CalibrationReport | None]:
    """Run one model's step for each job in a separate child; return the measurements, snapshots and the calibration.

    Memory is measured in one child after the other. Then the children run their timed steps in turn, so that a
    change of the machine's speed affects all; a child whose state does not leave room for the others is
    timed before the next one starts. If a child cannot finish, its variant has a `failure`; an interruption skips
    the jobs that follow. Raises a child's BertscopeError.
    """
    children: list[_Child] = []
    first, kind = jobs[0], _Ranks if jobs[0].launch else _Child
    forks = first.run_config.device == "cpu" and (len(jobs) > 1 or first.launch is not None)
    with starting(kind.load, kind.entry, forks=forks) as start:
        try:
            for job in jobs:
                beside = children[0].sent.estimated.cost.peak_bytes if children and children[0].sent.estimated else 0
                children.append(kind(replace(job, beside_peak_bytes=beside), timeout_seconds, start))
                children[-1].left = partial(_left, children, len(jobs))
                children[-1].measure()
                if children[-1].problem == INTERRUPTED:
                    break
                # So that a child can wait, the free memory is twice that of the largest one. The children of a GPU
                # share its memory, which this process does not see: they do not wait.
                sizes = [child.sent.process.run_high_water_bytes for child in children if child.sent.process]
                available = available_bytes()
                has_room = sizes and available is not None and 2 * max(sizes) <= available
                if not (has_room or children[-1].is_stopped):
                    children[-1].run_timed_steps()
            _take_turns([child for child in children if not child.is_stopped])
        finally:
            for child in children:
                child.stop()
    about = next((child.sent.subject for child in children if child.sent.subject), None)
    if about is None:  # no child came so far
        name, torch_version = first.source.name, version("torch")  # this process does not import torch
        about = Subject(name=name, architecture=first.source.architecture or name, dtype=first.run_config.dtype,
                        torch_version=torch_version, bertscope_version=__version__)  # fmt: skip
    report = MemoryReport(
        subject=replace(about, obtained="measured"),
        run=first.run_config.changed(checkpointing=NONE),
        machine=next((child.sent.machine for child in children if child.sent.machine), ""),
        variants=tuple(child.variant() for child in children),
    )
    pictures = tuple(b64decode(child.sent.snapshot) if child.sent.snapshot else None for child in children)
    calibration = None
    for measured in filter(None, (child.calibration() for child in children)):
        calibration = measured.after(calibration)
    return report, pictures, calibration


def _left(children: Sequence[_Child], strategies: int) -> str:
    known, last = [child.first_seconds for child in children if child.first_seconds], children[-1]
    measured = sum(child.sent.timing is not None for child in children)
    taken = time.monotonic() - last.known_since
    return about_left(known, measured, strategies, children[0].job.steps, last.sent.expected_seconds, taken)


def about_left(
    first_seconds: Sequence[float], measured: int, strategies: int, steps: int | None, expected: float = 0.0,
    taken: float = 0.0,
) -> str:  # fmt: skip
    """Return how long is left if each step takes what the first ones took, or at first what one is `expected` to take.

    It is nothing before either is known; `taken` seconds have passed since then.

    The memory of a strategy takes three steps, and then all are timed.

    >>> about_left([2.0], measured=0, strategies=2, steps=3)  # two more, three of the next, and three of each
    ', about 22 s left'
    """
    if not (first_seconds or expected):
        return ""
    step = sum(first_seconds) / len(first_seconds) if first_seconds else expected
    begun = len(first_seconds) - measured
    timed = timed_steps(steps, [step] * strategies) * strategies
    seconds = step * (3 * (strategies - measured) - begun + timed)
    return _left_text(max(seconds - taken, step if taken else 0.0))


def _left_text(seconds: float) -> str:
    return f", about {seconds:.0f} s left" if seconds >= 1 else ""


def _take_turns(children: Sequence[_Child]) -> None:
    steps = timed_steps(children[0].job.steps, (child.first_seconds for child in children)) if children else 0
    expect(steps if len(children) > 1 else 0)
    for number in range(steps):
        for child in children:
            if child.problem == INTERRUPTED:
                for other in children:
                    other.problem = INTERRUPTED
                return
            child.run_timed_step(number, steps, [other.first_seconds for other in children])


class _Child:
    """A child process: it measures its job's memory, then runs a timed step for each line that it is sent."""

    who = "the child"  # or the rank with the problem
    left: Callable[[], str] = str  # how long the measurement still takes
    load, entry = "bertscope.measure.profile_worker:load_for_jobs", "bertscope.measure.profile_worker:main"

    def __init__(self, job: Job, timeout_seconds: float, start: _Start) -> None:
        self.job, self.timeout_seconds, self.start = job, timeout_seconds, start
        self.sent = Sent()
        self.problem: tuple[str, Any] | None = None
        self.is_in_turn = False
        self.known_since = time.monotonic()  # of the time that is left
        self.name = job.run_config.checkpointing
        self.worker = Worker(start(), read_message)

    @property
    def is_stopped(self) -> bool:
        return self.worker.is_stopped

    @property
    def first_seconds(self) -> float:
        return self.sent.timing.warmup_seconds if self.sent.timing else self.sent.first_seconds

    def measure(self) -> None:
        """Give the child its job and wait until it has measured the memory; raise its BertscopeError."""
        self._ask(self.job.to_json(), "timing")
        if self.problem is not None and self.problem[0] == ERROR:
            raise self.problem[1]
        if self.problem is None:
            self.sent.stage = "waiting for its timed steps"

    def run_timed_steps(self) -> None:
        """Run all timed steps of the child, have it measure the GPU if the job wants it, and end it."""
        steps = timed_steps(self.job.steps, [self.first_seconds])
        for number in range(steps):
            self.run_timed_step(number, steps, [self.first_seconds])
        if self.job.wants_calibration and self.problem is None:
            self.sent.stage = "measuring the rates of the GPU"
            self._ask("gpu", "rates")
        self.stop()

    def run_timed_step(self, number: int, steps: int, seconds: Sequence[float]) -> None:
        """Have the child run one more step and send its time.

        A step of this child and of those that take turns with it takes about `seconds`.
        """
        if self.problem is not None:
            return
        self.is_in_turn = len(seconds) > 1
        self.sent.stage = f"timing step {number + 1} of {steps}"
        left = self.sent.stage + _left_text((steps - number) * sum(seconds))
        shown = f"{left}: {self.name}" if self.is_in_turn else f"{self.name}: {left}"
        self._ask("step", "seconds", shown)

    def _ask(self, line: str, answer: str, shown: str = "") -> None:
        """Send a line and keep the child's messages until the answer; any other end becomes the problem."""
        is_answered, deadline = False, time.monotonic() + self.timeout_seconds
        try:
            self.worker.send(line)
            while self.problem is None and not is_answered:
                message = self.worker.receive(_POLL_SECONDS)
                if message is not None and message[0] == ENDED:
                    self.stop()
                    self.problem = (DIED, self.worker.death())
                    break
                if message is not None:
                    self._keep(*message)
                    is_answered = message[0] == answer
                    if message[0] == "stage":  # each phase has the whole limit
                        deadline = time.monotonic() + self.timeout_seconds
                if not is_answered and time.monotonic() > deadline and self.problem is None:
                    self.problem = self._late
                if self.problem is None:
                    progress(shown or f"{self.name}{self.left()}: {self.sent.stage}")
        except KeyboardInterrupt:
            self.problem = INTERRUPTED
        if self.problem is not None:
            self.stop()

    def _keep(self, kind: str, content: Any) -> None:
        if kind in ("expected_seconds", "first_seconds", "timing"):
            self.known_since = time.monotonic()
        if kind == "seconds":
            self.sent.seconds.append(content)
        elif kind in vars(self.sent):
            setattr(self.sent, kind, content)
        else:
            self.problem = (kind, content)

    @property
    def _late(self) -> tuple[str, str]:
        return "timeout", f"ran for longer than {self.timeout_seconds:g} s"

    def stop(self) -> None:
        self.worker.stop()

    def variant(self) -> Variant:
        run_config, sent = self.job.run_config, self.sent
        sequences = run_config.accumulate * run_config.batch * run_config.texts * run_config.parallelism.batches
        timing = None
        if self.problem is None and sent.timing is not None:
            of_ranks = (row.step_seconds for row in sent.ranks)
            seconds = sent.seconds or [max(each) for each in zip(*of_ranks, strict=False)]
            timing = sent.timing.of_steps(seconds, sequences * run_config.seq, is_in_turn=self.is_in_turn)
        return Variant(
            checkpointing=run_config.checkpointing,
            reentrant=run_config.reentrant,
            estimated=sent.estimated,
            measured=sent.measured,
            timing=timing,
            process=sent.process,
            break_even=sent.break_even,
            failure=_failure(self.job, sent, self.who, *self.problem) if self.problem else "",
            traffic=sent.traffic,
            rank_rows=sent.ranks,
        )

    def calibration(self) -> CalibrationReport | None:
        run, sent = self.job.run_config, self.sent
        measured = sent.measured.cost if sent.measured else None
        estimated = sent.estimated.cost if sent.estimated else None
        if sent.gpu is None or measured is None or measured.max_allocated_bytes is None:
            return None
        step = calibration_step(self.job.source.name, run, measured, estimated, sent.work, sent.seconds)
        return CalibrationReport(machine=sent.gpu, rates=sent.rates, steps=(step,))


class _Ranks(_Child):
    """A job of real ranks: a child that estimates, and then one for each rank."""

    load, entry = "bertscope.measure.rank:load_for_ranks", "bertscope.measure.rank:answer_rank"

    def measure(self) -> None:
        super().measure()
        self.stop()
        if self.problem is not None:
            return
        self.sent.stage = "starting the ranks"
        watch, deadline = RanksWatch(self.job, self.start), time.monotonic() + self.timeout_seconds
        try:
            while self.problem is None and not watch.has_ended:
                for message in watch.read(_POLL_SECONDS):
                    self._keep(*message)
                if failure := watch.failure(self._late if time.monotonic() > deadline else None):
                    self.who, self.sent.stage, self.problem = failure
                else:
                    progress(f"{self.name}: {self.sent.stage}")
        except KeyboardInterrupt:
            self.problem = INTERRUPTED
        finally:
            watch.close()
        self.sent.ranks = watch.folded()
        kind, error = self.problem or ("", None)
        if kind == ERROR:
            raise error  # type: ignore[misc]  # a BertscopeError


def calibration_step(
    model: str,
    run: RunConfig,
    measured: StepCost,
    estimated: StepCost | None,
    work: CardWork | None,
    seconds: Sequence[float],
) -> CalibrationStep:
    """Return a step that was measured on a GPU next to its estimate, for a calibration."""
    return CalibrationStep(
        model=model,
        batch=run.batch,
        seq=run.seq,
        mode=run.mode,
        precision=run.compute_precision,
        checkpointing=run.checkpointing,
        context_bytes=measured.context.high_bytes,
        estimated_allocated_bytes=estimated.max_allocated_bytes if estimated else None,
        allocated_bytes=measured.max_allocated_bytes or 0,
        estimated_reserved_bytes=estimated.reserved_bytes if estimated else None,
        reserved_bytes=measured.reserved_bytes or 0,
        work=work,
        step_seconds=tuple(seconds),
    )


def _failure(job: Job, sent: Sent, who: str, kind: str, text: Any) -> str:
    taken = f", of which torch and Python take {bytes_text(sent.taken)}" if sent.taken else ""
    limit = f" (limit {bytes_text(job.memory_limit_bytes)}{taken})" if job.memory_limit_bytes else ""
    happened = {
        "out of memory": f"ran out of memory{limit}",
        "failed": f"failed: {one_line(text, limit=300)}",
        DIED: f"{text}{limit}",
    }.get(kind, text)
    expected = f"; the estimate is {bytes_text(sent.estimated.cost.peak_bytes)}" if sent.estimated else ""
    said = f"{who} {happened} while {sent.stage}{expected}"
    remedies = {
        "interrupted": "run it again to measure",
        "files": "raise the limit that 'ulimit -n' shows, such as 'ulimit -n 1024'",
        "hung": "the others wait for it: look at this line, or give a longer timeout",
        "garbled": "remove what prints when Python starts (a .pth file, sitecustomize)",
    }
    if kind in remedies:
        return f"{said}; {remedies[kind]}"
    is_saving = job.run_config.checkpointing == NONE and not job.run_config.is_eval
    last = ", or a higher memory limit" if job.memory_limit_bytes else ""
    last = ", or a longer timeout" if kind == "timeout" else last
    return f"{said}; try a smaller batch or sequence{', checkpointing' if is_saving else ''}{last}"
