"""Files from `torch.save`: a zip since torch 1.6, consecutive pickles before. This module unpickles neither."""

import math
import pickletools
import re
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

from bertscope.checkpoints.files import ITEM_BYTES, Budget, OpenFile, StoredFile, is_plain, is_size, use_of
from bertscope.checkpoints.packing import describes
from bertscope.files import open_file
from bertscope.reports.checkpoint import FilePart, StoredTensor

_REBUILD = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3")
_REBUILD_PARAMETER = ("_rebuild_parameter", "_rebuild_parameter_with_state")
_STORAGES = {
    "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16", "DoubleStorage": "float64",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "", "QInt8Storage": "qint8", "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
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
    """Storage for tensors: the record's key, element count, dtype (`""`: plain bytes)."""

    key: str
    dtype: str
    elements: int

    @property
    def bytes(self) -> int:
        """Return the record's size in bytes."""
        return self.elements * ITEM_BYTES.get(self.dtype, 1)


@dataclass(frozen=True)
class Tensor:
    """A tensor's description that the pickle rebuilds."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


class PickledDict(dict[Any, Any]):
    """A dictionary in the pickle; `others` are its items whose keys are objects."""

    later: Any = ()  # a list from the first of them on


class Opaque:
    """An object whose class is not imported: the class's name, its arguments and its attributes."""

    def __init__(self, function: Global, arguments: tuple[Any, ...]) -> None:
        self.function = function
        self.arguments = arguments
        self.state: Any = None

    def append(self, item: Any) -> None:
        """Pass over a list item."""

    extend = append

    def get(self, name: str) -> Any:
        """Return an attribute; None without it."""
        return self.state.get(name) if isinstance(self.state, PickledDict) else None


# Modules of the objects that trainers save next to weights: settings, paths, counters, random states. They are data
# here; a file that names any other module is refused.
_KEPT = re.compile(
    r"argparse|pathlib|datetime|collections|enum|copyreg|_codecs|(?:numpy|torch\.(?:distributed|optim|torch_version)"
    r"|deepspeed|pytorch_lightning|lightning|lightning_fabric|lightning_utilities|omegaconf|transformers|accelerate)(?:\..*)?"
)
_KEPT_NAMES = (
    *(Global(module, name) for module in ("builtins", "__builtin__")
      for name in ("set", "frozenset", "slice", "complex", "bytearray", "object", "range", "dict", "list")),
    *(Global("torch", name) for name in ("device", "Generator")), Global("torch.serialization", "_get_layout"),
)  # fmt: skip


def called(function: Global, arguments: tuple[Any, ...]) -> Any:
    """Return a call's result, for the few calls that occur in state dicts; raise BadPickle for others."""
    if function == Global("collections", "OrderedDict") and len(arguments) < 2:
        pairs = arguments[0] if arguments else ()  # empty, as Python 3 pickles it; Python 2 wrote pairs
        if not isinstance(pairs, (tuple, list)) or not all(isinstance(key, str) for key, _ in pairs):
            raise BadPickle("a table with keys that are not names")
        return PickledDict(pairs)
    if function == Global("torch", "Size") and len(arguments) == 1:
        return tuple(arguments[0])
    if function.module == "torch._utils" and function.name in _REBUILD:
        return _tensor(arguments, with_dtype=function.name == "_rebuild_tensor_v3")
    if function == Global("torch._utils", "_rebuild_qtensor"):
        return _tensor(arguments[:4], with_dtype=False)
    if function.module == "torch._utils" and function.name in _REBUILD_PARAMETER:
        if isinstance(arguments[0], Tensor):
            return arguments[0]
        raise BadPickle("a parameter that is not a tensor")
    if _KEPT.fullmatch(function.module) or function in _KEPT_NAMES:
        return Opaque(function, arguments)
    if function.module.startswith("__torch__"):
        raise BadPickle("it is a program of TorchScript")
    if function.module.startswith("torchao.") or function == Global("torch._tensor", "_rebuild_from_type_v2"):
        raise BadPickle("it has tensors of a class that is not torch's own, such as one of torchao")
    raise BadPickle(f"it calls {function.module[:60]}.{function.name[:60]}, which is not part of a state dict")


def _tensor(arguments: tuple[Any, ...], with_dtype: bool) -> Tensor:
    storage, offset, shape, stride = arguments[:4]
    if not isinstance(storage, Storage) or not isinstance(shape, tuple) or not isinstance(stride, tuple):
        raise BadPickle("a tensor without a storage")
    if not all(map(is_size, (offset, *shape, *stride))) or len(shape) != len(stride) or len(shape) > 64:
        raise BadPickle("a tensor with a shape or stride that is not a list of sizes")
    dtype = storage.dtype
    if with_dtype:
        metadata = arguments[6]
        dtype = metadata.name if isinstance(metadata, Global) and metadata.module == "torch" else ""
    if dtype not in ITEM_BYTES:
        raise BadPickle("a tensor of an unknown dtype")
    if not is_size(math.prod(shape)):
        raise BadPickle("a tensor of 2**63 elements or more")
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
    if math.prod(shape) and last * ITEM_BYTES[dtype] > storage.bytes:
        raise BadPickle(f"a tensor of shape {list(shape)} that reaches beyond its storage")
    return Tensor(storage, offset, shape, stride, dtype)


MAX_INSTRUCTIONS = 1 << 20  # a tensor takes about 40
_MARK = object()
# Instructions that push their argument.
_VALUES = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8",
}  # fmt: skip


