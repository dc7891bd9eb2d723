"""ModelSource: the type of a model for every analysis; only `build` builds it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import field
from typing import TYPE_CHECKING, Any, TypedDict

from bertscope.errors import ConfigError, SelectionError, name_of
from bertscope.frozen import dataclass
from bertscope.settings.checkpointing import FULL, NONE, SELECTIVE, Checkpointing

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
