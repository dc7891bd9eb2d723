"""Inputs of the hostile review that only `tests/test_fuzz.py` runs: generator functions, `(folder) -> arguments`.

The other inputs of the review, by the tests that hold them:

- configurations that lead transformers to code or the network (dpt, poison in every family), and a file of
  expectations that names a factory: tests/sources/test_hostile_configs.py
- copies by `torch.Size` and `OrderedDict`, 60 hard links to one shard, unfoldable names, damaged and compressed
  records, 64 dimensions of 2**62, control characters and bidirectional overrides in every format, folders that may
  not be searched: tests/hostile.py, which tests/test_hostile.py runs
- pickles with code, endless hashes, zip bombs, truncated files, broken safetensors:
  tests/checkpoints/test_checkpoints.py
- `--help` and `--version` to a full device, TORCH_LOGS=nosuch, a deleted working directory, a limit on file sizes while
  drawing, EOFError, signals, names such as `-ovictim.bertscope.yaml`: tests/commands/test_process.py
- `typing.py` in the working directory: tests/processes/test_child.py, tests/analyses/memory/test_profile.py,
  tests/commands/test_process.py
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

UNPRINTABLE = "a\x1b[2Jb\x07\x9b31m\u202ec\u2066d\u200be\r\n\x00"
REVIEW: dict[str, tuple[Callable[[Path], list[object]], int, str]] = {}  # name -> generator, exit code, words


def _input(code: int, words: str = "") -> Callable[[Callable[[Path], list[object]]], Callable[[Path], list[object]]]:
    def add(make: Callable[[Path], list[object]]) -> Callable[[Path], list[object]]:
        REVIEW[make.__name__] = make, code, words
        return make

    return add


def safetensors(entries: dict[str, object], data: bytes = b"") -> bytes:
    """Return a safetensors file of this header."""
    raw = json.dumps(entries).encode()
    return struct.pack("<Q", len(raw)) + raw + data


@_input(2, "copied elements")
def copies_that_only_the_shards_together_make(folder: Path) -> list[object]:
    """Each shard keeps within the limit; its one tensor comes after the copies of a list of 100,000 numbers."""
    copies = b"\x80\x02]q\x00(" + b"K\0" * 100_000 + b"ectorch\nSize\nq\x01" + b"h\x01h\x00\x85R" * 9
    storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x01tQ"
    for number in range(3):
        tensor = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\0K\x01\x85K\x01\x85\x89NtR"
        with zipfile.ZipFile(folder / f"{number}.bin", "w") as archive:
            archive.writestr("archive/data.pkl", copies + b"}X\x01\0\0\0%d" % number + tensor + b"s.")
            archive.writestr("archive/data/0", bytes(4))
    return ["count", _index(folder, {str(number): f"{number}.bin" for number in range(3)})]


def _index(folder: Path, places: dict[str, str]) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": places}))
    return path


@_input(2, "are one file")
def sixty_shards_linked_to_one_file(folder: Path) -> list[object]:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    (folder / "s0.safetensors").write_bytes(safetensors({f"t{number}": empty for number in range(2000)}))
    for number in range(1, 60):
        (folder / f"s{number}.safetensors").symlink_to("s0.safetensors")
    return ["count", _index(folder, {f"t{number}": f"s{number}.safetensors" for number in range(60)})]


@_input(2, "more than 10,000 shards")
def an_index_of_ten_thousand_and_one_shards(folder: Path) -> list[object]:
    return ["count", _index(folder, {f"t{number}": f"s{number}.bin" for number in range(10_001)})]


@_input(1)
def verified_names_that_are_not_printable(folder: Path) -> list[object]:
    return ["diff", "bert-tiny", _unprintable(folder), "--format", "csv"]


def _unprintable(folder: Path) -> Path:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    path = folder / "a\u202eb\x1b[31m.safetensors"
    path.write_bytes(safetensors({UNPRINTABLE: entry, "__metadata__": {UNPRINTABLE: UNPRINTABLE}}, bytes(8)))
    return path


@_input(2, "EOF")
def a_factory_that_asks_where_nobody_answers(folder: Path) -> list[object]:
    (folder / "asking_module.py").write_text("def build():\n    return input()\n")
    return ["count", "asking_module:build"]
