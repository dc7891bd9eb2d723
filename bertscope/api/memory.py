"""`bertscope.estimate`, `bertscope.profile` and `bertscope.fit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

from bertscope.analyses.memory import estimate as estimates
from bertscope.analyses.memory import profiler_run
from bertscope.analyses.memory.fit import estimate_on, fit_report, fit_variants
from bertscope.analyses.memory.profile import profile_report
from bertscope.analyses.memory.profile_job import Job, Launch
from bertscope.analyses.memory.ranks.fewest import fewest_report
from bertscope.analyses.memory.step import Loss, real_inputs
from bertscope.api.given import Model, Size, built, inputs_of
from bertscope.errors import SelectionError, suggestion
from bertscope.gpus import find_gpu
from bertscope.parallelism import TRIED, WORLD_SIZES, parse_parallelism
from bertscope.reports.memory import FitReport, Gpu, MemoryReport
from bertscope.run_config import NONE, STORED, RunConfig, parse_strategies, takes_reentrant
from bertscope.sources.find import source_of
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import nn, torch
from bertscope.units import parse_bytes

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Loop(TypedDict, total=False):
    """The fields of RunConfig that describe the loop: what is computed and trained, and where."""

    mode: str
    optimizer: str
    implementation: str
    model_implementation: str
    padding: float
    dropout: bool
    freeze: Sequence[str]
    device: str
    sdpa_kernel: str
    accumulate: int
    keep_gradients: bool
    momentum: float
    amsgrad: bool
    ema: bool
    clip_grad_norm: bool
    hold_outputs: bool
    grad_scaler: bool
    alloc_conf: str


class LoopOfRanks(Loop, total=False):
    """The same, and the ranks of a job with how they share the work, as the options of the command line."""

    strategy: str
    world_size: int
    mesh: str
    param_dtype: str
    reduce_dtype: str
    bucket_cap_mb: int
    gradient_as_bucket_view: bool
    rank: int


class Run(LoopOfRanks, total=False):
    """The fields of RunConfig; `checkpointing` may name several strategies to compare, such as `none,full`."""

    batch: int
    seq: int
    dtype: str
    autocast: str | None
    checkpointing: str
    reentrant: bool


_RANKS = tuple(name for name in LoopOfRanks.__annotations__ if name not in Loop.__annotations__)


def estimate(
    model: Model,
    inputs: Any = None,
    *,
    loss: Loss | None = None,
    name: str | None = None,
    input_size: Size | None = None,
    input_data: Any = None,
    dtypes: Sequence[torch.dtype] | None = None,
    gpu: str | Gpu | None = None,
    **run: Unpack[Run],
) -> MemoryReport:
    """Estimate the memory of a step of any model, without allocating it.

    A module runs with its `inputs` (or `input_data`), a tensor, a tuple, or a dictionary of keywords, real or on meta;
    `input_size` and `dtypes` describe them. Backward starts from `loss(module, inputs)`; by default from the output's
    loss, or the sum of its first tensor. Without inputs, and for any other model, they are derived from its forward at
    `batch` and `seq`. `run` are fields of RunConfig; with inputs, those that the module does not determine itself.
    Without inputs, `strategy` with `world_size` or `mesh` gives one rank of a job, and `gpu` the answer of each
    variant whether it fits there. Raises SelectionError for other fields, for a module that cannot be copied, and for
    one whose operators depend on the values of tensors.

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
    given = inputs_of(inputs, input_size, input_data, dtypes)
    if given is not None:
        if ranks := [field for field in run if field in _RANKS]:
            raise SelectionError(
                f"{ranks[0]} concerns ranks, whose inputs are derived from batch and seq; give no inputs"
            )
        if gpu is not None:
            raise SelectionError("gpu is for a step whose inputs are derived from batch and seq; give no inputs")
        module, shown = built(model, name)
        return estimates.estimate(module, given, loss=loss, name=shown, **run)
    if loss is not None:
        raise SelectionError("loss is computed from the inputs of a module; give them too, or leave loss out")
    source = source_of(model, name=name)
    card = find_gpu(gpu) if isinstance(gpu, str) else gpu
    runs = runs_of(source, run if card is None else {**run, "device": "cuda"})
    return estimate_on(source, runs, card)[1]


