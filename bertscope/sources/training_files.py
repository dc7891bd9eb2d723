"""Files that settings come from: TrainingArguments, accelerate's and two trainers' configs, plans, and prices.

Each key has one effect on a training step's memory: it sets settings (rows name their keys), it
has none, it is not modelled, or it is unknown.
"""

import math
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import field
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from bertscope.config import ALL_LINEAR, Lora
from bertscope.errors import (
    BertscopeError,
    BertscopeWarning,
    ConfigError,
    SelectionError,
    SourceError,
    name_of,
    one_line,
    typed_arguments,
)
from bertscope.files import Entry, open_file, read_json, read_mapping, read_text
from bertscope.files import Mapping as Entries
from bertscope.frozen import Record
from bertscope.gpus import find_gpu, typed_prices
from bertscope.reports.memory import TrainingFile, TrainingKey
from bertscope.reports.plan import PlanReport
from bertscope.settings.checkpointing import FULL, NONE, Checkpointing
from bertscope.settings.request import in_words, read_settings
from bertscope.settings.run_config import AUTOCAST, SETTINGS, TRAINER
from bertscope.settings.training import NotModelledError, TrainingArguments, whole_number
from bertscope.units import BF16, FP16

_WANTED = (
    "give the output of TrainingArguments.to_json_string() as a .json file, or a configuration of accelerate "
    "(default_config.yaml), axolotl or LLaMA-Factory"
)
# A torch file is a zip archive, in old versions a pickle, whose first opcode is PROTO (pickletools in the standard
# library).
_ARCHIVES = (b"PK\x03\x04", b"\x80")
Fields = dict[str, Any]  # settings and their values
Rule = Callable[[Any, Mapping[str, Any]], Fields]  # of a key's value and all values; may raise as a rule of a setting


def _rule_of(key: str) -> Rule:
    rules = {name: row.trainer[key] for name, row in SETTINGS.items() if key in row.trainer}

    def fields(value: Any, keys: Mapping[str, Any]) -> Fields:
        results = {name: rule(value, keys) for name, rule in rules.items()}
        return {name: item for name, item in results.items() if item is not None}

    return fields


# Those of one format occur in files of the other without harm.
_RULES = {key: _rule_of(key) for row in SETTINGS.values() for key in row.trainer}


def _is_off(value: Any) -> bool:
    if isinstance(value, dict):  # such as dynamo_config, whose backend may be NO
        return all(_is_off(item) for item in value.values())
    return value is None or value is False or value in ("", "no", "NO") or value == []


class _Format(Record, kw_only=False):
    name: str
    identifying: tuple[str, ...]
    absent: dict[str, dict[str, Any]]  # features that are not modelled: `effect`, and the values `unused`
    no_effect: frozenset[str]
    rules: dict[str, Rule]
    fields: Fields = field(default_factory=dict)  # whatever the keys are
    renamed: dict[str, str] = field(default_factory=dict)  # the key of TrainingArguments that a key becomes
    offloads: bool = False  # gradient_checkpointing may be `offload`, which needs less memory than full
    usual: dict[str, Any] = field(default_factory=dict)  # keys that a file need not have, with a rule
    skips_null: bool = False  # a key without a value is a key that is not there


def _when(values: tuple[Any, ...], **fields: Any) -> Rule:
    return lambda value, keys: fields if value in values else {}


def _length(value: Any, keys: Mapping[str, Any]) -> Fields:
    return {"seq": whole_number(value, keys)}


def _quantized(value: Any, keys: Mapping[str, Any]) -> Fields:
    # Both quantize the scales too unless a key says otherwise: loaders/model.py of axolotl, model/model_utils/
    # quantization.py of LLaMA-Factory.
    bits = 8 if keys.get("load_in_8bit") else 4 if keys.get("load_in_4bit") else value
    if bits not in (4, 8, False):
        raise NotModelledError("weights in 4 or 8 bits of another kind")
    in_4_bits = "nf4" if keys.get("double_quantization") is False else "nf4-dq"
    return {"quantize": "int8" if bits == 8 else in_4_bits} if bits else {}


_HELD_OUT = ("val_set_size", "test_datasets", "eval_strategy", "evaluation_strategy", "eval_steps", "eval_batch_size")


