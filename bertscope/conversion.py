"""Preset YAML <-> config.json, without loss either way.

A config.json has no place for what only a preset says (description, hub_names, add_pooling_layer, expected):
it stands there under "bertscope". A preset has no place in `config` for members that shape no BERT: they stand
under `extra`. Members that decide a field of the configuration (id2label, torchscript) stand there too, and the
field that they decide in `config`; in `extra`, model_type null means that the config.json did not say it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from bertscope.config import RULES, BertConfig
from bertscope.errors import ConfigError, MissingExtraError, SourceError
from bertscope.presets import Source, preset_of, read_preset
from bertscope.reading import SCALARS, TAG, read_mapping, read_text, read_yaml

MEMBER = "bertscope"
_PRESET_ONLY = ("description", "hub_names", "add_pooling_layer", "expected")
_ORDER = ("description", "hub_names", "architecture", "add_pooling_layer", "config", "extra", "expected")


def _decided(members: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that other members of a config.json decide."""
    fields = ("num_labels",) if members.get("id2label") is not None else ()
    return (*fields, "tie_word_embeddings", "return_dict") if members.get("torchscript") is True else fields


# ---- config.json -> preset ----------------------------------------------------------------------


def preset_data(members: Mapping[str, Any]) -> dict[str, Any]:
    """The members of a config.json as the keys of a preset."""
    raw, own = dict(members), members.get(MEMBER)
    preset = dict(own) if isinstance(own, Mapping) and set(own) <= set(_PRESET_ONLY) else {}
    if preset:
        del raw[MEMBER]
    names, decided = raw.get("architectures"), _decided(raw)
    preset["architecture"] = names[0] if names else "BertModel"
    fields = {name: value for name, value in raw.items() if name in RULES and name not in decided}
    extra = {name: value for name, value in raw.items() if name not in fields}
    if "architectures" not in raw:
        fields["architectures"] = []  # an empty list: the config.json names none
    elif not names:
        extra["architectures"] = fields.pop("architectures")
    elif len(names) == 1:
        del fields["architectures"]
    if fields.pop("model_type", None) is None:
        extra["model_type"] = None
    config = BertConfig.from_dict(raw)
    preset["config"] = fields | {name: getattr(config, name) for name in decided}
    preset |= {"extra": extra} if extra else {}
    return {key: preset[key] for key in _ORDER if key in preset}


class _Dumper(yaml.SafeDumper):
    """PyYAML's writer with the scalar rules that `reading` reads by beside its own: a text stays a text for both."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Lists stand inside their key."""
        return super().increase_indent(flow, False)


for _name, _pattern in SCALARS:
    _Dumper.add_implicit_resolver(TAG + _name, re.compile(f"(?:{_pattern.pattern})$"), None)
_Dumper.add_representer(float, lambda dumper, value: dumper.represent_scalar(f"{TAG}float", _float_text(value)))
_Dumper.add_representer(
    list, lambda dumper, value: dumper.represent_sequence(f"{TAG}seq", value, flow_style=_is_flat(value))
)


def _float_text(value: float) -> str:
    return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(value), repr(value))


def _is_flat(items: list[Any]) -> bool:
    return not any(isinstance(item, (list, dict)) for item in items)


def yaml_text(data: Mapping[str, Any]) -> str:
    """A preset's keys as YAML."""
    return yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6,
                     default_flow_style=False)  # fmt: skip


# ---- preset -> config.json ----------------------------------------------------------------------


