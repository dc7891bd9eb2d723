"""The conversion of what a Python user gives to the functions of `bertscope` into what the analyses take."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from bertscope.analyses.modules.module_tree import InOut
from bertscope.analyses.tracing.trace import source_shapes
from bertscope.config import BertConfig
from bertscope.errors import SelectionError
from bertscope.sources.find import source_of
from bertscope.sources.model_source import ModelSource
from bertscope.torch_access import nn, torch


class Configuration(Protocol):
    """A configuration of transformers."""

    model_type: str

    def to_dict(self) -> dict[str, Any]:
        """Return the content of its config.json."""


# A module, a name or path as for the command line, a configuration or its dictionary, or `bertscope.load(...)`.
Model: TypeAlias = nn.Module | ModelSource | BertConfig | Configuration | Mapping[str, Any] | str | os.PathLike[str]
Size: TypeAlias = Sequence[int] | Sequence[Sequence[int]]


def built(model: Model, name: str | None = None) -> tuple[nn.Module, str | None]:
    """Return the given module itself, or the model of a source on meta, and the name for its report."""
    if isinstance(model, nn.Module):
        return model, name
    source = source_of(model, name=name)
    return source.build(), source.name


def inputs_of(inputs: Any = None, input_size: Size | None = None, dtypes: Sequence[torch.dtype] | None = None) -> Any:
    """Return the inputs of a module that one of two arguments gives; None without any.

    `input_size` is the size of a tensor, or several sizes; `dtypes` has the dtype of each, by default float32. Raises
    SelectionError if both arguments are given, and for a size that is none.
    """
    if inputs is not None and input_size is not None:
        raise SelectionError("give either inputs or input_size")
    if input_size is None:
        if dtypes is not None:
            raise SelectionError("dtypes are those of input_size; give it too, or leave dtypes out")
        return inputs
    sizes: Any = [input_size] if all(isinstance(size, int) for size in input_size) else list(input_size)
    if not sizes[0] or not all(type(number) is int and number > 0 for size in sizes for number in _numbers(size)):
        raise SelectionError(f"input_size is a size such as (1, 3, 224, 224), or a list of sizes; got {input_size!r}")
    kinds = list(dtypes or [torch.float32] * len(sizes))
    if len(kinds) != len(sizes):
        raise SelectionError(f"dtypes has one dtype for each size; got {len(kinds)} for {len(sizes)} sizes")
    return tuple(torch.empty(tuple(size), dtype=kind, device="meta") for size, kind in zip(sizes, kinds, strict=True))


def on_device(inputs: Any, device: str) -> Any:
    """Return inputs of `input_size` with values on a device, and any other inputs as they are."""
    is_of_sizes = isinstance(inputs, tuple) and all(isinstance(item, torch.Tensor) and item.is_meta for item in inputs)
    return tuple(torch.ones_like(tensor, device=device) for tensor in inputs) if is_of_sizes else inputs


def _numbers(size: Any) -> Sequence[Any]:
    return size if isinstance(size, Sequence) and not isinstance(size, str) else [None]


def shapes_of_run(
    model: Model, shapes: Mapping[str, InOut] | bool | None, inputs: Any, batch: int, seq: int
) -> Mapping[str, InOut] | None:
    """Return the shapes of a run with the inputs, or if `shapes` is True at this batch and length; else `shapes`."""
    if inputs is not None or shapes is True:
        return source_shapes(source_of(model if inputs is None else built(model)[0], inputs=inputs), batch, seq)
    return shapes or None
