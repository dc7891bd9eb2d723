"""BertSource: a BERT that `bertscope.model` builds from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertscope.config import ARCHITECTURES, MAX_BUILT_LAYERS, BertConfig, Lora, unknown_architecture
from bertscope.errors import ConfigError, SelectionError, name_of
from bertscope.frozen import dataclass
from bertscope.settings.checkpointing import CHEAPEST_FIRST, parse_strategies
from bertscope.settings.run_config import FLASH_KERNELS
from bertscope.sources.expectations import Expectation
from bertscope.sources.model_source import ModelSource, SourceOptions
from bertscope.units import visible

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertscope.model import BertPreTrainedModel, PeftModel

_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}


@dataclass(frozen=True, kw_only=True)
class BertSource(ModelSource):
    """A BERT as its file describes it: configuration, class, and expected values."""

    config: BertConfig
    architecture: str
    path: Path | None = None
    add_pooling_layer: bool = True
    lora: Lora | None = None
    description: str = ""
    hub_names: tuple[str, ...] = ()
    expected: tuple[Expectation, ...] = ()
    uses_transformers_masks: bool = False  # the same outputs, with the memory of transformers 4.43.4
    printed_attention: str | None = None  # the kernel that `tree --style torch` shows
    flash: str | None = None  # one of FLASH_KERNELS, which the class of the installed transformers may have
    file_note: str = ""  # on what its file says and no BERT has
    config_lines: dict[str, int] = field(default_factory=dict, compare=False)
    family = "a BERT"

    def expected_params(self, key: str) -> int | None:
        """Return the expected count under `key`, or None."""
        found = next((item.value for item in self.expected if item.key == key), None)
        return found if isinstance(found, int) else None

    @property
    def notice(self) -> str:
        noted = ("_name_or_path", "auto_map", "quantization_config")  # the first names the model
        ignored = ", ".join(visible(name) for name in self.config.ignored if name not in noted)
        ignored = f"ignored, since it does not shape a BERT: {ignored}" if ignored else ""
        ignored = "\n".join(filter(None, (self.file_note, ignored)))
        if self.layers <= MAX_BUILT_LAYERS or not self.has_equal_layers:
            return ignored
        return f"{self.layers:,} equal layers: counted from two or three of them, and shown as one" + (
            ignored and f"\n{ignored}"
        )

    @property  # type: ignore[misc]  # a field of the base class
    def settings(self) -> Mapping[str, Any]:
        """Return `add_pooling_layer` of a BertModel, and `lora`; `bert_config` has the other settings."""
        has_pooler = str(self.add_pooling_layer).lower()
        settings = {"add_pooling_layer": has_pooler} if self.architecture == "BertModel" else {}
        return settings | ({"lora": str(self.lora)} if self.lora else {})

    @property
    def bert_config(self) -> BertConfig:
        return self.config

    @property
    def layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def layer_path(self) -> str:
        own = "encoder.layer" if self.architecture == "BertModel" else "bert.encoder.layer"
        return f"base_model.model.{own}" if self.lora else own

    @property
    def has_equal_layers(self) -> bool:
        return not self.config.pruned_heads and (self.lora is None or self.lora.has_equal_layers)

    def build(self, *, device: str = "meta", attention: str | None = None) -> BertPreTrainedModel | PeftModel:
        from bertscope.model import PeftModel, build

        model = build(self.config, self.architecture, add_pooling_layer=self.add_pooling_layer, device=device)
        if self.uses_transformers_masks:
            model.base_model.uses_transformers_masks = True
        return PeftModel(model, self.lora) if self.lora else model

    def to_data(self) -> dict[str, Any]:
        if callable(self.config.hidden_act):
            raise SelectionError("profile's child process takes hidden_act by its name, such as 'gelu'; got a function")
        data = {name: getattr(self, name) for name in ("name", "architecture", "add_pooling_layer", "flash")}
        return data | {"config": self.config.to_dict(), "lora": self.lora and str(self.lora)}

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> BertSource:
        config, lora = BertConfig.from_dict(data["config"]), data["lora"] and Lora.parse(data["lora"])
        return cls(**{**data, "config": config, "lora": lora})

    def for_run(self) -> BertSource:
        if not self.config.type_vocab_size:
            raise SelectionError("type_vocab_size is 0: an input has token types, and none has a row; give 1 or more")
        if self.flash:
            raise SelectionError(
                f"the built-in BERT has eager and sdpa, not {self.flash}; take {name_of('attention')} sdpa"
            )
        return replace(self, uses_transformers_masks=True)

    def with_layers(self, layers: int) -> BertSource:
        return self.with_fields({"num_hidden_layers": layers})

    def layer_counts(self, model: Any) -> Mapping[str, int]:
        return {"num_hidden_layers": self.layers}

    def with_layer_counts(self, counts: Mapping[str, int]) -> BertSource:
        return self.with_fields(counts)

    def with_options(self, **options: Unpack[SourceOptions]) -> BertSource:
        architecture, attention, lora = options.get("architecture"), options.get("attention"), options.get("lora")
        if lora is not None and self.lora is not None:
            raise ConfigError(
                f"{self.name} has adapters already ({self.lora}); leave {name_of('lora')} out, or name its base model"
            )
        changes: dict[str, Any] = {**options, "lora": Lora.parse(lora) if isinstance(lora, str) else lora}
        changes.pop("attention", None)
        if attention is not None:
            changes["flash"] = attention if attention in FLASH_KERNELS else ""
        if attention is not None and not changes["flash"]:
            changes["config"] = replace(self.config, attn_implementation=attention)
        source = replace(self, **{name: value for name, value in changes.items() if value is not None})
        if source.architecture not in ARCHITECTURES:
            line = self.config_lines.get("architectures")
            raise unknown_architecture(source.architecture).at(f"{self.path}:{line}" if architecture is None else "")
        if options.get("add_pooling_layer") is not None and source.architecture != "BertModel":
            raise ConfigError(
                f"only BertModel comes with and without a pooler; {source.architecture} decides by itself"
            )
        return source

    def with_fields(self, fields: Mapping[str, object]) -> BertSource:
        return replace(self, config=replace(self.config, **fields))  # type: ignore[arg-type]

    def without_dropout(self) -> BertSource:
        """Return the source with every drop rate set to 0."""
        lora = self.lora and replace(self.lora, dropout=0.0)
        return replace(self.with_fields(_NO_DROPOUT), lora=lora)

    def other_classes(self) -> tuple[BertSource, ...]:
        return tuple(
            replace(self, architecture=name, add_pooling_layer=True)
            for name in ARCHITECTURES
            if name != self.architecture and self.lora is None
        )

    def strategies(self, model: Any) -> tuple[str, ...]:
        return parse_strategies(CHEAPEST_FIRST)

    def checkpoint(self, model: Any, strategy: str, *, reentrant: bool = False) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant}, strategy=strategy)

    def require(self, ability: str) -> BertSource:
        if self.lora and ability == "--naming":
            raise SelectionError("adapters have no names of TensorFlow and Keras; leave --naming out")
        return self
