"""The building of models on meta, also of those whose constructor reads values, which meta tensors do not have."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from bertscope.config import MAX_BUILT_LAYERS
from bertscope.errors import BertscopeWarning, SourceError
from bertscope.units import bytes_text

if TYPE_CHECKING:
    from bertscope.sources.model_source import ModelSource
    from bertscope.torch_access import nn

MAX_REAL_BYTES = 4 * 2**30  # of the tensors with values that exist at one time while a model is built or run for meta
_ON_META = "_bertscope_on_meta"  # of a parameter with values: the one on meta that replaces it

REPEATED = "_bertscope_layers"  # of a list of two equal layers: the number that `module_tree.read` repeats them for


def built_for_counting(
    source: ModelSource, *, most: int = MAX_BUILT_LAYERS, attention: str | None = None
) -> nn.Module:  # fmt: skip
    """Build the model on meta; of more than `most` equal layers two, which are counted for all and not run."""
    if source.layers <= most or not source.has_equal_layers:
        return source.build(attention=attention)
    short = source.with_layers(2)
    model = short.build(attention=attention)
    setattr(model.get_submodule(source.layer_path), REPEATED, source.layers)
    for module in model.modules():
        if vars(module).get("config") is short.bert_config:
            module.config = source.bert_config  # type: ignore[assignment]
    return model


def built_on(device: str, make: Callable[[], Any], name: str) -> tuple[Any, str]:
    """Return what `make` builds on the device, and a note if it was built on meta only in part, else "".

    For meta, a constructor that fails there, such as one that calls `.item()` for its drop-path rates, runs again with
    only its parameters on meta, and then with all tensors on the CPU; afterwards all tensors move to meta. Raises
    SourceError if the CPU's tensors are more than MAX_REAL_BYTES, else the error of the last attempt.
    """
    from bertscope.torch_access import nn, on_device, torch

    try:
        with on_device(device):
            return make(), ""
    except (RuntimeError, TypeError):  # of torch, for tensors without values
        if device != "meta":
            raise
    limit = f"{name} cannot be built on meta, as its constructor reads values"
    try:
        with torch.device("cpu"), at_most_real_bytes(limit), _parameters_on_meta():
            built = make()
        how = "its parameters on meta and its other tensors on the CPU"
    except (RuntimeError, TypeError):
        with torch.device("cpu"), at_most_real_bytes(limit):
            built = make()
        how = f"all its tensors on the CPU, at most {bytes_text(MAX_REAL_BYTES)}"
    if isinstance(built, nn.Module):
        _move_to_meta(built)
    return built, f"{name}: its constructor reads values, so it was built with {how}"


@functools.cache
def note_values(how: str) -> None:
    """Warn once about a model that was not built or run on meta only; an empty text is no warning."""
    if how:
        warnings.warn(how, BertscopeWarning, stacklevel=2)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put each parameter on meta when a module registers it; one that several modules share stays shared."""
    from bertscope.torch_access import nn

    def to_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if type(param) is not nn.Parameter or param.is_meta:
            return None
        if not hasattr(param, _ON_META):
            setattr(param, _ON_META, nn.Parameter(param.detach().to("meta"), param.requires_grad))
        found: nn.Parameter = getattr(param, _ON_META)
        return found

    register = nn.modules.module.register_module_parameter_registration_hook
    handle = register(to_meta)  # type: ignore[arg-type]  # torch's annotation has None for the result
    try:
        yield
    finally:
        handle.remove()


def at_most_real_bytes(what: str) -> AbstractContextManager[Any]:
    """Return a mode in which an operator raises SourceError if the tensors with values become too large.

    `what` is the start of the error: the model, and why it needs values.
    """
    from bertscope.torch_access import DispatchMode, storage_key, torch, tree_leaves

    def tensors(tree: Any) -> list[torch.Tensor]:
        return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and not leaf.is_meta]

    class Bounded(DispatchMode):
        """A mode that adds up the bytes of the storages that exist."""

        def __init__(self) -> None:
            super().__init__()
            self.sizes: dict[int, int] = {}
            self.real_bytes = 0

        def free(self, key: int) -> None:
            self.real_bytes -= self.sizes.pop(key)

        def check(self, more_bytes: int) -> None:
            if self.real_bytes + more_bytes > MAX_REAL_BYTES:
                raise SourceError(
                    f"{what}, and on the CPU its tensors are more than {bytes_text(MAX_REAL_BYTES)}; count a smaller "
                    "configuration of it"
                )

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if not tensors((args, kwargs)) and kwargs.get("device", "meta") != "meta":  # check before it allocates
                with suppress(NotImplementedError):  # of a quantized tensor
                    self.check(operator(*args, **kwargs | {"device": torch.device("meta"), "pin_memory": False}).nbytes)
            out = operator(*args, **kwargs)
            for tensor in tensors(out):
                storage, key = tensor.untyped_storage(), storage_key(tensor)
                if key not in self.sizes:
                    self.sizes[key] = storage.nbytes()
                    self.real_bytes += storage.nbytes()
                    weakref.finalize(storage, self.free, key)
            self.check(0)
            return out

    return Bounded()


def _move_to_meta(model: nn.Module) -> None:
    """Replace each tensor of the model by one on meta; shared tensors stay shared."""
    from bertscope.torch_access import nn, torch

    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        own = (*module.named_parameters(recurse=False, remove_duplicate=False),
               *module.named_buffers(recurse=False, remove_duplicate=False), *vars(module).items())  # fmt: skip
        for name, tensor in own:
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta or nn.parameter.is_lazy(tensor):
                continue
            if id(tensor) not in moved:
                on_meta = tensor.detach().to("meta")
                is_parameter = isinstance(tensor, nn.Parameter)
                moved[id(tensor)] = nn.Parameter(on_meta, tensor.requires_grad) if is_parameter else on_meta
            setattr(module, name, moved[id(tensor)])
