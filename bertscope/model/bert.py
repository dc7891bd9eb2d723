"""BertModel: the model without a head.

Letters in the shapes: B batch, S sequence length, T = S + cached length, E encoder length, N heads,
H hidden size.
"""

from typing import Any

from torch import Tensor

from bertscope.config import BertConfig
from bertscope.model.encoder import BertEmbeddings, BertEncoder, BertPooler
from bertscope.model.inputs import (
    Cache,
    additive_mask,
    cached_length,
    check_agreement,
    check_cache,
    input_shape,
    layer_head_masks,
    self_attention_mask,
    transformers_mask,
)
from bertscope.model.outputs import BaseModelOutputWithPoolingAndCrossAttentions
from bertscope.model.pretrained import BertPreTrainedModel


class BertModel(BertPreTrainedModel):
    """Embeddings, encoder and (optional) pooler.

    Source: Devlin et al. 2018, arXiv:1810.04805; outputs equal to transformers 4.43.4.

    >>> model = bertscope.BertModel(bertscope.load("bert-tiny").config)
    >>> tuple(model(torch.zeros(2, 16, dtype=torch.long)).last_hidden_state.shape)
    (2, 16, 128)
    """

    hides_positions = True  # False: a mask that is given has only ones, which transformers finds out by its values
    uses_transformers_masks = False  # as transformers 4.43.4 makes them: the same outputs, more memory

    def __init__(self, config: BertConfig, add_pooling_layer: bool = True) -> None:
        super().__init__(config)
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config) if add_pooling_layer else None
        self.post_init()
        if config.gradient_checkpointing:
            self.gradient_checkpointing_enable()
        if config.pruned_heads:
            self.prune_heads(config.pruned_heads)

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
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPoolingAndCrossAttentions | tuple[Any, ...]:
        """Map ids (B, S) or embeddings (B, S, H) to the last hidden state (B, S, H), pooled output (B, H) ...

        attention_mask is (B, T), (B, S, T) or (B, 1 or N, S, T), 1 to attend and 0 to ignore; default: all
        ones. head_mask is (N,) or (layers, N). encoder_hidden_states (B, E, H) are the input of a
        decoder's cross-attention. Raises ValueError for inputs that do not fit together.
        """
        config = self.config
        shape = input_shape(input_ids, inputs_embeds, config.hidden_size)
        past = cached_length(past_key_values, config, encoder_hidden_states is not None)
        check_agreement(
            shape, past, config, attention_mask=attention_mask, token_type_ids=token_type_ids,
            position_ids=position_ids, encoder_hidden_states=encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
        )  # fmt: skip
        check_cache(past_key_values, shape[0], config, encoder_hidden_states)
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        hidden = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds, past)

        is_fused = (
            config.attn_implementation == "sdpa"
            and config.position_embedding_type == "absolute"
            and head_mask is None
            and not output_attentions
        )
        masks = self._masks(hidden, past, is_fused, attention_mask, encoder_attention_mask, encoder_hidden_states)
        encoded = self.encoder(
            hidden, masks[0], layer_head_masks(head_mask, config, hidden.dtype), encoder_hidden_states, masks[1],
            past_key_values, config.is_decoder and (config.use_cache if use_cache is None else use_cache),
            output_attentions, config.output_hidden_states if output_hidden_states is None else output_hidden_states,
        )  # fmt: skip
        pooled = self.pooler(encoded.last_hidden_state) if self.pooler is not None else None
        if not (config.return_dict if return_dict is None else return_dict):
            return (encoded.last_hidden_state, pooled, *encoded.to_tuple()[1:])
        return BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=encoded.last_hidden_state,
            pooler_output=pooled,
            hidden_states=encoded.hidden_states,
            past_key_values=encoded.past_key_values,
            attentions=encoded.attentions,
            cross_attentions=encoded.cross_attentions,
        )

    def _masks(
        self, hidden: Tensor, past: int, is_fused: bool, mask: Tensor | None, encoder_mask: Tensor | None,
        encoder_states: Tensor | None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return the masks of self-attention and of cross-attention, and what has to live as long as they do."""
        length, is_decoder = hidden.shape[1], self.config.is_decoder
        if not self.uses_transformers_masks:
            own = self_attention_mask(mask, length, past, is_decoder, is_fused, hidden)
            if is_decoder and encoder_mask is not None:
                return own, additive_mask(encoder_mask, hidden.dtype)
            return own, None
        given, own = transformers_mask(
            mask, length, past + length, is_decoder, is_fused, hidden, hides=self.hides_positions
        )
        if not is_decoder or encoder_states is None:
            return own, None, given
        keys = encoder_states.shape[1]
        encoder_given, encoder_own = transformers_mask(encoder_mask, length, keys, False, is_fused, hidden)
        return own, encoder_own, given, encoder_given
