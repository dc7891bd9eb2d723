"""The points of a grid as tasks: plain data, so that any process with the same versions computes them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import bertscope
from bertscope.analyses.sweep.grid import KEYS, PARALLEL_KEYS, Grid
from bertscope.errors import BertscopeError, MissingExtraError, SelectionError
from bertscope.gpus import Gpu, find_gpu
from bertscope.reports.base import FAILED
from bertscope.reports.json import typed
from bertscope.reports.sweep import REFUSED, SweepRow
from bertscope.settings.checkpointing import NONE, takes_reentrant
from bertscope.settings.parallelism import parse_parallelism
from bertscope.settings.run_config import AUTOCAST, INSTALLED, STORED, RunConfig
from bertscope.sources.find import find
from bertscope.sources.model_source import ModelSource
from bertscope.units import FP32, parse_bytes


@dataclass(frozen=True, kw_only=True)
class Task:
    """A point with all that its computation needs, as plain data, so that any process can compute it."""

    key: str
    point: dict[str, Any]
    source: tuple[str, dict[str, Any]]  # the class of the source, and its data
    run_config: RunConfig
    threads: int
    budget_bytes: int | None = None
    card: Gpu | None = None
    context_bytes: int | None = None
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def group(self) -> tuple[str, ...]:
        """Return what points have in common that share traces and verifications: source, run, checkpointing.

        The more of the first fields are equal, the more they share.
        """
        run = asdict(self.run_config) | {"batch": 1, "seq": 1}
        last = {name: run.pop(name) for name in ("checkpointing", "reentrant")}
        return json.dumps(self.source), json.dumps(run), json.dumps(last)

    def to_json(self) -> str:
        """Return the task as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        """Return the task that `to_json` wrote."""
        found: Task = typed(cls, json.loads(text), "task")
        return found

    def row(self, **content: Any) -> SweepRow:
        """Return the row of this point with the content."""
        return SweepRow(key=self.key, point=self.point, versions=self.versions, **content)


def tasks_of(grid: Grid) -> list[Task | SweepRow]:
    """Return each point once, in the order of the grid: its task, or its row if its settings exclude each other."""
    found: dict[str, Task | SweepRow] = {}
    for point in grid.points():
        task = task_of(point)
        found.setdefault(task.key, task)
    return list(found.values())


def task_of(point: Mapping[str, Any]) -> Task | SweepRow:
    """Return the task of a point, or its row if its settings exclude each other."""
    settings = dict(point)
    settings["threads"] = settings["threads"] or default_threads()
    try:
        source = _source(*(settings[name] for name in ("model", "head", "attention", "pooler", "lora")))
        card = find_gpu(settings["gpu"]) if settings["gpu"] else None
        if card and settings["budget"]:
            raise SelectionError(f"give either gpu {card.name} or budget {settings['budget']}")
        settings["device"] = settings["device"] or ("cuda" if card else RunConfig.device)
        run_config = _run_config(settings, source)
        settings["world_size"] = run_config.parallelism.world_size
        settings["mesh"] = run_config.parallelism.mesh_text
        kind, data = type(source).__name__, source.to_data()
    except BertscopeError as error:
        found = versions()
        content = _hash(settings, found, str(error))
        outcome = FAILED if isinstance(error, MissingExtraError) else REFUSED
        return SweepRow(key=content, point=settings, versions=found, outcome=outcome, error=str(error))
    is_bert = kind == "BertSource" and run_config.model_implementation != INSTALLED
    found = versions() if is_bert else versions("transformers", "peft")
    sizes = {name: parse_bytes(settings[name]) if settings[name] else None for name in ("budget", "context")}
    budget = card.memory_bytes if card else sizes["budget"]
    return Task(
        key=_hash(settings, found, kind, data, asdict(card) if card else None, _own_code(settings["model"])),
        point=settings, source=(kind, data), run_config=run_config, threads=settings["threads"],
        budget_bytes=budget, card=card, context_bytes=sizes["context"], versions=found,
    )  # fmt: skip


def _hash(*content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


@cache
def _source(model: str, head: str | None, attention: str | None, pooler: bool | None, lora: str | None) -> ModelSource:
    return find(model, architecture=head, attention=attention, add_pooling_layer=pooler, lora=lora)


@cache
def _own_code(model: str) -> str:
    """Return the hash of the file in `file.py:attribute`; empty for another model."""
    file = Path(model.rpartition(":")[0])
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.suffix == ".py" and file.is_file() else ""


def _run_config(point: Mapping[str, Any], source: ModelSource) -> RunConfig:
    """Return the run of a point; raises SelectionError or ConfigError for settings that exclude each other."""
    fields = {key.field: point[name] for name, key in KEYS.items() if key.field}
    fields |= {name: tuple(fields[name]) for name in ("freeze", "inputs")}
    if point["mode"] == "inference" and point["checkpointing"] != NONE:
        raise SelectionError("checkpointing concerns what is saved for backward; use mode forward or training")
    precision = point["precision"] or FP32.name
    autocast = precision.removeprefix(AUTOCAST) if precision.startswith(AUTOCAST) else None
    has_own = source.has_own_dtypes and (point["precision"] is None or autocast is not None)
    return RunConfig(
        **fields,
        dtype=STORED if has_own else FP32.name if autocast else precision,
        autocast=autocast,
        reentrant=point["reentrant"] and takes_reentrant(point["checkpointing"]),
        dropout=not point["no_dropout"],
        device=point["device"],
        parallelism=parse_parallelism(**{name: point[name] for name in PARALLEL_KEYS}),
    )


@cache
def default_threads() -> int:
    """Return the number of threads that torch uses by default; temporaries of CPU kernels depend on it."""
    try:
        return max(int(os.environ.get("OMP_NUM_THREADS", "")), 1)
    except ValueError:
        return usable_cores()


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions(*others: str) -> dict[str, str]:
    """Return the versions that a result depends on: of bertscope, of torch, and of those other packages that exist."""
    found = {"bertscope": bertscope.__version__}
    for name in dict.fromkeys(("torch", *others)):
        if name in found:
            continue
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
