"""The reports on memory: a step, what fits, an epoch, the points of a grid. Plain data in bytes, FLOPs and seconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import field, replace
from importlib import import_module
from typing import Any

from bertscope.errors import SelectionError, SourceError
from bertscope.frozen import Record
from bertscope.gpus import Gpu
from bertscope.reports.base import SCHEMA, Note, Row, Subject, TableReport, as_data
from bertscope.reports.step import NO, UNCERTAIN, YES, CostRow, Parts, PhasePeak, RunHistory, StepCost
from bertscope.settings.run_config import RunConfig

FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = "forward", "backward", "recompute", "optimizer"  # the phases of a step
EVALUATING = "evaluation"  # in a run


class TrainingKey(Record):
    """A key of a training file, its value, and its effect on the run."""

    key: str
    value: Any
    effect: str


class TrainingFile(Record):
    """The settings of a training loop in a file of transformers or accelerate, each key in one of four lists.

    `fields` are the fields of RunConfig that the keys in `used` set, and `lora` the adapters of the model. `replaced`
    has fields, not keys, for which the run has another value, by an option of the command line.
    """

    path: str
    format: str  # TrainingArguments, accelerate config
    fields: dict[str, Any]
    used: tuple[TrainingKey, ...]
    no_effect: tuple[TrainingKey, ...]  # on the memory of a training step
    not_modelled: tuple[TrainingKey, ...]
    unknown: tuple[TrainingKey, ...]
    replaced: tuple[TrainingKey, ...] = ()
    lora: str | None = None


ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST = "all-gather", "reduce-scatter", "all-reduce", "broadcast"
COLLECTIVES = ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST


class TrafficRow(Record):
    """One collective's calls in a phase of a step, by one row's modules, seen from one rank.

    `full_bytes` is the size of the tensors that the ranks of a call have together; `sent_bytes` is what a rank sends
    if they communicate in a ring: (n-1)/n of it for an all-gather, a reduce-scatter or a broadcast, and twice that for
    an all-reduce.
    """

    phase: str
    collective: str  # one of COLLECTIVES
    path: str  # equal layers as a range; empty for the model
    ranks: int  # of a call
    calls: int
    full_bytes: int
    sent_bytes: int


class RankGroup(Record):
    """Consecutive ranks, from `first` to `last`, that hold the same number of parameters to update."""

    first: int
    last: int
    updated_params: int  # whose optimizer state each of them has

    @property
    def label(self) -> str:
        """Return the ranks' numbers: `0-3`."""
        return f"{self.first:,}-{self.last:,}" if self.first < self.last else f"{self.first:,}"


class SavedRow(Record):
    """The tensors of one kind that the forward pass of one kind of module saves for backward, over all copies."""

    path: str  # equal layers as a range: bert.encoder.layer.0-11.attention.self
    operator: str
    what: str
    shape: tuple[int, ...]
    dtype: str
    tensors: int
    total_bytes: int


class Sample(Record):
    """The parts at one moment of the step, and the module and operator that run then."""

    phase: str
    parts: Parts
    path: str = ""
    operator: str = ""


class Memory(Record):
    """One step's memory, estimated or measured."""

    obtained: str
    cost: StepCost
    phases: tuple[PhasePeak, ...]  # the peak of each
    saved: tuple[SavedRow, ...]
    timeline: tuple[Sample, ...] = ()
    traced_layers: int | None = None  # number of layers that ran, if the others are extrapolated

    @property
    def peak(self) -> PhasePeak:
        """Return the step's peak."""
        return self.cost.peak


class Timing(Record):
    """The time of steps that ran without tracing."""

    warmup_seconds: float
    step_seconds: tuple[float, ...] = ()
    median_seconds: float = 0.0
    tokens_per_second: float | None = None
    flops: int | None = None  # matrix products of the step, a multiply-add as 2
    flops_per_second: float | None = None
    is_in_turn: bool = False  # a step of each variant, then the next step of each

    def of_steps(self, seconds: Sequence[float], tokens: int | None = None, *, is_in_turn: bool = False) -> Timing:
        """Return the timing with these steps, their median and the rates; without `tokens` there are no rates."""
        from statistics import median  # with decimal and fractions, which only a measurement needs

        middle = median(seconds or [0.0])
        rates = [None if amount is None else amount / middle if middle else 0.0 for amount in (tokens, self.flops)]
        tokens_rate, flops_rate = (None, None) if tokens is None else rates
        values: dict[str, Any] = {"tokens_per_second": tokens_rate, "flops_per_second": flops_rate}
        values |= {"step_seconds": tuple(seconds), "median_seconds": middle, "is_in_turn": is_in_turn}
        return replace(self, **values)


