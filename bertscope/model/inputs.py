"""Inputs of BertModel: checks that their shapes fit together, and conversion of masks to additive masks.

Letters in the shapes: B batch, S sequence length, T = S + cached length, E encoder length, N heads,
H hidden size. Nothing here reads a tensor's values, so everything runs on meta and on fake tensors. A function under
`wrap` decides by shapes: in a graph that torch.fx traces it is one call, which runs with each input's sizes.
"""

import torch
from torch import Tensor
from torch.fx import wrap

from bertscope.config import BertConfig

Cache = tuple[tuple[Tensor, ...], ...]


def input_shape(input_ids: Tensor | None, inputs_embeds: Tensor | None, hidden_size: int) -> tuple[int, int]:
    """Return (B, S) of the ids or the embeddings; raise ValueError for both, neither, or a wrong shape."""
    if input_ids is not None and inputs_embeds is None:
        return _shape_of_ids(input_ids)
    if input_ids is not None or inputs_embeds is None:
        inputs = "neither" if input_ids is None else "both"
        raise ValueError(f"give either input_ids or inputs_embeds; {inputs} was given")
    return _shape_of_embeddings(inputs_embeds, hidden_size)


@wrap
def _shape_of_ids(input_ids: Tensor) -> tuple[int, int]:
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must be (batch, sequence); its shape is {tuple(input_ids.shape)}")
    return input_ids.shape[0], input_ids.shape[1]


@wrap
def _shape_of_embeddings(inputs_embeds: Tensor, hidden_size: int) -> tuple[int, int]:
    if inputs_embeds.dim() != 3 or inputs_embeds.shape[-1] != hidden_size:
        shape = tuple(inputs_embeds.shape)
        raise ValueError(f"inputs_embeds must be (batch, sequence, {hidden_size} = hidden_size); its shape is {shape}")
    return inputs_embeds.shape[0], inputs_embeds.shape[1]


def cached_length(past_key_values: Cache | None, config: BertConfig, has_encoder_states: bool) -> int:
    """Return the cached keys' length; raise ValueError for one of another model or of cross-attention only."""
    if not past_key_values:
        return 0
    if len(past_key_values) != config.num_hidden_layers:
        raise ValueError(
            f"past_key_values holds {len(past_key_values)} layers and the model has {config.num_hidden_layers}"
        )
    if len(past_key_values[0]) == 4 and not has_encoder_states:
        raise ValueError("past_key_values holds keys of cross-attention, and no encoder_hidden_states were given")
    return past_key_values[0][0].shape[2]


def check_agreement(
    shape: tuple[int, int],
    past: int,
    config: BertConfig,
    *,
    attention_mask: Tensor | None,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    encoder_hidden_states: Tensor | None,
    encoder_attention_mask: Tensor | None,
) -> None:
    """Raise ValueError, naming both sides, for inputs whose shapes do not fit together."""
    batch, length = shape
    if position_ids is None or config.position_embedding_type != "absolute":
        _check_length(past + length, config.max_position_embeddings)
    for name, ids in (("token_type_ids", token_type_ids), ("position_ids", position_ids)):
        if ids is not None:
            _check_ids(name, ids, batch, length)
    heads = 0 if config.pruned_heads else config.num_attention_heads  # pruned layers have different numbers of heads
    _check_mask("attention_mask", attention_mask, (batch, heads, length, past + length), "the input with its cache")
    if encoder_hidden_states is None:
        if encoder_attention_mask is not None:
            raise ValueError("encoder_attention_mask was given and encoder_hidden_states were not")
        return
    if not config.is_decoder:
        return  # an encoder ignores them, as in transformers
    if not config.add_cross_attention:
        raise ValueError("encoder_hidden_states were given and add_cross_attention is false")
    _check_states(encoder_hidden_states, batch, config.hidden_size)
    sizes = (batch, heads, length, encoder_hidden_states.shape[1])
    _check_mask("encoder_attention_mask", encoder_attention_mask, sizes, "the encoder states")


@wrap
def _check_length(length: int, most: int) -> None:
    if length > most:
        raise ValueError(f"the sequence is {length} long and max_position_embeddings is {most}")


@wrap
def _check_ids(name: str, ids: Tensor, batch: int, length: int) -> None:
    if tuple(ids.shape) not in ((batch, length), (1, length), (length,)):
        raise ValueError(f"{name} has shape {tuple(ids.shape)} and the input {(batch, length)}")


