"""The index of a TensorFlow checkpoint, and the msgpack file of a Flax model; no tensor is read.

`model.ckpt.index` is a table of LevelDB whose values are protobufs: `tensor_bundle.proto` and `table_format.txt` of
TensorFlow 2. The msgpack file is what `flax.serialization.to_bytes` of Flax 0.12 writes: maps in maps, whose arrays are
of the extension type 1 with shape, dtype and bytes.
"""

import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from typing import Any, NamedTuple

from bertscope.checkpoints.files import OpenFile, StoredFile, of_model, use_of
from bertscope.checkpoints.onnx import fields
from bertscope.reports.checkpoint import StoredTensor

INDEX_MAGIC = 0xDB4775248B80FB57.to_bytes(8, "little")
_FOOTER, _TRAILER = 48, 5
_MAX_SHARDS = 10_000
# Number of a DataType -> torch's name.
_TYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 7: "string", 8: "complex64", 9: "int64",
    10: "bool", 14: "bfloat16", 17: "uint16", 18: "complex128", 19: "float16", 22: "uint32", 23: "uint64",
    24: "float8_e5m2", 25: "float8_e4m3fn",
}  # fmt: skip


def read_index(file: OpenFile) -> StoredFile:
    """Return the tensors of an open index of TensorFlow, without the state of an optimizer; raise SourceError."""
    footer = _part(file, file.at(max(0, file.size - _FOOTER), min(file.size, _FOOTER)))
    if footer.size < _FOOTER or footer.stream.getvalue()[-8:] != INDEX_MAGIC:  # type: ignore[attr-defined]
        raise file.broken("not the index of a TensorFlow checkpoint: truncated or another file")
    for _ in range(2):  # place and size of the block of metadata
        footer.varint()
    blocks = _block(file, footer.varint(), footer.varint())
    shards, last, used = 1, b"", dict[int, Counter[str]]()
    found = list[tuple[int, StoredTensor]]()
    for _, handle in blocks:
        place = _part(file, handle)
        for key, value in _block(file, place.varint(), place.varint()):
            if key <= last and last:
                raise file.broken("the names of the index are not in their order")
            last = key
            entry = _part(file, value)
            if not key:
                shards = next((value for number, _, value in fields(entry, entry.size) if number == 1), 1)
            elif not key.startswith(b"\0"):  # else a slice of another entry
                tensor, shard = _entry(entry, key)
                used.setdefault(shard, Counter())[use_of(tensor.name)] += tensor.bytes
                found.append((shard, tensor))
    stem = file.path.name.removesuffix(".index")
    names = [f"{stem}.data-{shard:05}-of-{shards:05}" for shard in range(min(shards, _MAX_SHARDS))]
    is_whole = max(used, default=0) < shards == len(names)
    tensors = of_model(replace(tensor, file=names[shard]) for shard, tensor in found) if is_whole else []
    if not tensors:
        raise file.broken(f"an index of {shards:,} shards and {len(found):,} tensors")
    others = {name: used.get(shard, Counter()) for shard, name in enumerate(names)}
    return file.stored("tensorflow", tensors, {"header": file.size}, others)


def _part(file: OpenFile, raw: bytes) -> OpenFile:
    """Return bytes of the file as a file."""
    return OpenFile(file.path, BytesIO(raw), len(raw), file.budget)


