"""The report of `explain`: the steps of a model, with formulas and their values."""

from dataclasses import dataclass
from typing import ClassVar

from bertscope.reports.base import Subject

Dims = tuple[str, ...]  # names of dimensions: ("batch", "seq", "hidden_size")


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A formula with names of configuration fields, the same with numbers, and its value."""

    symbols: str
    numbers: str
    value: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step; `copies` equal layers if the name has a range. Params and FLOPs are those of one copy."""

    group: str
    name: str  # names of keras-bert: Transformer-0-FeedForward-Norm
    path: str  # Hugging Face
    tf_name: str  # google-research/bert
    inputs: tuple[Dims, ...]
    output: Dims
    params: Formula | None
    flops: Formula | None
    copies: int
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Sum:
    """The sum of the steps of one level, next to the count on the built model."""

    group: str
    symbols: str
    params: int
    counted_params: int
    flops: int
    counted_flops: int

    @property
    def agrees(self) -> bool:
        """Return True if formulas and model give the same numbers exactly."""
        return self.params == self.counted_params and self.flops == self.counted_flops


@dataclass(frozen=True, kw_only=True)
class Question:
    """A frequent question, answered for this model."""

    question: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class ExplainReport:
    """The steps of a model. The formulas verify `count` and `flops`; `sums` compares both."""

    kind: ClassVar[str] = "explain"
    subject: Subject
    language: str
    batch: int
    seq: int
    steps: tuple[Step, ...]
    sums: tuple[Sum, ...]
    questions: tuple[Question, ...]
