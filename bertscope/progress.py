"""Progress in long work: an analysis reports its stages, and a front end that listens shows them."""

import warnings
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Protocol, runtime_checkable

from bertscope.errors import BertscopeWarning, assigned, typed_arguments


@runtime_checkable
class Listener(Protocol):
    """A front end that shows progress."""

    def __call__(self, text: str) -> None:
        """Show a stage of the work, with details after a colon."""

    def expect(self, stages: int) -> None:
        """Add to the number of stages."""


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
_stage: ContextVar[str] = ContextVar("stage", default="")


@typed_arguments
def listening(listener: Listener) -> AbstractContextManager[None]:
    """Call the listener with each stage of the work inside the block.

    >>> class Printer:
    ...     def __call__(self, text):
    ...         print(text)
    ...     def expect(self, stages):
    ...         print(stages, "more")
    >>> with bertscope.listening(Printer()):
    ...     report = bertscope.estimate("bert-tiny", checkpointing="none,full")
    2 more
    simulating without checkpointing
    simulating with full checkpointing
    """
    return assigned(_listener, listener)


def expect(stages: int) -> None:
    """Announce further stages of the work."""
    if (listener := _listener.get()) is not None:
        listener.expect(stages)


def notify(text: str) -> None:
    """Give a front end that listens a note for the user; without one it is a warning."""
    if (show := getattr(_listener.get(), "note", None)) is not None:
        show(text)
    else:
        warnings.warn(BertscopeWarning(text), stacklevel=2)


def progress(text: str) -> None:
    """Report what runs now; inside a stage it is a detail."""
    if (listener := _listener.get()) is not None:
        listener(f"{_stage.get()}: {text}" if _stage.get() else text)


def stage(name: str) -> AbstractContextManager[None]:
    """Report a stage, whose details are what the block reports."""
    progress(name)
    return assigned(_stage, name)
