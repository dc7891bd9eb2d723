"""The heads, each with its loss: of pre-training and language modelling, then those of tasks.

Letters in the shapes: B batch, S sequence length, H hidden size, V vocabulary, L labels, C choices.
Every forward takes BertModel's inputs under BertModel's names and, with labels, returns the loss first.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertscope.config import HEADS, BertConfig, unknown_architecture
from bertscope.errors import ConfigError, typed_arguments
from bertscope.model import encoder as outputs
from bertscope.model.bert import BertModel, BertPreTrainedModel, Cache
from bertscope.model.encoder import ModelOutput, activation
from bertscope.torch_access import on_device

Flag = bool | None
Output = TypeVar("Output", bound=ModelOutput)
OptionalTensor = Tensor | None


class BertPredictionHeadTransform(nn.Module):
    """Dense, activation, LayerNorm: the decoder's input."""

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
        rest = {name: getattr(body, name) for name in names}
        if not (self.config.return_dict if return_dict is None else return_dict):
            return tuple(value for value in (loss, *logits, *rest.values()) if value is not None)
        make: Callable[..., Output] = kind
        return make(loss, *logits, **{name: rest[name] for name in names if name in kind.__dataclass_fields__})


class _WithLMHead(WithHead):
    head: type[BertOnlyMLMHead | BertPreTrainingHeads] = BertOnlyMLMHead

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.cls = self.head(config)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
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
    ) -> outputs.BertForPreTrainingOutput | tuple[Any, ...]:  # fmt: skip
        """Return prediction logits (B, S, V) and sentence logits (B, 2), and with both labels the loss."""
        inputs = input_ids, attention_mask, token_type_ids, position_ids, head_mask, inputs_embeds
        body = self._body(*inputs, output_attentions=output_attentions, output_hidden_states=output_hidden_states)
        scores, relationship = self.cls(body.last_hidden_state, body.pooler_output)
        loss = None
        if labels is not None and next_sentence_label is not None:
            loss = token_loss(scores, labels) + token_loss(relationship, next_sentence_label)
        return self._returned(body, return_dict, outputs.BertForPreTrainingOutput, loss, scores, relationship)


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
    ) -> outputs.MaskedLMOutput | tuple[Any, ...]:  # fmt: skip
        """Return logits (B, S, V), and with labels (B, S) the loss; a label of -100 is ignored."""
        inputs = input_ids, attention_mask, token_type_ids, position_ids, head_mask, inputs_embeds
        wants = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
        body = self._body(*inputs, encoder_hidden_states, encoder_attention_mask, **wants)
        logits = self.cls(body.last_hidden_state)
        loss = token_loss(logits, labels) if labels is not None else None
        return self._returned(body, return_dict, outputs.MaskedLMOutput, loss, logits)


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
    ) -> outputs.CausalLMOutputWithCrossAttentions | tuple[Any, ...]:  # fmt: skip
        """Return logits (B, S, V), and with labels (B, S) the loss; labels are the input ids, shifted here by one."""
        inputs = input_ids, attention_mask, token_type_ids, position_ids, head_mask, inputs_embeds
        states = encoder_hidden_states, encoder_attention_mask, past_key_values
        wants = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
        body = self._body(*inputs, *states, use_cache=False if labels is not None else use_cache, **wants)
        logits = self.cls(body.last_hidden_state)
        loss = token_loss(logits[:, :-1], labels[:, 1:]) if labels is not None else None
        return self._returned(body, return_dict, outputs.CausalLMOutputWithCrossAttentions, loss, logits)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy over the last dimension, without labels of -100."""
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


# ---- tasks ----


class _WithLabels(WithHead):
    output: type[outputs.LossAndLogits]
    has_choices = False  # inputs are (B, C, S), and the classifier has one output for each

    def forward(
        self, input_ids: OptionalTensor = None, attention_mask: OptionalTensor = None,
        token_type_ids: OptionalTensor = None, position_ids: OptionalTensor = None, head_mask: OptionalTensor = None,
        inputs_embeds: OptionalTensor = None, labels: OptionalTensor = None, output_attentions: Flag = None,
        output_hidden_states: Flag = None, return_dict: Flag = None,
    ) -> outputs.LossAndLogits | tuple[Any, ...]:  # fmt: skip
        """Return the logits of the class, and with labels the loss."""
        ids, mask, types, positions, embeds = (
            tensor.flatten(0, 1) if self.has_choices and tensor is not None and tensor.dim() > 2 else tensor
            for tensor in (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        )
        wants = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
        body = self._body(ids, mask, types, positions, head_mask, embeds, **wants)
        logits, _hidden = self.classify(body)  # `_hidden` exists until the loss is computed, as in transformers
        if self.has_choices:
            inputs: Any = input_ids if input_ids is not None else inputs_embeds
            logits = logits.view(-1, inputs.shape[1])
        loss = self.loss(logits, labels) if labels is not None else None
        return self._returned(body, return_dict, self.output, loss, logits)

    def classify(self, body: Any) -> tuple[Tensor, Tensor]:
        """Return the logits of BertModel's output, and what they are computed from."""
        raise NotImplementedError

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the logits' loss."""
        return token_loss(logits, labels)


