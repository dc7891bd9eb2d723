"""The weights in an ONNX file: a protobuf whose fields are walked by length; no tensor is read.

External data is a file in the model's folder, whose size alone is read. Source: `onnx.proto` in ONNX 1.23.
"""

import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from bertscope.checkpoints.files import OpenFile, StoredFile
from bertscope.reports.checkpoint import StoredTensor
from bertscope.units import decimal

MAX_FILES = 10_000  # with external data
_MAX_DEPTH = 32  # of messages in messages: 5 for a graph in a branch of a graph

# Message -> number of a field -> the message in it. A branch of If and the body of Loop are graphs of an attribute.
_MESSAGES = {
    "model": {7: "graph", 25: "function"}, "function": {7: "node"}, "node": {5: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"}, "sparse": {1: "tensor"},
    "attribute": {5: "tensor", 6: "graph", 11: "graph"},
}  # fmt: skip
# TensorProto.DataType -> torch's name, bits of an element.
_TYPES = {
    1: ("float32", 32), 2: ("uint8", 8), 3: ("int8", 8), 4: ("uint16", 16), 5: ("int16", 16), 6: ("int32", 32),
    7: ("int64", 64), 8: ("string", 0), 9: ("bool", 8), 10: ("float16", 16), 11: ("float64", 64), 12: ("uint32", 32),
    13: ("uint64", 64), 14: ("complex64", 64), 15: ("complex128", 128), 16: ("bfloat16", 16),
    17: ("float8_e4m3fn", 8), 18: ("float8_e4m3fnuz", 8), 19: ("float8_e5m2", 8), 20: ("float8_e5m2fnuz", 8),
    21: ("uint4", 4), 22: ("int4", 4), 23: ("float4_e2m1fn", 4), 24: ("float8_e8m0fnu", 8), 25: ("uint2", 2),
    26: ("int2", 2),
}  # fmt: skip
_OUTPUT = 2  # of a node
_DIMS, _TYPE, _NAME, _EXTERNAL, _LOCATION = 1, 2, 8, 13, 14
_DATA, _VARIED, _TEXT = (4, 5, 6, 7, 9, 10, 11), {5, 7, 11}, 8  # float_data ...; int32_data ...; a type


def fields(file: OpenFile, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield each field's number, type and value up to `end`; for bytes (type 2) the value is their length.

    The stream is then at these bytes, and after the yield behind them.
    """
    while (position := file.stream.tell()) < end:
        file.budget.spend("instructions", 1)
        tag = file.varint()
        number, kind = tag >> 3, tag & 7
        if kind not in (0, 1, 2, 5) or not number:
            raise file.broken(f"not a protobuf: no field begins at byte {position:,}")
        value = file.varint() if kind in (0, 2) else file.number(8 if kind == 1 else 4)
        after = file.stream.tell() + (value if kind == 2 else 0)
        if after > end:
            raise file.broken(f"a field of {value:,} bytes at byte {position:,} ends after {end:,}: truncated or wrong")
        yield number, kind, value
        file.seek(after)


def read_onnx(file: OpenFile) -> StoredFile:
    """Return the weights in an open ONNX file and in its nodes' graphs; raise SourceError for others."""
    reader = _Reader(file)
    tensors = list(reader.tensors("model", file.size, 0))
    if not reader.has_graph:
        raise file.broken("not an ONNX model: it has no graph")
    external = {name: Counter(tensors=_union(ranges)) for name, ranges in reader.ranges.items()}
    return file.stored("onnx", tensors, {"tensors": reader.inside}, external)


def _union(ranges: set[tuple[int, int]]) -> int:
    """Return the bytes in ranges; bytes that two tensors share count once."""
    used = last = 0
    for begin, end in sorted(ranges):
        used += max(0, end - max(begin, last))
        last = max(last, end)
    return used


class _Reader:
    def __init__(self, file: OpenFile) -> None:
        self.file = file
        self.inside = 0  # bytes of tensors in the file itself
        self.has_graph = False
        self.sizes: dict[str, int] = {}  # of the files with external data
        self.ranges: dict[str, set[tuple[int, int]]] = {}  # that tensors have in them

    def tensors(self, message: str, end: int, depth: int, name: str = "") -> Iterator[StoredTensor]:
        # Initializers, and a `Constant` node's tensor under the node's output; one with one element is a number in a
        # formula.
        if depth > _MAX_DEPTH:
            raise self.file.broken("graphs in graphs, nested too deeply")
        for number, kind, length in fields(self.file, end):
            if message == "node" and number == _OUTPUT and kind == 2 and not name:
                name = self.file.text(length)
            inner = _MESSAGES[message].get(number)
            if inner is None or kind != 2:
                continue
            self.has_graph |= inner == "graph"
            after = self.file.stream.tell() + length
            if inner == "tensor":
                yield from self.tensor(after, name if message == "attribute" else None)
            else:
                yield from self.tensors(inner, after, depth + 1, name)

    def tensor(self, end: int, node: str | None) -> Iterator[StoredTensor]:
        file, dtype, name, is_external = self.file, 0, "", False
        shape, sizes, external = list[int](), dict[int, int](), dict[str, str]()
        for number, kind, value in fields(file, end):
            if number == _DIMS:
                shape += _packed(file, value) if kind == 2 else [value]
                if len(shape) > 64:
                    raise file.broken("a tensor of more than 64 dimensions")
            elif number == _TYPE:
                dtype = value
            elif number == _NAME:
                name = file.text(value)
            elif number == _EXTERNAL:
                external.update([_entry(file, file.stream.tell() + value)])
            elif number == _LOCATION:
                is_external = value == 1
            elif number in _DATA:
                sizes[number] = sizes.get(number, 0) + (value if kind == 2 else 8 if kind == 1 else 4)
        if dtype not in _TYPES:
            raise file.broken(f"tensor {name[:60]!r} has the unknown type {dtype:,}")
        result = file.tensor(node or name or "(no name)", _TYPES[dtype][0], shape, 0)
        needed = -(-result.params * _TYPES[dtype][1] // 8)
        if node is not None and result.params < 2:
            return
        if is_external:
            yield self.outside(result, external, needed)
            return
        stored = sum(sizes.values())
        # An integer of its own length has 1 to 10 bytes, and may be two of 4 bits; of text only the length is known.
        is_varied = bool(sizes.keys() & _VARIED)
        least, most = (result.params // 8, 10 * result.params) if is_varied else (needed, needed)
        if dtype != _TEXT and not least <= stored <= most:
            described = f"{shape} of {result.dtype}"
            raise file.broken(f"tensor {name[:60]!r} has {stored:,} bytes, and {described} has {needed:,}")
        self.inside += stored
        yield replace(result, bytes=stored)

    def outside(self, tensor: StoredTensor, entries: dict[str, str], needed: int) -> StoredTensor:
        name, numbers = entries.get("location", ""), (entries.get("offset", "0"), entries.get("length", str(needed)))
        begin, length = (decimal(text, 19) for text in numbers)
        if begin is None or length is None:
            raise self.file.broken(f"the external data of tensor {tensor.name[:60]!r} has no offset or length")
        if name not in self.sizes:
            if len(self.sizes) == MAX_FILES:
                raise self.file.broken(f"external data in more than {MAX_FILES:,} files")
            self.sizes[name] = _external_size(self.file, name)
        if length != needed or begin + length > self.sizes[name]:
            raise self.file.broken(
                f"tensor {tensor.name[:60]!r} needs {needed:,} bytes, and has {length:,} at {begin:,} of the "
                f"{self.sizes[name]:,} of {name[:60]!r}: truncated or wrong"
            )
        self.ranges.setdefault(name, set()).add((begin, begin + length))
        return replace(tensor, bytes=length, file=name)


def _packed(file: OpenFile, length: int) -> list[int]:
    end, numbers = file.stream.tell() + length, list[int]()
    while file.stream.tell() < end and len(numbers) <= 64:
        numbers.append(file.varint())
    return numbers


def _entry(file: OpenFile, end: int) -> tuple[str, str]:
    entry: Any = {number: file.text(length) for number, kind, length in fields(file, end) if kind == 2}
    return entry.get(1, ""), entry.get(2, "")


def _external_size(file: OpenFile, name: str) -> int:
    location, folder = PurePosixPath(name), file.path.parent
    if not name or "\0" in name or "\\" in name or location.is_absolute() or ".." in location.parts:
        raise file.broken(f"the external data {name[:60]!r} is outside of the model's folder")
    try:
        path = Path(folder, location).resolve(strict=True)
        status = path.stat()
    except (OSError, RuntimeError):  # absent, a loop of links, or a folder that may not be searched
        raise file.broken(f"the external data {name[:60]!r} is absent") from None
    # In the Hugging Face cache both are links into one folder of blobs.
    if not path.is_relative_to(folder.resolve()) and path.parent != file.path.resolve().parent:
        raise file.broken(f"the external data {name[:60]!r} is a link that leads outside of the model's folder")
    if not stat.S_ISREG(status.st_mode):
        raise file.broken(f"the external data {name[:60]!r} is not a regular file")
    if path.samefile(file.path):
        raise file.broken(f"the external data {name[:60]!r} is the model's own file")
    return status.st_size
