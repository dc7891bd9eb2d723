"""Limits on one checkpoint over all its files, so that a small hostile file cannot take much memory or time."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from bertscope.errors import SourceError

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
    files: dict[tuple[int, int], str] = field(default_factory=dict)  # device and inode -> name

    def add_file(self, path: Path, file: BinaryIO) -> None:
        """Record an open file; raise SourceError for a second name of a file that was read already."""
        status = os.fstat(file.fileno())
        first = self.files.setdefault((status.st_dev, status.st_ino), path.name)
        if first != path.name:
            raise SourceError(f"the shards {first} and {path.name} are one file; remove one", where=str(self.path))

    def spend(self, what: str, count: int) -> None:
        """Add to one amount; raise SourceError above its limit."""
        self.spent[what] = self.spent.get(what, 0) + count
        if self.spent[what] > LIMITS[what]:
            raise SourceError(
                f"more than {LIMITS[what]:,} {what} in all; count its shards one by one; nothing was loaded or run",
                where=str(self.path),
            )
