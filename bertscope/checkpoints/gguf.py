"""The header of llama.cpp's GGUF files: metadata by key, then each tensor's name, shape, type and offset.

Source: the specification in ggml's `docs/gguf.md`, versions 2 and 3; integers are little-endian.
"""

import math
import re
import struct
from pathlib import Path

from bertscope.checkpoints.files import OpenFile, Placed, StoredFile
from bertscope.errors import SourceError
from bertscope.reports.checkpoint import StoredTensor
from bertscope.units import decimal

MAX_SPLITS = 1000
_MAX_DEPTH = 4  # of arrays in arrays
_SHOWN_KEYS = 200  # of the metadata; arrays, such as the words of a tokenizer, are skipped
_SPLIT = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf", re.DOTALL)

# Number of a type of metadata -> its bytes; 7 is bool, 8 text, 9 array.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _ARRAY = 8, 9
_SIGNED, _FLOATS = (1, 3, 5, 11), {6: "<f", 12: "<d"}

# Number of a type of tensor -> its name, elements and bytes of a block.
# Source: `GGML_QUANT_SIZES` in `constants.py` of the package gguf 0.19.
TYPES = {
    0: ("float32", 1, 4), 1: ("float16", 1, 2), 28: ("float64", 1, 8), 30: ("bfloat16", 1, 2),
    24: ("int8", 1, 1), 25: ("int16", 1, 2), 26: ("int32", 1, 4), 27: ("int64", 1, 8),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}  # fmt: skip

# llama.cpp's name of a module of BERT -> transformers' one, both without the layer.
# Source: the architecture BERT in `constants.py` of the package gguf 0.19, and the conversion of llama.cpp.
_MODULES = {
    "token_embd": "embeddings.word_embeddings", "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings", "token_embd_norm": "embeddings.LayerNorm",
    "cls": "pooler.dense", "cls.output": "classifier",
    "attn_q": "attention.self.query", "attn_k": "attention.self.key", "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense", "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense", "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm",
}  # fmt: skip


def name_in_torch(name: str) -> str:
    """Return the transformers name for a BERT tensor's name in llama.cpp; any other name as it is."""
    module, _, end = name.rpartition(".")
    layer = re.fullmatch(r"blk\.([0-9]+)\.(\w+)", module)
    inner = _MODULES.get(layer[2] if layer else module)
    if inner is None:
        return name
    return f"encoder.layer.{layer[1]}.{inner}.{end}" if layer else f"{inner}.{end}"


def splits(path: Path) -> list[Path]:
    """Return the files that llama.cpp has split a model into, by the name of one; else this file."""
    match = _SPLIT.fullmatch(path.name)
    count = int(match[3]) if match else 0
    if match is None or not count:
        return [path]
    if count > MAX_SPLITS:
        raise SourceError(f"{path} is one of {count:,} splits; at most {MAX_SPLITS:,} are read")
    return [path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def read_gguf(file: OpenFile) -> StoredFile:
    """Return the tensors in an open GGUF file; raise SourceError for any other file."""
    file.take(4)
    version = file.number(4)
    if version not in (2, 3):
        raise file.broken(f"version {version:,} of GGUF; 2 and 3 in little-endian order are read")
    tensors, keys = file.number(8), file.number(8)
    file.budget.spend("tensors", tensors)
    file.budget.spend("instructions", keys)
    metadata: dict[str, str] = {}
    alignment = 32
    for _ in range(keys):
        key = file.text(file.number(8))
        value = _value(file, file.number(4), 0)
        if value is not None and len(metadata) < _SHOWN_KEYS:
            metadata[key] = value
        if key == "general.alignment":
            alignment = decimal(value or "") or 0
    if not 0 < alignment <= 1 << 20:
        raise file.broken("general.alignment is not a number of bytes")
    entries = list[tuple[int, StoredTensor]]()
    for _ in range(tensors):
        name, dimensions = file.text(file.number(8)), file.number(4)
        if dimensions > 8:  # GGML_MAX_DIMS is 4
            raise file.broken(f"tensor {name[:60]!r} has {dimensions:,} dimensions")
        shape = [file.number(8) for _ in range(dimensions)]  # the innermost first
        kind = file.number(4)
        if kind not in TYPES:
            raise file.broken(f"tensor {name[:60]!r} has the unknown type {kind:,}")
        dtype, elements, size = TYPES[kind]
        if shape and shape[0] % elements:
            raise file.broken(f"tensor {name[:60]!r} has rows of {shape[0]:,}, and {dtype} has blocks of {elements}")
        stored_bytes, packing = math.prod(shape) // elements * size, "GGUF" if elements > 1 else None
        tensor = file.tensor(name, dtype, reversed(shape), stored_bytes, packing=packing)
        entries.append((file.number(8), tensor))
    header = file.stream.tell()
    start = math.ceil(header / alignment) * alignment
    placed = [Placed(start + offset, start + offset + tensor.bytes, tensor) for offset, tensor in entries]
    for item in placed:
        if item.end > file.size:
            raise file.broken(f"tensor {item.tensor.name[:60]!r} ends at byte {item.end:,} of {file.size:,}: truncated")
    file.in_order(placed)
    if len({item.tensor.name for item in placed}) < len(placed):
        raise file.broken("two tensors have the same name")
    stored = [item.tensor for item in placed]
    parts = {"header": header, "tensors": sum(item.bytes for item in stored)}
    return file.stored("gguf", stored, parts, metadata=metadata)


def _value(file: OpenFile, kind: int, depth: int) -> str | None:
    if kind == _TEXT:
        count = file.number(8)
        if count <= 200:
            return file.take(count).decode(errors="replace")
        file.skip(count)
        return None
    if kind == _ARRAY:
        kind, count = file.number(4), file.number(8)
        if kind in _SIZES:
            file.skip(count * _SIZES[kind])
            return None
        if depth == _MAX_DEPTH:
            raise file.broken("arrays in arrays, nested too deeply")
        file.budget.spend("instructions", count)
        for _ in range(count):
            if kind == _TEXT:
                file.skip(file.number(8))
            else:
                _value(file, kind, depth + 1)
        return None
    if kind not in _SIZES:
        raise file.broken(f"metadata of the unknown type {kind:,}")
    raw = file.take(_SIZES[kind])
    if kind in _FLOATS:
        return f"{struct.unpack(_FLOATS[kind], raw)[0]:g}"
    return str(int.from_bytes(raw, "little", signed=kind in _SIGNED))
