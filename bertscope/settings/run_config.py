"""A run's settings, one row each, and the rules for combining them.

To add a setting, add a row here and its effect in `analyses/`. The row is an option in each command that takes runs, a
Python keyword, a key in grids, expectation files and `[tool.bertscope]`, and a line in the documentation.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache, partial
from importlib.metadata import version
from operator import eq, ne, not_
from typing import Any, NamedTuple

from bertscope.errors import SelectionError
from bertscope.gpus import GPUS, find_gpu, typed_prices
from bertscope.settings import checkpointing as strategies
from bertscope.settings import training
from bertscope.settings.checkpointing import COMPARED, NONE
from bertscope.settings.parallelism import ONE_PROCESS, SINGLE, STRATEGIES, ZERO1, Parallelism
from bertscope.settings.rows import RULES, CodeObject, Row, Rule, Settings, is_code, row, rows
from bertscope.settings.training import ADAMW, LOSSES, MODEL, NO_OPTIMIZER, OPTIMIZERS, loss_parts, losses_with, takers
from bertscope.units import BF16, FP16, FP32, PRECISIONS, QUANTIZED, UNQUANTIZED

# Whose masks a run of the built-in BERT has, in reports.
AS_IN_TRANSFORMERS = "as in transformers 4.43.4"
MODES = INFERENCE, EVALUATION, FORWARD, TRAINING = "inference", "evaluation", "forward", "training"
DEVICES = CPU, CUDA = "cpu", "cuda"
KERNELS = ("auto", "flash", "efficient", "math", "cudnn")
AUTOCAST = "autocast-"  # the parameters keep their dtype, and matrix products run in the dtype after it
STORED = "stored"  # the dtypes of the model's own parameters, and their quantization
RUN_PRECISIONS = (*PRECISIONS, *(f"{AUTOCAST}{name}" for name, row in PRECISIONS.items() if row.autocast), STORED)
_AUTOCAST_BF16, _AUTOCAST_FP16 = f"{AUTOCAST}{BF16.name}", f"{AUTOCAST}{FP16.name}"
PLAIN, TRAINER, FREED, LIGHTNING = "plain", "trainer", "freed", "lightning"
# Of the package flash-attn, for models of transformers: the least compute capability (Ampere, Hopper; its README).
FLASH_CAPABILITIES = {"flash_attention_2": (8, 0), "flash_attention_3": (9, 0)}
FLASH_KERNELS = tuple(FLASH_CAPABILITIES)
MARGIN = 0.05  # other processes, a desktop, and what an estimate leaves out need some of a GPU (docs/fit.md)
CODE_FORMS = ("torch", "trainer", "lightning")  # in which a plan is emitted
PLAN_FORMS = (*CODE_FORMS, "json")
_TIMED_SECONDS = 15.0  # of all timed steps
CACHE_VARIABLE = "BERTSCOPE_CACHE"  # of the environment: a folder in place of the user's, or empty for no cache
# The loops, and what lives in them until the next forward has returned.
LOOPS = {PLAIN: ("output", "loss"), TRAINER: ("loss",), FREED: (), LIGHTNING: ()}
_NEWEST_TORCH = "2.15"  # with which .ci/versions ran; a newer installed one counts
FOREACH_FROM = (2, 0)  # the optimizers' choice on CUDA (torch.optim, release notes)
_OF_TRAINING = {"mode": partial(eq, TRAINING)}
_WITH_LOSS = {"mode": (TRAINING, EVALUATION).__contains__}
_WITH_GRADIENTS = {"mode": (TRAINING, FORWARD).__contains__}
_OF_CUDA = {"device": partial(eq, CUDA)}
# Whose gradients are complete when a hook of the parameter runs; DDP reduces its buckets later.
_ALONE_OR_SHARDED = [name for name, row in STRATEGIES.items() if name == SINGLE or row.is_sharded]
# Not on the host: an optimizer that is a kernel of CUDA, or that makes its step counters on the device.
_ON_HOST = [name for name, row in OPTIMIZERS.items() if row.host_state and not row.is_kernel_on_cuda]


def _strategy(text: str) -> str:
    strategies.Checkpointing.parse(text)
    return text


def other_implementations(implementation: str, optimizer: str) -> str:
    """Return the implementations of an optimizer that does not have this one; empty if it has."""
    row = OPTIMIZERS.get(optimizer)
    return "" if row is None or row.has(implementation) else ", ".join(filter(row.has, training.IMPLEMENTATIONS))


def _version_text(text: str) -> str:
    """Return a version of torch that exists, from the oldest with a published measurement on."""
    if re.fullmatch(r"[0-9]+\.[0-9]{1,3}(\.[0-9a-z+.]*)?", text, re.ASCII) is None:
        raise ValueError("a version such as 2.6")
    newest = max(_NEWEST_TORCH, installed_torch(), key=_numbers)
    short = ".".join(text.split(".")[:2])
    if not ((1, 8) <= _numbers(short) <= (1, 13) or (2, 0) <= _numbers(short) <= _numbers(newest)):
        raise SelectionError(f"versions are 1.8 to 1.13 and 2.0 to {newest}; got {text[:40]!r}")
    return short


def _numbers(version_text: str) -> tuple[int, ...]:
    return tuple(map(int, version_text.split(".")))


@cache
def installed_torch() -> str:
    """Return the version of the installed torch, such as 2.13."""
    return ".".join(version("torch").split(".")[:2])


def _prices(text: str) -> str:
    """Return prices, or the path of their file, if it can be one."""
    if "=" in text or re.fullmatch("[0-9.,]+", text) or text.partition(",")[0].strip().lower() in GPUS:
        typed_prices(text)
    return text


def _decay(value: Any, keys: Mapping[str, Any]) -> Any:
    """Return the weight decay if the optimizer copies gradients for it; AdamW's changes parameters in place."""
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise ValueError("a number")
    name = training.TRAINER_OPTIMIZERS.get(str(keys.get("optim")), ADAMW)
    return value or None if name in takers("weight_decay") else None


