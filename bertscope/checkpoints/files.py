"""The parts that all checkpoint readers share: limits, the open file, and a file's contents."""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from bertscope.errors import SourceError
from bertscope.files import open_file, readable
from bertscope.reports.checkpoint import FilePart, StoredTensor

_REST = "structure and alignment"
MAX_NAME = 1000  # characters in the name of a tensor
_OPTIMIZER = re.compile(r"^(?:optim|optimizer|opt_state)[./]|[./]optim(?:izer)?[./](?:state|param_groups)[./]")

# torch's name of a dtype -> bytes of an element.
ITEM_BYTES = {
    "float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16, "uint16": 2, "uint32": 4, "uint64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "qint8": 1, "quint8": 1, "qint32": 4,
}  # fmt: skip

# Name -> the limit. The largest published checkpoints have about 100,000 tensors, 150 bytes of header for each.
LIMITS = {
    "bytes of headers": 64 << 20,
    "instructions": 1 << 22,  # a tensor in a pickle takes about 40
    "copied elements": 1 << 21,  # in calls of a pickle, whose arguments may repeat one list
    "tensors": 1 << 18,
}


@dataclass
class Budget:
    """The amounts that reading the checkpoint at `path` has used so far."""

    path: Path
    spent: dict[str, int] = field(default_factory=dict)
    names: dict[tuple[int, int], str] = field(default_factory=dict)  # of open files, by device and inode

    def spend(self, what: str, count: int) -> None:
        """Add to one amount; raise SourceError above its limit."""
        self.spent[what] = self.spent.get(what, 0) + count
        if self.spent[what] > LIMITS[what]:
            raise SourceError(
                f"more than {LIMITS[what]:,} {what} in all; count its shards one by one; nothing was loaded or run",
                where=str(self.path),
            )


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A weights file: its tensors in file order, and each byte's use."""

    format: str
    tensors: tuple[StoredTensor, ...]
    parts: tuple[FilePart, ...]
    metadata: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    values: dict[str, bytes] = field(default_factory=dict)  # of the small tensors that describe how others are packed


class Placed(NamedTuple):
    """A tensor and its byte range."""

    begin: int
    end: int
    tensor: StoredTensor


