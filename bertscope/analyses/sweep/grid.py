"""The grid of a sweep: a YAML file with one value or a list for each setting, and the points of their product."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from bertscope.errors import BertscopeError, SourceError
from bertscope.settings.resolve import Layer, Point, check_use, merged, points, unknown_setting
from bertscope.settings.rows import rows
from bertscope.settings.run_config import DEFAULTS, SWEPT
from bertscope.sources.find import DEFAULT_MODEL, find
from bertscope.sources.other_models import refuse_code
from bertscope.text_files import read_text, read_yaml, readable

MAX_POINTS = 100_000  # a row has 1.5 KB, and a point takes 0.1 s or more
KEYS = rows(*SWEPT)
_GRID_FORM = "a grid is lines of 'key: value' or 'key: [value, value]'"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The settings of a grid with their values, in the order of its file."""

    path: Path
    layer: Layer

    @property
    def values(self) -> dict[str, tuple[Any, ...]]:
        """Return the values of each setting, with the defaults of a sweep and what they imply."""
        usual = Layer({"model": DEFAULT_MODEL, **DEFAULTS["sweep"]}, is_default=True, records=SWEPT)
        return merged((self.layer, usual), KEYS)

    @property
    def varied(self) -> dict[str, list[Any]]:
        """Return the settings with several values."""
        return {name: [plain(value) for value in values] for name, values in self.layer.items() if len(values) > 1}

    def points(self) -> Iterator[Point]:
        """Yield each point in the order of the grid: the settings of its last line vary first.

        Raises SettingError for a setting that has an effect at no point.
        """
        used: set[str] = set()
        for point in points(self.values, SWEPT):
            used |= point.used
            yield point
        check_use((self.layer,), self.values, used, SWEPT)


def plain(value: Any) -> Any:
    """Return the value of a setting as JSON has it: a list for a tuple."""
    return list(value) if isinstance(value, tuple) else value


def read_grid(path: str | os.PathLike[str], *, allow_code: bool = False) -> Grid:
    """Return the grid in a file.

    Raises ConfigError with file and line for an unknown key, a value that the key does not take, an unknown model,
    a model that is code without `allow_code`, and more than MAX_POINTS points.
    """
    file = Path(path)
    if file.suffix not in (".yaml", ".yml"):
        raise SourceError(f"{file} is no .yaml file; {_GRID_FORM}")
    with readable(path):
        if not file.exists():
            raise SourceError(f"{file} does not exist; {_GRID_FORM}")
        entries = read_yaml(read_text(file), file, form=_GRID_FORM)
    for name, entry in entries.items():
        if name not in KEYS:
            raise entry.error(unknown_setting(name, KEYS), name)
    layer = Layer(
        entries.plain(), compared=KEYS, where={name: entry.where for name, entry in entries.items()}, records=SWEPT
    )
    for name in layer.get("model", ()):
        try:
            found = find(name)
        except BertscopeError as error:
            raise error.at(entries["model"].where) from None
        refuse_code(found, entries["model"], allow_code=allow_code)
    number = prod(map(len, layer.values()))
    if number > MAX_POINTS:
        sizes = " x ".join(f"{len(found)} {name}" for name, found in layer.items() if len(found) > 1)
        raise SourceError(f"{number:,} points ({sizes}); a grid has at most {MAX_POINTS:,}", where=f"{file}:1")
    return Grid(path=file, layer=layer)
