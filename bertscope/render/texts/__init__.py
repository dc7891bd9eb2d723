"""The texts of reports in English and in Chinese, by key: a module for the texts of each subject."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from bertscope.render.texts import count, explain, fit, memory, page, parallel, shared
from bertscope.render.texts.phrases import PHRASES as _COMMON
from bertscope.render.texts.tool_phrases import PHRASES as _OF_TOOLS

LANGUAGES = ("en", "zh")
PHRASES = {**_COMMON, **_OF_TOOLS}
CATALOGUES = (count, explain, fit, memory, page, parallel, shared)
TEXTS: dict[str, tuple[str, str]] = {key: text for module in CATALOGUES for key, text in module.TEXTS.items()}
_chosen: ContextVar[int] = ContextVar("language", default=0)


@contextmanager
def in_language(language: str) -> Iterator[None]:
    """Set the language of the texts within a `with` statement."""
    token = _chosen.set(LANGUAGES.index(language))
    try:
        yield
    finally:
        _chosen.reset(token)


def language() -> str:
    """Return the chosen language."""
    return LANGUAGES[_chosen.get()]


def say(key: str, **values: Any) -> str:
    """Return a text in the chosen language, with the values in its places."""
    return TEXTS[key][_chosen.get()].format(**values)


def has_text(key: str) -> bool:
    """Return True if the catalogue has a text with this key."""
    return key in TEXTS


def word(kind: str, name: str) -> str:
    """Return the word for a value of a report, such as the mode `training`; the value if there is none."""
    key = f"{kind}_{name}"
    return say(key) if key in TEXTS else name


def phrase(english: str) -> str:
    """Return a text of a report or an error in the chosen language, as it is if PHRASES does not have it."""
    if not _chosen.get():
        return english
    if english in PHRASES:
        return PHRASES[english]
    for pattern, chinese in _patterns():
        if found := pattern.fullmatch(english):
            values = {
                name: phrase(text) if name.startswith("words") else text for name, text in found.groupdict().items()
            }
            return chinese.format(**values)
    return english


@cache
def _patterns() -> list[tuple[re.Pattern[str], str]]:
    """Return the phrases with values as patterns."""
    return [
        (re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>.*?)", re.escape(english))), chinese)
        for english, chinese in PHRASES.items()
        if "{" in english
    ]
