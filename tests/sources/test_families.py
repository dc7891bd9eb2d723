"""Every family of transformers by the same code: the counts and FLOPs of a tiny model, compared with torch's own.

These tests also pass with transformers 5, where a family that it does not have any more is skipped.
"""

import inspect
import json
import warnings
from copy import deepcopy

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bertscope.analyses.params import count
from bertscope.errors import BertscopeError
from bertscope.memory.simulator import Simulator
from bertscope.settings.run_config import RunConfig
from bertscope.sources.find import find, source_of
from bertscope.tracing.flops import FlopsRun, flops_model
from tests.conftest import EVERY_CASE, data
from tests.memory.plain_loop import peak_bytes, tokenized

transformers = pytest.importorskip("transformers", reason="it is in the extra 'test'")

BATCH, SEQ = 2, 8
TABLE = data("families.yaml")
SIZES, FAMILIES = TABLE["settings"]["sizes"], TABLE["families"]
# Families for whose operators and kind others here stand; `.ci/versions between` and `every` try them.
TWICE = {
    "xlm-roberta", "camembert", "electra", "deberta", "distilbert", "mpnet", "layoutlm", "squeezebert", "roformer",
    "rembert", "convbert", "flaubert", "gptj", "gpt_neox", "opt", "mistral", "qwen2", "gemma", "phi", "mt5",
    "mbart", "marian", "pegasus", "deit", "dinov2", "resnet", "siglip", "speech_to_text", "hubert", "albert",
    "modernbert", "big_bird", "mobilebert", "xlm", "gpt_neo", "bloom", "falcon", "switch_transformers", "led",
    "encoder-decoder", "beit", "segformer", "blip",
}  # fmt: skip
TRIED = [row for row in FAMILIES if EVERY_CASE or row[0] not in TWICE]


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


# Families whose files have the keys of a BERT and no others, so that one without its model type is a BERT's.
AS_BERT = {"bert", "bert-generation", "megatron-bert"}


@pytest.mark.parametrize(
    "model_type", sorted({family for family, *_ in FAMILIES} | AS_BERT | {"roberta", "camembert", "xlm-roberta-xl"})
)
def test_a_file_of_another_family_without_its_model_type_is_no_bert(model_type):
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    settings = next((settings for family, _, settings, *_ in FAMILIES if family == model_type), {})
    settings = {key: value for key, value in settings.items() if not key.endswith("token_id")}
    members = transformers.CONFIG_MAPPING[model_type].from_dict(deepcopy(settings)).to_dict()
    members = {key: value for key, value in members.items() if key not in ("model_type", "architectures")}
    if model_type in AS_BERT:
        assert source_of(members).family == "a BERT"
        return
    with pytest.raises(BertscopeError, match="there is no model_type"):
        source_of(members)


@pytest.mark.parametrize("content", data("no_bert.yaml"), ids=str)
def test_what_is_no_configuration_of_a_bert_is_counted_as_none(content, cli, tmp_path):
    members, words = content
    path = tmp_path / "config.json"
    path.write_text(json.dumps(members))
    for command in ("count", "fit", "estimate", "tree"):
        result = cli(command, path, *(("--gpu", "t4") if command == "fit" else ()))
        assert (result.code, result.out) == (2, ""), command
        assert "model_type" in result.err
        assert words in result.err


def test_the_first_file_of_a_bert_is_one(cli, tmp_path):
    """bert_config.json of google-research/bert, uncased_L-12_H-768_A-12, and config.json of transformers 2.0."""
    first = {
        "attention_probs_dropout_prob": 0.1, "directionality": "bidi", "hidden_act": "gelu", "hidden_dropout_prob": 0.1,
        "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 512,
        "num_attention_heads": 12, "num_hidden_layers": 12, "pooler_fc_size": 768, "pooler_num_attention_heads": 12,
        "pooler_num_fc_layers": 3, "pooler_size_per_head": 128, "pooler_type": "first_token_transform",
        "type_vocab_size": 2, "vocab_size": 30522,
    }  # fmt: skip
    later = {key: value for key, value in first.items() if not key.startswith(("pooler", "directionality"))}
    for members in (
        first,
        later | {"finetuning_task": None, "output_past": True, "torchscript": False, "num_labels": 2},
    ):
        (tmp_path / "config.json").write_text(json.dumps(members))
        result = cli("count", tmp_path / "config.json", "--format", "json")
        assert result.json["totals"]["distinct_params"] == 109_482_240


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_what_a_file_says_and_is_not_followed_has_a_note_of_its_own(cli, tmp_path, family):
    more = {"auto_map": {"AutoModel": "x.Y"}, "quantization_config": {"quant_method": "bitsandbytes"}}
    given = {"model_type": family, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1,
             "intermediate_size": 8, "vocab_size": 100}  # fmt: skip
    counts, notes = [], []
    for members in (given, given | more):
        (tmp_path / "config.json").write_text(json.dumps(members))
        result = cli("count", tmp_path / "config.json", "--format", "json")
        counts.append(result.json["totals"])
        notes.append([line for line in result.err.splitlines() if line.startswith("note: ")])
    assert counts[0] == counts[1]
    assert [any(word in line for line in notes[1]) for word in ("auto_map", "bitsandbytes")] == [True, True]
    assert len(notes[1]) == len(notes[0]) + 2