@wrap
def _check_states(states: Tensor, batch: int, hidden_size: int) -> None:
    if states.dim() != 3 or states.shape[0] != batch:
        raise ValueError(f"encoder_hidden_states has shape {tuple(states.shape)} and the input has batch {batch}")
    if states.shape[2] != hidden_size:
        raise ValueError(f"encoder_hidden_states is {states.shape[2]} wide and hidden_size is {hidden_size}")


def check_cache(
    past_key_values: Cache | None, batch: int, config: BertConfig, encoder_hidden_states: Tensor | None
) -> None:
    """Raise ValueError for a cache of another batch, other heads, or another length of encoder states."""
    if not past_key_values or config.pruned_heads:
        return
    key = past_key_values[0][0]
    if (key.shape[0], key.shape[1]) != (batch, config.num_attention_heads):
        raise ValueError(
            f"past_key_values has shape {tuple(key.shape)} and the input has batch {batch}, "
            f"the model {config.num_attention_heads} heads"
        )
    if len(past_key_values[0]) == 4 and encoder_hidden_states is not None:
        cached, length = past_key_values[0][2].shape[2], encoder_hidden_states.shape[1]
        if cached != length:
            raise ValueError(f"past_key_values holds {cached} encoder positions and encoder_hidden_states {length}")


@wrap
def _check_mask(name: str, mask: Tensor | None, shape: tuple[int, int, int, int], other: str) -> None:
    """Raise ValueError unless the last dimension has full size; the others may be 1 and broadcast."""
    if mask is None:
        return
    batch, heads, queries, keys = shape
    by_head = (heads, 1) if heads else ()
    wanted = {
        2: ((batch, 1), (keys,)),
        3: ((batch, 1), (queries, 1), (keys,)),
        4: ((batch, 1), by_head, (queries, 1), (keys,)),
    }
    if mask.dim() not in wanted:
        raise ValueError(f"{name} must have 2, 3 or 4 dimensions; its shape is {tuple(mask.shape)}")
    sizes = zip(mask.shape, wanted[mask.dim()], strict=True)
    if not all(len(allowed) == 0 or size in allowed for size, allowed in sizes):
        raise ValueError(
            f"{name} has shape {tuple(mask.shape)} and {other} has batch {batch}, length {keys}; "
            f"{queries} positions attend" + (f", {heads} heads" if heads else "")
        )


def self_attention_mask(
    mask: Tensor | None, length: int, past: int, is_decoder: bool, is_fused: bool, hidden: Tensor
) -> Tensor | None:
    """Return the additive mask, broadcastable to (B, N, S, T); None if it would hide nothing.

    The fused kernel applies a plain causal mask itself.
    """
    if mask is None and (not is_decoder or (is_fused and past == 0)):
        return None
    if mask is not None and not is_decoder:
        return additive_mask(mask, hidden.dtype)
    return _causal_mask(mask, length, past, hidden)


@wrap
def _causal_mask(mask: Tensor | None, length: int, past: int, hidden: Tensor) -> Tensor:
    """Return the additive mask of a decoder; a mask of more than two dimensions is causal already."""
    if mask is not None and mask.dim() > 2:
        return additive_mask(mask, hidden.dtype)
    causal = torch.ones(length, past + length, dtype=torch.bool, device=hidden.device).tril(past)[None, None]
    return additive_mask(causal if mask is None else causal * mask[:, None, None, :], hidden.dtype)


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
    return _additive_mask(keep, dtype)


@wrap  # which concerns the calls in this file
def _additive_mask(keep: Tensor, dtype: torch.dtype) -> Tensor:
    if keep.dim() < 4:
        keep = keep[:, None, None, :] if keep.dim() == 2 else keep[:, None]
    return (1.0 - keep.to(dtype)) * torch.finfo(dtype).min


def layer_head_masks(mask: Tensor | None, config: BertConfig, dtype: torch.dtype) -> Tensor | None:
    """Reshape (N,) or (layers, N) to (layers, 1, N, 1, 1); raise ValueError for another shape."""
    return None if mask is None else _per_layer(mask, config.num_hidden_layers, config.num_attention_heads, dtype)


@wrap
def _per_layer(mask: Tensor, layers: int, heads: int, dtype: torch.dtype) -> Tensor:
    if tuple(mask.shape) not in ((heads,), (layers, heads)):
        raise ValueError(
            f"head_mask has shape {tuple(mask.shape)}; it must be ({heads},) for all layers or ({layers}, {heads})"
        )
    per_layer = mask.expand(layers, -1) if mask.dim() == 1 else mask
    return per_layer[:, None, :, None, None].to(dtype)
