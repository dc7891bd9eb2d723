"""BertSource, a BERT that `bertscope.model` builds from its configuration, and the files that describe one.

A preset is a YAML file with a complete configuration and expected values, such as presets/bert-base-cased.yaml. Further
keys: `add_pooling_layer` of a BertModel; `printed_attention`, the kernel that `tree --style torch` shows instead of its
own; `extra`, other members of the config.json that `presets NAME --config` prints. docs/ci.md explains `expected`.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertscope.config import (
    ARCHITECTURES,
    ATTENTION_KERNELS,
    MAX_BUILT_LAYERS,
    RULES,
    BertConfig,
    Lora,
    unknown_architecture,
)
from bertscope.errors import BertscopeError, ConfigError, SelectionError, either_of, name_of
from bertscope.files import PRESETS, Entry, packed_presets, read_mapping, read_text, with_places
from bertscope.files import Mapping as Entries
from bertscope.frozen import Record
from bertscope.settings.checkpointing import CHEAPEST_FIRST, NONE, SAVE, parse_strategies
from bertscope.settings.rows import rows
from bertscope.settings.run_config import FLASH_KERNELS, OF_FLOPS, RunConfig
from bertscope.sources import transformers_models
from bertscope.sources.model_source import ModelSource, SourceOptions
from bertscope.units import parse_bytes, visible

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertscope.model import BertPreTrainedModel, PeftModel

TOTAL_KEYS = ("distinct_params", "layer_params")
TABLE_KEYS = ("groups", "layers")
TIES_KEY = "ties"
MAX_NUMBER = 2**63
MAX_RUNS = 12  # a run takes 0.1 to 1 s
# The measured quantity of a run, and the settings that affect it.
MEASURES = {"flops": "matmul_flops", "memory": "peak_bytes"}
_SETTINGS = {"flops": OF_FLOPS, "memory": tuple(rows(RunConfig))}
_SIZES = ("batch", "seq")
_EXPECTED_KEYS = (*TOTAL_KEYS, *TABLE_KEYS, TIES_KEY, *MEASURES)


class Expectation(Record):
    """One expected value: `key` is `distinct_params`, `groups.embeddings`, `ties.ADDRESS`, `memory.NAME` ...

    `value` is a number, or the path that a tensor is tied to; `tolerance` is a share of the number, either way.
    The value for `ties` is how many there are. `run` is the run whose FLOPs or memory is expected, and `sizes`
    are the names among batch and seq that its file gives.
    """

    key: str
    value: int | str
    line: int
    tolerance: float = 0.0
    run: RunConfig | None = None
    sizes: tuple[str, ...] = ()

    def accepts(self, got: int | str | None) -> bool:
        """Return True if the model's value is as expected."""
        if isinstance(self.value, int) and isinstance(got, int):
            return abs(got - self.value) <= self.tolerance * self.value
        return got == self.value


