"""Presets, one YAML file each, with a complete configuration; and expected values, each with its line.

description: BERT-base, cased English
hub_names: [google-bert/bert-base-cased]
architecture: BertForMaskedLM
add_pooling_layer: false        # BertModel only
printed_attention: eager        # the kernel that `tree --style torch` shows, instead of that of the configuration
config: {vocab_size: 28996, ...}
extra: {directionality: bidi}   # other members of the config.json that `presets NAME --config` prints
expected:
  distinct_params: 108340804
  layer_params: 130609732
  groups: {embeddings: 22665216, ...}
  layers: {token: 22268928, ...}
  ties:                                  # all of them; `ties: {}` for a model in which nothing is tied
    cls.predictions.decoder.weight: bert.embeddings.word_embeddings.weight
  flops:                                 # names are free; a run needs batch, seq and mode
    sentence: {batch: 1, seq: 128, mode: inference, matmul_flops: 22348431360}
  memory:
    finetuning: {batch: 32, seq: 128, mode: training, optimizer: adamw, peak_bytes: 9 GiB, tolerance: 5 %}
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bertscope.config import ARCHITECTURES, ATTENTION_KERNELS, RULES, BertConfig, unknown_architecture
from bertscope.errors import BertscopeError, ConfigError
from bertscope.frozen import dataclass
from bertscope.settings.rows import rows
from bertscope.settings.run_config import OF_FLOPS, RunConfig
from bertscope.sources.bert import BertSource
from bertscope.text_files import Entry, Mapping, read_mapping, with_places
from bertscope.units import parse_bytes

TOTAL_KEYS = ("distinct_params", "layer_params")
TABLE_KEYS = ("groups", "layers")
TIES_KEY = "ties"
MAX_NUMBER = 2**63
MAX_RUNS = 12  # a run takes 0.1 to 1 s
# The measured quantity of a run, and the settings that affect it.
MEASURES = {"flops": "matmul_flops", "memory": "peak_bytes"}
_SETTINGS = {"flops": OF_FLOPS, "memory": tuple(rows(RunConfig))}
_NEEDED = ("batch", "seq", "mode")
_EXPECTED_KEYS = (*TOTAL_KEYS, *TABLE_KEYS, TIES_KEY, *MEASURES)


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """One expected value: `key` is `distinct_params`, `groups.embeddings`, `ties.ADDRESS`, `memory.NAME` ...

    `value` is a number, or the path that a tensor is tied to; `tolerance` is a share of the number, either way.
    The value of the key `ties` is the number of ties. `run` is the run whose FLOPs or memory is expected.
    """

    key: str
    value: int | str
    line: int
    tolerance: float = 0.0
    run: RunConfig | None = None

    def accepts(self, got: int | str | None) -> bool:
        """Return True if the value of the model is as expected."""
        if isinstance(self.value, int) and isinstance(got, int):
            return abs(got - self.value) <= self.tolerance * self.value
        return got == self.value


def read_expectations(
    entry: Entry | None, precision: str = RunConfig.precision, *, permit: bool = False
) -> Iterator[Expectation]:
    """Yield the expectations under `expected`; `precision` is that of a run that gives none, `permit` that of code.

    Raises ConfigError with file and line.
    """
    if entry is None or entry.value is None:
        return
    runs = 0
    for key, item in entry.mapping("expected", _EXPECTED_KEYS).items():
        if key in TOTAL_KEYS:
            yield _number(key, item, "count of parameters")
            continue
        inside = item.mapping(f"expected.{key}")
        if key == TIES_KEY:
            yield Expectation(key=TIES_KEY, value=len(inside), line=item.line)
        for name, inner in inside.items():
            if key in TABLE_KEYS:
                yield _number(f"{key}.{name}", inner, "count of parameters")
            elif key == TIES_KEY:
                yield _tie(name, inner)
            else:
                runs += 1
                if runs > MAX_RUNS:
                    raise inner.error(f"more than {MAX_RUNS} runs in one file; put the others in another file")
                yield _run(key, name, inner, precision, permit)


def _tie(address: str, entry: Entry) -> Expectation:
    if not isinstance(entry.value, str):
        raise entry.error(
            f"expected ties.{address} must be the address that it is tied to, such as "
            "bert.embeddings.word_embeddings.weight"
        )
    return Expectation(key=f"{TIES_KEY}.{address}", value=entry.value, line=entry.line)


def _run(kind: str, name: str, entry: Entry, precision: str, permit: bool) -> Expectation:
    from bertscope.settings.request import Request, read_settings, unknown_setting  # which few files need

    key, measure = f"{kind}.{name}", MEASURES[kind]
    found = entry.mapping(f"expected.{key}")
    known = (*_SETTINGS[kind], measure, "tolerance")
    for setting, inner in found.items():
        if setting not in known:
            raise inner.error(f"expected.{key}: {unknown_setting(setting, known)}")
    for needed in (*_NEEDED, measure):
        if needed not in found:
            raise entry.error(f"expected {key} needs {', '.join(_NEEDED)} and {measure}; {needed!r} is missing")
    value = _number(key, found[measure], measure, in_bytes=kind == "memory")
    given = {name: value for name, value in found.plain().items() if name in _SETTINGS[kind]}
    try:
        places = {name: item.where for name, item in found.items()}
        source = read_settings(given, where=places, records=(RunConfig,), permit=permit)
        ((run_config,),) = Request.of("check", None, [source]).resolved(precision=precision).points
    except BertscopeError as error:
        raise ConfigError(f"expected {key}: {error.message}", where=error.where or entry.where) from None
    if kind == "flops" and run_config.mode == "forward":
        raise found["mode"].error(f"expected {key}: FLOPs are those of mode inference or training")
    return dataclasses.replace(value, tolerance=_tolerance(key, found.get("tolerance")), run=run_config)


def _number(key: str, entry: Entry, what: str, *, in_bytes: bool = False) -> Expectation:
    value = entry.value
    if in_bytes and isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = parse_bytes(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MAX_NUMBER:
        such = " such as 8589934592 or 8 GiB" if in_bytes else ""
        raise entry.error(f"expected {key} must be a {what}, an integer of at least 0{such}")
    return Expectation(key=key, value=value, line=entry.line)


def _tolerance(key: str, entry: Entry | None) -> float:
    if entry is None:
        return 0.0
    value = entry.value
    if isinstance(value, str) and (match := re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,9})?)\s*%", value, re.ASCII)):
        value = float(match[1]) / 100
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise entry.error(f"expected {key}: tolerance is a share from 0 to below 1, such as 0.02 or 2 %")
    return float(value)


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