@dataclass(frozen=True)
class OpenFile:
    """An open checkpoint file, its size in bytes, and the checkpoint's budget."""

    path: Path
    stream: BinaryIO
    size: int
    budget: Budget

    def broken(self, what: str) -> SourceError:
        """Return the error for a file whose contents contradict its format."""
        return SourceError(f"{what}; nothing was loaded or run", where=str(self.path))

    def json(self, raw: bytes, what: str) -> Any:
        """Parse JSON; raise SourceError for other text, a repeated key, NaN or deep nesting."""

        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            entries = dict(pairs)
            if len(entries) < len(pairs):
                seen: set[str] = set()
                twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
                raise self.broken(f"{what} has the key {twice[:60]!r} twice")
            return entries

        def no_number(text: str) -> Any:
            raise self.broken(f"{what} holds {text}, which is not JSON")

        try:
            return json.loads(raw.decode(), object_pairs_hook=unique, parse_constant=no_number)
        except UnicodeDecodeError:
            raise self.broken(f"{what} is not UTF-8 text") from None
        except RecursionError:
            raise self.broken(f"{what} is nested too deeply") from None
        except ValueError as error:
            raise self.broken(f"{what} is not valid JSON: {error}") from None

    def seek(self, position: int) -> None:
        """Go to a place in the file; raise SourceError outside it."""
        if not 0 <= position <= self.size:
            raise self.broken(f"it refers to byte {position:,}, and the file has {self.size:,}: truncated or wrong")
        self.stream.seek(position)

    def skip(self, count: int) -> int:
        """Go behind the next bytes; return their number."""
        self.seek(self.stream.tell() + count)
        return count

    def take(self, count: int) -> bytes:
        """Return the header's next bytes; raise SourceError at the file's end."""
        if not 0 <= count <= self.size:  # also before memory is allocated for them
            raise self.broken(f"it refers to {count:,} bytes, and the file has {self.size:,}: truncated or wrong")
        self.budget.spend("bytes of headers", count)
        raw = self.stream.read(count)
        if len(raw) < count:
            raise self.broken(f"it ends within its header, after {self.size:,} bytes: truncated or wrong")
        return raw

    def whole(self, limit: int) -> bytes:
        """Return the file's bytes; raise SourceError for more than the limit."""
        if self.size > limit:
            raise self.broken(f"a file of {self.size:,} bytes; at most {limit:,} are read")
        return self.take(self.size)

    def at(self, position: int, count: int) -> bytes:
        """Return header bytes at a position."""
        self.seek(position)
        return self.take(count)

    def number(self, size: int) -> int:
        """Return the next little-endian unsigned integer with `size` bytes."""
        return int.from_bytes(self.take(size), "little")

    def varint(self) -> int:
        """Return the next integer in 7-bit groups, the lowest first, as in protobuf; at most 64 bits."""
        value = 0
        for shift in range(0, 70, 7):
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value & (2**64 - 1)
        raise self.broken("an integer of more than 10 bytes")

    def text(self, count: int) -> str:
        """Return the next `count` bytes as text; raise SourceError for more than a name has, or bytes that are none."""
        if count > 4 * MAX_NAME:
            raise self.broken(f"a name of {count:,} bytes; at most {4 * MAX_NAME:,} are read")
        try:
            return self.take(count).decode()
        except UnicodeDecodeError:
            raise self.broken("a name that is not UTF-8 text") from None

    def tensor(
        self, name: str, dtype: str, shape: Iterable[Any], stored: int | None = None, **fields: Any
    ) -> StoredTensor:
        """Return a tensor, by default with its dtype's bytes; raise SourceError for a wrong name or shape."""
        self.budget.spend("tensors", 1)
        shape = tuple(shape)
        if not name or len(name) > MAX_NAME or len(shape) > 64 or not all(map(is_size, shape)):
            raise self.broken(f"the tensor {name[:60]!r} has no name, or a shape that is not a list of sizes")
        if not is_size(params := math.prod(shape)):
            raise self.broken(f"the tensor {name[:60]!r} has 2**63 elements or more")
        size = params * ITEM_BYTES.get(dtype, 0) if stored is None else stored
        fields = {"file": self.path.name} | fields
        return StoredTensor(name=name, dtype=dtype, shape=shape, params=params, bytes=size, **fields)

    def in_order(self, placed: Iterable[Placed]) -> list[Placed]:
        """Return the tensors ordered by position; raise SourceError if two overlap."""
        ordered = sorted(placed, key=lambda item: item[:2])
        for one, other in pairwise(item for item in ordered if item.end > item.begin):
            if other.begin < one.end:
                raise self.broken(f"tensors {one.tensor.name[:60]!r} and {other.tensor.name[:60]!r} overlap")
        return ordered

    def stored(
        self,
        form: str,
        tensors: Iterable[StoredTensor],
        parts: dict[str, int],
        sizes_only: Mapping[str, Counter[str]] | None = None,
        rest: str = _REST,
        **fields: Any,
    ) -> StoredFile:
        """Return the contents: bytes by their use, in this file and in the folder's files with tensors.

        The bytes outside `parts` are the `rest`; for `sizes_only` only the sizes are read.
        """
        used = {self.path.name: {**parts, rest: self.size - sum(parts.values())}}
        problems = list[str]()
        for name, sizes in (sizes_only or {}).items():
            path, needed = self.path.parent / name, sizes.total()
            size = path.stat().st_size if path.is_file() else 0
            if not path.is_file():
                problems.append(f"{name} is absent")
            elif size < needed:
                raise self.broken(f"{name} has {size:,} bytes, and its tensors {needed:,}: truncated")
            used[name] = {**sizes, _REST: max(size - needed, 0)}
        counts = ((name, what, count) for name, sizes in used.items() for what, count in sizes.items() if count)
        parts_with_bytes = tuple(FilePart(file=name, what=what, bytes=count) for name, what, count in counts)
        fields = {"problems": tuple(problems)} | fields
        return StoredFile(format=form, tensors=tuple(tensors), parts=parts_with_bytes, **fields)


def use_of(name: str) -> str:
    """Return what a tensor's bytes are for, by its name: the model or optimizer state."""
    return "optimizer state" if _OPTIMIZER.search(name) else "tensors"


def is_plain(name: Any) -> bool:
    """Return True for a file name in the same folder."""
    is_name = isinstance(name, str) and PurePosixPath(name).name == name and not set(name) & set("\\\0:")
    return is_name and name not in ("", "..")


def is_size(value: Any) -> bool:
    """Return True for a header value that is an integer in torch's 64-bit range for sizes and offsets."""
    return type(value) is int and 0 <= value < 2**63


@contextmanager
def opened(path: Path, budget: Budget) -> Iterator[OpenFile]:
    """Open a regular file; raise SourceError for a folder, a pipe, or a second name for an open file."""
    wanted = "name a checkpoint, or a folder with model.safetensors or pytorch_model.bin"
    with readable(path), open_file(path, wanted) as stream:
        status = path.stat()
        first = budget.names.setdefault((status.st_dev, status.st_ino), path.name)
        if first != path.name:
            raise SourceError(f"shards {first} and {path.name} are the same file; remove one", where=str(budget.path))
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        yield OpenFile(path, stream, size, budget)


def json_in(path: Path, budget: Budget, limit: int, what: str = "the file") -> tuple[OpenFile, Any]:
    """Return a file, closed again, and its JSON; raise SourceError for more bytes than the limit, and as `json`."""
    with opened(path, budget) as file:
        return file, file.json(file.whole(limit), what)
