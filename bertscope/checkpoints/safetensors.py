"""A safetensors header: 8 bytes for the length, then JSON. This module reads no tensor and needs no torch.

Tensor offsets are checked as in the official reader (safetensors 0.8). A header above 16 MiB is
refused: with the official 100 MB limit, such a file takes gigabytes of memory. Bytes that belong to no
tensor are reported as a problem; the official reader refuses such a file.
"""

import math
from dataclasses import replace
from typing import Any

from bertscope.checkpoints.files import OpenFile, Placed, StoredFile, is_size
from bertscope.checkpoints.packing import describes

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
    """Return the tensors in an open safetensors file; raises SourceError for any other file."""
    if file.size < 8:
        raise file.broken(f"the file ends after {file.size} bytes, before the header's length")
    length = file.number(8)
    if length > file.size - 8:
        raise file.broken(
            f"the header says it has {length:,} bytes and the file has {file.size:,}: truncated, or another format"
        )
    if length > MAX_HEADER_BYTES:
        raise file.broken(f"a header of {length:,} bytes; at most {MAX_HEADER_BYTES:,} are read")
    header, start = file.json(file.take(length), "the header"), 8 + length
    if not isinstance(header, dict):
        raise file.broken("the header is not a JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise file.broken("__metadata__ must map text to text")
    placed = file.in_order(_placed(file, name, entry, file.size - start) for name, entry in header.items())
    parts = {"header length": 8, "header": length, "tensors": sum(item.end - item.begin for item in placed)}
    tensors = [item.tensor for item in placed]
    described = (item for item in placed if describes(item.tensor))
    values = {item.tensor.name: file.at(start + item.begin, item.tensor.bytes) for item in described}
    stored = file.stored("safetensors", tensors, parts, rest="gaps", metadata=metadata, values=values)
    if not (gap := file.size - sum(parts.values())):
        return stored
    problem = f"{file.path.name}: {gap:,} bytes belong to no tensor; safetensors' own reader refuses such a file"
    return replace(stored, problems=(problem,))


def _placed(file: OpenFile, name: str, entry: Any, data_bytes: int) -> Placed:
    shown = name[:60]
    if not isinstance(entry, dict) or entry.keys() != _KEYS:
        raise file.broken(f"tensor {shown!r} needs dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise file.broken(f"tensor {shown!r} has the unknown dtype {str(dtype)[:20]!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_size, offsets)):
        raise file.broken(f"tensor {shown!r} has data_offsets that are not two positions")
    begin, end = offsets
    if not begin <= end <= data_bytes:
        raise file.broken(f"tensor {shown!r} lies at bytes {begin:,} to {end:,} of {data_bytes:,}: truncated or wrong")
    torch_name, bits = DTYPES[dtype]
    sizes = shape if isinstance(shape, list) and len(shape) <= 64 and all(map(is_size, shape)) else [-1]
    if sizes == shape and math.prod(shape) * bits != (end - begin) * 8:
        needed = math.prod(shape) * bits // 8
        raise file.broken(f"tensor {shown!r} has {end - begin:,} bytes, and {shape} of {dtype} has {needed:,}")
    return Placed(begin, end, file.tensor(name, torch_name, sizes, end - begin))
