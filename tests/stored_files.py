"""Tiny files of GGUF, ONNX, TensorFlow and Flax, byte by byte, as their specifications have them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping

INDEX_MAGIC = bytes.fromhex("57fb808b247547db")  # of a table of LevelDB, table_format.txt


def varint(number: int) -> bytes:
    """Return an integer in groups of 7 bits, the lowest first."""
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*groups, number])


def field(number: int, value: int | bytes | str) -> bytes:
    """Return a field of protobuf: an integer, or bytes with their length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    raw = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(raw)) + raw


def gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf(
    tensors: Mapping[str, tuple[tuple[int, ...], int, int]], metadata: Iterable[bytes] = (), data: int = 0
) -> bytes:
    """Return a GGUF file of version 3: name -> dimensions (innermost first), type and offset; `data` bytes behind."""
    items = list(metadata)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(items)) + b"".join(items)
    for name, (shape, kind, offset) in tensors.items():
        head += gguf_text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        head += struct.pack("<IQ", kind, offset)
    return head + bytes(-len(head) % 32 + data)


def onnx(*tensors: bytes) -> bytes:
    """Return a model of ONNX: version of the format, and a graph with these initializers."""
    return field(1, 8) + field(7, b"".join(field(5, tensor) for tensor in tensors))


def onnx_tensor(name: str, shape: Iterable[int], data: bytes = b"", kind: int = 1) -> bytes:
    """Return a TensorProto with raw data; type 1 is float."""
    return b"".join(field(1, size) for size in shape) + field(2, kind) + field(8, name) + field(9, data)


def onnx_external(name: str, shape: Iterable[int], **entries: object) -> bytes:
    """Return a TensorProto whose floats are in another file."""
    pairs = b"".join(field(13, field(1, key) + field(2, str(value))) for key, value in entries.items())
    return b"".join(field(1, size) for size in shape) + field(2, 1) + field(8, name) + pairs + field(14, 1)


def block(entries: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return a block of a table with whole keys, its number of restarts, and 5 bytes of compression and checksum."""
    rows = b"".join(b"\0" + varint(len(key)) + varint(len(value)) + key + value for key, value in entries)
    return rows + struct.pack("<II", 0, 1) + bytes(5)


def tf_index(tensors: Mapping[str, tuple[tuple[int, ...], int]], shards: int = 1) -> bytes:
    """Return the index of floats in shard 0: name -> shape and offset."""
    entries = [(b"", field(1, shards))]
    for name, (shape, offset) in sorted(tensors.items()):
        size = 4
        for dimension in shape:
            size *= dimension
        sizes = b"".join(field(2, field(1, dimension)) for dimension in shape)
        entries.append((name.encode(), field(1, 1) + field(2, sizes) + field(4, offset) + field(5, size)))
    data = block(entries)
    handle = varint(0) + varint(len(data) - 5)
    index = block([(b"\xff", handle)])
    handles = varint(0) + varint(0) + varint(len(data)) + varint(len(index) - 5)
    return data + index + handles.ljust(40, b"\0") + INDEX_MAGIC


def msgpack(value: object) -> bytes:
    """Return a map, text, list or small number as msgpack; bytes are an array of flax that is packed already."""
    if isinstance(value, Mapping):
        return b"\xdf" + struct.pack(">I", len(value)) + b"".join(msgpack(k) + msgpack(v) for k, v in value.items())
    if isinstance(value, str):
        return b"\xdb" + struct.pack(">I", len(value.encode())) + value.encode()
    if isinstance(value, tuple):
        return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(msgpack, value))
    return value if isinstance(value, bytes) else b"\xce" + struct.pack(">I", value)  # type: ignore[call-overload]


def flax_array(shape: tuple[int, ...], data: bytes, dtype: str = "float32") -> bytes:
    """Return an array as flax packs it: the extension 1 with shape, dtype and bytes."""
    inner = msgpack((shape, dtype, b"\xc6" + struct.pack(">I", len(data)) + data))
    return b"\xc9" + struct.pack(">I", len(inner)) + b"\x01" + inner
