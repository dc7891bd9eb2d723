"""The outputs of the models, with access by name, by key and by index.

B batch, S query length, T key length, N heads, D head size, H hidden size, V vocabulary, C choices.
"""

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


@dataclass(eq=False)
class ModelOutput(Mapping[str, Any]):
    """The base of all outputs: a mapping as in transformers. A field that is None has no index and no key.

    `output.logits`, `output["logits"]` and `output[0]` are the same tensor; iteration yields the keys. A class takes
    its fields, or one mapping of them: `accelerate` and others convert mappings by `type(output)({name: value})`.
    """

    def __post_init__(self) -> None:
        first, *others = dataclasses.fields(self)
        values = getattr(self, first.name)
        if isinstance(values, Mapping):
            for item in (first, *others):
                setattr(self, item.name, values.get(item.name))

    def to_tuple(self) -> tuple[Any, ...]:
        """Return the values that are not None, in the order of the fields."""
        return tuple(self.values())

    def __getitem__(self, key: str | int | slice) -> Any:
        return (
            self.to_tuple()[key] if isinstance(key, (int, slice)) else {name: getattr(self, name) for name in self}[key]
        )

    def __iter__(self) -> Iterator[str]:
        return (item.name for item in dataclasses.fields(self) if getattr(self, item.name) is not None)

    def __len__(self) -> int:
        return len(list(iter(self)))

    __eq__, __hash__ = object.__eq__, object.__hash__  # by identity, since a comparison of tensors has no single answer


@dataclass(eq=False)
class BaseModelOutputWithPastAndCrossAttentions(ModelOutput):
    """The output of BertEncoder."""

    last_hidden_state: Tensor | None = None  # (B, S, H)
    past_key_values: tuple[Tensors, ...] | None = None  # per layer 2 or 4 of (B, N, T, D)
    hidden_states: Tensors | None = None  # layers + 1 of (B, S, H)
    attentions: Tensors | None = None  # layers of (B, N, S, T)
    cross_attentions: Tensors | None = None  # layers of (B, N, S, encoder length)


@dataclass(eq=False)
class BaseModelOutputWithPoolingAndCrossAttentions(ModelOutput):
    """The output of BertModel."""

    last_hidden_state: Tensor | None = None  # (B, S, H)
    pooler_output: Tensor | None = None  # (B, H)
    hidden_states: Tensors | None = None
    past_key_values: tuple[Tensors, ...] | None = None
    attentions: Tensors | None = None
    cross_attentions: Tensors | None = None


@dataclass(eq=False)
class BertForPreTrainingOutput(ModelOutput):
    """The output of BertForPreTraining."""

    loss: Tensor | None = None  # ()
    prediction_logits: Tensor | None = None  # (B, S, V)
    seq_relationship_logits: Tensor | None = None  # (B, 2)
    hidden_states: Tensors | None = None
    attentions: Tensors | None = None


@dataclass(eq=False)
class LossAndLogits(ModelOutput):
    """A loss (), logits, and the further outputs of BertModel."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: Tensors | None = None
    attentions: Tensors | None = None


@dataclass(eq=False)
class MaskedLMOutput(LossAndLogits):
    """The output of BertForMaskedLM; logits (B, S, V)."""


@dataclass(eq=False)
class NextSentencePredictorOutput(LossAndLogits):
    """The output of BertForNextSentencePrediction; logits (B, 2)."""


@dataclass(eq=False)
class SequenceClassifierOutput(LossAndLogits):
    """The output of BertForSequenceClassification; logits (B, num_labels)."""


@dataclass(eq=False)
class MultipleChoiceModelOutput(LossAndLogits):
    """The output of BertForMultipleChoice; logits (B, C)."""


@dataclass(eq=False)
class TokenClassifierOutput(LossAndLogits):
    """The output of BertForTokenClassification; logits (B, S, num_labels)."""


@dataclass(eq=False)
class CausalLMOutputWithCrossAttentions(ModelOutput):
    """The output of BertLMHeadModel."""

    loss: Tensor | None = None  # ()
    logits: Tensor | None = None  # (B, S, V)
    past_key_values: tuple[Tensors, ...] | None = None
    hidden_states: Tensors | None = None
    attentions: Tensors | None = None
    cross_attentions: Tensors | None = None


@dataclass(eq=False)
class QuestionAnsweringModelOutput(ModelOutput):
    """The output of BertForQuestionAnswering."""

    loss: Tensor | None = None  # ()
    start_logits: Tensor | None = None  # (B, S)
    end_logits: Tensor | None = None  # (B, S)
    hidden_states: Tensors | None = None
    attentions: Tensors | None = None


with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.6 warns of a name that it uses itself
    for _kind in ModelOutput.__subclasses__() + LossAndLogits.__subclasses__():
        torch.export.register_dataclass(_kind)  # for torch.export and torch.func
