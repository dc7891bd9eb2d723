"""The models' outputs, activations, embeddings, the transformer layer, the stack of layers, and the pooler.

Letters in the shapes: B batch, S sequence length, T key length, N heads, D head size, H hidden size, I intermediate
size, V vocabulary, C choices.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bertscope.config import BertConfig, check_built
from bertscope.model.attention import BertAttention, KeyValue, _ResidualOutput, say_once
from bertscope.model.modules import selective_contexts
from bertscope.model.save_policy import save_contexts
from bertscope.settings.checkpointing import Checkpointing
from bertscope.torch_access import index_row

Tensors = tuple[Tensor, ...]


@dataclass(eq=False)
class ModelOutput(Mapping[str, Any]):
    """The base of all outputs: a mapping as in transformers. A field that is None has no index and no key.

    `output.logits`, `output["logits"]` and `output[0]` are the same tensor; iteration yields the keys. A class takes
    its fields, or one mapping of them: `accelerate` and others convert mappings by `type(output)({name: value})`.
    """

    def __post_init__(self) -> None:
        first, *rest = dataclasses.fields(self)
        values = getattr(self, first.name)
        if isinstance(values, Mapping):
            for item in (first, *rest):
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


class MaskedLMOutput(LossAndLogits):
    """The output of BertForMaskedLM; logits (B, S, V)."""


class NextSentencePredictorOutput(LossAndLogits):
    """The output of BertForNextSentencePrediction; logits (B, 2)."""


class SequenceClassifierOutput(LossAndLogits):
    """The output of BertForSequenceClassification; logits (B, num_labels)."""


class MultipleChoiceModelOutput(LossAndLogits):
    """The output of BertForMultipleChoice; logits (B, C)."""


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


class GELUActivation(nn.Module):
    """The exact GELU, x * Phi(x). Source: Hendrycks and Gimpel 2016, arXiv:1606.08415."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a tensor of the same shape, any shape."""
        return functional.gelu(hidden)


class NewGELUActivation(nn.Module):
    """The tanh form of GELU, step by step, as google-research/bert and GPT-2 compute it."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a tensor of the same shape, any shape."""
        inner = math.sqrt(2.0 / math.pi) * (hidden + 0.044715 * torch.pow(hidden, 3.0))
        return 0.5 * hidden * (1.0 + torch.tanh(inner))


class FastGELUActivation(nn.Module):
    """The tanh form of GELU with its constant rounded to 0.79788456."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a tensor of the same shape, any shape."""
        return 0.5 * hidden * (1.0 + torch.tanh(hidden * 0.7978845608 * (1.0 + 0.044715 * hidden * hidden)))


class PythonGELUActivation(nn.Module):
    """The exact GELU written with erf, which keeps its intermediate tensors."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a tensor of the same shape, any shape."""
        return hidden * 0.5 * (1.0 + torch.erf(hidden / math.sqrt(2.0)))


class PytorchGELUTanh(nn.Module):
    """The tanh form of GELU in torch's fused kernel."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a tensor of the same shape, any shape."""
        return functional.gelu(hidden, approximate="tanh")


class QuickGELUActivation(nn.Module):
    """GELU approximated by x * sigmoid(1.702 x)."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a tensor of the same shape, any shape."""
        return hidden * torch.sigmoid(1.702 * hidden)


_CLASSES: dict[str, type[nn.Module]] = {
    "gelu": GELUActivation,
    "gelu_fast": FastGELUActivation,
    "gelu_new": NewGELUActivation,
    "gelu_python": PythonGELUActivation,
    "gelu_pytorch_tanh": PytorchGELUTanh,
    "leaky_relu": nn.LeakyReLU,
    "linear": nn.Identity,
    "mish": nn.Mish,
    "quick_gelu": QuickGELUActivation,
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
}


def activation(hidden_act: str | Callable[..., Any]) -> Callable[..., Any]:
    """Return the activation for a name that the configuration has checked; return a callable unchanged."""
    return hidden_act if callable(hidden_act) else _CLASSES[hidden_act]()


LAYERS = "encoder.layer"  # the path of the layers in a BertModel


def recomputed(layer: nn.Module, how: Checkpointing, saved: Collection[str]) -> Callable[..., Any]:
    """Return the layer as a function that saves only its inputs for backward; dropout repeats its masks."""
    options: dict[str, Any] = {"context_fn": selective_contexts} if how.selective else {}
    if how.saved:
        options = {"context_fn": partial(save_contexts, saved)}
    return partial(checkpoint, layer, use_reentrant=how.use_reentrant, **options)


