"""The configuration of a run: sizes, precision, optimizer, and the layers that checkpointing recomputes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import version
from typing import Any

from bertscope.errors import ConfigError, SelectionError
from bertscope.parallelism import ONE_PROCESS, Parallelism
from bertscope.units import FP16, FP32, PRECISIONS


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """The encoder layers that are recomputed.

    `every` takes layers 0, k, 2k ...; `layers` names them; `selective` recomputes every layer except its
    matrix products. Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022.
    """

    every: int = 1
    layers: frozenset[int] | None = None
    selective: bool = False
    use_reentrant: bool = False

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"checkpointing every-{self.every} means nothing; use every-1 or more")
        if self.selective and self.use_reentrant:
            raise ConfigError("selective checkpointing cannot be reentrant; leave use_reentrant false")

    @property
    def period(self) -> int | None:
        """Return the period, in layers, of the pattern of recomputed layers; None if it has none."""
        return self.every if self.layers is None else None

    def covers(self, layer: int) -> bool:
        """Return True if the layer of that number is recomputed."""
        return layer in self.layers if self.layers is not None else layer % self.every == 0

    def check_layers(self, layers: int) -> None:
        """Raise ConfigError for a named layer that a stack of `layers` does not have."""
        absent = sorted(layer for layer in self.layers or () if layer >= layers)
        if absent:
            shown = ", ".join(map(str, absent[:5]))
            raise ConfigError(f"checkpointing names layers {shown} and the model has {layers} layers, from 0")

    @classmethod
    def parse(cls, text: str, *, use_reentrant: bool = False) -> Checkpointing | None:
        """Return the Checkpointing of a strategy such as `layers:0-5,8`; None for `none`. Raises ConfigError."""
        strategy, match = _strategy(text)
        settings = strategy.settings(*match.groups())
        return None if settings is None else cls(**settings, use_reentrant=use_reentrant)


def _numbers(text: str) -> frozenset[int]:
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """A strategy of checkpointing: its syntax, and the fields of Checkpointing that it sets."""

    form: str
    example: str
    pattern: str
    settings: Callable[..., dict[str, Any] | None]  # of the groups of `pattern`; None: nothing is recomputed
    reentrant: bool = True  # torch's reentrant implementation supports it


NONE, FULL = "none", "full"
_RANGES = r"\d{1,4}(?:-\d{1,4})?(?:,\d{1,4}(?:-\d{1,4})?)*"
_STRATEGIES = (
    Strategy(form=NONE, example=NONE, pattern=NONE, settings=lambda: None, reentrant=False),
    Strategy(form=FULL, example=FULL, pattern=FULL, settings=dict),
    Strategy(form="every-K", example="every-2", pattern=r"every-(\d{1,4})",
             settings=lambda number: {"every": int(number)}),
    Strategy(form="layers:LIST", example="layers:0-5,8", pattern=f"layers:({_RANGES})",
             settings=lambda text: {"layers": _numbers(text)}),
    Strategy(form="selective", example="selective", pattern="selective",
             settings=lambda: {"selective": True}, reentrant=False),
)  # fmt: skip
STRATEGIES = ", ".join(
    item.form if item.form == item.example else f"{item.form} ({item.example})" for item in _STRATEGIES
)
EXAMPLE_STRATEGIES = tuple(item.example for item in _STRATEGIES)
COMPARED = f"{NONE},{FULL}"  # without and with
CHEAPEST_FIRST = "none,selective,full"


def _strategy(text: str) -> tuple[Strategy, re.Match[str]]:
    """Return the strategy with the syntax of the text, and the match; raises ConfigError for other text."""
    for strategy in _STRATEGIES:
        if match := re.fullmatch(strategy.pattern, text, re.ASCII):
            return strategy, match
    raise ConfigError(f"unknown checkpointing strategy {text[:40]!r}; allowed: {STRATEGIES}")


def parse_strategies(text: str) -> tuple[str, ...]:
    """Return the strategies of `none,full,layers:0-5,8`, each once; raises ConfigError for an unknown one."""
    found = _split(text)
    for strategy in found:
        Checkpointing.parse(strategy)
    return tuple(dict.fromkeys(found))


def are_strategies(text: str) -> bool:
    """Return True if each comma-separated part of the text has the syntax of a strategy."""
    return all(any(re.fullmatch(row.pattern, part, re.ASCII) for row in _STRATEGIES) for part in _split(text))


def _split(text: str) -> list[str]:
    """Return the comma-separated parts; a number belongs to the part before it, as in `layers:0-5,8`."""
    found: list[str] = []
    for part in text.split(","):
        if found and re.fullmatch(r"\d+(-\d+)?", part, re.ASCII):
            found[-1] += f",{part}"
        else:
            found.append(part.strip())
    return found


def takes_reentrant(strategy: str) -> bool:
    """Return True if torch's reentrant implementation supports the strategy."""
    return _strategy(strategy)[0].reentrant


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer: its class, its implementations, and its state between steps."""

    class_name: str  # in torch.optim
    in_torch: bool = True  # else the class is in analyses/memory/optimizers.py
    foreach: bool = True
    fused: bool = True
    foreach_on_cuda: bool = True  # torch's default there; on a CPU it is the for-loop
    state: tuple[str, ...] = ()  # of each parameter, with the defaults of the class; of Adafactor, for 2 dimensions
    takes: tuple[str, ...] = ()  # fields of RunConfig that are arguments of the class
    decays_copy: bool = False  # weight_decay, which is not modelled, adds to a copy of the gradient
    trainer: dict[str, str] = field(default_factory=dict)  # `optim` of TrainingArguments -> implementation

    def has(self, implementation: str) -> bool:
        """Return True if the optimizer has that implementation."""
        return {"foreach": self.foreach, "fused": self.fused}.get(implementation, True)


_ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")
# `trainer`: get_optimizer_cls_and_kwargs in trainer.py of transformers 4.43.4. The kernels of apex and bitsandbytes
# allocate nothing, as torch's fused ones.
OPTIMIZERS = {
    "sgd": Optimizer(class_name="SGD", takes=("momentum",), decays_copy=True, trainer={"sgd": "default"}),
    "adam": Optimizer(class_name="Adam", state=_ADAM_STATE, takes=("amsgrad",), decays_copy=True),
    "adamw": Optimizer(
        class_name="AdamW", state=_ADAM_STATE, takes=("amsgrad",),
        trainer={"adamw_torch": "default", "adamw_torch_fused": "fused", "adamw_apex_fused": "fused"},
    ),
    "adafactor": Optimizer(
        class_name="Adafactor", fused=False, foreach_on_cuda=False, state=("step", "row_var", "col_var"),
    ),
    "rmsprop": Optimizer(
        class_name="RMSprop", fused=False, state=("step", "square_avg"), takes=("momentum",), decays_copy=True,
        trainer={"rmsprop": "default"},
    ),
    "adagrad": Optimizer(
        class_name="Adagrad", state=("step", "sum"), decays_copy=True, trainer={"adagrad": "default"},
    ),
    "lamb": Optimizer(
        class_name="Lamb", in_torch=False, foreach=False, foreach_on_cuda=False, state=("exp_avg", "exp_avg_sq"),
    ),
    "lion": Optimizer(
        class_name="Lion", in_torch=False, foreach=False, foreach_on_cuda=False, state=("exp_avg",),
        trainer={"lion_32bit": "fused"},
    ),
    "adamw-8bit": Optimizer(
        class_name="AdamW8bit", in_torch=False, foreach=False, fused=False, foreach_on_cuda=False,
        state=("state1", "state2"), trainer={"adamw_bnb_8bit": "default", "adamw_8bit": "default"},
    ),
    "adamw-transformers": Optimizer(
        class_name="TransformersAdamW", in_torch=False, foreach=False, fused=False, foreach_on_cuda=False,
        state=("exp_avg", "exp_avg_sq"), trainer={"adamw_hf": "default"},
    ),
    "adafactor-transformers": Optimizer(
        class_name="TransformersAdafactor", in_torch=False, foreach=False, fused=False, foreach_on_cuda=False,
        state=("exp_avg_sq_row", "exp_avg_sq_col"), trainer={"adafactor": "default"},
    ),
}  # fmt: skip
NO_OPTIMIZER = "none"


def takers(name: str) -> list[str]:
    """Return the optimizers that take a field of RunConfig as an argument."""
    return [key for key, row in OPTIMIZERS.items() if name in row.takes]


# Implementation of an optimizer -> arguments of its class in torch.
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "default": {},
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
# Whose BERT: the built-in model with the masks of transformers 4.43.4, the installed class, or the built-in model.
TRANSFORMERS, INSTALLED, BERTSCOPE = "transformers", "transformers-installed", "bertscope"
MODEL_IMPLEMENTATIONS = (TRANSFORMERS, INSTALLED, BERTSCOPE)
AUTOCAST = "autocast-"  # before a dtype, in the text of a precision
FIT_PRECISIONS = (*PRECISIONS, *(f"{AUTOCAST}{name}" for name, row in PRECISIONS.items() if row.autocast))
STORED = "stored"  # the dtypes of the model's own parameters
MODES = ("inference", "forward", "training")
DEVICES = ("cpu", "cuda")
KERNELS = ("auto", "flash", "efficient", "math")
MAX_SIZE = 2**31


def implementation_name(implementation: str) -> str:
    """Return the name in reports of one of MODEL_IMPLEMENTATIONS, such as `as in transformers 4.43.4`."""
    if implementation == INSTALLED:
        return f"transformers {version('transformers')}"
    return "as in transformers 4.43.4" if implementation == TRANSFORMERS else "bertscope's own"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The run of a model that `estimate`, `profile` and `fit` examine.

    inference: eval, nothing saved. forward: train, tensors saved for backward. training: forward, backward
    and, with an optimizer, its step, in the steady state (optimizer state exists, gradients are freed).
    The step has `accumulate` micro-batches of `batch` sequences; with `keep_gradients` they are set to zero after it
    and not freed; with `ema` the loop has an average of the weights; with `hold_outputs` the output of the model lives
    until the micro-batch ends; with `grad_scaler` the loss is scaled, and the gradients unscaled before the step.
    model_implementation is one of MODEL_IMPLEMENTATIONS and concerns only BERTs, which differ in their memory.
    dtype is that of the parameters; with `autocast` they stay fp32 and matrix products run in that dtype.
    padding is the share of each sequence that is padding, masked by an attention mask.
    """

    batch: int = 1
    seq: int = 128
    mode: str = "training"
    dtype: str = FP32.name
    autocast: str | None = None
    optimizer: str = "adamw"
    implementation: str = "default"  # of the optimizer: torch's foreach=, fused=
    model_implementation: str = TRANSFORMERS
    checkpointing: str = NONE
    reentrant: bool = False
    padding: float = 0.0
    dropout: bool = True
    freeze: tuple[str, ...] = ()
    device: str = "cpu"
    sdpa_kernel: str = "auto"  # of fused attention on CUDA; auto: torch's choice by dtype and mask
    accumulate: int = 1
    keep_gradients: bool = False  # zero_grad(set_to_none=False)
    momentum: float = 0.0
    amsgrad: bool = False
    ema: bool = False
    clip_grad_norm: bool = False
    hold_outputs: bool = False
    grad_scaler: bool = False  # torch.amp.GradScaler
    inputs: tuple[str, ...] = ()  # such as `pixel_values=Bx3x224x224:float32`, in place of those that are derived
    alloc_conf: str = ""  # of CUDA's allocator, as PYTORCH_CUDA_ALLOC_CONF; that of the environment is not read
    parallelism: Parallelism = ONE_PROCESS  # batch is that of one rank

    def __post_init__(self) -> None:
        for name in ("batch", "seq", "accumulate"):
            if not 1 <= getattr(self, name) < MAX_SIZE:
                raise SelectionError(f"{name} must be at least 1 and below 2**31; got {getattr(self, name)}")
        allowed: dict[str, Collection[str | None]] = {
            "mode": MODES, "dtype": (*PRECISIONS, STORED), "optimizer": (NO_OPTIMIZER, *OPTIMIZERS),
            "implementation": IMPLEMENTATIONS, "model_implementation": MODEL_IMPLEMENTATIONS, "device": DEVICES,
            "sdpa_kernel": KERNELS,
            "autocast": (None, *(name for name, precision in PRECISIONS.items() if precision.autocast)),
        }  # fmt: skip
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                words = ", ".join(value for value in values if value)
                raise SelectionError(f"{name} must be one of {words}; got {getattr(self, name)!r}")
        if not 0 <= self.padding < 1:
            raise SelectionError(f"padding is a share of each sequence, from 0 to below 1; got {self.padding}")
        if self.autocast and self.dtype not in (FP32.name, STORED):
            raise SelectionError(
                f"autocast keeps the parameters in {FP32.name}; leave dtype {FP32.name}, or autocast out"
            )
        if self.grad_scaler and self.dtype == FP16.name:
            raise SelectionError(f"GradScaler takes no {FP16.name} gradients; leave one out, or use autocast")
        row = OPTIMIZERS.get(self.optimizer)
        if row and not row.has(self.implementation):
            words = ", ".join(word for word in IMPLEMENTATIONS if row.has(word))
            raise SelectionError(f"there is no {self.implementation} {row.class_name}; choose one of {words}")
        if not 0 <= self.momentum < 1:
            raise SelectionError(f"momentum is a share from 0 to below 1; got {self.momentum}")
        for name in ("momentum", "amsgrad"):
            if getattr(self, name) and not (row and name in row.takes):
                words = ", ".join(takers(name))
                raise SelectionError(f"{self.optimizer} has no {name}; leave it out, or choose one of {words}")
        if self.mode != "training":
            for name in ("accumulate", "keep_gradients", "ema", "clip_grad_norm", "grad_scaler"):
                if getattr(self, name) != getattr(RunConfig, name):
                    raise SelectionError(f"{name} concerns a training step; leave it out, or use mode training")
        if self.alloc_conf and self.device != "cuda":
            raise SelectionError("alloc_conf concerns the allocator of a GPU; leave it out, or use device cuda")
        if self.alloc_conf:
            from bertscope.gpus import AllocatorSettings  # most runs are on no GPU

            AllocatorSettings.parse(self.alloc_conf)
        Checkpointing.parse(self.checkpointing, use_reentrant=self.reentrant)

    @property
    def has_gradients_before(self) -> bool:
        """Return True if the gradients of an earlier micro-batch or step exist while a micro-batch runs."""
        return self.accumulate > 1 or self.keep_gradients

    @property
    def optimizer_arguments(self) -> dict[str, Any]:
        """Return the arguments of the optimizer's class; `foreach` and `fused` are torch's choice for the device."""
        row = OPTIMIZERS.get(self.optimizer)
        is_foreach = self.implementation == "default" and self.device == "cuda" and row and row.foreach_on_cuda
        chosen = {name: getattr(self, name) for name in (row.takes if row else ()) if getattr(self, name)}
        return IMPLEMENTATIONS["foreach" if is_foreach else self.implementation] | chosen

    def to_dict(self) -> dict[str, Any]:
        """Return every field as plain data, as reports and JSON hold it."""
        ranks = asdict(self.parallelism) | {"mesh": list(self.parallelism.mesh)}
        return asdict(self) | {"freeze": list(self.freeze), "inputs": list(self.inputs), "parallelism": ranks}

    @property
    def precision(self) -> str:
        """Return `fp32`, `bf16`, or `bf16 autocast`."""
        return f"{self.autocast} autocast" if self.autocast else self.dtype


# Those that all variants of a report share.
COMMON_FIELDS = tuple(row.name for row in fields(RunConfig) if row.name not in ("checkpointing", "reentrant"))
