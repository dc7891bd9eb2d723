"""Files of `torch.save`: a zip since torch 1.6, consecutive pickles before. This module unpickles neither."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from bertscope.checkpoints.budget import Budget
from bertscope.checkpoints.files import MAX_NAME, StoredFile, broken
from bertscope.checkpoints.pickles import described
from bertscope.checkpoints.rebuilt import ITEM_BYTES, BadPickle, Storage, Table, Tensor
from bertscope.errors import SourceError
from bertscope.reports.checkpoint import FilePart, StoredTensor

MAX_PICKLE_BYTES = 8 << 20
MAX_DIRECTORY_BYTES = 16 << 20  # of the zip's directory; an entry takes about 80 bytes
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch.serialization.MAGIC_NUMBER, pickled
_NESTED = ("state_dict", "model_state_dict", "model", "module")  # keys under which trainers save weights


def read_zip(path: Path, file: BinaryIO, size: int, budget: Budget) -> StoredFile:
    """Return the tensors of an open zip that `torch.save` wrote; raise SourceError for any other zip."""
    _refuse_large_directories(path, file, size)
    with zipfile.ZipFile(file) as archive:
        entries = {info.filename: info for info in archive.infolist()}
        if len(entries) < len(archive.infolist()):
            raise broken(path, "the zip has a record twice")
        pickles = [name for name in entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise broken(path, "a zip without the data.pkl that torch.save writes")
        raw = _record(path, archive, entries[pickles[0]], budget)
    folder = pickles[0].removesuffix("data.pkl")
    tensors = list(_tensors(path, _state(path, BytesIO(raw), budget), budget))
    for storage in _storages(tensors).values():
        found = entries.get(f"{folder}data/{storage.key}")
        if found is None or found.file_size != storage.bytes or found.compress_size != storage.bytes:
            raise broken(
                path, f"the record data/{storage.key[:40]} is absent or has not the {storage.bytes:,} bytes it should"
            )
    tensor_bytes = sum(storage.bytes for storage in _storages(tensors).values())
    records = sum(info.compress_size for info in entries.values())
    if records > size:
        raise broken(path, "the zip's records overlap")
    parts = (("pickle", entries[pickles[0]].compress_size), ("tensors", tensor_bytes),
             ("other records", records - entries[pickles[0]].compress_size - tensor_bytes),
             ("zip structure and alignment", size - records))  # fmt: skip
    return _stored(path, tensors, parts)


def read_legacy(path: Path, file: BinaryIO, size: int, budget: Budget) -> StoredFile:
    """Return the tensors of a file of torch before 1.6: magic, version, system, state dict, keys, then the bytes."""
    start = BytesIO(file.read(MAX_PICKLE_BYTES))
    for _ in range(3):
        _described(path, start, budget)
    tensors = list(_tensors(path, _state(path, start, budget), budget))
    storages, keys = _storages(tensors), _described(path, start, budget)
    if (
        not isinstance(keys, list)
        or len(keys) != len(storages)
        or {key for key in keys if isinstance(key, str)} != set(storages)
    ):
        raise broken(path, "the keys of its storages are not those of its tensors")
    pickles = place = start.tell()
    budget.spend("bytes of headers", pickles)
    for key in keys:
        file.seek(place)
        if int.from_bytes(file.read(8), "little") != storages[key].elements:
            raise broken(path, f"the storage {key[:40]} is not where it should be: truncated or wrong")
        place += 8 + storages[key].bytes
    if place > size:
        raise broken(path, f"the file has {size:,} bytes and its tensors need {place:,}: truncated")
    tensor_bytes = sum(storage.bytes for storage in storages.values())
    parts = (
        ("pickles", pickles),
        ("storage lengths", 8 * len(keys)),
        ("tensors", tensor_bytes),
        ("after the end", size - place),
    )
    return _stored(path, tensors, parts)


def _stored(path: Path, tensors: list[tuple[str, Tensor]], parts: tuple[tuple[str, int], ...]) -> StoredFile:
    return StoredFile(
        format="pytorch",
        tensors=tuple(_rows(path, tensors)),
        parts=tuple(FilePart(file=path.name, what=what, bytes=count) for what, count in parts if count),
    )


def _rows(path: Path, tensors: list[tuple[str, Tensor]]) -> Iterator[StoredTensor]:
    homes: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors:
        params = math.prod(tensor.shape)
        home = homes.setdefault((tensor.storage.key, tensor.offset, tensor.shape, tensor.stride), name)
        yield StoredTensor(
            name=name, dtype=tensor.dtype, shape=tensor.shape, params=params,
            bytes=params * ITEM_BYTES[tensor.dtype], file=path.name, shares=None if home == name else home,
        )  # fmt: skip


def _storages(tensors: list[tuple[str, Tensor]]) -> dict[str, Storage]:
    return {tensor.storage.key: tensor.storage for _, tensor in tensors}


def _described(path: Path, file: BytesIO, budget: Budget) -> Any:
    try:
        return described(file, budget)
    except BadPickle as error:
        raise broken(path, f"refused: {error}; weights are what torch.save(model.state_dict(), ...) writes") from None


def _state(path: Path, file: BytesIO, budget: Budget) -> Table:
    """Return the state dict in the pickle: its top level, or the entry in which trainers save the weights."""
    found = _described(path, file, budget)
    if isinstance(found, Table) and not any(isinstance(value, Tensor) for value in found.values()):
        found = next((found[key] for key in _NESTED if isinstance(found.get(key), Table)), found)
    if not isinstance(found, Table) or not any(isinstance(value, Tensor) for value in found.values()):
        raise broken(path, "it holds no table of tensors")
    return found


def _tensors(path: Path, state: Table, budget: Budget) -> Iterator[tuple[str, Tensor]]:
    by_key: dict[str, Storage] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            budget.spend("tensors", 1)
            if not isinstance(name, str) or len(name) > MAX_NAME:
                raise broken(path, f"a tensor's name is no text of at most {MAX_NAME:,} characters")
            if by_key.setdefault(value.storage.key, value.storage) != value.storage:
                raise broken(path, f"the storage {value.storage.key[:40]} is described in two ways")
            yield name, value


def _record(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo, budget: Budget) -> bytes:
    """Return a record of bounded size, without trusting the size in the directory."""
    if info.file_size > MAX_PICKLE_BYTES:
        raise broken(path, f"a pickle of {info.file_size:,} bytes; at most {MAX_PICKLE_BYTES:,} are read")
    if info.compress_type != zipfile.ZIP_STORED:
        raise broken(path, "a compressed data.pkl; torch.save compresses nothing")
    budget.spend("bytes of headers", info.file_size)
    with archive.open(info) as record:
        raw = record.read(MAX_PICKLE_BYTES + 1)
    if len(raw) > MAX_PICKLE_BYTES:
        raise SourceError("the pickle is larger than it says; nothing was loaded or run", where=str(path))
    return raw


def _refuse_large_directories(path: Path, file: BinaryIO, size: int) -> None:
    """Raise SourceError for a directory above the limit, since zipfile makes an object of every entry."""
    file.seek(max(0, size - (1 << 16) - 98))
    tail = file.read()
    end = tail.rfind(b"PK\x05\x06")
    if end < 0 or len(tail) < end + 22:
        raise broken(path, "the zip has no end: truncated")
    directory = int.from_bytes(tail[end + 12 : end + 16], "little")
    wide = tail.rfind(b"PK\x06\x06", 0, end)
    if wide >= 0:
        directory = max(directory % 0xFFFFFFFF, int.from_bytes(tail[wide + 40 : wide + 48], "little"))
    if directory > MAX_DIRECTORY_BYTES:
        raise broken(path, f"a zip with a directory of {directory:,} bytes; at most {MAX_DIRECTORY_BYTES:,} are read")
    file.seek(0)