def read_expectations(
    entry: Entry | None, precision: str = RunConfig.precision, *, permit: bool = False
) -> Iterator[Expectation]:
    """Yield the expectations under `expected`; `precision` is for a run that gives none, `permit` for code.

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
                if not isinstance(inner.value, str):
                    raise inner.error(
                        f"expected ties.{name} must be the address that it is tied to, such as "
                        "bert.embeddings.word_embeddings.weight"
                    )
                yield Expectation(key=f"{TIES_KEY}.{name}", value=inner.value, line=inner.line)
            else:
                runs += 1
                if runs > MAX_RUNS:
                    raise inner.error(f"more than {MAX_RUNS} runs in one file; put the others in another file")
                yield _run(key, name, inner, precision, permit)


def _run(kind: str, name: str, entry: Entry, precision: str, permit: bool) -> Expectation:
    from bertscope.settings import request  # which few files need

    key, measure = f"{kind}.{name}", MEASURES[kind]
    entries = entry.mapping(f"expected.{key}")
    known = (*_SETTINGS[kind], measure, "tolerance")
    for setting, inner in entries.items():
        if setting not in known:
            raise inner.error(f"expected.{key}: {request.unknown_setting(setting, known)}")
    sizes = () if "input" in entries else _SIZES  # described inputs may have none
    for needed in (*sizes, "mode", measure):
        if needed not in entries:
            names = ", ".join((*sizes, "mode"))
            raise entry.error(f"expected {key} needs {names} and {measure}; {needed!r} is missing")
    value = _number(key, entries[measure], measure, in_bytes=kind == "memory")
    settings = {name: value for name, value in entries.plain().items() if name in _SETTINGS[kind]}
    try:
        places = {name: item.where for name, item in entries.items()}
        source = request.read_settings(settings, where=places, records=(RunConfig,), permit=permit)
        ((run_config,),) = request.Request(question="check", sources=(source,)).resolved(precision=precision)
    except BertscopeError as error:
        raise ConfigError(f"expected {key}: {error.of_file}", where=error.where or entry.where) from None
    if kind == "flops" and run_config.mode == "forward":
        raise entries["mode"].error(f"expected {key}: FLOPs depend on mode inference or training")
    tolerance = _tolerance(key, entries.get("tolerance"))
    return replace(value, tolerance=tolerance, run=run_config, sizes=tuple(name for name in _SIZES if name in settings))


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


# ---- the source ----


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}


class BertSource(ModelSource):
    """A BERT as its file describes it: configuration, class, and expected values."""

    config: BertConfig
    architecture: str
    path: Path | None = None
    add_pooling_layer: bool = True
    lora: Lora | None = None
    description: str = ""
    hub_names: tuple[str, ...] = ()
    expected: tuple[Expectation, ...] = ()
    uses_transformers_masks: bool = False  # the same outputs, with the memory of transformers 4.43.4
    printed_attention: str | None = None  # the kernel that `tree --style torch` shows
    flash: str | None = None  # one of FLASH_KERNELS, which the class of the installed transformers may have
    quantization: Any = field(default=None, hash=False)  # the `quantization_config` in its file
    file_note: str = ""  # on what its file says and no BERT has
    config_lines: dict[str, int] = field(default_factory=dict, compare=False)
    family = "a BERT"

    @classmethod
    def of(cls, config: BertConfig, name: str, **fields: Any) -> BertSource:
        """Return the source of a configuration, of the class that it names."""
        architecture = config.architectures[0] if config.architectures else "BertModel"
        return cls(name=name, config=config, architecture=architecture, **fields)

    @property
    def notice(self) -> str:
        noted = ("_name_or_path", "auto_map", "quantization_config")  # the first names the model
        ignored = ", ".join(visible(name) for name in self.config.ignored if name not in noted)
        ignored = f"ignored, since it does not shape a BERT: {ignored}" if ignored else ""
        is_deep = self.layers > MAX_BUILT_LAYERS and self.has_equal_layers
        deep = f"{self.layers:,} equal layers: counted from two or three of them, and shown as one" if is_deep else ""
        return "\n".join(filter(None, (deep, self.file_note, ignored)))

    @property  # type: ignore[misc]  # a field of the base class
    def settings(self) -> Mapping[str, Any]:
        """Return `add_pooling_layer` of a BertModel, and `lora`; `bert_config` has the other settings."""
        has_pooler = str(self.add_pooling_layer).lower()
        settings = {"add_pooling_layer": has_pooler} if self.architecture == "BertModel" else {}
        return settings | ({"lora": str(self.lora)} if self.lora else {})

    @property
    def bert_config(self) -> BertConfig:
        return self.config

    @property
    def layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def layer_path(self) -> str:
        stack = "encoder.layer" if self.architecture == "BertModel" else "bert.encoder.layer"
        return f"base_model.model.{stack}" if self.lora else stack

    @property
    def has_equal_layers(self) -> bool:
        return not self.config.pruned_heads and (self.lora is None or self.lora.has_equal_layers)

    def build(self, *, device: str = "meta", attention: str | None = None) -> BertPreTrainedModel | PeftModel:
        from bertscope.model.heads import build
        from bertscope.model.lora import PeftModel

        model = build(self.config, self.architecture, add_pooling_layer=self.add_pooling_layer, device=device)
        if self.uses_transformers_masks:
            model.base_model.uses_transformers_masks = True
        try:
            return PeftModel(model, self.lora) if self.lora else model
        except ConfigError as error:
            names = "+".join(getattr(self.lora, error.field))
            option = "" if self.lora_where else f"{name_of('lora')} {error.field}={names}: "
            raise ConfigError(f"{option}{error.message.marked}", where=self.lora_where, field=error.field) from None

    def to_data(self) -> dict[str, Any]:
        if callable(self.config.hidden_act):
            raise SelectionError("profile's child process takes hidden_act by its name, such as 'gelu'; got a function")
        names = ("name", "architecture", "add_pooling_layer", "flash", "quantization")
        data = {name: getattr(self, name) for name in names}
        return data | {"config": self.config.to_dict(), "lora": self.lora and str(self.lora)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> BertSource:
        config, lora = BertConfig.from_dict(data["config"]), data["lora"] and Lora.parse(data["lora"])
        return cls(**{**data, "config": config, "lora": lora})

    def for_run(self) -> BertSource:
        if not self.config.type_vocab_size:
            raise SelectionError("type_vocab_size is 0: an input has token types, and none has a row; give 1 or more")
        if self.flash:
            raise SelectionError(
                f"the built-in BERT has eager and sdpa, not {self.flash}; take {name_of('attention')} sdpa"
            )
        return replace(self, uses_transformers_masks=True)

    def with_layers(self, layers: int) -> BertSource:
        return self.with_fields({"num_hidden_layers": layers})

    def layer_counts(self, model: Any) -> Mapping[str, int]:
        return {"num_hidden_layers": self.layers}

    def with_layer_counts(self, counts: Mapping[str, int]) -> BertSource:
        return self.with_fields(counts)

    def with_options(self, **options: Unpack[SourceOptions]) -> BertSource:
        architecture, attention, lora = options.get("architecture"), options.get("attention"), options.get("lora")
        self._refuse_further(lora)
        lora = Lora.parse(lora) if isinstance(lora, str) else lora
        changes: dict[str, Any] = {**options, "lora": lora and lora.of_bert()}
        changes.pop("attention", None)
        if attention is not None:
            changes["flash"] = attention if attention in FLASH_KERNELS else ""
        if attention is not None and not changes["flash"]:
            changes["config"] = replace(self.config, attn_implementation=attention)
        source = replace(self, **{name: value for name, value in changes.items() if value is not None})
        if source.architecture not in ARCHITECTURES:
            line = self.config_lines.get("architectures")
            raise unknown_architecture(source.architecture).at(f"{self.path}:{line}" if architecture is None else "")
        if options.get("add_pooling_layer") is not None and source.architecture != "BertModel":
            raise ConfigError(f"only BertModel comes with and without a pooler; {source.architecture} decides itself")
        return source

    def with_fields(self, fields: Mapping[str, object]) -> BertSource:
        return replace(self, config=replace(self.config, **fields))  # type: ignore[arg-type]

    def without_dropout(self) -> BertSource:
        """Return the source with every drop rate set to 0."""
        lora = self.lora and replace(self.lora, dropout=0.0)
        return replace(self.with_fields(_NO_DROPOUT), lora=lora)

    def other_classes(self) -> tuple[BertSource, ...]:
        return tuple(
            replace(self, architecture=name, add_pooling_layer=True)
            for name in ARCHITECTURES
            if name != self.architecture and self.lora is None
        )

    def strategies(self, model: Any) -> tuple[str, ...]:
        return parse_strategies(CHEAPEST_FIRST)

    def checkpoint(self, model: Any, strategy: str, *, reentrant: bool = False) -> None:
        inner = model.get_base_model() if self.lora else model
        inner.gradient_checkpointing_enable({"use_reentrant": reentrant}, strategy=strategy)
        # As in peft where checkpointing is enabled first; after it, and with a plan's code, less is needed.
        if self.lora and strategy != NONE and not strategy.startswith(SAVE):
            inner.enable_input_require_grads()

    def require(self, ability: str) -> BertSource:
        if self.lora and ability == "--naming":
            raise SelectionError("adapters have no names of TensorFlow and Keras; leave --naming out")
        return self


# ---- presets ----


KEYS = (
    "description", "hub_names", "architecture", "add_pooling_layer", "printed_attention", "config", "extra", "expected",
)  # fmt: skip
PRESET_ONLY = ("source", "requires", "description", "hub_names", "add_pooling_layer", "printed_attention", "expected")
_HUB_NAMES = re.compile(r'^ *"?hub_names"?: *\[([^]]*)\]', re.MULTILINE)
MEMBER = "bertscope"  # the member of a config.json with the keys that only a preset has


def preset_dir() -> Path:
    """Return the folder of the presets: the archive in an installed wheel, or a folder at the top of a checkout."""
    return PRESETS if PRESETS.exists() else Path(__file__).resolve().parents[2] / "presets"


def preset_paths(*suffixes: str) -> dict[str, Path]:
    """Return preset files by name, in alphabetical order, with any of the suffixes or with all.

    A `.yaml` is a BERT. A `.json` is the config.json of another family, which transformers builds, with a
    member "bertscope".
    """
    folder = preset_dir()
    names = packed_presets().namelist() if folder == PRESETS else os.listdir(folder)
    paths = (folder / name for name in sorted(names, key=str.lower) if name.endswith(suffixes or (".yaml", ".json")))
    return {path.stem: path for path in paths}


def presets_by_alias() -> dict[str, Path]:
    """Return preset files by all their names in lower case: on the hub too, with and without the organization."""
    aliases: dict[str, Path] = {}
    for stem, path in preset_paths().items():
        listed = _HUB_NAMES.search(read_text(path))  # without parsing all the files
        for name in (stem, *re.findall(r"[\w./-]+", listed[1] if listed else "")):
            aliases |= dict.fromkeys((name.lower(), name.rpartition("/")[2].lower()), path)
    return aliases


LISTED = f"'{name_of('bertscope presets')}' lists the presets"


def near_presets(name: str) -> str:
    """Return `did you mean 'x' or 'y'?` with presets of a name that is near this one, in it or around it."""
    aliases, text = presets_by_alias(), name[:100].lower().rpartition("/")[2]
    longer = sorted((alias for alias in aliases if alias.startswith(f"{text}-")), key=len)
    near = longer[:3] or difflib.get_close_matches(text, aliases, n=3, cutoff=0.75)
    around = (alias for alias in aliases if len(text) > 2 and (text in alias or alias in text))
    near = near or sorted(around, key=len, reverse=text not in " ".join(aliases))[:3]
    names = dict.fromkeys(repr(aliases[alias].stem) for alias in near)
    return f"did you mean {either_of(names)}?" if names else ""


def read_preset(path: Path) -> BertSource:
    """Return the preset in a YAML file; raises ConfigError or SourceError with file and line."""
    return preset_of(read_mapping(path), path)


def preset_of(entries: Entries, path: Path, *, allow_code: bool = False) -> BertSource:
    """Return the preset in a file's entries."""
    if misplaced := next((name for name in entries if name in RULES and name not in KEYS), ""):
        raise entries[misplaced].error(f"{misplaced} belongs below the key 'config'; indent it there", misplaced)
    entries.refuse_unknown(KEYS, "the preset")
    for needed in ("architecture", "config"):
        if needed not in entries:
            raise ConfigError(f"{needed!r} is missing; a preset needs architecture and config", where=f"{path}:1")
    fields, architecture = entries["config"].mapping("config", RULES), entries["architecture"]
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
        head = {"architectures": [data["architecture"]], "model_type": "bert"}
        members = head | data["config"] | data.get("extra", {})
    return dict(sorted(members.items()))