def _block(file: OpenFile, place: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield key and value of each entry of a block; a key is the front of the one before it, and its own end."""
    raw = file.at(place, size + _TRAILER)
    if raw[size]:
        raise file.broken("a compressed index; TensorFlow compresses none")
    restarts = int.from_bytes(raw[max(0, size - 4) : size], "little")
    block, key = _part(file, raw[: max(0, size - 4 - 4 * restarts)]), b""
    while block.stream.tell() < block.size:
        shared, own, length = block.varint(), block.varint(), block.varint()
        if shared > len(key):
            raise file.broken("a name of the index that has no beginning")
        file.budget.spend("bytes of headers", shared)  # a byte in the file may repeat a name of any length
        key = key[:shared] + block.take(own)
        if len(key) > 4000:
            raise file.broken(f"a name of {len(key):,} bytes")
        file.budget.spend("instructions", 1)
        yield key, block.take(length)


def _entry(entry: OpenFile, key: bytes) -> tuple[StoredTensor, int]:
    """Return the tensor of a BundleEntryProto, and the number of its shard."""
    plain, shape, is_sliced = {1: 0, 3: 0, 5: 0}, list[int](), False
    for number, _, value in fields(entry, entry.size):
        if number in plain:
            plain[number] = value
        elif number == 2:
            for _, kind, length in fields(entry, entry.stream.tell() + value):
                end = entry.stream.tell() + length if kind == 2 else 0
                shape += [size for number, kind, size in fields(entry, end) if number == 1]
        is_sliced |= number == 7
    dtype, shard, size = _TYPES.get(plain[1], ""), plain[3], plain[5]
    name = key.decode(errors="replace")
    if not dtype:
        raise entry.broken(f"tensor {name[:60]!r} has the unknown type {plain[1]:,}")
    tensor = entry.tensor(name, dtype, shape, size if dtype == "string" else None)
    if tensor.bytes != size and not is_sliced:
        raise entry.broken(f"tensor {name[:60]!r} has {size:,} bytes, and {shape} of {dtype} has {tensor.bytes:,}")
    return tensor, shard


# ---- Flax ----

_MAX_DEPTH = 64
# First byte -> bytes of a number without meaning here, or of the length of what follows.
_NUMBERS = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8,
            0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}  # fmt: skip
_TEXTS, _BYTES = {0xD9: 1, 0xDA: 2, 0xDB: 4}, {0xC4: 1, 0xC5: 2, 0xC6: 4}
_ARRAYS, _MAPS = {0xDC: 2, 0xDD: 4}, {0xDE: 2, 0xDF: 4}
_EXTENSIONS = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_CHUNKED = "__msgpack_chunked_array__"


class _Array(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    bytes: int


def read_flax(file: OpenFile) -> StoredFile:
    """Return the arrays of an open msgpack file, without the state of an optimizer; raise SourceError for others."""
    tree = _value(file, 0)
    if not isinstance(tree, dict) or file.stream.tell() != file.size:
        raise file.broken("no Flax model: a msgpack file that is no map, or has bytes behind it")
    sizes, tensors = Counter[str](), list[StoredTensor]()
    for name, array in _leaves(file, tree):
        sizes[use_of(name)] += array.bytes
        tensors.append(file.tensor(name, array.dtype, array.shape))
        if array.bytes != tensors[-1].bytes:
            raise file.broken(f"array {name[:60]!r} has {array.bytes:,} bytes, not those of {array.shape} of its dtype")
    if not (tensors := of_model(tensors)):
        raise file.broken("no Flax model: it has no array")
    return file.stored("flax", tensors, sizes)


def _leaves(file: OpenFile, tree: dict[str, Any], path: str = "") -> Iterator[tuple[str, _Array]]:
    for key, value in tree.items():
        name = f"{path}{key}"
        file.budget.spend("bytes of headers", len(name))
        if isinstance(value, dict) and _CHUNKED in value:
            shape, chunks = (list(value.get(part, {}).values()) for part in ("shape", "chunks"))
            if chunks and all(isinstance(chunk, _Array) for chunk in chunks):
                yield name, _Array(tuple(shape), chunks[0].dtype, sum(chunk.bytes for chunk in chunks))
        elif isinstance(value, dict):
            yield from _leaves(file, value, f"{name}.")
        elif isinstance(value, _Array):
            yield name, value


def _value(file: OpenFile, depth: int) -> Any:
    """Return the next value: a map, a list, a text, a number, or an array without its bytes."""
    file.budget.spend("instructions", 1)
    if depth > _MAX_DEPTH:
        raise file.broken("maps in maps, nested too deeply")
    (first,) = file.take(1)
    if first < 0x80 or first >= 0xE0:
        return first
    if first in _NUMBERS:
        raw = file.take(_NUMBERS[first])
        return int.from_bytes(raw, "big") if first not in (0xCA, 0xCB) else struct.unpack("!d", raw.rjust(8, b"\0"))[0]
    if 0xA0 <= first < 0xC0 or first in _TEXTS:
        return file.text(_count(file, first, _TEXTS, 0x1F))
    if 0x90 <= first < 0xA0 or first in _ARRAYS:
        return [_value(file, depth + 1) for _ in range(_count(file, first, _ARRAYS, 0x0F))]
    if 0x80 <= first < 0x90 or first in _MAPS:
        return _map(file, _count(file, first, _MAPS, 0x0F), depth)
    if first in _BYTES:
        return file.skip(_count(file, first, _BYTES, 0))
    if first in _EXTENSIONS or 0xD4 <= first <= 0xD8:
        length = 1 << (first - 0xD4) if first >= 0xD4 else _count(file, first, _EXTENSIONS, 0)
        return _extension(file, length, depth)
    raise file.broken(f"no msgpack: the byte {first:#x}")


def _count(file: OpenFile, first: int, sizes: dict[int, int], mask: int) -> int:
    return int.from_bytes(file.take(sizes[first]), "big") if first in sizes else first & mask


def _map(file: OpenFile, count: int, depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(count):
        key = _value(file, depth + 1)
        if not isinstance(key, (str, int)) or str(key) in found:
            raise file.broken(f"a map with the key {str(key)[:60]!r} twice, or one that is no name")
        found[str(key)] = _value(file, depth + 1)
    return found


def _extension(file: OpenFile, length: int, depth: int) -> Any:
    """Return an array (of the types 1 and 3) as shape, dtype and length; go behind any other extension."""
    (kind,) = file.take(1)
    end = file.stream.tell() + length
    if kind not in (1, 3):
        return file.skip(length) and None
    content = _value(file, depth + 1)
    if file.stream.tell() != end or not isinstance(content, list) or len(content) != 3:
        raise file.broken("an array without shape, dtype and bytes: truncated or wrong")
    shape, dtype, size = content
    if not isinstance(shape, list) or not isinstance(dtype, str) or type(size) is not int:
        raise file.broken("an array without shape, dtype and bytes")
    return _Array(tuple(shape), dtype, size)
