"""The report on the lengths of real data: the steps of an epoch for each way to make batches. Plain data."""

from __future__ import annotations

from typing import ClassVar

from bertscope.frozen import dataclass
from bertscope.gpus import Gpu
from bertscope.reports.base import Note, Subject, TableReport
from bertscope.reports.calibration import StepTime, TimeRange
from bertscope.reports.memory import TrainingFile
from bertscope.settings.run_config import RunConfig


@dataclass(frozen=True, kw_only=True)
class LengthsRow:
    """One way to make batches, and the steps of an epoch with it.

    fixed: padded to the longest sequence. dynamic: padded to the longest of each batch. grouped: so, with batches of
    similar length. unpadded: the tokens without padding. packed: without padding, up to `tokens_per_batch` tokens.
    tokens: sorted by length and padded, as many sequences as `tokens_per_batch` allows. `expected_bytes` is the mean
    peak of a step, `worst_bytes` the highest one, whose step has `worst_batch` sequences of `worst_seq` tokens;
    `reserved_bytes` is that step's on the card with the upper context, else its peak.
    """

    name: str
    batch: int  # sequences; 0 where `tokens_per_batch` decides
    tokens_per_batch: int = 0
    batches: int  # of an epoch
    padding: float  # the share of the tokens of an epoch
    expected_bytes: int
    worst_bytes: int
    reserved_bytes: int
    worst_batch: int
    worst_seq: int
    epoch_flops: int
    answer: str = ""  # yes, uncertain or no: if the worst step fits
    predicted: StepTime | None = None  # of a step of mean length, by a calibration
    time_range: TimeRange | None = None
    epoch: TimeRange | None = None


@dataclass(frozen=True, kw_only=True)
class LengthBatch:
    """The largest batch whose sequences have at most `high` tokens, and more than those of the entry before."""

    low: int
    high: int
    sequences: int
    batch: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True, repr=False)
class LengthsReport(TableReport[LengthsRow]):
    """The result of `estimate --lengths` and `fit --lengths`."""

    kind: ClassVar[str] = "lengths"
    subject: Subject
    run: RunConfig  # without sizes
    source: str  # of the lengths
    sequences: int
    truncated: int  # sequences that were longer than `longest`
    shortest: int
    longest: int
    mean: float
    traced: tuple[int, ...]  # the lengths whose steps ran; between them a peak is that of the straight line
    rows: tuple[LengthsRow, ...]
    is_search: bool = False  # for the largest batches
    table: tuple[LengthBatch, ...] = ()  # of a search
    budget_bytes: int | None = None
    card: Gpu | None = None
    training_file: TrainingFile | None = None
    notes: tuple[Note, ...] = ()

    @property
    def fits(self) -> bool:
        """Return True if no limit was given, or the worst step of a row fits."""
        return self.budget_bytes is None or any(row.answer == "yes" for row in self.rows)
