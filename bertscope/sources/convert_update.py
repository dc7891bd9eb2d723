"""The values of a config.json into a preset that exists, whose comments and form stay."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from bertscope.errors import MissingExtraError
from bertscope.sources.convert import compare, preset_data, source_path
from bertscope.sources.presets import PRESET_ONLY, Source, preset_of, read_preset
from bertscope.text_files import read_mapping, read_text, read_yaml


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
    whole, data = read_text(existing), preset_data(read_mapping(source_path(source)).plain())
    editor = YAML()
    editor.preserve_quotes, editor.width = True, 10**6
    document, indent, offset = load_yaml_guess_indent(whole.replace("\r\n", "\n"), yaml=editor)
    kept = {key: document[key] for key in PRESET_ONLY if key in document and key not in data}
    _merge(document, data | kept)
    editor.indent(sequence=indent if offset else None, offset=offset)
    out = StringIO()
    editor.dump(document, out)
    text = out.getvalue().replace("\n", "\r\n" if "\r\n" in whole else "\n")
    compare(source.config, preset_of(read_yaml(text, existing), existing).config, existing)
    return text


def _merge(document: Any, data: Mapping[str, Any]) -> None:
    """Make the document say what `data` says, touching only what differs."""
    for key in [key for key in document if str(key) not in data]:
        keys = list(document)
        comment = _taken_below(document, key)
        del document[key]
        if key != keys[0]:
            _put_below(document, keys[keys.index(key) - 1], comment)
    last = next(reversed(document), None)
    comment = _taken_below(document, last) if set(data) - set(map(str, document)) else ""
    own = {str(key): key for key in document}  # a key such as 0 is a number here, and a text in JSON
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
        mark = slots[2].start_mark if slots[2] is not None else CommentMark(0)
        slots[2] = CommentToken(f"{beside}\n{comment}", mark, None)
