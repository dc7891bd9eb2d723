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
from bertscope.errors import MissingExtraError, SelectionError, naming, one_line, suggestion, told
from bertscope.reports.page import ComparisonReport
from bertscope.settings.request import Request, read_settings
from bertscope.settings.rows import Row
from bertscope.settings.run_config import QUESTIONS, Question
from bertscope.sources.find import find
from bertscope.views.console import asked_by

_TOOLS = {name: COMMANDS[name] for name in ("count", "flops", "estimate", "fit", "plan", "why", "check", "presets")}
_OF_MODEL = ("model", "architecture", "attention", "lora")
_OPTIONS = (*_OF_MODEL, "file", "files", "by", "batch", "batch_total", "exact", "may_change", "emit", "name")
_LEFT_OUT = {("count", "batch"), ("check", "architecture")}
_HELP = {
    "model": "A preset, a model in the Hugging Face cache, or the path of a config.json, a checkpoint or their folder.",
    "file": "The text of an out-of-memory error, or the path of a log or a memory snapshot.",
    "files": "Presets, *.bertscope.yaml files or their folders; by default all below the server's folder. A file is "
    "{model: bert-tiny, expected: {distinct_params: 4385920, flops: {any name: {batch: 1, seq: 128, mode: inference, "
    "matmul_flops: 117473280}}, memory: {any name: {batch: 8, seq: 128, mode: training, peak_bytes: 97 MiB, "
    "tolerance: 2 %}}}}.",
    "device": "The device: cpu, or cuda, which a gpu implies.",
}
_JSON = {
    "type": "boolean",
    "default": False,
    "description": "Return the numbers as JSON, without the memory over time.",
}
_REQUIRED = {"why": ["file"], "check": [], "presets": []}
# What an error advises that a client cannot do.
_NOT_HERE = re.compile(r"; (name it on the command line.*|'bertscope count [^']*' with download fetches it[^(')]*hub)")
_OF_A_TERMINAL = re.compile(r"\s*(Several [^.]*models|Exit code)[^.]*\.|\s*examples:.*", re.DOTALL)
_QUESTIONS = {**dict.fromkeys(_TOOLS, Question(records=())), **QUESTIONS}


def _rows(tool: str) -> dict[str, Row]:
    names = [name for name in _TOOLS[tool].options.split() if name in _OPTIONS and (tool, name) not in _LEFT_OUT]
    options = {name: replace(option_row(tool, name), name=name) for name in names}
    return options | {name: _QUESTIONS[tool].table[name] for name in _TOOLS[tool].settings}


def _plain(text: str) -> str:
    """Return a help with parameters instead of options: `--batch-total` is batch_total."""
    return re.sub(r"--([a-z-]+)", lambda match: match[1].replace("-", "_"), _OF_A_TERMINAL.sub("", text)).strip()


