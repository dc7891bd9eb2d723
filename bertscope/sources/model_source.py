"""ModelSource: the type of a model for every analysis; only `build` builds it.

Models are built on meta, also those whose constructor reads values, which meta tensors do not have.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import field
from typing import TYPE_CHECKING, Any, TypedDict

from bertscope.config import MAX_BUILT_LAYERS
from bertscope.errors import BertscopeWarning, ConfigError, SelectionError, SourceError, name_of
from bertscope.frozen import dataclass
from bertscope.settings.checkpointing import FULL, NONE, SELECTIVE, Checkpointing
from bertscope.units import bytes_text

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertscope.config import BertConfig, Lora
    from bertscope.sources.bert import BertSource
    from bertscope.torch_access import nn

_REMEDY = "count, tree, flops, estimate, profile, fit, report, explain, diagram, diff and check take any model"


class SourceOptions(TypedDict, total=False):
    """The options that change a model; None leaves it as it is."""

    architecture: str | None
    attention: str | None
    add_pooling_layer: bool | None
    lora: Lora | str | None


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model: a preset, a `config.json` of any family, a checkpoint, `module:attribute`, a module from Python.

    A source raises an error of one line for what it does not support. This class has no known layers, fields and other
    classes; a subclass overrides what it knows. Example inputs do not belong to a source: `tracing.inputs`
    derives them from the `forward` of the built module.
    """

    name: str  # in reports
    architecture: str | None = None  # the name of the class to build, if the source gives one
    stored_dtype: str | None = None  # of the published weights, if the source gives one
    where: str = ""  # `file:line` of its definition, if there is one
    # Those that affect the model, by their names in its file, except those of a BertConfig.
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def family(self) -> str:
        """Return the kind of model in a few words, such as `a gpt2 of transformers`."""
        return "a module"

    @property
    def notice(self) -> str:
        """Return a note for the user before the model is built, or an empty string."""
        return ""

    @property
    def bert_config(self) -> BertConfig | None:
        """Return the configuration that closed formulas of a BERT need; None for another family."""
        return None

    @property
    def layers(self) -> int:
        """Return the number of layers at `layer_path`; 0 without one."""
        return 0

    @property
    def layer_path(self) -> str:
        """Return the path of the stack of layers that `with_layers` can shorten; empty without one."""
        return ""

    @property
    def has_own_dtypes(self) -> bool:
        """Return True if code of the user chooses the dtypes of the parameters, which then stay as built."""
        return False

    @property
    def has_equal_layers(self) -> bool:
        """Return True if the configuration makes all layers at `layer_path` equal."""
        return False

    def build(self, *, device: str = "meta", attention: str | None = None) -> nn.Module:
        """Build the model; `attention` is the kernel for a source that sets none.

        Raises SourceError or ConfigError for a model that cannot be built.
        """
        raise NotImplementedError

    def to_data(self) -> dict[str, Any]:
        """Return the arguments of the source as JSON data, from which another process makes the same source.

        Raises SelectionError for a source that another process cannot make.
        """
        raise SelectionError(f"{self.name} is {self.family}; another process measures only what it can build by name")

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> ModelSource:
        """Return the source that `to_data` wrote."""
        return cls(**data)

    def for_run(self) -> ModelSource:
        """Return the source as a run builds it; raises SelectionError for an attention kernel that it does not have."""
        return self

    def with_layers(self, layers: int) -> ModelSource:
        """Return the source with another number of layers at `layer_path`."""
        raise SelectionError(f"{self.name} is {self.family}; its number of layers cannot be changed", where=self.where)

    def layer_counts(self, model: Any) -> Mapping[str, int]:
        """Return the fields of the configuration that give numbers of layers, from the built model if it needs that."""
        return {}

    def with_layer_counts(self, counts: Mapping[str, int]) -> ModelSource:
        """Return the source with other values of such fields."""
        return self

    def with_options(self, **options: Unpack[SourceOptions]) -> ModelSource:
        """Return the source with the options that are not None; raises ConfigError for one that it does not take."""
        self._refuse_options_of_berts(options)
        if options.get("architecture") or options.get("attention"):
            raise ConfigError(
                f"{self.name} decides its class and attention by itself; leave {name_of('architecture')} and "
                f"{name_of('attention')}"
            )
        return self

    def _refuse_options_of_berts(self, options: SourceOptions) -> None:
        if options.get("add_pooling_layer") is not None:
            raise ConfigError(
                f"only a BertModel comes with and without a pooler; {self.name} is {self.family}; leave "
                f"{name_of('add_pooling_layer')} out"
            )
        if options.get("lora") is not None:
            raise ConfigError(
                f"{name_of('lora')} is for BERTs, and {self.name} is {self.family}; give module:attribute of a "
                "function that returns peft's model"
            )

    def with_fields(self, fields: Mapping[str, object]) -> ModelSource:
        """Return the source with other fields of a BertConfig; raises SelectionError for another family.

        The attention kernel can be set for any family, and has no effect there.
        """
        if names := [name for name in fields if name != "attn_implementation"]:
            raise SelectionError(f"{self.name} is {self.family}; {', '.join(names)} can be set for a BERT only")
        return self

    def other_classes(self) -> tuple[ModelSource, ...]:
        """Return the sources of the other classes that the same configuration can build."""
        return ()

    def strategies(self, model: Any) -> tuple[str, ...]:
        """Return the strategies of checkpointing to compare by default, those that the built model takes."""
        return (NONE, FULL) if getattr(model, "supports_gradient_checkpointing", False) else (NONE,)

    def checkpoint(self, model: Any, strategy: str, *, reentrant: bool = False) -> None:
        """Make the built model recompute its layers; raises SelectionError for a strategy that it does not take."""
        if strategy == NONE:
            return
        chosen = Checkpointing.parse(strategy, use_reentrant=reentrant)
        if chosen is not None and chosen.kept:
            from bertscope.model.lists import keep_layers

            keep_layers(model, chosen)
            return
        known = self.strategies(model)
        if strategy not in known and (strategy != SELECTIVE or FULL not in known):
            raise SelectionError(
                f"{type(model).__name__} takes {name_of('checkpointing')} none, or selective and full where its "
                "class supports it"
            )
        from bertscope.model.encoder import selective_contexts

        options: dict[str, Any] = {"context_fn": selective_contexts} if strategy == SELECTIVE else {}
        with warnings.catch_warnings():  # transformers 5 deprecates this name
            warnings.simplefilter("ignore")
            model.gradient_checkpointing_enable({"use_reentrant": reentrant, **options})

    def confined(self) -> AbstractContextManager[Any]:
        """Return the context in which the built model runs; there transformers has no network and no pickles."""
        return nullcontext()

    def require(self, ability: str) -> BertSource:
        """Return the BERT that `ability` needs; raises SelectionError with the remedy for another family."""
        remedy = "leave it out" if ability.startswith(("--", name_of("")[0])) else _REMEDY
        raise SelectionError(f"{self.name} is {self.family}; {ability} is for BERTs only; {remedy}", where=self.where)


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
