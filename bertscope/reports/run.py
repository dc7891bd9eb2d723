"""The report of `run`: what a script holds on a GPU, by step, phase and line of its code. Plain data."""

from __future__ import annotations

from bertscope.frozen import Record
from bertscope.gpus import Gpu
from bertscope.reports.base import TableReport
from bertscope.reports.memory import Memory
from bertscope.reports.step import CostRow, RunHistory, StepCost

UNRECORDED = "the processes that it starts are not recorded"
ENDED_BY = ("failure", "refused_bytes", "refused_lines")  # fields on the error that ended a script
NOTHING_RAN = f"no model and no optimizer step ran on the GPU in this process; {UNRECORDED}"


class RunPhase(CostRow):
    """The peak of a phase of one step, whose reserved bytes are the highest of the phase, and its line of code."""

    step: int  # from 1 on; 0 for what comes before the first forward pass
    left_bytes: int  # what lives when the phase ends
    line: str  # of the user's code: train.py:31

    @property
    def phase(self) -> str:
        """Return the step's phase."""
        return self.cost.peak.phase

    @property
    def label(self) -> str:
        """Return the row's name: `step 2, backward`."""
        return f"step {self.step}, {self.phase}" if self.step else self.phase


class HeldRow(Record):
    """The blocks at the peak that one line of the script allocated in one module."""

    line: str
    path: str  # of the module, equal layers as a range; in the optimizer step of the parameter
    phase: str
    part: str
    blocks: int
    held_bytes: int


class RunEvaluation(Record):
    """An evaluation of which only the first batches ran, and its peak over all batches by what each adds."""

    batches: int
    ran: int
    added_bytes: int  # by each batch, such as its logits that are kept
    highest_bytes: int


class RunReport(TableReport[RunPhase], kind="run", rows_in="phases"):
    """A dry run's result: the peak of each phase on a simulated GPU.

    `memory` is about the step with the peak, as `estimate` reports one, and `cost` about the script, on a GPU with
    all batches of its evaluation. `failure` is the error that ended the script; the rest is then of a second run
    without limit, if that one did not fail.
    """

    script: str
    arguments: tuple[str, ...]
    gpu: Gpu | None
    budget_bytes: int | None  # the memory of the GPU, or --budget
    updates: int  # optimizer steps that ended
    phases: tuple[RunPhase, ...]
    held: tuple[HeldRow, ...] = ()
    memory: Memory | None = None
    cost: StepCost | None = None
    evaluation: RunEvaluation | None = None
    refused_bytes: tuple[int, ...] = ()  # of each request that the GPU had no room for
    refused_lines: tuple[str, ...] = ()
    failure: str = ""
    assumed: tuple[str, ...] = ()  # lines that asked for a value that is not known, and the operator
    remarks: tuple[str, ...] = ()
    histories: tuple[RunHistory, ...] = ()  # with several seeds, of each

    @property
    def peak(self) -> RunPhase | None:
        """Return the phase with the peak, of equal ones the last."""
        return max(self.phases, key=lambda phase: (phase.peak_bytes, phase.step), default=None)

    @property
    def has_run(self) -> bool:
        """Return True if a model or an optimizer step ran on the GPU, or what came before had no room there."""
        return self.updates > 0 or bool(self.failure) or any(phase.step for phase in self.phases)

    @property
    def is_cut(self) -> bool:
        """Return True if the script ended where the GPU had no room, and no other run shows what it needs."""
        return bool(self.failure and self.cost and self.cost.gpu_bytes <= (self.budget_bytes or 0))

    @property
    def answer(self) -> str:
        """Return whether the script fits on the GPU: yes, uncertain or no; nothing without a GPU, or if nothing ran."""
        return self.cost.verdict if self.cost and self.has_run else ""


class RunFit(CostRow):
    """One run of a script with one value of an argument."""

    value: int


class RunFitReport(TableReport[RunFit], kind="run_fit"):
    """The largest value of a script's argument that fits, and the runs that showed it."""

    script: str
    arguments: tuple[str, ...]
    argument: str  # the name of the argument
    low: int
    high: int
    largest: int  # that fits; 0 if none does
    gpu: Gpu | None
    budget_bytes: int
    rows: tuple[RunFit, ...]  # by value
    remarks: tuple[str, ...] = ()
