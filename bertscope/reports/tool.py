"""The reports of `doctor`, `schema`, `presets` and `tree --style torch`, and the calibration of a GPU. Plain data."""

from __future__ import annotations

from dataclasses import field, replace

from bertscope.frozen import Record
from bertscope.reports.base import Report, Subject, TableReport


class PrintReport(Report, kind="print"):
    """The model in PyTorch's print format."""

    subject: Subject
    text: str


class SchemaRow(Record):
    """One kind of report, and its classes."""

    report: str
    classes: tuple[str, ...]
    description: str


class SchemasReport(Report, kind="schemas"):
    """The kinds of report; each has a JSON Schema."""

    rows: tuple[SchemaRow, ...]


class PackageRow(Record):
    """One package; `extra` is "" for a required package, and `version` is None if it is not installed."""

    name: str
    version: str | None
    extra: str
    purpose: str
    remedy: str  # the command that installs a missing package


class DeviceRow(Record):
    """A device for models; None for an unknown property."""

    name: str
    description: str
    threads: int | None
    memory_bytes: int | None


class DoctorReport(Report, kind="doctor"):
    """The environment of bertscope: versions, packages, devices; `problems` prevent bertscope from working."""

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
    calibrations: tuple[str, ...] = ()  # the GPUs, with dates and versions
    cache_path: str = ""  # empty without a cache; `no_cache` is the reason then
    cache_bytes: int = 0
    cache_files: int = 0
    no_cache: str = ""


class PresetRow(Record):
    """One preset, with the counts in its file, which `check` verifies."""

    name: str
    family: str  # the model type of its config.json
    architecture: str
    distinct_params: int | None
    layer_params: int | None
    hidden_size: int
    num_hidden_layers: int  # an encoder-decoder's encoder layers
    requires: str  # the package that builds the model; empty for a BERT
    description: str
    hub_names: tuple[str, ...]
    path: str


class PresetsReport(Report, kind="presets"):
    """All presets."""

    rows: tuple[PresetRow, ...]


# ---- the report of `check`: every expectation and its result ----


class Finding(Record):
    """One expectation and its result; `got` is None if the model has no such row.

    Counts, FLOPs and bytes are numbers; a tie is the tensor's name; `ties` is the number of ties.
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


class CheckReport(TableReport[Finding], kind="check", rows_in="findings"):
    """Every expectation of every file; passes when no finding failed."""

    findings: tuple[Finding, ...]
    files: int
    torch_version: str
    bertscope_version: str

    def having(self, status: str) -> tuple[Finding, ...]:
        """Return the findings with that status."""
        return tuple(finding for finding in self.findings if finding.status == status)


COPY = "copy"  # the name of a rate besides the precisions


class CardWork(Record):
    """One step's work: FLOPs of matrix products by precision, bytes that the other operators move, and calls."""

    matmul_flops: dict[str, int] = field(default_factory=dict)
    moved_bytes: int = 0
    calls: int = 0


class CalibrationStep(Record):
    """A measured step; `precision` is used by its matrix products.

    `context_bytes` is the memory of the device outside torch's allocator. Estimates and `work` are None for a step
    whose operators depend on the values of tensors.
    """

    model: str
    batch: int
    seq: int
    mode: str
    precision: str
    checkpointing: str
    context_bytes: int
    estimated_allocated_bytes: int | None
    allocated_bytes: int
    estimated_reserved_bytes: int | None
    reserved_bytes: int
    work: CardWork | None
    step_seconds: tuple[float, ...]

    @property
    def name(self) -> str:
        """Return the settings of the step, which a later measurement replaces."""
        return f"{self.model} {self.batch}x{self.seq} {self.mode} {self.precision} {self.checkpointing}"

    @property
    def median_seconds(self) -> float | None:
        """Return the median time of a step."""
        from statistics import median  # with decimal and fractions, which only a calibration needs

        return median(self.step_seconds) if self.step_seconds else None


class Machine(Record):
    """The GPU and the versions of a calibration, and the date of its last measurement."""

    gpu: str  # as torch names it
    memory_bytes: int
    driver: str
    torch_version: str
    bertscope_version: str
    date: str


class CalibrationReport(TableReport[CalibrationStep], kind="calibration", rows_in="steps"):
    """One GPU's calibration: rates, and steps measured next to their estimates.

    `rates` are the FLOP/s of a large matrix product by precision, and the bytes per second of a large copy.
    """

    machine: Machine
    rates: dict[str, float]
    steps: tuple[CalibrationStep, ...]

    @property
    def context_bytes(self) -> tuple[int, int] | None:
        """Return the least and the most memory outside the allocator in a step; None without a step."""
        sizes = [step.context_bytes for step in self.steps]
        return (min(sizes), max(sizes)) if sizes else None

    def after(self, earlier: CalibrationReport | None) -> CalibrationReport:
        """Return this calibration with what an earlier one measured on the same GPU with the same versions."""
        if earlier is None or replace(earlier.machine, date="") != replace(self.machine, date=""):
            return self
        steps = {step.name: step for step in (*earlier.steps, *self.steps)}
        return replace(self, rates={**earlier.rates, **self.rates}, steps=tuple(steps.values()))
