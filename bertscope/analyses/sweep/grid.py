"""The grid of a sweep: a YAML file with one value or a list for each setting, and the points of their product."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from bertscope.errors import BertscopeError, SourceError
from bertscope.gpus import GPUS, find_gpu
from bertscope.parallelism import SINGLE
from bertscope.parallelism import STRATEGIES as PARALLEL
from bertscope.run_config import (
    DEVICES,
    FIT_PRECISIONS,
    IMPLEMENTATIONS,
    KERNELS,
    MAX_SIZE,
    MODEL_IMPLEMENTATIONS,
    MODES,
    NO_OPTIMIZER,
    NONE,
    OPTIMIZERS,
    STRATEGIES,
    RunConfig,
    parse_strategies,
)  # fmt: skip
from bertscope.sources.find import DEFAULT_MODEL, find
from bertscope.sources.other_models import refuse_code
from bertscope.text_files import Entry, read_text, read_yaml, readable
from bertscope.units import PRECISIONS, parse_bytes

MAX_POINTS = 100_000  # a row has 1.5 KB, and a point takes 0.1 s or more
_GRID_FORM = "a grid is lines of 'key: value' or 'key: [value, value]'"


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The settings of a grid with their values, in the order of its file."""

    path: Path
    values: dict[str, tuple[Any, ...]]

    @property
    def varied(self) -> dict[str, list[Any]]:
        """Return the settings with several values."""
        return {name: list(values) for name, values in self.values.items() if len(values) > 1}

    def points(self) -> Iterator[dict[str, Any]]:
        """Yield the settings of each point in the order of the grid: those of its last line vary first."""
        defaults = {name: key.default for name, key in KEYS.items()}
        for values in product(*self.values.values()):
            yield defaults | dict(zip(self.values, values, strict=True))


def read_grid(path: str | os.PathLike[str], *, allow_code: bool = False) -> Grid:
    """Return the grid in a file.

    Raises ConfigError with file and line for an unknown key, a value that the key does not take, an unknown model,
    a model that is code without `allow_code`, and more than MAX_POINTS points.
    """
    file = Path(path)
    if file.suffix not in (".yaml", ".yml"):
        raise SourceError(f"{file} is no .yaml file; {_GRID_FORM}")
    with readable(path):
        if not file.exists():
            raise SourceError(f"{file} does not exist; {_GRID_FORM}")
        entries = read_yaml(read_text(file), file, form=_GRID_FORM)
    entries.refuse_unknown(KEYS, "a grid")
    values = {name: _values(name, entry) for name, entry in entries.items()}
    for name in values.get("model", ()):
        try:
            found = find(name)
        except BertscopeError as error:
            raise error.at(entries["model"].where) from None
        refuse_code(found, entries["model"], allow_code=allow_code)
    number = prod(map(len, values.values()))
    if number > MAX_POINTS:
        sizes = " x ".join(f"{len(found)} {name}" for name, found in values.items() if len(found) > 1)
        raise SourceError(f"{number:,} points ({sizes}); a grid has at most {MAX_POINTS:,}", where=f"{file}:1")
    return Grid(path=file, values=values)


def _values(name: str, entry: Entry) -> tuple[Any, ...]:
    """Return the values of a setting, each once."""
    key, given = KEYS[name], entry.value if isinstance(entry.value, list) else [entry.value]
    if not given:
        raise entry.error(f"{name} has no value; it takes {key.words}, or a list", name)
    found = []
    for value in given:
        try:
            taken = key.default if value is None else key.accept(value)
        except BertscopeError as error:
            raise entry.error(f"{name}: {error.message}", name) from None
        except ValueError:
            raise entry.error(f"{name} takes {key.words}; got {str(value)[:60]!r}", name) from None
        if taken not in found:
            found.append(taken)
    return tuple(found)


# ---- the keys ----


@dataclass(frozen=True, kw_only=True)
class GridKey:
    """A setting of a grid: its default, and the function that returns a value as it is used, or raises an error."""

    default: Any
    accept: Callable[[Any], Any]
    words: str
    field: str = ""  # of RunConfig


def _number(value: Any) -> int:
    if type(value) is not int or not 1 <= value < MAX_SIZE:
        raise ValueError
    return value


def _rank(value: Any) -> int:
    return 0 if type(value) is int and value == 0 else _number(value)


