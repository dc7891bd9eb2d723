"""The JSON Schema (draft 2020-12) of every report, derived from the dataclasses that `--format json` writes.

Every report in `bertscope.reports` has a schema; a new report needs no registration.
"""

import dataclasses
import inspect
import pkgutil
import types
import typing
from importlib import import_module
from typing import Any

from bertscope import reports
from bertscope.errors import SelectionError, suggestion
from bertscope.reports.base import SCHEMA
from bertscope.reports.tool import SchemaRow, SchemasReport

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SIMPLE: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
}


def report_classes() -> dict[str, tuple[type, ...]]:
    """Return the report classes of each kind."""
    found: dict[str, tuple[type, ...]] = {}
    for module in pkgutil.iter_modules(reports.__path__):
        for item in vars(import_module(f"{reports.__name__}.{module.name}")).values():
            if isinstance(item, type) and dataclasses.is_dataclass(item) and hasattr(item, "kind"):
                known = found.get(item.kind, ())
                found[item.kind] = known if item in known else (*known, item)
    return dict(sorted(found.items()))


def schemas() -> SchemasReport:
    """Return the report that lists all kinds, each with one sentence."""
    rows = (
        SchemaRow(report=kind, classes=tuple(item.__name__ for item in classes), description=_sentence(classes[0]))
        for kind, classes in report_classes().items()
    )
    return SchemasReport(rows=tuple(rows))


def schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of one kind of report; raise SelectionError for an unknown kind."""
    found = report_classes()
    if kind not in found:
        raise SelectionError(f"no report of kind {kind[:60]!r}; {suggestion(kind, found)}")
    definitions: dict[str, Any] = {}
    bodies = [_object(item, definitions, report=kind) for item in found[kind]]
    return {
        "$schema": DIALECT,
        "$id": f"urn:bertscope:{kind}:{SCHEMA}",
        "title": f"bertscope {kind}",
        **(bodies[0] if len(bodies) == 1 else {"oneOf": bodies}),
        "$defs": dict(sorted(definitions.items())),
    }


def _object(item: type, definitions: dict[str, Any], *, report: str = "") -> dict[str, Any]:
    """Return the schema of a dataclass: an object with all fields; a report also has `schema` and `kind`."""
    hints = typing.get_type_hints(item)
    head = {"schema": {"const": SCHEMA}, "kind": {"const": report}} if report else {}
    properties = head | {field.name: _type(hints[field.name], definitions) for field in dataclasses.fields(item)}
    return {
        "description": _sentence(item),
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _type(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if hint in _SIMPLE:
        return dict(_SIMPLE[hint])
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if hint.__name__ not in definitions:
            definitions[hint.__name__] = {}  # a placeholder, for a class that contains itself
            definitions[hint.__name__] = _object(hint, definitions)
        return {"$ref": f"#/$defs/{hint.__name__}"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_type(argument, definitions) for argument in arguments]}
    if origin is tuple and arguments[-1:] == (Ellipsis,):
        return {"type": "array", "items": _type(arguments[0], definitions)}
    if origin is tuple:
        items = [_type(argument, definitions) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _type(arguments[1], definitions)}
    raise TypeError(f"no JSON Schema for {hint!r}")


def _sentence(item: type) -> str:
    """Return the first paragraph of the class's docstring."""
    return " ".join((inspect.getdoc(item) or "").partition("\n\n")[0].split())
