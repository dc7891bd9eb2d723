"""`bertscope.presets` and `bertscope.sweep`, which import no torch themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

from bertscope.api.requests import refuse_idle_of
from bertscope.errors import MissingExtraError, SelectionError, name_of, typed_arguments
from bertscope.files import read_mapping
from bertscope.progress import expect, notify, progress
from bertscope.reports.memory import SweepReport, SweepRow
from bertscope.reports.plan import PlanReport
from bertscope.reports.tool import PresetRow, PresetsReport
from bertscope.settings.run_config import Engine
from bertscope.sources.bert import LISTED, MEMBER, member_of, near_presets, preset_paths, presets_by_alias, read_preset
from bertscope.sources.training_files import read_plan
from bertscope.tracing.cache import usable_cores

_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim")  # the names of one quantity, by family
_DEPTHS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")


@typed_arguments
def presets(name: str | None = None) -> PresetsReport:
    """List the presets with their counts: all, one by its name, a family, or those whose names contain `name`.

    Raises SelectionError if there are none.

    >>> bertscope.presets("bert-base-cased").rows[0].distinct_params
    108340804
    """
    text = (name or "").lower()
    alias = presets_by_alias().get(text)
    rows = [_preset(path) for path in ([alias] if alias else preset_paths().values())]
    if text and not alias:
        family = [row for row in rows if row.family == text]
        rows = family or [row for row in rows if text in " ".join((row.name, *row.hub_names)).lower()]
    if not rows:
        raise SelectionError(f"no preset {text[:60]!r}; {near_presets(text) or LISTED}")
    return PresetsReport(rows=tuple(rows))


def _preset(path: Path) -> PresetRow:
    if path.suffix == ".yaml":
        source = read_preset(path)
        fields, architecture, config, requires = vars(source), source.architecture, source.config.to_dict(), ""
    else:
        entries = read_mapping(path)
        fields, architecture, config = member_of(entries), entries["architectures"].value[0], entries.plain()
        requires = config[MEMBER].get("requires", "transformers")
    counts = {item.key: item.value for item in fields["expected"]}
    return PresetRow(
        name=path.stem, family=config["model_type"], architecture=architecture,
        distinct_params=counts["distinct_params"], layer_params=counts["layer_params"],
        hidden_size=next(config[key] for key in _WIDTHS if key in config),
        num_hidden_layers=next(config[key] for key in _DEPTHS if key in config),
        requires=requires, description=fields["description"], hub_names=fields["hub_names"], path=str(path),
    )  # fmt: skip


@typed_arguments
def sweep(
    grid: str | PathLike[str] | Mapping[str, Any],
    output: str | PathLike[str] | None = None,
    *,
    engine: str = "local",
    workers: int | None = None,
    address: str | None = None,
    plan: PlanReport | str | PathLike[str] | None = None,
    allow_code: bool = False,
) -> SweepReport:
    """Estimate memory and FLOPs at every point in a grid: a YAML file, or a value or a list for each setting.

    A row is in the file `output` (.jsonl) as soon as its point is computed; a later call goes on after an interruption
    and computes no point twice. The points are computed by `workers` processes on this machine, or on a dask cluster
    at `address`. `allow_code` imports the `module:attribute` that a file names. Raises SettingError with file and line.

    >>> report = bertscope.sweep({"model": "bert-tiny", "batch": [1, 2], "seq": 8})
    >>> [row.point["batch"] for row in report.rows], report.rows[0].cost.peak_bytes <= report.rows[1].cost.peak_bytes
    ([1, 2], True)
    """
    from bertscope.analyses.sweep import grid as grids
    from bertscope.analyses.sweep import pool

    engine, workers, address = vars(Engine(engine=engine, workers=workers, address=address)).values()
    if engine != "local" and find_spec("distributed") is None:
        raise MissingExtraError(f"{name_of('engine')} dask", "dask")
    cluster = "" if engine == "local" else pool.cluster_address(address)
    request = grids.read_grid(grid, allow_code=allow_code)
    if plan is not None:
        report = plan if isinstance(plan, PlanReport) else read_plan(plan)
        request = grids.with_plan(request, report, allow_code=allow_code)
    if request.named & {"batch", "seq"}:
        refuse_idle_of(request, *grids.sources_of(request))
    points = grids.tasks_of(request)
    keys = [point.key for point in points]
    name = "the grid" if isinstance(grid, Mapping) else Path(grid).name
    header = SweepReport(grid=name, varied=grids.varied(request), rows=())

    def rows(left: Sequence[grids.Task | SweepRow]) -> Iterator[SweepRow]:
        """Yield at once the points that have no task, then the others as they complete."""
        expect(len(left))
        progress("point 1: starting the workers")
        refused = [point for point in left if isinstance(point, SweepRow)]
        tasks = [point for point in left if not isinstance(point, SweepRow)]
        computed: Iterable[SweepRow] = ()
        if tasks:
            is_local = engine == "local"
            computed = pool.local_rows(tasks, workers or usable_cores()) if is_local else pool.dask_rows(tasks, cluster)
        for number, row in enumerate(chain(refused, computed), 1):
            yield row
            if number < len(left):
                progress(f"point {number + 1:,}: {row.point['model']}")

    if output is None:
        done = {row.key: row for row in rows(points)}
        return replace(header, rows=tuple(done[key] for key in keys))
    with pool.results_file(Path(output), {point.key: point.point for point in points}) as file:
        known = file.done()
        left = [point for point in points if point.key not in known]
        if len(left) < len(points):
            rest = f"{len(left):,} {'is' if len(left) == 1 else 'are'} left" if left else "none is left"
            notify(f"{file.path} has {len(points) - len(left):,} of {len(points):,} points; {rest}")
        for row in rows(left):
            file.append(row)
        file.finish(keys)
        return replace(header, rows=tuple(file.rows[key] for key in keys))