def config_members(preset: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a preset as the members of a config.json, sorted as transformers writes them."""
    config, extra = dict(preset["config"] or {}), dict(preset.get("extra") or {})
    names = config.pop("architectures", [preset["architecture"]])
    if names and names[0] != preset["architecture"]:
        raise ConfigError(
            f"architecture is {preset['architecture']} and config.architectures begins with {names[0]}; change one"
        )
    members: dict[str, Any] = {"architectures": names} if names else {}
    decided = _decided(extra)
    members |= {"model_type": "bert"} | {name: value for name, value in config.items() if name not in decided}
    members |= extra
    if members["model_type"] is None:
        del members["model_type"]
    own = {key: preset[key] for key in _PRESET_ONLY if key in preset}
    members |= {MEMBER: own} if own else {}
    return dict(sorted(members.items()))


def json_text(members: Mapping[str, Any]) -> str:
    """Members as transformers writes a config.json."""
    return json.dumps(members, indent=2, ensure_ascii=False) + "\n"


# ---- files --------------------------------------------------------------------------------------


def converted(source: Source, to: str) -> str:
    """The file of a source as `json` or as `yaml`; raises ConfigError where it contradicts itself."""
    path = _path(source)
    data = read_mapping(path).plain()
    if to == "json":
        members = config_members(data)
        _compare(source.config, BertConfig.from_dict(members), path)
        return json_text(members)
    text = yaml_text(preset_data(data))
    _compare(source.config, preset_of(read_yaml(text, path), path).config, path)
    return text


def updated(source: Source, existing: Path) -> str:
    """The text of the preset `existing` with the values of a config.json; comments and form stay.

    What only a preset says stays too, unless the config.json carries it. Raises MissingExtraError without ruamel.yaml.
    """
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.util import load_yaml_guess_indent
    except ImportError:
        raise MissingExtraError(f"keeping the comments of {existing}", "convert",
                                otherwise="; or name a file that does not exist") from None  # fmt: skip
    read_preset(existing)
    text, data = read_text(existing), preset_data(read_mapping(_path(source)).plain())
    editor = YAML()
    editor.preserve_quotes, editor.width = True, 10**6  # type: ignore[assignment]
    document, indent, offset = load_yaml_guess_indent(text, yaml=editor)
    kept = {key: document[key] for key in _PRESET_ONLY if key in document and key not in data}
    _merge(document, data | kept)
    editor.indent(sequence=indent if offset else None, offset=offset)
    editor.line_break = "\r\n" if "\r\n" in text else "\n"  # type: ignore[assignment]
    out = StringIO()
    editor.dump(document, out)
    _compare(source.config, preset_of(read_yaml(out.getvalue(), existing), existing).config, existing)
    return out.getvalue()


def _merge(document: Any, data: Mapping[str, Any]) -> None:
    """Make the document say what `data` says, touching only what differs."""
    for key in [key for key in document if str(key) not in data]:
        keys = list(document)
        comment = _taken_below(document, key)
        del document[key]
        if key != keys[0]:
            _put_below(document, keys[keys.index(key) - 1], comment)
    last = next(reversed(document), None)
    comment = _taken_below(document, last) if set(data) - set(document) else ""
    for key, value in data.items():
        old = document.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            _merge(old, value)
        elif key not in document or old != value or isinstance(old, bool) != isinstance(value, bool):
            document[key] = value
    flat = [key for key, value in document.items() if not isinstance(value, (Mapping, list))]
    _put_below(document, flat[-1] if flat else last, comment)


def _taken_below(document: Any, key: Any) -> str:
    """The comment on the lines below a key, which ruamel.yaml keeps with that key; taken off it."""
    slots = document.ca.items.get(key) or [None] * 4
    beside, _, below = slots[2].value.partition("\n") if slots[2] is not None else ("", "", "")
    if below:
        slots[2].value = f"{beside}\n"
    return below


def _put_below(document: Any, key: Any, comment: str) -> None:
    """Put a comment on the lines below a key."""
    from ruamel.yaml.error import CommentMark
    from ruamel.yaml.tokens import CommentToken

    if comment:
        slots = document.ca.items.setdefault(key, [None] * 4)
        beside = slots[2].value.rstrip("\n") if slots[2] is not None else ""
        slots[2] = CommentToken(f"{beside}\n{comment}", CommentMark(len(beside) and 1), None)


def _path(source: Source) -> Path:
    if source.path is None or source.path.suffix not in (".json", ".yaml", ".yml"):
        raise SourceError(f"{source.name} is no file to convert; give a preset (.yaml) or a config.json")
    return source.path


def _compare(one: BertConfig, other: BertConfig, path: Path) -> None:
    """Both files must mean the same; the class's name stands in `architecture` of a preset."""
    one, other = (replace(config, architectures=None) for config in (one, other))
    for name in RULES:
        if getattr(one, name) != getattr(other, name):
            said, by_extra = getattr(one, name), getattr(other, name)
            raise ConfigError(f"{path} says {name} {said!r} in config and {by_extra!r} by 'extra'; change one")
