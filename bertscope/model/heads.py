"""The heads of pre-training and language modelling, each with its loss.

Letters in the shapes: B batch, S sequence length, H hidden size, V vocabulary.
Every forward takes BertModel's inputs under BertModel's names and, with labels, returns the loss first.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import wrap
from torch.nn import functional

from bertscope.config import BertConfig
from bertscope.model.activations import activation
from bertscope.model.bert import BertModel
from bertscope.model.inputs import Cache
from bertscope.model.outputs import (
    BertForPreTrainingOutput,
    CausalLMOutputWithCrossAttentions,
    MaskedLMOutput,
    ModelOutput,
)
from bertscope.model.pretrained import BertPreTrainedModel

Flag = bool | None
Output = TypeVar("Output", bound=ModelOutput)
OptionalTensor = Tensor | None


class BertPredictionHeadTransform(nn.Module):
    """Dense, activation, LayerNorm: the input of the decoder."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.transform_act_fn = activation(config.hidden_act)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map (B, S, H) to (B, S, H)."""
        normed: Tensor = self.LayerNorm(self.transform_act_fn(self.dense(hidden_states)))
        return normed


class BertLMPredictionHead(nn.Module):
    """Scores over the vocabulary; the decoder's weight is that of the word embeddings, its bias is also `bias`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.transform = BertPredictionHeadTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.tie_bias()

    def tie_bias(self) -> None:
        """Make `bias` and `decoder.bias` one parameter; checkpoints have both names."""
        self.decoder.bias = self.bias

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map (B, S, H) to (B, S, V)."""
        scores: Tensor = self.decoder(self.transform(hidden_states))
        return scores


class BertOnlyMLMHead(nn.Module):
    """The head of masked and of causal language modelling."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)

    def forward(self, sequence_output: Tensor) -> Tensor:
        """Map (B, S, H) to (B, S, V)."""
        scores: Tensor = self.predictions(sequence_output)
        return scores


class BertOnlyNSPHead(nn.Module):
    """The head of next sentence prediction."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def forward(self, pooled_output: Tensor) -> Tensor:
        """Map (B, H) to (B, 2)."""
        scores: Tensor = self.seq_relationship(pooled_output)
        return scores


