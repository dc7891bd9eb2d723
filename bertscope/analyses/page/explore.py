"""`explore`: parameters, FLOPs, shapes and tensors saved for backward, joined by module path.

The reports fold equal layers differently, so each is expanded to the paths of single modules (`layer.3`) and summed
over those that a row of the tree represents (`layer.0-11`).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import accumulate

from bertscope.analyses.flops.sweep import FlopsRun
from bertscope.analyses.memory.estimate import MemoryTraces
from bertscope.analyses.memory.events import MemoryTrace
from bertscope.analyses.memory.summary import kept_rows
from bertscope.analyses.modules.freeze import freeze
from bertscope.analyses.modules.module_tree import Held, InOut, fold, read
from bertscope.analyses.params.tree import tree
from bertscope.analyses.tracing.inputs import inputs_for
from bertscope.analyses.tracing.trace import source_shapes
from bertscope.reports.flops import FlopsReport, Work
from bertscope.reports.layer_ranges import expand
from bertscope.reports.memory import KeptRow
from bertscope.reports.page import ExploreReport, ExploreRow, HeldTensor, StepWork
from bertscope.settings.optimizers import NO_OPTIMIZER
from bertscope.settings.run_config import TRAINING, RunConfig
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import nn

AWAITED = ("FLOPs and shapes", "memory")


def explore(source: ModelSource, run_config: RunConfig, *, folded: bool = True) -> Iterator[ExploreReport]:
    """Yield the tree with parameters, then also with FLOPs and shapes, then also with saved tensors.

    FLOPs and memory are those of a training step by `run_config`. Raises SelectionError or ConfigError before the
    first report, for sizes or a strategy that the model cannot run.
    """
    model = source.build()
    freeze(model, run_config.freeze)
    batch, seq, inputs = run_config.batch, run_config.seq, run_config.input
    inputs_for(model, batch, seq, given=inputs)
    source.checkpoint(source.build(), run_config.checkpointing, reentrant=run_config.reentrant)
    report = of_parameters(model, source.name, run_config, folded=folded)
    yield report
    run = FlopsRun(source=source, run=replace(run_config, mode=TRAINING))
    report = with_work(report, run.at(batch, seq), source_shapes(source, batch, seq, inputs))
    yield report
    step = replace(run_config, mode=TRAINING, optimizer=NO_OPTIMIZER)
    yield with_memory(report, MemoryTraces(source).trace(step))


def of_parameters(model: nn.Module, name: str, run_config: RunConfig, *, folded: bool = True) -> ExploreReport:
    """Return the tree and the tensors of each module; nothing is run."""
    found, root = tree(model, name=name, folded=folded), read(model)
    nodes = (fold(root) if folded else root).walk()
    return ExploreReport(
        subject=found.subject,
        run=run_config,
        totals=found.totals,
        ties=found.ties,
        rows=tuple(
            ExploreRow(module=row, tensors=tuple(map(_tensor, node.held)))
            for row, node in zip(found.rows, nodes, strict=True)
        ),
        awaited=AWAITED,
    )


def _tensor(held: Held) -> HeldTensor:
    return HeldTensor(**{field.name: getattr(held, field.name) for field in fields(HeldTensor)})


def with_work(report: ExploreReport, flops: FlopsReport, found: Mapping[str, InOut]) -> ExploreReport:
    """Return the report with the FLOPs, inputs and outputs of each module."""
    each = {
        path: (row.forward // row.copies, row.backward // row.copies, row.recompute // row.copies)
        for row in flops.rows
        for path in expand(row.path)
    }

    def filled(row: ExploreRow) -> ExploreRow:
        paths = list(expand(row.module.path))
        forward, backward, recompute = (sum((each[path][phase] for path in paths), Work()) for phase in range(3))
        inputs, outputs = found.get(paths[0], ((), ()))
        return replace(
            row,
            module=replace(row.module, inputs=inputs, outputs=outputs),
            work=StepWork(forward=forward, backward=backward, recompute=recompute),
        )

    return replace(report, rows=tuple(map(filled, report.rows)), awaited=AWAITED[1:])


def with_memory(report: ExploreReport, trace: MemoryTrace) -> ExploreReport:
    """Return the report with the tensors that the forward pass of each module saves for backward."""
    kept: dict[str, list[KeptRow]] = defaultdict(list)
    sums: Counter[str] = Counter()
    for found in kept_rows(trace, {}):
        kept[found.path].append(found)
        for path in {"", *accumulate(found.path.split("."), "{}.{}".format)}:  # the module and all around it
            sums[path] += found.kept_bytes

    def filled(row: ExploreRow) -> ExploreRow:
        paths = list(expand(row.module.path))
        own = [found for path in paths for found in kept.get(path, ())]
        return replace(row, kept_bytes=sum(sums[path] for path in paths), kept=_summed_rows(own, row.module.path))

    return replace(report, rows=tuple(map(filled, report.rows)), awaited=())


def _summed_rows(rows: list[KeptRow], path: str) -> tuple[KeptRow, ...]:
    """Merge the same tensor of several layers into one row."""
    found: dict[tuple[object, ...], KeptRow] = {}
    for row in rows:
        key = (row.operator, row.what, row.shape, row.dtype)
        before = found.get(key, replace(row, tensors=0, kept_bytes=0))
        found[key] = replace(
            row, path=path, tensors=before.tensors + row.tensors, kept_bytes=before.kept_bytes + row.kept_bytes
        )
    return tuple(sorted(found.values(), key=lambda row: -row.kept_bytes))
