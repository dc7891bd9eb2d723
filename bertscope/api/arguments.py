"""Arguments that public functions share: any kind of model, and inputs for modules."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeGuard, TypeVar

from bertscope.config import POSITIONS, BertConfig
from bertscope.errors import SelectionError
from bertscope.settings.run_config import RunConfig
from bertscope.sources.find import source_of
from bertscope.sources.model_source import ModelSource, built_for_counting

if TYPE_CHECKING:
    from bertscope.checkpoints.reading import Checkpoint
    from bertscope.memory.step import Loss
    from bertscope.settings.keywords import GivenInputs, RunSettings
    from bertscope.torch_access import nn
    from bertscope.tracing.module_tree import InOut

    class ShapesOfRun(GivenInputs, total=False):
        """Keywords for the shapes of a forward pass."""

        shapes: Mapping[str, InOut] | bool | None
        batch: int
        seq: int | None
        inputs: Any


Function = TypeVar("Function", bound=Callable[..., Any])
INPUT_KEYWORDS = ("input_data", "input_size", "dtypes")


class Configuration(Protocol):
    """A configuration of transformers."""

    model_type: str

    def to_dict(self) -> dict[str, Any]:
        """Return the content of its config.json."""


# A module, a name or path as for the command line, a configuration or its dictionary, or `bertscope.load(...)`; in some
# functions a checkpoint, `bertscope.read_checkpoint(...)`.
Model: TypeAlias = (
    "nn.Module | ModelSource | Checkpoint | BertConfig | Configuration | Mapping[str, Any] | str | os.PathLike[str]"
)


def is_module(model: Model) -> TypeGuard[nn.Module]:
    """Return True for a module of torch, which is imported then."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def built(model: Model, name: str | None = None) -> tuple[nn.Module, str | None]:
    """Return the given module itself, or a source's model on meta, and the name for its report."""
    if is_module(model):
        return model, name
    source = source_of(model, name=name)
    return built_for_counting(source), source.name


def inputs_of(inputs: Any, keywords: GivenInputs) -> Any:
    """Take a module's inputs out of a function's keywords, and return them; None without any.

    They are `inputs`, or `input_data` as torchinfo calls them, or tensors on meta of `input_size`, a size or several,
    whose `dtypes` are by default float32. Raises SelectionError for two of these, and for a size that is none.
    """
    data, input_size, dtypes = (keywords.pop(key, None) for key in INPUT_KEYWORDS)  # type: ignore[misc]
    if sum(item is not None for item in (inputs, data, input_size)) > 1:
        raise SelectionError("give one of inputs, input_data and input_size")
    inputs = data if inputs is None else inputs
    if input_size is None:
        if dtypes is not None:
            raise SelectionError("dtypes belong to input_size; give it too, or leave dtypes out")
        return inputs
    from bertscope.torch_access import torch

    sizes: Any = [input_size] if all(isinstance(size, int) for size in input_size) else list(input_size)
    if not sizes[0] or not all(type(number) is int and number > 0 for size in sizes for number in _numbers(size)):
        raise SelectionError(f"input_size is a size such as (1, 3, 224, 224), or a list of sizes; got {input_size!r}")
    kinds = list(dtypes or [torch.float32] * len(sizes))
    if len(kinds) != len(sizes):
        raise SelectionError(f"dtypes has one dtype for each size; got {len(kinds)} for {len(sizes)} sizes")
    return tuple(torch.empty(tuple(size), dtype=kind, device="meta") for size, kind in zip(sizes, kinds, strict=True))


def function_of(settings: RunSettings) -> Loss | None:
    """Take the loss out of the settings if it is a function, and return it."""
    loss = settings.get("loss")
    if isinstance(loss, str):
        return None
    settings.pop("loss", None)
    return loss


def inputs_on_device(inputs: Any, device: str) -> Any:
    """Return inputs of `input_size` with values on a device, and any other inputs as they are."""
    from bertscope.torch_access import torch

    is_of_sizes = isinstance(inputs, tuple) and all(isinstance(item, torch.Tensor) and item.is_meta for item in inputs)
    return tuple(torch.ones_like(tensor, device=device) for tensor in inputs) if is_of_sizes else inputs


def batch_of(inputs: Any) -> int:
    """Return the first tensor's first size; raises SelectionError if none has one."""
    return _size_of(inputs, 0, "first size is the batch")