def _share(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise ValueError
    return float(value)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _texts(value: Any) -> list[str]:
    """Return a text or a list of texts as a list."""
    return [_text(item) for item in (value if isinstance(value, list) else [value])]


def _one_of(words: Sequence[str], value: Any) -> str:
    if value not in words:
        raise ValueError
    return str(value)


def _checkpointing(value: Any) -> str:
    (strategy,) = parse_strategies(_text(value))
    return strategy


def _size(value: Any) -> str:
    parse_bytes(_text(value))
    return str(value)


def _mesh(value: Any) -> str:
    return "x".join(str(_number(int(size))) for size in _text(value).split("x"))


def _words(words: Sequence[str], default: str | None, field: str = "") -> GridKey:
    """Return the key of a setting that is one of these words."""
    return GridKey(
        default=default, accept=partial(_one_of, tuple(words)), words=f"one of {', '.join(words)}", field=field
    )


_NUMBER = partial(GridKey, accept=_number, words="a whole number from 1")
_SHARE = partial(GridKey, accept=_share, words="a share from 0 to below 1")
_FLAG = partial(GridKey, default=False, accept=_flag, words="true or false")
_TEXT = partial(GridKey, default=None, accept=_text)
_SIZE = partial(GridKey, default=None, accept=_size, words="a size such as 16GiB")
_run = RunConfig()
KEYS: dict[str, GridKey] = {
    "model": _TEXT(default=DEFAULT_MODEL, words="the name of a model"),
    "head": _TEXT(words="the class to build, such as BertForSequenceClassification"),
    "attention": _words(("eager", "sdpa"), None),
    "pooler": GridKey(default=None, accept=_flag, words="true or false"),
    "lora": _TEXT(words="the text of --lora, such as r=8,target=query+value"),
    "batch": _NUMBER(default=8, field="batch"),  # as of estimate
    "seq": _NUMBER(default=_run.seq, field="seq"),
    "precision": _words(FIT_PRECISIONS, None),
    "mode": _words(MODES, _run.mode, "mode"),
    "optimizer": _words((NO_OPTIMIZER, *OPTIMIZERS), _run.optimizer, "optimizer"),
    "optimizer_implementation": _words(tuple(IMPLEMENTATIONS), _run.implementation, "implementation"),
    "implementation": _words(MODEL_IMPLEMENTATIONS, _run.model_implementation, "model_implementation"),
    "checkpointing": GridKey(
        default=NONE, accept=_checkpointing, words=f"a strategy: {STRATEGIES}", field="checkpointing"
    ),
    "reentrant": _FLAG(),
    "padding": _SHARE(default=_run.padding, field="padding"),
    "no_dropout": _FLAG(),
    "freeze": GridKey(default=[], accept=_texts, words="a pattern, or a list with lists of patterns", field="freeze"),
    "accumulate": _NUMBER(default=_run.accumulate, field="accumulate"),
    "keep_gradients": _FLAG(field="keep_gradients"),
    "momentum": _SHARE(default=_run.momentum, field="momentum"),
    "amsgrad": _FLAG(field="amsgrad"),
    "ema": _FLAG(field="ema"),
    "clip_grad_norm": _FLAG(field="clip_grad_norm"),
    "hold_outputs": _FLAG(field="hold_outputs"),
    "grad_scaler": _FLAG(field="grad_scaler"),
    "input": GridKey(default=[], accept=_texts, words="NAME=SHAPE:DTYPE, or a list with lists of them", field="inputs"),
    "device": _words(DEVICES, None),
    "sdpa_kernel": _words(KERNELS, _run.sdpa_kernel, "sdpa_kernel"),
    "alloc_conf": _TEXT(default=_run.alloc_conf, words="the text of --alloc-conf", field="alloc_conf"),
    "strategy": _words(tuple(PARALLEL), SINGLE),
    "world_size": _NUMBER(default=None),
    "mesh": _TEXT(accept=_mesh, words="the ranks in each dimension, such as 8x8"),
    "param_dtype": _words(tuple(PRECISIONS), None),
    "reduce_dtype": _words(tuple(PRECISIONS), None),
    "bucket_cap_mb": _NUMBER(default=None),
    "gradient_as_bucket_view": _FLAG(default=None),
    "rank": GridKey(default=None, accept=_rank, words="a whole number from 0"),
    "gpu": _TEXT(accept=lambda value: find_gpu(_text(value)).name, words=f"one of {', '.join(GPUS)}"),
    "budget": _SIZE(),
    "context": _SIZE(),
    "threads": _NUMBER(default=None),
}
PARALLEL_KEYS = ("strategy", "world_size", "mesh", "param_dtype", "reduce_dtype", "bucket_cap_mb",
                 "gradient_as_bucket_view", "rank")  # fmt: skip
