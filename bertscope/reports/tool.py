"""The reports of `doctor`, `schema`, `presets` and `tree --style torch`."""

from typing import ClassVar

from bertscope.frozen import dataclass
from bertscope.reports.base import Report, Subject, TableReport


@dataclass(frozen=True, kw_only=True, repr=False)
class PrintReport(Report):
    """The model in PyTorch's print format."""

    kind: ClassVar[str] = "print"
    subject: Subject
    text: str


@dataclass(frozen=True, kw_only=True)
class SchemaRow:
    """One kind of report, and its classes."""

    report: str
    classes: tuple[str, ...]
    description: str


@dataclass(frozen=True, kw_only=True, repr=False)
class SchemasReport(Report):
    """The kinds of report; each has a JSON Schema."""

    kind: ClassVar[str] = "schemas"
    rows: tuple[SchemaRow, ...]


@dataclass(frozen=True, kw_only=True)
class PackageRow:
    """One package; `extra` is "" for a required package, and `version` is None if it is not installed."""

    name: str
    version: str | None
    extra: str
    purpose: str
    remedy: str  # the command that installs a missing package


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """A device for models; None for an unknown property."""

    name: str
    description: str
    threads: int | None
    memory_bytes: int | None


@dataclass(frozen=True, kw_only=True, repr=False)
class DoctorReport(Report):
    """The environment of bertscope: versions, packages, devices; `problems` prevent bertscope from working."""

    kind: ClassVar[str] = "doctor"
    bertscope_version: str
    bertscope_path: str
    python_version: str
    python_path: str
    platform: str
    torch_version: str | None  # of the torch that is imported
    preset_path: str
    presets: int
    packages: tuple[PackageRow, ...]
    devices: tuple[DeviceRow, ...]
    problems: tuple[str, ...]
    calibration_path: str = ""
    calibrations: tuple[str, ...] = ()  # the cards, with dates and versions
    cache_path: str = ""  # empty without a cache; `no_cache` is the reason then
    cache_bytes: int = 0
    cache_files: int = 0
    no_cache: str = ""


@dataclass(frozen=True, kw_only=True)
class PresetRow:
    """One preset, with the counts in its file, which `check` verifies."""

    name: str
    architecture: str
    distinct_params: int | None
    layer_params: int | None
    description: str
    hub_names: tuple[str, ...]
    path: str


@dataclass(frozen=True, kw_only=True, repr=False)
class PresetsReport(Report):
    """All presets."""

    kind: ClassVar[str] = "presets"
    rows: tuple[PresetRow, ...]


# ---- the report of `check`: every expectation and its result ----


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
