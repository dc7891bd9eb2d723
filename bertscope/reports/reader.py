"""The reader of reports in JSON: it builds each dataclass by the types of its fields."""

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from bertscope.errors import SourceError, one_line, suggestion
from bertscope.reports.base import SCHEMA
from bertscope.reports.json import report_classes

_WORDS: dict[Any, str] = {int: "an integer", float: "a number", str: "text", bool: "true or false", type(None): "null"}
_REMEDY = "give what `--format json` or `bertscope.to_json` wrote"


def from_json(text: str | bytes) -> Any:
    """Return the report that `--format json` or `to_json` wrote; raise SourceError for other text."""
    try:
        data = json.loads(text)
    except RecursionError:
        raise SourceError(f"the JSON is nested too deep for a report; {_REMEDY}") from None
    except ValueError as error:
        raise SourceError(f"the report is not JSON: {error}; {_REMEDY}") from None
    if not isinstance(data, dict):
        raise SourceError(f"a report must be a JSON object; got {_shown(data)}; {_REMEDY}")
    kind = data.get("kind")
    known = report_classes()
    if not isinstance(kind, str) or kind not in known:
        raise SourceError(f"no report of kind {_shown(kind)}; {suggestion(str(kind), known)}")
    if data.get("schema") != SCHEMA or isinstance(data["schema"], bool):
        raise SourceError(f"schema {_shown(data.get('schema'))} of the report is unknown; this version reads {SCHEMA}")
    fields = {name: value for name, value in data.items() if name not in ("schema", "kind")}
    fitting = (item for item in known[kind] if fields.keys() <= _hints(item).keys())
    try:
        return typed(next(fitting, known[kind][0]), fields, kind)
    except RecursionError:
        raise SourceError(f"the {kind} report is nested too deep; {_REMEDY}") from None


def typed(hint: Any, value: Any, where: str) -> Any:
    """Return JSON data as a value of the type `hint`: a dataclass, a tuple, a dict, a union, a Literal, a scalar.

    Raises SourceError with the place below `where` for data of another type.
    """
    if hint is Any:
        return value
    if hint in _WORDS:
        accepted = (int, float) if hint is float else hint
        if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
            raise _unlike(hint, value, where)
        return value
    if dataclasses.is_dataclass(hint):
        return _object(hint, value, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _union(hint, arguments, value, where)
    if origin is typing.Literal and isinstance(value, str) and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        # `tuple[int, ...]` has any length, `tuple[int, str]` two elements
        each = arguments[:1] * len(value) if arguments[-1:] == (Ellipsis,) else arguments
        if len(each) == len(value):
            return tuple(typed(kind, value[place], f"{where}[{place}]") for place, kind in enumerate(each))
    if origin is dict and isinstance(value, dict):
        return {key: typed(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    raise _unlike(hint, value, where)


@functools.cache
def _hints(item: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(item)
    return {field.name: hints[field.name] for field in dataclasses.fields(item)}


def _object(item: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise _unlike(item, value, where)
    hints = _hints(item)
    for name in value.keys() - hints.keys():
        raise SourceError(f"{where} has no field {_shown(name)}; {suggestion(name, hints)}")
    found = {name: typed(hints[name], content, f"{where}.{name}") for name, content in value.items()}
    for field in dataclasses.fields(item):
        if field.name not in found and field.default is field.default_factory is dataclasses.MISSING:
            raise SourceError(f"{where} lacks the field {field.name!r}; {_REMEDY}")
    return item(**found)


def _union(hint: Any, arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    others = [argument for argument in arguments if argument is not type(None)]
    if len(others) == 1:
        return typed(others[0], value, where)
    for argument in others:
        with suppress(SourceError):
            return typed(argument, value, where)
    raise _unlike(hint, value, where)


def _unlike(hint: Any, value: Any, where: str) -> SourceError:
    return SourceError(f"{where} must be {_described(hint)}; got {_shown(value)}")


def _described(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(_described, arguments))
    if origin is typing.Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin is tuple:
        return "a list" if arguments[-1:] == (Ellipsis,) else f"a list of {len(arguments)}"
    return _WORDS.get(hint, "an object")


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    return one_line(json.dumps(value, ensure_ascii=False), limit=40)
