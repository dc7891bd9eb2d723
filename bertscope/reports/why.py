"""The report of `why`: what held a GPU's memory when it was full, and what would free most. Plain data."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from bertscope.frozen import Record
from bertscope.gpus import Gpu
from bertscope.reports.base import Note, Subject, TableReport
from bertscope.reports.memory import TrainingFile
from bertscope.settings.run_config import RunConfig

SNAPSHOT, MESSAGE = "snapshot", "message"  # what a file was
STDIN, TEXT = "standard input", "the message"  # their names
OOM, PEAK, END = "oom", "peak", "end"  # the moment: a request that failed, the highest sum, or the end of the file
BEFORE, TENSORS = "before", "tensors"  # parts: allocated before the recording; by code of the user outside any module


class WhyPart(Record):
    """One part's blocks at the moment, and its size in the estimate of MODEL."""

    part: str  # a part of Parts, or BEFORE or TENSORS
    held_bytes: int
    blocks: int
    estimated_bytes: int | None = None


class WhyRow(Record):
    """The blocks at the moment that one line of code allocated in one module."""

    part: str
    line: str  # of the user's code: `train.py:31 (main)`; empty if no frame was recorded
    module: str  # the innermost function of a module, in the same form
    blocks: int
    passes: int  # forward passes that allocated them
    held_bytes: int
    smallest_bytes: int
    largest_bytes: int


class WhyFinding(Record):
    """A reason for the memory, whose key the view puts into words, and the bytes that its remedy frees."""

    key: str
    values: dict[str, Any] = field(default_factory=dict)  # names that begin with `size` are bytes
    frees_bytes: int = 0


class WhySample(Record):
    """Each part's bytes at one moment of the history."""

    event: int
    held: dict[str, int]


class WhyReport(TableReport[WhyRow], kind="why"):
    """A GPU's memory, by a snapshot or an error message.

    Sizes are None where the file does not have them. The first finding is the main one (`main_first`).
    """

    name: str
    source: str
    moment: str
    allocated_bytes: int
    reserved_bytes: int | None = None  # by torch, with what is unusable
    tried_bytes: int | None = None  # by the request that failed
    free_bytes: int | None = None  # on the GPU
    total_bytes: int | None = None  # of the GPU
    other_bytes: int | None = None  # of other processes on it
    largest_free_bytes: int | None = None  # the largest block that torch has reserved and not given out
    phase: str = ""  # of a step, that ran at the moment
    line: str = ""  # that ran at the moment
    passes: int = 0  # forward passes in the history
    events: int = 0
    parts: tuple[WhyPart, ...] = ()
    rows: tuple[WhyRow, ...] = ()
    findings: tuple[WhyFinding, ...] = ()
    timeline: tuple[WhySample, ...] = ()
    subject: Subject | None = None  # MODEL
    run: RunConfig | None = None  # its step
    gpu: Gpu | None = None  # that was named
    training_file: TrainingFile | None = None
    notes: tuple[Note, ...] = ()
    answer: str = field(default="", init=False)  # the key of the first finding

    def __post_init__(self) -> None:
        object.__setattr__(self, "answer", self.findings[0].key if self.findings else "")

    @property
    def outside_bytes(self) -> int | None:
        """Return what is in use on the GPU, and neither torch's nor known to belong to other processes.

        It is the context of CUDA, its libraries and NCCL, and other processes of which the file does not tell.
        """
        if self.total_bytes is None or self.free_bytes is None:
            return None
        return max(self.total_bytes - self.free_bytes - (self.reserved_bytes or 0) - (self.other_bytes or 0), 0)
