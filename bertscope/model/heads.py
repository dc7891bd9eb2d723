"""The heads: what is built on BertModel for pre-training and for tasks, each with its loss.

Letters in the shapes: B batch, S sequence length, H hidden size, V vocabulary, L labels, C choices.
Every forward takes BertModel's inputs under BertModel's names and, with labels, returns the loss first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertscope.config import BertConfig
from bertscope.model.activations import activation
from bertscope.model.bert import BertModel, BertPreTrainedModel
from bertscope.model.outputs import (
    BertForPreTrainingOutput,
    CausalLMOutputWithCrossAttentions,
    MaskedLMOutput,
    ModelOutput,
    MultipleChoiceModelOutput,
    NextSentencePredictorOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

Flag = bool | None


class BertPredictionHeadTransform(nn.Module):
    """Dense, activation, LayerNorm: the hidden state made ready for the vocabulary."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.transform_act_fn = activation(config.hidden_act)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, H)."""
        return self.LayerNorm(self.transform_act_fn(self.dense(hidden_states)))


class BertLMPredictionHead(nn.Module):
    """Scores over the vocabulary; the decoder's weight is the word embeddings', its bias is held here too."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.tie_bias()

    def tie_bias(self) -> None:
        """The checkpoints hold the bias under both names; it is one parameter."""
        self.decoder.bias = self.bias

    def _apply(self, fn: Any, recurse: bool = True) -> BertLMPredictionHead:
        super()._apply(fn, recurse)
        self.tie_bias()
        return self

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, V)."""
        return self.decoder(self.transform(hidden_states))


class BertOnlyMLMHead(nn.Module):
    """The head of masked and of causal language modelling."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)

    def forward(self, sequence_output: Tensor) -> Tensor:
        """(B, S, H) -> (B, S, V)."""
        return self.predictions(sequence_output)


class BertOnlyNSPHead(nn.Module):
    """The head of next sentence prediction."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def forward(self, pooled_output: Tensor) -> Tensor:
        """(B, H) -> (B, 2)."""
        return self.seq_relationship(pooled_output)


class BertPreTrainingHeads(nn.Module):
    """Both heads of the original pre-training."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def forward(self, sequence_output: Tensor, pooled_output: Tensor) -> tuple[Tensor, Tensor]:
        """(B, S, H) and (B, H) -> (B, S, V) and (B, 2)."""
        return self.predictions(sequence_output), self.seq_relationship(pooled_output)


class _WithHead(BertPreTrainedModel):
    """What the classes below share: a body, and how an output becomes a tuple when one is asked for."""

    add_pooling_layer = False

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=self.add_pooling_layer)

    def _returned(self, output: ModelOutput, return_dict: Flag) -> Any:
        wants_object = self.config.return_dict if return_dict is None else return_dict
        return output if wants_object else output.to_tuple()


class _WithLMHead(_WithHead):
    """A class with a language modelling head under `cls.predictions`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.cls = BertOnlyMLMHead(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """The decoder."""
        return self.cls.predictions.decoder


class BertForPreTraining(_WithHead):
    """Masked language modelling and next sentence prediction, as BERT was first trained."""

    add_pooling_layer = True

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.cls = BertPreTrainingHeads(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """The decoder."""
        return self.cls.predictions.decoder

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        next_sentence_label: Tensor | None = None,
        output_attentions: Flag = None,
        output_hidden_states: Flag = None,
        return_dict: Flag = None,
    ) -> BertForPreTrainingOutput | tuple[Any, ...]:
        """Prediction logits (B, S, V) and sentence logits (B, 2); the loss needs both labels."""
        body = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, head_mask, inputs_embeds,
            output_attentions=output_attentions, output_hidden_states=output_hidden_states, return_dict=True,
        )  # fmt: skip
        scores, relationship = self.cls(body.last_hidden_state, body.pooler_output)
        loss = None
        if labels is not None and next_sentence_label is not None:
            loss = _token_loss(scores, labels) + _token_loss(relationship, next_sentence_label)
        output = BertForPreTrainingOutput(loss, scores, relationship, body.hidden_states, body.attentions)
        return self._returned(output, return_dict)


