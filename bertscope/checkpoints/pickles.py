"""What a pickle of weights describes, without unpickling it: nothing is imported, called or constructed.

The instructions come one by one from the standard library's disassembler (`pickletools`), and a small machine
does the two dozen that a state dict needs. A global is only ever a name; the calls that torch writes to rebuild
a tensor become its description, and any other call ends the reading.
"""

from __future__ import annotations

import math
import pickletools
from dataclasses import dataclass
from io import BytesIO
from typing import Any

MAX_INSTRUCTIONS = 1 << 20  # a tensor takes about 40
_MARK = object()
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset(
    [
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "FLOAT",
        "BINFLOAT",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "UNICODE",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
    ]
)
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
    """What the pickle asks for that no weights need."""


@dataclass(frozen=True)
class Global:
    """A name in a module; never looked up."""

    module: str
    name: str


@dataclass(frozen=True)
class Storage:
    """The bytes that tensors view: the record's key, and how many elements of what (`""`: plain bytes)."""

    key: str
    dtype: str
    elements: int

    @property
    def bytes(self) -> int:
        """The size of the record."""
        return self.elements * ITEM_BYTES.get(self.dtype, 1)


@dataclass(frozen=True)
class Tensor:
    """What a rebuilt tensor would be."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


class Table(dict[Any, Any]):
    """A dictionary of the pickle."""


def described(file: BytesIO) -> Any:
    """The next pickle in the file as plain values, Tables and Tensors; raises BadPickle."""
    machine = _Machine()
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
            if count > MAX_INSTRUCTIONS:
                raise BadPickle(f"more than {MAX_INSTRUCTIONS:,} instructions")
            machine.do(opcode.name, argument)
        return machine.stack.pop()
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise BadPickle(f"not the pickle of a state dict ({type(error).__name__}: {str(error)[:80]})") from None


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def do(self, name: str, argument: Any) -> None:
        """One instruction."""
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        else:
            step = getattr(self, f"_{name.lower()}", None)
            if step is None:
                raise BadPickle(f"the instruction {name}, which no state dict needs")
            step(argument)

    def _items(self) -> list[Any]:
        """What lies above the last mark, taken off with it."""
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise BadPickle("an instruction without its mark")
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def _proto(self, argument: Any) -> None:
        if argument > 5:
            raise BadPickle(f"pickle protocol {argument}")

    def _frame(self, argument: Any) -> None:
        """The length of what follows; the instructions tell it anyway."""

    _stop = _frame

    def _mark(self, argument: Any) -> None:
        self.stack.append(_MARK)

    def _empty_dict(self, argument: Any) -> None:
        self.stack.append(Table())

    def _empty_list(self, argument: Any) -> None:
        self.stack.append([])

    def _empty_tuple(self, argument: Any) -> None:
        self.stack.append(())

    def _tuple(self, argument: Any) -> None:
        self.stack.append(tuple(self._items()))

    def _last(self, count: int) -> None:
        items = tuple(self.stack[-count:])
        if len(items) < count:
            raise BadPickle("a tuple of more than there is")
        self.stack[-count:] = [items]

    def _tuple1(self, argument: Any) -> None:
        self._last(1)

    def _tuple2(self, argument: Any) -> None:
        self._last(2)

    def _tuple3(self, argument: Any) -> None:
        self._last(3)

    def _append(self, argument: Any) -> None:
        item = self.stack.pop()
        self._top(list).append(item)

    def _appends(self, argument: Any) -> None:
        items = self._items()
        self._top(list).extend(items)

    def _setitem(self, argument: Any) -> None:
        self._set([self.stack.pop(-2), self.stack.pop()])

    def _setitems(self, argument: Any) -> None:
        self._set(self._items())

    def _set(self, items: list[Any]) -> None:
        table = self._top(Table)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, (str, int)):  # the hash of a tuple of tuples of tuples may take for ever
                raise BadPickle(f"a key that is a {type(key).__name__}")
            table[key] = value

    def _top(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], kind):
            raise BadPickle(f"an instruction for a {kind.__name__.lower()} on a {type(self.stack[-1]).__name__}")
        return self.stack[-1]

    def _put(self, argument: Any) -> None:
        self.memo[argument] = self.stack[-1]

    _binput = _long_binput = _put

    def _memoize(self, argument: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def _get(self, argument: Any) -> None:
        self.stack.append(self.memo[argument])

    _binget = _long_binget = _get

    def _global(self, argument: Any) -> None:
        self.stack.append(Global(*argument.split(" ", 1)))

    def _stack_global(self, argument: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise BadPickle("a global without a name")
        self.stack.append(Global(module, name))

    def _binpersid(self, argument: Any) -> None:
        self.stack.append(_storage(self.stack.pop()))

    def _build(self, argument: Any) -> None:
        self.stack.pop()  # the attributes of a state dict: its metadata
        self._top(Table)

    def _reduce(self, argument: Any) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise BadPickle("a call of what is no name")
        self.stack.append(_called(function, arguments))


def _storage(persistent: Any) -> Storage:
    """`("storage", type, key, location, elements)`, as torch writes it."""
    kind, storage, key, _, elements = persistent[:5]
    dtype = _STORAGES.get(storage.name) if isinstance(storage, Global) and storage.module.startswith("torch") else None
    if kind != "storage" or dtype is None or not isinstance(key, str) or not _is_size(elements):
        raise BadPickle("a storage that is none of torch's")
    if len(persistent) > 5 and persistent[5] is not None:
        raise BadPickle("a view into a storage, as torch wrote before 0.4")
    return Storage(key, dtype, elements)


def _called(function: Global, arguments: tuple[Any, ...]) -> Any:
    """The value that a call would give, for the few that state dicts hold."""
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
    """An OrderedDict, empty as Python 3 pickles it, or from pairs as Python 2 did."""
    if not isinstance(pairs, (tuple, list)) or not all(isinstance(key, str) for key, _ in pairs):
        raise BadPickle("a table with keys that are no names")
    return Table(pairs)


def _tensor(arguments: tuple[Any, ...], with_dtype: bool) -> Tensor:
    storage, offset, shape, stride = arguments[:4]
    if not isinstance(storage, Storage) or not isinstance(shape, tuple) or not isinstance(stride, tuple):
        raise BadPickle("a tensor without a storage")
    if not all(map(_is_size, (offset, *shape, *stride))) or len(shape) != len(stride) or len(shape) > 64:
        raise BadPickle("a tensor with a shape or stride that is no list of sizes")
    dtype = storage.dtype
    if with_dtype:
        given = arguments[6]
        dtype = given.name if isinstance(given, Global) and given.module == "torch" else ""
    if dtype not in ITEM_BYTES:
        raise BadPickle("a tensor of an unknown dtype")
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
    if math.prod(shape) and last * ITEM_BYTES[dtype] > storage.bytes:
        raise BadPickle(f"a tensor of shape {list(shape)} that reaches beyond its storage")
    return Tensor(storage, offset, shape, stride, dtype)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63
