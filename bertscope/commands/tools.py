"""The commands check, presets, doctor and schema."""

import gc
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import bertscope
from bertscope.commands.call import CommandLine, note, write
from bertscope.commands.exit_codes import complain
from bertscope.config import RULES, BertConfig
from bertscope.errors import SelectionError, SourceError, one_line, shown, suggestion
from bertscope.files import MAX_YAML_BYTES, open_file, read_yaml, write_file
from bertscope.reports import json as report_json
from bertscope.reports.base import SCHEMA
from bertscope.reports.tool import CheckReport
from bertscope.settings.rows import is_code
from bertscope.sources import expectation_files as expectations
from bertscope.sources.bert import config_members, preset_paths, read_preset
from bertscope.units import counted, json_text

_SHOWN = 12  # files that a note names
CONFIG = "config"
_OUTPUTS = {"params": "distinct_params", "flops": "flops", "peak": "memory"}  # of the action: the first of each key
_TYPES = {bool: "boolean", str: "string", int: "integer", float: "number", tuple: "array", dict: "object"}


def check(call: CommandLine) -> int:
    """Verify the expectations in files, or write them."""
    if call.write_to is not None:
        _record(call)
        return 0
    names = _names(call)
    _collect_after_torch(names)
    changes: dict[Path, dict[str, Any]] | None = {} if call.update else None
    report = bertscope.check(names, architecture=call.architecture, allow_code=call.allow_code, changes=changes)
    report = _of_known_families(report) if call.presets else report
    paths = list(dict.fromkeys(finding.path for finding in report.findings if finding.key))
    if paths and any(map(os.path.isdir, names)):
        more = f" and {len(paths) - _SHOWN:,} more" if len(paths) > _SHOWN else ""
        note(f"checked {', '.join(paths[:_SHOWN]) + more}")
    is_updated = changes is not None and call.fmt == "text" and not report.having("error")
    if not is_updated:
        call.show(report)
    if call.fmt == "github":
        _tell_github(report)
    _update(changes or {})
    if is_updated:
        write(_updated(report), call.output)
    for finding in report.having("error"):
        complain(finding.message, 2)
    if report.having("error"):
        return 2
    return 1 if not call.update and report.having("failed") else 0


def _of_known_families(report: CheckReport) -> CheckReport:
    """Return the report without presets that the installed transformers does not build, and name these."""
    unknown = [finding for finding in report.having("error") if finding.model.endswith(".json")]
    for finding in unknown:
        note(f"{finding.path} is not checked: {shown(finding.message)}")
    return replace(report, findings=tuple(item for item in report.findings if item not in unknown))


def _tell_github(report: CheckReport) -> None:
    """Append the action's outputs and the job's summary to the files that GitHub names in the environment."""
    numbers: dict[str, int] = {}
    for finding in report.findings:
        if isinstance(finding.got, int):
            numbers.setdefault(finding.key.partition(".")[0], finding.got)
    outputs = "".join(f"{name}={numbers[key]}\n" for name, key in _OUTPUTS.items() if key in numbers)
    texts = {"GITHUB_OUTPUT": outputs, "GITHUB_STEP_SUMMARY": f"### bertscope check\n\n{report.to_markdown()}\n"}
    for variable, text in texts.items():
        if path := os.environ.get(variable):
            try:
                with open(path, "a", encoding="utf-8") as file:
                    file.write(text)
            except OSError as error:
                note(f"{variable} {path} cannot be written: {error.strerror}")


def _names(call: CommandLine) -> list[str]:
    files, project = call.files, call.project
    if call.presets:
        return [str(path) for path in preset_paths().values()]
    if not files and project is not None:
        project.note_used(["check"])
        files = [str(project.path.parent / file) for file in project.table.get("check", [])]
    if call.update and not files:
        raise SourceError("--update takes FILES; name them, such as my.bertscope.yaml")
    if call.update and call.architecture:
        raise SourceError("--update builds the classes that FILES name; leave --architecture out")
    return files or ["."]


def _update(changes: dict[Path, dict[str, Any]]) -> None:
    texts = {
        path: expectations.with_expected(path, values) for path, values in changes.items()
    }  # all of them, or none is written
    for path, values in changes.items():
        write_file(path, texts[path])
        note(f"updated {path}: {', '.join(values)}")


def _updated(report: CheckReport) -> str:
    """Return which values an update has changed, and in how many files."""
    failed = report.having("failed")
    lines = []
    for row in failed:
        values = row.expected, row.got or "removed"
        old, new = (f"{value:,}" if isinstance(value, int) else value for value in values)
        lines.append(one_line(f"{row.path}:{row.line}: {row.key}: {old} -> {new}"))
    files = counted(len({row.path for row in failed}), "file")
    count = f"{len(failed)} of {counted(len(report.findings), 'value')} updated in {files}" if failed else ""
    return "\n".join([*lines, count or f"Nothing to update: all {len(report.findings)} expectations pass."]) + "\n"


def _collect_after_torch(names: list[str]) -> None:
    """Import torch, then enable garbage collection except for its objects: runs leave cycles behind."""
    if all(map(os.path.isdir, expectations.files_to_check(names))):
        return  # nothing can be counted
    from bertscope.analyses import params  # noqa: F401

    gc.freeze()
    gc.set_threshold(100_000)  # a run has more objects than Python's 700, and few of them are left
    gc.enable()


