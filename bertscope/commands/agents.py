"""`bertscope mcp`: public functions as tools of a Model Context Protocol server, over standard input and output.

A tool's parameters are rows of its command: options, and settings of a run. Tools only read: presets, the Hugging Face
cache, and files at and below the working directory. A client's text is no CodeName, so code is refused.
"""

import gc
import os
import re
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import bertscope
from bertscope.commands.options import option_row
from bertscope.commands.table import COMMANDS
from bertscope.errors import MissingExtraError, SelectionError, one_line, told
from bertscope.settings.request import Request, read_settings
from bertscope.settings.rows import Row
from bertscope.settings.run_config import QUESTIONS, Question
from bertscope.sources.find import find

_TOOLS = {name: COMMANDS[name] for name in ("count", "flops", "estimate", "fit", "plan", "why", "check")}
_OF_MODEL = ("model", "architecture", "attention", "lora")
_OPTIONS = (*_OF_MODEL, "file", "files", "by", "batch", "batch_total", "exact", "may_change")
_TYPES = {bool: "boolean", int: "integer", float: "number"}
_HELP = {
    "model": "A preset, a model in the Hugging Face cache, or the path of a config.json, a checkpoint or their folder.",
    "file": "The text of an out-of-memory error, or the path of a log or a memory snapshot.",
}
_JSON = {"type": "boolean", "description": "Return every number as JSON instead of a text with the main ones."}
_REQUIRED = {"why": "file", "check": "files"}
_QUESTIONS = {**QUESTIONS, **dict.fromkeys(("count", "check"), Question(records=()))}


def _rows(tool: str) -> dict[str, Row]:
    names = [name for name in _TOOLS[tool].options.split() if name in _OPTIONS and (tool, name) != ("count", "batch")]
    options = {name: replace(option_row(tool, name), name=name) for name in names}
    return options | {name: _QUESTIONS[tool].table[name] for name in _TOOLS[tool].settings}


def _plain(text: str) -> str:
    """Return a help with parameters instead of options: `--batch-total` is batch_total."""
    return re.sub(r"--([a-z][a-z-]*)", lambda match: match[1].replace("-", "_"), text.partition("examples:")[0].strip())


def schema(tool: str) -> dict[str, Any]:
    """Return the JSON Schema of a tool's arguments."""
    compared, properties = _QUESTIONS[tool].compared, {"json": _JSON}
    for name, row in _rows(tool).items():
        kind, is_compared = _TYPES.get(row.kind, "string"), name in compared
        kinds = [*dict.fromkeys([kind, *["string"] * bool(is_compared or row.is_size or row.or_file)])]
        text = f"{_HELP.get(name, row.help)}{' Several with commas.' * is_compared} Takes {row.takes}."
        form: dict[str, Any] = {"type": "array", "items": {"type": "string"}} if row.is_list else {"type": kinds}
        properties[name] = {**form, "description": _plain(text)}
    return {"type": "object", "properties": properties, "required": [_REQUIRED.get(tool, "model")]}


def answer(tool: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    """Return a tool's text, and whether it is an error."""
    try:
        keywords = {name: value for name, value in arguments.items() if name != "json" and value is not None}
        report = _report(tool, keywords)
        return report.to_json() if arguments.get("json") is True else str(report), False
    except Exception as error:
        known = told(error)
        return str(known) if known else f"internal error: {type(error).__name__}: {one_line(str(error))}", True


def _report(tool: str, arguments: dict[str, Any]) -> Any:
    if tool not in _TOOLS:
        raise SelectionError(f"there is no tool {tool[:40]!r}; the tools are {', '.join(_TOOLS)}")
    rows, question, required = _rows(tool), _QUESTIONS[tool], _REQUIRED.get(tool, "model")
    if not arguments.get(required):
        raise SelectionError(f"{required} is missing; {_HELP.get(required, rows[required].help)}")
    for name, value in arguments.items():
        _refuse_outside(name, value)
    options = {name: rows[name].read(arguments.pop(name)) for name in _OPTIONS if name in rows and name in arguments}
    source = read_settings(arguments, compared=question.compared, records=question.records, is_text=True)
    model = {name: options.pop(name) for name in _OF_MODEL if name in options}
    subject: Any = find(**model) if model else None
    subject = Request(question=tool, subject=subject, sources=(source,)) if question.records else subject
    function, file = getattr(bertscope, tool), options.pop("file", "")
    if tool == "check":
        return function(options["files"])
    if not file or os.path.exists(file):  # "-" is a file too: standard input has the client's messages
        return function(*filter(None, [file and os.path.abspath(file)]), subject, **options)
    with NamedTemporaryFile("w", suffix=".log", encoding="utf-8", errors="replace") as log:
        log.write(file)
        log.flush()
        return function(log.name, subject)


def _refuse_outside(name: str, value: Any) -> None:
    """Raise SelectionError for a text that names a file outside the working directory."""
    root = Path.cwd().resolve()
    for text in [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]:
        for part in [text] if name == "file" else [text, *re.split("[:,=]", text)]:
            path = Path(os.path.realpath(os.path.expanduser(part.replace("\0", ""))))
            if os.path.exists(path) and not path.is_relative_to(root):
                raise SelectionError(f"{name} {part[:100]!r} is outside {root}, in which 'bertscope mcp' was started")


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

    async def list_tools(context: Any, page: Any) -> Any:
        hints, tools = types.ToolAnnotations(read_only_hint=True, open_world_hint=False), _TOOLS.items()
        return types.ListToolsResult(tools=[types.Tool(name=name, description=_plain(row.text), annotations=hints,
                                                       input_schema=schema(name)) for name, row in tools])  # fmt: skip

    async def call_tool(context: Any, call: Any) -> Any:
        text, is_error = await anyio.to_thread.run_sync(answer, call.name, call.arguments or {}, limiter=one)
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=is_error)

    async def serve() -> None:
        server = Server("bertscope", version=bertscope.__version__, instructions=_plain(COMMANDS["mcp"].text),
                        on_list_tools=list_tools, on_call_tool=call_tool)  # fmt: skip
        async with stdio_server() as streams:
            await server.run(*streams, server.create_initialization_options())

    anyio.run(serve)
