"""BertModel, the model without a head, and the base class of all models.

The base class initialises and ties weights, and recomputes layers.

Letters in the shapes: B batch, S sequence length, T = S + cached length, E encoder length, N heads,
H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bertscope.config import BertConfig
from bertscope.model.encoder import (
    LAYERS,
    BaseModelOutputWithPoolingAndCrossAttentions,
    BertEmbeddings,
    BertEncoder,
    BertPooler,
)
from bertscope.model.modules import require_gradients
from bertscope.settings.checkpointing import FULL, Checkpointing

Cache = tuple[tuple[Tensor, ...], ...]


class BertPreTrainedModel(nn.Module):
    """The base of BertModel and of every class with a head."""

    base_model_prefix = "bert"
    enable_input_require_grads = require_gradients

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config

    # ---- weights: values and ties ----

    def post_init(self) -> None:
        """Initialise the weights and tie parameters; every constructor calls this last."""
        is_meta = next(self.parameters()).is_meta  # no values to initialise
        for child in () if is_meta else self.children():
            if not isinstance(child, BertPreTrainedModel):  # the BertModel of a head did this in its own constructor
                child.apply(self._init_weights)
        self.tie_weights()

    def _init_weights(self, module: nn.Module) -> None:
        """Set normal weights with `initializer_range`, zero biases, a zero padding row, and LayerNorm as identity."""
        weight: Any = getattr(module, "weight", None)
        if weight is None or weight.is_meta:  # a meta weight has no values, and `normal_` on it costs 1.4 s
            return
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(weight, std=self.config.initializer_range)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            with torch.no_grad():
                weight[module.padding_idx].zero_()
        if isinstance(module, (nn.Linear, nn.LayerNorm)) and module.bias is not None:
            nn.init.zeros_(module.bias)

    @property
    def base_model(self) -> Any:
        """Return the BertModel in this model, or the model itself."""
        return getattr(self, self.base_model_prefix, self)

    @property
    def device(self) -> torch.device:
        """Return the device of the first parameter."""
        return next(self.parameters()).device

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the word embeddings."""
        embeddings: nn.Embedding = self.base_model.embeddings.word_embeddings
        return embeddings

    def get_output_embeddings(self) -> nn.Linear | None:
        """Return the decoder of the language modelling head; None for a class without one."""
        return None

    def tie_weights(self) -> None:
        """Tie the decoder to the word embeddings, if the configuration says so, and always to the head's bias."""
        decoder = self.get_output_embeddings()
        if decoder is None:
            return
        head: Any = self.cls
        head.predictions.tie_bias()
        if self.config.tie_word_embeddings:
            decoder.weight = self.get_input_embeddings().weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BertPreTrainedModel:
        """Apply `fn` as torch does, but keep ties: torch replaces the parameter of each name separately."""
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(id(parameter), []).append((module, name))
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for (first, name), *rest in places.values():
            for module, other_name in rest:
                module._parameters[other_name] = first._parameters[name]
        return self

    # ---- checkpointing: tensors saved for backward ----

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, *, strategy: str = FULL
    ) -> None:
        """Recompute layers in the backward pass instead of saving their activations, in train mode only.

        `strategy`: full (every layer), layers:0-5, selective (saves the matrix products), save:addmm.0-3 (saves the
        outputs of the first four addmm of each layer).
        `gradient_checkpointing_kwargs` may hold `use_reentrant`, which is False by default.
        """
        options = dict(gradient_checkpointing_kwargs or {})
        use_reentrant = bool(options.pop("use_reentrant", False))
        if options:
            raise ValueError(f"only use_reentrant can be chosen; got {', '.join(options)}")
        encoder: BertEncoder = self.base_model.encoder
        chosen = Checkpointing.parse(strategy, use_reentrant=use_reentrant)
        if chosen is not None:
            chosen.check_lists([LAYERS])
            chosen.check_layers(LAYERS, len(encoder.layer))
        encoder.gradient_checkpointing = chosen is not None
        encoder.checkpointing = chosen or Checkpointing()


# ---- the names of weights in old and new checkpoints ----

# Buffers that transformers before 4.31 saved; computed here.
STORED_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
_OLD_ENDS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


def modern_name(name: str) -> str:
    """Return the name with `weight` and `bias` for a LayerNorm's `gamma` and `beta`."""
    for old, new in _OLD_ENDS.items():
        if name.endswith(old):
            return name[: -len(old)] + new
    return name


