"""The reports on checkpoints: the contents of a file, and its comparison with a model. Plain data in base units."""

from dataclasses import field

from bertscope.frozen import Record
from bertscope.reports.base import Subject, TableReport


class StoredTensor(Record):
    """One tensor of a checkpoint; `shares` is the first name with the same storage in the file.

    A quantized weight is one tensor, of the shape and the elements of the weight, with the bytes of all tensors of the
    file that store it: packed integers, scales, zero points.
    """

    name: str
    dtype: str  # torch's name: "float32"; of a packed one the dtype of its elements: "int4", "nf4", "Q4_K"
    shape: tuple[int, ...]
    params: int  # elements
    bytes: int
    file: str
    shares: str | None = None
    packing: str | None = None  # whose: "GPTQ", "bitsandbytes"
    tensors: int = 1  # of the file that store it

    @property
    def is_weight(self) -> bool:
        """Return False for integers that are no packed weight: positions, counters, shapes."""
        return self.packing is not None or not self.dtype.startswith(("int", "uint", "bool", "string"))


class FilePart(Record):
    """A part of a file by its use; the parts of a file sum to its size."""

    file: str
    what: str
    bytes: int


class StoredRow(Record):
    """Tensors of a checkpoint in one row: equal tensors of neighbouring layers, or the tensors of a module."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None  # None: the tensors of a module differ
    copies: int
    params: int
    bytes: int
    shares: str | None = None
    packing: str | None = None


class DtypeRow(Record):
    """The stored tensors of one dtype and packing."""

    dtype: str
    tensors: int
    params: int
    bytes: int
    packing: str | None = None


class Stored(Record):
    """A checkpoint's sums. A storage with two names is in the file once and counts in `distinct_params` once."""

    name: str
    format: str  # such as "safetensors" or "pytorch"
    files: tuple[str, ...]
    tensors: int
    stored_params: int  # summed over names
    distinct_params: int  # summed over storages
    weights: int  # of these, elements of floating point or of packed tensors
    weight_bytes: int  # of the weights, with their scales and zero points
    tensor_bytes: int  # summed over storages
    file_bytes: int
    dtypes: tuple[DtypeRow, ...]
    parts: tuple[FilePart, ...]
    metadata: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()  # reasons for which the official reader refuses the file
    unknown_packing: str = ""  # of tensors that are counted as stored


class CheckpointReport(TableReport[StoredRow], kind="checkpoint"):
    """A checkpoint's contents, read from its header; the rows sum to `stored.stored_params`."""

    stored: Stored
    by: str
    rows: tuple[StoredRow, ...]
    bertscope_version: str
    obtained: str = "read from the file's header"


class VerifyRow(Record):
    """One difference, or one remark, for equal tensors of neighbouring layers.

    prefix: the names of the file begin with it, and the others are compared without it.
    missing: the model has it, the file does not. unexpected: the file has it, the model does not. shape and
    dtype: both have the tensor, and it differs. renamed, tied, duplicate, buffer, shared: the tensor fits in this way.
    """

    status: str
    name: str  # name in the model; for unexpected and buffer, in the file
    stored_name: str | None
    copies: int
    shape: tuple[int, ...] | None
    stored_shape: tuple[int, ...] | None
    dtype: str | None
    stored_dtype: str | None
    params: int  # of the model for missing, else of the file; all copies
    is_wrong: bool
    note: str = ""


class VerifyReport(TableReport[VerifyRow], kind="verify"):
    """A model's comparison with a checkpoint's header; `fits` is True when no row is an error."""

    subject: Subject
    stored: Stored
    fits: bool
    matched_tensors: int
    model_tensors: int
    model_distinct_params: int
    rows: tuple[VerifyRow, ...]
    fitting: tuple[str, ...] = ()  # other classes that the checkpoint fits, if names differ
    new_modules: tuple[str, ...] = ()  # of a head or pooler that the file does not have
    obtained: str = "the file's header against the model on meta; no value was read"
