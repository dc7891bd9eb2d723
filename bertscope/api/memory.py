"""`bertscope.estimate`, `bertscope.profile`, `bertscope.fit`, `bertscope.fits` and `bertscope.lengths`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from bertscope.api.arguments import Model, batch_of, batched, built, function_of, inputs_of, inputs_on_device, is_module
from bertscope.api.requests import (
    calibration_for,
    card_for,
    default_length,
    loop_of,
    module_records,
    noted,
    requested,
    resolved,
    with_limit,
    with_settings,
)
from bertscope.errors import SelectionError, name_of
from bertscope.gpus import Gpu, find_gpu, half_precision, may_have_cuda
from bertscope.memory.fit import estimate_on, fewest_report, fit_report, fitter_for
from bertscope.memory.lengths import Data, LengthSteps
from bertscope.memory.simulator import Simulator
from bertscope.memory.summary import on_card
from bertscope.progress import expect
from bertscope.reports.base import Note
from bertscope.reports.memory import FitReport, FitRow, LengthsReport, LengthsRow, MemoryReport, Variant
from bertscope.reports.plan import PlanRow
from bertscope.settings.checkpointing import NONE
from bertscope.settings.parallelism import ONE_PROCESS, SEARCHED, WORLD_SIZES
from bertscope.settings.request import Request, Resolved
from bertscope.settings.run_config import AUTOCAST, CUDA, QUESTIONS, STORED, Limit, RunConfig
from bertscope.sources.find import source_of
from bertscope.sources.lengths import read_lengths
from bertscope.sources.model_source import ModelSource, built_for_counting
from bertscope.units import FP32

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertscope.memory.step import Loss
    from bertscope.memory.step_time import Timer
    from bertscope.settings.keywords import FitSettings, MeasurementSettings, RunSettings
    from bertscope.torch_access import nn


@with_settings
def estimate(
    model: Model | Request,
    inputs: Any = None,
    *,
    name: str | None = None,
    **settings: Unpack[RunSettings],
) -> MemoryReport:
    """Estimate the memory of a step of any model, without allocating it.

    A module runs with its `inputs`, a tensor, a tuple, or a dictionary of keywords, real or on meta; `input_size` and
    `dtypes` describe them. Without inputs, and for any other model, they are derived from its forward at `batch` and
    `seq`. Backward starts from the output's loss, or the sum of its first tensor; a `loss` of another name embeds texts
    or ranks pairs, and a function is called as `loss(module, inputs)`. With a `gpu` each variant has the answer whether
    it fits there. `training_file` has TrainingArguments whose values keywords replace.
    Raises SelectionError for a setting that no run has, for a module that cannot be copied, and for one whose operators
    depend on the values of tensors.

    >>> report = bertscope.estimate("bert-tiny", batch=8, seq=128, checkpointing="none,full")
    >>> report["full"].memory.peak.peak_bytes <= report["none"].memory.peak.peak_bytes
    True
    >>> bertscope.estimate("bert-tiny", gpu="t4")["none"].answer
    'yes'
    >>> bertscope.estimate("bert-tiny", strategy="fsdp", world_size=8).variants[0].traffic[0].collective
    'all-gather'
    >>> adam = bertscope.estimate(torch.nn.Linear(1000, 1000, bias=False), input_size=(1, 1000), optimizer="adamw")
    >>> adam["none"].memory.peak.parts.optimizer_state == 2 * 4 * 1000 * 1000 + 4  # two moments and a counter
    True
    """
    given, loss = inputs_of(inputs, settings), function_of(settings)
    request = requested("estimate", model, settings)
    if given is not None:
        module, shown = built(request.subject, name)
        run_config, limit = module_records(request, module, takes_limit=loss is None)
        if limit == Limit():
            from bertscope.memory.estimate import estimate as estimate_module

            return estimate_module(module, given, run_config, loss=loss, name=shown)
        source, wanted = source_of(module, name=shown, inputs=given), [run_config]
    else:
        source = source_of(request.subject, name=name)
        found = resolved(request, source)
        (limit,), wanted = found.limits, list(found.runs)
        if loss is not None:
            return _with_function(source, wanted, limit, loss)
    expect(len(wanted))
    steps, card = Simulator(source), card_for(limit, wanted[0])
    runs, report = estimate_on(source, wanted, card, steps)
    report = replace(report, inputs_given=given is not None, training_file=noted(request, runs))
    if "snapshot" in request.extras:
        from bertscope.memory.snapshot import snapshot

        request.extras["snapshot"] = snapshot(steps.trace(on_card(wanted[-1], card)))
    return _timed(report, steps, limit, runs) if limit.time else report


def _with_function(source: ModelSource, run_configs: Sequence[RunConfig], limit: Limit, loss: Loss) -> MemoryReport:
    """Return the estimates of steps whose backward starts from `loss(model, inputs)`, with the derived inputs."""
    from bertscope.memory.estimate import estimate as estimate_module
    from bertscope.memory.step import meta_inputs, run_model

    if limit != Limit():
        raise SelectionError("gpu and budget are for an estimate without a function as loss")
    reports = []
    for run_config in run_configs:
        model = run_model(source, run_config)
        inputs = meta_inputs(model, run_config)
        reports.append(estimate_module(model, inputs, run_config, loss=loss, name=source.name))
    variants = [variant for report in reports for variant in report.variants]
    return replace(reports[0], variants=tuple(variants), inputs_given=False)


@with_settings
def profile(
    model: Model | Request,
    inputs: Any = None,
    *,
    name: str | None = None,
    **settings: Unpack[MeasurementSettings],
) -> MemoryReport:
    """Run steps of any model, and measure memory and time next to the estimate.

    A module runs in this process with `inputs` and `loss` as in `estimate`; module and inputs must be on the device of
    the run. The optimizer has a learning rate of 0. Gradients and mode of the module are restored, but what a forward
    pass changes by itself (running statistics, the random state) stays changed. Any other model is built in a new
    process for each strategy; with `nproc` and a `strategy`, as so many real ranks of this machine. Raises
    SelectionError for a setting that no run has, and for a device that torch does not find.

    >>> report = bertscope.profile(torch.nn.Linear(100, 10), torch.randn(8, 100), steps=1)
    >>> abs(report["none"].error)
    0.0
    """
    given, loss = inputs_of(inputs, settings), function_of(settings)
    request = requested("profile", model, settings)
    if is_module(request.subject):
        return _profile_module(request, given, loss, name)
    if loss is not None:
        raise SelectionError("a function cannot be sent to a new process; give a module, or the name of a loss")
    return _profile_source(source_of(request.subject, name=name, inputs=given), request)


def _profile_module(request: Request, given: Any, loss: Loss | None, name: str | None) -> MemoryReport:
    """Return the measurement of a module in this process."""
    from bertscope.measure import profiler_run
    from bertscope.memory.step import real_inputs

    module: nn.Module = request.subject
    if unused := sorted(request.named & {"threads", "seed", "memory_limit", "timeout", "nproc"}):
        raise request.error(
            f"{{{unused[0]}}} is of a new process, which builds its model; a module runs in this one: leave it out",
            unused[0],
        )
    if given is None:
        run_config, _, measurement, _ = resolved(request, None, precision=STORED, **loop_of(module)).points[0]
    else:
        run_config, _, measurement, _ = module_records(request, module)
    device = profiler_run.device_of(run_config)
    given = real_inputs(module, run_config, device) if given is None else inputs_on_device(given, device)
    return profiler_run.profile(module, given, run_config, loss=loss, steps=measurement.steps, name=name)


def _profile_source(source: ModelSource, request: Request) -> MemoryReport:
    """Return the measurement of a model that new processes build; the extras are a snapshot and a calibration."""
    from bertscope.measure.profile import profile_report
    from bertscope.measure.profile_job import Job, RankLaunch

    if "nproc" not in request.named and request.named & {"strategy", "mesh", "world_size"}:
        raise request.error("profile shares the work among real ranks: give their number, such as {nproc} 2", "nproc")
    found = resolved(request, source)
    runs = [run for run, *_ in found.points]
    _, _, measurement, launch = found.points[0]
    ranks, wants_card = launch.nproc or 1, "calibration" in request.extras
    if wants_card and (runs[0].device != CUDA or launch.nproc is not None):
        raise request.error("--save measures a CUDA card in one process: give {device} cuda, and no {nproc}", "device")
    if runs[0].device == CUDA and not may_have_cuda():  # else the child says it, after 3 s of loading torch
        raise request.error(
            "torch finds no CUDA device here; use {device} cpu, or estimate with {device} cuda", "device"
        )
    if runs[0].parallelism.world_size != ranks:
        name = "mesh" if "mesh" in request.named else "world_size"
        raise request.error(
            f"{{nproc}} starts {ranks:,} ranks; {{{name}}} has {runs[0].parallelism.world_size:,}; give as many", name
        )
    ranks_launch = RankLaunch(timeout_seconds=measurement.timeout, nproc=ranks) if launch.nproc else None
    jobs = [
        Job(source=source, run_config=run_config, steps=measurement.steps, threads=measurement.threads,
            seed=measurement.seed, memory_limit_bytes=measurement.memory_limit, beside=runs[0] if number else None,
            wants_snapshot="snapshot" in request.extras and run_config is runs[-1], wants_card=wants_card,
            launch=ranks_launch)
        for number, run_config in enumerate(runs)
    ]  # fmt: skip
    expect(len(jobs))
    report, pictures, calibration = profile_report(jobs, timeout_seconds=measurement.timeout)
    request.extras.update(snapshot=pictures[-1] if pictures else None, calibration=calibration)
    return replace(report, training_file=noted(request, runs))


@with_settings
def fit(
    model: Model | Request,
    budget: int | str | None = None,
    *,
    batch: int | None = None,
    batch_total: int | None = None,
    inputs: Any = None,
    name: str | None = None,
    **settings: Unpack[FitSettings],
) -> FitReport:
    """Find the largest batch that fits in a budget (bytes, or text such as `16GiB`) or on a `gpu`, for each setting.

    The settings are lengths, precisions and strategies of checkpointing: lists, or text such as
    `fp32,autocast-bf16`. With `batch`, find the settings with which it fits; with `batch_total`, the fewest GPUs whose
    batches add up to it, by one `strategy` or several. With `world_size` the batch is that of one rank. A module runs
    with `inputs`, or tensors of `input_size` and `dtypes`, whose first size is the batch that is searched. Raises
    SelectionError for a length or a setting that the model does not have; `fits` takes several GPUs.

    >>> report = bertscope.fit("bert-tiny", "1GiB", seq=64, batch=4, checkpointing="none", precision="fp32")
    >>> row = report["none, fp32, seq 64"]
    >>> row.answer, row.peak_bytes < 2**30
    ('yes', True)
    """
    reports = fits(model, budget, batch=batch, batch_total=batch_total, inputs=inputs, name=name, **settings)
    if len(reports) > 1:
        raise SelectionError(f"fit takes one gpu; got {len(reports)}; bertscope.fits returns a report for each")
    return reports[0]


@with_settings
def fits(
    model: Model | Request,
    budget: int | str | None = None,
    *,
    batch: int | None = None,
    batch_total: int | None = None,
    inputs: Any = None,
    name: str | None = None,
    **settings: Unpack[FitSettings],
) -> tuple[FitReport, ...]:
    """Return the report of `fit` for each GPU, such as `gpu="t4,a100-40gb"`; they share their traces.

    >>> [report.card.name for report in bertscope.fits("bert-tiny", gpu="t4,a10", seq=64, batch=4)]
    ['t4', 'a10']
    """
    own = inputs_of(inputs, settings)
    given = {**settings} if budget is None else {**settings, "budget": budget}
    searched = () if batch_total is None else ("strategy",)
    request = requested("fits", model, given, compared=(*QUESTIONS["fits"].compared, *searched)).without("batch")
    source = source_of(request.subject, name=name, inputs=batched(own))
    search = _FitSearch(source, request, batch, batch_total)
    if batch_total is not None:
        search.check_total()
    return tuple(map(search.report, search.limits()))


@dataclass
class _FitSearch:
    """A search of `fit` for one model, whose limits share traces."""

    source: ModelSource
    request: Request
    batch: int | None
    batch_total: int | None
    steps: dict[str | None, Simulator] = field(default_factory=dict)

    @property
    def _steps(self) -> Simulator:
        """Return the steps of the model itself."""
        return self.steps.setdefault(self.source.architecture, Simulator(self.source))

    def limits(self) -> tuple[Limit, ...]:
        """Return the GPUs or the budget; raises SelectionError without one."""
        found = self._resolved().limits
        with_limit(self.request, found[0].gpu or found[0].budget)  # type: ignore[arg-type]  # the name of a GPU
        return found

    def _resolved(self, **defaults: Any) -> Resolved:
        ranks = {} if self.batch_total is None else {"strategy": SEARCHED, "world_size": 2}
        return resolved(self.request, self.source, **ranks, **defaults)

    def check_total(self) -> None:
        """Raise SettingError for settings that say what `batch_total` searches, or that it cannot search."""
        self.request = self.request.without("strategy", "world_size", "mesh", "rank")
        if self.batch is not None:
            raise self.request.error("{batch} is that of one rank and {batch_total} that of all; give one of them")
        strategies = {name for source in self.request.sources if "strategy" in source
                      for name in source["strategy"].values}  # fmt: skip
        if self.request.named & {"mesh", "rank"} or not strategies <= set(SEARCHED):
            raise self.request.error(
                f"{{batch_total}} searches the number of ranks of {', '.join(SEARCHED)}; for others, for a mesh or a "
                "rank give {batch}, that of a rank"
            )

    def report(self, limit: Limit) -> FitReport:
        """Return the report for one limit."""
        runs = self.runs(limit)
        card = card_for(limit, runs[0])
        seqs = tuple(dict.fromkeys(run.seq for run in runs))
        variants = [run for run in runs if run.seq == seqs[0]]
        memory = card or limit.budget or 0
        if self.batch_total is not None:
            report = self._fewest(variants, seqs, memory, limit)
        else:
            expect(len(runs))
            report = fit_report(self.source, variants, seqs, memory, batch=self.batch, context_bytes=limit.context,
                                known_steps=self.steps)  # fmt: skip
        if limit.time:
            if (timer := timer_for(card, self._steps, limit, runs[0])) is not None:
                from bertscope.memory.step_time import with_fit_times

                report = with_fit_times(report, timer, variants)
            report = replace(report, notes=(*report.notes, *no_time_notes(limit, runs[0], report.rows)))
        file = noted(self.request, runs, searched="batch")
        return replace(report, training_file=file, length_given=self._is_length_given(runs[0]))

    def _is_length_given(self, run_config: RunConfig) -> bool:
        """Return True if the inputs of the run do not follow its length."""
        if not run_config.input:
            return getattr(self.source, "inputs", None) is not None
        from bertscope.tracing.inputs import inputs_for

        model = built_for_counting(self.source)
        short, longer = (repr(inputs_for(model, 1, seq, given=run_config.input)) for seq in (1, 2))
        return short == longer

    def runs(self, limit: Limit) -> list[RunConfig]:
        """Return the runs for one limit, with the precisions that suit its card."""
        card = find_gpu(limit.gpu) if limit.gpu else None
        plain = STORED if self.source.has_own_dtypes else FP32.name
        found = self._resolved(
            precision=[plain, f"{AUTOCAST}{half_precision(card)}"],
            checkpointing=list(self._steps.facts(RunConfig()).strategies),
        )
        order = {name: number for number, name in enumerate(dict.fromkeys(run.precision for run in found.runs))}
        return sorted((run for run, other in found.points if other == limit), key=lambda run: order[run.precision])

    def _fewest(self, variants: Sequence[RunConfig], seqs: Sequence[int], memory: int | Gpu, limit: Limit) -> FitReport:
        """Return the fewest ranks for the batch of all of them."""
        ranks = tuple(dict.fromkeys(run.parallelism for run in variants))
        sizes = (ranks[0].world_size,) if "world_size" in self.request.named else WORLD_SIZES
        alone = dict.fromkeys(replace(run, parallelism=ONE_PROCESS) for run in variants)
        expect(len(seqs) * (len(ranks) + 2))
        return fewest_report(self.source, tuple(alone), seqs, memory, self.batch_total or 1, strategies=ranks,
                             world_sizes=sizes, context_bytes=limit.context, known_steps=self.steps)  # fmt: skip


_ANY = 2**62  # a budget for which every batch fits


@with_settings
def lengths(
    model: Model | Request,
    lengths: str | os.PathLike[str] | Iterable[int],
    *,
    field: str = "",
    tokenizer: str = "",
    tokens_per_batch: int = 0,
    search: bool = False,
    name: str | None = None,
    inputs: Any = None,
    **settings: Unpack[RunSettings],
) -> LengthsReport:
    """Estimate the steps of an epoch of sequences of real lengths, for each way to make batches.

    `lengths` are numbers of tokens, a file of them, or `normal:256,64,16,512` (mean, deviation, least, most); the
    `field` of a JSONL, CSV or Parquet file may have texts for a `tokenizer`. `seq` cuts longer sequences. With
    `search` find the largest batches in a `budget` or on a `gpu`, and those for each length. A module runs with
    `inputs`, or tensors of `input_size` and `dtypes`, whose first size is the batch and whose second is the length.
    Raises SourceError for a file without lengths, and SelectionError for a setting that no run has.

    >>> report = bertscope.lengths("bert-tiny", [64, 64, 128], batch=2, device="cuda")
    >>> report["fixed"].padding == 1 - (64 + 64 + 128) / (3 * 128), report["unpadded"].padding
    (True, 0.0)
    """
    given = inputs_of(inputs, settings)
    request = requested("lengths", model, settings)
    source = source_of(request.subject, name=name, inputs=batched(given, has_length=True))
    points = resolved(request, source, **({} if given is None else {"batch": batch_of(given)})).points
    if len(points) > 1:
        raise SelectionError("lengths are for one run; give one value of each setting")
    run, limit = points[0]
    card = card_for(limit, run)
    memory = card or limit.budget
    if search:
        with_limit(request, memory)
    if search and tokens_per_batch:
        raise SelectionError(f"the search finds the tokens of a batch; leave {name_of('tokens_per_batch')} out")
    counts = read_lengths(lengths, field=field, tokenizer=tokenizer)
    most = default_length(request, source, max(counts)).get("seq", max(counts))
    most = run.seq if request.has("seq") else most
    cut = dict(sorted(Counter(min(length, most) for length in Counter(counts).elements()).items()))
    data, run = Data(cut), on_card(run, card)
    fitter, _ = fitter_for(source, run, memory or _ANY, limit.context, {})
    steps = LengthSteps(fitter, run, data, is_limited=memory is not None)
    subject = fitter.steps.facts(run.changed(checkpointing=NONE)).subject
    table = tuple(steps.table()) if search else ()
    sizes = (run.batch, run.batch * steps.is_fused, tokens_per_batch * steps.is_fused, tokens_per_batch)
    if search:
        tokens = steps.largest_unpadded()
        sizes = (table[-1].batch, data.most_unpadded(tokens), tokens, min(row.batch * row.high for row in table))
    rows = tuple(map(steps.row, data.batchings(*sizes)))
    notes: tuple[Note, ...] = () if steps.is_fused else (Note(key="lengths_scores"),)
    if limit.time:
        timer = timer_for(card, fitter.steps, limit, run)
        rows = tuple(_timed_epoch(row, steps, timer) for row in rows) if timer else rows
        notes += no_time_notes(limit, run, rows)
    return LengthsReport(
        subject=replace(subject, obtained="estimated"), run=replace(run, batch=RunConfig.batch, seq=RunConfig.seq),
        source=os.path.basename(lengths) if isinstance(lengths, str | os.PathLike) else "", sequences=data.total,
        truncated=sum(count for length, count in counts.items() if length > most), shortest=min(cut),
        longest=data.longest, mean=data.tokens / data.total, traced=tuple(steps.traced), rows=rows, table=table,
        budget_bytes=card.memory_bytes if card else limit.budget, card=card, notes=notes,
        training_file=noted(request, [run], searched="batch" if search else ""),
    )  # fmt: skip


def _timed_epoch(row: LengthsRow, steps: LengthSteps, timer: Timer) -> LengthsRow:
    """Return the row with the time of an epoch: that of a step of mean length, by the FLOPs of both."""
    mean = steps.data.tokens / steps.data.total / (1 - row.padding)
    seq = min(steps.traced, key=lambda traced: abs(traced - mean))
    run = replace(steps.padded, batch=max(round(steps.data.total / row.batches), 1), seq=seq)
    time = timer.time(run)
    if time is not None:
        steps_of_epoch = row.epoch_flops * run.accumulate / steps.fitter.steps.flops(run)
        time = replace(time, epoch=time.step.times(steps_of_epoch))
    return replace(row, cost=replace(row.cost, time=time))


def _timed(report: MemoryReport, steps: Simulator, limit: Limit, runs: Sequence[RunConfig]) -> MemoryReport:
    """Return the report with the time of each step, or with a note that says why there is none."""
    if (timer := timer_for(report.card, steps, limit, runs[0])) is not None:
        from bertscope.memory.step_time import with_times

        report = with_times(report, timer, runs)
    return replace(report, notes=(*report.notes, *no_time_notes(limit, runs[0], report.variants)))


def timer_for(card: Gpu | None, steps: Simulator, limit: Limit, run_config: RunConfig) -> Timer | None:
    """Return what gives the times on a card; None without one."""
    if card is None:
        return None
    from bertscope.memory.step_time import Timer

    found = calibration_for(limit, run_config)
    calibration = None if found is None else found.report
    return Timer(steps=steps, card=card, calibration=calibration, sequences=limit.sequences)


def no_time_notes(
    limit: Limit, run_config: RunConfig, rows: Sequence[Variant | FitRow | PlanRow | LengthsRow]
) -> tuple[Note, ...]:
    """Return the note that says why no row has a time."""
    if any(row.cost and row.cost.time for row in rows):
        return ()
    if run_config.device != CUDA:
        return (Note(key="no_time_cpu"),)
    if calibration_for(limit, run_config) is None:
        return (Note(key="no_time_uncalibrated", values={"card": limit.gpu or "a card here"}),)
    return (Note(key="no_time_precision"),)