def own_name(name: str, names: Container[str], prefix: str = "bert") -> str:
    """Return the name with or without `bert.` in front, as in the model."""
    if name in names:
        return name
    front = f"{prefix}."
    other = name.removeprefix(front) if name.startswith(front) else front + name
    return other if other in names else name


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
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if input_ids is not None and input_ids.dim() != 2:
            raise ValueError(f"input_ids must be (batch, sequence); its shape is {tuple(input_ids.shape)}")
        past = past_key_values[0][0].shape[2] if past_key_values else 0
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        hidden = self.embeddings(input_ids, token_type_ids, position_ids, inputs_embeds, past)

        is_fused = (
            config.attn_implementation == "sdpa"
            and config.position_embedding_type == "absolute"
            and head_mask is None
            and not output_attentions
        )
        if head_mask is not None:
            head_mask = head_mask.expand(config.num_hidden_layers, -1) if head_mask.dim() == 1 else head_mask
            head_mask = head_mask[:, None, :, None, None].to(hidden.dtype)  # (layers, 1, N, 1, 1)
        masks = self._masks(hidden, past, is_fused, attention_mask, encoder_attention_mask, encoder_hidden_states)
        encoded = self.encoder(
            hidden, masks[0], head_mask, encoder_hidden_states, masks[1], past_key_values,
            config.is_decoder and (config.use_cache if use_cache is None else use_cache),
            output_attentions, config.output_hidden_states if output_hidden_states is None else output_hidden_states,
        )  # fmt: skip
        pooled = self.pooler(encoded.last_hidden_state) if self.pooler is not None else None
        if not (config.return_dict if return_dict is None else return_dict):
            return (encoded.last_hidden_state, pooled, *encoded.to_tuple()[1:])
        return BaseModelOutputWithPoolingAndCrossAttentions(pooler_output=pooled, **encoded.__dict__)

    def _masks(
        self, hidden: Tensor, past: int, is_fused: bool, mask: Tensor | None, encoder_mask: Tensor | None,
        encoder_states: Tensor | None,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Return the masks of self-attention and of cross-attention, and what has to live as long as they do."""
        length, is_decoder = hidden.shape[1], self.config.is_decoder
        if mask is not None and mask.shape[-1] != past + length:
            raise ValueError(f"attention_mask has shape {tuple(mask.shape)} and the keys are {past + length} long")
        if not self.uses_transformers_masks:
            self_mask = self_attention_mask(mask, length, past, is_decoder, is_fused, hidden)
            if is_decoder and encoder_mask is not None:
                return self_mask, additive_mask(encoder_mask, hidden.dtype)
            return self_mask, None
        padding_mask, self_mask = transformers_mask(
            mask, length, past + length, is_decoder, is_fused, hidden, hides=self.hides_positions
        )
        if not is_decoder or encoder_states is None:
            return self_mask, None, padding_mask
        keys = encoder_states.shape[1]
        encoder_given, encoder_own = transformers_mask(encoder_mask, length, keys, False, is_fused, hidden)
        return self_mask, encoder_own, padding_mask, encoder_given


# ---- additive masks: 0 to attend, the lowest number to ignore; no value of a tensor is read ----


def self_attention_mask(
    mask: Tensor | None, length: int, past: int, is_decoder: bool, is_fused: bool, hidden: Tensor
) -> Tensor | None:
    """Return the additive mask, broadcastable to (B, N, S, T); None if it would hide nothing.

    The fused kernel applies a plain causal mask itself. A mask of more than two dimensions is causal already.
    """
    if mask is None and (not is_decoder or (is_fused and past == 0)):
        return None
    if mask is None or (is_decoder and mask.dim() == 2):
        causal = torch.ones(length, past + length, dtype=torch.bool, device=hidden.device).tril(past)[None, None]
        mask = causal if mask is None else causal * mask[:, None, None, :]
    return additive_mask(mask, hidden.dtype)


def transformers_mask(
    mask: Tensor | None, queries: int, keys: int, is_decoder: bool, is_fused: bool, hidden: Tensor, *,
    hides: bool = True,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return a mask, of ones if none is given, and the additive mask, with the memory that transformers 4.43.4 uses.

    transformers keeps the first until forward ends. It gives the fused kernel no mask if all are ones, else one with a
    row for each query, (B, 1, S, T). `hides` is False if a given mask has ones only.
    """
    keep = torch.ones(hidden.shape[0], keys, device=hidden.device) if mask is None else mask
    if is_fused and not (hides and mask is not None) and (not is_decoder or queries in (1, keys)):
        return keep, None
    if is_fused and not is_decoder and keep.dim() == 2:
        hidden_keys = 1.0 - keep[:, None, None, :].expand(-1, 1, queries, -1).to(hidden.dtype)
        return keep, hidden_keys.masked_fill(hidden_keys.to(torch.bool), torch.finfo(hidden.dtype).min)
    return keep, self_attention_mask(keep, queries, keys - queries, is_decoder, is_fused, hidden)


def additive_mask(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask of 1 and 0, (B, T), (B, S, T) or (B, N, S, T), to 4 dimensions of 0 and the lowest number."""
    if keep.dim() < 4:
        keep = keep[:, None, None, :] if keep.dim() == 2 else keep[:, None]
    return (1.0 - keep.to(dtype)) * torch.finfo(dtype).min
