"""Checks of a `config.json`: settings that lead to code are refused, and a family without a name is no BERT."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from bertscope.config import RULES, refuse_misspelling
from bertscope.errors import ConfigError
from bertscope.settings.run_config import FLASH_KERNELS
from bertscope.units import visible

_MAX_INTEGER = 2**31
MAX_LAYERS = 150  # each layer is built from real modules, also on the meta device; an encoder-decoder has two stacks
MAX_EXPERTS = 24_576  # over all layers; each is a module with submodules, except in transformers 5
MAX_LABELS = 100_000
# Fields that hold a number of modules, over all families; none of widths, proposals, records and codevectors.
_MODULES = re.compile(
    r"^(?!.*_(?:size|dim|channels?)(?:_|$))(?!.*_(?:sizes|proposals|records|per_group|of|bins)$)"
    r"(?:n_layer|layers|num_.*layers|.*(?:layers?$|_layers?_|blocks?$|block_|(?:hidden|num)_groups?$|inner_group|experts?"
    r"|stages?|depth))"
)
# The first of these that a field contains has its limit.
_LIMITS = ((re.compile("^num_labels$"), MAX_LABELS), (re.compile("experts?$"), MAX_EXPERTS), (_MODULES, MAX_LAYERS))
# Kernels that are part of torch and transformers; any other may be fetched from the hub, as code.
_KERNELS = {"attn": ("eager", "sdpa", *FLASH_KERNELS), "experts": ("eager", "batched_mm", "grouped_mm")}
_IMPLEMENTATION = re.compile(r"(attn|experts)_implementation")


# Blocks in each stage: He et al. 2015 (arXiv:1512.03385), table 1.
_RESNETS = {"resnet50": [3, 4, 6, 3], "resnet101": [3, 4, 23, 3]}
_STAGES = {"detr": 1, "table-transformer": 1, "conditional_detr": 1, "deformable_detr": 2}  # the first used
_BACKBONE = ("backbone", "backbone_config", "backbone_kwargs", "use_timm_backbone", "use_pretrained_backbone")


def with_resnet(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that build a ResNet of transformers for the one that a DETR names of timm, with no weights.

    Both have the same layers. Nothing for another family or backbone, and for one that is not as published.
    """
    first, name, kwargs = (config.get(key) for key in ("model_type", "backbone", "backbone_kwargs"))
    is_plain = isinstance(kwargs or {}, dict) and set(kwargs or {}) <= {"in_chans", "out_indices"}
    is_other = config.get("backbone_config") or config.get("dilation") or config.get("use_timm_backbone") is not True
    if str(first) not in _STAGES or str(name) not in _RESNETS or not is_plain or is_other:
        return {}
    features = [f"stage{number}" for number in range(_STAGES[str(first)], 5)]
    resnet = {"model_type": "resnet", "depths": _RESNETS[str(name)], "out_features": features}
    return dict.fromkeys(_BACKBONE) | {"backbone_config": resnet, "use_timm_backbone": False,
                                      "use_pretrained_backbone": False}  # fmt: skip


def without_code(value: Any) -> Any:
    """Return a copy of a configuration without `auto_map`, which names code in the model's repository."""
    if isinstance(value, dict):
        return {key: without_code(item) for key, item in value.items() if key != "auto_map"}
    return [without_code(item) for item in value] if isinstance(value, list) else value


def check_setting(key: str, value: Any, where: str) -> None:
    """Raise ConfigError for a setting that takes minutes or gigabytes, or that leads to code, files or the network."""
    if reason := _refusal(key, value):
        raise ConfigError(f"{key[:60]} {reason}", where=where, field=key)
    if isinstance(value, dict):
        for inner, item in value.items():
            check_setting(str(inner), item, where)
    elif isinstance(value, list):
        for item in value:
            check_setting(key, item, where)
    elif isinstance(value, int):
        most = next((limit for words, limit in _LIMITS if words.search(key)), _MAX_INTEGER)
        if abs(value) > most:
            shown = f"{value:,}" if value.bit_length() < 100 else "an integer of more than 30 digits"
            raise ConfigError(f"{key[:60]} may be at most {most:,} here; got {shown}", where=where, field=key)


def largest_layers(config: Mapping[str, Any]) -> int:
    """Return the largest number of layers that a configuration, or one inside it, gives; 0 without one."""
    numbers = [value for key, value in config.items() if type(value) is int and _MODULES.search(key)]
    return max([*numbers, *(largest_layers(value) for value in config.values() if isinstance(value, dict))], default=0)


