"""What the tool says of itself and in PyTorch's own words: `doctor`, `schema`, `print`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bertscope.reports.base import Subject


@dataclass(frozen=True, kw_only=True)
class PrintReport:
    """The model as PyTorch prints it."""

    kind: ClassVar[str] = "print"
    subject: Subject
    text: str


@dataclass(frozen=True, kw_only=True)
class SchemaRow:
    """One kind of report, and the classes that it is made from."""

    report: str
    classes: tuple[str, ...]
    description: str


@dataclass(frozen=True, kw_only=True)
class SchemasReport:
    """The kinds of report that have a JSON Schema: all."""

    kind: ClassVar[str] = "schemas"
    rows: tuple[SchemaRow, ...]


@dataclass(frozen=True, kw_only=True)
class PackageRow:
    """One package; `extra` is "" for what bertscope needs, and `version` None where it is not installed."""

    name: str
    version: str | None
    extra: str
    purpose: str
    remedy: str  # the command that installs it, where it is missing


@dataclass(frozen=True, kw_only=True)
class DeviceRow:
    """Something that a model can run on; None where it is not known."""

    name: str
    description: str
    threads: int | None
    memory_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """What bertscope runs on, and what it finds there; `problems` are what keeps it from working."""

    kind: ClassVar[str] = "doctor"
    bertscope_version: str
    bertscope_path: str
    python_version: str
    python_path: str
    platform: str
    torch_version: str | None  # of the torch that really loads
    preset_path: str
    presets: int
    packages: tuple[PackageRow, ...]
    devices: tuple[DeviceRow, ...]
    problems: tuple[str, ...]


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