@pytest.mark.parametrize(
    ("model_type", "name", "settings", "inputs"), TRIED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_family_has_the_parameters_and_flops_that_torch_counts(tmp_path, model_type, name, settings, inputs):
    if model_type not in transformers.CONFIG_MAPPING or not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    if name == "XLNetLMHeadModel" and transformers.__version__ < "5":  # its tokenizer returns segments before version 5
        inputs = inputs | {"token_type_ids": ((BATCH, SEQ), 4)}  # relative to them it computes scores
    settings = json.loads(json.dumps(settings))
    given = settings | {"model_type": model_type, "architectures": [name]}
    (tmp_path / "config.json").write_text(json.dumps(given))
    model = reference(model_type, name, settings)
    source = find(tmp_path)
    built = source.build()
    assert count(built).totals.distinct_params == sum(param.numel() for param in model.parameters())
    own, theirs = ([(path, param.shape) for path, param in module.named_parameters()] for module in (built, model))
    assert own == theirs
    real = {key: torch.randint(3, top, shape) if top else torch.rand(shape) for key, (shape, top) in inputs.items()}
    with FlopCounterMode(display=False) as counter:
        model(**real)
    found = flops_model(FlopsRun(source=source), [BATCH], [SEQ]).rows[0].forward
    assert found.matmul_flops == counter.get_total_flops() > 0


# Without EVERY_CASE those with other operators than a BERT.
ENCODERS = [(family, name, settings) for family, name, settings, *_ in TRIED
            if name.endswith("ForMaskedLM") and family != "funnel"  # which reads values before transformers 5
            and (EVERY_CASE or family != "roberta")]  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "name", "settings"), ENCODERS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_memory_of_an_encoder_is_that_of_a_plain_loop(tmp_path, model_type, name, settings):
    """In 4.48 to 4.57 DeBERTa-v2 has scripted functions; Longformer divides sizes as tensors."""
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    settings = settings | {"vocab_size": 500}
    (tmp_path / "config.json").write_text(json.dumps(settings | {"model_type": model_type, "architectures": [name]}))
    found = Simulator(find(tmp_path)).memory(RunConfig(batch=BATCH, seq=SEQ))

    def inputs(model):
        ids, takes = torch.randint(3, 90, (BATCH, SEQ)), inspect.signature(model.forward).parameters
        return {key: value for key, value in (tokenized(ids) | {"labels": ids.clone()}).items() if key in takes}

    def build():
        return getattr(transformers, name)(transformers.CONFIG_MAPPING[model_type].from_dict(deepcopy(settings)))

    assert found.peak.peak_bytes == pytest.approx(peak_bytes(build, inputs, torch.optim.AdamW), rel=1e-3)


def test_count_names_the_version_of_transformers_whose_classes_decide_the_number(cli, tmp_path):
    import transformers

    settings = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 10, "n_positions": 4}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    version = f"torch {torch.__version__}, transformers {transformers.__version__}\n"
    assert version in cli("count", str(tmp_path), "-v").out
    assert "transformers" not in cli("count", "bert-tiny", "-v").out


def test_a_class_that_transformers_does_not_export_at_its_top_is_found(cli, tmp_path):
    import transformers

    config = transformers.MaskFormerSwinConfig(embed_dim=12, depths=[1, 1], num_heads=[2, 3])
    (tmp_path / "config.json").write_text(json.dumps(config.to_diff_dict() | {"model_type": config.model_type}))
    assert "MaskFormerSwinModel" in cli("count", tmp_path).out


def test_settings_that_are_no_numbers_of_modules_are_not_bounded_as_such(cli, tmp_path):
    """The values of facebook/wav2vec2-base and Qwen/Qwen1.5-MoE-A2.7B."""
    settings = {"num_codevectors_per_group": 320, "shared_expert_intermediate_size": 5632, "block_size": 1024}
    settings |= {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 20}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "roberta", "vocab_size": 60} | settings))
    assert cli("count", tmp_path).code == 0