class ProcessMemory(Record):
    """The process's memory, libraries included, as the operating system reports it."""

    resident_before_bytes: int  # before the step, with model and optimizer
    high_water_bytes: int  # the highest during one step
    run_high_water_bytes: int  # the highest since the process started


class BreakEvenPoint(Record):
    """The estimated peaks of the first variant and of this one at another batch size."""

    batch: int
    first_bytes: int
    own_bytes: int


class BreakEven(Record):
    """The least batch size at which a variant lowers the peak, and the peaks at larger batch sizes."""

    pays_from_batch: int
    points: tuple[BreakEvenPoint, ...]


class RankRow(CostRow):
    """The measurement of real ranks that agree: the memory and the traffic of each, and the time of their steps."""

    ranks: tuple[int, ...]
    state_bytes: int  # between steps
    phases: tuple[PhasePeak, ...]
    traffic: tuple[TrafficRow, ...]
    step_seconds: tuple[float, ...] = ()  # of each timed step, the slowest of these ranks
    process_high_water_bytes: int = 0  # the highest of these ranks; 0 if the system does not report it

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that each of these ranks sends in a step."""
        return sum(row.sent_bytes for row in self.traffic)


class Variant(Record):
    """One checkpointing choice of the step: estimated, measured, or both."""

    checkpointing: str
    reentrant: bool
    estimated: Memory | None = None
    measured: Memory | None = None
    timing: Timing | None = None
    process: ProcessMemory | None = None
    break_even: BreakEven | None = None  # if this peak is not below the first variant's
    traffic: tuple[TrafficRow, ...] = ()  # of a step, seen from the rank of this report
    failure: str = ""  # reason for a missing measurement
    largest_batch: int | None = None  # that fits on the GPU, if no variant of the report fits for certain
    rank_rows: tuple[RankRow, ...] = ()  # of real ranks; `measured` is from the first rank of this machine

    @property
    def memory(self) -> Memory | None:
        """Return the measurement if there is one, else the estimate."""
        return self.measured or self.estimated

    @property
    def cost(self) -> StepCost | None:
        """Return the step's cost: measured, else estimated; None if neither is known."""
        return self.memory.cost if self.memory else None

    @property
    def answer(self) -> str:
        """Return whether the estimate fits on the report's GPU: yes, uncertain or no; empty without a GPU."""
        return self.estimated.cost.verdict if self.estimated else ""

    @property
    def largest_error(self) -> tuple[int, int] | None:
        """Return the estimate's error in bytes and the measured peak, of the phase in which the error is largest."""
        if self.estimated is None or self.measured is None:
            return None
        estimated = {phase.phase: phase.peak_bytes for phase in self.estimated.phases}
        measured = {phase.phase: phase.peak_bytes for phase in self.measured.phases if phase.phase in estimated}
        errors = [(estimated[name] - size, size) for name, size in measured.items() if size]
        return max(errors, key=lambda error: abs(error[0] / error[1]), default=(0, 1))

    @property
    def error(self) -> float | None:
        """Return the same error as a fraction of the measured peak."""
        return self.largest_error[0] / self.largest_error[1] if self.largest_error else None


class StepReport(TableReport[Row]):
    """A report on steps of one model; `run` has what all rows have in common."""

    subject: Subject
    run: RunConfig
    gpu: Gpu | None = None  # whose memory, context and workspaces are estimated
    training_file: TrainingFile | None = None  # of --from
    notes: tuple[Note, ...] = ()  # on the numbers


