"""`bertscope mcp`: public functions as read-only tools over standard input and output, without code from names."""

import gc
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import bertscope
from bertscope.commands.options import option_row
from bertscope.commands.table import COMMANDS
from bertscope.errors import SelectionError, line_for, naming, needs_extra, one_line, suggestion
from bertscope.files import refuse_outside
from bertscope.reports.page import combined
from bertscope.settings.generate import arguments_schema, keyword_text
from bertscope.settings.request import Request, read_settings
from bertscope.settings.rows import Row
from bertscope.settings.run_config import QUESTIONS, Question
from bertscope.sources.find import find
from bertscope.views.console import Placeholder, asked_by

_MODEL = "model architecture attention lora"
_JSON = Row(name="json", help="Return the numbers as JSON, without the memory over time.", default=False, kind=bool)


class Tool:
    """A command for agents: some of its options, and its settings. A model or a file is required."""

    def __init__(self, name: str, *options: str) -> None:
        self.name, settings = name, COMMANDS[name].settings
        self.required = options[0] if options[0] in ("model", "file") else ""
        self.question = QUESTIONS[name] if settings else Question(records=())
        self.options = {"json": _JSON} | {key: replace(option_row(name, key), name=key) for key in options}
        self.rows = self.options | {key: self.question.table[key] for key in settings}
        described = COMMANDS["estimate"].settings * (name != "estimate")  # in the schema of estimate
        self.schema = arguments_schema(self.rows, self.question, self.required, described)

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Return a call of the tool as text, with the type of a value that only the agent knows."""
        texts = {key: f"<{self.rows[key].kind.__name__}>" if isinstance(value, Placeholder) else repr(value)
                 for key, value in arguments.items() if key in self.rows and value is not None}  # fmt: skip
        return f"{self.name}({', '.join(f'{key}={one_line(text, limit=99)}' for key, text in texts.items())})"

    def answer(self, arguments: dict[str, Any]) -> str:
        """Return what the command prints, its JSON, or a plan's code."""
        if self.required and not arguments.get(self.required):
            raise SelectionError(f"{self.required} is missing; {self.rows[self.required].help}")
        for key, value in arguments.items():
            if key not in self.rows:
                having = ", ".join(name for name, tool in TOOLS.items() if key in tool.rows)
                remedy = f"{having} take it" if having else suggestion(key, self.rows)
                raise SelectionError(f"{self.name} has no parameter {key[:40]!r}; {remedy}")
            refuse_outside(Path.cwd(), key, value)
        options = {key: row.read(arguments.pop(key)) for key, row in self.options.items() if key in arguments}
        is_json, form = options.pop("json", False), options.pop("emit", None)
        if model := {key: options.pop(key) for key in _MODEL.split() if key in options}:
            options["model"] = find(**model)  # without a CodeName, which permits code
        if records := self.question.records:
            source = read_settings(arguments, compared=self.question.compared, records=records, is_text=True)
            options["model"] = Request(question=self.name, subject=options.get("model"), sources=(source,))
        if options.get("file") == "-":  # standard input is the client's
            options["file"] = "./-"
        function = getattr(bertscope, "fits" if self.name == "fit" else self.name)
        report = combined(function(*filter(None, [options.pop("files", None)]), **options))
        if form or not is_json:
            return str(report.emitted(form) if form else report)
        short: Any = {"object_pairs_hook": lambda items: {key: value for key, value in items if key != "timeline"}}
        return json.dumps(json.loads(report.to_json(), **short), separators=(",", ":"))


TOOLS = {name: Tool(name, *options.split()) for name, options in {
    "estimate": _MODEL, "count": f"{_MODEL} by", "flops": _MODEL, "fit": f"{_MODEL} batch batch_total exact",
    "plan": f"{_MODEL} batch batch_total may_change emit", "why": f"file {_MODEL}", "check": "files", "presets": "name",
}.items()}  # fmt: skip
_FORMS = {"to_markdown()": "json", **{f"bertscope {name}": name for name in TOOLS}}
_FORMS |= {key: key for tool in TOOLS.values() for key in tool.rows}


def answer(name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    """Return a tool's text, and whether it is an error; what to do next in it is the call of a tool."""
    typed = {key: value for key, value in arguments.items() if value is not None}

    def call(tool: str, changes: Mapping[str, Any]) -> str:
        more = {key: value for key, value in changes.items() if key not in typed or not isinstance(value, Placeholder)}
        return TOOLS[tool].call({**typed, **more}) if tool in TOOLS else ""

    with naming(lambda form: _FORMS.get(form, form * form.isupper())), asked_by(call):
        try:
            if name not in TOOLS:
                raise SelectionError(f"there is no tool {name[:40]!r}; the tools are {', '.join(TOOLS)}")
            return TOOLS[name].answer(dict(typed)), False
        except Exception as error:
            return line_for(error), True


def mcp() -> None:
    """Serve the tools until the client closes the input; raises MissingExtraError without the package mcp.

    >>> bertscope.mcp()  # doctest: +SKIP
    """
    with needs_extra("bertscope mcp", "mcp"):
        import anyio
        from mcp import types
        from mcp.server import MCPServer
    gc.enable()  # which a short command does without
    one = anyio.CapacityLimiter(1)  # torch's modes are for one call at a time
    reads = types.ToolAnnotations(read_only_hint=True, open_world_hint=False)

    class Agents(MCPServer):  # type: ignore[misc]
        async def list_tools(self) -> Any:
            return [types.Tool(name=name, description=keyword_text(COMMANDS[name].text), input_schema=tool.schema,
                               annotations=reads) for name, tool in TOOLS.items()]  # fmt: skip

        async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
            text, is_error = await anyio.to_thread.run_sync(answer, name, arguments, limiter=one)
            return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=is_error)

    Agents("bertscope", version=bertscope.__version__, instructions=keyword_text(COMMANDS["mcp"].text)).run()