class BertPreTrainingHeads(nn.Module):
    """Both heads of the original pre-training."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2)

    def forward(self, sequence_output: Tensor, pooled_output: Tensor) -> tuple[Tensor, Tensor]:
        """Map (B, S, H) and (B, H) to (B, S, V) and (B, 2)."""
        return self.predictions(sequence_output), self.seq_relationship(pooled_output)


class WithHead(BertPreTrainedModel):
    """The base of the classes below: a BertModel, and the conversion of outputs to tuples."""

    add_pooling_layer = False

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=self.add_pooling_layer)

    def _body(self, *inputs: Any, **named: Any) -> Any:
        return self.bert(*inputs, **named, return_dict=True)

    def _returned(
        self, body: Any, return_dict: Flag, kind: type[Output], loss: Tensor | None, *logits: Tensor
    ) -> Output | tuple[Any, ...]:
        """Return an object of `kind`, or a tuple: loss, logits, then the other outputs of BertModel in their order."""
        names = ("past_key_values", "hidden_states", "attentions", "cross_attentions")
        others = {name: getattr(body, name) for name in names}
        if not (self.config.return_dict if return_dict is None else return_dict):
            return tuple(value for value in (loss, *logits, *others.values()) if value is not None)
        make: Callable[..., Output] = kind
        return make(loss, *logits, **{name: others[name] for name in names if name in kind.__dataclass_fields__})


class _WithLMHead(WithHead):
    """A class with a language modelling head under `cls.predictions`."""

    head: type[BertOnlyMLMHead | BertPreTrainingHeads] = BertOnlyMLMHead

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.cls = self.head(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """Return the decoder."""
        return self.cls.predictions.decoder


class BertForPreTraining(_WithLMHead):
    """Masked language modelling and next sentence prediction, the original pre-training of BERT.

    >>> model = bertscope.BertForPreTraining(bertscope.load("bert-tiny").config)
    >>> tuple(model(torch.zeros(2, 16, dtype=torch.long)).prediction_logits.shape)
    (2, 16, 30522)
    """

    add_pooling_layer = True
    head = BertPreTrainingHeads

    def forward(
        self, input_ids: OptionalTensor = None, attention_mask: OptionalTensor = None,
        token_type_ids: OptionalTensor = None, position_ids: OptionalTensor = None, head_mask: OptionalTensor = None,
        inputs_embeds: OptionalTensor = None, labels: OptionalTensor = None, next_sentence_label: OptionalTensor = None,
        output_attentions: Flag = None, output_hidden_states: Flag = None, return_dict: Flag = None,
    ) -> BertForPreTrainingOutput | tuple[Any, ...]:  # fmt: skip
        """Return prediction logits (B, S, V) and sentence logits (B, 2), and with both labels the loss."""
        body = self._body(
            input_ids, attention_mask, token_type_ids, position_ids, head_mask, inputs_embeds,
            output_attentions=output_attentions, output_hidden_states=output_hidden_states,
        )  # fmt: skip
        scores, relationship = self.cls(body.last_hidden_state, body.pooler_output)
        loss = None
        if labels is not None and next_sentence_label is not None:
            loss = token_loss(scores, labels) + token_loss(relationship, next_sentence_label)
        return self._returned(body, return_dict, BertForPreTrainingOutput, loss, scores, relationship)


class BertForMaskedLM(_WithLMHead):
    """Masked language modelling.

    >>> model = bertscope.BertForMaskedLM(bertscope.load("bert-tiny").config)
    >>> tuple(model(torch.zeros(2, 16, dtype=torch.long)).logits.shape)
    (2, 16, 30522)
    """

    def forward(
        self, input_ids: OptionalTensor = None, attention_mask: OptionalTensor = None,
        token_type_ids: OptionalTensor = None, position_ids: OptionalTensor = None, head_mask: OptionalTensor = None,
        inputs_embeds: OptionalTensor = None, encoder_hidden_states: OptionalTensor = None,
        encoder_attention_mask: OptionalTensor = None, labels: OptionalTensor = None, output_attentions: Flag = None,
        output_hidden_states: Flag = None, return_dict: Flag = None,
    ) -> MaskedLMOutput | tuple[Any, ...]:  # fmt: skip
        """Return logits (B, S, V), and with labels (B, S) the loss; a label of -100 is ignored."""
        body = self._body(
            input_ids, attention_mask, token_type_ids, position_ids, head_mask, inputs_embeds,
            encoder_hidden_states, encoder_attention_mask,
            output_attentions=output_attentions, output_hidden_states=output_hidden_states,
        )  # fmt: skip
        logits = self.cls(body.last_hidden_state)
        loss = token_loss(logits, labels) if labels is not None else None
        return self._returned(body, return_dict, MaskedLMOutput, loss, logits)


class BertLMHeadModel(_WithLMHead):
    """Causal language modelling: the next token from those before it.

    >>> model = bertscope.BertLMHeadModel(bertscope.load("bert-tiny").config)
    >>> tuple(model(torch.zeros(2, 16, dtype=torch.long)).logits.shape)
    (2, 16, 30522)
    """

    def forward(
        self, input_ids: OptionalTensor = None, attention_mask: OptionalTensor = None,
        token_type_ids: OptionalTensor = None, position_ids: OptionalTensor = None, head_mask: OptionalTensor = None,
        inputs_embeds: OptionalTensor = None, encoder_hidden_states: OptionalTensor = None,
        encoder_attention_mask: OptionalTensor = None, labels: OptionalTensor = None,
        past_key_values: Cache | None = None, use_cache: Flag = None, output_attentions: Flag = None,
        output_hidden_states: Flag = None, return_dict: Flag = None,
    ) -> CausalLMOutputWithCrossAttentions | tuple[Any, ...]:  # fmt: skip
        """Return logits (B, S, V), and with labels (B, S) the loss; labels are the input ids, shifted here by one."""
        body = self._body(
            input_ids, attention_mask, token_type_ids, position_ids, head_mask, inputs_embeds,
            encoder_hidden_states, encoder_attention_mask, past_key_values,
            use_cache=False if labels is not None else use_cache,
            output_attentions=output_attentions, output_hidden_states=output_hidden_states,
        )  # fmt: skip
        logits = self.cls(body.last_hidden_state)
        loss = token_loss(logits[:, :-1], labels[:, 1:]) if labels is not None else None
        return self._returned(body, return_dict, CausalLMOutputWithCrossAttentions, loss, logits)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy over the last dimension, without labels of -100; raise ValueError for other shapes."""
    _check_labels(logits, labels)
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


@wrap
def _check_labels(logits: Tensor, labels: Tensor) -> None:
    if labels.numel() * logits.shape[-1] != logits.numel():
        raise ValueError(f"labels has shape {tuple(labels.shape)} and the logits {tuple(logits.shape)}")
