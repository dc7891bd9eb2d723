"""`bertscope.estimate`, `profile`, `fit`, `fits`, `plan` and `lengths`: what a step costs, estimated and measured."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from bertscope.api import requests
from bertscope.api.requests import public_function
from bertscope.calibrations import Calibration, calibration_here, calibration_in, calibration_of, calibrations, gpu_of
from bertscope.config import LORA_EXAMPLE
from bertscope.errors import SelectionError, name_of, suggestion, typed_arguments
from bertscope.gpus import Gpu, capability, find_gpu, half_precision, may_have_cuda
from bertscope.memory.caching_allocator import snapshot
from bertscope.memory.fit import fewest_report, fit_report
from bertscope.memory.simulator import Simulator
from bertscope.memory.summary import for_gpu
from bertscope.progress import expect
from bertscope.reports.base import PYTHON_ONLY, Note
from bertscope.reports.memory import FitReport, LengthsReport, MemoryReport, StepReport, TrainingFile, TrainingKey
from bertscope.settings.parallelism import ONE_PROCESS, SEARCHED, WORLD_SIZES
from bertscope.settings.request import Request, read_settings
from bertscope.settings.rows import SettingError
from bertscope.settings.run_config import AUTOCAST, CUDA, FLASH_CAPABILITIES, STORED, Limit, RunConfig
from bertscope.settings.training import LEANER, QUANTIZING, SAVERS
from bertscope.sources.find import Model, source_of
from bertscope.sources.lengths import read_lengths
from bertscope.sources.model_source import GivenModule, ModelSource, as_source_error
from bertscope.sources.training_files import Prices, read_prices
from bertscope.units import FP32, QUANTIZED

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertscope.reports.plan import PlanReport
    from bertscope.settings.keywords import FitSettings, MeasurementSettings, RunSettings
    from bertscope.torch_access import nn


Report = TypeVar("Report", bound=StepReport[Any])


class ModelRequest:
    """A resolved request about a model: its source, its runs under one limit, and the simulator of their steps."""

    def __init__(self, request: Request, source: ModelSource, points: Sequence[tuple[Any, ...]]) -> None:
        self.request, self.source = request, source
        self.runs: tuple[RunConfig, ...] = tuple(dict.fromkeys(run for run, *_ in points))
        self.limit: Limit = points[0][1]
        self.run = self.runs[0]
        self.calibration = calibration_for(self.limit, self.run)
        self.gpu = gpu_for(self.limit, self.calibration)
        kernel = getattr(source, "attention", None) or ""
        least, capable = FLASH_CAPABILITIES.get(kernel, (0, 0)), capability(self.gpu) if self.gpu else None
        if self.gpu and capable and capable < least:
            raise request.error(
                f"{kernel} needs compute capability {least[0]}.{least[1]}, and {self.gpu.name} has {capable[0]}."
                f"{capable[1]}; take {name_of('attention')} sdpa, or another {{gpu}}"
            )
        self.prices = read_prices(self.limit.price) if self.limit.price else Prices({})
        if self.limit.price:
            typed = request.values().get("gpu")
            names = {find_gpu(name).name for name in (typed.values if typed else ()) if name}
            names |= {self.gpu.name} if self.gpu else set()
            if not names & self.prices.hours.keys():
                priced = ",".join(sorted(self.prices.hours))
                lacks = f"lacks {', '.join(sorted(names))}; add it, or give" if names else "needs"
                raise request.error(f"{{price}} {lacks} {{gpu}} {priced}", "price")

    @classmethod
    def of(cls, request: Request, source: ModelSource, **defaults: Any) -> ModelRequest:
        """Return the work of all runs; a function that compares limits has one for each."""
        return cls(request, source, requests.resolved(request, source, **defaults))

    @property
    def by_precision(self) -> list[RunConfig]:
        """Return the runs ordered by precision."""
        precisions = dict.fromkeys(run.precision for run in self.runs)
        return [run for precision in precisions for run in self.runs if run.precision == precision]

    def simulator(
        self, known: Simulator | None = None, *, is_limited: bool = True, is_timed: bool | None = None
    ) -> Simulator:
        """Return the simulator under the limit; raises SettingError if there is neither a GPU nor a budget."""
        memory, simulator = self.gpu or self.limit.budget, known or Simulator(self.source)
        if memory is not None:
            simulator = simulator.limited(self.run, memory, self.limit.context, self.limit.margin)
        elif is_limited:
            raise self.request.error("give either {budget}, such as 16GiB, or {gpu}, such as t4", "budget", "gpu")
        if self.gpu is not None and (self.limit.time if is_timed is None else is_timed):
            from bertscope.memory.step_time import Timer

            calibration = self.calibration.report if self.calibration else None
            simulator.timer = Timer(
                gpu=self.gpu,
                calibration=calibration,
                sequences=self.limit.sequences,
                hour_price=self.prices.hours.get(self.gpu.name),
                currency=self.prices.currency,
            )
        return simulator

    def finished(
        self, report: Report, rows: Sequence[Any], *, searched: str = "", is_timed: bool | None = None
    ) -> Report:
        """Return the report with the training file, and with a note that says why no row has a time."""
        notes = report.notes
        if self.run.objects:
            notes = (*notes, Note(key=PYTHON_ONLY, values={"names": [item.label for item in self.run.objects]}))
        if (self.limit.time if is_timed is None else is_timed) and not any(row.cost and row.cost.time for row in rows):
            why = ("precision",) if self.calibration else ("uncalibrated", "sheet")
            keys = (*why, "measure") if self.run.device == CUDA else ("cpu",)
            values = {"uncalibrated": {"gpu": self.limit.gpu or "a GPU here"}}
            notes = (*notes, *(Note(key=f"no_time_{key}", values=values.get(key, {})) for key in keys))
        return replace(report, notes=notes, training_file=noted(self.request, self.runs, searched))


def noted(request: Request, runs: Sequence[RunConfig], searched: str = "") -> TrainingFile | None:
    """Return the training file with the settings for which the runs have other values.

    `searched` is the setting that the function searches a value for.
    """
    file: TrainingFile | None = request.training_file
    if file is None:
        return None
    replaced, not_read = list(file.replaced), (searched, *request.row.unused)
    for name, value in file.fields.items():
        used = list(dict.fromkeys(run.flat()[name] for run in runs))
        if name in not_read or value not in used:
            values = ", ".join(str(item).lower() for item in used)
            effect = "it is searched" if name in not_read else f"an option sets {values}"
            replaced.append(TrainingKey(key=name, value=value, effect=effect))
    return replace(file, replaced=tuple(replaced))


def calibration_for(limit: Limit, run_config: RunConfig) -> Calibration | None:
    """Return the limit's calibration, its GPU or, for a run on cuda, this machine's GPU; None without one."""
    if isinstance(limit.calibration, str):
        if run_config.device != CUDA:
            device = run_config.device
            raise SelectionError(f"{limit.calibration} is a calibration of a GPU; leave it or the device {device} out")
        return calibration_in(limit.calibration, limit.gpu)
    if not limit.calibration or run_config.device != CUDA or not any(calibrations()):
        return None
    if limit.gpu is not None:
        return calibration_of(find_gpu(limit.gpu))
    here = requests.gpu_here()
    return calibration_here(*here) if here else None


def gpu_for(limit: Limit, calibration: Calibration | None) -> Gpu | None:
    """Return the run's GPU with what a calibration measured; None if no GPU is named or calibrated.

    A GPU without a name has the budget's memory, if there is one.
    """
    known = find_gpu(limit.gpu) if limit.gpu is not None else None
    if known is None and limit.budget is None:
        for name in ("context", "margin"):
            if getattr(limit, name) != getattr(Limit, name):
                needs = f"{{{name}}} has no effect without {{gpu}}; give it too, or leave {{{name}}} out"
                raise SettingError(needs, [name])
    if known is not None and limit.context is not None:
        known = replace(known, context_low_bytes=limit.context, context_high_bytes=limit.context)
    if calibration is None:
        return known
    if known is not None:
        return calibration.on(known)
    gpu = gpu_of(calibration)
    return gpu if limit.budget is None else replace(gpu, memory_bytes=limit.budget)


@public_function()
def estimate(
    model: Model | Request, inputs: Any = None, *, name: str | None = None, **settings: Unpack[RunSettings]
) -> MemoryReport:
    """Estimate the memory that a step needs, for any model, without allocating it.

    A module runs with its `inputs`, a tensor, a tuple, or a dictionary of keywords, real or on meta; `input_size` and
    `dtypes` describe them. Without inputs, and for any other model, they are derived from its forward at `batch` and
    `seq`. Backward starts from the output's loss, or its first tensor's sum; a `loss` with another name embeds texts
    or ranks pairs, and a function is called as `loss(output)` or `loss(module, inputs)`. `optimizer` is a word, a class
    or your optimizer object, whose own step runs. With a `gpu` each variant has the answer whether it fits there;
    `report.fits("t4")` asks later. `training_file` has TrainingArguments whose values keywords replace.
    Raises SelectionError for a setting that no run has, for a module that cannot be copied, and for one whose operators
    depend on the values of tensors.

    >>> report = bertscope.estimate("bert-tiny", batch=8, seq=128, checkpointing="none,full")
    >>> report["full"].memory.peak.peak_bytes <= report["none"].memory.peak.peak_bytes
    True
    >>> bertscope.estimate("bert-tiny", gpu="t4")["none"].answer
    'yes'
    >>> bertscope.estimate("bert-tiny", strategy="fsdp", world_size=8).variants[0].traffic[0].collective
    'all-gather'
    >>> model = torch.nn.Linear(1000, 1000, bias=False)
    >>> adam = bertscope.estimate(model, torch.ones(1, 1000), optimizer=torch.optim.AdamW(model.parameters()))
    >>> adam["none"].memory.peak.parts.optimizer_state == 2 * 4 * 1000 * 1000 + 4  # two moments and a counter
    True
    >>> adam.fits("t4")
    True
    """
    tensors = requests.inputs_of(inputs, settings)
    request = requests.request_of("estimate", model, settings)
    if tensors is not None:
        module, name = requests.built(request.subject, name)
        request = replace(request, subject=module)
    source = source_of(request.subject, name=name, inputs=tensors)
    if isinstance(source, GivenModule):  # its copy on meta keeps no tensor alive
        from bertscope.tracing.fake_tensors import fake_like

        with as_source_error(source.name):
            inputs = None if tensors is None else fake_like(tensors, "meta")
            source = replace(source, module=source.build(), inputs=inputs)
    return _estimated(request, source)


def _estimated(request: Request, source: ModelSource) -> MemoryReport:
    """Return the answer to a request about a source, whose report can be asked whether the step fits elsewhere."""
    inputs_given = getattr(source, "inputs", None) is not None
    if inputs_given:
        request = requests.of_module(request)
        work = ModelRequest(request, source, [requests.module_records(request, source.build())])
    else:
        work = ModelRequest.of(request, source)
    expect(len(work.runs))
    simulator = work.simulator(is_limited=False)
    report = simulator.with_largest(simulator.report(work.runs))
    run_config = requests.with_own_sizes(report.run, source, getattr(source, "inputs", None))
    report = work.finished(replace(report, inputs_given=inputs_given, run=run_config), report.variants)
    repeated = replace(request, subject=source, wants=None)
    vars(report)["elsewhere"] = lambda gpu: _estimated(repeated.over(requests.limit_on(gpu)), source)
    if "snapshot" not in (request.wants or ()):
        return request.answer(report)
    return request.answer(report, snapshot=snapshot(simulator.trace(for_gpu(work.runs[-1], work.gpu))))


@typed_arguments
def training_script(model: Model | Request, *, name: str | None = None, **settings: Unpack[RunSettings]) -> str:
    """Return the training loop that `estimate` with the same settings means, as a script to copy, change and run.

    On CUDA, `run` reports its peak. Raises SelectionError for a model that is no BERT, or a setting it cannot have.

    >>> print(bertscope.training_script("bert-tiny", device="cuda", accumulate=4).partition("for step")[2])
     in range(3):
        for micro_batch in range(4):
            output = model(**batch)
            loss = output[0].sum()
            loss = loss / 4
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    <BLANKLINE>
    """
    from bertscope.memory.loops import loop_script

    request = requests.request_of("estimate", model, settings)
    source = source_of(request.subject, name=name)
    return loop_script(source, requests.resolved(request, source)[0][0])


@public_function()
def profile(
    model: Model | Request, inputs: Any = None, *, name: str | None = None, **settings: Unpack[MeasurementSettings]
) -> MemoryReport:
    """Run steps and measure memory and time next to the estimate, for any model.

    A module runs in this process with `inputs` and `loss` as in `estimate`; module and inputs must be on the device in
    use. The optimizer's learning rate is 0. The module's gradients and mode are restored, but what a forward
    pass changes by itself (running statistics, the random state) stays changed. Any other model is built in a new
    process for each strategy; with `nproc` and a `strategy`, as that many real ranks on this machine. Raises
    SelectionError for a setting that no run has, and for a device that torch does not find.

    >>> report = bertscope.profile(torch.nn.Linear(100, 10), torch.randn(8, 100), steps=1)
    >>> abs(report["none"].error)
    0.0
    """
    tensors = requests.inputs_of(inputs, settings)
    request = requests.request_of("profile", model, settings)
    if not isinstance(settings.get("optimizer", ""), str):
        raise request.error("profile trains with a learning rate of 0; give {optimizer} as a word, such as adamw")
    if requests.is_module(request.subject):
        return _profile_module(request, tensors, name)
    if callable(settings.get("loss")):
        raise SelectionError("a function cannot be sent to a new process; give a module, or the name of a loss")
    return _profile_source(source_of(request.subject, name=name, inputs=tensors), request)


def _profile_module(request: Request, tensors: Any, name: str | None) -> MemoryReport:
    from bertscope.measure import profiler_run
    from bertscope.memory.step import real_inputs

    module: nn.Module = request.subject
    if unused := sorted(request.named & {"threads", "seed", "memory_limit", "timeout", "nproc"}):
        text = f"{{{unused[0]}}} is for a new process, which builds its model; a module runs in this one: leave it out"
        raise request.error(text, unused[0])
    if tensors is None:
        records = requests.resolved(request, None, precision=STORED, **requests.loop_of(module))[0]
    else:
        request = requests.of_module(request)
        records = requests.module_records(request, module)
    run_config, _, measurement = records
    device = profiler_run.device_of(run_config)
    if tensors is None:
        tensors = real_inputs(module, run_config, device)
    elif isinstance(tensors, tuple):  # `input_size` gives meta tensors
        tensors = tuple(item.new_ones(item.shape, device=device) if getattr(item, "is_meta", False) else item
                        for item in tensors)  # fmt: skip
    report = profiler_run.profile(module, tensors, run_config, steps=measurement.steps, name=name)
    return replace(report, run=requests.with_own_sizes(report.run, source_of(module), tensors))


def _profile_source(source: ModelSource, request: Request) -> MemoryReport:
    from bertscope.measure import profile_job
    from bertscope.measure.profile import profile_report

    if "nproc" not in request.named and request.named & {"strategy", "mesh", "world_size"}:
        raise request.error("profile shares the work among real ranks: give their number, such as {nproc} 2", "nproc")
    points = requests.resolved(request, source)
    runs = [run for run, *_ in points]
    _, _, measurement = points[0]
    ranks, wants_calibration = measurement.nproc or 1, "calibration" in (request.wants or ())
    if wants_calibration and (runs[0].device != CUDA or measurement.nproc is not None):
        raise request.error("--save measures a CUDA GPU in one process: give {device} cuda, and no {nproc}", "device")
    if runs[0].device == CUDA and not may_have_cuda():  # else the child says it, after 3 s of loading torch
        raise request.error(
            "torch finds no CUDA device here; use {device} cpu, or estimate with {device} cuda", "device"
        )
    if runs[0].parallelism.world_size != ranks:
        name = "mesh" if "mesh" in request.named else "world_size"
        raise request.error(
            f"{{nproc}} starts {ranks:,} ranks; {{{name}}} has {runs[0].parallelism.world_size:,}; give as many", name
        )
    first = profile_job.Job(
        source=source,
        run_config=runs[0],
        steps=measurement.steps,
        threads=measurement.threads,
        seed=measurement.seed,
        memory_limit_bytes=measurement.memory_limit,
        wants_calibration=wants_calibration,
        launch=profile_job.RankLaunch(nproc=ranks, timeout_seconds=measurement.timeout) if measurement.nproc else None,
    )
    jobs = [first, *(replace(first, run_config=run_config, other_run=runs[0]) for run_config in runs[1:])]
    jobs[-1] = replace(jobs[-1], wants_snapshot="snapshot" in (request.wants or ()))
    expect(len(jobs))
    report, pictures, calibration = profile_report(jobs, timeout_seconds=measurement.timeout)
    report = replace(report, training_file=noted(request, runs))
    return request.answer(report, snapshot=pictures[-1] if pictures else None, calibration=calibration)


@public_function()
def fit(
    model: Model | Request,
    budget: int | str | None = None,
    *,
    batch: int | None = None,
    batch_total: int | None = None,
    exact: bool = False,
    inputs: Any = None,
    name: str | None = None,
    **settings: Unpack[FitSettings],
) -> FitReport:
    """Find the largest batch that fits in a budget (bytes, or text such as `16GiB`) or on a `gpu`, for each setting.

    The settings are lengths, precisions and checkpointing strategies: lists, or text such as `fp32,autocast-bf16`.
    With `batch`, find the settings with which it fits; with `batch_total`, the fewest GPUs whose batches add up to it,
    by one `strategy` or several. With `world_size` the batch is one rank's. A step that fits leaves the share
    `margin` of the memory free, and a batch above 16 is rounded down to a multiple of 8 unless the `exact` one is
    wanted. A module runs with `inputs`, or tensors with `input_size` and `dtypes`, whose first size is the batch.
    Raises SelectionError for a length or a setting that the model does not have; `fits` takes several GPUs.

    >>> report = bertscope.fit("bert-tiny", "1GiB", seq=64, batch=4, checkpointing="none", precision="fp32")
    >>> row = report["none, fp32, seq 64"]
    >>> row.answer, row.peak_bytes < 2**30
    ('yes', True)
    """
    arguments = {"batch": batch, "batch_total": batch_total, "exact": exact, "inputs": inputs, "name": name}
    reports = fits(model, budget, **arguments, **settings)
    if len(reports) > 1:
        raise SelectionError(f"fit takes one gpu; got {len(reports)}; bertscope.fits returns a report for each")
    return reports[0]


@public_function()
def fits(
    model: Model | Request,
    budget: int | str | None = None,
    *,
    batch: int | None = None,
    batch_total: int | None = None,
    exact: bool = False,
    inputs: Any = None,
    name: str | None = None,
    **settings: Unpack[FitSettings],
) -> tuple[FitReport, ...]:
    """Return the report of `fit` for each GPU, such as `gpu="t4,a100-40gb"`; they share their traces.

    >>> [report.gpu.name for report in bertscope.fits("bert-tiny", gpu="t4,a10", seq=64, batch=4)]
    ['t4', 'a10']
    """
    tensors = requests.inputs_of(inputs, settings, seq=settings.get("seq"))
    keywords = {**settings} if budget is None else {**settings, "budget": budget}
    request = requests.request_of("fits" if batch_total is None else "fewest", model, keywords).without("batch")
    source = source_of(request.subject, name=name, inputs=requests.batched(tensors))
    ranks: dict[str, Any] = {}
    if batch_total is not None:
        request, ranks = _without_ranks(request, batch), {"strategy": SEARCHED, "world_size": 2}
    known = Simulator(source)
    limits = {limit: run.quantize in QUANTIZED for run, limit in requests.resolved(request, source, **ranks)}
    reports: list[FitReport] = []
    for limit, is_quantized in limits.items():
        half = f"{AUTOCAST}{half_precision(find_gpu(limit.gpu) if limit.gpu else None)}"
        usual = {"precision": [STORED if source.has_own_dtypes else FP32.name, half][is_quantized:]}  # in 16 bits
        usual["checkpointing"] = list(known.facts(RunConfig()).strategies)
        points = requests.resolved(request, source, **ranks, **usual)
        work = ModelRequest(request, source, [point for point in points if point[1] == limit])
        simulator = work.simulator(known, is_timed=limit.time and batch_total is None)
        runs = work.by_precision
        seqs = tuple(dict.fromkeys(run.seq for run in runs))
        variants = [run for run in runs if run.seq == seqs[0]]
        if batch_total is None:
            expect(0 if reports else len(limits) * len(runs))
            tried = [replace(run, seq=seq) for run in variants for seq in seqs]
            report = fit_report(simulator, tried, batch=batch, is_exact=exact)
        else:
            strategies = tuple(dict.fromkeys(run.parallelism for run in variants))
            sizes = (strategies[0].world_size,) if "world_size" in request.named else WORLD_SIZES
            alone = tuple(dict.fromkeys(replace(run, parallelism=ONE_PROCESS) for run in variants))
            expect(len(seqs) * (len(strategies) + 2))
            report = fewest_report(simulator, alone, seqs, batch_total, strategies=strategies, world_sizes=sizes)
        is_given = getattr(source, "inputs", None) is not None
        if runs[0].input or not source.reads_words:  # or its inputs do not follow it
            short, longer = (repr(known.traces.inputs(replace(runs[0], batch=1, seq=seq))) for seq in (1, 2))
            is_given = short == longer
        report = replace(report, length_given=is_given)
        reports.append(work.finished(report, report.rows, searched="batch"))
    return tuple(sorted(reports, key=lambda report: min(row.epoch_cost for row in report.rows)))


def _without_ranks(request: Request, batch: int | None) -> Request:
    """Return the request without defaults of what `batch_total` searches.

    Raises SettingError for settings that say what it searches, or that it cannot search.
    """
    request = request.without("strategy", "world_size", "mesh", "rank")
    if batch is not None:
        raise request.error("{batch} is per rank and {batch_total} is global; give one of them")
    strategies = {name for source in request.sources if "strategy" in source for name in source["strategy"].values}
    if request.named & {"mesh", "rank"} or not strategies <= set(SEARCHED):
        raise request.error(
            f"{{batch_total}} searches the number of ranks of {', '.join(SEARCHED)}; for others, for a mesh or a rank "
            "give {batch}, which is per rank"
        )
    return request


@public_function()
def plan(
    model: Model | Request,
    budget: int | str | None = None,
    *,
    inputs: Any = None,
    batch: int | None = None,
    batch_total: int | None = None,
    may_change: str | Sequence[str] = (),
    name: str | None = None,
    **settings: Unpack[FitSettings],
) -> PlanReport:
    """Choose which activations to save and which to recompute so that a step fits at the lowest recompute cost.

    On a calibrated GPU the cost is time, else FLOPs. In any model whose layers repeat, each layer saves the outputs of
    some matrix products and recomputes the rest. With `batch_total`, the batch in an optimizer step, the micro-batch is
    chosen too. `may_change` names what else may change: lora, nf4, int8 (both with lora), freeze, 8bit, precision, sgd,
    loss-chunks, step-in-backward, offload-optimizer, offload-activations. `report.apply(module)` installs the
    checkpointing of the answer on a live module; `report.emitted("torch")` is code of all of it. Raises SelectionError
    for a setting that the model does not have.

    >>> report = bertscope.plan("bert-tiny", "220MiB", batch=64, seq=128, margin=0)
    >>> report.fits, report.rows[0].peak_bytes <= 220 * 2**20 < report.cheaper.peak_bytes
    (True, True)
    """
    from bertscope.memory.plan import plan_report

    own_inputs = requests.inputs_of(inputs, settings, batch=batch, seq=settings.get("seq"))
    explicit = {key: value for key, value in (("budget", budget), ("batch", batch)) if value is not None}
    request = requests.request_of("plan", model, {**settings, **explicit})
    if batch_total is not None:
        if request.named & {"batch", "accumulate"}:
            raise request.error("{batch} is the micro-batch and {batch_total} is per optimizer step; give one of them")
        request = request.without("batch", "accumulate")
    source = source_of(request.subject, name=name, inputs=own_inputs)
    work = ModelRequest.of(request, source)
    is_timed = work.limit.time or work.calibration is not None
    simulator = work.simulator(known=Simulator(source, one_batch=True), is_timed=is_timed)

    def changed_run(changes: dict[str, Any]) -> Any:
        changed = read_settings({name: value for name, value in changes.items() if name != "lora"})
        return own_sizes(requests.resolved(request.over(changed), source)[0][0])

    own_sizes = partial(requests.with_own_sizes, source=source, inputs=own_inputs)
    texts = may_change.split(",") if isinstance(may_change, str) else may_change
    names = tuple(text.strip() for text in texts if text.strip())
    run_config = own_sizes(work.run)
    adapters = {"lora": LORA_EXAMPLE.partition(",target")[0]}  # with the usual target of the family
    changes = _changes(dict.fromkeys(names), work.gpu, run_config, {} if source.lora else adapters)
    report = plan_report(simulator, run_config, changes=changes, changed_run=changed_run, batch_total=batch_total)
    return work.finished(replace(report, may_change=names), report.rows, is_timed=is_timed)


def _changes(names: Collection[str], gpu: Gpu | None, run: RunConfig, adapters: dict[str, Any]) -> list[dict[str, Any]]:
    known: dict[str, dict[str, Any]] = {
        "precision": {"precision": f"{AUTOCAST}{half_precision(gpu)}"},
        **{word: {"optimizer": name} for word, name in LEANER.items()},
        "freeze": {"freeze": ("embeddings",)},
        "lora": adapters,
        **{word: {"quantize": word, **adapters} for word in QUANTIZING},
        **SAVERS,
    }
    for name in names:
        if name not in known:
            raise SelectionError(f"{name_of('may_change')} has no {name[:40]!r}; {suggestion(name[:40], known)}")
    names = [*(name for name in names if name not in SAVERS), *(name for name in SAVERS if name in names)]
    flat = run.flat()
    new = {name: {key: value for key, value in known[name].items() if flat.get(key) != value} for name in names}
    # The host has room for the state of any optimizer.
    replaced = ("8bit", "step-in-backward") if "offload-optimizer" in names else ()
    order = (name for name in ("precision", "8bit", "lora", *QUANTIZING, *SAVERS) if name not in replaced)
    together = [new[name] for name in order if new.get(name)]
    several = {name: value for settings in together for name, value in settings.items()}
    return [*filter(None, new.values()), *([several] if len(together) > 1 else [])]


@public_function()
def lengths(
    model: Model | Request,
    lengths: str | os.PathLike[str] | Iterable[int],
    *,
    field: str = "",
    tokenizer: str = "",
    seeds: int = 0,
    search: bool = False,
    exact: bool = False,
    name: str | None = None,
    inputs: Any = None,
    **settings: Unpack[RunSettings],
) -> LengthsReport:
    """Estimate the steps in an epoch with real sequence lengths, with fixed and with dynamic padding.

    `lengths` are token counts, a file with them, or `normal:256,64,16,512` (mean, deviation, least, most); the
    `field` in a JSONL or CSV file may have texts for a `tokenizer`. `seq` cuts longer sequences. With
    `seeds` simulate what torch reserves in 20 steps of random batches, for as many seeds. With
    `search` find the largest batches in a `budget` or on a `gpu`, also for each length. A module runs with
    `inputs`, or tensors with `input_size` and `dtypes`, whose first size is the batch and whose second is the length.
    Raises SourceError for a file without lengths, and SelectionError for a setting that no run has.

    >>> report = bertscope.lengths("bert-tiny", [64, 64, 128], batch=2, device="cuda")
    >>> report["fixed"].padding == 1 - (64 + 64 + 128) / (3 * 128)
    True
    """
    from bertscope.memory.lengths import LengthSteps

    tensors = requests.inputs_of(inputs, settings)
    request = requests.request_of("lengths", model, settings)
    source = source_of(request.subject, name=name, inputs=requests.batched(tensors, has_length=True))
    counts = read_lengths(lengths, field=field, tokenizer=tokenizer)
    usual: dict[str, Any] = {"sequences": sum(counts.values())}
    usual |= {} if tensors is None else {"batch": requests.batch_of(tensors)}
    work = ModelRequest.of(request, source, **usual)
    if len(work.runs) > 1:
        raise SelectionError("lengths are for one run; give one value of each setting")
    simulator = work.simulator(is_limited=search)
    most = requests.default_length(request, source, max(counts)).get("seq", work.run.seq)
    cut = dict(sorted(Counter(min(length, most) for length in Counter(counts).elements()).items()))
    run = for_gpu(work.run, work.gpu)
    steps = LengthSteps(simulator, run, cut, is_exact=exact)
    table = tuple(steps.table()) if search else ()
    if seeds and run.device != CUDA:
        raise request.error(f"{name_of('seeds')} simulates torch's allocator on CUDA; give {{gpu}} or {{device}} cuda")
    batch = table[-1].batch if search else run.batch
    rows = tuple(steps.rows(batch, seeds)) if batch else ()
    report = LengthsReport(
        subject=replace(simulator.facts(run).subject, obtained="estimated"),
        run=replace(run, batch=RunConfig.batch, seq=RunConfig.seq),
        source=os.path.basename(lengths) if isinstance(lengths, str | os.PathLike) else "",
        sequences=steps.total,
        truncated=sum(count for length, count in counts.items() if length > most),
        shortest=min(cut),
        longest=steps.longest,
        mean=steps.tokens / steps.total,
        traced=tuple(steps.traced),
        rows=rows,
        table=table,
        budget_bytes=work.gpu.memory_bytes if work.gpu else work.limit.budget,
        gpu=work.gpu,
    )
    return work.finished(report, rows, searched="batch" if search else "")
