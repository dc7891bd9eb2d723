"""`bertscope schema`."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bertscope.commands.output import output_option, show, write
from bertscope.commands.registry import command
from bertscope.config import RULES, BertConfig
from bertscope.errors import SelectionError, suggestion
from bertscope.reports import json as report_json
from bertscope.reports.base import SCHEMA
from bertscope.units import json_text

EXAMPLES = """
  bertscope schema
  bertscope schema count
  bertscope schema config
  bertscope schema memory --output memory.schema.json
"""

CONFIG = "config"
_TYPES = {bool: "boolean", str: "string", int: "integer", float: "number", tuple: "array", dict: "object"}


@command(examples=EXAMPLES)
def schema(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="[KIND]",
            help="A kind of report: count, flops, memory ...; config: a BERT's config.json; default: list the kinds.",
            autocompletion=lambda: [*report_json.report_classes(), CONFIG],
        ),
    ] = None,
    fmt: Annotated[
        Literal["table", "json", "csv", "markdown"] | None,
        typer.Option(
            "--format", "-f", help="The format of the list; a schema is always JSON.", rich_help_panel="common"
        ),
    ] = None,
    output: Annotated[Path | None, output_option("JSON (.json) or a table (.txt)")] = None,
) -> None:
    """Print the JSON Schema (draft 2020-12) of the output of --format json, or list the kinds of report.

    It is generated from the classes of the reports, so it matches the installed version.
    """  # fmt: skip
    if kind is None:
        show(report_json.schemas(), fmt or "table", output)
    elif fmt not in (None, "json"):
        raise SelectionError(f"a schema is JSON; leave --format {fmt} out, or leave KIND out for the list")
    elif kind not in (kinds := [*report_json.report_classes(), CONFIG]):
        raise SelectionError(f"no schema of {kind[:60]!r}; {suggestion(kind, kinds)}")
    else:
        write(json_text(_config_schema() if kind == CONFIG else report_json.schema(kind)), output)


def _config_schema() -> dict[str, Any]:
    """Return the JSON Schema of the keys of a config.json, from the rules of BertConfig; other keys are allowed."""
    defaults = {field.name: field.default for field in fields(BertConfig)}
    properties: dict[str, Any] = {}
    for name, rule in RULES.items():
        kind, null = _TYPES[rule.kind], [None] if rule.optional else []
        found: dict[str, Any] = {"description": rule.allowed(), "type": [kind, "null"] if rule.optional else kind}
        if rule.choices:
            found["enum"] = [*rule.choices, *null]
        elif rule.kind in (int, float):
            found |= {"minimum": rule.least, "maximum": rule.most}
        if name != "pruned_heads":  # which has none
            found["default"] = defaults[name]
        properties[name] = found
    return {
        "$schema": report_json.DIALECT,
        "$id": f"urn:bertscope:{CONFIG}:{SCHEMA}",
        "title": f"bertscope {CONFIG}",
        "description": "The configuration of a BERT: the keys of config.json and of a preset that have an effect.",
        "type": "object",
        "properties": properties,
    }
