"""ModelSource: the type of a model for every analysis; only `build` builds it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from bertscope.config import BertConfig, Lora
    from bertscope.sources.bert import BertSource
    from bertscope.torch_access import nn


class ModelSource(Protocol):
    """A model: a preset, a `config.json` of any family, a checkpoint, `module:attribute`, a module from Python.

    A source raises an error of one line for what it does not support. Example inputs do not belong to a source:
    `analyses.tracing.inputs` derives them from the `forward` of the built module.
    """

    @property
    def name(self) -> str:
        """Return the name that reports show."""

    @property
    def family(self) -> str:
        """Return the kind of model in a few words, such as `a gpt2 of transformers`."""

    @property
    def architecture(self) -> str | None:
        """Return the name of the class to build, if the source gives one."""

    @property
    def stored_dtype(self) -> str | None:
        """Return the dtype of the published weights, if the source gives one."""

    @property
    def notice(self) -> str:
        """Return a note for the user before the model is built, or an empty string."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Return the settings that affect the model, by their names in its file, except those of a BertConfig."""

    @property
    def bert_config(self) -> BertConfig | None:
        """Return the configuration that closed formulas of a BERT need; None for another family."""

    @property
    def layers(self) -> int:
        """Return the number of layers at `layer_path`; 0 without one."""

    @property
    def layer_path(self) -> str:
        """Return the path of the stack of layers that `with_layers` can shorten; empty without one."""

    @property
    def has_own_dtypes(self) -> bool:
        """Return True if code of the user chooses the dtypes of the parameters, which then stay as built."""

    @property
    def has_equal_layers(self) -> bool:
        """Return True if the configuration makes all layers at `layer_path` equal."""

    def build(self, *, device: str = "meta", attention: str | None = None) -> nn.Module:
        """Build the model; `attention` is the kernel for a source that sets none.

        Raises SourceError or ConfigError for a model that cannot be built.
        """

    def to_data(self) -> dict[str, Any]:
        """Return the arguments of the source as JSON data, from which another process makes the same source.

        Raises SelectionError for a source that another process cannot make.
        """

    def for_run(self) -> ModelSource:
        """Return the source as a run builds it; raises SelectionError for an attention kernel that it does not have."""

    def with_layers(self, layers: int) -> ModelSource:
        """Return the source with another number of layers at `layer_path`."""

    def layer_counts(self, model: Any) -> Mapping[str, int]:
        """Return the fields of the configuration that give numbers of layers, from the built model if it needs that."""

    def with_layer_counts(self, counts: Mapping[str, int]) -> ModelSource:
        """Return the source with other values of such fields."""

    def with_options(
        self,
        *,
        architecture: str | None = None,
        attention: str | None = None,
        add_pooling_layer: bool | None = None,
        lora: Lora | str | None = None,
    ) -> ModelSource:
        """Return the source with the options that are not None; raises ConfigError for one that it does not take."""

    def with_fields(self, fields: Mapping[str, object]) -> ModelSource:
        """Return the source with other fields of a BertConfig; raises SelectionError for another family."""

    def other_classes(self) -> tuple[ModelSource, ...]:
        """Return the sources of the other classes that the same configuration can build."""

    def strategies(self, model: Any) -> tuple[str, ...]:
        """Return the strategies of checkpointing to compare by default, those that the built model takes."""

    def checkpoint(self, model: Any, strategy: str, *, reentrant: bool = False) -> None:
        """Make the built model recompute its layers; raises SelectionError for a strategy that it does not take."""

    def confined(self) -> AbstractContextManager[Any]:
        """Run the built model inside this context; code of transformers has no network, prompts and pickles there."""

    def require(self, ability: str) -> BertSource:
        """Return the BERT that `ability` needs; raises SelectionError with the remedy for another family."""
