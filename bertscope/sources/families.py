"""The family of a configuration without `model_type`, by its keys, and notes on what a configuration says.

transformers writes `model_type` since 2.2; older files and those of the first BERT have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from bertscope.config import RULES, refuse_misspelling
from bertscope.errors import ConfigError
from bertscope.units import visible

_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


@cache
def _keys() -> tuple[frozenset[str], dict[str, str]]:
    """Return the keys that shape no BERT, and the families of those that BERT lacks."""
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
    if (
        absent := []
        if {"model_type", "architectures"} & members.keys()
        else [name for name in _NEEDED if name not in members]
    ):
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