class BertEmbeddings(nn.Module):
    """The sum of token, position and token type embeddings, then LayerNorm and dropout."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        # In capitals, as in the TensorFlow variable and therefore in the checkpoints' keys.
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.position_embedding_type = config.position_embedding_type
        self.position_ids: Tensor
        self.token_type_ids: Tensor
        positions = config.max_position_embeddings
        self.register_buffer("position_ids", index_row(positions, counting=True), persistent=False)
        self.register_buffer("token_type_ids", index_row(positions, counting=False), persistent=False)
        self.register_load_state_dict_post_hook(_leave_meta)  # type: ignore[no-untyped-call]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BertEmbeddings:
        """Apply `fn` as torch does; compute the buffers anew when the model leaves meta, since no file has them."""
        was_meta = self.position_ids.is_meta
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if was_meta and not self.position_ids.is_meta:
            self.reset_buffers()
        return self

    def reset_buffers(self) -> None:
        """Set position ids to 0, 1 ... and token type ids to zero, on the weights' device."""
        positions = self.position_embeddings.num_embeddings
        with torch.device(self.word_embeddings.weight.device):
            self.position_ids = index_row(positions, counting=True)
            self.token_type_ids = index_row(positions, counting=False)

    def forward(
        self,
        input_ids: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values_length: int = 0,
    ) -> Tensor:
        """Map ids (B, S) or embeddings (B, S, H) to (B, S, H); token type ids are 0 by default: one sentence."""
        if inputs_embeds is None:
            inputs_embeds = self.word_embeddings(input_ids)
        batch, length = inputs_embeds.shape[:2]
        end, most = past_key_values_length + length, self.position_embeddings.num_embeddings
        if end > most and (position_ids is None or self.position_embedding_type != "absolute"):
            raise ValueError(f"the sequence is {end} long and max_position_embeddings is {most}")
        if token_type_ids is None:
            token_type_ids = self.token_type_ids[:, :1].expand((batch, length))
        token_types = self.token_type_embeddings(token_type_ids)
        embeddings: Tensor = inputs_embeds + token_types
        if self.position_embedding_type == "absolute":
            if position_ids is None:
                position_ids = self.position_ids.narrow(1, past_key_values_length, length)
            positions = self.position_embeddings(position_ids)
            embeddings += positions
        embeddings = self.LayerNorm(embeddings)
        dropped: Tensor = self.dropout(embeddings)
        return dropped


def _leave_meta(embeddings: BertEmbeddings, keys: object) -> None:
    """Compute the buffers anew after weights were assigned to a model on meta."""
    if embeddings.position_ids.is_meta and not embeddings.word_embeddings.weight.is_meta:
        embeddings.reset_buffers()


class BertIntermediate(nn.Module):
    """The first half of the feed-forward: dense to the intermediate size, then the activation."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.intermediate_act_fn = activation(config.hidden_act)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map (B, S, H) to (B, S, I)."""
        activated: Tensor = self.intermediate_act_fn(self.dense(hidden_states))
        return activated


