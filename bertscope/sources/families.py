"""The family of a configuration without `model_type`, by its keys, and notes on what a configuration says.

transformers writes `model_type` since 2.2; older files and those of the first BERT have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bertscope.config import RULES, refuse_misspelling
from bertscope.errors import ConfigError
from bertscope.units import visible

_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# Keys of any configuration of transformers, and those of google-research/bert, which shape no BERT.
_COMMON = frozenset(
    """architectures auto_map bad_words_ids begin_suppress_tokens bertscope bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id directionality diversity_penalty do_sample dtype early_stopping
    encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
    forced_eos_token_id gradient_checkpointing id2label is_encoder_decoder label2id language length_penalty max_length
    min_length name no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_past output_scores pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
    pooler_size_per_head pooler_type prefix problem_type quantization_config remove_invalid_values repetition_penalty
    return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version type_vocab_size
    typical_p use_bfloat16 xla_device""".split()  # noqa: SIM905  # 20 lines as a list
)
# Keys that BERT lacks -> the families whose files have them, by the names of `model_type`.
_FAMILIES = {
    "num_hidden_groups inner_group_num net_structure_type gap_size": "albert",
    "use_relative_position max_relative_position": "nezha",
    "relative_attention pos_att_type position_biased_input max_relative_positions": "deberta or deberta-v2",
    "true_hidden_size intra_bottleneck_size use_bottleneck key_query_shared_bottleneck": "mobilebert",
    "head_ratio conv_kernel_size": "convbert",
    "rotary_value": "roformer",
    "input_embedding_size": "rembert",
    "attention_window": "longformer",
    "num_random_blocks": "big_bird",
    "embedding_size": "electra or albert",
    "sinusoidal_pos_embds hidden_dim": "distilbert",
    "multiple_of ffn_dim_multiplier n_kv_heads": "llama",
    "n_embd n_ctx n_positions": "gpt2 or openai-gpt",
    "mem_len d_inner untie_r": "xlnet",
    "emb_dim n_langs": "xlm",
    "d_kv d_ff relative_attention_num_buckets": "t5 or mpnet",
    "encoder_layers decoder_layers": "bart",
    "rms_norm_eps num_key_value_heads rope_theta": "llama",
    "image_size patch_size": "vit",
    "global_attn_every_n_layers": "modernbert",
    "d_model": "bart, t5 or xlnet",
    "dim n_layers n_heads": "distilbert or llama",
    "n_layer n_head": "gpt2 or xlnet",
}


def check_family(members: Mapping[str, Any]) -> None:
    """Raise ConfigError for a configuration without `model_type` that has a key of another family."""
    if "model_type" in members:
        return
    known = RULES.keys() | _COMMON
    if strange := [name for name in members if name not in known and not str(name).startswith("_")]:
        if len(strange) == 1:
            refuse_misspelling(str(strange[0]), members)
        of = next((of for keys, of in _FAMILIES.items() if any(name in strange for name in keys.split())), "")
        family = f"with its family, by these keys {of}" if of else 'with its family; "bert" passes over such keys'
        names = ", ".join(map(str, strange[:3])) + " ..." * (len(strange) > 3)
        verb = "is no key" if len(strange) == 1 else "are no keys"
        raise ConfigError(
            f'there is no model_type, and {names} {verb} of a BERT; add "model_type" {family}', field=strange[0]
        )


def check_complete(members: Mapping[str, Any]) -> None:
    """Raise ConfigError for a configuration without `model_type` and class that lacks what makes a BERT."""
    if (
        absent := []
        if {"model_type", "architectures"} & members.keys()
        else [name for name in _NEEDED if name not in members]
    ):
        raise ConfigError(
            f"there is no model_type, and no {', '.join(absent)} as in a BERT's config.json; give the file of a model"
        )


def file_notes(members: Mapping[str, Any]) -> str:
    """Return notes on what a configuration says and bertscope does not follow; an empty text without any."""
    found = []
    if members.get("auto_map"):
        found.append(
            "auto_map names code in the model's repository, which is not run: its network may differ from this"
        )
    if quantized := members.get("quantization_config"):
        method = str(quantized.get("quant_method", "")) if isinstance(quantized, Mapping) else ""
        method = f" ({visible(method[:40])})" if method else ""
        found.append(f"quantization_config{method} is not followed: all weights are taken as before quantization")
    return "\n".join(found)
