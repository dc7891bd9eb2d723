"""Conversion between preset YAML and config.json.

The keys that only a preset has (description, hub_names, add_pooling_layer, expected) are written to a config.json
only on request, under "bertscope"; then nothing is lost either way. The members of a config.json that are no fields
of a BertConfig are written to a preset under `extra`. So are members that determine a field (id2label, torchscript),
while the field is written to `config`. In `extra`, model_type null means that the config.json has no model_type.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import yaml

from bertscope.config import RULES, BertConfig
from bertscope.errors import ConfigError, MissingExtraError, SelectionError, SourceError
from bertscope.sources.bert import BertSource
from bertscope.sources.expectations import MEASURES
from bertscope.sources.find import load
from bertscope.sources.presets import KEYS, MEMBER, PRESET_ONLY, is_own_member, preset_of, read_preset
from bertscope.text_files import MAX_YAML_BYTES, SCALARS, TAG, read_mapping, read_text, read_yaml, readable
from bertscope.units import json_text

_NUMBERS = re.compile(r"[\d-]+")


def _decided(members: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields that other members of a config.json determine."""
    fields = ("num_labels",) if members.get("id2label") is not None else ()
    return (*fields, "tie_word_embeddings", "return_dict") if members.get("torchscript") is True else fields


# ---- config.json -> preset ----------------------------------------------------------------------