def profile(
    model: Model,
    inputs: Any = None,
    *,
    loss: Loss | None = None,
    steps: int = 3,
    name: str | None = None,
    input_size: Size | None = None,
    input_data: Any = None,
    dtypes: Sequence[torch.dtype] | None = None,
    threads: int | None = None,
    seed: int = 0,
    memory_limit: int | str | None = None,
    timeout: float = 600.0,
    nproc: int | None = None,
    **run: Unpack[Run],
) -> MemoryReport:
    """Run steps of any model, and measure memory and time next to the estimate.

    A module runs in this process with `inputs`, `loss` and `run` as in `estimate`; module and inputs must be on the
    device of `run`. The optimizer has a learning rate of 0. Gradients and mode of the module are restored, but what a
    forward pass changes by itself (running statistics, the random state) stays changed. Any other model is built in a
    new process for each strategy, with this number of `threads`, `seed`, `memory_limit` (bytes, or text such as `4GiB`)
    and `timeout` in seconds; with `nproc` and a `strategy`, as so many real ranks of this machine. Raises
    SelectionError for fields that `run` does not have, and for a device that torch does not find.

    >>> report = bertscope.profile(torch.nn.Linear(100, 10), torch.randn(8, 100), steps=1)
    >>> abs(report["none"].error)
    0.0
    """
    given = inputs_of(inputs, input_size, input_data, dtypes)
    if isinstance(model, nn.Module):
        if nproc is not None:
            raise SelectionError("real ranks build the model themselves; give its name, or leave nproc out")
        if given is None:
            sizes, own = _split(run, ("batch", "seq"))
            given = real_inputs(model, RunConfig(**sizes, dtype=STORED), own.get("device", RunConfig.device))
            return profiler_run.profile(model, given, loss=loss, steps=steps, name=name, **own)
        if input_size is not None:
            device = run.get("device", RunConfig.device)
            given = tuple(torch.ones_like(tensor, device=device) for tensor in given)
        return profiler_run.profile(model, given, loss=loss, steps=steps, name=name, **run)
    if loss is not None:
        raise SelectionError("loss is computed from the inputs of a module; leave it out")
    source = source_of(model, name=name, inputs=given)
    if nproc is not None and "mesh" not in run:
        run["world_size"] = nproc
    runs = runs_of(source, run)
    if runs[0].parallelism.world_size != (nproc or 1):
        raise SelectionError(f"nproc is the number of ranks, {runs[0].parallelism.world_size:,}; got {nproc}")
    launch = None if nproc is None else Launch(nproc=nproc, timeout_seconds=timeout)
    jobs = [
        Job(source=source, run_config=run_config, steps=steps, threads=threads, seed=seed,
            memory_limit_bytes=bytes_of(memory_limit), beside=runs[0] if place else None,
            launch=launch)
        for place, run_config in enumerate(runs)
    ]  # fmt: skip
    report, _ = profile_report(jobs, timeout_seconds=timeout)
    return report


