"""How a model is run: at which sizes, in which precision, and what is recomputed instead of kept."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from bertscope.errors import ConfigError, SelectionError

STRATEGIES = "none, full, every-K (every-2), layers:LIST (layers:0-5,8), selective"


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Which encoder layers are recomputed, and how.

    `every` takes layers 0, k, 2k ...; `layers` names them; `selective` recomputes every layer but keeps
    the outputs of its matrix products. Chen et al. 2016, arXiv:1604.06174; Korthikanti et al. 2022.
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

    def covers(self, layer: int) -> bool:
        """Whether the layer of that number is recomputed."""
        return layer in self.layers if self.layers is not None else layer % self.every == 0

    def check_layers(self, layers: int) -> None:
        """Raise ConfigError for a named layer that a stack of `layers` does not have."""
        absent = sorted(layer for layer in self.layers or () if layer >= layers)
        if absent:
            shown = ", ".join(map(str, absent[:5]))
            raise ConfigError(f"checkpointing names layers {shown} and the model has {layers} layers, from 0")

    @classmethod
    def parse(cls, strategy: str, *, use_reentrant: bool = False) -> Checkpointing | None:
        """`full`, `every-2`, `layers:0-5,8` or `selective`; None for `none`. Raises ConfigError otherwise."""
        if strategy == "none":
            return None
        if strategy in ("full", "selective"):
            return cls(selective=strategy == "selective", use_reentrant=use_reentrant)
        if match := re.fullmatch(r"every-(\d{1,4})", strategy):
            return cls(every=int(match[1]), use_reentrant=use_reentrant)
        if match := re.fullmatch(r"layers:(\d{1,4}(?:-\d{1,4})?(?:,\d{1,4}(?:-\d{1,4})?)*)", strategy):
            return cls(layers=_numbers(match[1]), use_reentrant=use_reentrant)
        raise ConfigError(f"unknown checkpointing strategy {strategy[:40]!r}; allowed: {STRATEGIES}")


def parse_strategies(text: str) -> tuple[str, ...]:
    """`none,full,layers:0-5,8` -> the strategies in it; a number belongs to the `layers:` before it."""
    found: list[str] = []
    for part in text.split(","):
        if found and found[-1].startswith("layers:") and re.fullmatch(r"\d+(-\d+)?", part):
            found[-1] += f",{part}"
        else:
            found.append(part.strip())
    for strategy in found:
        Checkpointing.parse(strategy)
    return tuple(dict.fromkeys(found))


def _numbers(text: str) -> frozenset[int]:
    numbers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


Mode = Literal["inference", "forward", "training"]
MODES: tuple[Mode, ...] = ("inference", "forward", "training")
DTYPES = ("fp32", "bf16", "fp16")
OPTIMIZERS = ("none", "sgd", "adam", "adamw", "adafactor")
IMPLEMENTATIONS = ("default", "loop", "foreach", "fused")
DEVICES = ("cpu", "cuda")
KERNELS = ("auto", "flash", "efficient", "math")
MAX_SIZE = 2**31


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How a model is run: what `estimate`, `profile` and `fit` are asked.

    inference: eval, nothing kept. forward: train, what backward needs is kept. training: forward, backward
    and, with an optimizer, its step, all in the steady state (optimizer state there, gradients freed).
    dtype is that of the parameters; with `autocast` they stay fp32 and matrix products run in that dtype.
    padding is the share of each sequence that is padding, hidden by an attention mask.
    """

    batch: int = 1
    seq: int = 128
    mode: Mode = "training"
    dtype: str = "fp32"
    autocast: str | None = None
    optimizer: str = "adamw"
    implementation: str = "default"  # of the optimizer: torch's foreach=, fused=
    checkpointing: str = "none"
    reentrant: bool = False
    padding: float = 0.0
    dropout: bool = True
    freeze: tuple[str, ...] = ()
    device: str = "cpu"
    sdpa_kernel: str = "auto"  # of fused attention on CUDA: what torch takes by dtype and mask, or the one named

    def __post_init__(self) -> None:
        for name in ("batch", "seq"):
            if not 1 <= getattr(self, name) < MAX_SIZE:
                raise SelectionError(f"{name} must be at least 1 and below 2**31; got {getattr(self, name)}")
        allowed = {"mode": MODES, "dtype": DTYPES, "optimizer": OPTIMIZERS, "implementation": IMPLEMENTATIONS,
                   "device": DEVICES, "sdpa_kernel": KERNELS, "autocast": (None, "bf16", "fp16")}  # fmt: skip
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                words = ", ".join(value for value in values if value)
                raise SelectionError(f"{name} must be one of {words}; got {getattr(self, name)!r}")
        if not 0 <= self.padding < 1:
            raise SelectionError(f"padding is a share of each sequence, from 0 to below 1; got {self.padding}")
        if self.autocast and self.dtype != "fp32":
            raise SelectionError("autocast keeps the parameters in fp32; leave dtype fp32, or autocast out")
        if self.optimizer == "adafactor" and self.implementation == "fused":
            raise SelectionError("torch has no fused Adafactor; choose default, loop or foreach")
        Checkpointing.parse(self.checkpointing, use_reentrant=self.reentrant)

    @property
    def steps_optimizer(self) -> bool:
        """Whether the run ends with an optimizer's step."""
        return self.mode == "training" and self.optimizer != "none"

    def to_dict(self) -> dict[str, Any]:
        """Return every field as the plain data that reports hold and JSON gives back."""
        return asdict(self) | {"freeze": list(self.freeze)}

    @property
    def precision(self) -> str:
        """`fp32`, `bf16`, or `bf16 autocast`."""
        return f"{self.autocast} autocast" if self.autocast else self.dtype
