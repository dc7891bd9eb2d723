"""A sweep's grid: a YAML file with one value or a list for each setting, and the points of their product.

A point is a task: plain data, so that any process with the same versions computes its row, by the function `compute`.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, field, replace
from functools import cache, lru_cache
from importlib import metadata
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import bertscope
from bertscope.errors import BertscopeError, MissingExtraError, SourceError, one_line
from bertscope.files import digest, read_text, read_yaml, readable
from bertscope.frozen import Record
from bertscope.gpus import Gpu, find_gpu
from bertscope.memory.plan import check_plan
from bertscope.memory.simulator import Simulator
from bertscope.memory.summary import device_cost, for_gpu, step_cost, traffic
from bertscope.memory.trace import SMALLEST
from bertscope.reports.base import FAILED
from bertscope.reports.json import typed
from bertscope.reports.memory import REFUSED, SweepRow
from bertscope.reports.plan import PlanReport
from bertscope.settings.request import Combination, Request, Source, read_settings, unknown_setting
from bertscope.settings.rows import permits_of, rows, with_permits
from bertscope.settings.run_config import QUESTIONS, STORED, SWEPT, Limit, RunConfig
from bertscope.sources.find import DEFAULT_MODEL, find, teachers
from bertscope.sources.model_source import ModelSource, source_from_data
from bertscope.tracing.cache import choose_threads, default_threads

KEPT_MODELS = 4  # whose traces a worker keeps
MAX_POINTS = 100_000  # a row has 1.5 KB, and a point takes 0.1 s or more
KEYS = rows(*SWEPT)
_USUAL = {"model": DEFAULT_MODEL, **QUESTIONS["sweep"].defaults}
_GRID_FORM = "a grid is lines of 'key: value' or 'key: [value, value]'"


def plain(value: Any) -> Any:
    """Return the value of a setting as JSON has it: a list for a tuple."""
    return list(value) if isinstance(value, tuple) else value


def read_grid(grid: str | os.PathLike[str] | Mapping[str, Any], *, allow_code: bool = False) -> Request:
    """Return the request that a grid is, a file or the values of settings: a run for each combination.

    Raises ConfigError with file and line for an unknown key, a value that the key does not take, an unknown model,
    a model that is code without `allow_code`, and more than MAX_POINTS points.
    """
    if isinstance(grid, Mapping):
        source, where = read_settings(grid, compared=KEYS, records=SWEPT, permit=True), ""
    else:
        source, where = _read_file(Path(grid), allow_code), f"{Path(grid)}:1"
    readers: dict[str, Callable[[str], Any]] = {"model": find, "loss": teachers}
    for name in filter(source.__contains__, readers):
        try:
            list(map(readers[name], source[name].values))
        except BertscopeError as error:
            raise error.at(source[name].where) from None
    sizes = {name: len(value.values) for name, value in source.items()}
    if prod(sizes.values()) > MAX_POINTS:
        shown = " x ".join(f"{size} {name}" for name, size in sizes.items() if size > 1)
        raise SourceError(f"{prod(sizes.values()):,} points ({shown}); a grid has at most {MAX_POINTS:,}", where=where)
    return Request(question="sweep", sources=(source,))


def _read_file(path: Path, allow_code: bool) -> Source:
    if path.suffix not in (".yaml", ".yml"):
        raise SourceError(f"{path} is not a .yaml file; {_GRID_FORM}")
    with readable(path):
        entries = read_yaml(read_text(path, _GRID_FORM), path, form=_GRID_FORM)
    for name, entry in entries.items():
        if name not in KEYS:
            raise entry.error(unknown_setting(name, KEYS), name)
    where = {name: entry.where for name, entry in entries.items()}
    return read_settings(entries.plain(), compared=KEYS, where=where, records=SWEPT, permit=allow_code)


def with_plan(request: Request, plan: PlanReport, *, allow_code: bool = False) -> Request:
    """Return the grid with the strategy of a plan, after the grid's; raises SelectionError for another model."""
    request = request.with_plan(plan, permit=allow_code)
    for source in sources_of(request):
        check_plan(source, request.permitted_plan)
    return request


