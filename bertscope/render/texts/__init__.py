"""The texts of reports in English and in Chinese, by key: a module for the texts of each subject."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from bertscope.render.texts import explain, fit, memory, page, shared
from bertscope.render.texts.phrases import PHRASES

LANGUAGES = ("en", "zh")
TEXTS = {**shared.TEXTS, **memory.TEXTS, **fit.TEXTS, **explain.TEXTS, **page.TEXTS}
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


def word(kind: str, name: str) -> str:
    """Return the word for a value of a report, such as the mode `training`; the value if there is none."""
    key = f"{kind}_{name}"
    return say(key) if key in TEXTS else name


def phrase(english: str) -> str:
    """Return a text of a report in the chosen language, as it is if PHRASES does not have it."""
    return PHRASES.get(english, english) if _chosen.get() else english
