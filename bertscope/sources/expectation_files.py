"""`*.bertscope.yaml`: a model, by name or by configuration, and its expected values, as in docs/ci.md.

With `config` instead of `model` it has a preset's form. `module:attribute`, as the model or as a teacher, needs
`allow_code`.
"""

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from bertscope.config import ATTENTION_KERNELS, LORA_EXAMPLE, Lora
from bertscope.errors import BertscopeError, ConfigError, SourceError
from bertscope.files import Entry, open_file, read_mapping, read_text, read_yaml, readable, root_node
from bertscope.files import Mapping as Entries
from bertscope.frozen import Record
from bertscope.settings.rows import CodeName, is_code
from bertscope.settings.run_config import FLASH_KERNELS, STORED, RunConfig
from bertscope.sources.bert import (
    MEASURES,
    BertSource,
    Expectation,
    member_of,
    preset_of,
    preset_paths,
    read_expectations,
)
from bertscope.sources.find import find
from bertscope.sources.model_source import FactorySource, ModelSource
from bertscope.sources.transformers_models import TransformersSource

SUFFIXES = (".bertscope.yaml", ".bertscope.yml")
_KEYS = ("description", "model", "architecture", "attention", "add_pooling_layer", "lora", "expected")


class ExpectedModel(Record):
    """A model and the values that its file expects."""

    name: str
    source: ModelSource
    path: Path  # of the file with the expectations; without expectations, of the model or its name
    line: int = 1  # of the model in this file
    expected: tuple[Expectation, ...] = ()

    @property
    def how_to_record(self) -> str:
        """Return a remedy for a file without expectations: the command that adds them."""
        code = " --allow-code" if isinstance(self.source, FactorySource) else ""
        return f"'bertscope check --write {shlex.quote(str(self.path))}{code}' adds the current counts"


def of_model(name: str | os.PathLike[str]) -> str:
    """Return how to write a first file of expectations about a model."""
    return f"'bertscope check --write models.bertscope.yaml {shlex.quote(str(name))}' writes its counts"


def is_expectation_file(name: str | os.PathLike[str]) -> bool:
    """Return True if the name is an expectation file's."""
    return os.fspath(name).lower().endswith(SUFFIXES)


def read_expectation_file(path: Path, *, allow_code: bool = False, text: str = "") -> ExpectedModel:
    """Return the model in the file with its expected values; it is not built, and no code is imported.

    `text` is what the file will have. Raises ConfigError or SourceError with file and line, also for
    `module:attribute` without `allow_code`.
    """
    entries = read_yaml(text, path) if text else read_mapping(path)
    name = path.name.rpartition(".")[0].rpartition(".")[0] if is_expectation_file(path) else path.stem
    if "config" in entries and "model" not in entries:
        preset = preset_of(entries, path, allow_code=allow_code)
        return ExpectedModel(name=name, source=preset, path=path, expected=preset.expected)
    if "config" in entries:
        raise entries["config"].error(
            "unknown key 'config' in an expectation file with a model; give model or config, not both", "config"
        )
    entries.refuse_unknown(_KEYS, "an expectation file with a model")
    if "model" not in entries:
        lacks = "the key 'model' is missing; name one, or describe one by architecture and config"
        raise ConfigError(lacks, where=f"{path}:1")
    source = _model(entries, path, allow_code)
    precision = STORED if source.has_own_dtypes else RunConfig.precision
    expected = tuple(read_expectations(entries.get("expected"), precision, permit=allow_code))
    return ExpectedModel(name=name, source=source, path=path, line=entries["model"].line, expected=expected)


def _model(entries: Entries, path: Path, allow_code: bool) -> ModelSource:
    kernels = (*ATTENTION_KERNELS, *FLASH_KERNELS)
    settings = {
        "architecture": entries.checked("architecture", None, str, "the name of a class, such as BertForMaskedLM"),
        "attention": entries.checked("attention", None, lambda value: value in kernels, f"one of {', '.join(kernels)}"),
        "add_pooling_layer": entries.checked("add_pooling_layer", None, bool, "one of true, false"),
        "lora": _lora(entries),
    }
    name = _named(entries["model"], path.parent)
    try:
        return find(CodeName(name) if allow_code else name, **settings)
    except BertscopeError as error:
        raise error.at(entries.get(getattr(error, "field", ""), entries["model"]).where) from None


