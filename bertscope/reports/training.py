"""The settings of a training loop in a file of another tool, key by key."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class TrainingKey:
    """A key of a training file, its value, and its effect on the run."""

    key: str
    value: Any
    effect: str


@dataclass(frozen=True, kw_only=True)
class TrainingFile:
    """The settings of a training loop in a file of transformers or accelerate, each key in one of four lists.

    `fields` are those of RunConfig that the keys in `used` set. `replaced` has fields, not keys: those for which the
    run has another value, by an option of the command line.
    """

    path: str
    format: str  # TrainingArguments, accelerate config
    fields: dict[str, Any]
    used: tuple[TrainingKey, ...]
    no_effect: tuple[TrainingKey, ...]  # on the memory of a training step
    not_modelled: tuple[TrainingKey, ...]
    unknown: tuple[TrainingKey, ...]
    replaced: tuple[TrainingKey, ...] = ()

    @property
    def module_fields(self) -> dict[str, Any]:
        """Return the fields that a given module does not determine itself: `estimate(module, inputs, **fields)`."""
        determined = ("batch", "checkpointing", "reentrant")
        return {name: value for name, value in self.fields.items() if name not in determined}