def _held_out(value: Any, keys: Mapping[str, Any]) -> Fields:
    # axolotl evaluates held-out data, in the batches of the training unless a key says another. Sources:
    # core/builders/base.py and normalize_config in utils/config/__init__.py.
    has_data = any(keys.get(name) for name in _HELD_OUT[:2])
    if not has_data or ("no" in (keys.get(name) for name in _HELD_OUT[2:4]) and not keys.get("eval_steps")):
        return {}
    size = keys.get("eval_batch_size") or keys.get("per_device_train_batch_size")
    return {"eval_batch": 1 if size is None else whole_number(size, keys)}


# Keys of trainers -> names in --lora, an option of the model and no setting of a run.
_LORA_NAMES = {"lora_r": "r", "lora_rank": "r", "lora_alpha": "alpha", "lora_dropout": "dropout",
               "lora_target_modules": "target", "lora_target": "target"}  # fmt: skip
_LORA_KEYS = "adapter", "finetuning_type", "lora_target_linear", *_LORA_NAMES


def _adapters(value: Any, keys: Mapping[str, Any]) -> Fields:
    kind = keys.get("adapter", keys.get("finetuning_type"))
    if kind not in ("lora", "qlora", "full", None):
        raise NotModelledError("adapters of another kind, or frozen layers")
    adapter = {name: keys[key] for key, name in _LORA_NAMES.items() if keys.get(key)}
    if keys.get("lora_target_linear") or adapter.get("target") == "all":
        adapter["target"] = ALL_LINEAR
    if isinstance(target := adapter.get("target"), str) and not set(target).isdisjoint("()[]|*\\^$"):
        raise ConfigError("the target of LoRA is a pattern; replace it with a list, such as [q_proj, v_proj]")
    lists = {name: "+".join(map(str, item)) if isinstance(item, list) else item for name, item in adapter.items()}
    text = ",".join(f"{name}={str(item).replace(',', '+')}" for name, item in lists.items())
    return {"lora": str(Lora.parse(text or "r=8"))} if kind in ("lora", "qlora") else {}


# What a file of a format sets beside the keys of training_keys.yaml. axolotl loads the weights in the dtype in which it
# computes; LLaMA-Factory recomputes layers unless the file says otherwise (model/model_utils/checkpointing.py).
_OWN: dict[str, dict[str, Any]] = {
    "LLaMA-Factory": {
        "rules": {"cutoff_len": _length, "pure_bf16": _when((True,), precision=BF16.name),
                  "disable_gradient_checkpointing": _when((True,), checkpointing=NONE),
                  "quantization_bit": _quantized, **dict.fromkeys(_LORA_KEYS, _adapters)},
        "usual": {"finetuning_type": "lora", "lora_target": "all"},  # hparams/finetuning_args.py
        "fields": {"loop": TRAINER, "batch": 8, "checkpointing": FULL, "reentrant": True}, "skips_null": True,
    },
    "axolotl": {
        "rules": {"sequence_len": _length, BF16.name: _when((True, "auto", "full", "true"), precision=BF16.name),
                  FP16.name: _when((True, "true"), precision=f"{AUTOCAST}{FP16.name}"),
                  **dict.fromkeys(("load_in_4bit", "load_in_8bit"), _quantized),
                  **dict.fromkeys(_HELD_OUT, _held_out), **dict.fromkeys(_LORA_KEYS, _adapters)},
        "fields": {"loop": TRAINER, "batch": 1}, "skips_null": True, "offloads": True,
    },
    "TrainingArguments": {"fields": {"loop": TRAINER}},
    "accelerate config": {},
}  # fmt: skip


@cache
def _formats() -> tuple[_Format, ...]:
    listed = yaml.safe_load(Path(__file__).with_name("training_keys.yaml").read_text(encoding="utf-8"))
    formats = []
    for name, form in _OWN.items():
        rows = [listed[name]] if name == "accelerate config" else [listed["TrainingArguments"], listed[name]]
        parts = {
            "identifying": tuple(listed[name]["identifying"]),
            "renamed": listed[name].get("renamed", {}),
            "absent": {key: row for one in rows for key, row in one["absent"].items()},
            "no_effect": frozenset(key for one in rows for key in one["no_effect"]),
            "rules": _RULES | form.get("rules", {}),
        }
        formats.append(_Format(name, **form | parts))
    return tuple(formats)