def _lora(entries: Entries) -> Lora | None:
    text = entries.checked("lora", None, str, f"text such as {LORA_EXAMPLE}")
    try:
        return None if text is None else Lora.parse(text)
    except ConfigError as error:
        raise error.at(entries["lora"].where) from None


def _named(entry: Entry, folder: Path) -> str:
    if not isinstance(entry.value, str) or not entry.value:
        raise entry.error("model must be a preset's name or a path")
    relative = folder / entry.value
    if entry.value in preset_paths() or entry.value.startswith("~"):
        return entry.value
    with readable(entry.value):
        is_path = entry.value.endswith((".yaml", ".yml", ".json")) or entry.value.startswith(".") or relative.exists()
    return str(relative) if is_path else entry.value


def expectation_files(folder: Path) -> Iterator[str]:
    """Yield the expectation files in a folder and below it, and each folder that cannot be listed.

    Hidden folders, virtual environments and node_modules are left out, and linked folders are not followed.
    """
    waiting = [folder]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError:
            yield str(folder)  # it is an error of the check, as a file that cannot be read
            continue
        folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        names = [entry.name for entry in entries if entry.name not in folders and is_expectation_file(entry.name)]
        yield from (str(folder / name) for name in names)
        shown = (folder / name for name in reversed(folders) if not name.startswith(".") and name != "node_modules")
        waiting += [inner for inner in shown if not os.path.exists(inner / "pyvenv.cfg")]


def files_to_check(names: list[str]) -> list[str]:
    """Return the names once each, a folder replaced by the expectation files in it; by default the working directory.

    A folder without such files stays: it may be a model's.
    """
    files: list[str] = []
    for name in names or ["."]:
        inside = list(expectation_files(Path(name))) if os.path.isdir(name) else []
        files += inside or [name]
    return list(dict.fromkeys(files))


def load_expected(name: str, *, architecture: str | None = None, allow_code: bool = False) -> ExpectedModel:
    """Return the model in an expectation file, or for any name that `find` knows; `architecture` overrides its class.

    Raises the errors of both, and SourceError for a model without expectations.
    """
    if is_expectation_file(name):
        model = read_expectation_file(Path(name), allow_code=allow_code)
    else:
        if os.path.isdir(name) and name not in preset_paths():
            with readable(name):
                if "config.json" not in [entry.name for entry in os.scandir(name)]:
                    raise SourceError(
                        f"no *.bertscope.yaml at or below {os.path.abspath(name)}; {of_model('NAME')}; "
                        "'bertscope check --presets' checks the packaged presets"
                    )
        if is_code(name):  # it has no expectations, wherever it is named
            raise SourceError(f"{name[:100]} expects nothing: {of_model(name[:100])}")
        source = find(name)
        model = ExpectedModel(name=source.name, source=source, path=Path(name))
        if isinstance(source, BertSource):
            model = replace(model, path=source.path or model.path, expected=source.expected)
        elif isinstance(source, TransformersSource):
            expected = member_of(read_mapping(source.path)).get("expected", ())
            model = replace(model, path=source.path, expected=expected)
    if not model.expected:
        remedy = model.how_to_record if model.path.suffix in (".yaml", ".yml") else of_model(name[:100])
        raise SourceError(f"{model.path} expects nothing: {remedy}")
    return replace(model, source=model.source.with_options(architecture=architecture)) if architecture else model


# ---- new values in the text of a file -----------------------------------------------------------

_NUMBERS = re.compile(r"[0-9-]+")
_BLOCKS = "|", ">"  # styles of a scalar
_COMMA = re.compile(r"(?:[ \t]*,[ \t]*)?")
_BOM = "\ufeff"
_Edit = tuple[int, int, str]  # start and end in the text, and what replaces the characters between them


def yaml_name(name: str) -> str:
    """Return a name as YAML, in quotes unless it consists of letters, digits and a few signs."""
    return name if re.fullmatch(r"[\w(][\w.()-]*", name, re.ASCII) else json.dumps(name)


def _yaml_value(value: int | str) -> str:
    return yaml_name(value) if isinstance(value, str) else str(value)


