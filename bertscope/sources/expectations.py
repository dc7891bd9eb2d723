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

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertscope.errors import BertscopeError, ConfigError, suggestion
from bertscope.run_config import RunConfig
from bertscope.text_files import Entry, Mapping
from bertscope.units import parse_bytes

TOTAL_KEYS = ("distinct_params", "layer_params")
TABLE_KEYS = ("groups", "layers")
TIES_KEY = "ties"
MAX_NUMBER = 2**63
MAX_RUNS = 12  # a run takes 0.1 to 1 s
_RUN_FIELDS = {item.name: item for item in dataclasses.fields(RunConfig)}
# The measured quantity of a run, and the settings that affect it.
_MEASURES = {"flops": "matmul_flops", "memory": "peak_bytes"}
_SETTINGS = {"flops": ("batch", "seq", "mode", "checkpointing", "freeze"), "memory": tuple(_RUN_FIELDS)}
_NEEDED = ("batch", "seq", "mode")
KEYS = (*TOTAL_KEYS, *TABLE_KEYS, TIES_KEY, *_MEASURES)


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


def read_expectations(entry: Entry | None, path: Path) -> Iterator[Expectation]:
    """Yield the expectations under `expected`; raises ConfigError with file and line."""
    if entry is None or entry.value is None:
        return
    runs = 0
    for key, item in _lines(entry, path, "expected", KEYS).items():
        if key in TOTAL_KEYS:
            yield _number(key, item, path, "count of parameters")
        elif key in TABLE_KEYS:
            for name, inner in _lines(item, path, f"expected.{key}").items():
                yield _number(f"{key}.{name}", inner, path, "count of parameters")
        elif key == TIES_KEY:
            yield from _ties(item, path)
        else:
            for name, inner in _lines(item, path, f"expected.{key}").items():
                runs += 1
                if runs > MAX_RUNS:
                    raise ConfigError(
                        f"more than {MAX_RUNS} runs in one file; put the others in another file",
                        where=f"{path}:{inner.line}",
                    )
                yield _run(key, name, inner, path)


def _ties(entry: Entry, path: Path) -> Iterator[Expectation]:
    found = _lines(entry, path, "expected.ties")
    yield Expectation(key=TIES_KEY, value=len(found), line=entry.line)
    for address, item in found.items():
        if not isinstance(item.value, str):
            raise ConfigError(
                f"expected ties.{address} must be the address that it is tied to, such as "
                "bert.embeddings.word_embeddings.weight",
                where=f"{path}:{item.line}",
            )
        yield Expectation(key=f"{TIES_KEY}.{address}", value=item.value, line=item.line)


def _run(kind: str, name: str, entry: Entry, path: Path) -> Expectation:
    key, measure = f"{kind}.{name}", _MEASURES[kind]
    found = _lines(entry, path, f"expected.{key}", (*_SETTINGS[kind], measure, "tolerance"))
    for needed in (*_NEEDED, measure):
        if needed not in found:
            raise ConfigError(
                f"expected {key} needs {', '.join(_NEEDED)} and {measure}; {needed!r} is missing",
                where=f"{path}:{entry.line}",
            )
    value = _number(key, found[measure], path, measure, in_bytes=kind == "memory")
    settings = Mapping({field: item for field, item in found.items() if field in _SETTINGS[kind]})
    run_config = _spec(key, settings, path)
    if kind == "flops" and run_config.mode == "forward":
        raise ConfigError(
            f"expected {key}: FLOPs are those of mode inference or training", where=f"{path}:{found['mode'].line}"
        )
    return dataclasses.replace(value, tolerance=_tolerance(key, found.get("tolerance"), path), run=run_config)


def _spec(key: str, settings: Mapping, path: Path) -> RunConfig:
    """Return the run; add one setting at a time, so that an error has its line."""
    given: dict[str, Any] = {}
    run_config = RunConfig()
    for name, entry in settings.items():
        given[name] = _setting(key, name, entry, path)
        try:
            run_config = RunConfig(**given)
        except BertscopeError as error:
            raise ConfigError(f"expected {key}: {error.message}", where=f"{path}:{entry.line}") from None
    return run_config


def _setting(key: str, name: str, entry: Entry, path: Path) -> Any:
    value, default = entry.value, _RUN_FIELDS[name].default
    kinds: dict[type, tuple[tuple[type, ...], str]] = {
        bool: ((bool,), "true or false"), int: ((int,), "an integer"), float: ((int, float), "a number"),
        tuple: ((list,), "a list of patterns"), str: ((str,), "a word"), type(None): ((str,), "a word"),
    }  # fmt: skip
    accepted, words = kinds[type(default)]
    is_right = isinstance(value, accepted) and (isinstance(value, bool) == isinstance(default, bool))
    if isinstance(value, list):
        is_right, value = is_right and all(isinstance(item, str) for item in value), tuple(value)
    if not is_right:
        raise ConfigError(f"expected {key}: {name} must be {words}", where=f"{path}:{entry.line}")
    return value


def _number(key: str, entry: Entry, path: Path, what: str, *, in_bytes: bool = False) -> Expectation:
    value = entry.value
    if in_bytes and isinstance(value, str):
        try:
            value = parse_bytes(value)
        except ValueError:
            value = None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MAX_NUMBER:
        such = " such as 8589934592 or 8 GiB" if in_bytes else ""
        raise ConfigError(
            f"expected {key} must be a {what}, an integer of at least 0{such}", where=f"{path}:{entry.line}"
        )
    return Expectation(key=key, value=value, line=entry.line)


def _tolerance(key: str, entry: Entry | None, path: Path) -> float:
    if entry is None:
        return 0.0
    value = entry.value
    if isinstance(value, str) and (match := re.fullmatch(r"(\d{1,3}(?:\.\d{1,9})?)\s*%", value, re.ASCII)):
        value = float(match[1]) / 100
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ConfigError(
            f"expected {key}: tolerance is a share from 0 to below 1, such as 0.02 or 2 %", where=f"{path}:{entry.line}"
        )
    return float(value)


def _lines(entry: Entry, path: Path, place: str, known: tuple[str, ...] = ()) -> Mapping:
    """Return the mapping under a key; raises ConfigError for a key that is not in `known`, if given."""
    if not isinstance(entry.value, Mapping):
        raise ConfigError(f"{place} must hold 'key: value' lines", where=f"{path}:{entry.line}", field=place)
    for key, item in entry.value.items():
        if known and key not in known:
            hint = suggestion(key, known)
            raise ConfigError(f"unknown key {key!r} in {place}; {hint}", where=f"{path}:{item.line}", field=key)
    return entry.value