class BertOutput(_ResidualOutput):
    """The second half of the feed-forward: back to the hidden size."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config, config.intermediate_size)


class BertLayer(nn.Module):
    """One transformer layer: attention, in a decoder cross-attention, then feed-forward."""

    def __init__(self, config: BertConfig, pruned_heads: Collection[int] = ()) -> None:
        super().__init__()
        self.chunk_size_feed_forward = config.chunk_size_feed_forward
        self.seq_len_dim = 1
        self.attention = BertAttention(config, pruned_heads=pruned_heads)
        self.is_decoder = config.is_decoder
        self.add_cross_attention = config.add_cross_attention
        if self.add_cross_attention:
            self.crossattention = BertAttention(config, position_embedding_type="absolute")
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_value: tuple[Tensor, ...] | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor | tuple[Tensor, ...], ...]:
        """Map (B, S, H) to (B, S, H); also return self- and cross-attention probabilities if asked, and the cache.

        The cache is (key, value), then (key, value) of the cross-attention if there is one.
        """
        past_self = past_key_value[:2] if past_key_value is not None else None
        hidden, *rest = self.attention(
            hidden_states, attention_mask, head_mask, past_key_value=past_self, output_attentions=output_attentions
        )
        cache: tuple[Tensor, ...] = rest.pop() if self.is_decoder else ()
        if self.is_decoder and encoder_hidden_states is not None:
            if not self.add_cross_attention:
                raise ValueError("encoder_hidden_states were given and this layer has no cross-attention")
            # A cache from a run without encoder states has two tensors, and none for the cross-attention.
            has_cross = past_key_value is not None and len(past_key_value) == 4
            past_cross: KeyValue | None = past_key_value[2:] if has_cross else None  # type: ignore[index, assignment]
            hidden, *cross = self.crossattention(
                hidden,
                attention_mask,
                head_mask,
                encoder_hidden_states,
                encoder_attention_mask,
                past_cross,
                output_attentions,
            )
            cache += cross.pop()
            rest += cross
        chunk, length = self.chunk_size_feed_forward, hidden.shape[self.seq_len_dim]
        if chunk and length % chunk:
            raise ValueError(f"the sequence length {length} is not divisible by chunk_size_feed_forward {chunk}")
        if chunk:  # for a lower peak
            pieces = [self.feed_forward_chunk(piece) for piece in hidden.split(chunk, dim=self.seq_len_dim)]
            hidden = torch.cat(pieces, dim=self.seq_len_dim)
        else:
            hidden = self.feed_forward_chunk(hidden)
        return (hidden, *rest, cache) if self.is_decoder else (hidden, *rest)

    def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
        """Map (B, S, H) to (B, S, H)."""
        output: Tensor = self.output(self.intermediate(attention_output), attention_output)
        return output


class BertEncoder(nn.Module):
    """The stack of layers."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        check_built(config.num_hidden_layers)
        pruned = config.pruned_heads
        layers = (BertLayer(config, pruned.get(layer, ())) for layer in range(config.num_hidden_layers))
        self.layer = nn.ModuleList(layers)
        self.gradient_checkpointing = False
        self.checkpointing = Checkpointing()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: tuple[tuple[Tensor, ...], ...] | None = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        return_dict: bool = True,
    ) -> BaseModelOutputWithPastAndCrossAttentions | tuple[Any, ...]:
        """Map (B, S, H) to (B, S, H) after the last layer; also return what the flags ask for.

        Masks are additive, as in BertSelfAttention; `head_mask` is (layers, 1, N, 1, 1).
        """
        recomputes = self.gradient_checkpointing and self.training
        if recomputes and use_cache:
            say_once("use_cache does not go with gradient checkpointing; the cache is switched off")
            use_cache = False
        is_reentrant = recomputes and self.checkpointing.use_reentrant and torch.is_grad_enabled()
        if is_reentrant and not hidden_states.requires_grad:  # as in transformers before 5
            say_once(
                "the input of the layers requires no gradient: reentrant checkpointing trains only what is above "
                "them; leave it out, or call model.enable_input_require_grads()"
            )
        hidden_of_layers, caches = [hidden_states], []
        attentions, cross_attentions = [], []
        saved = self.checkpointing.saved_in(LAYERS, len(self.layer)) if recomputes else [None] * len(self.layer)
        for index, (layer, operators) in enumerate(zip(self.layer, saved, strict=True)):
            run = layer if operators is None else recomputed(layer, self.checkpointing, operators)
            hidden_states, *rest = run(
                hidden_states,
                attention_mask,
                head_mask[index] if head_mask is not None else None,
                encoder_hidden_states,
                encoder_attention_mask,
                past_key_values[index] if past_key_values is not None else None,
                output_attentions,
            )
            if output_hidden_states:
                hidden_of_layers.append(hidden_states)
            if use_cache:
                caches.append(rest[-1])
            if output_attentions:
                attentions.append(rest[0])
                if encoder_hidden_states is not None and self.config.add_cross_attention:
                    cross_attentions.append(rest[1])
        output = BaseModelOutputWithPastAndCrossAttentions(
            last_hidden_state=hidden_states,
            past_key_values=tuple(caches) if use_cache else None,
            hidden_states=tuple(hidden_of_layers) if output_hidden_states else None,
            attentions=tuple(attentions) if output_attentions else None,
            cross_attentions=tuple(cross_attentions) if output_attentions and self.config.add_cross_attention else None,
        )
        return output if return_dict else output.to_tuple()


class BertPooler(nn.Module):
    """A dense layer and tanh on the first token: one vector for the sentence."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.Tanh()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Map (B, S, H) to (B, H)."""
        pooled: Tensor = self.activation(self.dense(hidden_states[:, 0]))
        return pooled
