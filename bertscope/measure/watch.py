"""Real ranks: their processes, their messages, their last words, and the place where one hangs."""

import os
import queue
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from bertscope.errors import one_line
from bertscope.measure.profile_job import Job, read_message
from bertscope.processes.child import ENDED, Child, ForkedChild, Inbox, Worker, end_text
from bertscope.processes.folders import OwnFolder
from bertscope.reports.memory import RankRow

_SHARED = ("taken", "machine", "process", "measured", "traffic", "snapshot")  # messages that concern the whole report
_SURE_SECONDS = 10.0  # until it is known whether another rank was killed
_LOST = ("onnection", "peer", "pipe", "NCCL")  # in the errors of gloo and NCCL for a rank that is gone
_STACK_SECONDS = 5.0  # at most, for each rank to write its stack, and to end
_FRAME = re.compile(r'File "([^"]*)", line (\w+) in (.*)')
_WAITING = re.compile(r"/torch/(distributed/(?!elastic)|autograd/graph\.py)")
DIED = "died"


@dataclass(eq=False)
class _Rank:
    """A rank, and what it has said."""

    number: int
    worker: Worker
    stages: list[str] = field(default_factory=lambda: ["starting"])
    problem: tuple[str, Any] | None = None
    has_ended: bool = False

    @property
    def name(self) -> str:
        return f"rank {self.number}"

    @property
    def printed(self) -> str:
        return b"".join(self.worker.last_lines).decode(errors="replace")


class RanksWatch:
    """The ranks of a job, which meet at a file in a folder that other users cannot read."""

    def __init__(self, job: Job, start: Callable[[], Child | ForkedChild]) -> None:
        assert job.launch is not None  # noqa: S101 the caller has looked
        self.folder, self.inbox = OwnFolder(), Inbox()
        self.ranks = [_Rank(number, Worker(start(), read_message, self.inbox)) for number in range(job.launch.nproc)]
        for rank in self.ranks:
            launch = replace(job.launch, rank=rank.number, folder=self.folder.name)
            rank.worker.send(replace(job, launch=launch).to_json())
        self.rows: dict[int, RankRow] = {}
        self.first_problem: _Rank | None = None
        self.problem_seconds = 0.0  # the time at which it was read

    @property
    def has_ended(self) -> bool:
        """Return True if all ranks have ended."""
        return all(rank.has_ended for rank in self.ranks)

    def read(self, timeout_seconds: float) -> Iterator[tuple[str, Any]]:
        """Read the next message if there is one in time, and yield it if it is for the report."""
        with suppress(queue.Empty):
            worker, kind, content = self.inbox.get(timeout=timeout_seconds)
            rank = next(rank for rank in self.ranks if rank.worker is worker)
            if kind == ENDED:
                rank.has_ended = True
                worker.stop(_STACK_SECONDS)
                if worker.process.returncode and rank.problem is None:
                    self._note(rank, DIED, end_text(worker.process.returncode))
            elif kind == "stage":
                rank.stages.append(content)
                if rank is self.ranks[0]:
                    yield kind, content
            elif kind == "row":
                self.rows[rank.number] = content
            elif kind in _SHARED:
                yield kind, content
            else:
                self._note(rank, kind, content)

    def _note(self, rank: _Rank, kind: str, content: Any) -> None:
        """Note a problem: a rank that was killed is the first; the errors of others say only that they lost it."""
        rank.problem = kind, content
        if self.first_problem is None or kind == DIED:
            self.first_problem, self.problem_seconds = rank, time.monotonic()

    def failure(self, late: tuple[str, Any] | None = None) -> tuple[str, str, tuple[str, Any]] | None:
        """Return the name of the rank that failed or hangs, its stage, and its problem; None if there is none.

        `late` is the problem of a job that has taken too long.
        """
        if self.first_problem is not None and self.first_problem.problem is not None:
            rank, (kind, text) = self.first_problem, self.first_problem.problem
            may_be_lost = kind != DIED and any(word in str(text) for word in _LOST)
            if may_be_lost and not self.has_ended and time.monotonic() < self.problem_seconds + _SURE_SECONDS:
                return None
            if kind == DIED and (lines := rank.printed.strip().splitlines()):
                text = f"{text} (its last words: {one_line(lines[-1], limit=200)})"
            return rank.name, rank.stages[-1], (kind, text)
        if late is None:
            return None
        ranks, location = self._hanging()
        stage = f"{ranks[0].stages[-1]}{location}"
        if len(ranks) == len(self.ranks):
            return "the ranks", stage, late
        numbers = ", ".join(str(rank.number) for rank in ranks)
        who = ranks[0].name if len(ranks) == 1 else f"ranks {numbers}"
        return who, stage, ("hung", "hung until the time limit")

    def _hanging(self) -> tuple[Sequence[_Rank], str]:
        """Return the ranks for which the others wait, and the place in the code where the first is.

        These have reached the earliest stage; of several those that are in no collective.
        """
        signalled = [rank for rank in self.ranks if len(rank.stages) > 1 and not rank.has_ended]  # they know the signal
        for rank in signalled:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(rank.worker.process.pid, signal.SIGUSR1)
        deadline, before = time.monotonic() + _STACK_SECONDS, list[Any]()
        while not all(now := list(map(_stack, signalled))) or now != before:  # which are being written
            if time.monotonic() > deadline:
                break
            before = now
            time.sleep(_STACK_SECONDS / 50)
        earliest = min(len(rank.stages) for rank in self.ranks)
        behind = [rank for rank in self.ranks if len(rank.stages) == earliest]
        # A rank waits if its innermost calls, up to the first outside torch, are those of a collective.
        inner = {rank.number: takewhile(lambda frame: "/torch/" in frame[0], _stack(rank)) for rank in behind}
        working = [rank for rank in behind if not any(_WAITING.search(path) for path, *_ in inner[rank.number])]
        hanging = working or behind
        path, line, name = next(iter(_stack(hanging[0])), ("", "", ""))
        return hanging, f" (in {name} at {one_line(path, limit=120)}:{line})" if name else ""

    def close(self) -> None:
        """End the ranks, and remove their folder."""
        for rank in self.ranks:
            rank.worker.process.kill_group()
        for rank in self.ranks:
            rank.worker.stop(0.0)
        self.folder.cleanup()

    def folded(self) -> tuple[RankRow, ...]:
        """Return the measurements with the ranks that agree as one row, the largest group first."""

        def kind(row: RankRow) -> Any:
            return row.state_bytes, [(phase.phase, phase.peak_bytes) for phase in row.phases], row.traffic

        groups: list[list[RankRow]] = []
        for _, row in sorted(self.rows.items()):
            group = next((group for group in groups if kind(group[0]) == kind(row)), None)
            groups.append([row]) if group is None else group.append(row)
        return tuple(
            replace(
                group[0],
                ranks=tuple(number for row in group for number in row.ranks),
                step_seconds=tuple(map(max, zip(*(row.step_seconds for row in group), strict=False))),
                process_high_water_bytes=max(row.process_high_water_bytes for row in group),
            )
            for group in sorted(groups, key=len, reverse=True)
        )


def _stack(rank: _Rank) -> list[tuple[str, str, str]]:
    return _FRAME.findall(rank.printed.rpartition("most recent call first")[2])
