"""Text from files and names, made safe to show: nothing that a terminal, a browser or an editor acts upon.

Not printable, by `str.isprintable`, are control characters, line breaks, overrides of the reading direction
(U+202A to U+202E, U+2066 to U+2069), zero-width characters, halves of surrogate pairs and unassigned ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from html import escape  # xml.sax.saxutils would import urllib.request, 27 ms on every command
from typing import Any


class _Escapes(dict[int, str]):
    """A table for `str.translate` that fills itself: printable characters and `kept` ones stay."""

    def __init__(self, escaped: Callable[[str], str], kept: str = "") -> None:
        self._escaped, self._kept = escaped, kept

    def __missing__(self, code: int) -> str:
        character = chr(code)
        is_safe = character.isprintable() or character in self._kept
        self[code] = shown = character if is_safe else self._escaped(character)
        return shown


def _as_python(character: str) -> str:
    return character.encode("unicode_escape").decode()


_LINE = _Escapes(_as_python)
_LINES = _Escapes(_as_python, "\n")
_COLORED = _Escapes(_as_python, "\n\x1b")
_JSON = _Escapes(lambda character: json.dumps(character)[1:-1], "\n")


def visible(text: str) -> str:
    """Return the text with escapes such as `\\x1b`, `\\n` and `\\u202e` for what is not printable."""
    return text if text.isprintable() else text.translate(_LINE)


def visible_lines(text: str, *, color: bool = False) -> str:
    """Return the text as `visible` does, with its line breaks and, where asked, its colours."""
    return text.translate(_COLORED if color else _LINES) if not text.isprintable() else text


def json_text(data: Any) -> str:
    """Return indented JSON; what is not printable is escaped, so that the same data is read back."""
    return json.dumps(data, indent=2, ensure_ascii=False).translate(_JSON) + "\n"


def html_text(text: str) -> str:
    """Return the text for HTML or XML."""
    return escape(visible(text))