def fit(
    model: Model,
    budget: int | str | None = None,
    *,
    gpu: str | Gpu | None = None,
    seq: int | Sequence[int] = 512,
    batch: int | None = None,
    batch_total: int | None = None,
    checkpointing: str | None = None,
    precision: str | None = None,
    context: int | str | None = None,
    inputs: Sequence[str] = (),
    name: str | None = None,
    **run: Unpack[LoopOfRanks],
) -> FitReport:
    """Find the largest batch that fits in a budget (bytes, or text such as `16GiB`) or on a `gpu`, for each setting.

    The settings are the `checkpointing` strategies and the precisions, such as `fp32,autocast-bf16`. With `batch`, find
    the settings with which it fits; with `batch_total`, the fewest GPUs whose batches add up to it, by one `strategy`
    or several. With `world_size` the batch is that of one rank. `context` is the memory of the CUDA context; `inputs`
    are those that cannot be derived, such as `pixel_values=Bx3x224x224:float32`; `run` are other fields of RunConfig,
    and the device is cuda for a GPU. Raises SelectionError for a length or a setting that the model does not have.

    >>> report = bertscope.fit("bert-tiny", "1GiB", seq=64, batch=4, checkpointing="none", precision="fp32")
    >>> row = report["none, fp32, seq 64"]
    >>> row.answer, row.peak_bytes < 2**30
    ('yes', True)
    """
    if (budget is None) == (gpu is None):
        raise SelectionError("give either a budget, such as '16GiB', or a gpu, such as 't4'")
    card = find_gpu(gpu) if isinstance(gpu, str) else gpu
    source = source_of(model, name=name)
    ranks, loop = _split(run, _RANKS)
    if batch_total is not None and (batch is not None or not {"strategy", "world_size"} >= set(ranks)):
        raise SelectionError("batch_total searches the number of ranks; give only strategy or world_size with it")
    searched = {} if batch_total is not None else ranks
    base = run_config_of({"device": "cuda" if card else RunConfig.device, "inputs": inputs, **loop, **searched})
    variants = fit_variants(source, base, card, precision=precision, checkpointing=checkpointing)
    lengths = (seq,) if isinstance(seq, int) else tuple(seq)
    if batch_total is not None:
        return fewest_report(
            source, variants, lengths, card or bytes_of(budget) or 0, batch_total, context_bytes=bytes_of(context),
            strategies=(ranks["strategy"],) if "strategy" in ranks else TRIED,
            world_sizes=(ranks["world_size"],) if "world_size" in ranks else WORLD_SIZES,
        )  # fmt: skip
    return fit_report(source, variants, lengths, card or bytes_of(budget) or 0, batch=batch,
                      context_bytes=bytes_of(context))  # fmt: skip


def runs_of(source: ModelSource, run: Mapping[str, Any]) -> list[RunConfig]:
    """Return the run of a source by each of the strategies; parameters of a module keep their dtypes by default."""
    given, others = _split(run, ("checkpointing", "reentrant"))
    first = run_config_of({"dtype": STORED} | others if source.has_own_dtypes else others)
    if first.mode == "inference" and "checkpointing" in given:
        raise SelectionError("checkpointing concerns what is saved for backward; use mode forward or training")
    return [
        replace(first, checkpointing=strategy, reentrant=given.get("reentrant", False) and takes_reentrant(strategy))
        for strategy in parse_strategies(given.get("checkpointing", NONE))
    ]


def run_config_of(run: Mapping[str, Any]) -> RunConfig:
    """Return the run of these fields; raises SelectionError for a field that a run does not have."""
    known = [*(field.name for field in fields(RunConfig)), *_RANKS]
    for name in run:
        if name not in known:
            raise SelectionError(f"a run has no field {name[:100]!r}; {suggestion(name, known)}")
    ranks, others = _split(run, _RANKS)
    lists = {name: tuple(run[name]) for name in ("freeze", "inputs") if name in run}
    parallelism = {"parallelism": parse_parallelism(**ranks)} if ranks else {}
    return RunConfig(**{**others, **lists, **parallelism})


def _split(run: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of these names, and the others."""
    return {name: run[name] for name in run if name in names}, {name: run[name] for name in run if name not in names}


def bytes_of(size: int | str | None) -> int | None:
    """Return the bytes of a number or of text such as `16GiB`; raises SelectionError for other text."""
    if not isinstance(size, str):
        return size
    try:
        return parse_bytes(size)
    except ValueError:
        raise SelectionError(f"a size is a number of bytes, or text such as '16GiB'; got {size[:40]!r}") from None