@typed_arguments
def read_training_file(path: Path | str | TrainingArguments) -> TrainingFile:
    """Return the settings in a `TrainingArguments` object or JSON, or in an accelerate config.

    Raises SourceError for a file that is neither, with its line if it has one, and ConfigError for a value that no
    run has.

    >>> bertscope.read_training_file("args.json").fields["accumulate"]  # of TrainingArguments.to_json_string()
    4
    """
    text = "" if isinstance(path, str | os.PathLike) else path.to_json_string()
    path = Path(path if isinstance(path, str | os.PathLike) else type(path).__name__)
    if not text:
        with open_file(path, _WANTED) as file:
            if file.read(4).startswith(_ARCHIVES):
                raise SourceError(
                    f"{path} is a pickle, which can run code, and bertscope loads none; "
                    "save TrainingArguments.to_json_string() to a .json file and give that"
                )
    try:
        entries = read_json(text, path) if text else read_mapping(path)
    except SourceError as error:  # the remedy after the semicolon names presets
        raise SourceError(f"{error.message.parts()[0]}; {_WANTED}", where=error.where) from None
    if "peft_type" in entries:
        raise SourceError(f"{path} describes adapters and no training; give it with {name_of('lora')} FILE")
    form = next((form for form in _formats() if not entries.keys().isdisjoint(form.identifying)), None)
    if "model_class" in entries or not entries.keys().isdisjoint(("peft_config", "dist_config", "kernel_config")):
        what = "it is a file of LLaMA-Factory's v1 trainer, which is not read; give its settings as options"
        raise SourceError(what, where=f"{path}:1")
    if form is None:
        names = ", ".join(name for form in reversed(_formats()) for name in form.identifying)
        raise SourceError(f"{path} describes no training, since it has none of {names}; {_WANTED}")
    return _read(entries, form, path)


def place_of_adapters(file: TrainingFile) -> str:
    """Return `file:line` of the adapters' targets, or the file's path where no line is known."""
    with suppress(BertscopeError):
        targets = (entry for key, entry in read_mapping(Path(file.path)).items() if _LORA_NAMES.get(key) == "target")
        return next((entry.where for entry in targets), file.path)
    return file.path


def _read(entries: Entries, form: _Format, path: Path) -> TrainingFile:
    values = form.usual | {form.renamed.get(key, key): value for key, value in entries.plain().items()}
    fields: Fields = dict(form.fields)
    with suppress(NotModelledError):  # which the key itself says
        for key in form.usual.keys() - entries.keys():
            fields |= form.rules[key](values[key], values)
    lists: dict[str, list[TrainingKey]] = {"used": [], "no_effect": [], "not_modelled": [], "unknown": []}
    for key, entry in entries.items():
        renamed = form.renamed.get(key, key)
        value = _finite(values[renamed])
        if form.offloads and key == "gradient_checkpointing" and str(value).startswith("offload"):
            value = values[renamed] = True
        rule, absent = form.rules.get(key) or form.rules.get(renamed), form.absent.get(key)
        if value is None and form.skips_null:
            kind, effect = "no_effect", ""
        elif rule is not None:
            kind, effect = _apply(key, rule, value, values, fields, entry)
        elif absent is not None and (_is_off(value) or value in absent.get("unused", ())):
            kind, effect = "no_effect", "not used"
        elif absent is not None:
            kind, effect = "not_modelled", absent["effect"]
        else:
            kind, effect = "no_effect" if key in form.no_effect else "unknown", ""
        shown = "hidden" if key.endswith("_token") else value
        lists[kind].append(TrainingKey(key=key, value=shown, effect=effect))
    kinds = {name: tuple(rows) for name, rows in lists.items()}
    return TrainingFile(path=str(path), format=form.name, lora=fields.pop("lora", None), fields=fields, **kinds)


