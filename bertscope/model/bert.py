"""BertPreTrainedModel (what all classes share) and BertModel, the body that every head stands on.

Letters in the shapes: B batch, S sequence length, P cached length, T = P + S, E encoder length,
N heads, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bertscope.config import BertConfig
from bertscope.model.encoder import BertEmbeddings, BertEncoder, BertPooler
from bertscope.model.outputs import BaseModelOutputWithPoolingAndCrossAttentions


class BertPreTrainedModel(nn.Module):
    """Initialisation and weight tying, the same for every class."""

    base_model_prefix = "bert"

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config

    def post_init(self) -> None:
        """Initialise the weights and tie what is tied; the last line of every constructor."""
        for child in self.children():
            if not isinstance(child, BertPreTrainedModel):  # the body under a head has done so itself
                child.apply(self._init_weights)
        self.tie_weights()

    def _init_weights(self, module: nn.Module) -> None:
        """Normal weights with `initializer_range`, zero biases, a zero padding row, LayerNorm the identity."""
        weight: Any = getattr(module, "weight", None)
        if weight is None or weight.is_meta:  # a meta weight has no values, and normal_ there costs 1.4 s
            return
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(weight, std=self.config.initializer_range)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            with torch.no_grad():
                weight[module.padding_idx].zero_()
        if isinstance(module, (nn.Linear, nn.LayerNorm)) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def get_input_embeddings(self) -> nn.Embedding:
        """The word embeddings."""
        body: Any = getattr(self, self.base_model_prefix, self)
        return body.embeddings.word_embeddings

    def get_output_embeddings(self) -> nn.Linear | None:
        """The decoder of the language modelling head; None for a class without one."""
        return None

    def tie_weights(self) -> None:
        """Make the decoder use the word embeddings, if the configuration ties them."""
        decoder = self.get_output_embeddings()
        if decoder is not None and self.config.tie_word_embeddings:
            decoder.weight = self.get_input_embeddings().weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BertPreTrainedModel:
        """As torch's; `to_empty` and `to("meta")` replace parameters one address at a time, so tie again."""
        super()._apply(fn, recurse)
        self.tie_weights()
        return self


class BertModel(BertPreTrainedModel):
    """Embeddings, encoder and, unless it is left out, the pooler.

    Source: Devlin et al. 2018, arXiv:1810.04805; outputs equal to transformers 4.43.4.
    """

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        self.post_init()

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
        past_key_values: tuple[tuple[Tensor, ...], ...] | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPoolingAndCrossAttentions | tuple[Any, ...]:
        """Ids (B, S) or embeddings (B, S, H) -> the last hidden state (B, S, H), the pooled (B, H), and more.

        attention_mask is (B, T), (B, S, T) or (B, 1 or N, S, T), 1 to attend and 0 not to; a missing one
        attends everywhere. head_mask is (N,) or (layers, N). encoder_hidden_states (B, E, H) feed the
        cross-attention of a decoder. Raises ValueError for inputs that do not fit together.
        """
        config = self.config
        _, length = _input_shape(input_ids, inputs_embeds)
        past = past_key_values[0][0].shape[2] if past_key_values is not None else 0
        if past + length > config.max_position_embeddings and position_ids is None:
            raise ValueError(
                f"the sequence is {past + length} long and max_position_embeddings is {config.max_position_embeddings}"
            )
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        hidden = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds, past)

        is_fused = (
            config.attn_implementation == "sdpa"
            and config.position_embedding_type == "absolute"
            and head_mask is None
            and not output_attentions
        )
        mask = self._self_attention_mask(attention_mask, length, past, is_fused, hidden)
        encoder_mask = None
        if config.is_decoder and encoder_hidden_states is not None and encoder_attention_mask is not None:
            encoder_mask = _additive(_broadcast_mask(encoder_attention_mask), hidden.dtype)

        encoded = self.encoder(
            hidden,
            mask,
            _broadcast_head_mask(head_mask, config.num_hidden_layers, hidden.dtype),
            encoder_hidden_states,
            encoder_mask,
            past_key_values,
            config.is_decoder and (config.use_cache if use_cache is None else use_cache),
            output_attentions,
            config.output_hidden_states if output_hidden_states is None else output_hidden_states,
        )
        pooled = self.pooler(encoded.last_hidden_state) if self.pooler is not None else None
        if not (config.return_dict if return_dict is None else return_dict):
            return (encoded.last_hidden_state, pooled, *encoded.to_tuple()[1:])
        return BaseModelOutputWithPoolingAndCrossAttentions(pooler_output=pooled, **vars(encoded))

    def _self_attention_mask(
        self, mask: Tensor | None, length: int, past: int, is_fused: bool, hidden: Tensor
    ) -> Tensor | None:
        """The additive mask, broadcastable to (B, N, S, T); None where there is nothing to hide.

        Nothing here looks at values, so it runs on meta; the fused kernel makes a plain causal mask by itself.
        """
        is_decoder = self.config.is_decoder
        if mask is None and (not is_decoder or (is_fused and past == 0)):
            return None
        if mask is not None and (mask.dim() > 2 or not is_decoder):
            return _additive(_broadcast_mask(mask), hidden.dtype)
        causal = torch.ones(length, past + length, dtype=torch.bool, device=hidden.device).tril(past)[None, None]
        return _additive(causal if mask is None else causal * _broadcast_mask(mask), hidden.dtype)


def _input_shape(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> tuple[int, int]:
    if (input_ids is None) == (inputs_embeds is None):
        given = "neither" if input_ids is None else "both"
        raise ValueError(f"give either input_ids or inputs_embeds; {given} was given")
    shape = input_ids.shape if input_ids is not None else inputs_embeds.shape[:-1]  # type: ignore[union-attr]
    if len(shape) != 2:
        raise ValueError(
            f"input_ids must be (batch, sequence) and inputs_embeds (batch, sequence, hidden); got {shape}"
        )
    return shape[0], shape[1]


def _broadcast_mask(mask: Tensor) -> Tensor:
    """(B, T), (B, S, T) or (B, N, S, T) -> four dimensions that broadcast to (B, N, S, T)."""
    if mask.dim() == 2:
        return mask[:, None, None, :]
    if mask.dim() == 3:
        return mask[:, None]
    if mask.dim() == 4:
        return mask
    raise ValueError(f"an attention mask has 2, 3 or 4 dimensions; this one has {mask.dim()}: {tuple(mask.shape)}")


def _additive(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """1 -> 0, 0 -> the most negative number of `dtype`."""
    return (1.0 - keep.to(dtype)) * torch.finfo(dtype).min


def _broadcast_head_mask(mask: Tensor | None, layers: int, dtype: torch.dtype) -> Tensor | None:
    """(N,) or (layers, N) -> (layers, 1, N, 1, 1)."""
    if mask is None:
        return None
    per_layer = mask.expand(layers, -1) if mask.dim() == 1 else mask
    return per_layer[:, None, :, None, None].to(dtype)
