"""Models that do not read text only: their counts, and their FLOPs on derived inputs, equal the references'."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from tests.memory.plain_loop import peak_bytes

# A model that cannot be built on meta is built in another way, which one test asserts.
pytestmark = pytest.mark.filterwarnings("ignore::bertscope.errors.BertscopeWarning")

SMALL = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
LANGUAGE = {"vocab_size": 60, "d_model": 12, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 3,
            "decoder_attention_heads": 3, "encoder_ffn_dim": 20, "decoder_ffn_dim": 16, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
TEXT = SMALL | {"vocab_size": 60, "max_position_embeddings": 40}
IDS = {"input_ids": ((2, 7), torch.long), "attention_mask": ((2, 7), torch.long)}
DECODER = {"decoder_input_ids": ((2, 7), torch.long)}
IMAGE = {"pixel_values": ((2, 3, 32, 32), torch.float)}
# Configuration, class, settings, and the inputs at batch 2 and sequence 7; test_families.py has the others.
FAMILIES = {
    "t5": ("T5Config", "T5ForConditionalGeneration", {"vocab_size": 60, "d_model": 12, "d_kv": 4, "d_ff": 20,
           "num_layers": 2, "num_heads": 3, "decoder_start_token_id": 0}, IDS | DECODER),
    "bart": ("BartConfig", "BartForConditionalGeneration", LANGUAGE | {"max_position_embeddings": 40}, IDS | DECODER),
    "swin": ("SwinConfig", "SwinModel", {"image_size": 32, "patch_size": 4, "embed_dim": 12, "depths": [1, 1],
             "num_heads": [2, 3], "window_size": 4}, IMAGE),
    "layoutlmv3": ("LayoutLMv3Config", "LayoutLMv3Model",  # whose setting for the image is input_size
                   TEXT | {"input_size": 32, "patch_size": 8, "coordinate_size": 2, "shape_size": 2}, IDS | IMAGE),
}  # fmt: skip


@pytest.fixture(params=list(FAMILIES))
def family(request, tmp_path):
    """The reference's model, its inputs, and the folder with its configuration."""
    config_class, name, settings, shapes = FAMILIES[request.param]
    config = getattr(transformers, config_class)(**settings, architectures=[name], attn_implementation="eager")
    torch.manual_seed(0)
    reference = getattr(transformers, name)(config).eval()
    (tmp_path / "config.json").write_text(json.dumps(config.to_diff_dict() | {"model_type": config.model_type}))
    inputs = {key: torch.ones(shape, dtype=dtype) for key, (shape, dtype) in shapes.items()}
    return reference, inputs, tmp_path


@pytest.mark.parametrize("family", ["t5", "bart"], indirect=True)
def test_a_decoder_with_a_cache_of_keys_has_a_plan(cli, family):
    """A layer that runs again would add its keys to the cache again."""
    _, _, folder = family
    found = cli("plan", folder, "--budget", "1KiB", "--batch", 2, "--seq", 7, "--format", "json")
    assert found.code == 1, found.err
    (row,) = found.json["rows"]
    assert row["cost"]["recompute_flops"] > 0


@pytest.mark.parametrize("family", ["t5", "bart", "swin"], indirect=True)
def test_the_estimate_of_any_family_is_the_peak_of_a_plain_loop(cli, family):
    reference, inputs, folder = family
    if hasattr(reference, "lm_head"):
        inputs = inputs | {"labels": torch.ones(2, 7, dtype=torch.long)}
    real = peak_bytes(
        lambda: type(reference)(reference.config), lambda model: {name: one.clone() for name, one in inputs.items()},
        lambda params: torch.optim.AdamW(params, lr=0.0),
    )  # fmt: skip
    found = cli("estimate", folder, "--batch", 2, "--seq", 7, "--attention", "eager", "--format", "json").json
    peaks = [phase["peak_bytes"] for phase in found["variants"][0]["estimated"]["phases"]]
    assert max(peaks) == pytest.approx(real, rel=0.001)