class MemoryReport(StepReport[Variant], kind="memory", rows_in="variants"):
    """The result of `estimate` and `profile`: one step with one or several checkpointing choices.

    Of several ranks it is about rank `run.parallelism.rank`.
    """

    machine: str  # the device of the measurement, or the estimated device
    variants: tuple[Variant, ...]
    ranks: tuple[RankGroup, ...] = ()  # of a job of several
    units: str = ""  # modules whose parameters FSDP gathers together, such as `12 x BertLayer`
    inputs_given: bool = False  # by a Python program; `run` then has no sizes

    @property
    def peak_bytes(self) -> int:
        """Return the highest sum of live tensors, of the first variant."""
        return self._cost.peak_bytes

    @property
    def reserved_bytes(self) -> int | None:
        """Return the most segments of the allocator, of the first variant; None on a CPU."""
        return self._cost.reserved_bytes

    @property
    def gpu_bytes(self) -> int:
        """Return what the first variant takes on the GPU: reserved and the largest context; on a CPU the peak."""
        return self._cost.gpu_bytes

    @property
    def _cost(self) -> StepCost:
        cost = self.variants[0].cost
        if cost is None:
            raise SelectionError(f"nothing was measured: {self.variants[0].failure}")
        return cost

    def fits(self, gpu: str | int) -> bool:
        """Return True if a variant fits for certain on a GPU: a name, the index of one here, bytes, or `16GiB`.

        The step is estimated anew for a GPU; bytes are a limit on the device of this estimate. Raises SelectionError
        for a report that is not from `estimate`.

        >>> bertscope.estimate("bert-tiny").fits("t4")
        True
        """
        elsewhere = vars(self).get("elsewhere")
        if elsewhere is None:
            raise SelectionError("only the report that estimate returns knows its model; estimate with the gpu")
        return any(variant.answer == YES for variant in elsewhere(gpu).variants)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "elsewhere"}

    def plot(self) -> Any:
        """Return the memory over time as a figure of matplotlib, which a notebook shows.

        Raises MissingExtraError without matplotlib.

        >>> bertscope.estimate("bert-tiny").plot().savefig("memory.png")
        """
        return self.shown("plot", view="timeline")


class FitRow(CostRow):
    """One variant at one sequence length.

    `exact_batch` is the largest batch that fits and leaves the margin: on CUDA the simulated allocator serves it, with
    the context at the upper end of what is published; 0 if batch 1 does not fit. `batch` is rounded down to a multiple
    of 8 above 16, unless the exact one is wanted; `batch_without_margin` leaves nothing free. `batch_by_bytes` is the
    largest one whose tensors fit with the context at the lower end; up to it the answer is uncertain. With an asked
    batch, `batch` and `batch_by_bytes` are this batch or 0. `cost` belongs to `batch`, to batch 1 if that is 0, or to
    the asked batch; `next_peak_bytes` is the peak of one more than the exact one. For eager attention with a context
    that is not given, `reserved` has what older versions of torch save more.
    """

    seq: int
    checkpointing: str
    precision: str
    batch: int
    batch_by_bytes: int
    next_peak_bytes: int
    strategy: str = "none"  # of the ranks; `batch` and bytes are per rank
    ranks: int = 1
    other_head_answer: str = ""  # for the asked batch, with the report's `other_head`
    largest_batch: int = 0  # that fits, of a row whose asked batch does not
    exact_batch: int = 0
    batch_without_margin: int = 0

    @property
    def label(self) -> str:
        """Return the row's name in its report: `full, bf16 autocast, seq 512`."""
        return f"{self.checkpointing}, {self.precision}, seq {self.seq}"


class FitReport(StepReport[FitRow], kind="fit"):
    """The largest batch for each variant; with `asked_batch`, whether that one fits in `budget_bytes`."""

    budget_bytes: int
    asked_batch: int | None
    rows: tuple[FitRow, ...]
    batch_total: int | None = None  # of all ranks; each row then has the fewest ranks of its strategy
    tried_ranks: tuple[int, ...] = ()  # the numbers of ranks among which it was searched
    other_head: str = ""  # a class with another common head, if the asked batch was tried with it
    units: str = ""  # modules whose parameters FSDP gathers together, such as `12 x BertLayer`
    length_given: bool = False  # by the inputs; `seq` then has no effect
    answer: str = field(default="", init=False)  # the best of all variants: yes, uncertain or no

    def __post_init__(self) -> None:
        answers = {row.answer for row in self.rows}
        object.__setattr__(self, "answer", next((word for word in (YES, UNCERTAIN) if word in answers), NO))

    @property
    def fits(self) -> bool:
        """Return True if any variant fits."""
        return any(row.fits for row in self.rows)

    @property
    def batch(self) -> int:
        """Return the largest batch that fits, of all variants; 0 if none fits."""
        return max(row.batch for row in self.rows)


