"""An adapter of peft as a model: its `adapter_config.json` is read as data, and its base model by name or path."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertscope.config import ALL_LINEAR, ARCHITECTURES, HEADS, Lora, unknown_architecture
from bertscope.errors import BertscopeError, ConfigError, SourceError
from bertscope.sources.bert import BertSource
from bertscope.sources.model_source import ModelSource
from bertscope.text_files import Entry, Mapping

ADAPTER_CONFIG = "adapter_config.json"
_CONFIG = "config.json"
TYPE = "peft_type"
_LORA = "LORA"
# The keys of an adapter_config.json that Lora has, by the name of its field. Source of all keys: peft 0.12.0.
_FIELDS = {
    "r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "target", "bias": "bias",
    "use_rslora": "rslora", "modules_to_save": "save",
}  # fmt: skip
# Those of it and of later versions without effect on names, counts and memory. Any other key is refused, unless its
# value is empty or false.
_WITHOUT_EFFECT = {
    TYPE, "base_model_name_or_path", "task_type", "auto_mapping", "revision", "inference_mode", "init_lora_weights",
    "fan_in_fan_out", "layers_pattern", "megatron_core", "loftq_config", "runtime_config", "corda_config", "eva_config",
    "peft_version", "qalora_group_size",
}  # fmt: skip
# The class that each task type implies, and the head that peft then saves; `score` is the head of other families.
_TASKS = {head.task_type: (name, head.layer) for name, head in HEADS.items() if head.task_type}
_NOT_OF_A_BERT = "score"


def read_adapter(entries: Mapping, path: Path, find_base: Callable[[str], ModelSource]) -> BertSource:
    """Return the BERT with the adapters that an `adapter_config.json` describes, under the name of its base model.

    The base model is the `config.json` in the same folder, if there is one, else `base_model_name_or_path`; `find_base`
    returns the model of a path from this folder, or of a name. Raises ConfigError or SourceError for a type or a
    setting that is not supported, and for a base model that is not found or no BERT.
    """
    if entries[TYPE].value != _LORA:
        raise entries[TYPE].error(
            f"{TYPE} must be {_LORA}; got {_shown(entries[TYPE])}; for another type give module:attribute of a "
            "function that returns peft's model",
            TYPE,
        )
    for key, entry in entries.items():
        if entry.value and key not in _WITHOUT_EFFECT and key not in _FIELDS:
            raise entry.error(
                f"{key[:60]} is not supported here; got {_shown(entry)}; remove it, or set it to null", key
            )
    task = entries["task_type"].value if "task_type" in entries else None
    architecture, head = _TASKS.get(task, (None, "")) if isinstance(task, str) else (None, "")
    if task and architecture is None:
        raise entries["task_type"].error(
            f"task_type must be one of {', '.join(_TASKS)}; got {_shown(entries['task_type'])}"
        )
    mapping = entries["auto_mapping"].value if "auto_mapping" in entries else None
    recorded = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    if recorded is not None and recorded not in ARCHITECTURES:
        raise unknown_architecture(recorded).at(entries["auto_mapping"].where)
    lora = _lora(entries, head)
    base = _base(entries, path, find_base)
    return replace(
        base,
        path=path,
        architecture=recorded or architecture or base.architecture,
        lora=lora,
        expected=(),
        stored_dtype=None,
    )


def _lora(entries: Mapping, head: str) -> Lora:
    values: dict[str, Any] = {}
    for key, field in _FIELDS.items():
        if key in entries and entries[key].value is not None:
            values[field] = entries[key].value
    if isinstance(target := values.get("target"), str):
        if target != ALL_LINEAR:
            raise entries["target_modules"].error(
                f"target_modules must be {ALL_LINEAR} or a list of names; a regular expression is not run; got "
                f"{_shown(entries['target_modules'])}"
            )
        values["target"] = (target,)
    try:
        lora = Lora(**values)
    except ConfigError as error:
        key = next(key for key, field in _FIELDS.items() if field == error.field)
        raise entries[key].error(error.message, key) from None
    saved = (*lora.save, *filter(None, [head]))
    save = tuple(dict.fromkeys(name for name in saved if name != _NOT_OF_A_BERT))
    return replace(lora, target=tuple(sorted(lora.target)), save=save)  # peft writes a set, in any order


def _base(entries: Mapping, path: Path, find_base: Callable[[str], ModelSource]) -> BertSource:
    given = entries.get("base_model_name_or_path")
    entry = given or entries[TYPE]
    name = _CONFIG if (path.parent / _CONFIG).is_file() else given and given.value
    if not isinstance(name, str) or not name:
        raise entry.error(
            "base_model_name_or_path names no model; write its name, or put its config.json into this folder"
        )
    try:
        base = find_base(name)
    except BertscopeError as error:
        raise SourceError(f"the base model: {error.marked}", where=entry.where) from None
    if not isinstance(base, BertSource):
        raise entry.error(
            f"the base model {name[:100]!r} is {base.family}, and adapters are for BERTs here; give module:attribute "
            "of a function that returns peft's model"
        )
    return base


def _shown(entry: Entry) -> str:
    return repr(entry.value)[:60]