class BertForNextSentencePrediction(_WithLabels):
    """Classification of sentence pairs: the second sentence follows the first (0), or is a random one (1).

    logits (B, 2), labels (B,)

    >>> model = bertscope.BertForNextSentencePrediction(bertscope.load("bert-tiny").config)
    >>> tuple(model(torch.zeros(2, 16, dtype=torch.long)).logits.shape)
    (2, 2)
    """

    add_pooling_layer = True
    output = outputs.NextSentencePredictorOutput

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.cls = BertOnlyNSPHead(config)
        self.post_init()

    def classify(self, body: Any) -> tuple[Tensor, Tensor]:
        return self.cls(body.pooler_output), body.pooler_output


class _WithClassifier(_WithLabels):
    add_pooling_layer = True
    features = "pooler_output"  # the output of BertModel that is classified

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        rate = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(rate)
        self.classifier = nn.Linear(config.hidden_size, 1 if self.has_choices else config.num_labels)
        self.post_init()

    def classify(self, body: Any) -> tuple[Tensor, Tensor]:
        hidden = self.dropout(getattr(body, self.features))
        return self.classifier(hidden), hidden


class BertForSequenceClassification(_WithClassifier):
    """One or several labels, or a number, for the sequence.

    logits (B, L), labels (B,) or (B, L), by `problem_type`

    >>> model = bertscope.BertForSequenceClassification(bertscope.load("bert-tiny").config)
    >>> tuple(model(torch.zeros(2, 16, dtype=torch.long)).logits.shape)
    (2, 2)
    """

    output = outputs.SequenceClassifierOutput

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of logits (B, L) by `problem_type`, by default as transformers finds it out by the labels."""
        is_integer = labels.dtype in (torch.long, torch.int)
        default = "single_label_classification" if is_integer else "multi_label_classification"
        problem = self.config.problem_type or ("regression" if logits.shape[-1] == 1 else default)
        if problem == "regression":
            if logits.shape[-1] == 1:
                logits, labels = logits.squeeze(), labels.squeeze()
            return functional.mse_loss(logits, labels)
        if problem == "single_label_classification":
            return token_loss(logits, labels)
        return functional.binary_cross_entropy_with_logits(logits, labels)


class BertForMultipleChoice(_WithClassifier):
    """One score for each of several continuations.

    inputs (B, C, S), logits (B, C), labels (B,), the indices of choices

    >>> model = bertscope.BertForMultipleChoice(bertscope.load("bert-tiny").config)
    >>> tuple(model(torch.zeros(2, 4, 16, dtype=torch.long)).logits.shape)  # a question with four answers
    (2, 4)
    """

    output = outputs.MultipleChoiceModelOutput
    has_choices = True

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(logits, labels)


class BertForTokenClassification(_WithClassifier):
    """A label for every token.

    logits (B, S, L), labels (B, S)

    >>> model = bertscope.BertForTokenClassification(bertscope.load("bert-tiny").config)
    >>> tuple(model(torch.zeros(2, 16, dtype=torch.long)).logits.shape)
    (2, 16, 2)
    """

    add_pooling_layer = False
    output = outputs.TokenClassifierOutput
    features = "last_hidden_state"


class BertForQuestionAnswering(WithHead):
    """The start and the end of an answer in the text.

    >>> model = bertscope.BertForQuestionAnswering(bertscope.load("bert-tiny").config)
    >>> tuple(model(torch.zeros(2, 16, dtype=torch.long)).start_logits.shape)
    (2, 16)
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.qa_outputs = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(
        self, input_ids: OptionalTensor = None, attention_mask: OptionalTensor = None,
        token_type_ids: OptionalTensor = None, position_ids: OptionalTensor = None, head_mask: OptionalTensor = None,
        inputs_embeds: OptionalTensor = None, start_positions: OptionalTensor = None,
        end_positions: OptionalTensor = None, output_attentions: Flag = None, output_hidden_states: Flag = None,
        return_dict: Flag = None,
    ) -> outputs.QuestionAnsweringModelOutput | tuple[Any, ...]:  # fmt: skip
        """Return start and end logits (B, S), and with positions (B,) a loss; a position beyond the end is ignored."""
        inputs = input_ids, attention_mask, token_type_ids, position_ids, head_mask, inputs_embeds
        body = self._body(*inputs, output_attentions=output_attentions, output_hidden_states=output_hidden_states)
        logits = self.qa_outputs(body.last_hidden_state)
        if self.num_labels != 2:
            raise ConfigError(
                f"question answering has two labels, start and end; num_labels is {self.num_labels}", field="num_labels"
            )
        first, second = logits.split(1, dim=-1)
        start, end = first.squeeze(-1).contiguous(), second.squeeze(-1).contiguous()
        loss = None
        if start_positions is not None and end_positions is not None:
            starts, ends = _clamped(start_positions, start), _clamped(end_positions, end)
            beyond = start.shape[1]  # the position that is ignored, as in transformers
            of_start = functional.cross_entropy(start, starts, ignore_index=beyond)
            of_end = functional.cross_entropy(end, ends, ignore_index=beyond)  # lives to the end, as there
            loss = (of_start + of_end) / 2
        return self._returned(body, return_dict, outputs.QuestionAnsweringModelOutput, loss, start, end)


def _clamped(positions: Tensor, logits: Tensor) -> Tensor:
    positions = positions.squeeze(-1) if positions.dim() > 1 else positions
    return positions.clamp(0, logits.shape[1])


CLASSES: dict[str, type[BertPreTrainedModel]] = {name: globals()[name] for name in HEADS}


@typed_arguments
def build(
    config: BertConfig,
    architecture: str = "BertModel",
    *,
    add_pooling_layer: bool = True,
    device: str | torch.device = "meta",
) -> BertPreTrainedModel:
    """Build the model of `architecture` on `device`; on meta this needs no memory for weights.

    `add_pooling_layer` applies only to BertModel. Raises ConfigError for an unknown architecture.

    >>> model = bertscope.build(bertscope.BertConfig(num_hidden_layers=1), "BertForMaskedLM")
    >>> model.bert.embeddings.word_embeddings.weight.device
    device(type='meta')
    """
    if architecture not in CLASSES:
        raise unknown_architecture(architecture)
    with on_device(device):
        if architecture == "BertModel":
            return BertModel(config, add_pooling_layer=add_pooling_layer)
        return CLASSES[architecture](config)
