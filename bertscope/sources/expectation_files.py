"""`*.bertscope.yaml`: a model, by name or by configuration, and its expected values.

model: bert-base-cased          # as on the command line; a path is relative to this file
architecture: BertForMaskedLM   # these three as the options of that name; optional
attention: sdpa
add_pooling_layer: true
expected: ...                   # as in `expectations`

With `config` instead of `model` it has the form of a preset.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bertscope.config import ARCHITECTURES, ATTENTION_KERNELS
from bertscope.errors import BertscopeError, BertscopeWarning, ConfigError, SourceError, suggestion
from bertscope.sources.bert import BertSource
from bertscope.sources.expectations import read_expectations
from bertscope.sources.find import load
from bertscope.sources.presets import preset_of, preset_paths
from bertscope.text_files import Entry, Mapping, read_mapping, readable

SUFFIXES = (".bertscope.yaml", ".bertscope.yml")
_KEYS = ("description", "model", "architecture", "attention", "add_pooling_layer", "expected")
_NOT_OURS = ("node_modules", "__pycache__")


def is_expectation_file(name: str | os.PathLike[str]) -> bool:
    """Return True if the name is that of an expectation file."""
    return os.fspath(name).endswith(SUFFIXES)


def read_expectation_file(path: Path) -> BertSource:
    """Return the model in the file with its expected values; `path` and lines are those of the file.

    Raises ConfigError or SourceError with file and line.
    """
    entries = read_mapping(path)
    name = next((path.name.removesuffix(suffix) for suffix in SUFFIXES if path.name.endswith(suffix)), path.stem)
    if "config" in entries and "model" not in entries:
        return replace(preset_of(entries, path), name=name)
    for key, entry in entries.items():
        if key not in _KEYS:
            words = "give model or config, not both" if key == "config" else suggestion(key, _KEYS)
            raise ConfigError(f"unknown key {key!r} in an expectation file with a model; {words}",
                              where=f"{path}:{entry.line}", field=key)  # fmt: skip
    if "model" not in entries:
        raise ConfigError("the key 'model' is missing; name one, or describe one by architecture and config",
                          where=f"{path}:1")  # fmt: skip
    source = _model(entries, path)
    return replace(source, name=name, path=path, expected=tuple(read_expectations(entries.get("expected"), path)))


def _model(entries: Mapping, path: Path) -> BertSource:
    settings = {
        "architecture": _one_of(entries, "architecture", ARCHITECTURES, path),
        "attention": _one_of(entries, "attention", ATTENTION_KERNELS, path),
        "add_pooling_layer": _one_of(entries, "add_pooling_layer", (True, False), path),
    }
    try:
        return load(_named(entries["model"], path), **settings)  # type: ignore[arg-type]
    except BertscopeError as error:
        raise error.at(f"{path}:{entries['model'].line}") from None


def _named(entry: Entry, path: Path) -> str:
    """Return the argument for `load`; a path is relative to the file's folder."""
    if not isinstance(entry.value, str) or not entry.value:
        raise ConfigError("model must be a preset's name or a path", where=f"{path}:{entry.line}")
    relative = path.parent / entry.value
    if entry.value in preset_paths() or entry.value.startswith("~"):
        return entry.value
    with readable(entry.value):
        is_path = entry.value.endswith((".yaml", ".yml", ".json")) or entry.value.startswith(".") or relative.exists()
    return str(relative) if is_path else entry.value


def _one_of(entries: Mapping, key: str, allowed: tuple[object, ...], path: Path) -> object:
    if key not in entries:
        return None
    entry = entries[key]
    if not any(entry.value is value or (isinstance(value, str) and entry.value == value) for value in allowed):
        words = ", ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in allowed)
        raise ConfigError(f"{key} must be one of {words}", where=f"{path}:{entry.line}", field=key)
    return entry.value


def expectation_files(folder: Path) -> Iterator[str]:
    """Yield the expectation files in a folder and below it, but not in hidden folders and virtual environments.

    Raises SourceError if the folder itself cannot be listed; a folder below it gives a warning.
    """

    def unreadable(error: OSError) -> None:
        if error.filename == os.fspath(folder):
            raise error
        warnings.warn(f"not searched: {error.filename}: {error.strerror}", BertscopeWarning, stacklevel=2)

    with readable(folder):
        for parent, folders, files in os.walk(folder, onerror=unreadable):
            folders[:] = sorted(name for name in folders if not _is_foreign(parent, name))
            yield from (os.path.join(parent, name) for name in sorted(files) if is_expectation_file(name))


def _is_foreign(parent: str, name: str) -> bool:
    return name.startswith(".") or name in _NOT_OURS or os.path.exists(os.path.join(parent, name, "pyvenv.cfg"))


def files_to_check(names: list[str]) -> list[str]:
    """Return the names, each folder replaced by the expectation files in it; all presets if there are no names.

    A folder without such files stays: it may be a model's.
    """
    found: list[str] = []
    for name in names:
        inside = list(expectation_files(Path(name))) if os.path.isdir(name) else []
        found += inside or [name]
    return found if names else list(preset_paths())


def load_expected(name: str, *, architecture: str | None = None) -> BertSource:
    """Return the source of an expectation file, or of any name for `load`; `architecture` overrides its class."""
    if not is_expectation_file(name):
        return load(name, architecture=architecture)
    source = read_expectation_file(Path(name))
    if architecture is None:
        return source
    if architecture not in ARCHITECTURES:
        raise SourceError(f"unknown architecture {architecture[:60]!r}; allowed: {', '.join(ARCHITECTURES)}")
    return replace(source, architecture=architecture)