class BertForMaskedLM(_WithLMHead):
    """Masked language modelling."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: Flag = None,
        output_hidden_states: Flag = None,
        return_dict: Flag = None,
    ) -> MaskedLMOutput | tuple[Any, ...]:
        """Logits (B, S, V); labels (B, S), -100 where no loss is wanted."""
        body = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, head_mask, inputs_embeds,
            encoder_hidden_states, encoder_attention_mask,
            output_attentions=output_attentions, output_hidden_states=output_hidden_states, return_dict=True,
        )  # fmt: skip
        logits = self.cls(body.last_hidden_state)
        loss = _token_loss(logits, labels) if labels is not None else None
        return self._returned(MaskedLMOutput(loss, logits, body.hidden_states, body.attentions), return_dict)


class BertLMHeadModel(_WithLMHead):
    """Causal language modelling: the next token from those before it."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: tuple[tuple[Tensor, ...], ...] | None = None,
        use_cache: Flag = None,
        output_attentions: Flag = None,
        output_hidden_states: Flag = None,
        return_dict: Flag = None,
    ) -> CausalLMOutputWithCrossAttentions | tuple[Any, ...]:
        """Logits (B, S, V); labels (B, S) are the inputs themselves, shifted here by one."""
        body = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, head_mask, inputs_embeds,
            encoder_hidden_states, encoder_attention_mask, past_key_values,
            use_cache=False if labels is not None else use_cache,
            output_attentions=output_attentions, output_hidden_states=output_hidden_states, return_dict=True,
        )  # fmt: skip
        logits = self.cls(body.last_hidden_state)
        loss = _token_loss(logits[:, :-1], labels[:, 1:]) if labels is not None else None
        output = CausalLMOutputWithCrossAttentions(
            loss, logits, body.past_key_values, body.hidden_states, body.attentions, body.cross_attentions
        )
        return self._returned(output, return_dict)


class BertForNextSentencePrediction(_WithHead):
    """Does the second sentence follow the first?"""

    add_pooling_layer = True

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.cls = BertOnlyNSPHead(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: Flag = None,
        output_hidden_states: Flag = None,
        return_dict: Flag = None,
    ) -> NextSentencePredictorOutput | tuple[Any, ...]:
        """Logits (B, 2); labels (B,), 0 for a continuation and 1 for a random sentence."""
        body = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, head_mask, inputs_embeds,
            output_attentions=output_attentions, output_hidden_states=output_hidden_states, return_dict=True,
        )  # fmt: skip
        logits = self.cls(body.pooler_output)
        loss = _token_loss(logits, labels) if labels is not None else None
        output = NextSentencePredictorOutput(loss, logits, body.hidden_states, body.attentions)
        return self._returned(output, return_dict)


class _WithClassifier(_WithHead):
    """A class with dropout and one linear layer under `classifier`."""

    def __init__(self, config: BertConfig, num_outputs: int | None = None) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(rate)
        self.classifier = nn.Linear(config.hidden_size, num_outputs or config.num_labels)
        self.post_init()


class BertForSequenceClassification(_WithClassifier):
    """One or several labels, or a number, for the whole sequence."""

    add_pooling_layer = True

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: Flag = None,
        output_hidden_states: Flag = None,
        return_dict: Flag = None,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """Logits (B, L); labels (B,) or (B, L), by `problem_type`."""
        body = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, head_mask, inputs_embeds,
            output_attentions=output_attentions, output_hidden_states=output_hidden_states, return_dict=True,
        )  # fmt: skip
        logits = self.classifier(self.dropout(body.pooler_output))
        loss = self._loss(logits, labels) if labels is not None else None
        return self._returned(SequenceClassifierOutput(loss, logits, body.hidden_states, body.attentions), return_dict)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        problem = self.config.problem_type or self._problem_of(labels)
        if problem == "regression":
            return functional.mse_loss(logits.squeeze(), labels.squeeze())
        if problem == "single_label_classification":
            return _token_loss(logits, labels)
        return functional.binary_cross_entropy_with_logits(logits, labels)

    def _problem_of(self, labels: Tensor) -> str:
        """Without a `problem_type`: one label is a regression, integers one class each, floats several."""
        if self.num_labels == 1:
            return "regression"
        is_integer = labels.dtype in (torch.long, torch.int)
        return "single_label_classification" if is_integer else "multi_label_classification"