def _size_of(inputs: Any, dimension: int, what: str) -> int:
    from bertscope import torch_access

    for item in torch_access.tree_leaves(inputs):
        if isinstance(item, torch_access.torch.Tensor) and item.ndim > dimension:
            return item.shape[dimension]
    raise SelectionError(f"the inputs have no tensor whose {what}")


def batched(inputs: Any, *, has_length: bool = False) -> Callable[[int, int], Any] | None:
    """Return a function from a batch and a length to inputs like these on meta; None without inputs.

    Their first sizes that are the batch follow it; if the inputs have a length, second sizes that are it follow too.
    """
    if inputs is None:
        return None
    from bertscope import torch_access

    torch = torch_access.torch
    before = [batch_of(inputs), _size_of(inputs, 1, "second size is the length")] if has_length else [batch_of(inputs)]

    def of_sizes(item: Any, wanted: Sequence[int]) -> Any:
        """Return a tensor on meta of another batch and length, and any other value as it is."""
        if not isinstance(item, torch.Tensor):
            return item
        sizes = [new if size == old else size for size, old, new in zip(item.shape, before, wanted)]  # noqa: B905
        return torch.empty((*sizes, *item.shape[len(sizes) :]), dtype=item.dtype, device="meta")

    return lambda batch, seq: torch_access.tree_map(partial(of_sizes, wanted=(batch, seq)), inputs)


def _numbers(size: Any) -> Sequence[Any]:
    return size if isinstance(size, Sequence) and not isinstance(size, str) else [None]


def refuse_sizes(batch: int, seq: int | None, when: str) -> None:
    """Raise SelectionError if `batch` or `seq` is set although neither has an effect."""
    if (batch, seq) != (1, None):
        raise SelectionError(f"batch and seq have no effect {when}; leave them out")


def shapes_of_run(
    model: Model, *, shapes: Mapping[str, InOut] | bool | None = None, batch: int = 1, seq: int | None = None,
    inputs: Any = None, input_size: Any = None, dtypes: Any = None, input_data: Any = None
) -> Mapping[str, InOut] | None:  # fmt: skip
    """Return the shapes of a run with the inputs, or if `shapes` is True at this batch and length; else `shapes`."""
    tensors = inputs_of(inputs, {"input_size": input_size, "dtypes": dtypes, "input_data": input_data})
    if tensors is not None or shapes is True:
        from bertscope.tracing.flops import source_shapes

        source = source_of(model if tensors is None else built(model)[0], inputs=tensors)
        if tensors is not None:
            refuse_sizes(batch, seq, "on a module with inputs")
        return source_shapes(source, batch, usual_length(*[source] * (tensors is None)) if seq is None else seq)
    refuse_sizes(batch, seq, "without shapes=True")
    return shapes or None


def usual_length(*sources: ModelSource) -> int:
    """Return the default length, or the limit of a model that takes less."""
    return min([RunConfig.seq, *(longest_input(source, RunConfig.seq) for source in sources)])


def longest_input(source: ModelSource, usual: int) -> int:
    """Return the longest input, or the usual length if the model's file shows that it takes it."""
    if source.bert_config is not None:
        return source.bert_config.max_position_embeddings
    parts = [source.settings, *(part for part in source.settings.values() if isinstance(part, Mapping))]
    known = [part[name] for part in parts for name in POSITIONS if isinstance(part.get(name), int)]
    if not source.has_own_dtypes and all(most >= usual + 2 for most in known):  # RoBERTa's begin after the padding's
        return usual
    from bertscope.tracing.inputs import positions

    return positions(source.build())


def with_keywords_of(*functions: Callable[..., Any]) -> Callable[[Function], Function]:
    """Return a decorator that adds the keywords of other functions, which it passes on, to a signature."""

    def decorate(function: Function) -> Function:
        known = [item for item in signature(function).parameters.values() if item.kind is not Parameter.VAR_KEYWORD]
        passed = [item for other in functions for item in signature(other).parameters.values()]
        listed = [item.replace(kind=Parameter.KEYWORD_ONLY) for item in passed if item.default is not Parameter.empty]
        listed += input_parameters([*known, *listed])
        function.__signature__ = Signature([*known, *listed])  # type: ignore[attr-defined]
        return function

    return decorate


def input_parameters(known: Sequence[Parameter]) -> list[Parameter]:
    """Return the keywords of `GivenInputs` for a function that takes `inputs`, unless it lists them itself."""
    names = {item.name for item in known}
    missing = [name for name in INPUT_KEYWORDS if "inputs" in names and name not in names]
    return [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in missing]
