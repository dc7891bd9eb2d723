"""The sentences of reports in English and in Chinese, by key.

English sentences are in `english.py` and `explain.py`, the Chinese ones in `zh.yaml`, which is read only for Chinese.
`zh_phrases.yaml` has the Chinese of English words that come in data, errors and progress.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from bertscope.texts import english, explain

ENGLISH, CHINESE = LANGUAGES = ("en", "zh")
TEXTS = english.TEXTS | explain.TEXTS
_chosen: ContextVar[str] = ContextVar("language", default=ENGLISH)


@contextmanager
def in_language(language: str) -> Iterator[None]:
    """Set the language of the texts within a `with` statement."""
    token = _chosen.set(LANGUAGES[LANGUAGES.index(language)])
    try:
        yield
    finally:
        _chosen.reset(token)


def language() -> str:
    """Return the chosen language."""
    return _chosen.get()


def say(key: str, /, **values: Any) -> str:
    """Return a text in the chosen language, with the values in its places; KeyError without such a text."""
    return texts(language())[key].format(**values)


def has_text(key: str) -> bool:
    """Return True if the catalogue has a text with this key."""
    return key in texts(ENGLISH)


def word(kind: str, name: str) -> str:
    """Return the word for a value of a report, such as the mode `training`; the value if there is none."""
    key = f"{kind}_{name}"
    return say(key) if has_text(key) else name


def texts(language: str) -> dict[str, str]:
    """Return all sentences of a language by key."""
    return _read("zh.yaml") if language == CHINESE else TEXTS


def phrases() -> dict[str, str]:
    """Return the Chinese for English words of data, errors and progress."""
    return _read("zh_phrases.yaml")


@cache
def _read(name: str) -> dict[str, str]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: dict[str, str] = yaml.load(Path(__file__).with_name(name).read_text(encoding="utf-8"), loader)  # noqa: S506
    return found


def phrase(english: str) -> str:
    """Return a text of a report or an error in the chosen language, as it is if there is no phrase for it."""
    if language() == ENGLISH:
        return english
    if english in phrases():
        return phrases()[english]
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
        for english, chinese in phrases().items()
        if "{" in english
    ]
