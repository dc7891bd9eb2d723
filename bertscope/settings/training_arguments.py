"""Rules that read a setting from a key of TrainingArguments or of a configuration of accelerate.

A rule takes the value of its key and all values of the file, and returns the value of the setting; None leaves the
setting as it is. It raises ValueError with the allowed values in words, and NotModelledError for a feature that the
estimate does not have.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bertscope.settings.checkpointing import EVERY, FULL, NONE

_NAMES = ("activation", "gradient")  # of checkpointing, since transformers 5.23 and before
Rule = Callable[[Any, Mapping[str, Any]], Any]


class NotModelledError(Exception):
    """A value that changes the memory of a step in a way that is not modelled; the message is its effect."""


def flag(setting: Any) -> Rule:
    """Return the rule that takes true or false: the setting's value if true."""

    def rule(value: Any, given: Mapping[str, Any]) -> Any:
        """Return the value of the setting if the key is true."""
        if not isinstance(value, bool | None):
            raise ValueError("true or false")
        return setting if value else None

    return rule


def whole_number(value: Any, given: Mapping[str, Any]) -> int | None:
    """Return an integer."""
    if isinstance(value, bool) or not isinstance(value, int | None):
        raise ValueError("an integer")
    return value


def words(known: Mapping[Any, Any], default: str) -> Rule:
    """Return the rule that takes one of these words; `default` is what the estimate uses for another word."""

    def rule(value: Any, given: Mapping[str, Any]) -> Any:
        """Return the value of the setting for a word."""
        if not isinstance(value, str | bool | None):
            raise ValueError("a word")
        if value not in known:
            raise NotModelledError(f"the estimate uses {default}, unless an option is given")
        return known[value]

    return rule


def clips(value: Any, given: Mapping[str, Any]) -> bool:
    """Return True if max_grad_norm clips: 0 and null mean no clipping."""
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise ValueError("a number")
    return value is not None and value > 0


def recomputes(value: Any, given: Mapping[str, Any]) -> str:
    """Return the strategy for activation_checkpointing, which is gradient_checkpointing before transformers 5.23."""
    if not isinstance(value, bool):
        raise ValueError("true or false")
    every = _checkpoint_keywords(given).get("every_n_layers", 1)
    if type(every) is not int or every < 1:
        raise ValueError("with every_n_layers, a whole number of at least 1")
    return NONE if not value else FULL if every == 1 else EVERY.format(every)


def is_reentrant(value: Any, given: Mapping[str, Any]) -> bool | None:
    """Return True for gradient_checkpointing: the Trainer of transformers 4 leaves torch's default, reentrant."""
    default = "activation_checkpointing" not in given  # the Trainer of 5.23 writes both names (trainer.py)
    return bool(_checkpoint_keywords(given).get("use_reentrant", default)) if value else None


def reentrant_keyword(value: Any, given: Mapping[str, Any]) -> bool | None:
    """Return the setting for activation_checkpointing_kwargs, which only a checkpointed model reads."""
    if not isinstance(value, dict | None):
        raise ValueError("an object")
    found = value or {}
    if found.get("offload"):
        raise NotModelledError("the inputs of the recomputed layers are on the CPU")
    is_read = any(given.get(f"{name}_checkpointing") is True for name in _NAMES) and "use_reentrant" in found
    return bool(found["use_reentrant"]) if is_read else None


def _checkpoint_keywords(given: Mapping[str, Any]) -> Mapping[str, Any]:
    values = (given.get(f"{name}_checkpointing_kwargs") for name in _NAMES)
    return next((value for value in values if isinstance(value, dict)), {})
