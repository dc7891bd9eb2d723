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
import re
from collections.abc import Iterator

from bertscope.errors import BertscopeError, ConfigError
from bertscope.frozen import dataclass
from bertscope.settings.rows import rows
from bertscope.settings.run_config import OF_FLOPS, RunConfig
from bertscope.text_files import Entry
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


def read_expectations(
    entry: Entry | None, precision: str = RunConfig.precision, *, permit: bool = False
) -> Iterator[Expectation]:
    """Yield the expectations under `expected`; `precision` is that of a run that gives none, `permit` that of code.

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
