"""The parts that all checkpoint readers share: limits, the open file, and the contents of a file."""

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

# Name -> the limit. The largest published checkpoints have about 100,000 tensors, 150 bytes of header for each.
LIMITS = {
    "bytes of headers": 64 << 20,
    "instructions": 1 << 22,  # a tensor in a pickle takes about 40
    "copied elements": 1 << 21,  # in calls of a pickle, whose arguments may repeat one list
    "tensors": 1 << 18,
}


@dataclass
class Budget:
    """The amounts that reading the checkpoint at `path` has used so far."""

    path: Path
    spent: dict[str, int] = field(default_factory=dict)
    names: dict[tuple[int, int], str] = field(default_factory=dict)  # of open files, by device and inode

    def spend(self, what: str, count: int) -> None:
        """Add to one amount; raise SourceError above its limit."""
        self.spent[what] = self.spent.get(what, 0) + count
        if self.spent[what] > LIMITS[what]:
            raise SourceError(
                f"more than {LIMITS[what]:,} {what} in all; count its shards one by one; nothing was loaded or run",
                where=str(self.path),
            )


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """One file of weights: its tensors in file order, and the use of each byte."""

    format: str
    tensors: tuple[StoredTensor, ...]
    parts: tuple[FilePart, ...]
    metadata: dict[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class OpenFile:
    """An open file of a checkpoint, its size in bytes, and the budget of the checkpoint."""

    path: Path
    stream: BinaryIO
    size: int
    budget: Budget

    def broken(self, what: str) -> SourceError:
        """Return the error for a file whose contents contradict its format."""
        return SourceError(f"{what}; nothing was loaded or run", where=str(self.path))

    def json(self, raw: bytes, what: str) -> Any:
        """Parse JSON; raise SourceError for other text, a repeated key, NaN or deep nesting."""

        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found = dict(pairs)
            if len(found) < len(pairs):
                seen: set[str] = set()
                twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
                raise self.broken(f"{what} has the key {twice[:60]!r} twice")
            return found

        def no_number(text: str) -> Any:
            raise self.broken(f"{what} holds {text}, which is not JSON")

        try:
            return json.loads(raw.decode(), object_pairs_hook=unique, parse_constant=no_number)
        except UnicodeDecodeError:
            raise self.broken(f"{what} is not UTF-8 text") from None
        except RecursionError:
            raise self.broken(f"{what} is nested too deeply") from None
        except ValueError as error:
            raise self.broken(f"{what} is not valid JSON: {error}") from None


def is_size(value: Any) -> bool:
    """Return True for a header value that is an integer in the range of sizes and offsets, 64 bits in torch."""
    return type(value) is int and 0 <= value < 2**63


@contextmanager
def opened(path: Path, budget: Budget) -> Iterator[OpenFile]:
    """Open a regular file; raise SourceError for a folder, a pipe, or a second name of an open file."""
    with readable(path):
        if path.is_dir():
            raise SourceError(
                f"{path} is a folder without weights; name one with model.safetensors or pytorch_model.bin"
            )
        if path.exists() and not path.is_file():
            raise SourceError(f"{path} is not a regular file; name a checkpoint")
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            first = budget.names.setdefault((status.st_dev, status.st_ino), path.name)
            if first != path.name:
                raise SourceError(
                    f"the shards {first} and {path.name} are one file; remove one", where=str(budget.path)
                )
            yield OpenFile(path, stream, status.st_size, budget)
