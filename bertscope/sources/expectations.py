"""Expected values of a model: counts, ties, FLOPs of a run, estimated peak memory; each with its line.

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
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertscope.config import ATTENTION_KERNELS, LORA_EXAMPLE, Lora
from bertscope.errors import BertscopeError, ConfigError, SourceError
from bertscope.settings.resolve import Layer, resolve, unknown_setting
from bertscope.settings.rows import rows
from bertscope.settings.run_config import OF_FLOPS, STORED, RunConfig
from bertscope.sources.bert import BertSource
from bertscope.sources.find import find
from bertscope.sources.model_source import ModelSource
from bertscope.sources.other_models import FactorySource, refuse_code
from bertscope.sources.presets import preset_of, preset_paths
from bertscope.text_files import Entry, Mapping, read_mapping, readable
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
KEYS = (*TOTAL_KEYS, *TABLE_KEYS, TIES_KEY, *MEASURES)


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


def read_expectations(entry: Entry | None, precision: str = RunConfig.precision) -> Iterator[Expectation]:
    """Yield the expectations under `expected`; `precision` is that of a run that gives none.

    Raises ConfigError with file and line.
    """
    if entry is None or entry.value is None:
        return
    runs = 0
    for key, item in entry.mapping("expected", KEYS).items():
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
                yield _run(key, name, inner, precision)


def _tie(address: str, entry: Entry) -> Expectation:
    if not isinstance(entry.value, str):
        raise entry.error(
            f"expected ties.{address} must be the address that it is tied to, such as "
            "bert.embeddings.word_embeddings.weight"
        )
    return Expectation(key=f"{TIES_KEY}.{address}", value=entry.value, line=entry.line)


def _run(kind: str, name: str, entry: Entry, precision: str) -> Expectation:
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
        layer = Layer(given, where={name: item.where for name, item in found.items()}, records=(RunConfig,))
        ((run_config,),) = resolve(
            layer, Layer({"precision": precision}, is_default=True), records=(RunConfig,)
        ).points  # fmt: skip
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
    if isinstance(value, str) and (match := re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)\s*%", value, re.ASCII)):
        value = float(match[1]) / 100
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise entry.error(f"expected {key}: tolerance is a share from 0 to below 1, such as 0.02 or 2 %")
    return float(value)


# ---- `*.bertscope.yaml`: a model, by name or by configuration, and its expected values ----


SUFFIXES = (".bertscope.yaml", ".bertscope.yml")
_KEYS = ("description", "model", "architecture", "attention", "add_pooling_layer", "lora", "expected")


@dataclass(frozen=True, kw_only=True)
class ExpectedModel:
    """A model and the values that its file expects."""

    name: str
    source: ModelSource
    path: Path  # of the file with the expectations; without expectations, of the model or its name
    line: int = 1  # of the model in this file
    expected: tuple[Expectation, ...] = ()

    @property
    def how_to_record(self) -> str:
        """Return a remedy for a file without expectations: the command that adds them."""
        code = " --allow-code" if isinstance(self.source, FactorySource) else ""
        return f"'bertscope check --write {self.path}{code}' adds the current counts"

    def with_architecture(self, architecture: str | None) -> "ExpectedModel":
        """Return the same expectations of another class, unless it is None; raises ConfigError for an unknown one."""
        return replace(self, source=self.source.with_options(architecture=architecture))


def is_expectation_file(name: str | os.PathLike[str]) -> bool:
    """Return True if the name is that of an expectation file."""
    return os.fspath(name).lower().endswith(SUFFIXES)


def read_expectation_file(path: Path, *, allow_code: bool = False) -> ExpectedModel:
    """Return the model in the file with its expected values; it is not built, and no code is imported.

    Raises ConfigError or SourceError with file and line, also for `module:attribute` without `allow_code`.
    """
    entries = read_mapping(path)
    name = path.name.rpartition(".")[0].rpartition(".")[0] if is_expectation_file(path) else path.stem
    if "config" in entries and "model" not in entries:
        preset = preset_of(entries, path)
        return ExpectedModel(name=name, source=preset, path=path, expected=preset.expected)
    if "config" in entries:
        raise entries["config"].error(
            "unknown key 'config' in an expectation file with a model; give model or config, not both", "config"
        )
    entries.refuse_unknown(_KEYS, "an expectation file with a model")
    if "model" not in entries:
        raise ConfigError("the key 'model' is missing; name one, or describe one by architecture and config",
                          where=f"{path}:1")  # fmt: skip
    source = _model(entries, path, allow_code)
    precision = STORED if source.has_own_dtypes else RunConfig.precision
    expected = tuple(read_expectations(entries.get("expected"), precision))
    return ExpectedModel(name=name, source=source, path=path, line=entries["model"].line, expected=expected)


def _model(entries: Mapping, path: Path, allow_code: bool) -> ModelSource:
    settings = {
        "architecture": entries.checked("architecture", None, str, "the name of a class, such as BertForMaskedLM"),
        "attention": _one_of(entries, "attention", ATTENTION_KERNELS),
        "add_pooling_layer": entries.checked("add_pooling_layer", None, bool, "one of true, false"),
        "lora": _lora(entries),
    }
    try:
        source = find(_named(entries["model"], path.parent), **settings)
    except BertscopeError as error:
        raise error.at(entries.get(getattr(error, "field", ""), entries["model"]).where) from None
    refuse_code(source, entries["model"], allow_code=allow_code)
    return source


def _lora(entries: Mapping) -> Lora | None:
    text = entries.checked("lora", None, str, f"text such as {LORA_EXAMPLE}")
    try:
        return None if text is None else Lora.parse(text)
    except ConfigError as error:
        raise error.at(entries["lora"].where) from None


def _one_of(entries: Mapping, key: str, allowed: tuple[str, ...]) -> Any:
    return entries.checked(key, None, lambda value: value in allowed, f"one of {', '.join(allowed)}")


def _named(entry: Entry, folder: Path) -> str:
    """Return the argument for `load`; a path is relative to the file's folder."""
    if not isinstance(entry.value, str) or not entry.value:
        raise entry.error("model must be a preset's name or a path")
    relative = folder / entry.value
    if entry.value in preset_paths() or entry.value.startswith("~"):
        return entry.value
    with readable(entry.value):
        is_path = entry.value.endswith((".yaml", ".yml", ".json")) or entry.value.startswith(".") or relative.exists()
    return str(relative) if is_path else entry.value


