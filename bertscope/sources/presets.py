"""Presets: one YAML file each, with a complete configuration and expected values.

description: BERT-base, cased English
hub_names: [google-bert/bert-base-cased]
architecture: BertForMaskedLM
add_pooling_layer: false        # BertModel only
printed_attention: eager        # the kernel that `tree --style torch` shows, instead of that of the configuration
config: {vocab_size: 28996, ...}
extra: {directionality: bidi}   # other members of the config.json that `presets NAME --config` prints
expected: {distinct_params: 108340804, ...}   # more in `expectations`
"""

from pathlib import Path
from typing import Any

from bertscope.config import ARCHITECTURES, ATTENTION_KERNELS, RULES, BertConfig, unknown_architecture
from bertscope.errors import ConfigError
from bertscope.sources.bert import BertSource
from bertscope.sources.expectations import read_expectations
from bertscope.text_files import Mapping, read_mapping, with_places

KEYS = (
    "description", "hub_names", "architecture", "add_pooling_layer", "printed_attention", "config", "extra", "expected",
)  # fmt: skip
PRESET_ONLY = ("description", "hub_names", "add_pooling_layer", "printed_attention", "expected")
MEMBER = "bertscope"  # the member of a config.json with the keys that only a preset has


def preset_dir() -> Path:
    """Return the folder of presets: inside an installed wheel, or at the top of a checkout."""
    inside = Path(__file__).parents[1] / "_presets"
    return inside if inside.is_dir() else Path(__file__).resolve().parents[2] / "presets"


def preset_paths() -> dict[str, Path]:
    """Return the files of presets by their names, in the order of the names."""
    return {path.stem: path for path in sorted(preset_dir().glob("*.yaml"))}


def config_paths() -> dict[str, Path]:
    """Return the presets of other families: a config.json that transformers builds, with a member "bertscope"."""
    return {path.stem: path for path in sorted(preset_dir().glob("*.json"))}


def read_preset(path: Path) -> BertSource:
    """Return the preset in a YAML file; raises ConfigError or SourceError with file and line."""
    return preset_of(read_mapping(path), path)


def preset_of(entries: Mapping, path: Path, *, allow_code: bool = False) -> BertSource:
    """Return the preset in the entries of a file."""
    entries.refuse_unknown(KEYS, "the preset")
    for needed in ("architecture", "config"):
        if needed not in entries:
            raise ConfigError(
                f"the key {needed!r} is missing; a preset needs architecture and config", where=f"{path}:1"
            )
    fields, architecture = entries["config"].mapping("config", RULES), entries["architecture"]
    for name, entry in fields.items():
        if isinstance(entry.value, Mapping) and RULES[name].kind is not dict:
            raise entry.error(f"{name} must be {RULES[name].allowed()}; got a mapping")
    try:
        config = BertConfig(**fields.plain())
    except ConfigError as error:
        raise error.at(fields.get(error.field, entries["config"]).where) from None
    if "extra" in entries:
        entries["extra"].mapping("extra")
    if not isinstance(architecture.value, str) or architecture.value not in ARCHITECTURES:
        raise unknown_architecture(architecture.value).at(architecture.where)
    return BertSource(
        name=path.stem, path=path, config=config, config_lines=fields.lines(), architecture=architecture.value,
        **_preset_only(entries, permit=allow_code),
    )  # fmt: skip


def config_members(path: Path) -> dict[str, Any]:
    """Return the members of a preset's config.json, sorted as transformers writes them."""
    data = read_mapping(path).plain()
    if path.suffix == ".json":
        members = {name: value for name, value in data.items() if name != MEMBER}
    else:
        own = {"architectures": [data["architecture"]], "model_type": "bert"}
        members = own | data["config"] | data.get("extra", {})
    return dict(sorted(members.items()))


def member_of(members: Mapping) -> dict[str, Any]:
    """Return the keys that only a preset has, from the member "bertscope" of a config.json.

    It has only such keys; that of another project may have others, and is passed over.
    """
    entry = members.get(MEMBER)
    is_own = entry is not None and isinstance(entry.value, dict) and set(entry.value) <= set(PRESET_ONLY)
    return _preset_only(with_places(entry.value, entry)) if entry and is_own else {}


def _preset_only(entries: Mapping, *, permit: bool = False) -> dict[str, Any]:
    names = entries.checked(
        "hub_names", [], lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
        "a list of names such as google-bert/bert-base-cased",
    )  # fmt: skip
    kernels = f"one of {', '.join(ATTENTION_KERNELS)}"
    return {
        "add_pooling_layer": entries.checked("add_pooling_layer", True, bool, "true or false"),
        "printed_attention": entries.checked("printed_attention", None, ATTENTION_KERNELS.__contains__, kernels),
        "description": entries.checked("description", "", str, "text; put it in quotes"),
        "hub_names": tuple(names),
        "expected": tuple(read_expectations(entries.get("expected"), permit=permit)),
    }
