"""The parent's view of real ranks: their messages, their last words, and the place where one hangs."""

import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from bertscope.errors import SourceError, one_line
from bertscope.measure.profile_job import Job, printed_file, read_message
from bertscope.processes.child import end_text
from bertscope.processes.folders import OwnFolder
from bertscope.reports.memory import RankRow

_SHARED = ("taken", "machine", "process", "measured", "traffic", "snapshot")  # messages that concern the whole report
_SURE_SECONDS = 10.0  # until the launcher has said that another rank was killed
_LOST = ("onnection", "peer", "pipe", "NCCL")  # in the errors of gloo and NCCL for a rank that is gone
_STACK_SECONDS = 5.0  # at most, for each rank to write its stack
_TAIL_BYTES = 2**14
_FRAME = re.compile(r'File "([^"]*)", line (\w+) in (.*)')
_WAITING = re.compile(r"/torch/(distributed/(?!elastic)|autograd/graph\.py)")


@dataclass
class _Rank:
    """A rank's messages."""

    number: int
    pid: int = 0
    stages: list[str] = field(default_factory=lambda: ["starting"])
    problem: tuple[str, Any] | None = None
    read_bytes: int = 0

    @property
    def name(self) -> str:
        return f"rank {self.number}"


class RanksWatch:
    """The files of the ranks of a job in a temporary folder."""

    def __init__(self, job: Job) -> None:
        self.temporary = OwnFolder()
        self.folder = Path(self.temporary.name)
        assert job.launch is not None  # noqa: S101 the caller has looked
        self.job = replace(job, launch=replace(job.launch, folder=self.temporary.name))
        (self.folder / "job.json").write_text(self.job.to_json())
        self.ranks: dict[int, _Rank] = {}
        self.rows: dict[int, RankRow] = {}
        self.first_problem: _Rank | None = None
        self.problem_seconds = 0.0  # the time at which it was read

    def read(self) -> Iterator[tuple[str, Any]]:
        """Read what the ranks have written since the last time, and yield the messages for the report."""
        for path in sorted(self.folder.glob("*.messages")):
            rank = self.ranks.setdefault(int(path.stem), _Rank(int(path.stem)))
            with open(path, "rb") as file:
                file.seek(rank.read_bytes)
                whole = file.read()
            lines = whole[: whole.rfind(b"\n") + 1]
            rank.read_bytes += len(lines)
            for line in lines.splitlines():
                yield from self._message(rank, line)

    def _message(self, rank: _Rank, line: bytes) -> Iterator[tuple[str, Any]]:
        try:
            kind, content = read_message(line)
        except (ValueError, KeyError, TypeError, RecursionError, SourceError):
            kind, content = "garbled", "wrote no message"
        if kind == "pid":
            rank.pid = content
        elif kind == "stage":
            rank.stages.append(content)
            if rank.number == min(self.ranks):
                yield kind, content
        elif kind == "row":
            self.rows.update((number, content) for number in content.ranks)
        elif kind in _SHARED:
            yield kind, content
        else:
            rank.problem = (kind, content)
            if self.first_problem is None:
                self.first_problem, self.problem_seconds = rank, time.monotonic()

    def failure(
        self, exit_codes: dict[str, int] | None, problem: tuple[str, Any] | None
    ) -> tuple[str, str, tuple[str, Any]] | None:
        """Return the name of the rank that failed or hangs, its stage, and its problem; None if there is none.

        `exit_codes` are those of the ranks that failed, None while the ranks run; `problem` is that of the job.
        """
        if exit_codes:
            rank, kind, text = self._failed(exit_codes)
            return rank.name, rank.stages[-1], (kind, text)
        if self.first_problem is not None and self.first_problem.problem is not None:
            may_be_lost = any(word in str(self.first_problem.problem[1]) for word in _LOST)
            if may_be_lost and exit_codes is None and time.monotonic() < self.problem_seconds + _SURE_SECONDS:
                return None
            return self.first_problem.name, self.first_problem.stages[-1], self.first_problem.problem
        if problem is None or problem[0] != "timeout" or not self.ranks:
            return None
        ranks, location = self._hanging()
        stage = f"{ranks[0].stages[-1]}{location}"
        if len(ranks) == len(self.ranks):
            return "the ranks", stage, problem
        numbers = ", ".join(str(rank.number) for rank in ranks)
        who = ranks[0].name if len(ranks) == 1 else f"ranks {numbers}"
        return who, stage, ("hung", "hung until the time limit")

    def _failed(self, exit_codes: dict[str, int]) -> tuple[_Rank, str, Any]:
        """Return the rank that failed first, the kind of its problem, and a text; after the ranks have ended.

        A rank that was killed is the first; the exceptions of the others say only that they lost it.
        """
        for number, code in exit_codes.items():
            rank = self.ranks.setdefault(int(number), _Rank(int(number)))
            if rank.problem is None:
                lines = self._stderr(rank).strip().splitlines()
                last_words = f" (its last words: {one_line(lines[-1], limit=200)})" if lines else ""
                return rank, "died", f"{end_text(code)}{last_words}"
        rank = self.first_problem or next(iter(self.ranks.values()), _Rank(0))
        kind, text = rank.problem or ("died", "ended")
        return rank, kind, text

    def _hanging(self) -> tuple[Sequence[_Rank], str]:
        """Return the ranks for which the others wait, and the place in the code where the first is.

        These have reached the earliest stage; of several those that are in no collective.
        """
        known, signalled = list(self.ranks.values()), list[_Rank]()
        for rank in known:
            if rank.pid and hasattr(signal, "SIGUSR1"):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(rank.pid, signal.SIGUSR1)
                    signalled.append(rank)
        deadline, before = time.monotonic() + _STACK_SECONDS, list[Any]()
        while not all(now := [self._stack(rank) for rank in signalled]) or now != before:  # which are being written
            if time.monotonic() > deadline:
                break
            before = now
            time.sleep(_STACK_SECONDS / 50)
        earliest = min((len(rank.stages) for rank in known), default=0)
        behind = [rank for rank in known if len(rank.stages) == earliest]
        stacks = {rank.number: self._stack(rank) for rank in behind}
        # A rank waits if its innermost calls, up to the first outside torch, are those of a collective.
        inner = {number: takewhile(lambda frame: "/torch/" in frame[0], frames) for number, frames in stacks.items()}
        working = [rank for rank in behind if not any(_WAITING.search(path) for path, *_ in inner[rank.number])]
        hanging = working or behind
        frames = stacks[hanging[0].number] if hanging else []
        path, line, name = frames[0] if frames else ("", "", "")
        at = f"{one_line(path, limit=120)}:{line}"
        return hanging, f" (in {name} at {at})" if frames else ""

    def _stack(self, rank: _Rank) -> list[tuple[str, str, str]]:
        return _FRAME.findall(self._stderr(rank).rpartition("most recent call first")[2])

    def _stderr(self, rank: _Rank) -> str:
        path = printed_file(str(self.folder), rank.number)
        if not path.exists():
            return ""
        with open(path, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - _TAIL_BYTES, 0))
            return file.read().decode(errors="replace")

    def kill(self) -> None:
        """Kill the ranks, which are in a separate session where they are not forked from the launcher."""
        for rank in self.ranks.values():
            if rank.pid:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(rank.pid, signal.SIGKILL)

    def close(self) -> None:
        """Remove the files."""
        self.temporary.cleanup()

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