class LengthsRow(CostRow):
    """The steps of an epoch with one kind of padding.

    fixed: to the longest sequence of all. dynamic: to each batch's longest. `cost` is for the worst step, of
    `worst_batch` sequences of `worst_seq` tokens; its time alone is for a step of mean length.
    """

    name: str
    batch: int  # sequences
    batches: int  # of an epoch
    padding: float  # the share of the tokens of an epoch
    expected_bytes: int  # the mean peak of a step
    worst_batch: int
    worst_seq: int
    epoch_flops: int
    histories: tuple[RunHistory, ...] = ()  # of random batches, one for each seed


class LengthBatch(CostRow):
    """The largest batch whose sequences have at most `high` tokens, and more than in the entry before."""

    low: int
    high: int
    sequences: int
    batch: int
    exact_batch: int = 0  # not rounded


class LengthsReport(StepReport[LengthsRow], kind="lengths"):
    """The result of `estimate --lengths` and `fit --lengths`."""

    source: str  # of the lengths
    sequences: int
    truncated: int  # sequences that were longer than `longest`
    shortest: int
    longest: int
    mean: float
    traced: tuple[int, ...]  # the lengths whose steps ran
    rows: tuple[LengthsRow, ...]
    table: tuple[LengthBatch, ...] = ()  # of a search for the largest batches
    budget_bytes: int | None = None

    @property
    def fits(self) -> bool:
        """Return True if no limit was given, or the worst step of a row fits."""
        return self.budget_bytes is None or any(row.fits for row in self.rows)


# computed: the row has numbers. refused: the settings exclude each other, or the model does not have one of them.
# failed: a worker ended, or a package is missing; the next run computes the point again.
COMPUTED, REFUSED = "computed", "refused"


class SweepRow(Record):
    """One point of a grid: its settings and the estimate of its step, or the error.

    `key` is a hash of the settings, the configuration of the model and the versions. `point` has every setting, with
    the defaults of those that the grid does not have. `cost` is the same as in `estimate`, of one rank if there
    are several, with the settings `gpu` or `budget` as its limit.
    """

    key: str
    point: dict[str, Any]
    unused: tuple[str, ...] = ()  # settings of the grid that have no effect at this point
    outcome: str = COMPUTED
    error: str = ""
    cost: StepCost | None = None
    phases: dict[str, int] = field(default_factory=dict)  # the peak of each
    traffic: dict[str, int] = field(default_factory=dict)  # of a step: the bytes of the full tensors by collective
    sent_bytes: int | None = None  # by the rank, if the ranks communicate in a ring
    parameters: int | None = None  # unique ones of the model
    versions: dict[str, str] = field(default_factory=dict)

    def to_line(self) -> str:
        """Return the row as one line of JSON, with `schema` in front, without the line break."""
        return json.dumps({"schema": SCHEMA, **as_data(self)}, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str | bytes) -> SweepRow:
        """Return the row that `to_line` wrote; raise SourceError for other JSON, ValueError for other text."""
        data = json.loads(line)
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            raise SourceError(f"no row of schema {SCHEMA}")
        row: SweepRow = import_module("bertscope.reports.json").typed(cls, data, "row")
        return row


class SweepReport(TableReport[SweepRow], kind="sweep"):
    """A grid's points in its order; `varied` are the settings with several values."""

    grid: str
    varied: dict[str, Any]
    rows: tuple[SweepRow, ...]

    def number(self, outcome: str) -> int:
        """Return the number of rows with this outcome."""
        return sum(row.outcome == outcome for row in self.rows)
