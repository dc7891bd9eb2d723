"""Hostile files by name: each is a small generator of bytes, shared by the tests of single findings and by fuzzing.

No file is above 1 MB. Each must end soon, small and without a traceback; nothing in it may run.
"""

import io
import json
import os
import struct
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tests.stored_files import field, gguf, gguf_text, onnx, onnx_external, onnx_tensor

BIDI = "\u202e"
Made = Callable[[], bytes]


def safetensors(entries: dict[str, object] | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a safetensors file: its length (by default the true one), a header (JSON by default) and data."""
    raw = entries if isinstance(entries, bytes) else json.dumps(entries, separators=(",", ":")).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entry(shape: Sequence[object] = (2,), begin: int = 0, end: int = 8, dtype: object = "F32", **more: object) -> dict:
    """Return a header entry, by default of two floats."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


def empty_tensor(shape: tuple[int, ...] = (0,)) -> dict[str, object]:
    """Return a header entry of no bytes."""
    return entry(shape, 0, 0)


def torch_zip(pickled: bytes, method: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip such as `torch.save` writes, with one storage of 16 bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickled, compress_type=method)
        archive.writestr("archive/data/0", bytes(16))
    return out.getvalue()


def tensors(names: list[bytes], shape: bytes = b"K\x01\x85", stride: bytes = b"K\x01\x85") -> bytes:
    """Return the pickle of a state dict whose tensors share one storage; `shape` and `stride` are instructions."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
    rebuild = b"ctorch._utils\n_rebuild_tensor_v2\nq\x01"
    head = b"\x80\x02" + rebuild + storage + b"q\x02" + shape + b"q\x03" + stride + b"q\x04}q\x05("
    return head + b"".join(_text(name) + b"h\x01(h\x02K\x00h\x03h\x04\x89}tR" for name in names) + b"u."


def _text(name: bytes) -> bytes:
    return b"X" + struct.pack("<I", len(name)) + name


def _calls(function: bytes, items: bytes) -> bytes:
    """Return a pickle that calls a function with one list again and again: `h\\x00h\\x01\\x85R` is a call."""
    return b"\x80\x02" + function + b"q\x00]q\x01(" + items + b"e" + b"h\x00h\x01\x85R" * 60_000 + b"."


def _pairs() -> bytes:
    return b"".join(b"(X\x04\x00\x00\x00%04dK\x01t" % number for number in range(9999))


def _long_key() -> bytes:
    number = b"\x8b" + struct.pack("<i", 400_000) + b"\x7f" * 400_000
    return b"\x80\x02" + number + b"q\x01}" + b"h\x01K\x01s" * 100_000 + b"."


def _sizes(count: int) -> bytes:
    return b"(" + (b"\x8a\x08" + struct.pack("<q", 2**62)) * count + b"t"


def _damaged(method: int) -> bytes:
    """Return a zip whose record of a compression is damaged in the middle."""
    raw = bytearray(torch_zip(tensors([b"%d" % number for number in range(100)]), method))
    start = raw.index(b"data.pkl") + len(b"data.pkl")
    raw[start + 9 : start + 60] = b"\xff" * 51
    return bytes(raw)


def _zip_field(offset: int, value: bytes) -> bytes:
    """Return a zip with another value in the first entry of its directory."""
    raw = bytearray(torch_zip(tensors([b"x"])))
    place = raw.index(b"PK\x01\x02") + offset
    raw[place : place + len(value)] = value
    return bytes(raw)


def _numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def _wrong_crc() -> bytes:
    return torch_zip(tensors([b"x"])).replace(b"}q\x05(", b"}q\x06(")


def _value_of_gguf(kind: int, raw: bytes) -> bytes:
    """Return a GGUF file with an array of a type."""
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_text("k") + struct.pack("<II", 9, kind) + raw


def _nested_graphs(depth: int) -> bytes:
    graph = b""
    for _ in range(depth):
        graph = field(1, field(5, field(6, graph)))
    return field(7, graph)


# Name -> file; `count` refuses each in one line.
REFUSED: dict[str, Made] = {
    "copies-of-a-list.bin": lambda: torch_zip(_calls(b"ctorch\nSize\n", b"K\x01" * 200_000)),
    "copies-of-a-table.bin": lambda: torch_zip(_calls(b"ccollections\nOrderedDict\n", _pairs())),
    "a-long-integer-as-key.bin": lambda: torch_zip(_long_key()),
    "64-dimensions-of-2-62.bin": lambda: torch_zip(tensors([b"x"], _sizes(64), b"(" + b"K\x00" * 64 + b"t")),
    "a-name-without-end.bin": lambda: torch_zip(tensors([b"x" * 300_000, *_numbers(9000)])),
    "dictionaries.bin": lambda: torch_zip(b"\x80\x02" + b"}" * 400_000 + b"."),
    "nested-tuples.bin": lambda: torch_zip(b"\x80\x02)" + b"\x85" * 400_000 + b"."),
    "deflate.bin": lambda: torch_zip(tensors([b"x"]), zipfile.ZIP_DEFLATED),
    "damaged-deflate.bin": lambda: _damaged(zipfile.ZIP_DEFLATED),
    "damaged-bz2.bin": lambda: _damaged(zipfile.ZIP_BZIP2),
    "damaged-lzma.bin": lambda: _damaged(zipfile.ZIP_LZMA),
    "wrong-crc.bin": _wrong_crc,
    "encrypted.bin": lambda: _zip_field(8, b"\x01\x00"),
    "unknown-compression.bin": lambda: _zip_field(10, b"\x63\x00"),
    "needs-a-later-zip.bin": lambda: _zip_field(6, b"\xff\x00"),
    "wrong-sizes.bin": lambda: _zip_field(20, b"\x01\x00\x00\x00\xff\xff\x00\x00"),
    "record-elsewhere.bin": lambda: _zip_field(42, b"\xff\xff\xff\x7f"),
    "cut.bin": lambda: torch_zip(tensors([b"x"]))[:-30],
    "tensors.gguf": lambda: b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0),
    "keys.gguf": lambda: b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
    "negative.gguf": lambda: b"GGUF" + struct.pack("<Iqq", 3, -1, -1),
    "version.gguf": lambda: b"GGUF" + struct.pack(">IQQ", 3, 1, 1),
    "a-long-name.gguf": lambda: b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**40) + bytes(900_000),
    "words.gguf": lambda: _value_of_gguf(8, struct.pack("<Q", 2**40) + bytes(900_000)),
    "nested-arrays.gguf": lambda: _value_of_gguf(9, struct.pack("<QIQ", 1, 9, 1) * 45_000),
    "copies-of-arrays.gguf": lambda: _value_of_gguf(9, struct.pack("<Q", 2**22) + bytes(900_000)),
    "2-63.gguf": lambda: gguf({"x": ((2**62, 2**62), 0, 0)}),
    "beyond.gguf": lambda: gguf({"x": ((2**20,), 0, 2**62)}),
    "overlap.gguf": lambda: gguf({"x": ((4,), 0, 0), "y": ((4,), 0, 8)}, data=32),
    "one-place.gguf": lambda: gguf({"x": ((4,), 0, 0), "y": ((4,), 0, 0)}, data=16),
    "cut.gguf": lambda: gguf({"x": ((4,), 0, 0), "y": ((4,), 0, 16)}, data=31),
    "empty.onnx": lambda: b"",
    "text.onnx": lambda: b"hello " * 9,
    "cut.onnx": lambda: onnx(onnx_tensor("x", (100,), bytes(400)))[:-9],
    "without-bytes.onnx": lambda: onnx(onnx_tensor("x", (2**40,))),
    "negative.onnx": lambda: onnx(onnx_tensor("x", (2**64 - 1,))),
    "dimensions.onnx": lambda: onnx(onnx_tensor("x", (1,) * 100_000, bytes(4))),
    "nested-graphs.onnx": lambda: _nested_graphs(5000),
    "external.onnx": lambda: onnx(*(onnx_external(f"x{n}", (1,), location=f"{n}") for n in range(9000))),
    "integers.onnx": lambda: b"\xff" * 900_000,
    "fields.onnx": lambda: onnx() + b"\x0a\x00" * 400_000 + b"\xff",
    "nested-json.safetensors": lambda: struct.pack("<Q", 900_000) + b'{"a":' * 180_000,
    "nested-flow.yaml": lambda: b"a: " + b"[" * 130_000,
    "nested-keys.yaml": lambda: b"? " * 65_000,
    "laughs.yaml": lambda: b"a: &a [x]\nb: &b [*a, *a]\nconfig: [*b, *b]\n",
    "a-million-layers.yaml": lambda: b"architecture: BertModel\nconfig: {num_hidden_layers: 1000000000}\n",
    "runs.bertscope.yaml": lambda: (
        b"model: bert-tiny\nexpected:\n  memory:\n"
        + b"".join(b"    a%d: {batch: 1, seq: 8, mode: training, peak_bytes: 1}\n" % number for number in range(40))
    ),
    "nested.json": lambda: b'{"a":' * 180_000,
    "a-million-layers.json": lambda: b'{"model_type": "bert", "num_hidden_layers": 1000000000}',
    "keys.json": lambda: json.dumps({f"k{number}": 0 for number in range(60_000)}).encode(),
    "a-key-twice.json": lambda: b'{"model_type": "bert", "model_type": "bert"}',
    "digits.json": lambda: b'{"model_type": "bert", "vocab_size": ' + b"9" * 900_000 + b"}",
}


def _nested_key(depth: int) -> bytes:
    """Return a dictionary whose key is a tuple of two tuples of two ...: its hash takes 2**depth steps."""
    return b"\x80\x02}()" + b"q\x00h\x00\x86" * depth + b"K\x01u."


# Name -> file of safetensors that `count` refuses, and words of the line; then the same of pickles in a zip.
_SAFETENSORS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "ends after 0 bytes"),
    "seven bytes": (b"\0" * 7, "ends after 7 bytes"),
    "a length beyond the file": (safetensors({}, length=2**62), "4,611,686,018,427,387,904 bytes and the file has"),
    "a length one too long": (safetensors({}, length=3), "the header says"),
    "no JSON": (safetensors(b"hello"), "not valid JSON"),
    "no object": (safetensors(b"[]"), "not a JSON object"),
    "no UTF-8": (safetensors(b"\xff\xfe"), "not UTF-8"),
    "NaN": (safetensors(b'{"a": NaN}'), "NaN"),
    "a deep nest": (safetensors(b"[" * 200_000), "nested too deeply"),
    "a number without end": (safetensors(b"9" * 5000), "not valid JSON"),
    "a key twice": (safetensors(b'{"a": ' + json.dumps(entry()).encode() + b', "a": {}}', bytes(8)), "'a' twice"),
    "a field too many": (safetensors({"a": entry(x=1)}, bytes(8)), "and nothing else"),
    "a field missing": (safetensors({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)), "needs dtype, shape"),
    "an unknown dtype": (safetensors({"a": entry(dtype="F31")}, bytes(8)), "unknown dtype 'F31'"),
    "a dtype that is none": (safetensors({"a": entry(dtype=["F32"])}, bytes(8)), "unknown dtype"),
    "a negative shape": (safetensors({"a": entry((-2,))}, bytes(8)), "not a list of sizes"),
    "a shape of truth": (safetensors({"a": entry((True, 2))}, bytes(8)), "not a list of sizes"),
    "a shape beyond 64 bits": (safetensors({"a": entry((2**64,))}, bytes(8)), "not a list of sizes"),
    "a product beyond reason": (safetensors({"a": entry([2**62] * 60)}, bytes(8)), "has 8 bytes"),
    "offsets beyond the file": (safetensors({"a": entry((2,), 0, 8)}, bytes(7)), "of 7: truncated or wrong"),
    "offsets backwards": (safetensors({"a": entry((0,), 8, 0)}, bytes(8)), "truncated or wrong"),
    "offsets of three": (safetensors({"a": {**entry(), "data_offsets": [0, 4, 8]}}, bytes(8)), "not two positions"),
    "bytes that are not the shape's": (safetensors({"a": entry((3,))}, bytes(8)), "and [3] of F32 has 12"),
    "an overlap": (safetensors({"a": entry(), "b": entry((1,), 4, 8)}, bytes(8)), "'a' and 'b' overlap"),
    "metadata of numbers": (safetensors({"__metadata__": {"a": 1}}), "map text to text"),
    "GGUF": (b"GGUF" + bytes(40), "version 0 of GGUF"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(40), "an HDF5 file"),
    "a page": (b"<!DOCTYPE html><html>" + bytes(40), "a page of HTML"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:x", "git lfs pull"),
    "gzip": (b"\x1f\x8b" + bytes(40), "unpack it first"),
}  # fmt: skip
_PICKLES: dict[str, tuple[bytes, str]] = {
    "a key whose hash has no end": (_nested_key(60), "a key that is a tuple"),
    "a memo beyond memory": (b"\x80\x02}r\xff\xff\xff\xffr\x00\xff\xff\xff.", "no table of tensors"),
    "text that is not there": (b"\x80\x02X\xff\xff\xff\x7fabc.", "not the pickle"),
    "an extension": (b"\x80\x02\x82\x01.", "the instruction EXT1"),
    "an instance": (b"(iposix\nsystem\n.", "the instruction INST"),
    "an object of a class": (b"\x80\x02cposix\nsystem\n)\x81.", "it calls posix.system"),
    "a call of a list": (b"\x80\x02])R.", "a call of something that is not a name"),
    "nothing": (b"\x80\x02.", "not the pickle"),
    "no mark": (b"\x80\x02t.", "not the pickle"),
    "no end": (b"\x80\x02}", "not the pickle"),
    "a list alone": (b"\x80\x02].", "no table of tensors"),
    "a foreign storage": (b"\x80\x02(U\x07storagecos\nsystem\nU\x010U\x03cpuK\x01tQ.", "none of torch's"),
}  # fmt: skip
WORDS = {f"{name}.safetensors": words for name, (_, words) in _SAFETENSORS.items()}
WORDS |= {f"{name}.bin": words for name, (_, words) in _PICKLES.items()}
REFUSED |= {f"{name}.safetensors": partial(bytes, raw) for name, (raw, _) in _SAFETENSORS.items()}
REFUSED |= {f"{name}.bin": partial(torch_zip, raw) for name, (raw, _) in _PICKLES.items()}

# Name -> file that is well formed; `count` shows it, soon and with escapes.
ACCEPTED: dict[str, Made] = {
    "unfoldable-names.safetensors": lambda: safetensors({f"{number}x": empty_tensor() for number in range(17_000)}),
    "unfoldable-names.bin": lambda: torch_zip(tensors(_numbers(24_000))),
    "64-dimensions-and-none.safetensors": lambda: safetensors({"a": empty_tensor((2**62,) * 63 + (0,))}),
    "metadata.safetensors": lambda: safetensors(
        {"__metadata__": {f"k{number}": BIDI for number in range(40_000)}, "a": empty_tensor()}
    ),
    "unfoldable-names.gguf": lambda: gguf({f"{number}x": ((0,), 0, 0) for number in range(17_000)}),
    "unfoldable-names.onnx": lambda: onnx(*(onnx_tensor(f"{number}x", (0,)) for number in range(40_000))),
    "names.gguf": lambda: gguf({name.replace("\ud800", "x") or "x": ((0,), 0, 0) for name in NAMES}),
    "names.safetensors": lambda: safetensors({name: empty_tensor() for name in NAMES}),
}

# What a terminal, a spreadsheet, a log or an editor acts upon.
NAMES = (
    f"a{BIDI}b", "\u2066x\u2069", "\u200e\u200f\u061c", "zero\u200bwidth", "line\u2028and\u2029paragraph",
    "\x1b[31mred", "a\nb", "a\rb", "\x00\x07\x9b", "half \ud800", "=1+1", "+1", "-cmd", "@sum", "\t=1",
    "::error::x", "%0A::error::", "a|b", "<script>",
)  # fmt: skip


# ---- inputs of several files: generator functions, `(folder) -> arguments` ----

UNPRINTABLE = "a\x1b[2Jb\x07\x9b31m\u202ec\u2066d\u200be\r\n\x00"


def _index(folder: Path, places: dict[str, str]) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": places}))
    return path


def copies_that_only_the_shards_together_make(folder: Path) -> list[object]:
    """Each shard keeps within the limit; its one tensor comes after the copies of a list of 100,000 numbers."""
    copies = b"\x80\x02]q\x00(" + b"K\0" * 100_000 + b"ectorch\nSize\nq\x01" + b"h\x01h\x00\x85R" * 9
    for number in range(3):
        (folder / f"{number}.bin").write_bytes(torch_zip(copies + tensors([b"%d" % number])[2:]))
    return ["count", _index(folder, {str(number): f"{number}.bin" for number in range(3)})]


def shards_that_are_one_file(folder: Path) -> list[object]:
    names = [f"x{number}" for number in range(6000)]
    first = folder / "s0.safetensors"
    first.write_bytes(safetensors({name: empty_tensor() for name in names}))
    for number in range(1, 60):
        (os.link if number % 2 else os.symlink)(first, folder / f"s{number}.safetensors")
    return ["count", _index(folder, {name: f"s{number % 60}.safetensors" for number, name in enumerate(names)})]


def an_index_of_ten_thousand_and_one_shards(folder: Path) -> list[object]:
    return ["count", _index(folder, {f"t{number}": f"s{number}.bin" for number in range(10_001)})]


def verified_names_that_are_not_printable(folder: Path) -> list[object]:
    path = folder / "a\u202eb\x1b[31m.safetensors"
    path.write_bytes(safetensors({UNPRINTABLE: entry(), "__metadata__": {UNPRINTABLE: UNPRINTABLE}}, bytes(8)))
    return ["diff", "bert-tiny", path, "--format", "csv"]


def a_factory_that_asks_where_nobody_answers(folder: Path) -> list[object]:
    (folder / "asking_module.py").write_text("def build():\n    return input()\n")
    return ["count", "asking_module:build"]


# Generator -> exit code, and words of the line on stderr.
FOLDERS: dict[Callable[[Path], list[object]], tuple[int, str]] = {
    copies_that_only_the_shards_together_make: (2, "copied elements"),
    shards_that_are_one_file: (2, "shards s0.safetensors and s1.safetensors are the same file"),
    an_index_of_ten_thousand_and_one_shards: (2, "more than 10,000 shards"),
    verified_names_that_are_not_printable: (1, ""),
    a_factory_that_asks_where_nobody_answers: (2, "EOF"),
}