def _apply(key: str, rule: Rule, value: Any, values: Fields, fields: Fields, entry: Entry) -> tuple[str, str]:
    try:
        result = rule(value, values)
    except ValueError as error:
        detail = f" must be {error}; got {value!r:.40}"
        if isinstance(error, BertscopeError):
            detail = f": {error.of_file}"
        raise entry.error(f"{key}{detail}", key) from None
    except NotModelledError as reason:
        return "not_modelled", str(reason)
    if "precision" in fields.keys() & result.keys() and fields["precision"] != result["precision"]:
        raise entry.error(f"{key} contradicts {fields['precision']}, which is set too; keep one", key)
    fields |= result
    try:
        read_settings({name: item for name, item in result.items() if name in SETTINGS})
    except BertscopeError as error:
        raise entry.error(f"{key}: {error.of_file}", key) from None
    return ("used", in_words(result)) if result else ("no_effect", "")


def _finite(value: Any) -> Any:
    """Return the value with `nan` and `inf` as text, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# ---- plan files: the JSON of `bertscope plan`, whose first plan other commands take ----

_WANTED_PLAN = "give what 'bertscope plan' wrote as JSON"


def read_plan(path: str | os.PathLike[str]) -> PlanReport:
    """Return the report in a file; raises SourceError for another file, and for a plan that did not fit."""
    from bertscope.reports.json import from_json

    file = Path(path)
    text = read_text(file, _WANTED_PLAN)
    try:
        report = from_json(text)
        if not isinstance(report, PlanReport) or not report.rows:
            raise SourceError("it has no rows of a plan")
        Checkpointing.parse(report.rows[0].checkpointing)
    except BertscopeError as error:
        reason = one_line(error.message.parts()[0], limit=160)
        raise SourceError(f"{file} is not a plan ({reason}); {_WANTED_PLAN}") from None
    if not report.fits:
        raise SourceError(f"{file}: no plan in it fits; {_WANTED_PLAN}")
    return report


# ---- prices of GPU hours, typed by the user or in a dated file; bertscope knows no price itself ----

OLD_DAYS = 90  # after which a file's prices are said to be old


class Prices(Record, kw_only=False):
    """The price of an hour of each GPU, by name, and their currency, which typed prices do not have."""

    hours: dict[str, float]
    currency: str = ""


def read_prices(prices: str) -> Prices:
    """Return the prices in `t4=0.35,l4=0.71` or in a YAML file with `date`, `currency` and `prices`.

    Warns of a file older than OLD_DAYS. Raises SourceError for a file without prices or date, SelectionError for a
    wrong text.
    """
    if "=" in prices:
        return Prices(typed_prices(prices))
    path = Path(prices)
    entries = read_mapping(path)
    for key in ("date", "prices"):
        if key not in entries:
            raise SourceError(f"lacks {key}; a file of prices has date, currency and prices", where=f"{path}:1")
    entries.refuse_unknown(("date", "currency", "prices"), "a file of prices")
    hours: dict[str, float] = {}
    for name, entry in entries["prices"].mapping("prices").items():
        if type(entry.value) not in (int, float) or not 0 < entry.value < 1e6:
            raise entry.error(f"{name} must be the price of an hour, a number above 0")
        try:
            gpu = find_gpu(name).name
        except SelectionError as error:
            raise error.at(entry.where) from None
        if gpu in hours:
            raise entry.error(f"{gpu} has two prices; keep one")
        hours[gpu] = float(entry.value)
    if not hours:
        raise entries["prices"].error("prices is empty; add a line for each GPU, such as t4: 0.35")
    is_short = lambda text: isinstance(text, str) and len(text) < 9  # noqa: E731
    currency: str = entries.checked("currency", "", is_short, "a short word")
    try:
        age = (date.today() - date.fromisoformat(str(entries["date"].value))).days
    except ValueError:
        raise entries["date"].error("date must be the day of the prices, such as 2026-11-28") from None
    if age < -1:  # one day ahead it may be elsewhere
        raise entries["date"].error("date is in the future; write the day of the prices")
    if age > OLD_DAYS:
        warnings.warn(BertscopeWarning(f"the prices in {path} are {age:,} days old; look them up again"), stacklevel=2)
    return Prices(hours, currency)
