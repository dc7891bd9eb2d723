"""Tiny files of GGUF and ONNX, byte by byte, as their specifications have them."""

import struct
from collections.abc import Iterable, Mapping


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
