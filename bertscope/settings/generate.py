"""Texts that are generated from the rows: Python keywords with their types, words of a run, its command, and tables.

`python -m bertscope.settings.generate` writes `keywords.py`; a test compares the file with the rows.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, TypeVar

from bertscope.settings.rows import Row, Settings, rows
from bertscope.settings.run_config import ESTIMATED, MEASURED, QUESTIONS, RAN
from bertscope.units import exact_bytes

Function = TypeVar("Function", bound=Callable[..., Any])
_LINE = 121  # characters of a line with its end
KEYWORDS = Path(__file__).with_name("keywords.py")
# Each class has the settings of its records that those before it do not have; `fit` has its own batch and budget.
_CLASSES: dict[str, tuple[tuple[type[Settings], ...], tuple[str, ...]]] = {
    "FitSettings": (ESTIMATED, ("batch", "budget")), "RunSettings": (ESTIMATED, ()),
    "MeasurementSettings": (MEASURED, ()), "DryRunSettings": (RAN, ()),
}  # fmt: skip


def option_name(name: str) -> str:
    """Return the option of a setting: `--clip-grad-norm`."""
    return f"--{name.replace('_', '-')}"


_ALL = rows(*MEASURED)
OPTIONS = {name: option_name(name) for name in (*_ALL, *rows(*RAN), "batch_total")}
# What the messages of a command line call the settings, and other keywords of Python.
_OTHERS = ("architecture", "attention", "lora", "download", "tokenizer", "tokens_per_batch",
           "implementation", "nn_module", "direction", "depth", "cache", "head_mask", "may_change", "rows",
           "strip_prefix", "address", "engine", "workers")  # fmt: skip
FORMS = OPTIONS | {name: option_name(name) for name in _OTHERS} | {
    "field": "--lengths-field", "add_pooling_layer": "--pooler", "around": "--class",
    "given": "--batch, --seq, --cache, --mask or --head-mask", "dropout=False": "--no-dropout",
    "sandbox=False": "--no-sandbox",
    "to_csv()": "--format csv", "to_json()": "--format json", "to_svg()": "--format svg",
    "form": "--format", "to_markdown()": "-v",  # which shows all notes and rows too
}  # fmt: skip


def changed(*records: Settings) -> dict[str, Any]:
    """Return the settings whose values differ from their defaults."""
    pairs = [(record.flat(), type(record)().flat()) for record in records]
    return {name: value for values, first in pairs for name, value in values.items() if value != first[name]}


def option_words(own: Row, value: Any) -> list[str]:
    """Return the words of a command line that give a setting this value."""
    option = OPTIONS[own.name]
    if isinstance(value, bool):
        return [option if value else f"--no-{option[2:]}"]
    texts = [exact_bytes(value)] if own.is_size else list(value) if own.is_list else [str(value)]
    return [word for text in texts for word in ([f"{option}={text}"] if text.startswith("-") else [option, text])]


def setting_options(values: Mapping[str, Any]) -> str:
    """Return the options that give these values, for a shell."""
    return shlex.join(word for name, value in values.items() for word in option_words(_ALL[name], value))


def row_words(name: str, value: Any) -> str:
    """Return a setting in English words: `padding 0.25`, `no dropout`."""
    own, plain = _ALL[name], name.replace("_", " ")
    if own.text:
        return own.text.format(value)
    if isinstance(value, bool):
        return plain if value else f"no {plain}"
    return f"{plain} {' '.join(value) if own.is_list else value}"


def with_settings(function: Function) -> Function:
    """List the settings of a public function in its signature and its docstring, with the defaults of QUESTIONS."""
    question = QUESTIONS[function.__name__]
    own = [item for item in signature(function).parameters.values() if item.kind is not Parameter.VAR_KEYWORD]
    table = {name: row for name, row in question.table.items() if name not in {item.name for item in own}}
    listed = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in question.files]
    listed += [*_of_inputs(own), *(
        Parameter(name, Parameter.KEYWORD_ONLY, default=question.defaults.get(name, row.default))
        for name, row in table.items()
    )]  # fmt: skip
    function.__signature__ = Signature([*own, *listed])  # type: ignore[attr-defined]
    lines = "\n".join(f"        {name}: {row.help} Takes {row.takes}." for name, row in table.items())
    function.__doc__ = f"{(function.__doc__ or '').rstrip()}\n\n    Settings of the run:\n{lines}\n    "
    return function


def with_keywords_of(*others: Callable[..., Any]) -> Callable[[Function], Function]:
    """Return a decorator that lists the keywords of other functions in the signature of one that passes them on."""

    def decorate(function: Function) -> Function:
        own = [item for item in signature(function).parameters.values() if item.kind is not Parameter.VAR_KEYWORD]
        passed = [item for other in others for item in signature(other).parameters.values()]
        listed = [item.replace(kind=Parameter.KEYWORD_ONLY) for item in passed if item.default is not Parameter.empty]
        listed += _of_inputs([*own, *listed])
        function.__signature__ = Signature([*own, *listed])  # type: ignore[attr-defined]
        return function

    return decorate


def _alias(own: Row) -> str:
    return own.name.title().replace("_", "")


def _type(own: Row) -> str:
    plain = "int | str" if own.is_size else own.kind.__name__ + " | str" * own.or_file
    one = _alias(own) if own.words and not own.convert else plain
    if own.name == "loss":
        return "str | Callable[[Any, Any], Any]"
    text = f"{one} | Sequence[{one}]" if one in ("str", "int") else f"{one} | str | Sequence[{one}]"
    several = own.is_list or own.name in ("batch", "seq", "precision", "checkpointing", "gpu")
    return (text if several else one) + (" | None" if own.default is None else "")


INPUT_KEYWORDS = ("input_data", "input_size", "dtypes")
_OF_INPUTS = '''class GivenInputs(TypedDict, total=False):
    """The inputs of a module: the sizes of tensors with their dtypes, or the inputs by torchinfo's keyword."""

    input_size: Sequence[int] | Sequence[Sequence[int]] | None
    dtypes: "Sequence[torch.dtype] | None"
    input_data: Any
