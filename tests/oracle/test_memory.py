"""The estimate of a model that nobody here wrote: transformers' BertForMaskedLM."""

from __future__ import annotations

import pytest
import torch

import bertscope


@pytest.mark.parametrize("mode", ["inference", "forward", "training"])
@pytest.mark.parametrize("strategy", ["none", "full", "reentrant"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_transformers_own_bert_is_estimated_to_the_byte(attention, strategy, mode):
    import transformers

    config = transformers.BertConfig(
        vocab_size=99, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=40,
        max_position_embeddings=32, attn_implementation=attention, pad_token_id=None,
    )  # fmt: skip
    model = transformers.BertForMaskedLM(config)
    if strategy != "none":
        model.gradient_checkpointing_enable({"use_reentrant": strategy == "reentrant"})
    ids = torch.randint(0, 99, (3, 24))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    (variant,) = bertscope.profile(model, given, mode=mode, steps=0).variants
    for guess, truth in zip(variant.estimated.phases, variant.measured.phases, strict=True):
        assert abs(guess.peak_bytes - truth.peak_bytes) <= 64, (guess, truth)
