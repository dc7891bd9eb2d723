"""Shapes of the inputs and outputs of every module, from one forward pass on meta."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bertscope.analyses.modules.module_tree import Node, noted, read
from bertscope.analyses.tracing.fake_tensors import META_ATTENTION, run_without_values
from bertscope.analyses.tracing.inputs import arguments, inputs_for
from bertscope.analyses.tracing.trace import trace
from bertscope.reports.base import TensorShape
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import nn

InOut = tuple[tuple[TensorShape, ...], tuple[TensorShape, ...]]


def shapes(model: nn.Module, batch: int = 1, seq: int = 128) -> dict[str, InOut]:
    """Return the shapes and dtypes of each module's inputs and outputs by path, without computing values.

    A module that does not run is absent. Raises SelectionError for sizes that the model cannot run.
    """
    return shapes_of(model, inputs_for(model, batch, seq))


def source_shapes(source: ModelSource, batch: int, seq: int) -> dict[str, InOut]:
    """Return the same for the model of a source."""
    model = source.build(attention=META_ATTENTION).eval()
    return run_without_values(source, model, inputs_for(model, batch, seq), shapes_of)


def shapes_of(model: nn.Module, inputs: Any) -> dict[str, InOut]:
    """Return the same for given inputs."""
    args, kwargs = arguments(inputs)
    recorded, _ = trace(model, lambda: model(*args, **kwargs))
    return {path: (given, recorded.outputs.get(path, ())) for path, given in recorded.inputs.items()}


def read_with(model: nn.Module, found: Mapping[str, InOut] | None) -> Node:
    """Return the tree of a model with the shapes of each module, or no shapes, as its note."""
    return noted(read(model), lambda node: (found or {}).get(node.path, ((), ())))