def with_expected(path: Path, changes: Mapping[str, Any]) -> str:
    """Return the text of a YAML file with these changes under `expected`; all other characters stay.

    The keys are like `groups.encoder`; None removes one; `ties` are replaced by a mapping. A new row
    takes the line of a removed one if their names differ only in layer numbers. Raises SourceError for a YAML
    form in which this cannot be done.
    """
    text = read_text(path)
    old, data = (read_yaml(text, path).plain() for _ in range(2))
    expected = data["expected"]
    renamed: dict[str, str] = {}
    for key, value in changes.items():
        table, dot, name = key.partition(".")
        if not dot:
            expected[table] = value
        elif table in MEASURES:
            expected[table][name][MEASURES[table]] = value
        elif value is not None:
            expected[table][name] = value
        else:
            del expected[table][name]
            alike = (other for other in changes if _NUMBERS.sub("", other) == _NUMBERS.sub("", key))
            known = {f"{table}.{row}" for row in old["expected"][table]} | {*renamed.values()}
            renamed[key] = next((other for other in alike if other not in known), key)
    root = root_node(text)
    (node,) = (value for key, value in root.value if key.value == "expected")  # type: ignore[union-attr]
    new, done = "", 0
    with suppress(SourceError):
        for start, end, replacement in sorted(_edits(text, node, old["expected"], expected, renamed)):
            new += text[done:start] + replacement
            done = max(done, end)
        new += text[done:]
        if read_yaml(new, path).plain() == data:
            with open_file(path, "name an expectation file") as file:
                return _BOM + new if file.read(3) == _BOM.encode() else new
    raise SourceError(f"{path} has a form that is not kept; write its expectations as plain 'key: value' lines")


def _edits(
    text: str, node: yaml.MappingNode, old: Any, new: Any, renamed: Mapping[str, str], table: str = ""
) -> Iterator[_Edit]:
    names = [renamed.get(table + key.value, table + key.value).removeprefix(table) for key, _ in node.value]
    for (key, value), name in zip(node.value, names, strict=True):
        replacement = new.get(name)
        if isinstance(replacement, dict):
            yield from _edits(text, value, old[key.value], replacement, renamed, f"{key.value}.")
            if not replacement and value.value and not value.flow_style:
                colon = text.index(":", key.end_mark.index) + 1
                yield colon, colon, " {}"
            continue
        for part, before, after in ((key, key.value, name), (value, old[key.value], replacement)):
            if name in new and before != after:
                if part.style in _BLOCKS:  # it ends in the line after it
                    raise SourceError("a block of text is not a value of an expectation")
                start, end = part.start_mark.index, part.end_mark.index
                start += len(re.match(r"([&!]\S*\s+)*", text[start:end])[0])  # type: ignore[index]  # anchor and tag
                yield start, end, _yaml_value(after)
    added = [f"{yaml_name(name)}: {_yaml_value(value)}" for name, value in new.items() if name not in names]
    is_kept = [name in new for name in names]
    yield from (_in_braces if node.flow_style else _in_lines)(text, node, is_kept, added)


def _in_braces(text: str, node: yaml.MappingNode, is_kept: Sequence[bool], added: Sequence[str]) -> Iterator[_Edit]:
    last = None  # where the last kept row ends
    previous = 0  # where the row before ends
    for (key, value), is_one_kept in zip(node.value, is_kept, strict=True):
        start, end = key.start_mark.index, value.end_mark.index
        if is_one_kept:
            last = end
        elif last is not None and "#" not in text[previous:start]:
            yield previous, end, ""
        else:
            yield start, _COMMA.match(text, end).end(), ""  # type: ignore[union-attr]
        previous = end
    if added:
        position = text.index("{", node.start_mark.index) + 1 if last is None else last
        yield position, position, f"{'' if last is None else ', '}{', '.join(added)}"


def _in_lines(text: str, node: yaml.MappingNode, is_kept: Sequence[bool], added: Sequence[str]) -> Iterator[_Edit]:
    newline = "\r\n" if "\r\n" in text else "\n"
    first = node.value[0][0].start_mark.index
    position = text.rfind("\n", 0, first) + 1
    indent = text[position:first]
    for (key, value), is_one_kept in zip(node.value, is_kept, strict=True):
        end = value.end_mark.index
        is_block = getattr(value, "style", None) in _BLOCKS and text[:end].endswith("\n")
        after = end if is_block else text.find("\n", end) + 1 or len(text)
        if is_one_kept:
            position = after
        else:
            yield text.rfind("\n", 0, key.start_mark.index) + 1, after, ""
    if added:
        lines = "".join(f"{indent}{line}{newline}" for line in added)
        yield position, position, lines if text[:position].endswith("\n") else newline + lines.removesuffix(newline)