def member_of(members: Entries) -> dict[str, Any]:
    """Return the keys that only a preset has, from the member "bertscope" of a config.json.

    It has only such keys; another project's may have others, and is passed over.
    """
    entry = members.get(MEMBER)
    is_own = entry is not None and isinstance(entry.value, dict) and set(entry.value) <= set(PRESET_ONLY)
    return _preset_only(with_places(entry.value, entry)) if entry and is_own else {}


def _preset_only(entries: Entries, *, permit: bool = False) -> dict[str, Any]:
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


def configured(entries: Entries, path: Path, name: str | None) -> ModelSource:
    """Return the source for a configuration, in a file or given; by default it is named after its model type."""
    if "model_type" in entries and entries["model_type"].value != "bert":
        plain = Entries((key, entry) for key, entry in entries.items() if key != MEMBER or not member_of(entries))
        return transformers_models.from_config(plain, name or str(entries["model_type"].value))
    lines, member, members = entries.lines(), member_of(entries), entries.plain()
    if member:
        del members[MEMBER]
    if flash := transformers_models.flash_kernel(members):  # of transformers' BERT
        members.pop("attn_implementation", None)
    try:
        transformers_models.check_family(members)
        config = BertConfig.from_dict(members)
    except ConfigError as error:
        raise error.at(f"{path}:{lines.get(error.field, 1)}") from None
    dtype = transformers_models.stored_dtype(members)
    member |= {"path": path, "config_lines": lines, "stored_dtype": dtype, "flash": flash}
    member |= {"file_note": transformers_models.file_notes(members), "quantization": members.get("quantization_config")}
    return BertSource.of(config, name or "bert", **member)