def schema(tool: str) -> dict[str, Any]:
    """Return the JSON Schema of a tool's arguments."""
    question, required, properties = _QUESTIONS[tool], _REQUIRED.get(tool, ["model"]), {"json": _JSON}
    for name, row in _rows(tool).items():
        is_compared, default = name in question.compared, question.defaults.get(name, row.default)
        kind = row.json_schema(is_compared=is_compared)
        takes = f" Takes {row.takes}." * (is_compared or row.is_size or row.or_file or row.convert is not None)
        text = f"{_HELP.get(name, row.help)}{' Several with commas.' * is_compared}{takes}"
        kind |= {"default": default} if default not in (None, (), ...) and name not in required else {}
        properties[name] = {**kind, "description": _plain(text)}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def answer(tool: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    """Return a tool's text, and whether it is an error; what to do next in it is the call of a tool."""
    known = {name: value for name, value in arguments.items() if value is not None}

    def call(name: str, changes: Mapping[str, Any]) -> str:
        rows = _rows(name) if name in _TOOLS else {}
        items = {key: value for key, value in {**known, **changes}.items() if key in rows and value is not None}
        return f"{name}({', '.join(f'{key}={one_line(repr(value), limit=99)}' for key, value in items.items())})"

    try:
        with naming(lambda name: "json" if name == "to_markdown()" else name), asked_by(call):
            return _text(tool, dict(known)), False
    except Exception as error:
        text = str(told(error) or f"internal error: {type(error).__name__}: {one_line(str(error))}")
        return re.sub(rf"'?bertscope ({'|'.join(_TOOLS)})\b'?", r"the tool \1", _NOT_HERE.sub("", text)), True


def _text(tool: str, arguments: dict[str, Any]) -> str:
    if tool not in _TOOLS:
        raise SelectionError(f"there is no tool {tool[:40]!r}; the tools are {', '.join(_TOOLS)}")
    rows, question = _rows(tool), _QUESTIONS[tool]
    is_json = arguments.pop("json", None) is True
    for name in _REQUIRED.get(tool, ["model"]):
        if not arguments.get(name):
            raise SelectionError(f"{name} is missing; {_HELP[name]}")
    if unknown := next((name for name in arguments if name not in rows), ""):
        raise SelectionError(f"{tool} has no parameter {unknown[:40]!r}; {suggestion(unknown, [*rows, 'json'])}")
    for name, value in arguments.items():
        _refuse_outside(name, value)
    options = {name: rows[name].read(arguments.pop(name)) for name in _OPTIONS if name in rows and name in arguments}
    source = read_settings(arguments, compared=question.compared, records=question.records, is_text=True)
    model = {name: options.pop(name) for name in _OF_MODEL if name in options}
    subject: Any = find(**model) if model else None
    subject = Request(question=tool, subject=subject, sources=(source,)) if question.records else subject
    form, texts = options.pop("emit", None), [options.pop(name) for name in ("files", "file") if name in options]
    if tool == "why" and (os.path.exists(texts[0]) or texts[0] == "-"):  # standard input is the client's
        texts = [os.path.abspath(texts[0])]
    function: Any = getattr(bertscope, "fits" if tool == "fit" else tool)
    report = function(*texts, *[subject] * (tool not in ("check", "presets")), **options)
    if tool == "fit":
        report = ComparisonReport(of=tool, reports=report) if len(report) > 1 else report[0]
    if is_json and not form:  # a timeline has 600 samples
        data = json.loads(report.to_json(), object_pairs_hook=lambda items: {k: v for k, v in items if k != "timeline"})
        return json.dumps(data, separators=(",", ":"))
    return str(report.emitted(form) if form else report)


def _refuse_outside(name: str, value: Any) -> None:
    root = Path.cwd().resolve()
    for text in [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, str)]:
        for part in [text] if name == "file" else [text, *re.split("[:,=]", text)]:
            forms = [Path(form.replace("\0", "")) for form in (part, part.strip())]  # ./~ is ~, which readers expand
            paths = [Path(os.path.realpath(path)) for form in forms for path in (form, os.path.expanduser(form))]
            if any(os.path.exists(path) and not path.is_relative_to(root) for path in paths):
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
    about: Any = {"annotations": types.ToolAnnotations(read_only_hint=True, open_world_hint=False)}

    async def list_tools(*_: Any) -> Any:
        texts = {name: _plain(row.text) for name, row in _TOOLS.items()}
        tools = [
            types.Tool(name=name, description=text, input_schema=schema(name), **about) for name, text in texts.items()
        ]
        return types.ListToolsResult(tools=tools)

    async def call_tool(_: Any, call: Any) -> Any:
        text, is_error = await anyio.to_thread.run_sync(answer, call.name, call.arguments or {}, limiter=one)
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=is_error)

    async def serve() -> None:
        about = {"version": bertscope.__version__, "instructions": _plain(COMMANDS["mcp"].text)}
        server = Server("bertscope", on_list_tools=list_tools, on_call_tool=call_tool, **about)
        async with stdio_server() as streams:
            await server.run(*streams, server.create_initialization_options())

    anyio.run(serve)
