"""The reports on checkpoints: what a file stores, and whether it is the model; plain data in base units."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from bertscope.reports.base import Subject


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of a checkpoint; `shares` is the first name under which the file has the same storage."""

    name: str
    dtype: str  # torch's name: "float32"
    shape: tuple[int, ...]
    params: int  # elements
    bytes: int
    file: str
    shares: str | None = None


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """A stretch of a file by what it is for; the parts of a file sum to its size."""

    file: str
    what: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class StoredRow:
    """Tensors of a checkpoint in one row: equal ones of neighbouring layers, or those of a module."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None  # None: the tensors of a module differ
    copies: int
    params: int
    bytes: int
    shares: str | None = None


@dataclass(frozen=True, kw_only=True)
class DtypeRow:
    """What is stored in one dtype."""

    dtype: str
    tensors: int
    params: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Stored:
    """The sums of a checkpoint. A storage that two names share is in the file once, and in `distinct_params` once."""

    name: str
    format: str  # "safetensors" or "pytorch"
    files: tuple[str, ...]
    tensors: int
    stored_params: int  # over names
    distinct_params: int  # over storages
    tensor_bytes: int  # over storages
    file_bytes: int
    dtypes: tuple[DtypeRow, ...]
    parts: tuple[FilePart, ...]
    metadata: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()  # what the format's own readers would stumble over


@dataclass(frozen=True, kw_only=True)
class CheckpointReport:
    """What a checkpoint stores, read from its header; rows sum to `stored.stored_params`."""

    kind: ClassVar[str] = "checkpoint"
    stored: Stored
    by: str
    rows: tuple[StoredRow, ...]
    bertscope_version: str
    obtained: str = "read from the file's header"


@dataclass(frozen=True, kw_only=True)
class VerifyRow:
    """What is wrong with, or worth knowing of, equal tensors of neighbouring layers.

    missing: the model has it, the file does not. unexpected: the file has it, the model does not. shape and
    dtype: both have it, and it differs. renamed, tied, duplicate, buffer, shared: it fits, and how.
    """

    status: str
    name: str  # in the model; for unexpected and buffer, in the file
    stored_name: str | None
    copies: int
    shape: tuple[int, ...] | None
    stored_shape: tuple[int, ...] | None
    dtype: str | None
    stored_dtype: str | None
    params: int  # of the model for missing, else of the file; over all copies
    is_wrong: bool
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """A model against a checkpoint's header; `fits` when no row is wrong."""

    kind: ClassVar[str] = "verify"
    subject: Subject
    stored: Stored
    fits: bool
    matched_tensors: int
    model_tensors: int
    model_distinct_params: int
    rows: tuple[VerifyRow, ...]
    fitting: tuple[str, ...] = ()  # other classes that the checkpoint fits, where names are wrong
    obtained: str = "the file's header against the model on meta; no value was read"