def _record(call: CommandLine) -> None:
    """Append the current counts to the file in --write; its content stays, and a new file names the model in FILES."""
    path, models = call.write_to, [*(call.files or ())]
    if call.fmt != "text" or str(path).startswith("-") or len(models) > 1:
        raise SourceError(
            "--write takes one FILE, directly after it, and for a new one a model; run 'bertscope check' separately"
        )
    if path.suffix == ".json":
        raise SourceError(f"{path} is a model; {expectations.of_model(path)}")
    if path.exists() and models:
        raise SourceError(f"{path} exists; name a new file, or leave {models[0]} out to add counts to this one")
    if not path.exists() and not models:
        raise SourceError(f"No such file: {path}; {expectations.of_model('NAME')} into a new one")
    if models and not expectations.is_expectation_file(path):
        raise SourceError(f"{path.name}: the name of a new file must end in {expectations.SUFFIXES[0]}")
    is_path = models and os.path.exists(models[0]) and models[0] not in preset_paths()
    name = os.path.relpath(models[0], path.parent) if is_path else "".join(models)
    keys = {"model": name, "architecture": name and call.architecture}
    text = "".join(f"{key}: {expectations.yaml_name(value)}\n" for key, value in keys.items() if value)
    if models or expectations.is_expectation_file(path):
        # The only code that `text` can name is what the command line named.
        model = expectations.read_expectation_file(path, allow_code=call.allow_code or bool(models), text=text)
    else:
        preset = read_preset(path)
        model = expectations.ExpectedModel(name=preset.name, source=preset, path=path, expected=preset.expected)
    if model.expected:
        raise SourceError(
            f"already has {len(model.expected)} expectations; 'bertscope check --update {path}' rewrites their values",
            where=f"{path}:{model.expected[0].line}",
        )
    from bertscope.analyses.check import expected_block

    content = text.encode()
    if not models:
        with open_file(path, "name an expectation file") as file:
            content = file.read()
    newline = b"\r\n" if b"\r\n" in content else b"\n"
    content += b"" if content.endswith(b"\n") else newline
    content += expected_block(model).encode().replace(b"\n", newline)
    try:
        read_yaml(content.decode("utf-8-sig"), path)
    except SourceError:
        raise SourceError(
            f"{path} is not in the form of plain 'key: value' lines from the first column without a further "
            "'expected'; rewrite it so, and the counts can be appended"
        ) from None
    if len(content) > MAX_YAML_BYTES:
        raise SourceError(f"{path} has no room for the counts: the limit is {MAX_YAML_BYTES >> 10} KiB; shorten it")
    write_file(path, content)
    allowed = f"; 'bertscope check --allow-code {path}' verifies them" * is_code(name)
    note(f"wrote the current counts to {path}{allowed}")


def schema(call: CommandLine) -> None:
    """Print a report's JSON Schema, or list the kinds."""
    if call.kind is None:
        call.show(report_json.schemas(), fmt=call.fmt or "table")
    elif call.fmt not in (None, "json"):
        raise SelectionError(f"a schema is JSON; leave --format {call.fmt} out, or leave KIND out for the list")
    elif call.kind not in (kinds := [*report_json.report_classes(), CONFIG]):
        raise SelectionError(f"no schema of {call.kind[:60]!r}; {suggestion(call.kind, kinds)}")
    else:
        write(json_text(_config_schema() if call.kind == CONFIG else bertscope.schema(call.kind)), call.output)


def _config_schema() -> dict[str, Any]:
    defaults = {field.name: field.default for field in fields(BertConfig)}
    properties: dict[str, Any] = {}
    for name, rule in RULES.items():
        kind, null = _TYPES[rule.kind], [None] if rule.optional else []
        schema: dict[str, Any] = {"description": rule.allowed(), "type": [kind, "null"] if rule.optional else kind}
        if rule.choices:
            schema["enum"] = [*rule.choices, *null]
        elif rule.kind in (int, float):
            schema |= {"minimum": rule.least, "maximum": rule.most}
        if name != "pruned_heads":  # which has none
            schema["default"] = defaults[name]
        properties[name] = schema
    return {
        "$schema": report_json.DIALECT,
        "$id": f"urn:bertscope:{CONFIG}:{SCHEMA}",
        "title": f"bertscope {CONFIG}",
        "description": "The configuration of a BERT: the keys of config.json and of a preset that have an effect.",
        "type": "object",
        "properties": properties,
    }


def mcp(call: CommandLine) -> None:
    """Serve tools for agents."""
    bertscope.mcp()


def presets(call: CommandLine) -> None:
    """List the presets, or print one's config.json."""
    report = bertscope.presets(call.name)
    if not call.config:
        call.show(report)
        return
    if len(report.rows) > 1:
        raise SelectionError("--config prints the config.json of one preset; type 'bertscope presets NAME --config'")
    if call.output is not None and call.output.suffix not in ("", ".json"):
        raise SelectionError(f"{call.output.name}: --config writes .json")
    if call.fmt not in ("table", "json"):
        raise SelectionError(f"a config.json is JSON; leave --format {call.fmt} out")
    path = Path(report.rows[0].path)
    write(json_text(config_members(path)), call.output)
    if path.suffix != ".json" and not read_preset(path).add_pooling_layer:
        note("a config.json has no member for add_pooling_layer: false, so it describes the model with its pooler")
