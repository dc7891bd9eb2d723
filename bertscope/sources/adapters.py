"""Adapters of peft: an `adapter_config.json` is read as data; its base model is found by name or path."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertscope.config import (
    ALL_LINEAR,
    ARCHITECTURES,
    HEADS,
    LORA_KEYS,
    MAX_BUILT_LAYERS,
    MAX_DIMENSION,
    MAX_LORA_NAMES,
    Lora,
    unknown_architecture,
)
from bertscope.errors import BertscopeError, ConfigError, SourceError
from bertscope.files import Entry
from bertscope.files import Mapping as Entries
from bertscope.sources.model_source import ModelSource

ADAPTER_CONFIG = "adapter_config.json"
_CONFIG = "config.json"
TYPE = "peft_type"
_LORA = "LORA"
_TYPES = (_LORA, "ADALORA", "IA3", "VERA", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING", "TRAINABLE_TOKENS")
# The further keys of an adapter_config.json that peft's classes get. Source of all keys: peft 0.12.0 to 0.21.
_FURTHER = (
    "exclude_modules fan_in_fan_out layers_to_transform layers_pattern rank_pattern alpha_pattern "
    "trainable_token_indices use_dora lora_bias target_parameters target_r init_r tinit tfinal deltaT beta1 beta2 "
    "orth_reg_weight total_step feedforward_modules projection_prng_key save_projection vera_dropout d_initial "
    "num_virtual_tokens token_dim num_transformer_submodules num_attention_heads num_layers encoder_hidden_size "
    "prefix_projection encoder_reparameterization_type encoder_num_layers encoder_dropout token_indices"
)
_SHOWN = {"r": "r", "lora_alpha": "alpha", "lora_dropout": "dropout", "use_dora": "dora"}
_KEYS = {*LORA_KEYS, *_FURTHER.split()}
# Those without effect on names, counts and memory. Any other key is refused, unless its value is empty or false: it
# may load a model or import code.
_WITHOUT_EFFECT = {
    TYPE, "base_model_name_or_path", "task_type", "auto_mapping", "revision", "inference_mode", "init_lora_weights",
    "init_ia3_weights", "init_weights", "megatron_core", "loftq_config", "runtime_config", "corda_config", "eva_config",
    "peft_version", "qalora_group_size", "prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path",
    "ensure_weight_tying",
}  # fmt: skip
_NO_PEFT = {"fan_in_fan_out", "layers_pattern"}  # without effect on the adapters of a BERT, which need no peft
# The class that each task type implies, and the head that peft then saves; `score` is the head of other families.
_TASKS = {head.task_type: (name, head.layer) for name, head in HEADS.items() if head.task_type}
_NOT_OF_A_BERT = "score"
# The class of transformers for a task type, of any other family. Source: peft's MODEL_TYPE_TO_PEFT_MODEL_MAPPING.
_AUTO = {
    "SEQ_CLS": "AutoModelForSequenceClassification", "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "CAUSAL_LM": "AutoModelForCausalLM", "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering", "FEATURE_EXTRACTION": "AutoModel",
}  # fmt: skip


def base_of(entries: Entries, path: Path, find_base: Callable[[str], ModelSource]) -> ModelSource:
    """Return an adapter's base model: of the `config.json` in the same folder, else of `base_model_name_or_path`.

    `find_base` returns the model for a path from this folder or a name. Raises SourceError if it is not found.
    """
    named = entries.get("base_model_name_or_path")
    entry = named or entries[TYPE]
    name = _CONFIG if (path.parent / _CONFIG).is_file() else named and named.value
    if not isinstance(name, str) or not name:
        raise entry.error(
            "base_model_name_or_path names no model; write its name, or put its config.json into this folder"
        )
    try:
        return find_base(name)
    except BertscopeError as error:
        raise SourceError(f"the base model: {error.marked}", where=entry.where) from None


def read_adapter(
    entries: Entries, path: Path, base: ModelSource, of_transformers: Callable[[ModelSource], ModelSource]
) -> ModelSource:
    """Return the base model with the adapters that an `adapter_config.json` describes, under the base model's name.

    Plain LoRA of a BERT needs no peft; other adapters get the BERT `of_transformers`. Raises ConfigError for a type or
    a setting that is not supported.
    """
    if entries[TYPE].value not in _TYPES:
        raise entries[TYPE].error(
            f"{TYPE} must be one of {', '.join(_TYPES)}; got {_shown(entries[TYPE])}; for another type give "
            "module:attribute of a function that returns peft's model",
            TYPE,
        )
    for key, entry in entries.items():
        if entry.value and key not in _WITHOUT_EFFECT | _KEYS:
            raise entry.error(f"{key[:60]} is not supported; got {_shown(entry)}; remove it, or set it to null", key)
        is_text = key == "target_modules" and isinstance(entry.value, str) and entry.value != ALL_LINEAR
        if is_text and not re.fullmatch(r"\w+(\.\w+)+", entry.value):  # a path is a regular expression of one layer
            raise entry.error(
                f"target_modules must be {ALL_LINEAR}, a path or a list of names; a regular expression is not run; got "
                f"{_shown(entry)}"
            )
    values = entries.plain()
    task, mapping = values.get("task_type"), values.get("auto_mapping")
    if task and not (isinstance(task, str) and task in _AUTO):
        raise entries["task_type"].error(
            f"task_type must be one of {', '.join(_AUTO)}; got {_shown(entries['task_type'])}"
        )
    recorded = mapping.get("base_model_class") if isinstance(mapping, dict) else None
    if recorded is not None and not isinstance(recorded, str):
        raise unknown_architecture(recorded).at(entries["auto_mapping"].where)
    is_bert = base.bert_config is not None
    architecture, head = _TASKS.get(str(task), ("", "")) if is_bert else (_AUTO.get(str(task), ""), "")
    if is_bert and task and not architecture:
        raise entries["task_type"].error(
            f"task_type must be one of {', '.join(_TASKS)} for a BERT; got {_shown(entries['task_type'])}"
        )
    if is_bert and recorded is not None and recorded not in ARCHITECTURES:
        raise unknown_architecture(recorded).at(entries["auto_mapping"].where)
    base = replace(base, architecture=recorded or architecture or base.architecture, stored_dtype=None)
    used = {key: entry for key, entry in entries.items() if entry.value and key in _KEYS}
    if is_bert and entries[TYPE].value == _LORA and used.keys() <= LORA_KEYS.keys() | _NO_PEFT:
        changes: Any = {"path": path, "lora": _lora(entries, head), "expected": ()}  # fields of a BERT
        return replace(base, lora_where=entries.get("target_modules", entries[TYPE]).where, **changes)
    used |= {key: entry for key, entry in entries.items() if entry.value == [] and key in _KEYS}  # "no layer"
    plain = {key: value for key, value in values.items() if key in used}
    for key, value in plain.items():
        most = MAX_BUILT_LAYERS if key.endswith("num_layers") else MAX_DIMENSION
        if not _is_plain(value, most):
            raise used[key].error(f"{key} must have names, and numbers up to {most:,}; got {_shown(used[key])}", key)
    adapter = {TYPE: entries[TYPE].value} | ({"task_type": task} if task else {}) | plain
    numbers = {key: value for key, value in adapter.items() if key in _SHOWN and value}
    settings = ",".join(f"{name}={str(numbers[key]).lower()}" for key, name in _SHOWN.items() if key in numbers)
    shown = settings if adapter[TYPE] == _LORA else adapter[TYPE]
    return of_transformers(base).adapted(adapter, shown)


def _is_plain(value: Any, most: int) -> bool:
    """Return True for numbers and names, also in lists and mappings: no path, no regular expression, no huge size."""
    if isinstance(value, Mapping):
        return all(_is_plain(item, most) for pair in value.items() for item in pair)
    if isinstance(value, list):
        return len(value) <= MAX_LORA_NAMES and all(_is_plain(item, most) for item in value)
    if isinstance(value, str):
        return re.fullmatch(r"[\w.-]{1,200}", value, re.ASCII) is not None
    return isinstance(value, (int, float)) and 0 <= value <= most


def _lora(entries: Entries, head: str) -> Lora:
    values: dict[str, Any] = {}
    for key, name in LORA_KEYS.items():
        if key in entries and entries[key].value is not None:
            values[name] = entries[key].value
    if isinstance(target := values.get("target"), str):
        values["target"] = (target,)
    try:
        lora = Lora(**values)
    except ConfigError as error:
        key = next(key for key, name in LORA_KEYS.items() if name == error.field)
        raise entries[key].error(error.of_file, key) from None
    saved = (*lora.save, *filter(None, [head]))
    save = tuple(dict.fromkeys(name for name in saved if name != _NOT_OF_A_BERT))
    target = tuple(sorted(lora.of_bert().target or ()))  # peft writes a set, in any order
    return replace(lora, target=target, save=save)


def _shown(entry: Entry) -> str:
    return repr(entry.value)[:60]