def check_experts(config: dict[str, Any], where: str) -> None:
    """Raise ConfigError if layers times experts are too many modules, in a configuration or one inside it."""
    for value in config.values():
        if isinstance(value, dict):
            check_experts(value, where)
    counts = [(key, value) for key, value in config.items() if type(value) is int and _MODULES.search(key)]
    experts = max((value for key, value in counts if "expert" in key), default=0)
    layers = max((value for key, value in counts if "expert" not in key), default=1)
    if experts * layers > MAX_EXPERTS:
        raise ConfigError(
            f"{layers:,} layers of {experts:,} experts are {layers * experts:,} modules; at most {MAX_EXPERTS:,} are "
            "built here; lower the number of layers and multiply",
            where=where,
        )


def _refusal(key: str, value: Any) -> str:
    """Return why a setting is refused: transformers or timm would load a model, weights or code because of it."""
    if not value:
        return ""
    if kind := _IMPLEMENTATION.search(key):
        allowed = _KERNELS[kind[1]]
        unknown = [name for name in _strings(value) if name not in allowed]
        return f"may be {' or '.join(allowed)} here; got {unknown[0][:60]!r}; remove it" if unknown else ""
    if "backbone" in key and isinstance(value, str):
        return f"names another model ({value[:60]!r}), which is not loaded; describe it in backbone_config instead"
    if key == "backbone_kwargs" or re.fullmatch(r"use_\w+_backbone", key):
        return "is for a backbone that is loaded by its name; remove it, and describe the backbone in backbone_config"
    if key == "architecture" and isinstance(value, str) and re.search(r"[:/]", value):
        return f"names a place ({value[:60]!r}), from which nothing is loaded; name an architecture of timm"
    if key == "checkpoint_path":
        return "names a file of weights, which are not loaded; remove it"
    if key in ("trust_remote_code", "attribute_map"):
        return "is refused, since a configuration is data and no code of its model is run; remove it"
    return ""


def _strings(value: Any) -> list[str]:
    if isinstance(value, (dict, list)):
        return [name for item in (value.values() if isinstance(value, dict) else value) for name in _strings(item)]
    return [value] if isinstance(value, str) else []


# ---- a configuration without `model_type`, which transformers writes since 2.2 ----

_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@cache
def _keys() -> tuple[frozenset[str], dict[str, str]]:
    found = yaml.safe_load(Path(__file__).with_name("family_keys.yaml").read_text(encoding="utf-8"))
    return frozenset(found["common"]), found["families"]


def check_family(members: Mapping[str, Any]) -> None:
    """Raise ConfigError for a configuration without `model_type` that has a key of another family."""
    if "model_type" in members:
        return
    common, families = _keys()
    known = RULES.keys() | common
    if strange := [name for name in members if name not in known and not str(name).startswith("_")]:
        if len(strange) == 1:
            refuse_misspelling(str(strange[0]), members)
        of = next((of for keys, of in families.items() if any(name in strange for name in keys.split())), "")
        family = f"with its family, by these keys {of}" if of else 'with its family; "bert" passes over such keys'
        names = ", ".join(map(str, strange[:3])) + " ..." * (len(strange) > 3)
        verb = "is no key" if len(strange) == 1 else "are no keys"
        raise ConfigError(
            f'there is no model_type, and {names} {verb} of a BERT; add "model_type" {family}', field=strange[0]
        )


def check_complete(members: Mapping[str, Any]) -> None:
    """Raise ConfigError for a configuration without `model_type` and class that lacks what makes a BERT."""
    absent = [name for name in _NEEDED if name not in members]
    if absent and not {"model_type", "architectures"} & members.keys():
        raise ConfigError(
            f"there is no model_type, and no {', '.join(absent)} as in a BERT's config.json; give the file of a model"
        )


def file_notes(members: Mapping[str, Any]) -> str:
    """Return notes on what a configuration says and bertscope does not follow; an empty text without any."""
    found = []
    if members.get("auto_map"):
        found.append(
            "auto_map names code in the model's repository, which is not run: its network may differ from this"
        )
    if quantized := members.get("quantization_config"):
        method = str(quantized.get("quant_method", "")) if isinstance(quantized, Mapping) else ""
        method = f" ({visible(method[:40])})" if method else ""
        found.append(f"quantization_config{method} is not followed: all weights are taken as before quantization")
    return "\n".join(found)
