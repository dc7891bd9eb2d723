"""Every family of transformers by the same code: the counts and FLOPs of a tiny model, compared with torch's own.

These tests also pass with transformers 5, where a family that it does not have any more is skipped.
"""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bertscope.analyses.flops import FlopsRun, flops_model
from bertscope.analyses.memory.steps import estimate_memory
from bertscope.analyses.params import count
from bertscope.errors import BertscopeError
from bertscope.settings.run_config import RunConfig
from bertscope.sources.find import find
from tests.analyses.memory.plain_loop import peak_bytes, tokenized

transformers = pytest.importorskip("transformers", reason="it is in the extra 'test'")

BATCH, SEQ = 2, 8
SIZES = {
    "vocab_size": 96, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 40, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DECODER = SIZES | {"num_key_value_heads": 1, "head_dim": 8}
SEQ2SEQ = {
    "vocab_size": 96, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 40,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": 2,
}  # fmt: skip
T5 = {
    "vocab_size": 96, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
VISION = {**SIZES, "image_size": 16, "patch_size": 8}
STAGES = {"depths": [1, 2], "hidden_sizes": [8, 16], "num_stages": 2, "image_size": 32}
AUDIO = {
    **SIZES, "conv_dim": [8, 8], "conv_kernel": [4, 3], "conv_stride": [3, 2], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_length": 2,
}  # fmt: skip
XLM = {"emb_dim": 16, "n_layers": 2, "n_heads": 2, "vocab_size": 96, "n_words": 96, "max_position_embeddings": 40}
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 40, "vocab_size": 96, "eos_token_id": 2}

# Inputs by name: shape, and the first id that is too high; 0 for numbers.
IDS = {"input_ids": ((BATCH, SEQ), 90)}
# The tokenizer of XLNet returns segments before version 5; relative to them it computes scores.
XLNET = IDS | ({"token_type_ids": ((BATCH, SEQ), 4)} if transformers.__version__ < "5" else {})
BOTH = IDS | {"decoder_input_ids": ((BATCH, SEQ), 90)}
IMAGE = {"pixel_values": ((BATCH, 3, 16, 16), 0)}
LARGER = {"pixel_values": ((BATCH, 3, 32, 32), 0)}
WAVE = {"input_values": ((BATCH, ((SEQ - 1) * 2 + 3 - 1) * 3 + 4), 0)}  # of which two convolutions make SEQ frames
FAMILIES = [
    ("roberta", "RobertaForMaskedLM", SIZES, IDS),
    ("xlm-roberta", "XLMRobertaForSequenceClassification", SIZES, IDS),
    ("camembert", "CamembertForTokenClassification", SIZES, IDS),
    ("electra", "ElectraForPreTraining", SIZES | {"embedding_size": 8}, IDS),
    ("deberta-v2", "DebertaV2ForMaskedLM", SIZES | {
        "relative_attention": True, "position_buckets": 4, "norm_rel_ebd": "layer_norm", "share_att_key": True,
        "pos_att_type": "p2c|c2p", "max_relative_positions": -1, "position_biased_input": False, "type_vocab_size": 0,
    }, IDS),
    ("deberta", "DebertaModel", SIZES | {"relative_attention": True, "pos_att_type": "c2p|p2c"}, IDS),
    ("albert", "AlbertForMaskedLM", SIZES | {"embedding_size": 8}, IDS),
    ("distilbert", "DistilBertForMaskedLM", {
        "vocab_size": 96, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "max_position_embeddings": 40,
    }, IDS),
    ("modernbert", "ModernBertForMaskedLM", SIZES | {
        "num_hidden_layers": 3, "global_attn_every_n_layers": 3, "local_attention": 4, "cls_token_id": 1,
        "sep_token_id": 2,
    }, IDS),
    ("mpnet", "MPNetForMaskedLM", SIZES, IDS),
    ("longformer", "LongformerForMaskedLM", SIZES | {"attention_window": 4}, IDS),
    ("big_bird", "BigBirdForMaskedLM", SIZES | {"block_size": 2, "attention_type": "original_full"}, IDS),
    ("layoutlm", "LayoutLMForMaskedLM", SIZES, IDS),
    ("xlnet", "XLNetLMHeadModel", {"vocab_size": 96, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}, XLNET),
    ("funnel", "FunnelForMaskedLM", {
        "vocab_size": 96, "block_sizes": [1, 1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24,
    }, IDS),
    ("squeezebert", "SqueezeBertForMaskedLM", SIZES | {"embedding_size": 16}, IDS),
    ("mobilebert", "MobileBertForMaskedLM", SIZES | {
        "embedding_size": 8, "intra_bottleneck_size": 8, "true_hidden_size": 8,
    }, IDS),
    ("roformer", "RoFormerForMaskedLM", SIZES, IDS),
    ("rembert", "RemBertForMaskedLM", SIZES | {"input_embedding_size": 8, "output_embedding_size": 12}, IDS),
    ("convbert", "ConvBertForMaskedLM", SIZES | {"embedding_size": 16, "head_ratio": 1}, IDS),
    ("fnet", "FNetForMaskedLM", SIZES, IDS),
    ("xlm", "XLMWithLMHeadModel", XLM, IDS),
    ("flaubert", "FlaubertWithLMHeadModel", XLM, IDS),
    ("gpt2", "GPT2ForSequenceClassification", GPT, IDS),
    ("gptj", "GPTJForCausalLM", GPT | {"rotary_dim": 4}, IDS),
    ("gpt_neo", "GPTNeoForCausalLM", SIZES | {
        "num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]],
    }, IDS),
    ("gpt_neox", "GPTNeoXForCausalLM", SIZES, IDS),
    ("opt", "OPTForCausalLM", SIZES | {"ffn_dim": 24, "word_embed_proj_dim": 8}, IDS),
    ("bloom", "BloomForCausalLM", {"vocab_size": 96, "hidden_size": 16, "n_layer": 2, "n_head": 2}, IDS),
    ("llama", "LlamaForCausalLM", DECODER, IDS),
    ("mistral", "MistralForCausalLM", DECODER | {"sliding_window": 4}, IDS),
    ("qwen2", "Qwen2ForCausalLM", DECODER | {"tie_word_embeddings": True}, IDS),
    ("gemma", "GemmaForCausalLM", DECODER, IDS),
    ("phi", "PhiForCausalLM", SIZES, IDS),
    ("falcon", "FalconForCausalLM", SIZES, IDS),
    ("mixtral", "MixtralForCausalLM", DECODER | {"num_local_experts": 3, "num_experts_per_tok": 2}, IDS),
    ("mamba", "MambaForCausalLM", SIZES | {"state_size": 4, "time_step_rank": 2}, IDS),
    ("t5", "T5ForConditionalGeneration", T5, BOTH),
    ("mt5", "MT5ForConditionalGeneration", T5 | {
        "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
    }, BOTH),
    ("switch_transformers", "SwitchTransformersForConditionalGeneration", T5 | {
        "num_experts": 2, "expert_capacity": 99, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
    }, BOTH),
    ("bart", "BartForConditionalGeneration", SEQ2SEQ, BOTH),
    ("mbart", "MBartForConditionalGeneration", SEQ2SEQ, BOTH),
    ("marian", "MarianMTModel", SEQ2SEQ, BOTH),
    ("pegasus", "PegasusForConditionalGeneration", SEQ2SEQ, BOTH),
    ("led", "LEDForConditionalGeneration", SEQ2SEQ | {
        "attention_window": 4, "max_encoder_position_embeddings": 40, "max_decoder_position_embeddings": 40,
    }, BOTH),
    ("encoder-decoder", "EncoderDecoderModel", {
        "encoder": SIZES | {"model_type": "bert"},
        "decoder": SIZES | {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
    }, BOTH),
    ("vit", "ViTForImageClassification", VISION, IMAGE),
    ("deit", "DeiTForImageClassification", VISION, IMAGE),
    ("dinov2", "Dinov2Model", VISION, IMAGE),
    ("beit", "BeitForImageClassification", VISION | {"drop_path_rate": 0.1}, IMAGE),
    ("swin", "SwinForImageClassification", {
        "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2], "window_size": 2,
    }, LARGER),
    ("convnext", "ConvNextForImageClassification", STAGES | {"drop_path_rate": 0.1}, LARGER),
    ("resnet", "ResNetForImageClassification", STAGES | {"embedding_size": 8}, LARGER),
    ("segformer", "SegformerForImageClassification", STAGES | {
        "num_encoder_blocks": 2, "num_attention_heads": [1, 2], "patch_sizes": [7, 3], "sr_ratios": [2, 1],
        "strides": [4, 2], "mlp_ratios": [2, 2],
    }, LARGER),
    ("clip", "CLIPModel", {
        "text_config": SIZES, "vision_config": VISION, "projection_dim": 12,
    }, IDS | IMAGE),
    ("siglip", "SiglipModel", {"text_config": SIZES, "vision_config": VISION}, IDS | IMAGE),
    ("blip", "BlipForConditionalGeneration", {
        "text_config": SIZES | {"encoder_hidden_size": 16, "projection_dim": 16}, "vision_config": VISION,
    }, IDS | IMAGE),
    ("whisper", "WhisperForConditionalGeneration", SEQ2SEQ | {
        "num_mel_bins": 6, "max_source_positions": 10, "max_target_positions": 12,
    }, {"input_features": ((BATCH, 6, 20), 0), "decoder_input_ids": ((BATCH, SEQ), 90)}),
    ("speech_to_text", "Speech2TextForConditionalGeneration", SEQ2SEQ | {
        "input_feat_per_channel": 6, "conv_channels": 8, "max_source_positions": 40, "max_target_positions": 40,
    }, {"input_features": ((BATCH, SEQ, 6), 0), "decoder_input_ids": ((BATCH, SEQ), 90)}),
    ("lxmert", "LxmertModel", SIZES | {
        "l_layers": 1, "r_layers": 1, "x_layers": 1, "visual_feat_dim": 6, "visual_pos_dim": 4,
    }, IDS | {"visual_feats": ((BATCH, SEQ, 6), 0), "visual_pos": ((BATCH, SEQ, 4), 0)}),
    ("patchtst", "PatchTSTModel", {
        "num_input_channels": 3, "context_length": 16, "patch_length": 4, "patch_stride": 4, "d_model": 16,
        "num_attention_heads": 2, "ffn_dim": 24, "num_hidden_layers": 2,
    }, {"past_values": ((BATCH, 16, 3), 0)}),
    ("wav2vec2", "Wav2Vec2ForCTC", AUDIO, WAVE),
    ("hubert", "HubertModel", AUDIO, WAVE),
]  # fmt: skip


def reference(model_type: str, name: str, settings: dict) -> torch.nn.Module:
    """Return the model that transformers builds on the CPU, with eager kernels."""
    config = transformers.CONFIG_MAPPING[model_type].from_dict(settings, attn_implementation="eager")
    model = getattr(transformers, name)(config).eval()
    if getattr(config, "pad_token_id", 0) is None:  # classifiers of GPT-2 need one for a batch of 2
        model.config.pad_token_id = 0
    if hasattr(model, "set_experts_implementation"):  # of transformers 5; torch does not count the default kernel
        model.set_experts_implementation("eager")
    return model


@pytest.fixture(autouse=True)
def silence():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize(
    ("model_type", "name", "settings", "inputs"), FAMILIES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_family_has_the_parameters_and_flops_that_torch_counts(tmp_path, model_type, name, settings, inputs):
    if model_type not in transformers.CONFIG_MAPPING or not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    settings = json.loads(json.dumps(settings))
    given = settings | {"model_type": model_type, "architectures": [name]}
    (tmp_path / "config.json").write_text(json.dumps(given))
    model = reference(model_type, name, settings)
    expected = sum(param.numel() for param in model.parameters())
    source = find(tmp_path)
    assert count(source.build()).totals.distinct_params == expected
    real = {key: torch.randint(3, top, shape) if top else torch.rand(shape) for key, (shape, top) in inputs.items()}
    with FlopCounterMode(display=False) as counter:
        model(**real)
    found = flops_model(FlopsRun(source=source), [BATCH], [SEQ]).rows[0].forward
    assert found.matmul_flops == counter.get_total_flops() > 0


def test_the_memory_of_longformer_which_divides_sizes_as_tensors_is_that_of_a_plain_loop(tmp_path):
    settings = SIZES | {"hidden_size": 64, "intermediate_size": 96, "attention_window": 4, "vocab_size": 500}
    given = settings | {"model_type": "longformer", "architectures": ["LongformerForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(given))
    found = estimate_memory(find(tmp_path), RunConfig(batch=BATCH, seq=SEQ))

    def inputs(model):
        ids = torch.randint(3, 90, (BATCH, SEQ))
        return tokenized(ids) | {"labels": ids.clone()}

    def build():
        config = transformers.CONFIG_MAPPING["longformer"].from_dict(settings)
        return transformers.LongformerForMaskedLM(config)

    assert found.peak.peak_bytes == pytest.approx(peak_bytes(build, inputs, torch.optim.AdamW), rel=1e-3)


def test_a_class_of_another_family_is_refused_with_those_that_fit(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": "roberta"}))
    with pytest.raises(BertscopeError, match="did you mean 'RobertaForMaskedLM'"):
        find(tmp_path, architecture="RobertaForMaskedLMs").build()
    with pytest.raises(BertscopeError, match="unknown architecture 'ViTModel' for a roberta"):
        find(tmp_path, architecture="ViTModel").build()


def test_count_names_the_version_of_transformers_whose_classes_decide_the_number(cli, tmp_path):
    import transformers

    settings = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 10, "n_positions": 4}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    version = f"torch {torch.__version__}, transformers {transformers.__version__}\n"
    assert version in cli("count", str(tmp_path)).out
    assert "transformers" not in cli("count", "bert-tiny").out
