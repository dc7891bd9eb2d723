"""The header of a safetensors file: 8 bytes of length, then JSON. This module reads no tensor and needs no torch.

The offsets of tensors are checked as in the official reader (safetensors 0.8). A header of more than 16 MiB is
refused: with the official limit of 100 MB, a file of that size takes gigabytes of memory. Bytes that belong to no
tensor are reported as a problem; the official reader refuses such a file.
"""

import math
from typing import Any

from bertscope.checkpoints.files import MAX_NAME, OpenFile, Placed, StoredFile, is_size
from bertscope.checkpoints.packing import describes
from bertscope.reports.checkpoint import FilePart, StoredTensor

MAX_HEADER_BYTES = 16 << 20
_KEYS = {"dtype", "shape", "data_offsets"}

# dtype of the format -> torch's name, and bits of an element.
DTYPES = {
    "BOOL": ("bool", 8), "U8": ("uint8", 8), "I8": ("int8", 8), "I16": ("int16", 16), "U16": ("uint16", 16),
    "I32": ("int32", 32), "U32": ("uint32", 32), "I64": ("int64", 64), "U64": ("uint64", 64),
    "F16": ("float16", 16), "BF16": ("bfloat16", 16), "F32": ("float32", 32), "F64": ("float64", 64),
    "C64": ("complex64", 64), "F8_E4M3": ("float8_e4m3fn", 8), "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8), "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F6_E2M3": ("float6_e2m3", 6), "F6_E3M2": ("float6_e3m2", 6), "F4": ("float4_e2m1fn_x2", 4),
}  # fmt: skip


def read_safetensors(file: OpenFile) -> StoredFile:
    """Return the tensors of an open safetensors file; raises SourceError for any other file."""
    header_bytes, header = _header(file)
    file.budget.spend("tensors", len(header))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise file.broken("__metadata__ must map text to text")
    data_bytes = file.size - 8 - header_bytes
    file_name = file.path.name
    placed = [_placed(file, file_name, name, entry, data_bytes) for name, entry in header.items()]
    placed = file.in_order(placed)
    tensor_bytes = sum(item.end - item.begin for item in placed)
    gap = data_bytes - tensor_bytes
    values = {}
    for item in placed:
        if describes(item.tensor):
            file.seek(8 + header_bytes + item.begin)
            values[item.tensor.name] = file.take(item.tensor.bytes)
    parts = (("header length", 8), ("header", header_bytes), ("tensors", tensor_bytes), ("gaps", gap))
    return StoredFile(
        format="safetensors",
        tensors=tuple(item.tensor for item in placed),
        parts=tuple(
            FilePart(file=file.path.name, what=what, bytes=count) for what, count in parts if count or what != "gaps"
        ),
        metadata=metadata,
        values=values,
        problems=(f"{file.path.name}: {gap:,} bytes belong to no tensor; safetensors' own reader refuses such a file",)
        if gap
        else (),
    )


def _header(file: OpenFile) -> tuple[int, dict[str, Any]]:
    start = file.stream.read(8)
    if len(start) < 8:
        raise file.broken(f"the file ends after {len(start)} bytes, before the header's length")
    length = int.from_bytes(start, "little")
    if length > file.size - 8:
        raise file.broken(
            f"the header says it has {length:,} bytes and the file has {file.size:,}: truncated or no safetensors"
        )
    if length > MAX_HEADER_BYTES:
        raise file.broken(f"a header of {length:,} bytes; at most {MAX_HEADER_BYTES:,} are read")
    file.budget.spend("bytes of headers", length)
    header = file.json(file.stream.read(length), "the header")
    if not isinstance(header, dict):
        raise file.broken("the header is no JSON object")
    return length, header


def _placed(file: OpenFile, file_name: str, name: str, entry: Any, data_bytes: int) -> Placed:
    shown = name[:60]
    if len(name) > MAX_NAME or not isinstance(entry, dict) or entry.keys() != _KEYS:
        raise file.broken(f"tensor {shown!r} needs dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise file.broken(f"tensor {shown!r} has the unknown dtype {str(dtype)[:20]!r}")
    if not isinstance(shape, list) or len(shape) > 64 or not all(map(is_size, shape)):
        raise file.broken(f"tensor {shown!r} has a shape that is no list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_size, offsets)):
        raise file.broken(f"tensor {shown!r} has data_offsets that are no two places")
    begin, end = offsets
    if not begin <= end <= data_bytes:
        raise file.broken(f"tensor {shown!r} lies at bytes {begin:,} to {end:,} of {data_bytes:,}: truncated or wrong")
    params, (torch_name, bits) = math.prod(shape), DTYPES[dtype]
    if params * bits != (end - begin) * 8:
        raise file.broken(
            f"tensor {shown!r} has {end - begin:,} bytes, and {shape} of {dtype} has {params * bits // 8:,}"
        )
    tensor = StoredTensor(
        name=name, dtype=torch_name, shape=tuple(shape), params=params, bytes=end - begin, file=file_name
    )
    return Placed(begin, end, tensor)