def sources_of(request: Request) -> list[ModelSource]:
    """Return the models of a grid."""
    values = request.values(read_settings(_USUAL, records=SWEPT))
    names = ("model", "architecture", "attention", "pooler", "lora")
    models = product(*(values[name].values if name in values else (None,) for name in names))
    return [_source(*model) for model in models]


def varied(request: Request) -> dict[str, list[Any]]:
    """Return the settings with several values."""
    named = (item for source in request.sources for item in source.items())
    return {name: [plain(item) for item in value.values] for name, value in named if len(value.values) > 1}


def points(request: Request) -> Iterator[Combination]:
    """Yield each point in the order of the grid: the settings of its last line vary first.

    Raises SettingError for a setting that has an effect at no point.
    """
    return request.combinations(read_settings(_USUAL, is_default=True, records=SWEPT))


# ---- the points of a grid as tasks: plain data, so that any process with the same versions computes them ----


class Task(Record):
    """A point with all that its computation needs, as plain data, so that any process can compute it."""

    key: str
    point: dict[str, Any]
    source: tuple[str, dict[str, Any]]  # the class of the source, and its data
    run_config: RunConfig
    permits: tuple[str, ...]  # the names of code that a worker may import
    threads: int
    unused: tuple[str, ...] = ()  # the settings of the grid that have no effect at the point
    limit: Limit
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def gpu(self) -> Gpu | None:
        """Return the GPU whose memory the point may take."""
        return find_gpu(self.limit.gpu) if self.limit.gpu else None

    @property
    def group(self) -> tuple[str, ...]:
        """Return what points have in common that share traces: source and threads, run, checkpointing.

        The more of the first fields are equal, the more they share.
        """
        run = asdict(self.run_config) | {"batch": 1, "seq": 1}
        last = {name: run.pop(name) for name in ("checkpointing", "reentrant")}
        return json.dumps([self.source, self.threads]), json.dumps(run), json.dumps(last)

    def to_json(self) -> str:
        """Return the task as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        """Return the task that `to_json` wrote."""
        task: Task = typed(cls, json.loads(text), "task")
        return replace(task, run_config=with_permits(task.run_config, task.permits))

    def row(self, **content: Any) -> SweepRow:
        """Return the row of this point with the content."""
        return SweepRow(key=self.key, point=self.point, unused=self.unused, versions=self.versions, **content)


def tasks_of(request: Request) -> list[Task | SweepRow]:
    """Return each point once, in the order of the grid: its task, or its row if its settings exclude each other."""
    tasks: dict[str, Task | SweepRow] = {}
    for point in points(request):
        task = task_of(point, has_precision=request.has("precision"))
        tasks.setdefault(task.key, task)
    return list(tasks.values())


def task_of(point: Combination, *, has_precision: bool = True) -> Task | SweepRow:
    """Return the task of a point, or its row if its settings exclude each other.

    Without a precision, parameters of own code keep their dtypes.
    """
    settings = {name: plain(value) for name, value in point.values.items()}
    settings["threads"] = settings["threads"] or default_threads()
    try:
        if point.error is not None:
            raise point.error
        model, run_config, limit = point.records
        source = _source(model.model, model.architecture, model.attention, model.pooler, model.lora)
        if source.has_own_dtypes and not has_precision:
            run_config = replace(run_config, precision=STORED)
        settings |= {name: plain(value) for name, value in run_config.flat().items()}
        kind, data = type(source).__name__, source.to_data()
    except BertscopeError as error:
        here = versions()
        key = _hash(settings, here, str(error))
        return SweepRow(key=key, point=settings, versions=here, outcome=_outcome(error), error=str(error))
    here = versions() if kind == "BertSource" else versions("transformers", "peft")
    gpu = asdict(find_gpu(limit.gpu)) if limit.gpu else None
    return Task(
        key=_hash(settings, here, kind, data, gpu, _own_code(model.model)), point=settings, versions=here,
        unused=tuple(sorted(point.idle)), source=(kind, data), run_config=run_config, limit=limit,
        permits=permits_of(source, run_config), threads=settings["threads"],
    )  # fmt: skip


def _outcome(error: BertscopeError) -> str:
    return FAILED if isinstance(error, MissingExtraError) else REFUSED


def _hash(*content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


@cache
def _source(model: str, head: str | None, attention: str | None, pooler: bool | None, lora: str | None) -> ModelSource:
    return find(model, architecture=head, attention=attention, add_pooling_layer=pooler, lora=lora)


@cache
def _own_code(model: str) -> str:
    file = Path(model.rpartition(":")[0])
    return digest(file) if file.suffix == ".py" else ""


def versions(*packages: str) -> dict[str, str]:
    """Return the versions that a result depends on: of bertscope, of torch, and of those other packages that exist."""
    installed = {name: _version(name) for name in ("torch", *packages)}
    return {"bertscope": bertscope.__version__} | {name: version for name, version in installed.items() if version}


@cache
def _version(package: str) -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return ""


# ---- the row of a task: each engine runs `compute` and no other function ----


def load_torch() -> None:
    """Import what every point needs, before a process forks its workers."""
    from bertscope.tracing.fake_tensors import load_fake_tensors

    load_fake_tensors()
    gc.collect()
    gc.freeze()  # collections over torch's objects take as long as an estimate


def load_nothing() -> None:
    """Import nothing: what was traced before is kept, and a point that lacks something imports torch itself."""


def are_kept(tasks: Sequence[Task]) -> bool:
    """Return True if the cache has what all points need."""
    kinds = {}
    for task in tasks:
        run = replace(for_gpu(task.run_config, task.gpu), batch=min(task.run_config.batch, SMALLEST))
        kinds[task.group[0], task.threads, run] = task
    return all(_steps_of(task).is_kept(run, threads) for (_, threads, run), task in kinds.items())


def _steps_of(task: Task) -> Simulator:
    return _steps(task.source[0], json.dumps(task.source[1]), task.threads, task.permits)


def compute(text: str) -> str:
    """Return the row of a task, both as lines of JSON; an error of the task is a row too."""
    task = Task.from_json(text)
    try:
        row = _row(task)
    except BertscopeError as error:
        row = task.row(outcome=_outcome(error), error=str(error))
    except Exception as error:
        row = task.row(outcome=FAILED, error=one_line(f"{type(error).__name__}: {error}"))
    return row.to_line()


@lru_cache(maxsize=KEPT_MODELS)
def _steps(kind: str, data: str, threads: int, permits: tuple[str, ...]) -> Simulator:
    """Return the steps of a model, which its points with this number of threads share: each thread has temporaries."""
    return Simulator(source_from_data(kind, json.loads(data), permits))


def _row(task: Task) -> SweepRow:
    here = versions(*task.versions)
    if here != task.versions:
        got, wanted = (", ".join(map(" ".join, named.items())) for named in (here, task.versions))
        return task.row(outcome=FAILED, error=f"the worker has {got}; the sweep began with {wanted}")
    choose_threads(task.threads)
    steps = _steps_of(task)
    run_config, limit = for_gpu(task.run_config, task.gpu), task.limit
    facts, trace = steps.facts(run_config), steps.trace(run_config)
    calls = traffic(trace.collectives, {}, facts.buckets, run_config.parallelism, run_config.accumulate)
    moved: dict[str, int] = {}
    for call in calls:
        moved[call.collective] = moved.get(call.collective, 0) + call.full_bytes
    cost = step_cost(trace, facts.rows, **device_cost(trace, run_config, task.gpu))
    memory = task.gpu or limit.budget
    if memory is not None:
        cost = steps.limited(run_config, memory, limit.context, limit.margin).cost(run_config, cost)
    return task.row(
        cost=replace(cost, step_flops=steps.flops(run_config)),
        phases={moment.phase: moment.live_bytes for moment in trace.peaks()},
        traffic=moved,
        sent_bytes=sum(call.sent_bytes for call in calls) if run_config.parallelism.world_size > 1 else None,
        parameters=facts.params,
    )