class _Machine:
    def __init__(self, budget: Budget, storages: dict[str, Storage] | None = None) -> None:
        self.budget, self.storages = budget, {} if storages is None else storages
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, name: str, argument: Any) -> None:
        stack = self.stack
        match name:
            case _ if name in _VALUES:
                stack.append(argument)
            case "BINPUT" | "LONG_BINPUT" | "PUT":
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET" | "GET":
                stack.append(self.memo[argument])
            case "MARK":
                stack.append(_MARK)
            case "TUPLE" | "FROZENSET":
                stack.append(tuple(self.items()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(self.last(int(name[-1])))
            case "BINPERSID":
                stack.append(self.storage())
            case "REDUCE" | "NEWOBJ":
                stack.append(self.call())
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append(None if name == "NONE" else name == "NEWTRUE")
            case "EMPTY_DICT":
                stack.append(PickledDict())
            case "EMPTY_LIST" | "EMPTY_SET":
                stack.append([])
            case "EMPTY_TUPLE":
                stack.append(())
            case "GLOBAL" | "STACK_GLOBAL":
                module, attribute = argument.split(" ", 1) if name == "GLOBAL" else self.last(2)
                if not (isinstance(module, str) and isinstance(attribute, str)):
                    raise BadPickle("a global without a name")
                stack.append(Global(module, attribute))
            case "SETITEM":
                self.set([stack.pop(-2), stack.pop()])
            case "SETITEMS":
                self.set(self.items())
            case "APPEND":
                item = stack.pop()
                self.top(list).append(item)
            case "APPENDS" | "ADDITEMS":
                items = self.items()
                self.top(list).extend(items)
            case "BUILD":  # a state dict's attributes are its metadata
                state = stack.pop()
                if isinstance(target := self.top(PickledDict), Opaque):
                    target.state = state
            case "PROTO" | "FRAME" | "STOP":  # neither a frame's length nor the end is needed
                pass
            case _:
                raise BadPickle(f"the instruction {name}, which no state dict needs")

    def storage(self) -> Storage:
        """Return the storage for torch's tuple `("storage", type, key, location, elements)` on top, and pop it."""
        persistent = self.stack.pop()
        kind, cls, key, _, elements = persistent[:5]
        dtype = _STORAGES.get(cls.name) if isinstance(cls, Global) and cls.module.startswith("torch") else None
        if kind != "storage" or dtype is None or not isinstance(key, str) or not is_size(elements):
            raise BadPickle("a storage that is none of torch's")
        if len(persistent) > 5 and persistent[5] is not None:
            raise BadPickle("a view into a storage, as torch wrote before 0.4")
        stored = Storage(key, dtype, elements)
        self.storages.setdefault(key, stored)
        return stored

    def items(self) -> list[Any]:
        start = len(self.stack) - 1
        while self.stack[start] is not _MARK:
            start -= 1
            if start < 0:
                raise BadPickle("an instruction without its mark")
        items = self.stack[start + 1 :]
        del self.stack[start:]
        return items

    def last(self, count: int) -> tuple[Any, ...]:
        items = tuple(self.stack[-count:])
        if len(items) < count:
            raise BadPickle("a tuple of more than there is")
        del self.stack[-count:]
        return items

    def set(self, items: list[Any]) -> None:
        table = self.top(PickledDict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if isinstance(table, Opaque):
                continue
            # The hash of nested tuples takes exponential time; that of a long integer takes time linear in its length.
            if isinstance(key, str) or is_size(key):
                table[key] = value
            elif isinstance(key, Opaque):
                table.later = table.later or []
                table.later.append((key, value))
            elif not isinstance(key, (float, bool, type(None), Global)):
                raise BadPickle(f"a key that is a {type(key).__name__}")

    def top(self, kind: type) -> Any:
        if not isinstance(self.stack[-1], (kind, Opaque)):
            raise BadPickle(f"an instruction for a {kind.__name__.lower()} on a {type(self.stack[-1]).__name__}")
        return self.stack[-1]

    def call(self) -> Any:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, Global) or not isinstance(arguments, tuple):
            raise BadPickle("a call of something that is not a name")
        self.budget.spend("copied elements", sum(len(item) for item in arguments if isinstance(item, (list, tuple))))
        return called(function, arguments)


MAX_PICKLE_BYTES = 8 << 20
MAX_DIRECTORY_BYTES = 16 << 20  # of the zip's directory; an entry takes about 80 bytes
_MOST_DEPTH = 8  # of a table in a pickle
_OPTIMIZER = re.compile(r"(?:^|[._])opt", re.IGNORECASE)  # a key with its state


def _pickled(file: OpenFile) -> tuple[str, bytes, dict[str, zipfile.ZipInfo]]:
    _refuse_large_directories(file)
    with zipfile.ZipFile(file.stream) as archive:
        entries = {info.filename: info for info in archive.infolist()}
        if len(entries) < len(archive.infolist()):
            raise file.broken("the zip has a record twice")
        pickles = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise file.broken(
                "a zip without the data.pkl that torch.save writes (torch.export, Keras and NumPy write such ones)"
            )
        return pickles[0].removesuffix("data.pkl"), _record(file, archive, entries[pickles[0]]), entries


def read_zip(file: OpenFile) -> StoredFile:
    """Return the tensors in an open zip that `torch.save` wrote; raise SourceError for any other zip."""
    folder, raw, entries = _pickled(file)
    tensors, storages, metadata = _tensors(file, BytesIO(raw))
    for storage in storages.values():
        record = entries.get(f"{folder}data/{storage.key}")
        if record is None or record.file_size != storage.bytes or record.compress_size != storage.bytes:
            raise file.broken(
                f"the record data/{storage.key[:40]} is absent or lacks the {storage.bytes:,} bytes it should"
            )
    used = {tensor.storage.key for _, tensor in tensors}
    tensor_bytes = sum(storage.bytes for key, storage in storages.items() if key in used)
    records = sum(info.compress_size for info in entries.values())
    if records > file.size:
        raise file.broken("the zip's records overlap")
    parts = {"pickle": len(raw), "tensors": tensor_bytes}
    parts["tensors left out"] = sum(storage.bytes for storage in storages.values()) - tensor_bytes
    parts["other records"] = records - sum(parts.values())
    with zipfile.ZipFile(file.stream) as archive:
        described = ((row, tensor.storage) for row, tensor in tensors if describes(row))
        whole = ((row.name, storage.key) for row, storage in described if storage.bytes == row.bytes)
        values = {name: _record(file, archive, entries[f"{folder}data/{key}"]) for name, key in whole}
    rows, rest = [row for row, _ in tensors], "zip structure and alignment"
    return file.stored("pytorch", rows, parts, rest=rest, values=values, metadata=metadata)


def read_legacy(file: OpenFile) -> StoredFile:
    """Return the tensors in a file from torch before 1.6: magic, version, system, state dict, keys, then the bytes."""
    start = BytesIO(file.stream.read(MAX_PICKLE_BYTES))
    for _ in range(3):
        described_in(file, start)
    tensors, storages, metadata = _tensors(file, start)
    keys = described_in(file, start)
    is_list_of_names = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not is_list_of_names or sorted(keys) != sorted(storages):
        raise file.broken("the keys of its storages differ from its tensors' keys")
    pickles = position = start.tell()
    file.budget.spend("bytes of headers", pickles)
    for key in keys:
        file.stream.seek(position)
        if int.from_bytes(file.stream.read(8), "little") != storages[key].elements:
            raise file.broken(f"the storage {key[:40]} is not where it should be: truncated or wrong")
        position += 8 + storages[key].bytes
    if position > file.size:
        raise file.broken(f"the file has {file.size:,} bytes and its tensors need {position:,}: truncated")
    tensor_bytes = sum(storage.bytes for storage in storages.values())
    parts = {"pickles": pickles, "storage lengths": 8 * len(keys), "tensors": tensor_bytes}
    return file.stored("pytorch", [row for row, _ in tensors], parts, rest="after the end", metadata=metadata)


def described_in(file: OpenFile, pickle: BytesIO, storages: dict[str, Storage] | None = None) -> Any:
    """Return a file's next pickle as plain values, tables and Tensors; raise SourceError for what weights do not need.

    All storages that it names are added to `storages`.
    """
    machine, count = _Machine(file.budget, storages), 0
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(pickle)):
            if count > MAX_INSTRUCTIONS:
                raise BadPickle(f"more than {MAX_INSTRUCTIONS:,} instructions")
            if opcode.name == "PROTO" and (argument or 0) > 5:
                raise BadPickle(f"pickle protocol {argument}")
            machine.run(opcode.name, argument)
        file.budget.spend("instructions", count)
        return machine.stack.pop()
    except BadPickle as error:
        what = str(error)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
        what = f"not the pickle of a state dict ({type(error).__name__}: {str(error)[:80]})"
    raise file.broken(f"refused: {what}; weights are what torch.save(model.state_dict(), ...) writes")


def _tensors(
    file: OpenFile, pickle: BytesIO
) -> tuple[list[tuple[StoredTensor, Tensor]], dict[str, Storage], dict[str, str]]:
    # The weights are the largest table with tensors, wherever it is, and other modules' weights.
    storages: dict[str, Storage] = {}
    top = described_in(file, pickle, storages)
    tables = {path: table for path, table in _tables(top).items() if not _OPTIMIZER.search(path)}
    if not tables:
        has_arrays = _is_array(top) or any(_is_array(item) for *_, items in _containers(top) for _, item in items)
        arrays = "; it has NumPy arrays, which are not read" if has_arrays else ""
        raise file.broken(f"it holds no table of tensors{arrays}")
    sizes = {path: sum(math.prod(tensor.shape) for tensor in table.values()) for path, table in tables.items()}
    shapes = {path: {name: tensor.shape for name, tensor in table.items()} for path, table in tables.items()}
    # By the names of its tensors: a random state may be larger than a small network.
    ends = (".weight", ".bias")
    has_weights = {path: any(f".{name}".endswith(ends) for name in table) for path, table in tables.items()}
    largest = max(tables, key=lambda path: (has_weights[path], sizes[path]))
    networks = [largest]
    for path in tables:
        is_beside = not f"{largest}.".startswith(f"{path}." if path else "")
        is_copy = any(shapes[path].items() <= shapes[other].items() for other in networks)
        if is_beside and not is_copy and has_weights[path]:
            networks.append(path)
    rows, first_names = list[tuple[StoredTensor, Tensor]](), dict[Any, str]()
    for path in networks:
        front = f"{path}." if len(networks) > 1 and path else ""
        for name, value in tables[path].items():
            if storages[value.storage.key] != value.storage:
                raise file.broken(f"the storage {value.storage.key[:40]} is described in two ways")
            first = first_names.setdefault((value.storage.key, value.offset, value.shape, value.stride), front + name)
            shares = None if first == front + name else first
            rows.append((file.tensor(front + name, value.dtype, value.shape, shares=shares), value))
    left_out = ", ".join(dict.fromkeys(_left_out(top, networks)))
    return rows, storages, {"left out": left_out} if left_out else {}


def _tables(top: Any) -> dict[str, dict[str, Tensor]]:
    # The tensors of each dictionary, also in its lists, by its dotted path, the first of several.
    tables = dict[str, dict[str, Tensor]]()
    for path, value, items in _containers(top):
        tensors: dict[str, Tensor] = {}
        for key, item in items:
            if isinstance(item, Tensor):
                tensors[str(key)] = item
            elif _holds_tensors(item):
                tensors |= {f"{key}.{index}": part for index, part in enumerate(item) if isinstance(part, Tensor)}
        if tensors and isinstance(value, PickledDict):
            while path in tables:  # of the keys 1 and "1"
                path += "'"
            tables[path] = tensors
    return tables


def _containers(top: Any) -> Iterator[tuple[str, Any, list[tuple[Any, Any]]]]:
    # Each dictionary and list once, at most 8 below the top; a list with tensors belongs to the dictionary around it.
    waiting, seen = [("", top, 0)], set[int]()
    while waiting:
        path, value, depth = waiting.pop(0)
        if not isinstance(value, (PickledDict, list, tuple)) or id(value) in seen or depth > _MOST_DEPTH:
            continue
        seen.add(id(value))
        items = list(value.items() if isinstance(value, PickledDict) else enumerate(value))
        yield path, value, items
        waiting += [(f"{path}.{key}" if path else str(key), item, depth + 1) for key, item in items]


def _holds_tensors(item: Any) -> bool:
    return isinstance(item, (list, tuple)) and any(isinstance(part, Tensor) for part in item)


def _is_array(value: Any) -> bool:
    name = value.function.name if isinstance(value, Opaque) else ""
    return name == "_reconstruct" and value.function.module.startswith("numpy")


def _left_out(top: Any, networks: list[str]) -> Iterator[str]:
    for path, _, items in _containers(top):
        for name, value in ((f"{path}.{key}" if path else str(key), value) for key, value in items):
            is_way = any(f"{network}.".startswith(f"{name}.") for network in networks)
            is_beside = not path or any(f"{network}.".startswith(f"{path}.") for network in networks)
            if is_beside and not is_way and _is_array(value):
                yield f"{name[:60]} (NumPy array)"
            elif is_beside and not is_way and (path not in networks or isinstance(value, PickledDict)):
                yield name[:60]


def _record(file: OpenFile, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.file_size > MAX_PICKLE_BYTES:
        raise file.broken(f"a pickle of {info.file_size:,} bytes; at most {MAX_PICKLE_BYTES:,} are read")
    if info.compress_type != zipfile.ZIP_STORED:
        raise file.broken("a compressed data.pkl; torch.save compresses nothing")
    file.budget.spend("bytes of headers", info.file_size)
    with archive.open(info) as record:
        raw = record.read(MAX_PICKLE_BYTES + 1)
    if len(raw) > MAX_PICKLE_BYTES:
        raise file.broken("the pickle is larger than it says")
    return raw


def _refuse_large_directories(file: OpenFile) -> None:
    """Raise SourceError for a directory above the limit, since zipfile makes an object for every entry."""
    file.stream.seek(max(0, file.size - (1 << 16) - 98))
    tail = file.stream.read()
    end = tail.rfind(b"PK\x05\x06")
    if end < 0 or len(tail) < end + 22:
        raise file.broken("the zip has no end: truncated")
    directory = int.from_bytes(tail[end + 12 : end + 16], "little")
    wide = tail.rfind(b"PK\x06\x06", 0, end)
    if wide >= 0:
        directory = max(directory % 0xFFFFFFFF, int.from_bytes(tail[wide + 40 : wide + 48], "little"))
    if directory > MAX_DIRECTORY_BYTES:
        raise file.broken(f"a zip with a directory of {directory:,} bytes; at most {MAX_DIRECTORY_BYTES:,} are read")
    file.stream.seek(0)


# ---- folders of trainers: FSDP's `.distcp` files, and DeepSpeed's ZeRO ----
# Sources: `metadata.py` in `torch.distributed.checkpoint` of torch 2.13; `deepspeed/runtime/engine.py` and
# `utils/zero_to_fp32.py` of DeepSpeed 0.19.

_SHAPES = ("param_shapes", "frozen_param_shapes")
_RANK = re.compile(r"(mp_rank_[0-9]+)_model_states\.pt$")


def read_distcp(file: OpenFile) -> StoredFile:
    """Return the tensors in an open `.metadata` of torch.distributed.checkpoint, without optimizer state."""
    metadata = described_in(file, BytesIO(file.whole(MAX_PICKLE_BYTES)))
    if not isinstance(metadata, Opaque) or metadata.function.name != "Metadata":
        raise file.broken("not the metadata of torch.distributed.checkpoint")
    entries, places = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not isinstance(entries, PickledDict) or not isinstance(places, PickledDict):
        raise file.broken("metadata without tensors, or without their files")
    used: dict[str, Counter[str]] = {}  # the bytes of each file by use; a position is a file, an offset and a length
    for key, position in places.later:
        record = position if isinstance(position, Opaque) else Opaque(Global("", ""), ())
        name, length = record.get("relative_path"), record.get("length")
        if not is_plain(name) or not is_size(length):
            raise file.broken("a record that is not in a file of the folder")
        used.setdefault(str(name), Counter())[use_of(str(key.get("fqn")))] += length
    first, tensors = next(iter(used), file.path.name), list[StoredTensor]()
    for name, entry in entries.items():
        if not isinstance(entry, Opaque) or entry.function.name != "TensorStorageMetadata":
            continue
        shape, properties = entry.get("size"), entry.get("properties")
        state = properties.state if isinstance(properties, Opaque) else None
        dtypes = [state.get("dtype")] if isinstance(state, PickledDict) else state
        dtype = dtypes[0] if isinstance(dtypes, (list, tuple)) and dtypes else None
        if not isinstance(shape, tuple) or not isinstance(dtype, Global) or dtype.name not in ITEM_BYTES:
            raise file.broken(f"tensor {str(name)[:60]!r} has no shape or dtype")
        if use_of(str(name)) == "tensors":  # not of an optimizer
            tensors.append(file.tensor(str(name), dtype.name, shape, file=first))
    if not tensors:
        raise file.broken("metadata without a tensor of a model")
    return file.stored("distcp", tensors, {"header": file.size}, used)


def zero_states(folder: Path) -> Path | None:
    """Return the file with the model's states in a DeepSpeed folder, or in the folder that its file `latest` names."""
    latest = folder / "latest"
    if latest.is_file() and latest.stat().st_size <= 256:
        with open_file(latest, "name a checkpoint") as file:
            name = file.read(256).decode(errors="replace").strip()
        folder = folder / name if is_plain(name) else folder
    names = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_zero(file: OpenFile) -> StoredFile:
    """Return the tensors that DeepSpeed trained: stored as they are, or by their shapes (ZeRO-3)."""
    top = described_in(file, BytesIO(_pickled(file)[1]))
    module = top.get("module") if isinstance(top, PickledDict) else None
    if not isinstance(module, PickledDict):
        raise file.broken("not the states of a model that DeepSpeed writes")
    ranks = {name[1] for path in file.path.parent.iterdir() if (name := _RANK.search(path.name))}
    if len(ranks) > 1:
        shown = ", ".join(sorted(ranks)[:4])
        raise file.broken(f"a tensor-parallel part of a model in {len(ranks)} ({shown}); merge and count them")
    groups = [group for field in _SHAPES for group in _listed(top.get(field)) if isinstance(group, PickledDict)]
    shapes = {str(name): shape for group in groups for name, shape in group.items() if isinstance(shape, tuple)}
    used = (path for path in sorted(file.path.parent.iterdir()) if _use(path))
    parts = [FilePart(file=path.name, what=_use(path), bytes=path.stat().st_size) for path in used]
    stored = {name: value for name, value in module.items() if isinstance(value, Tensor)}
    if not shapes or any(value.shape == shapes.get(name) for name, value in stored.items()):
        file.stream.seek(0)
        states = read_zip(file)
        further = [part for part in parts if part.file != file.path.name]
        return replace(states, format="deepspeed", parts=(*states.parts, *further))
    names = [name for name in _listed(top.get("buffer_names")) if isinstance(name, str)]
    rows = [(name, "float32", shape) for name, shape in shapes.items()]  # the copies of the optimizer
    rows += [(name, stored[name].dtype, stored[name].shape) for name in names if name in stored]
    tensors = tuple(file.tensor(*row) for row in rows)
    return StoredFile(format="deepspeed ZeRO-3", tensors=tensors, parts=tuple(parts))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _use(path: Path) -> str:
    uses = {"model_states.pt": "model states", "optim_states.pt": "optimizer state"}
    return next((use for end, use in uses.items() if path.name.endswith(end) and path.is_file()), "")