class RunConfig(Settings):
    """The run of a model that is examined.

    inference: eval, nothing saved. evaluation: the same with labels and loss. forward: train, tensors saved for
    backward. training: forward, backward and, with an optimizer, its step, in the steady state (optimizer state exists,
    gradients are freed).
    """

    # fmt: off
    batch: int = row(
        1, "The batch size per GPU and micro-batch.", section="common", low=1, metavar="N", flag="-b",
        trainer=dict.fromkeys(("per_device_train_batch_size", "per_gpu_train_batch_size"), training.whole_number),
        of_modules=False, emitted=CODE_FORMS,
    )
    seq: int = row(
        128, "The sequence length in tokens.", section="common", low=1, metavar="N", flag="-s", text="seq {}",
        of_modules=False, emitted=CODE_FORMS,
    )
    mode: str = row(
        TRAINING,
        "The mode: training, inference, evaluation or forward. inference: forward in eval mode; evaluation: the same "
        "with the loss; forward: forward in train mode; training: forward, backward and optimizer step.", choices=MODES,
        section="common", emitted=CODE_FORMS,
    )
    precision: str = row(
        FP32.name, "The precision, such as bf16 or autocast-fp16. The dtype of parameters and computation; with "
        "autocast the parameters keep their dtype; stored is the dtype that the model already has.",
        section="common", choices=RUN_PRECISIONS, text="{}", emitted=CODE_FORMS, trainer={
        BF16.name: training.flag(_AUTOCAST_BF16), FP16.name: training.flag(_AUTOCAST_FP16),
        "mixed_precision": training.words({None: None, False: None, "no": None, BF16.name: _AUTOCAST_BF16,
        FP16.name: _AUTOCAST_FP16}, FP32.name), },
    )
    optimizer: str = row(
        ADAMW, "The optimizer, such as adamw or sgd. Its other arguments have their defaults. custom is an optimizer "
        "object or class that a Python call gives.", section="common", emitted=CODE_FORMS,
        choices=(NO_OPTIMIZER, *OPTIMIZERS, training.CUSTOM), text="optimizer {}", concerns=_OF_TRAINING,
        trainer={"optim": training.words(training.TRAINER_OPTIMIZERS, ADAMW),
        **{word: training.flag(name) for word, name in training.TRAINER_OPTIMIZERS.items()}},
    )
    optimizer_implementation: str = row(
        "default", "The optimizer's implementation: default, loop, foreach or fused.",
        choices=tuple(training.IMPLEMENTATIONS), yields_to=("optimizer",), concerns=_OF_TRAINING,
        trainer={"optim": training.words(training.TRAINER_IMPLEMENTATIONS, "default"),
        **{word: training.flag(name) for word, name in training.TRAINER_IMPLEMENTATIONS.items()}},
    )
    momentum: float = row(
        0.0, f"The momentum of {' and '.join(takers('momentum'))}.", below=1, metavar="SHARE",
        concerns={"optimizer": takers("momentum").__contains__},
    )
    weight_decay: float = row(
        0.0, f"The weight decay of an optimizer that copies the gradients for it. These are "
        f"{', '.join(takers('weight_decay'))}.",
        below=1, metavar="RATE", concerns={"optimizer": takers("weight_decay").__contains__},
        trainer={"weight_decay": _decay},
    )
    accumulate: int = row(
        1, "The number of micro-batches in an optimizer step.", low=1, below=2**16, metavar="N", emitted=CODE_FORMS,
        concerns=_OF_TRAINING, text="{} micro-batches", trainer={"gradient_accumulation_steps": training.whole_number},
    )
    keep_gradients: bool = row(
        False, "Zero the gradients instead of freeing them (set_to_none=False).", concerns=_OF_TRAINING,
        text="gradients kept", emitted=["torch"],
    )
    clip_grad_norm: bool = row(
        False, "Clip the gradient norm before the optimizer step.", text="gradients clipped", concerns=_OF_TRAINING,
        trainer={"max_grad_norm": training.clips}, emitted=CODE_FORMS,
    )
    grad_scaler: bool = row(
        False, "Scale the loss with torch.amp.GradScaler, for fp16.", text="GradScaler", concerns=_OF_TRAINING,
        yields_to=("precision",), trainer={FP16.name: training.flag(True), "mixed_precision": training.words({
        None: None, False: None, "no": None, BF16.name: None, FP16.name: True}, FP32.name)}, emitted=CODE_FORMS,
    )  # accelerate scales the loss for fp16 (accelerator.py)
    ema: bool = row(
        False, "Keep an exponential moving average of the weights.", concerns=_OF_TRAINING,
        text="average of the weights",
    )
    loop: str = row(
        PLAIN,
        "The training loop: plain, trainer, freed or lightning. plain: output and loss live until the next forward "
        "returns; trainer: transformers' Trainer, which frees the output before backward; freed: nothing outlives its "
        "use; lightning: Lightning's automatic optimization, which frees gradients between forward and backward.",
        choices=tuple(LOOPS), text="{} loop", emitted=CODE_FORMS,
    )
    loss: str = row(
        MODEL, "The training loss, such as model, mnrl or triplet. model: the loss of the model's class, or the sum "
        "of its output; the others run as in sentence-transformers and FlagEmbedding.",
        choices=training.FORMS, convert=training.loss_text, metavar="LOSS",
        names_code=lambda loss: is_code(loss_parts(loss)[1]), concerns=_WITH_LOSS, text="loss {}", of_modules=False,
        implies={"loop": TRAINER, "mode": TRAINING},
    )
    loss_chunks: int = row(
        0, "Compute the cross-entropy in N chunks of tokens, whose logits are recomputed in backward. The logits of "
        "all tokens never exist; 0 is the loss of the model's class.", below=1025, metavar="N",
        text="loss in {} chunks", concerns=_WITH_LOSS | {"loss": partial(eq, MODEL)}, of_modules=False,
        emitted=["torch"],
    )
    pairs: int | None = row(
        None, f"The number of texts in an example, for {losses_with('pairs')}. Hard negatives are extra; the default "
        "is 2 (a query and its positive), and 1 for distil.", kind=int, low=1, below=1025, metavar="N",
        of_modules=False, concerns={"loss": partial(training.takes, "pairs")},
    )
    hard_negatives: int = row(
        0, f"The number of hard negatives, for {losses_with('hard_negatives')}.", below=1025, metavar="N",
        concerns={"loss": partial(training.takes, "hard_negatives")}, text="{} hard negatives", of_modules=False,
    )
    eval_batch: int | None = row(
        None, "The batch size of an evaluation after training steps. Without it nothing is evaluated.", kind=int, low=1,
        metavar="N", text="evaluation batch {}", of_modules=False, concerns=_OF_TRAINING,
        trainer=dict.fromkeys(training.EVALUATING_KEYS, training.evaluation_batch),
    )
    eval_samples: int = row(
        0, "The number of sequences in an evaluation whose logits stay on the device, for metrics.", metavar="N",
        text="logits of {} sequences kept", of_modules=False,
        concerns={"eval_batch": bool, "loss": partial(eq, MODEL), "loss_chunks": not_},
    )
    checkpointing: str = row(
        NONE, "Activation checkpointing, such as full or selective.", section="common", convert=_strategy,
        choices=strategies.EXAMPLE_STRATEGIES, split=strategies.split_strategies, metavar="STRATEGY", bare=COMPARED,
        concerns=_WITH_GRADIENTS, text="checkpointing {}", of_modules=False, emitted=CODE_FORMS,
        trainer=dict.fromkeys(("activation_checkpointing", "gradient_checkpointing"), training.recomputes),
    )
    reentrant: bool = row(
        False, "Use reentrant checkpointing (use_reentrant=True).", of_modules=False,
        concerns={"checkpointing": strategies.takes_reentrant},
        trainer={f"{name}_checkpointing{end}": rule for name in ("activation", "gradient")
        for end, rule in (("", training.is_reentrant), ("_kwargs", training.reentrant_keyword))},
    )
    offload_activations: bool = row(
        False, "Keep saved activations in host memory (torch.autograd.graph.save_on_cpu).",
        text="activations offloaded", concerns=_WITH_GRADIENTS | _OF_CUDA, emitted=["torch"],
    )
    offload_optimizer: bool = row(
        False, "Keep optimizer state, gradients and a copy of the weights in host memory, and update them there.",
        text="optimizer offloaded", emitted=["torch"], concerns=_OF_TRAINING | _OF_CUDA | {
        "optimizer": _ON_HOST.__contains__, "strategy": partial(ne, ZERO1)},
    )
    step_in_backward: bool = row(
        False, "Update each parameter in backward as soon as its gradient is complete, and free the gradient.",
        text="optimizer step in backward", emitted=["torch"], concerns=_OF_TRAINING | {
        "optimizer": OPTIMIZERS.__contains__, "strategy": _ALONE_OR_SHARDED.__contains__},
    )
    compile: bool = row(
        False, "Compile the model with torch.compile (inductor, static shapes).", text="compiled",
        trainer={"torch_compile": training.flag(True)},
    )
    padding: float = row(
        0.0, "The share of padding in each sequence, from 0 to 1.", section="sizes", below=1, metavar="SHARE",
    )
    dropout: bool = row(True, "Apply dropout, or set every dropout to 0.", of_modules=False, concerns=_WITH_GRADIENTS)
    freeze: tuple[str, ...] = row(
        (), "Freeze parameters by name or glob, such as embeddings or '*.bias'.",
        metavar="PATTERN", of_modules=False, concerns={"mode": partial(ne, INFERENCE)},
    )
    input: tuple[str, ...] = row(
        (), "An input of forward, such as pixel_values=Bx3x224x224:float32. B is the batch size and S the sequence "
        "length; batch.image=... is a key of a dictionary.",
        section="sizes", metavar="NAME=SHAPE:DTYPE", of_modules=False,
    )
    quantize: str = row(
        STORED, "The weights of linear layers as bitsandbytes stores them: nf4, fp4, int8, with -dq also their scales "
        "quantized. The model is frozen except for its adapters; stored is what its config.json says.",
        choices=(STORED, UNQUANTIZED, *QUANTIZED), text="{} weights", emitted=CODE_FORMS,
    )
    device: str = row(
        CPU, "The device: cpu or cuda.", section="gpu", choices=DEVICES, text="{}", emitted=CODE_FORMS,
        trainer={"use_cpu": training.flag(CPU), "no_cuda": training.flag(CPU)},
    )
    sdpa_kernel: str = row(
        "auto", "The CUDA kernel of fused attention. auto is torch's choice by dtype and mask.", section="gpu",
        choices=KERNELS, concerns=_OF_CUDA, emitted=CODE_FORMS,
    )
    expandable_segments: bool = row(
        False, "Use the CUDA allocator with expandable_segments:True.", section="gpu", concerns=_OF_CUDA
    )
    torch: str = row(
        "", "The torch version to estimate, such as 1.10 or 2.6. The installed one is the default.", section="gpu",
        metavar="VERSION", choices=("1.10", "2.6"), convert=_version_text, concerns=_OF_CUDA, text="torch {}",
    )
    # fmt: on
    parallelism: Parallelism = ONE_PROCESS
    evaluates_only: bool = False  # after its training, which is another run; no option sets it
    gpu_threads: int = 0  # that the GPU of the run computes at once, which no option sets; 0: this machine's, or any

    @property
    def texts(self) -> int:
        """Return the sequences in an example; a reranker's are a query with a text each."""
        return (self.pairs or LOSSES[loss_parts(self.loss)[0]].texts) + self.hard_negatives

    @property
    def dtype(self) -> str:
        """Return the parameters' precision; `stored` with autocast, which leaves them as they are."""
        return STORED if self.autocast else self.precision

    @property
    def autocast(self) -> str | None:
        """Return the precision in which torch.autocast computes; None without it."""
        return self.precision.removeprefix(AUTOCAST) if self.precision.startswith(AUTOCAST) else None

    @property
    def compute_precision(self) -> str:
        """Return the precision of matrix products."""
        return self.autocast or self.precision

    @property
    def objects(self) -> tuple[CodeObject, ...]:
        """Return the objects of the caller's program among the values; nothing about such a run is cached."""
        return tuple(value for value in (self.optimizer, self.loss) if isinstance(value, CodeObject))

    @property
    def waiting_batches(self) -> int:
        """Return how many micro-batches the loop has in memory before their turn.

        Trainer has all in a step before the first (get_batch_samples), and its data loader, accelerate's
        DataLoaderShard, has one more, on the CPU.
        """
        is_trainer = self.loop == TRAINER and self.mode in (TRAINING, EVALUATION)
        return self.accumulate - (self.device != CPU) if is_trainer else 0

    @property
    def is_eval(self) -> bool:
        """Return True if the model is in eval mode, and nothing has a gradient."""
        return self.evaluates_only or self.mode in (INFERENCE, EVALUATION)

    @property
    def evaluation(self) -> RunConfig:
        """Return the run of the evaluation alone."""
        training = {"optimizer": NO_OPTIMIZER, "accumulate": 1, "keep_gradients": False, "checkpointing": NONE}
        return self.changed(batch=self.eval_batch, evaluates_only=True, **training)

    @property
    def eval_batches(self) -> int:
        """Return the batches of the evaluation that decide its memory: all that keep logits, else two."""
        return -(-self.eval_samples // (self.eval_batch or 1)) or 2

    @property
    def other_loop(self) -> str:
        """Return the loop to compare with: Trainer's for plain and Lightning, plain for any other."""
        return TRAINER if self.loop in (PLAIN, LIGHTNING) else PLAIN

    @property
    def zeroes_between(self) -> bool:
        """Return True if a step frees the gradients of the one before between its first forward and backward."""
        return self.loop == LIGHTNING and self.mode == TRAINING

    @property
    def keeps_casts(self) -> bool:
        """Return True if autocast keeps weights that it has cast until the forward pass ends; Lightning's does not."""
        return self.loop != LIGHTNING

    @property
    def traced_loop(self) -> str:
        """Return the loop whose step is traced, from which the steps of the others follow."""
        return FREED if self.keeps_casts or self.autocast is None else LIGHTNING

    @property
    def has_gradients_before(self) -> bool:
        """Return True if the gradients of an earlier micro-batch or step exist while a micro-batch runs."""
        return self.accumulate > 1 or self.keep_gradients

    @property
    def torch_version(self) -> tuple[int, ...]:
        """Return the version of torch that the step has, or on a CPU the installed one."""
        return _numbers(self.torch or installed_torch())

    def counted(self, **changes: Any) -> RunConfig:
        """Return a run with the settings that decide the FLOPs of this one, and changes."""
        return RunConfig(**{name: getattr(self, name) for name in OF_FLOPS} | changes)

    @property
    def optimizer_arguments(self) -> dict[str, Any]:
        """Return the arguments of the optimizer's class; `foreach` and `fused` are torch's choice for the device."""
        row = OPTIMIZERS.get(self.optimizer)
        implementation = self.optimizer_implementation
        if implementation == "default" and self.device == CUDA and row and not self.offload_optimizer:
            is_foreach = row.in_torch and row.foreach_on_cuda and self.torch_version >= FOREACH_FROM
            implementation = "fused" if row.is_kernel_on_cuda else "foreach" if is_foreach else "default"
        chosen = {name: getattr(self, name) for name in (row.takes if row else ()) if getattr(self, name)}
        return training.IMPLEMENTATIONS[implementation] | chosen


# fmt: off
class Limit(Settings):
    """The memory that a run may take: a GPU's, or a budget."""

    gpu: str | None = row(
        None, "The GPU, such as t4 or a100-80gb.", section="common", choices=tuple(GPUS),
        convert=lambda name: find_gpu(name).name, concerns=_OF_CUDA, implies={"device": CUDA}, yields_to=("budget",),
    )
    budget: int | None = row(
        None, "The memory budget, such as 16GiB. On CUDA it includes the CUDA context.", section="common", kind=int,
        is_size=True, low=1, below=2**60, metavar="SIZE", yields_to=("gpu",),
    )
    context: int | None = row(
        None, "The memory of the CUDA context, such as 500MiB. The published value is the default.", section="gpu",
        kind=int, is_size=True, below=2**50, metavar="SIZE", concerns=_OF_CUDA,
    )
    margin: float = row(
        MARGIN, "The share of the memory to leave free; with less, a step 'may fit'.", section="gpu", below=1,
        metavar="SHARE",
    )
    time: bool = row(
        False,
        "Predict the step time, tokens per second and MFU. Without a calibration of the GPU it is a range from data "
        "sheets.", section="gpu",
    )
    sequences: int | None = row(
        None, "The number of sequences in an epoch, to show its time.", kind=int, section="gpu", low=1, below=2**40,
        metavar="N", concerns={"time": bool},
    )
    price: str = row(
        "", "The hourly price of each GPU, such as t4=0.35,l4=0.71, or a YAML file, to show an epoch's cost.",
        section="gpu", metavar="PRICES", convert=_prices, concerns={"sequences": bool}, implies={"time": True},
    )
    calibration: bool | str = row(
        True, "A calibration of the GPU from 'bertscope profile --save'. The one in the user's folder is the default.",
        section="gpu", or_file=True, metavar="FILE", implies={"device": CUDA},
    )


class GridModel(Settings):
    """The settings of a grid that choose a model, and the threads for which it is estimated."""

    model: str = row("", "The model: a name or a file.", names_code=is_code)
    architecture: str | None = row(None, "The model class to build, such as BertForMaskedLM.")
    attention: str | None = row(None, "The attention kernel.", choices=("eager", "sdpa", *FLASH_KERNELS))
    pooler: bool | None = row(None, "BertModel with or without its pooler.", kind=bool)
    lora: str | None = row(None, "LoRA adapters, such as r=8,target=query+value.")
    threads: int | None = row(None, "The number of torch threads.", kind=int, low=1, below=1025)


class Engine(Settings):
    """The engine that computes the points of a grid."""

    engine: str = row(
        "local", "Compute on this machine (local) or a cluster (dask).", choices=("local", "dask"), section="options",
        metavar="NAME",
    )
    workers: int | None = row(
        None, "The number of processes on this machine; all cores by default.", kind=int, low=1, below=1025,
        section="options", metavar="N", concerns={"engine": partial(eq, "local")},
    )
    address: str | None = row(
        None, "The address of a running dask scheduler. DASK_SCHEDULER_ADDRESS is the default.", section="options",
        metavar="ADDRESS", concerns={"engine": partial(eq, "dask")},
    )


class Measurement(Settings):
    """The way in which a real step is run and measured."""

    steps: int | None = row(
        None, "The number of timed steps; 0 measures memory only. The default is 2 to 10; slow steps get fewer.",
        kind=int, section="measurement", below=1001, metavar="N",
    )
    threads: int | None = row(
        None, "The number of torch threads.", kind=int, section="measurement", low=1, below=1025, metavar="N",
    )
    seed: int = row(0, "The random seed of weights and inputs.", section="measurement", metavar="N")
    memory_limit: int | None = row(
        None, "The memory limit of the process, such as 4GiB.", section="measurement", kind=int, is_size=True, low=1,
        below=2**60, metavar="SIZE",
    )
    timeout: float = row(
        600.0, "The time limit of each phase, in seconds.", section="measurement", low=1, metavar="SECONDS"
    )
    nproc: int | None = row(
        None, "Run and measure N real ranks on this machine.", section="measurement", kind=int, low=1, below=1025,
        metavar="N", implies={"world_size": lambda ranks, values: ranks},
    )


def timed_steps(steps: int | None, seconds: Iterable[float]) -> int:
    """Return how many steps to time: as requested, or 2 to 10 if a step takes `seconds` in each child."""
    return min(max(int(_TIMED_SECONDS / max(sum(seconds), 1e-9)), 2), 10) if steps is None else steps


class DryRun(Settings):
    """The way in which a script runs on a simulated GPU."""

    steps: int = row(
        3, "The optimizer steps to run. If the script evaluates, one evaluation follows.", low=1, below=1001,
        section="common", metavar="N",
    )
    seeds: int = row(
        1, "Run the script with N seeds, to show what torch reserves over them.", low=1, below=1001, section="common",
        metavar="N",
    )
    network: bool = row(False, "Let the script use the network.", section="common")
    sandbox: bool = row(
        True,
        "Discard all files that the script writes. It takes namespaces of Linux; without them torch.save is discarded.",
        section="common",
    )
    memory_limit: int | None = row(
        None, "The memory limit of the process, such as 4GiB.", section="common", kind=int, is_size=True, low=1,
        below=2**60, metavar="SIZE",
    )
    timeout: float = row(600.0, "The time limit of the script, in seconds.", section="common", low=1, metavar="SECONDS")
# fmt: on


# The settings that FLOPs depend on.
_OF_LOSS = ("loss", "loss_chunks", "pairs", "hard_negatives")
OF_FLOPS = ("batch", "seq", "mode", "checkpointing", "freeze", "input", *_OF_LOSS)
# The settings of a script's run that its code does not decide.
OF_CARD = ("gpu", "budget", "context", "margin", "expandable_segments")
ESTIMATED: tuple[type[Settings], ...] = (RunConfig, Limit)
MEASURED: tuple[type[Settings], ...] = (RunConfig, Limit, Measurement)
RAN: tuple[type[Settings], ...] = (RunConfig, Limit, DryRun)
SWEPT: tuple[type[Settings], ...] = (GridModel, RunConfig, Limit)
SETTINGS = rows(*ESTIMATED)


class Question(NamedTuple):
    """The settings that a public function, and so its command, takes of a run."""

    defaults: Mapping[str, Any] = {}  # instead of the defaults of the rows
    compared: tuple[str, ...] = ()  # settings that may have several values
    unused: tuple[str, ...] = ()  # settings on which the answer does not depend; no front end takes them
    records: tuple[type[Settings], ...] = ESTIMATED
    files: tuple[str, ...] = ("training_file", "plan")  # from which settings may come
    usual: Mapping[str, str] = {}  # what it takes for a setting, in the words of --help

    @property
    def table(self) -> dict[str, Row]:
        """Return the rows of the settings that the function takes."""
        return {name: row for name, row in rows(*self.records).items() if name not in self.unused}


_BATCH = {"batch": 8}  # checkpointing pays from batch 4 on
_TIME = ("time", "sequences", "price")
_FIT = Question(compared=("seq", "precision", "checkpointing", "gpu"), usual={
    "precision": "fp32 and autocast-bf16, on GPUs before Ampere autocast-fp16",
    "checkpointing": f"{strategies.CHEAPEST_FIRST}, or those that the model takes",
})  # fmt: skip
QUESTIONS = {
    "estimate": Question(_BATCH, ("checkpointing",), ("budget",)),
    "lengths": Question(_BATCH),
    "profile": Question(_BATCH, ("checkpointing",), ("rank", *rows(Limit)), MEASURED),
    "fit": _FIT,
    "fits": _FIT,
    "fewest": _FIT._replace(compared=(*_FIT.compared, "strategy")),  # of `fit --batch-total`
    "plan": Question(_BATCH, (), ("checkpointing", "reentrant"), files=("training_file",)),
    "report": Question(
        _BATCH | {"budget": "16GiB"},
        ("precision", "checkpointing"),
        _TIME,
        usual={"checkpointing": f"{COMPARED}, or those that the model takes"},
    ),
    "flops": Question(
        {"mode": INFERENCE},
        ("batch", "seq", "checkpointing"),
        tuple(n for n in SETTINGS if n not in OF_FLOPS),
        files=(),
    ),
    "why": Question(_BATCH | {"device": CUDA}, (), ("budget", "context", "margin", *_TIME)),
    "run": Question({"device": CUDA}, (), tuple(n for n in SETTINGS if n not in OF_CARD), RAN, ()),
    "sweep": Question(_BATCH, tuple(rows(*SWEPT)), (), SWEPT, ("plan",)),
    "check": Question(records=(RunConfig,), files=()),
}


def _both(one: Any, other: Any) -> bool:
    """Return True if both settings have an effect: one rank, one micro-batch and the default have none."""
    return bool(one) and (other is True or other not in (False, 1, "default"))


_MOST_BATCHES = 10_000  # of an evaluation: all that keep logits are followed
RULES += [
    Rule(("grad_scaler", "precision"), lambda scaler, precision: scaler and precision == FP16.name,
         f"GradScaler takes no {FP16.name} gradients; leave {{grad_scaler}} out, or use {{precision}} "
         f"{_AUTOCAST_FP16}"),
    Rule(("optimizer_implementation", "optimizer"),
         other_implementations,
         "there is no {optimizer_implementation} {optimizer_implementation_value} of {optimizer} {optimizer_value}; "
         "choose one of {found}"),
    Rule(("loss", "world_size"), lambda loss, ranks: ranks > 1 and LOSSES[loss_parts(loss)[0]].in_one_process,
         "{loss} {loss_value} is modelled in one process only; leave out the strategy and the ranks"),
    Rule(("loss", "pairs"), lambda loss, texts: texts == 1 and "mnrl" in loss,
         "{loss} {loss_value} ranks a query and its positive; give {pairs} 2 or more"),
    *(Rule((saver, name), _both, f"{{{saver}}} is modelled without {{{name}}}; leave one of them out")
      for saver, names in training.EXCLUDED.items() for name in names),
    Rule(("ema", "quantize"), lambda ema, how: ema and how in QUANTIZED,
         "an average of quantized weights means nothing; leave {ema} or {quantize} out"),
    Rule(("eval_samples", "eval_batch"), lambda samples, batch: samples > _MOST_BATCHES * (batch or 1),
         f"{{eval_samples}} {{eval_samples_value}} takes more than {_MOST_BATCHES:,} batches of {{eval_batch}} "
         "{eval_batch_value}; give fewer, or a larger {eval_batch}"),
    Rule(("nproc",), lambda ranks: ranks == 1, "{nproc} 1 is a job of one rank; give at least 2, or leave {nproc} out"),
    Rule(("gpu", "budget"), lambda gpu, budget: gpu is not None and budget is not None,
         "{gpu} and {budget} both set the limit; give one of them"),
]  # fmt: skip