class BertForMultipleChoice(_WithClassifier):
    """Which of several continuations is right: one score each."""

    add_pooling_layer = True

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config, num_outputs=1)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: Flag = None,
        output_hidden_states: Flag = None,
        return_dict: Flag = None,
    ) -> MultipleChoiceModelOutput | tuple[Any, ...]:
        """Inputs (B, C, S) -> logits (B, C); labels (B,) are indices of choices."""
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise ValueError("give either input_ids or inputs_embeds; neither was given")
        choices = given.shape[1]
        flat = [
            None if tensor is None else tensor.flatten(0, 1)
            for tensor in (input_ids, attention_mask, token_type_ids, position_ids)
        ]
        embeds = None if inputs_embeds is None else inputs_embeds.flatten(0, 1)
        body = self.bert(
            *flat, head_mask, embeds,
            output_attentions=output_attentions, output_hidden_states=output_hidden_states, return_dict=True,
        )  # fmt: skip
        logits = self.classifier(self.dropout(body.pooler_output)).view(-1, choices)
        loss = functional.cross_entropy(logits, labels) if labels is not None else None
        return self._returned(MultipleChoiceModelOutput(loss, logits, body.hidden_states, body.attentions), return_dict)


class BertForTokenClassification(_WithClassifier):
    """A label for every token."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: Flag = None,
        output_hidden_states: Flag = None,
        return_dict: Flag = None,
    ) -> TokenClassifierOutput | tuple[Any, ...]:
        """Logits (B, S, L); labels (B, S)."""
        body = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, head_mask, inputs_embeds,
            output_attentions=output_attentions, output_hidden_states=output_hidden_states, return_dict=True,
        )  # fmt: skip
        logits = self.classifier(self.dropout(body.last_hidden_state))
        loss = _token_loss(logits, labels) if labels is not None else None
        return self._returned(TokenClassifierOutput(loss, logits, body.hidden_states, body.attentions), return_dict)


class BertForQuestionAnswering(_WithHead):
    """The start and the end of the answer in the text."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.qa_outputs = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        head_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_attentions: Flag = None,
        output_hidden_states: Flag = None,
        return_dict: Flag = None,
    ) -> QuestionAnsweringModelOutput | tuple[Any, ...]:
        """Start and end logits (B, S) each; positions (B,), ignored where beyond the sequence."""
        body = self.bert(
            input_ids, attention_mask, token_type_ids, position_ids, head_mask, inputs_embeds,
            output_attentions=output_attentions, output_hidden_states=output_hidden_states, return_dict=True,
        )  # fmt: skip
        start, end = (
            part.squeeze(-1).contiguous() for part in self.qa_outputs(body.last_hidden_state).split(1, dim=-1)
        )
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = (_position_loss(start, start_positions) + _position_loss(end, end_positions)) / 2
        output = QuestionAnsweringModelOutput(loss, start, end, body.hidden_states, body.attentions)
        return self._returned(output, return_dict)


def _token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy over the last dimension, -100 ignored."""
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def _position_loss(logits: Tensor, positions: Tensor) -> Tensor:
    """Cross-entropy over the sequence (B, S); a position outside it counts for nothing."""
    length = logits.shape[1]
    positions = positions.squeeze(-1) if positions.dim() > 1 else positions
    return functional.cross_entropy(logits, positions.clamp(0, length), ignore_index=length)
