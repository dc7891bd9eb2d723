"""The JSON Schema (draft 2020-12) and the reader of every report, both derived from its dataclasses' fields.

Every report in `bertscope.reports` has both; a new report needs no registration.
"""

import dataclasses
import functools
import inspect
import json
import pkgutil
import types
import typing
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from bertscope import reports
from bertscope.errors import SelectionError, SourceError, one_line, suggestion, typed_arguments
from bertscope.reports.base import SCHEMA
from bertscope.reports.tool import SchemaRow, SchemasReport

DIALECT = "https://json-schema.org/draft/2020-12/schema"
# The type in a schema, and in an error.
_SIMPLE: dict[Any, tuple[str, str]] = {int: ("integer", "an integer"), float: ("number", "a number")}
_SIMPLE |= {str: ("string", "text"), bool: ("boolean", "true or false"), type(None): ("null", "null")}
_LARGEST = 2**200  # no count is larger; one above 2**1024 is no float, in which shares and units are computed
_REMEDY = "give what `--format json` or `bertscope.to_json` wrote"


def report_classes() -> dict[str, tuple[type, ...]]:
    """Return the report classes of each kind."""
    classes: dict[str, tuple[type, ...]] = {}
    for module in pkgutil.iter_modules(reports.__path__):
        for item in vars(import_module(f"{reports.__name__}.{module.name}")).values():
            if isinstance(item, type) and dataclasses.is_dataclass(item) and hasattr(item, "kind"):
                known = classes.get(item.kind, ())
                classes[item.kind] = known if item in known else (*known, item)
    return dict(sorted(classes.items()))


def schemas() -> SchemasReport:
    """Return the report that lists all kinds, each with one sentence."""
    texts = ((kind, tuple(item.__name__ for item in of), _sentence(of[0])) for kind, of in report_classes().items())
    return SchemasReport(rows=tuple(SchemaRow(report=kind, classes=of, description=text) for kind, of, text in texts))


@typed_arguments
def schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of one kind of report; raise SelectionError for an unknown kind.

    >>> bertscope.schema("tree")["title"]
    'bertscope tree'
    """
    known = report_classes()
    if kind not in known:
        raise SelectionError(f"no report of kind {kind[:60]!r}; {suggestion(kind, known)}")
    definitions: dict[str, Any] = {}
    bodies = [_object_schema(item, definitions, report=kind) for item in known[kind]]
    return {
        "$schema": DIALECT,
        "$id": f"urn:bertscope:{kind}:{SCHEMA}",
        "title": f"bertscope {kind}",
        **(bodies[0] if len(bodies) == 1 else {"oneOf": bodies}),
        "$defs": dict(sorted(definitions.items())),
    }


def _object_schema(item: type, definitions: dict[str, Any], *, report: str = "") -> dict[str, Any]:
    """Return a dataclass's schema: an object with all fields; a report also has `schema` and `kind`."""
    head = {"schema": {"const": SCHEMA}, "kind": {"const": report}} if report else {}
    properties = head | {name: _type_schema(hint, definitions) for name, hint in _hints(item).items()}
    return {
        "description": _sentence(item),
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _type_schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if hint is Any:
        return {}
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint][0]}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = {}  # a placeholder, for a class that contains itself
            definitions[hint.__name__] = _object_schema(hint, definitions)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_type_schema(argument, definitions) for argument in arguments]}
    if origin is typing.Literal:
        return {"enum": [*arguments]}
    if origin is tuple and arguments[-1:] == (Ellipsis,):
        return {"type": "array", "items": _type_schema(arguments[0], definitions)}
    if origin is tuple:
        items = [_type_schema(argument, definitions) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type_schema(arguments[1], definitions)}
    raise TypeError(f"no JSON Schema for {hint!r}")


def _sentence(item: type) -> str:
    return " ".join((inspect.getdoc(item) or "").partition("\n\n")[0].split())


