"""Lora: the settings of LoRA adapters."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from bertscope.config import MAX_DIMENSION, check_fields, rule, rules_of, shown
from bertscope.errors import ConfigError
from bertscope.reports.layer_ranges import LayerRange

LORA_BIASES = ("none", "all", "lora_only")
ALL_LINEAR = "all-linear"  # peft's word for every Linear layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """The settings of LoRA adapters; raises ConfigError for a value that they cannot have.

    `target` are the ends of the paths of the Linear layers that get an adapter, in whole parts (`query`,
    `attention.output.dense`), or `all-linear`. `save` are the ends of the paths of modules that are copied and trained
    as a whole. `bias` names the other biases that are trained; `rslora` scales by alpha / sqrt(r) instead of alpha / r.

    Source: Hu et al. 2021, arXiv:2106.09685; peft 0.12.0, `LoraConfig`, whose defaults these are.

    >>> source = bertscope.load("bert-tiny", lora=bertscope.Lora(r=8, target=("query", "value")))
    >>> bertscope.count(source).totals.trainable_params == 2 * 2 * 8 * (128 + 128)
    True
    """

    r: int = rule(8, least=1, most=MAX_DIMENSION)
    alpha: float = rule(8.0, least=0, most=100_000)
    dropout: float = rule(0.0, least=0, most=1)
    target: tuple[str, ...] = rule(("query", "value"))
    bias: str = rule("none", choices=LORA_BIASES)
    rslora: bool = rule(False)
    save: tuple[str, ...] = rule(())

    def __post_init__(self) -> None:
        check_fields(self, LORA_RULES, "lora ")
        for field_name in ("target", "save"):
            names = getattr(self, field_name)
            wrong = next((name for name in names if not re.fullmatch(r"[\w.-]{1,200}", name)), None)
            if wrong is not None or (field_name == "target" and not names) or len(names) > MAX_LORA_NAMES:
                got = f"{len(names):,} names" if wrong is None else shown(wrong)
                raise ConfigError(
                    f"lora {field_name} must be 1 to {MAX_LORA_NAMES:,} names of modules such as query or "
                    f"attention.output.dense; got {got}",
                    field=field_name,
                )

    @property
    def scaling(self) -> float:
        """Return the factor of the adapters' output."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)

    @property
    def has_equal_layers(self) -> bool:
        """Return True if no name has the number of a layer, so that all layers get the same adapters."""
        parts = (part for name in (*self.target, *self.save) for part in name.split("."))
        return all(LayerRange.parse(part) is None for part in parts)

    @classmethod
    def parse(cls, text: str) -> Lora:
        """Return the settings in `r=8,alpha=16,dropout=0.05,target=query+value`; raises ConfigError for other text."""
        values: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals or name not in LORA_RULES:
                raise ConfigError(
                    f"lora takes {', '.join(LORA_RULES)}, as in {LORA_EXAMPLE}; got {part.strip()[:40]!r}", field="lora"
                )
            if name in values:
                raise ConfigError(f"lora {name} is given twice in {text[:100]!r}; keep one", field=name)
            values[name] = _from_text(value, LORA_RULES[name].kind)
        return cls(**values)

    def __str__(self) -> str:
        """Return the text for `parse`: r, alpha, target, and the settings that differ from the default."""
        default, always = Lora(), ("r", "alpha", "target")
        values = {name: getattr(self, name) for name in LORA_RULES}
        return ",".join(
            f"{name}={_as_text(value)}"
            for name, value in values.items()
            if name in always or value != getattr(default, name)
        )


LORA_RULES = rules_of(Lora)
LORA_EXAMPLE = "r=8,alpha=16,dropout=0.05,target=query+value"
MAX_LORA_NAMES = 2048  # eight in each of the 256 layers


def _from_text(text: str, kind: type) -> Any:
    """Return the value that the text writes for a field of that type, or the text itself, which no rule accepts."""
    if kind is tuple:
        return tuple(text.split("+"))
    if kind is bool:
        return {"true": True, "false": False}.get(text, text)
    number = r"\d{1,12}" if kind is int else r"(\d{1,12}(\.\d{0,20})?|\.\d{1,20})(e[-+]?\d{1,3})?"
    return kind(text) if kind in (int, float) and re.fullmatch(number, text, re.ASCII) else text


def _as_text(value: Any) -> str:
    if isinstance(value, tuple):
        return "+".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value).removesuffix(".0")