'''


def _of_inputs(known: Sequence[Parameter]) -> list[Parameter]:
    """Return the keywords of `GivenInputs` for a function that takes `inputs`, unless it lists them itself."""
    names = {item.name for item in known}
    missing = [name for name in INPUT_KEYWORDS if "inputs" in names and name not in names]
    return [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in missing]


def keywords() -> str:
    """Return the text of `keywords.py`."""
    table = rows(*MEASURED)
    worded = [own for own in table.values() if own.words and not own.convert]
    text = '"""The settings that public functions take as keywords. Generated by generate.py; do not edit."""\n\n'
    text += (
        "from collections.abc import Callable, Sequence\nfrom typing import TYPE_CHECKING, Any, Literal, TypedDict\n\n"
    )
    text += "if TYPE_CHECKING:\n    from os import PathLike\n\n    from bertscope.reports.memory import TrainingFile\n"
    text += "    from bertscope.reports.plan import PlanReport\n    from bertscope.torch_access import torch\n\n"
    for own in worded:
        line = f"{_alias(own)} = Literal{json.dumps(list(own.words))}\n"
        each = "".join(f'    "{word}",\n' for word in own.words)
        text += line if len(line) <= _LINE else f"{_alias(own)} = Literal[\n{each}]\n"
    seen: set[str] = set()
    text += "\n\n" + _OF_INPUTS
    text += """

class Files(GivenInputs, total=False):
    \"\"\"Files from which settings come: TrainingArguments, and the JSON of a plan.\"\"\"

    training_file: "TrainingFile | str | PathLike[str] | None"
    plan: "PlanReport | str | PathLike[str] | None"
"""
    parent = "Files"
    for name, (records, without) in _CLASSES.items():
        own_rows = {key: own for key, own in rows(*records).items() if key not in {*seen, *without}}
        seen |= own_rows.keys()
        text += f'\n\nclass {name}({parent}, total=False):\n    """Settings of a run."""\n\n'
        text += "".join(f"    {key}: {_type(own)}\n" for key, own in own_rows.items())
        parent = name
    return text


def markdown(*records: type[Settings]) -> str:
    """Return the table of settings for the documentation."""
    table = rows(*records)
    lines = ["| setting | takes | default | meaning |", "|---|---|---|---|"]
    for name, own in table.items():
        default = "" if own.default in (None, (), "") else f"`{str(own.default).lower()}`"
        lines.append(f"| `{name}` | {own.takes} | {default} | {own.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    KEYWORDS.write_text(keywords(), encoding="utf-8")
