"""Attention: the projections, two kernels (eager and sdpa), and the block with the output layer.

Letters in the shapes: B batch, S query length, T key length, N heads, D head size, H hidden = N * D.

A variable keeps its tensor until a function returns. Those that determine the peak live as long as in transformers.
"""

import math
import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bertscope.config import BertConfig
from bertscope.errors import BertscopeWarning

KeyValue = tuple[Tensor, Tensor]


class BertSelfAttention(nn.Module):
    """Multi-head attention of queries over keys and values; each step is a separate tensor.

    Source: Vaswani et al. 2017; relative positions: Shaw et al. 2018 (`relative_key`) and Huang et al.
    2020, method 4 (`relative_key_query`).
    """

    is_fused = False

    def __init__(self, config: BertConfig, position_embedding_type: str | None = None, pruned: int = 0) -> None:
        super().__init__()
        self.num_attention_heads = config.num_attention_heads - pruned
        self.attention_head_size = config.head_size
        self.all_head_size = self.num_attention_heads * self.attention_head_size

        self.query = nn.Linear(config.hidden_size, self.all_head_size)
        self.key = nn.Linear(config.hidden_size, self.all_head_size)
        self.value = nn.Linear(config.hidden_size, self.all_head_size)
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

        self.position_embedding_type = position_embedding_type or config.position_embedding_type
        if self.position_embedding_type != "absolute":
            self.max_position_embeddings = config.max_position_embeddings
            # One vector for each distance from -(max - 1) to max - 1.
            self.distance_embedding = nn.Embedding(2 * config.max_position_embeddings - 1, self.attention_head_size)
        self.is_decoder = config.is_decoder

    def split_heads(self, projected: Tensor) -> Tensor:
        """Split the heads: (B, S, H) -> (B, N, S, D). With tensor parallelism N is the number of heads of this rank."""
        batch, length, width = projected.shape
        size = self.attention_head_size
        return projected.view(batch, length, width // size, size).transpose(1, 2)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_value: KeyValue | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor | KeyValue, ...]:
        """Map (B, S, H) to (B, S, H); also return the probabilities (B, N, S, T) if asked, and a decoder's cache.

        Masks are additive and broadcast to (B, N, S, T): 0 to attend, a large negative number to ignore.
        """
        query = self.split_heads(self.query(hidden_states))  # (B, N, S, D)
        key, value = self._key_value(hidden_states, encoder_hidden_states, past_key_value)  # (B, N, T, D)
        if encoder_hidden_states is not None:
            attention_mask = encoder_attention_mask

        is_causal = self.is_decoder and encoder_hidden_states is None and past_key_value is None
        context, probabilities = self.attend(query, key, value, attention_mask, head_mask, is_causal, output_attentions)

        outputs: tuple[Tensor | KeyValue, ...] = (context,)
        if output_attentions and probabilities is not None:
            outputs += (probabilities,)
        return (*outputs, (key, value)) if self.is_decoder else outputs

    def merge_heads(self, context: Tensor) -> Tensor:
        """Merge the heads: (B, N, S, D) -> (B, S, H)."""
        batch, heads, length, size = context.shape
        return context.transpose(1, 2).reshape(batch, length, heads * size)

    def _key_value(self, hidden: Tensor, encoder_hidden: Tensor | None, past: KeyValue | None) -> KeyValue:
        if encoder_hidden is not None and past is not None:
            return past
        source = hidden if encoder_hidden is None else encoder_hidden
        key, value = self.split_heads(self.key(source)), self.split_heads(self.value(source))
        if encoder_hidden is None and past is not None:
            return torch.cat((past[0], key), dim=2), torch.cat((past[1], value), dim=2)
        return key, value

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        head_mask: Tensor | None,
        is_causal: bool,
        output_attentions: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the context (B, S, H) and probabilities (B, N, S, T), which the fused kernel does not have.

        `mask` includes the causal part. The fused kernel falls back to the separate steps for unsupported inputs.
        """
        if self.is_fused:
            obstacle = "a head mask" if head_mask is not None else "output_attentions" if output_attentions else ""
            if self.position_embedding_type != "absolute":
                obstacle = f"position_embedding_type {self.position_embedding_type}"
            if not obstacle:
                rate = self.dropout.p if self.training else 0.0
                context = functional.scaled_dot_product_attention(
                    query, key, value, attn_mask=mask, dropout_p=rate, is_causal=is_causal and mask is None
                )
                return self.merge_heads(context), None
            say_once(f"the sdpa kernel cannot serve {obstacle}; eager attention is used instead")
        scores = query @ key.transpose(-1, -2)  # (B, N, S, T)
        if self.position_embedding_type != "absolute":  # before the scaling, as the reference does
            keys = torch.arange(key.shape[2], device=query.device)
            # With a cache the queries are the last of the keys.
            queries = torch.arange(key.shape[2] - query.shape[2], key.shape[2], device=query.device)
            distance = queries[:, None] - keys[None, :]  # (S, T)
            vectors = self.distance_embedding(distance + self.max_position_embeddings - 1).to(query.dtype)  # (S, T, D)
            of_queries = torch.einsum("bnsd,std->bnst", query, vectors)
            if self.position_embedding_type == "relative_key_query":
                of_keys = torch.einsum("bntd,std->bnst", key, vectors)
                scores = scores + of_queries + of_keys
            else:
                scores = scores + of_queries
        scores = scores / math.sqrt(self.attention_head_size)
        if mask is not None:
            scores = scores + mask
        # Dropout of a probability ignores a whole token, as in the original Transformer.
        probabilities = self.dropout(functional.softmax(scores, dim=-1))
        if head_mask is not None:
            probabilities = probabilities * head_mask
        return self.merge_heads(probabilities @ value), probabilities


class BertSdpaSelfAttention(BertSelfAttention):
    """The same attention in torch's fused kernel, which saves no (B, N, S, T) tensor if the backend allows it."""

    is_fused = True


_said: set[str] = set()


def say_once(message: str) -> None:
    """Warn once in this process; never while torch compiles, since a warning breaks the graph."""
    if message not in _said and not torch.compiler.is_compiling():
        _said.add(message)
        warnings.warn(message, BertscopeWarning, stacklevel=2)


KERNELS = {"eager": BertSelfAttention, "sdpa": BertSdpaSelfAttention}


class _ResidualOutput(nn.Module):
    """Dense, dropout, residual, LayerNorm."""

    def __init__(self, config: BertConfig, inputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        """Map (B, S, inputs) and the residual (B, S, H) to (B, S, H)."""
        hidden_states = self.dropout(self.dense(hidden_states))
        normed: Tensor = self.LayerNorm(hidden_states + input_tensor)
        return normed


class BertSelfOutput(_ResidualOutput):
    """The output layer of attention."""

    def __init__(self, config: BertConfig, pruned: int = 0) -> None:
        super().__init__(config, config.hidden_size - pruned * config.head_size)


class BertAttention(nn.Module):
    """Self- or cross-attention with its output layer; it has no `pruned_heads`, numbered as before pruning."""

    def __init__(
        self, config: BertConfig, position_embedding_type: str | None = None, pruned_heads: Collection[int] = ()
    ) -> None:
        super().__init__()
        self.self = KERNELS[config.attn_implementation](config, position_embedding_type, len(pruned_heads))
        self.output = BertSelfOutput(config, len(pruned_heads))
        self.pruned_heads = set(pruned_heads)

    def forward(self, hidden_states: Tensor, *inputs: Any, **named: Any) -> tuple[Tensor | KeyValue, ...]:
        """Map (B, S, H) to (B, S, H) with the inputs and the further outputs of BertSelfAttention."""
        context, *rest = self.self(hidden_states, *inputs, **named)
        return (self.output(context, hidden_states), *rest)