# ---- the reader ----


@typed_arguments
def from_json(text: str | bytes) -> Any:
    """Return the report that `--format json` or `to_json` wrote; raise SourceError for other text.

    >>> report = bertscope.count("bert-tiny")
    >>> bertscope.from_json(report.to_json()) == report
    True
    """
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
        version = _shown(data.get("schema"))
        raise SourceError(f"the report has schema {version}; this version reads {SCHEMA}: write the report again")
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
    if hint in _SIMPLE:
        accepted = (int, float) if hint is float else hint
        if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
            raise _unlike(hint, value, where)
        if isinstance(value, int) and abs(value) >= _LARGEST:
            raise SourceError(f"{where} is a number that no report has: {_shown(value)}; {_REMEDY}")
        return value
    if dataclasses.is_dataclass(hint):
        return _object(hint, value, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        options = [argument for argument in arguments if argument is not type(None)]
        if value is None and len(options) < len(arguments):
            return None
        if len(options) == 1:
            return typed(options[0], value, where)
        for argument in options:
            with suppress(SourceError):
                return typed(argument, value, where)
    if origin is typing.Literal and isinstance(value, str) and value in arguments:
        return value
    if origin is tuple and isinstance(value, list):
        # `tuple[int, ...]` has any length, `tuple[int, str]` two elements
        each = arguments[:1] * len(value) if arguments[-1:] == (Ellipsis,) else arguments
        if len(each) == len(value):
            return tuple(typed(kind, value[index], f"{where}[{index}]") for index, kind in enumerate(each))
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
    values = {name: typed(hints[name], content, f"{where}.{name}") for name, content in value.items()}
    for field in dataclasses.fields(item):
        if not field.init:
            values.pop(field.name, None)  # it follows from the others
        elif field.name not in values and field.default is field.default_factory is dataclasses.MISSING:
            raise SourceError(f"{where} lacks the field {field.name!r}; {_REMEDY}")
    try:
        return item(**values)
    except ValueError as error:  # settings that no run has, or a cost that contradicts itself
        raise SourceError(f"{where}: {getattr(error, 'message', error)}; {_REMEDY}") from None


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
    return _SIMPLE.get(hint, ("", "an object"))[1]


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    return one_line(json.dumps(value, ensure_ascii=False), limit=40)


# ---- data of a file that is no report ----

NUMBER = range(2**62)  # of bytes, FLOPs or parameters


def checked(value: Any, form: Any) -> Any:
    """Return data of a file that has the form; raises ValueError for any other.

    A form is a type (a text must be printable), a range of whole numbers, a set of words, `[form]` for a list of any
    length, or a tuple of the forms of a list's items.
    """
    _check([value], form)
    return value


def _check(values: list[Any], form: Any) -> None:
    """Check all values of one form together: an entry has a hundred thousand."""
    kinds = set(map(type, values))
    if isinstance(form, range):
        is_right = kinds <= {int} and (not values or (form.start <= min(values) and max(values) < form.stop))
    elif isinstance(form, frozenset):
        is_right = kinds <= {str} and form.issuperset(values)
    elif isinstance(form, list):
        if is_right := kinds <= {list}:
            _check([item for value in values for item in value], form[0])
    elif isinstance(form, tuple):
        is_right = kinds <= {list} and set(map(len, values)) <= {len(form)}
        for column, item_form in zip(zip(*values, strict=True), form, strict=True) if is_right and values else ():
            _check(list(column), item_form)
    else:
        is_right = kinds <= {form} and (form is not str or "".join(values).isprintable())
    if not is_right:
        raise ValueError("another form")


def not_negative(value: Any) -> None:
    """Raise ValueError for data with a number that is negative or no number of bytes, FLOPs or parameters."""
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        not_negative(item)
    if isinstance(value, (int, float)) and not 0 <= value < NUMBER.stop:
        raise ValueError("no such number")
