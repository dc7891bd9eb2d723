"""The report of `explain`: the walk through a model, step by step, with formulas and their values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bertscope.reports.base import Subject

Dims = tuple[str, ...]  # names of dimensions: ("batch", "seq", "hidden_size")


@dataclass(frozen=True, kw_only=True)
class Formula:
    """A formula in the configuration's own names, the same with numbers, and its value."""

    symbols: str
    numbers: str
    value: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step; `copies` layers are alike where the name holds a range. Params and FLOPs are of one copy."""

    group: str
    name: str  # as keras-bert names layers: Transformer-0-FeedForward-Norm
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
    """The steps of one level added up, beside what was counted on the built model."""

    group: str
    symbols: str
    params: int
    counted_params: int
    flops: int
    counted_flops: int

    @property
    def agrees(self) -> bool:
        """Whether formulas and model say the same, to the last digit."""
        return self.params == self.counted_params and self.flops == self.counted_flops


@dataclass(frozen=True, kw_only=True)
class Question:
    """What readers ask in passing, answered for this model."""

    question: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class ExplainReport:
    """The walk. Formulas are the second witness of `count` and `flops`; the sums say whether they agree."""

    kind: ClassVar[str] = "explain"
    subject: Subject
    language: str
    batch: int
    seq: int
    steps: tuple[Step, ...]
    sums: tuple[Sum, ...]
    questions: tuple[Question, ...]
