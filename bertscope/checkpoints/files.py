"""The parts that all checkpoint readers share: the contents of a file, and the error for a broken one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from bertscope.errors import SourceError
from bertscope.reports.checkpoint import FilePart, StoredTensor
from bertscope.text_files import readable

MAX_NAME = 1000  # characters in the name of a tensor
MAX_ELEMENTS = 2**63  # bytes of a tensor; torch stores sizes in 64 bits


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """One file of weights: its tensors in file order, and the use of each byte."""

    format: str
    tensors: tuple[StoredTensor, ...]
    parts: tuple[FilePart, ...]
    metadata: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def broken(path: Path, what: str) -> SourceError:
    """Return the error for a file whose contents contradict its format."""
    return SourceError(f"{what}; nothing was loaded or run", where=str(path))


def is_size(value: Any) -> bool:
    """Return True for a header value that is an integer in the range of sizes and offsets."""
    return type(value) is int and 0 <= value < 2**63


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a regular file; yield it and its size. Raises SourceError for a folder, a pipe or a loop of links."""
    with readable(path):
        if path.is_dir():
            raise SourceError(
                f"{path} is a folder without weights; name one with model.safetensors or pytorch_model.bin"
            )
        if path.exists() and not path.is_file():
            raise SourceError(f"{path} is not a regular file; name a checkpoint")
        with path.open("rb") as file:
            yield file, os.fstat(file.fileno()).st_size


def strict_json(path: Path, raw: bytes, what: str) -> Any:
    """Parse JSON; raise SourceError for other text, a repeated key, NaN or deep nesting."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise broken(path, f"{what} has the key {twice[:60]!r} twice")
        return found

    def no_number(text: str) -> Any:
        raise broken(path, f"{what} holds {text}, which is not JSON")

    try:
        return json.loads(raw.decode(), object_pairs_hook=unique, parse_constant=no_number)
    except UnicodeDecodeError:
        raise broken(path, f"{what} is not UTF-8 text") from None
    except RecursionError:
        raise broken(path, f"{what} is nested too deeply") from None
    except ValueError as error:
        raise broken(path, f"{what} is not valid JSON: {error}") from None
