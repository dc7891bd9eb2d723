"""The report of `sweep`: a row for each point of a grid. Plain data in bytes and FLOPs."""

from __future__ import annotations

import json
from dataclasses import field
from importlib import import_module
from typing import Any, ClassVar

from bertscope.errors import SourceError
from bertscope.frozen import dataclass
from bertscope.reports.base import SCHEMA, TableReport, as_data
from bertscope.reports.step import StepCost

# computed: the row has numbers. refused: the settings exclude each other, or the model does not have one of them.
# failed: a worker ended, or a package is missing; the next run computes the point again.
COMPUTED, REFUSED = "computed", "refused"


@dataclass(frozen=True, kw_only=True)
class SweepRow:
    """One point of a grid: its settings and the estimate of its step, or the error.

    `key` is a hash of the settings, the configuration of the model and the versions. `point` has every setting, with
    the defaults of those that the grid does not have. `cost` is that of `estimate`, of one rank if there are several,
    with the settings `gpu` or `budget` as its limit.
    """

    key: str
    point: dict[str, Any]
    unused: tuple[str, ...] = ()  # settings of the grid that have no effect at this point
    outcome: str = COMPUTED
    error: str = ""
    cost: StepCost | None = None
    phases: dict[str, int] = field(default_factory=dict)  # the peak of each
    traffic: dict[str, int] = field(default_factory=dict)  # of a step: the bytes of the whole tensors by collective
    sent_bytes: int | None = None  # by the rank, if the ranks communicate in a ring
    parameters: int | None = None  # unique ones of the whole model
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
        found: SweepRow = import_module("bertscope.reports.json").typed(cls, data, "row")
        return found


@dataclass(frozen=True, kw_only=True, repr=False)
class SweepReport(TableReport[SweepRow]):
    """The points of a grid in its order; `varied` are the settings with several values."""

    kind: ClassVar[str] = "sweep"
    grid: str
    varied: dict[str, Any]
    rows: tuple[SweepRow, ...]

    def number(self, outcome: str) -> int:
        """Return the number of rows with this outcome."""
        return sum(row.outcome == outcome for row in self.rows)