def preset_data(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members of a config.json as the keys of a preset; raises SourceError for more than a preset holds."""
    if len(json.dumps(members)) > MAX_YAML_BYTES:
        raise SourceError(f"the members take more than the {MAX_YAML_BYTES >> 10} KiB of a preset; remove some")
    raw, own = dict(members), members.get(MEMBER)
    preset = dict(own) if is_own_member(own) else {}
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
    return {key: preset[key] for key in KEYS if key in preset}


class _Dumper(yaml.SafeDumper):
    """PyYAML's writer with the additional scalar rules of `text_files`: each reads a string back as a string."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent lists below their key."""
        super().increase_indent(flow, False)

    def write_double_quoted(self, text: str, split: bool = True) -> None:
        """Escape all but ASCII if anything has to be escaped: PyYAML does not escape overrides of text direction."""
        self.allow_unicode, kept = text.isprintable(), self.allow_unicode
        super().write_double_quoted(text, split)
        self.allow_unicode = kept


for _name, _pattern in SCALARS:
    _Dumper.add_implicit_resolver(TAG + _name, re.compile(f"(?:{_pattern.pattern})$"), None)
_Dumper.add_representer(str, lambda dumper, value: dumper.represent_scalar(f"{TAG}str", value, _quotes(value)))
_Dumper.add_representer(float, lambda dumper, value: dumper.represent_scalar(f"{TAG}float", _float_text(value)))
_Dumper.add_representer(
    list, lambda dumper, value: dumper.represent_sequence(f"{TAG}seq", value, flow_style=_is_flat(value))
)


def _quotes(text: str) -> str | None:
    """Return double quotes, which escape, for text that a reader may fold or drop; None leaves the style to PyYAML."""
    return None if text.isprintable() else '"'


def _float_text(value: float) -> str:
    return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(repr(value), repr(value))


def _is_flat(items: list[Any]) -> bool:
    return not any(isinstance(item, (list, dict)) for item in items)


def yaml_text(data: Mapping[str, Any]) -> str:
    """Return a preset's keys as YAML."""
    text: str = yaml.dump(dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6,
                          default_flow_style=False)  # fmt: skip
    return text


# ---- preset -> config.json ----------------------------------------------------------------------


def config_members(preset: Mapping[str, Any], *, lossless: bool = True) -> dict[str, Any]:
    """Return the keys of a preset as the members of a config.json, sorted as transformers writes them.

    With `lossless` the member "bertscope" has the keys that only a preset has.
    """
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
    own = {key: preset[key] for key in PRESET_ONLY if key in preset and lossless}
    members |= {MEMBER: own} if own else {}
    return dict(sorted(members.items()))


# ---- files --------------------------------------------------------------------------------------


def convert(model: str, to: str | None = None, *, lossless: bool = False) -> str:
    """Return a preset as a config.json, or the reverse; raises ConfigError for a file that contradicts itself.

    With `lossless` the config.json has the keys that only a preset has, under "bertscope".

    >>> print(bertscope.convert("bert-tiny"))
    {
      ...
      "hidden_size": 128,...
    """
    source = load(model)
    return converted(source, direction(source, to), lossless=lossless)


def direction(source: BertSource, to: str | None = None) -> str:
    """Return `json` or `yaml`, the format to convert to; raises SelectionError if `to` is the format of the source."""
    given = "json" if source_path(source).suffix == ".json" else "yaml"
    wanted = to or ("json" if given == "yaml" else "yaml")
    if wanted == given or wanted not in ("json", "yaml"):
        raise SelectionError(f"{source.path} is {given}; to takes the other of json and yaml")
    return wanted


def converted(source: BertSource, to: str, *, lossless: bool = False) -> str:
    """Return the text of a source as `json` or as `yaml`."""
    path = source_path(source)
    data = read_mapping(path).plain()
    if to == "json":
        members = config_members(data, lossless=lossless)
        compare(source.config, BertConfig.from_dict(members), path)
        return json_text(members)
    text = yaml_text(preset_data(data))
    compare(source.config, preset_of(read_yaml(text, path), path).config, path)
    return text


def left_out(source: BertSource) -> tuple[str, ...]:
    """Return the keys of a preset that a config.json has only if it is written with `lossless`."""
    data = read_mapping(source_path(source)).plain()
    return tuple(key for key in PRESET_ONLY if key in data)


def source_path(source: BertSource) -> Path:
    """Return the file of a source; raises SourceError if it has none that can be converted."""
    if source.lora is not None:
        raise SourceError(f"{source.path} is an adapter, which no preset describes; convert its base model")
    if source.path is None or source.path.suffix not in (".json", ".yaml", ".yml"):
        raise SourceError(f"{source.name} is no file to convert; give a preset (.yaml) or a config.json")
    return source.path


def compare(one: BertConfig, other: BertConfig, path: Path) -> None:
    """Raise ConfigError if two configurations differ in a field other than `architectures`."""
    one, other = (replace(config, architectures=None) for config in (one, other))
    for name in RULES:
        if getattr(one, name) != getattr(other, name):
            said, by_extra = getattr(one, name), getattr(other, name)
            raise ConfigError(f"{path} says {name} {said!r} in config and {by_extra!r} by 'extra'; change one")


def updated(source: BertSource, existing: Path) -> str:
    """Return the text of the preset `existing` with the values of a config.json; comments and form stay.

    Keys that only a preset has stay, unless the config.json has them. Raises MissingExtraError without ruamel.yaml.
    """
    read_preset(existing)
    data = preset_data(read_mapping(source_path(source)).plain())

    def merge(document: Any) -> None:
        """Merge the values into the document of ruamel.yaml."""
        kept = {key: document[key] for key in PRESET_ONLY if key in document and key not in data}
        _merge(document, data | kept)

    text = _edited(existing, merge, "; or name a file that does not exist")
    compare(source.config, preset_of(read_yaml(text, existing), existing).config, existing)
    return text


def with_expected(path: Path, changes: Mapping[str, Any]) -> str:
    """Return the text of a YAML file with these changes under `expected`; comments and order stay.

    The keys are those of expectations (`groups.encoder`); None removes one; `ties` are replaced by a mapping. Raises
    MissingExtraError without ruamel.yaml, and SourceError for a form that it does not keep.
    """
    data = read_mapping(path).plain()
    expected = data["expected"]
    for key, value in changes.items():
        table, _, name = key.partition(".")
        if not name:
            expected[table] = value
        elif table in MEASURES:
            expected[table][name][MEASURES[table]] = value
        elif value is None:
            expected[table].pop(name)
        else:
            expected[table][name] = value

    def merge(document: Any) -> None:
        """Merge the values into the document of ruamel.yaml; a row with other numbers of layers keeps its place."""
        gone = [key for key, value in changes.items() if value is None]
        new = [key for key, value in changes.items() if value is not None]
        for key in gone:
            table, _, name = key.partition(".")
            same = next((other for other in new if _NUMBERS.sub("", other) == _NUMBERS.sub("", key)), "")
            _rename(document["expected"][table], name, same.partition(".")[2])
        _merge(document["expected"], expected)

    text = _edited(path, merge, "; or change the values by hand")
    if read_yaml(text, path).plain() != data:
        raise SourceError(f"{path} has a form that is not kept; write its expectations as plain 'key: value' lines")
    return text


def _rename(table: Any, old: str, new: str) -> None:
    """Give an entry of a mapping of ruamel.yaml another key with the same place and comments."""
    if new and old in table and new not in table:
        place, comments = list(table).index(old), table.ca.items.pop(old, None)
        table.insert(place, new, table.pop(old))
        if comments is not None:
            table.ca.items[new] = comments


def _edited(path: Path, edit: Callable[[Any], None], otherwise: str) -> str:
    """Return the text of a YAML file after an edit of its document; MissingExtraError ends with `otherwise`."""
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.util import load_yaml_guess_indent
    except ImportError:
        raise MissingExtraError(f"keeping the comments of {path}", "convert", otherwise=otherwise) from None
    with readable(path):
        whole, editor, out = read_text(path), YAML(), StringIO()
        editor.preserve_quotes, editor.width = True, 10**6
        document, indent, offset = load_yaml_guess_indent(whole.replace("\r\n", "\n"), yaml=editor)
        edit(document)
        editor.indent(sequence=indent if offset else None, offset=offset)
        editor.dump(document, out)
    return out.getvalue().replace("\n", "\r\n" if "\r\n" in whole else "\n")


def _merge(document: Any, data: Mapping[str, Any]) -> None:
    """Give the document the content of `data`, changing only what differs."""
    for key in [key for key in document if str(key) not in data]:
        keys = list(document)
        comment = _taken_below(document, key)
        del document[key]
        if key != keys[0]:
            _put_below(document, keys[keys.index(key) - 1], comment)
    last = next(reversed(document), None)
    comment = _taken_below(document, last) if set(data) - set(map(str, document)) else ""
    own = {str(key): key for key in document}  # a key such as 0 is a number in YAML, a string in JSON
    for name, value in data.items():
        key = own.get(name, name)
        old = document.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            _merge(old, value)
        elif key not in document or old != value or isinstance(old, bool) != isinstance(value, bool):
            document[key] = value
    flat = [key for key, value in document.items() if not isinstance(value, (Mapping, list))]
    _put_below(document, flat[-1] if flat else last, comment)


def _taken_below(document: Any, key: Any) -> str:
    """Remove the comment on the lines below a key, which ruamel.yaml stores with that key, and return it."""
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
        mark = slots[2].start_mark if slots[2] is not None else CommentMark(0)
        slots[2] = CommentToken(f"{beside}\n{comment}", mark, None)
