"""`bertscope mcp`: public functions as tools of a Model Context Protocol server, over standard input and output.

A tool's parameters are rows of its command: options, and settings of a run. Tools only read: presets, the Hugging Face
cache, and files at and below the working directory. A client's text is no CodeName, so code is refused.
"""

import gc
import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import bertscope
from bertscope.commands.options import option_row
from bertscope.commands.table import COMMANDS
from bertscope.errors import MissingExtraError, Reason, SelectionError, naming, one_line, shown, suggestion, told
from bertscope.files import refuse_outside
from bertscope.reports.page import ComparisonReport
from bertscope.settings.request import Request, read_settings
from bertscope.settings.rows import Row
from bertscope.settings.run_config import QUESTIONS, Question
from bertscope.sources.find import find
from bertscope.views.console import asked_by

_MODEL = ("model", "architecture", "attention", "lora")
_TOOLS: dict[str, tuple[str, ...]] = {  # the options of each; of most the first is required
    "estimate": _MODEL,
    "count": (*_MODEL, "by"),
    "flops": _MODEL,
    "fit": (*_MODEL, "batch", "batch_total", "exact"),
    "plan": (*_MODEL, "batch", "batch_total", "may_change", "emit"),
    "why": ("file", *_MODEL),
    "check": ("files",),
    "presets": ("name",),
}
_FULL = "estimate"  # whose schema describes all settings; others describe the common ones
_JSON = {"type": "boolean", "description": "Return the numbers as JSON, without the memory over time."}
_QUESTIONS = {**dict.fromkeys(_TOOLS, Question(records=())), **QUESTIONS}


def _rows(tool: str) -> dict[str, Row]:
    options = {name: replace(option_row(tool, name), name=name) for name in _TOOLS[tool]}
    return options | {name: _QUESTIONS[tool].table[name] for name in COMMANDS[tool].settings}


def _required(tool: str) -> tuple[str, ...]:
    return () if tool in ("check", "presets") else _TOOLS[tool][:1]


def _plain(text: str) -> str:
    """Return a help with parameters instead of options: `--batch-total` is batch_total."""
    text = text.partition("\n\nexamples:")[0].strip()
    return re.sub(r"--([a-z-]+)", lambda match: match[1].replace("-", "_"), text)


def schema(tool: str) -> dict[str, Any]:
    """Return the JSON Schema of a tool's arguments; a setting without a description has it in `estimate`."""
    question, properties = _QUESTIONS[tool], {"json": _JSON}
    for name, row in _rows(tool).items():
        default = None if name in _required(tool) else question.defaults.get(name, row.default)
        full = row.json_schema(default, is_compared=name in question.compared)
        is_short = row.section != "common" and tool != _FULL and name in COMMANDS[_FULL].settings
        properties[name] = {"type": full["type"]} if is_short else full | {"description": _plain(full["description"])}
    names = [*_required(tool)]
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _form(name: str) -> str:
    """Return what tools call a setting or a command; empty for one that none of them has."""
    if name.startswith("bertscope "):
        return tool if (tool := name.split()[1]) in _TOOLS else ""
    known = {"to_markdown()": "json", **{key: key for tool in _TOOLS for key in _rows(tool)}}
    return known.get(name, name if name.isupper() else "")


def answer(tool: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    """Return a tool's text, and whether it is an error; what to do next in it is the call of a tool."""
    known = {name: value for name, value in arguments.items() if value is not None}

    def call(name: str, changes: Mapping[str, Any]) -> str:
        rows = _rows(name) if name in _TOOLS else {}
        items = {key: value for key, value in {**known, **changes}.items() if key in rows and value is not None}
        return f"{name}({', '.join(f'{key}={one_line(repr(value), limit=99)}' for key, value in items.items())})"

    with naming(_form), asked_by(call):
        try:
            return _text(tool, dict(known)), False
        except Exception as error:
            if (refusal := told(error)) is None:
                return f"internal error: {type(error).__name__}: {one_line(str(error))}", True
            return shown(Reason(refusal.marked)), True


def _text(tool: str, arguments: dict[str, Any]) -> str:
    if tool not in _TOOLS:
        raise SelectionError(f"there is no tool {tool[:40]!r}; the tools are {', '.join(_TOOLS)}")
    rows, question, is_json = _rows(tool), _QUESTIONS[tool], arguments.pop("json", None) is True
    if missing := next((name for name in _required(tool) if not arguments.get(name)), ""):
        raise SelectionError(f"{missing} is missing; {rows[missing].help}")
    if unknown := next((name for name in arguments if name not in rows), ""):
        raise SelectionError(f"{tool} has no parameter {unknown[:40]!r}; {suggestion(unknown, [*rows, 'json'])}")
    for name, value in arguments.items():
        refuse_outside(Path.cwd(), name, value)
    options = {name: rows[name].read(arguments.pop(name)) for name in _TOOLS[tool] if name in arguments}
    source = read_settings(arguments, compared=question.compared, records=question.records, is_text=True)
    model = {name: options.pop(name) for name in _MODEL if name in options}
    subject: Any = find(**model) if model else None
    subject = Request(question=tool, subject=subject, sources=(source,)) if question.records else subject
    form, texts = options.pop("emit", None), [options.pop(name) for name in ("files", "file") if name in options]
    if tool == "why" and (os.path.exists(texts[0]) or texts[0] == "-"):  # standard input is the client's
        texts = [os.path.abspath(texts[0])]
    texts += [subject] * bool(_required(tool))
    report = getattr(bertscope, "fits" if tool == "fit" else tool)(*texts, **options)
    if tool == "fit":
        report = ComparisonReport(of=tool, reports=report) if len(report) > 1 else report[0]
    if is_json and not form:  # a timeline has 600 samples
        data = json.loads(report.to_json(), object_pairs_hook=lambda items: {k: v for k, v in items if k != "timeline"})
        return json.dumps(data, separators=(",", ":"))
    return str(report.emitted(form) if form else report)


def mcp() -> None:
    """Serve the tools until the client closes the input; raises MissingExtraError without the package mcp.

    >>> bertscope.mcp()  # doctest: +SKIP
    """
    try:
        import anyio
        from mcp import types
        from mcp.server.lowlevel import Server
        from mcp.server.stdio import stdio_server
    except ImportError:
        raise MissingExtraError("bertscope mcp", "mcp") from None
    gc.enable()  # which a short command does without
    one = anyio.CapacityLimiter(1)  # torch's modes are for one call at a time
    about: Any = {"annotations": types.ToolAnnotations(read_only_hint=True, open_world_hint=False)}
    texts = {name: _plain(COMMANDS[name].text) for name in (*_TOOLS, "mcp")}

    async def list_tools(*_: Any) -> Any:
        tools = [types.Tool(name=name, description=texts[name], input_schema=schema(name), **about) for name in _TOOLS]
        return types.ListToolsResult(tools=tools)

    async def call_tool(_: Any, call: Any) -> Any:
        text, is_error = await anyio.to_thread.run_sync(answer, call.name, call.arguments or {}, limiter=one)
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=is_error)

    async def serve() -> None:
        about = {"version": bertscope.__version__, "instructions": texts["mcp"]}
        server = Server("bertscope", on_list_tools=list_tools, on_call_tool=call_tool, **about)
        async with stdio_server() as streams:
            await server.run(*streams, server.create_initialization_options())

    anyio.run(serve)
