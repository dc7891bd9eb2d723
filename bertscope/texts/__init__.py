"""The sentences of reports in English and in Chinese, by key.

English sentences are in `english.py`, `explain.py` and `why.py`, the Chinese ones in `zh.yaml`, which is read only for
Chinese. `zh_phrases.yaml` has the Chinese of the words and templates of errors, notes, progress and data.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

from bertscope.errors import Text, formatted
from bertscope.texts import english, explain, why

ENGLISH, CHINESE = LANGUAGES = ("en", "zh")
TEXTS = english.TEXTS | explain.TEXTS | why.TEXTS
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


def listed(words: Iterable[str]) -> str:
    """Return the words as a list in a sentence: `q, k and v`."""
    *first, last = words
    return say("comma").join(first) + (say("both") if first else "") + last


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
    """Return the Chinese by the English words or template, of data, errors, notes and progress."""
    return _read("zh_phrases.yaml")


@cache
def _read(name: str) -> dict[str, str]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found: dict[str, str] = yaml.load(Path(__file__).with_name(name).read_text(encoding="utf-8"), loader)  # noqa: S506
    return found


def phrase(english: str) -> str:
    """Return a text of a report or an error in the chosen language, as it is if that has none for it.

    The texts among the values of a Text, and those whose names begin with `words`, are in the chosen language too.
    """
    if language() == ENGLISH:
        return english
    if not isinstance(english, Text):
        return phrases().get(english, english)
    values = {
        name: phrase(value) if isinstance(value, Text) or name.startswith("words") else value
        for name, value in english.values.items()
    }
    return formatted(phrases().get(english.template, english.template), values, english.forms)
