"""Models from elsewhere: what a `config.json` of another family, or `module:attribute`, names.

Nothing is imported or run here; `analyses.foreign` builds them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertscope.errors import ConfigError
from bertscope.reading import Mapping

MAX_SIZE = 2**31
MAX_LAYERS = 400  # every layer costs real modules, even on the meta device, and an encoder-decoder has two stacks
MAX_LABELS = 100_000
MAX_TEXT = 10_000
# Fields that say how many modules there are, over all families.
_MODULES = re.compile(
    r"layers?$|^n_layer|_layers?_|^layers|blocks?$|block_|groups?$|inner_group|experts?|stages?|depth|^num_.*layers"
)
_FACTORY = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*(?:\.[^\W\d]\w*)*")


@dataclass(frozen=True, kw_only=True)
class ForeignSource:
    """A module that is not built here: by `transformers` from a configuration, or by a factory of the user's own."""

    name: str
    origin: str  # "transformers" or "factory"
    architecture: str | None = None  # the class to build; None: the one without a head, or what the factory gives
    model_type: str = ""
    attention: str | None = None
    path: Path | None = None  # of the config.json
    line: int = 1  # of its model_type
    config: dict[str, Any] = field(default_factory=dict)  # as its file says, for transformers
    address: str = ""  # `package.module:attribute`, for a factory
    stored_dtype: str | None = None

    @property
    def family(self) -> str:
        """What it is, in a word or two."""
        return f"a {self.model_type} of transformers" if self.origin == "transformers" else "a factory's module"


def is_factory(name: str) -> bool:
    """Whether a name is of the form `package.module:attribute`."""
    return _FACTORY.fullmatch(name) is not None


def factory(name: str) -> ForeignSource:
    """The source that `package.module:attribute` names."""
    return ForeignSource(name=name, origin="factory", address=name)


def from_config(entries: Mapping, path: Path, name: str) -> ForeignSource:
    """The source in a `config.json` that is no BERT's.

    Raises ConfigError for sizes that no model has.
    """
    model_type = entries["model_type"].value
    where = f"{path}:{entries['model_type'].line}"
    if not isinstance(model_type, str) or not re.fullmatch(r"[\w.-]{1,60}", model_type):
        raise ConfigError("model_type must be the name of a model family, such as bert or roberta", where=where)
    for key, entry in entries.items():
        _check(key, entry.value, f"{path}:{entry.line}")
    config = entries.plain()
    dtype = config.get("torch_dtype", config.get("dtype"))
    return ForeignSource(
        name=name,
        origin="transformers",
        architecture=_architecture(config.get("architectures")),
        model_type=model_type,
        path=path,
        line=entries["model_type"].line,
        config=config,
        stored_dtype=dtype if isinstance(dtype, str) else None,
    )


def _architecture(names: Any) -> str | None:
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _check(key: str, value: Any, where: str) -> None:
    """Refuse what would take minutes or gigabytes to build."""
    if isinstance(value, dict):
        for inner, item in value.items():
            _check(str(inner), item, where)
    elif isinstance(value, list):
        for item in value:
            _check(key, item, where)
    elif isinstance(value, int):
        most = MAX_LABELS if key == "num_labels" else MAX_LAYERS if _MODULES.search(key) else MAX_SIZE
        if abs(value) > most:
            shown = f"{value:,}" if value.bit_length() < 100 else "an integer of more than 30 digits"
            raise ConfigError(f"{key[:60]} may be at most {most:,} here; got {shown}", where=where, field=key)
