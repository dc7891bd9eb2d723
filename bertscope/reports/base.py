"""What the analyses return: frozen, keyword-only, plain data in base units, never text made for display.

Every report becomes JSON by `to_json`, with `schema` and `kind` in front; `from_json` reads it back.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

from bertscope.texts import json_text

SCHEMA = 1
Shape = tuple[int, ...] | None  # None: torch does not know it yet (a lazy parameter)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What a report is about, and with what it was made."""

    name: str
    architecture: str
    dtype: str  # of the bytes: "fp32", "bf16", "fp16", or "stored" for the parameters' own
    attention: str | None = None
    config: dict[str, Any] | None = None
    ignored_fields: tuple[str, ...] = ()
    torch_version: str
    bertscope_version: str
    obtained: str = "computed"  # computed, estimated or measured


@dataclass(frozen=True, kw_only=True)
class TensorShape:
    """Shape and dtype of one tensor that goes into a module or comes out of it."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Tie:
    """One tensor under two addresses."""

    path: str
    is_path: str
    params: int


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The sums under each convention.

    distinct_params counts every tensor once, as `sum(p.numel() for p in model.parameters())` does.
    layer_params counts, layer by layer, what each layer uses, so a tied tensor once per layer; a
    container counts only what no layer below it holds. Bytes count every tensor once.
    """

    distinct_params: int
    layer_params: int
    trainable_params: int
    frozen_params: int
    trainable_layer_params: int
    frozen_layer_params: int
    buffer_params: int
    buffer_bytes: int
    param_bytes: int
    fp32_bytes: int
    bf16_bytes: int
    unknown_tensors: int


@dataclass(frozen=True, kw_only=True)
class CountRow:
    """One row of the table; `params` is over layers and over all copies, `each_params` of one copy.

    `in_layer_sum` is False for an address whose tensor a layer below it counts (rows by parameter only).
    """

    name: str
    path: str
    type: str
    shapes: tuple[Shape, ...]
    copies: int
    each_params: int
    params: int
    distinct_params: int
    trainable_params: int
    bytes: int
    share: float
    in_layer_sum: bool = True
    tied_to: str | None = None
    inputs: tuple[TensorShape, ...] = ()  # of one copy, when shapes were asked for
    outputs: tuple[TensorShape, ...] = ()
    parts: tuple[CountRow, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CountReport:
    """Parameters, row by row. Rows sum to `totals.layer_params`, the parts of a row to the row."""

    kind: ClassVar[str] = "count"
    subject: Subject
    by: str
    totals: Totals
    rows: tuple[CountRow, ...]
    ties: tuple[Tie, ...]
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TreeRow:
    """One module: `params` of everything at and below it, over layers and over all copies."""

    name: str
    path: str
    type: str
    depth: int
    depth_index: str  # torchinfo's numbering, "3-6": the sixth module at depth 3
    copies: int
    is_last: bool  # the last child of its parent, for drawing
    each_params: int
    params: int
    distinct_params: int
    trainable_params: int
    share: float
    same_as: str | None = None  # the first address of a module used again here
    inputs: tuple[TensorShape, ...] = ()  # of one copy, when shapes were asked for
    outputs: tuple[TensorShape, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TreeReport:
    """The module tree down to a depth; the root's `params` is `totals.layer_params` at every depth."""

    kind: ClassVar[str] = "tree"
    subject: Subject
    max_depth: int | None
    totals: Totals
    rows: tuple[TreeRow, ...]
    ties: tuple[Tie, ...]
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FieldChange:
    """One setting that two models do not share."""

    field: str
    a: Any
    b: Any


@dataclass(frozen=True, kw_only=True)
class DiffRow:
    """One parameter that came (`added`), went (`removed`) or changed its shape, over equal neighbours."""

    path: str
    status: str
    copies: int
    shape_a: Shape
    shape_b: Shape
    params_a: int  # over all copies
    params_b: int


@dataclass(frozen=True, kw_only=True)
class DiffReport:
    """What tells two models apart; empty for a model and itself."""

    kind: ClassVar[str] = "diff"
    a: Subject
    b: Subject
    fields: tuple[FieldChange, ...]
    rows: tuple[DiffRow, ...]
    totals_a: Totals
    totals_b: Totals
    batch: int
    seq: int
    forward_flops_a: int
    forward_flops_b: int

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs that shapes or switches the model."""
        return not self.fields and not self.rows


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One expectation and what became of it; `got` is None where the model has no such row.

    Counts, FLOPs and bytes are numbers, a tie is the address of the tensor; under `ties` stands how many there are.
    """

    model: str
    key: str
    expected: int | str | None
    got: int | str | None
    path: str
    line: int
    status: str  # "passed", "failed" or "error"
    message: str = ""
    tolerance: float = 0.0  # a share of `expected`, either way

    @property
    def difference(self) -> int | None:
        """got - expected, where both are numbers."""
        both = isinstance(self.got, int) and isinstance(self.expected, int)
        return self.got - self.expected if both else None  # type: ignore[operator]


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """Every expectation of every file; passes when no finding failed."""

    kind: ClassVar[str] = "check"
    findings: tuple[Finding, ...]
    files: int
    torch_version: str
    bertscope_version: str

    def having(self, status: str) -> tuple[Finding, ...]:
        """The findings with that status."""
        return tuple(finding for finding in self.findings if finding.status == status)


@dataclass(frozen=True, kw_only=True)
class PresetRow:
    """One preset, with the counts that its file records (and `check` verifies)."""

    name: str
    architecture: str
    distinct_params: int | None
    layer_params: int | None
    description: str
    hub_names: tuple[str, ...]
    path: str


@dataclass(frozen=True, kw_only=True)
class PresetsReport:
    """All presets."""

    kind: ClassVar[str] = "presets"
    rows: tuple[PresetRow, ...]


def to_json_data(report: Any) -> dict[str, Any]:
    """The report as what `json.dumps` takes, with its schema and kind in front."""
    return {"schema": SCHEMA, "kind": report.kind, **dataclasses.asdict(report)}


def to_json(report: Any) -> str:
    """Return the report as JSON text, which `from_json` reads back."""
    return json_text(to_json_data(report))
