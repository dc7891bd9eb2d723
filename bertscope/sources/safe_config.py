"""The first protection against code from a `config.json`: settings that lead to other code are refused."""

import re
from collections.abc import Mapping
from typing import Any

from bertscope.errors import ConfigError
from bertscope.settings.run_config import FLASH_KERNELS

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
    """Return every string in a value, at any depth."""
    if isinstance(value, (dict, list)):
        return [name for item in (value.values() if isinstance(value, dict) else value) for name in _strings(item)]
    return [value] if isinstance(value, str) else []
