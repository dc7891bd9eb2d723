"""Descriptions of the storages and tensors that the calls in a pickle of weights would make."""

import math
from dataclasses import dataclass
from typing import Any

from bertscope.checkpoints.files import is_size

_REBUILD = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
_REBUILD_PARAMETER = ("_rebuild_parameter", "_rebuild_parameter_with_state")
_STORAGES = {
    "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16", "DoubleStorage": "float64",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "",
}  # fmt: skip
ITEM_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16, "uint16": 2, "uint32": 4, "uint64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip


class BadPickle(Exception):
    """The error for a call or value in a pickle that weights do not need."""


@dataclass(frozen=True)
class Global:
    """A name in a module; it is never imported."""

    module: str
    name: str


@dataclass(frozen=True)
class Storage:
    """The storage of tensors: key of the record, number of elements, dtype (`""`: plain bytes)."""

    key: str
    dtype: str
    elements: int

    @property
    def bytes(self) -> int:
        """Return the size of the record in bytes."""
        return self.elements * ITEM_BYTES.get(self.dtype, 1)


@dataclass(frozen=True)
class Tensor:
    """The description of a tensor that the pickle rebuilds."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


class Table(dict[Any, Any]):
    """A dictionary in the pickle."""


def storage_of(persistent: Any) -> Storage:
    """Return the storage for torch's tuple `("storage", type, key, location, elements)`."""
    kind, storage, key, _, elements = persistent[:5]
    dtype = _STORAGES.get(storage.name) if isinstance(storage, Global) and storage.module.startswith("torch") else None
    if kind != "storage" or dtype is None or not isinstance(key, str) or not is_size(elements):
        raise BadPickle("a storage that is none of torch's")
    if len(persistent) > 5 and persistent[5] is not None:
        raise BadPickle("a view into a storage, as torch wrote before 0.4")
    return Storage(key, dtype, elements)


def called(function: Global, arguments: tuple[Any, ...]) -> Any:
    """Return the result of a call, for the few calls that occur in state dicts; raise BadPickle for others."""
    if function == Global("collections", "OrderedDict") and len(arguments) < 2:
        return _table(*arguments)
    if function == Global("torch", "Size") and len(arguments) == 1:
        return tuple(arguments[0])
    if function.module == "torch._utils" and function.name in _REBUILD:
        return _tensor(arguments, with_dtype=function.name == "_rebuild_tensor_v3")
    if function.module == "torch._utils" and function.name in _REBUILD_PARAMETER:
        if isinstance(arguments[0], Tensor):
            return arguments[0]
        raise BadPickle("a parameter that is no tensor")
    raise BadPickle(f"it calls {function.module[:60]}.{function.name[:60]}, which is no part of a state dict")


def _table(pairs: Any = ()) -> Table:
    """Return an OrderedDict: empty, as Python 3 pickles it, or from pairs, as Python 2 did."""
    if not isinstance(pairs, (tuple, list)) or not all(isinstance(key, str) for key, _ in pairs):
        raise BadPickle("a table with keys that are no names")
    return Table(pairs)


def _tensor(arguments: tuple[Any, ...], with_dtype: bool) -> Tensor:
    storage, offset, shape, stride = arguments[:4]
    if not isinstance(storage, Storage) or not isinstance(shape, tuple) or not isinstance(stride, tuple):
        raise BadPickle("a tensor without a storage")
    if not all(map(is_size, (offset, *shape, *stride))) or len(shape) != len(stride) or len(shape) > 64:
        raise BadPickle("a tensor with a shape or stride that is no list of sizes")
    dtype = storage.dtype
    if with_dtype:
        given = arguments[6]
        dtype = given.name if isinstance(given, Global) and given.module == "torch" else ""
    if dtype not in ITEM_BYTES:
        raise BadPickle("a tensor of an unknown dtype")
    if not is_size(math.prod(shape)):
        raise BadPickle("a tensor of 2**63 elements or more")
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
    if math.prod(shape) and last * ITEM_BYTES[dtype] > storage.bytes:
        raise BadPickle(f"a tensor of shape {list(shape)} that reaches beyond its storage")
    return Tensor(storage, offset, shape, stride, dtype)
