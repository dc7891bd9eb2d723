"""Texts that are generated from the rows: Python keywords with their types, words of a run, its command, and tables.

`python -m bertscope.settings.generate` writes the stub `keywords.pyi`; a test compares the file with the rows.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bertscope.settings.rows import Row, Settings, rows
from bertscope.settings.run_config import ESTIMATED, MEASURED, RAN, Question
from bertscope.units import exact_bytes

_LINE = 121  # characters of a line with its end
KEYWORDS = Path(__file__).with_name("keywords.pyi")
# Each class has the settings of its records that those before it do not have; `fit` has its own batch and budget.
_CLASSES: dict[str, tuple[tuple[type[Settings], ...], tuple[str, ...]]] = {
    "FitSettings": (ESTIMATED, ("batch", "budget")), "RunSettings": (ESTIMATED, ()),
    "MeasurementSettings": (MEASURED, ()), "DryRunSettings": (RAN, ()),
}  # fmt: skip


def option_name(name: str) -> str:
    """Return a setting's option: `--clip-grad-norm`."""
    return f"--{name.replace('_', '-')}"


_ALL = rows(*MEASURED)
# What the messages of a command line call keywords of Python, if it is not the option of that name.
_FORMS = {
    "field": "--lengths-field", "add_pooling_layer": "--pooler", "around": "--class", "form": "--format",
    "forward_inputs": "--batch, --seq, --cache, --mask or --head-mask", "dropout=False": "--no-dropout",
    "sandbox=False": "--no-sandbox",
    "to_csv()": "--format csv", "to_json()": "--format json", "to_svg()": "--format svg",
    "to_markdown()": "-v",  # which shows all notes and rows too
}  # fmt: skip


def option_form(name: str) -> str:
    """Return what the messages of a command line call a setting, a keyword or an argument (in capitals)."""
    return _FORMS.get(name) or (name if name.isupper() or " " in name else option_name(name))


def changed(*records: Settings) -> dict[str, Any]:
    """Return the settings whose values differ from their defaults."""
    pairs = [(record.flat(), type(record)().flat()) for record in records]
    return {name: value for values, first in pairs for name, value in values.items() if value != first[name]}


def option_words(row: Row, value: Any, name: str = "") -> list[str]:
    """Return the command-line words that give a setting, or another option with that name, this value."""
    option = option_name((row.option or row.name or name).partition("/")[0])
    if isinstance(value, bool):
        return [option if value else f"--no-{option[2:]}"]
    texts = [exact_bytes(value)] if row.is_size and type(value) is int else [str(value)]
    texts = list(map(str, value)) if isinstance(value, list | tuple) else texts
    if row.is_argument:
        return texts
    return [word for text in texts for word in ([f"{option}={text}"] if text.startswith("-") else [option, text])]


def keyword_text(text: str) -> str:
    """Return the text of a help with keywords instead of options: `--batch-total` is batch_total."""
    return re.sub("--([a-z-]+)", lambda match: match[1].replace("-", "_"), text.partition("\n\nexamples:")[0].strip())


def arguments_schema(table: Mapping[str, Row], question: Question, required: str, known: Collection[str] = ()) -> Any:
    """Return the JSON Schema of arguments; those in `known`, whose descriptions the reader has, show only the type."""
    properties = {}
    for name, row in table.items():
        default = None if name == required else question.defaults.get(name, row.default)
        full = row.json_schema(default, is_compared=name in question.compared)
        full["description"] = keyword_text(full["description"])
        properties[name] = {"type": full["type"]} if name in known and row.section != "common" else full
    names = [required] if required else []
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def setting_options(values: Mapping[str, Any]) -> str:
    """Return the options that give these values, for a shell."""
    return shlex.join(word for name, value in values.items() for word in option_words(_ALL[name], value))


def row_words(name: str, value: Any) -> str:
    """Return a setting in English words: `padding 0.25`, `no dropout`."""
    row, plain = _ALL[name], name.replace("_", " ")
    if row.text:
        return row.text.format(value)
    if isinstance(value, bool):
        return plain if value else f"no {plain}"
    return f"{plain} {' '.join(value) if row.is_list else value}"


def _alias(row: Row) -> str:
    return row.name.title().replace("_", "")


def _type(row: Row) -> str:
    plain = "int | str" if row.is_size else row.kind.__name__ + " | str" * row.or_file
    one = _alias(row) if row.choices and not row.convert else plain
    if row.name == "loss":
        return "str | Callable[..., Any]"
    if row.name == "optimizer":
        return "Optimizer | torch.optim.Optimizer | Callable[..., torch.optim.Optimizer]"
    text = f"{one} | Sequence[{one}]" if one in ("str", "int") else f"{one} | str | Sequence[{one}]"
    several = row.is_list or row.name in ("batch", "seq", "precision", "checkpointing", "gpu")
    return (text if several else one) + (" | None" if row.default is None else "")


_HEAD = '''"""The settings that public functions take as keywords. Generated by generate.py; do not edit."""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict

from bertscope.reports.memory import TrainingFile
from bertscope.reports.plan import PlanReport
from bertscope.settings.training import TrainingArguments
from bertscope.torch_access import torch

'''
_OF_INPUTS = '''
class GivenInputs(TypedDict, total=False):
    """A module's inputs: tensor sizes with dtypes, or the inputs by torchinfo's keyword."""

    input_size: Sequence[int] | Sequence[Sequence[int]] | None
    dtypes: Sequence[torch.dtype] | None
    input_data: Any

class Files(GivenInputs, total=False):
    """Files from which settings come: TrainingArguments, and the JSON of a plan."""

    training_file: TrainingFile | TrainingArguments | str | PathLike[str] | None
    plan: PlanReport | str | PathLike[str] | None
'''


def keywords() -> str:
    """Return the text of `keywords.pyi`, which only type checkers read."""
    table = rows(*MEASURED)
    worded = [row for row in table.values() if row.choices and not row.convert]
    text = _HEAD
    for row in worded:
        line = f"{_alias(row)} = Literal{json.dumps(list(row.choices))}\n"
        each = "".join(f'    "{word}",\n' for word in row.choices)
        text += line if len(line) <= _LINE else f"{_alias(row)} = Literal[\n{each}]\n"
    seen: set[str] = set()
    text += _OF_INPUTS
    parent = "Files"
    for name, (records, without) in _CLASSES.items():
        own_rows = {key: row for key, row in rows(*records).items() if key not in {*seen, *without}}
        seen |= own_rows.keys()
        text += f'\nclass {name}({parent}, total=False):\n    """Settings of a run."""\n\n'
        text += "".join(f"    {key}: {_type(row)}\n" for key, row in own_rows.items())
        parent = name
    return text


if __name__ == "__main__":
    KEYWORDS.write_text(keywords(), encoding="utf-8")
