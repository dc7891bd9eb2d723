"""Presets: one YAML file each, with a complete configuration and expected values.

description: BERT-base, cased English
hub_names: [google-bert/bert-base-cased]
architecture: BertForMaskedLM
add_pooling_layer: false        # BertModel only
config: {vocab_size: 28996, ...}
extra: {directionality: bidi}   # other members of a config.json, for `convert` only
expected: {distinct_params: 108340804, ...}   # more in `expectations`
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any, TypeGuard

from bertscope.config import ARCHITECTURES, RULES, BertConfig, unknown_architecture, unknown_field
from bertscope.errors import ConfigError, suggestion
from bertscope.sources.bert import BertSource
from bertscope.sources.expectations import read_expectations
from bertscope.text_files import Entry, Mapping, read_mapping, with_lines

KEYS = ("description", "hub_names", "architecture", "add_pooling_layer", "config", "extra", "expected")
PRESET_ONLY = ("description", "hub_names", "add_pooling_layer", "expected")
MEMBER = "bertscope"  # the member of a config.json with the keys that only a preset has


def preset_dir() -> Path:
    """Return the folder of presets: inside an installed wheel, or at the top of a checkout."""
    inside = Path(str(files("bertscope") / "_presets"))
    return inside if inside.is_dir() else Path(__file__).resolve().parents[2] / "presets"


def preset_paths() -> dict[str, Path]:
    """Return the files of presets by their names, in the order of the names."""
    return {path.stem: path for path in sorted(preset_dir().glob("*.yaml"))}


def read_preset(path: Path) -> BertSource:
    """Return the preset in a YAML file; raises ConfigError or SourceError with file and line."""
    return preset_of(read_mapping(path), path)


def preset_of(entries: Mapping, path: Path) -> BertSource:
    """Return the preset in the entries of a file."""
    _check_keys(entries, KEYS, path, "the preset")
    for needed in ("architecture", "config"):
        if needed not in entries:
            raise ConfigError(
                f"the key {needed!r} is missing; a preset needs architecture and config", where=f"{path}:1"
            )
    config, lines = _config(entries["config"], path)
    if "extra" in entries:
        _mapping(entries["extra"], path, "extra")
    return BertSource(
        name=path.stem,
        path=path,
        config=config,
        config_lines=lines,
        architecture=_choice(entries["architecture"], path),
        **_preset_only(entries, path),
    )


def is_own_member(value: Any) -> TypeGuard[dict[str, Any]]:
    """Return True if the member "bertscope" of a config.json is from `convert`, not from another project."""
    return isinstance(value, dict) and set(value) <= set(PRESET_ONLY)


def member_of(members: Mapping, path: Path) -> dict[str, Any]:
    """Return the keys that only a preset has, from the member "bertscope" of a config.json, if it is from `convert`."""
    entry = members.get(MEMBER)
    if entry is None or not is_own_member(entry.value):
        return {}
    return _preset_only(with_lines(entry.value, entry.line), path)


def _preset_only(entries: Mapping, path: Path) -> dict[str, Any]:
    return {
        "add_pooling_layer": _boolean(entries.get("add_pooling_layer"), path),
        "description": _text(entries.get("description"), path),
        "hub_names": _names(entries.get("hub_names"), path),
        "expected": tuple(read_expectations(entries.get("expected"), path)),
    }


def _config(entry: Entry, path: Path) -> tuple[BertConfig, dict[str, int]]:
    found = _mapping(entry, path, "config")
    lines = {name: item.line for name, item in found.items()}
    for name, item in found.items():
        if name not in RULES:
            raise unknown_field(name).at(f"{path}:{item.line}")
        if isinstance(item.value, Mapping) and RULES[name].kind is not dict:
            raise ConfigError(f"{name} must be {RULES[name].allowed()}; got a mapping", where=f"{path}:{item.line}")
    try:
        return BertConfig(**found.plain()), lines
    except ConfigError as error:
        raise error.at(f"{path}:{lines.get(error.field, entry.line)}") from None


def _check_keys(entries: Mapping, known: tuple[str, ...], path: Path, place: str) -> None:
    for key, entry in entries.items():
        if key not in known:
            hint = suggestion(key, known)
            raise ConfigError(f"unknown key {key!r} in {place}; {hint}", where=f"{path}:{entry.line}", field=key)


def _mapping(entry: Entry, path: Path, name: str) -> Mapping:
    if not isinstance(entry.value, Mapping):
        raise ConfigError(f"{name} must hold 'key: value' lines", where=f"{path}:{entry.line}", field=name)
    return entry.value


def _choice(entry: Entry, path: Path) -> str:
    if not isinstance(entry.value, str) or entry.value not in ARCHITECTURES:
        raise unknown_architecture(entry.value).at(f"{path}:{entry.line}")
    return entry.value


def _boolean(entry: Entry | None, path: Path) -> bool:
    if entry is None:
        return True
    if not isinstance(entry.value, bool):
        raise ConfigError("add_pooling_layer must be true or false", where=f"{path}:{entry.line}")
    return entry.value


def _text(entry: Entry | None, path: Path) -> str:
    if entry is None:
        return ""
    if not isinstance(entry.value, str):
        raise ConfigError("description must be text; put it in quotes", where=f"{path}:{entry.line}")
    return entry.value


def _names(entry: Entry | None, path: Path) -> tuple[str, ...]:
    if entry is None:
        return ()
    value = entry.value
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(
            "hub_names must be a list of names such as google-bert/bert-base-cased", where=f"{path}:{entry.line}"
        )
    return tuple(value)
