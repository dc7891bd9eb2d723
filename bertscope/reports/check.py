"""The report of `check`: every expectation and its result."""

from dataclasses import dataclass
from typing import ClassVar

from bertscope.reports.base import TableReport


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One expectation and its result; `got` is None if the model has no such row.

    Counts, FLOPs and bytes are numbers; a tie is the name of the tensor; `ties` is the number of ties.
    """

    model: str
    key: str
    expected: int | str | None
    got: int | str | None
    path: str
    line: int
    status: str  # "passed", "failed" or "error"
    message: str = ""
    tolerance: float = 0.0  # as a fraction of `expected`, up or down

    @property
    def difference(self) -> int | None:
        """Return got - expected if both are numbers, else None."""
        both = isinstance(self.got, int) and isinstance(self.expected, int)
        return self.got - self.expected if both else None  # type: ignore[operator]


@dataclass(frozen=True, kw_only=True, repr=False)
class CheckReport(TableReport[Finding]):
    """Every expectation of every file; passes when no finding failed."""

    kind: ClassVar[str] = "check"
    rows_in = "findings"
    findings: tuple[Finding, ...]
    files: int
    torch_version: str
    bertscope_version: str

    def having(self, status: str) -> tuple[Finding, ...]:
        """Return the findings with that status."""
        return tuple(finding for finding in self.findings if finding.status == status)
