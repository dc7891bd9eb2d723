"""What the models return: by name, by key and by index.

B batch, S query length, T key length, N heads, D head size, H hidden size, V vocabulary, C choices.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


@dataclass(eq=False)
class ModelOutput:
    """Fields that are None count as absent: they have no index and no key.

    `output.logits`, `output["logits"]` and `output[0]` are the same tensor; iterating gives the keys,
    as in the reference.
    """

    def to_tuple(self) -> tuple[Any, ...]:
        """The values that are there, in the order of the fields."""
        return tuple(value for _, value in self.items())

    def items(self) -> list[tuple[str, Any]]:
        """Names and values that are there."""
        pairs = ((item.name, getattr(self, item.name)) for item in dataclasses.fields(self))
        return [(name, value) for name, value in pairs if value is not None]

    def keys(self) -> list[str]:
        """Names of the values that are there."""
        return [name for name, _ in self.items()]

    def values(self) -> list[Any]:
        """The values that are there."""
        return list(self.to_tuple())

    def __getitem__(self, key: str | int | slice) -> Any:
        return dict(self.items())[key] if isinstance(key, str) else self.to_tuple()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.items())

    def __contains__(self, name: object) -> bool:
        return name in self.keys()


@dataclass(eq=False)
class BaseModelOutputWithPastAndCrossAttentions(ModelOutput):
    """What BertEncoder returns."""

    last_hidden_state: Tensor | None = None  # (B, S, H)
    past_key_values: tuple[Tensors, ...] | None = None  # per layer 2 or 4 of (B, N, T, D)
    hidden_states: Tensors | None = None  # layers + 1 of (B, S, H)
    attentions: Tensors | None = None  # layers of (B, N, S, T)
    cross_attentions: Tensors | None = None  # layers of (B, N, S, encoder length)


@dataclass(eq=False)
class BaseModelOutputWithPoolingAndCrossAttentions(ModelOutput):
    """What BertModel returns."""

    last_hidden_state: Tensor | None = None  # (B, S, H)
    pooler_output: Tensor | None = None  # (B, H)
    hidden_states: Tensors | None = None
    past_key_values: tuple[Tensors, ...] | None = None
    attentions: Tensors | None = None
    cross_attentions: Tensors | None = None


@dataclass(eq=False)
class BertForPreTrainingOutput(ModelOutput):
    """What BertForPreTraining returns."""

    loss: Tensor | None = None  # ()
    prediction_logits: Tensor | None = None  # (B, S, V)
    seq_relationship_logits: Tensor | None = None  # (B, 2)
    hidden_states: Tensors | None = None
    attentions: Tensors | None = None


@dataclass(eq=False)
class _LossAndLogits(ModelOutput):
    """A loss (), logits, and what the body gave."""

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden_states: Tensors | None = None
    attentions: Tensors | None = None


@dataclass(eq=False)
class MaskedLMOutput(_LossAndLogits):
    """What BertForMaskedLM returns; logits (B, S, V)."""


@dataclass(eq=False)
class NextSentencePredictorOutput(_LossAndLogits):
    """What BertForNextSentencePrediction returns; logits (B, 2)."""


@dataclass(eq=False)
class SequenceClassifierOutput(_LossAndLogits):
    """What BertForSequenceClassification returns; logits (B, num_labels)."""


@dataclass(eq=False)
class MultipleChoiceModelOutput(_LossAndLogits):
    """What BertForMultipleChoice returns; logits (B, C)."""


@dataclass(eq=False)
class TokenClassifierOutput(_LossAndLogits):
    """What BertForTokenClassification returns; logits (B, S, num_labels)."""


@dataclass(eq=False)
class CausalLMOutputWithCrossAttentions(ModelOutput):
    """What BertLMHeadModel returns."""

    loss: Tensor | None = None  # ()
    logits: Tensor | None = None  # (B, S, V)
    past_key_values: tuple[Tensors, ...] | None = None
    hidden_states: Tensors | None = None
    attentions: Tensors | None = None
    cross_attentions: Tensors | None = None


@dataclass(eq=False)
class QuestionAnsweringModelOutput(ModelOutput):
    """What BertForQuestionAnswering returns."""

    loss: Tensor | None = None  # ()
    start_logits: Tensor | None = None  # (B, S)
    end_logits: Tensor | None = None  # (B, S)
    hidden_states: Tensors | None = None
    attentions: Tensors | None = None


for _kind in ModelOutput.__subclasses__() + _LossAndLogits.__subclasses__():
    torch.export.register_dataclass(_kind)  # so that torch.export and torch.func see the tensors inside
