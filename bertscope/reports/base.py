"""The base of all reports: frozen, keyword-only dataclasses of plain data in base units, without text for display.

Every report becomes JSON by `to_json`, with `schema` and `kind` in front; `from_json` reads it back.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from bertscope.units import json_text

SCHEMA = 1
Shape = tuple[int, ...] | None  # None: not yet known (a lazy parameter)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model of a report, and the versions and settings that produced the report."""

    name: str
    architecture: str
    dtype: str  # of the bytes: "fp32", "bf16", "fp16", or "stored" for the dtypes of the parameters
    attention: str | None = None
    implementation: str | None = None  # whose: "bertscope's own", "as in transformers 4.43.4", "transformers 4.56.0"
    lora: str | None = None  # the settings of LoRA adapters, if the model has some
    config: dict[str, Any] | None = None
    ignored_fields: tuple[str, ...] = ()
    torch_version: str
    bertscope_version: str
    obtained: str = "computed"  # computed, estimated or measured


@dataclass(frozen=True, kw_only=True)
class TensorShape:
    """The shape and dtype of one input or output of a module."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Tie:
    """One tensor under two names."""

    path: str
    is_path: str
    params: int


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The sums under each convention.

    distinct_params are the unique parameters: every tensor once, as in `sum(p.numel() for p in model.parameters())`.
    layer_params is the sum over layers: a tied tensor counts once in each layer that uses it; a container counts
    only the tensors that no layer below it has. Bytes count every tensor once.
    """

    distinct_params: int
    layer_params: int
    trainable_params: int
    frozen_params: int
    trainable_layer_params: int
    frozen_layer_params: int
    buffer_params: int
    buffer_bytes: int
    param_bytes: int
    fp32_bytes: int
    bf16_bytes: int
    unknown_tensors: int


def to_json(report: Any) -> str:
    """Return the report as JSON text, with `schema` and `kind` in front; `from_json` reads it back."""
    return json_text({"schema": SCHEMA, "kind": report.kind, **dataclasses.asdict(report)})