def expectation_files(folder: Path) -> Iterator[str]:
    """Yield the expectation files in a folder and below it, and each folder that cannot be listed.

    Hidden folders, virtual environments and node_modules are left out, and linked folders are not followed.
    """
    waiting = [folder]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError:
            yield str(folder)  # it is an error of the check, as a file that cannot be read
            continue
        folders = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        names = [entry.name for entry in entries if entry.name not in folders and is_expectation_file(entry.name)]
        yield from (str(folder / name) for name in names)
        waiting += [folder / name for name in reversed(folders) if not _is_foreign(folder / name)]


def _is_foreign(folder: Path) -> bool:
    return folder.name.startswith(".") or folder.name == "node_modules" or os.path.exists(folder / "pyvenv.cfg")


def files_to_check(names: list[str]) -> list[str]:
    """Return the names once each, a folder replaced by the expectation files in it; by default the working directory.

    A folder without such files stays: it may be a model's.
    """
    found: list[str] = []
    for name in names or ["."]:
        inside = list(expectation_files(Path(name))) if os.path.isdir(name) else []
        found += inside or [name]
    return list(dict.fromkeys(found))


def load_expected(name: str, *, architecture: str | None = None, allow_code: bool = False) -> ExpectedModel:
    """Return the model of an expectation file, or of any name for `find`; `architecture` overrides its class.

    Raises the errors of both, and SourceError for a model without expectations.
    """
    if is_expectation_file(name):
        found = read_expectation_file(Path(name), allow_code=allow_code)
    else:
        if os.path.isdir(name) and name not in preset_paths():
            _require_model(name)
        source = find(name)
        found = ExpectedModel(name=source.name, source=source, path=Path(name))
        if isinstance(source, BertSource):
            found = replace(found, path=source.path or found.path, expected=source.expected)
    if not found.expected:
        remedy = "expected counts belong in a preset or a *.bertscope.yaml with 'model: ...'; write one with this model"
        if found.path.suffix in (".yaml", ".yml"):
            remedy = found.how_to_record
        raise SourceError(f"{found.path} expects nothing: {remedy}")
    return found if architecture is None else found.with_architecture(architecture)


def _require_model(folder: str) -> None:
    """Raise SourceError for a folder that cannot be listed, or that has no configuration of a model."""
    with readable(folder):
        if "config.json" not in [entry.name for entry in os.scandir(folder)]:
            raise SourceError(
                f"no *.bertscope.yaml at or below {os.path.abspath(folder)}; write 'model: NAME' into "
                "models.bertscope.yaml, then run 'bertscope check --write models.bertscope.yaml', which adds its "
                "counts; --presets checks the packaged presets"
            )
