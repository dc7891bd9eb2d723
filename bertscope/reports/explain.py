"""The report of `explain`: the steps of a model, with formulas and their values."""

from dataclasses import field
from typing import Any

from bertscope.frozen import Record
from bertscope.reports.base import Note, Subject, TableReport

Dims = tuple[str, ...]  # names of dimensions: ("batch", "seq", "hidden_size")


class Formula(Record):
    """A formula with names of configuration fields or of a module's attributes, the same with numbers, and its value.

    A number that was counted and has no formula is `counted` without numbers. `terms` are the values of the terms in
    parentheses, if the formula is a sum of such.
    """

    symbols: str
    numbers: str
    value: int
    terms: tuple[int, ...] = ()


class Step(Record):
    """One step; `copies` equal layers if the name has a range. Params and FLOPs are counted for one copy.

    A step of a model that is no BERT is a module: `name` is its path, and it has no name of TensorFlow.
    """

    number: int = 0  # in the walk of the model, from 1; 0 for a module in a step of a BERT
    group: str
    name: str  # names of keras-bert: Transformer-0-FeedForward-Norm
    path: str  # Hugging Face
    tf_name: str  # google-research/bert
    type: str = ""  # the class of a module
    inputs: tuple[Dims, ...]
    sizes: dict[str, int] = field(default_factory=dict)  # of the dimensions that have names
    output: Dims  # empty if the forward pass does not call the module, or if its sizes are unknown
    params: Formula | None
    flops: Formula | None
    copies: int
    sentences: tuple[Note, ...]


class Sum(Record):
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


class Point(Record):
    """One input, output or step of a section: its shape with names of dimensions, and with numbers."""

    key: str  # of its sentence
    name: str
    shape: str = ""  # "(layers + 1) x [batch, seq, hidden_size]": a tuple of that many tensors
    sizes: str = ""  # "13 x [1, 128, 768]", or the value of a field
    type: str = ""  # and default, as Python writes them: "torch.Tensor | None = None"


class Section(Record):
    """A section on the model: config, inputs, outputs, caches, positions or checkpointing.

    `notes` are keys of sentences; the `values` are for the title and all sentences.
    """

    key: str
    notes: tuple[str, ...]
    points: tuple[Point, ...]
    values: dict[str, Any] = field(default_factory=dict)


class ExplainReport(TableReport[Step], kind="explain", rows_in="steps"):
    """A model's steps. The formulas verify `count` and `flops`; `sums` compares both."""

    subject: Subject
    batch: int | None  # None: without a forward pass, so without shapes and FLOPs; `notes` have the reason
    seq: int | None
    steps: tuple[Step, ...]
    sums: tuple[Sum, ...]
    questions: tuple[Note, ...]
    notes: tuple[Note, ...] = ()
    sections: tuple[Section, ...] = ()  # of a BERT
