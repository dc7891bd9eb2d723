"""The permit for code: only a name that a person typed, or allowed a file to give, can be imported."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any, TypeVar

Record = TypeVar("Record")
NO_PERMIT = "is code, which no file imports; name it on the command line, or add --allow-code to check or sweep"
_NAME = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_CODE = re.compile(rf"(?:{_NAME}|(?:[^:\0]{{0,4000}}[/\\])?[^\W\d]\w*\.py):{_NAME}")


def is_code(name: str) -> bool:
    """Return True if a name has the form `package.module:attribute` or `path/to/file.py:attribute`."""
    return _CODE.fullmatch(name) is not None


class CodeName(str):
    """A text with a permit: the `module:attribute` that it is or contains may be imported.

    The command line, a Python call and `--allow-code` make it (a test lists where). Text from a file is a plain `str`,
    and so is what any method of `str` returns: whatever is made from a name loses the permit.
    """

    __slots__ = ()


def permits_of(*records: object) -> tuple[str, ...]:
    """Return the names with a permit in the fields of records, for a process that computes with the same records."""
    values = [value for record in records if record is not None for value in vars(record).values()]
    return tuple(dict.fromkeys(str(value) for value in values if isinstance(value, CodeName)))


def with_permits(record: Record, permits: Collection[str]) -> Record:
    """Return the record of another process; its texts among `permits` may be imported, as they may be there."""
    own: Any = {key: CodeName(value) for key, value in vars(record).items() if type(value) is str and value in permits}
    changed: Any = record
    return replace(changed, **own) if own else record
