"""Adapter folders of peft: what is read, the base model, and a line for everything that is not supported."""

import json
import re
import time
from pathlib import Path

import pytest
import torch

from bertscope import load
from bertscope.errors import BertscopeError
from bertscope.model.lora import PeftModel
from bertscope.sources.find import find
from tests.conftest import EVERY_CASE, cases, data
from tests.memory.plain_loop import peak_bytes, tokenized

PEFT = data("adapter_config.json")  # as peft 0.12.0 writes it
TINY = {
    "model_type": "bert", "vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture
def adapter(tmp_path):
    """A folder with this adapter_config.json, changed by keywords."""

    def make(**changes) -> Path:
        folder = tmp_path / "my-lora"
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(PEFT | changes, indent=2))
        return folder

    return make


def test_a_folder_of_peft_is_its_base_model_with_adapters(adapter):
    source = load(adapter())
    assert source.name == "bert-tiny"
    assert source.architecture == "BertForSequenceClassification"
    assert str(source.lora) == "r=8,alpha=16,dropout=0.1,target=query+value,save=classifier"
    assert isinstance(source.build(), PeftModel)
    assert load(adapter() / "adapter_config.json") == source


@pytest.mark.parametrize(("changes", "architecture", "lora"), cases("adapters.yaml", "read"))
def test_the_class_and_the_settings_follow_the_file(adapter, changes, architecture, lora):
    source = load(adapter(**changes))
    assert source.architecture == architecture
    assert lora is None or lora in str(source.lora)


def test_the_base_model_is_next_to_the_adapter_before_any_other(adapter, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(TINY))
    folder = adapter(base_model_name_or_path="../base")
    assert load(folder).config.vocab_size == 99
    (folder / "config.json").write_text(json.dumps(TINY | {"vocab_size": 77}))
    assert load(folder).config.vocab_size == 77
    assert load(adapter(base_model_name_or_path=None)).config.vocab_size == 77


def test_options_change_the_base_model_but_not_the_adapters(adapter):
    assert load(adapter(), attention="eager").config.attn_implementation == "eager"
    with pytest.raises(BertscopeError, match=r"has adapters already .*; leave lora out, or name its base model"):
        load(adapter(), lora="r=4")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *cases("adapters.yaml", "refused"),
        ({"target_modules": ["query"] * 5000}, "target must be 1 to 2,048 names .* got 5,000 names"),
        ({"r": 10**400}, "r must be an integer"),
        ({"base_model_name_or_path": "x" * 5000}, "the base model"),
        ({"base_model_name_or_path": "a\0b"}, "the base model"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_not_supported_is_one_line_with_its_place(adapter, cli, changes, words):
    folder = adapter(**changes)
    started = time.process_time()
    with pytest.raises(BertscopeError, match=words) as raised:
        find(folder)
    assert time.process_time() - started < 5
    assert "adapter_config.json:" in str(raised.value)
    result = cli("count", str(folder))
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)


def test_settings_that_peft_refuses_together_are_one_line(adapter, cli):
    result = cli("count", str(adapter(layers_pattern="layer", rank_pattern={"query": 4})))
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "cannot add these adapters: ValueError" in result.err


def test_a_name_that_the_base_model_does_not_have_is_one_line(adapter, cli):
    result = cli("count", str(adapter(target_modules=["q_proj"])))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert re.search(
        r"adapter_config\.json:\d+: .* has no module 'q_proj' to adapt; choose from classifier", result.err
    )


# Further settings of an adapter on the tiny BERT, and the words of the adapter that each parameter's path has.
OF_PEFT = {
    "dora": ({"use_dora": True}, "lora_magnitude_vector"),
    "ranks": ({"rank_pattern": {"query": 4}}, "lora_A"),
    "layers": ({"layers_to_transform": [1]}, "layer.1.attention.self.query.lora_A"),
    "ia3": ({"peft_type": "IA3", "target_modules": ["key", "value"], "feedforward_modules": []}, "ia3_l"),
    "vera": ({"peft_type": "VERA", "r": 8, "target_modules": ["query"]}, "vera_lambda"),
    "adalora": ({"peft_type": "ADALORA", "total_step": 10, "target_modules": ["query"]}, "lora_E"),
    "prefix": ({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3}, "prompt_encoder"),
    "prompt": ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3}, "prompt_encoder"),
    "tokens": ({"peft_type": "TRAINABLE_TOKENS", "token_indices": [1, 2],
                "target_modules": "bert.embeddings.word_embeddings"},
               "trainable_tokens_delta"),
}  # fmt: skip


def written(folder: Path, base: dict[str, object], changes: dict[str, object]) -> Path:
    """A folder with a base model's configuration and an adapter's."""
    (folder / "config.json").write_text(json.dumps(base))
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "task_type": "SEQ_CLS"} | changes))
    return folder


FEW = ("dora", "ia3", "prefix", "tokens")  # one of each kind


@pytest.mark.parametrize(
    ("family", "name"), [*(("bert", name) for name in (OF_PEFT if EVERY_CASE else FEW)), ("roberta", "dora")]
)
def test_adapters_of_every_type_are_those_of_peft(cli, tmp_path, family, name):
    changes, words = OF_PEFT[name]
    folder = written(tmp_path, TINY | {"model_type": family}, changes)
    model = find(folder).build()
    trained = {path: param.numel() for path, param in model.named_parameters() if param.requires_grad}
    assert any(words in path for path in trained)
    assert model.get_nb_trainable_parameters()[0] == sum(trained.values())
    counted = cli("count", str(folder), "--format", "json").json["totals"]
    assert counted["trainable_params"] == sum(trained.values())
    estimate = cli("estimate", str(folder), "--batch", "2", "--seq", "8", "--format", "json").json["variants"][0]
    given = {
        **tokenized(torch.ones(2, 8, dtype=torch.long), segments=family == "bert"),
        "labels": torch.zeros(2, dtype=torch.long),
    }

    def make():
        return find(folder).build(device="cpu").train()

    real = peak_bytes(make, lambda model: given, lambda params: torch.optim.AdamW(params, lr=0.0))
    of_inputs = sum(tensor.nbytes for tensor in given.values())  # they exist before the measurement
    found = max(phase["peak_bytes"] for phase in estimate["estimated"]["phases"])
    assert found == pytest.approx(real + of_inputs, rel=1e-3)


def test_an_empty_list_of_feed_forward_layers_scales_their_outputs(tmp_path):
    changes = {"peft_type": "IA3", "target_modules": ["output.dense"], "feedforward_modules": [], "task_type": None}
    model = find(written(tmp_path, TINY, changes)).build()
    sizes = {param.numel() for path, param in model.named_parameters() if "ia3_l" in path}
    assert sizes == {TINY["hidden_size"]}  # else also the 24 inputs of the layers that peft takes by default


def test_a_file_of_peft_adds_its_adapters_to_any_model(cli, adapter):
    file = str(adapter(r=2) / "adapter_config.json")
    counted = cli("count", "bert-tiny", "--lora", file, "--format", "json").json
    assert counted["subject"]["lora"].startswith("r=2,")
    (adapter() / "adapter_config.json").write_text("{}")
    empty = cli("count", "bert-tiny", "--lora", file)
    assert (empty.code, empty.err.count("\n")) == (2, 1)


def test_from_takes_a_file_of_peft_as_lora_does(cli, adapter):
    file, step = (
        adapter(r=2) / "adapter_config.json",
        ("estimate", "bert-tiny", "--batch", "1", "--seq", "8", "--format", "json"),
    )
    assert cli(*step, "--from", file).json == cli(*step, "--lora", file).json
    result = cli(*step, "--from", file, "--lora", "r=8")
    assert result.code == 2
    assert "leave one out" in result.err


def test_lora_of_another_family_has_pefts_default_targets(cli, tmp_path):
    sizes = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 99}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    counted = cli("count", str(tmp_path), "--lora", "r=4", "--format", "json").json["totals"]
    assert counted["trainable_params"] == 2 * 4 * (16 + 3 * 16)  # c_attn of two layers
    of_mlp = cli("count", str(tmp_path), "--lora", "r=4,target=mlp.c_fc", "--format", "json").json["totals"]
    assert of_mlp["trainable_params"] == 2 * 4 * (16 + 4 * 16)
    of_all = cli("count", str(tmp_path), "--lora", "r=4,target=all-linear", "--format", "json").json["totals"]
    # c_attn, c_proj, c_fc and the MLP's c_proj of two layers, without the head, as peft takes them
    assert of_all["trainable_params"] == 2 * 4 * ((16 + 48) + (16 + 16) + (16 + 64) + (64 + 16))
    options = ("--lora", "r=4", "-a", "AutoModelForCausalLM", "--checkpointing", "full", "--reentrant")
    estimate = cli("estimate", str(tmp_path), *options, "--batch", "2", "--seq", "8", "--format", "json").json
    ids = torch.ones(2, 8, dtype=torch.long)

    def make():
        model = find(tmp_path, architecture="GPT2LMHeadModel", lora="r=4").build(device="cpu").train()
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
        return model

    given = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    real = peak_bytes(make, lambda model: given, lambda params: torch.optim.AdamW(params, lr=0.0))
    found = max(phase["peak_bytes"] for phase in estimate["variants"][0]["estimated"]["phases"])
    assert found == pytest.approx(real + 3 * ids.nbytes, rel=1e-2)  # bytes of the host's own tensors are 64 to 200
    refused = cli("count", str(tmp_path), "--lora", "r=4,target=query")
    assert (refused.code, refused.out, refused.err.count("\n")) == (2, "", 1)


@pytest.fixture
def stored(adapter):
    """The same folder with the tensors that peft saves."""
    from safetensors.torch import save_file

    folder = adapter()
    model = load(folder).build(device="cpu")
    save_file({name: tensor.detach().clone() for name, tensor in model.stored().items()},
              folder / "adapter_model.safetensors")  # fmt: skip
    return folder


def test_verify_compares_an_adapter_with_its_file(stored, cli):
    result = cli("diff", str(stored))
    assert result.code == 0
    of_adapters, of_classifier = 2 * 2 * 8 * (128 + 128), 2 * 128 + 2
    assert "holds bert-tiny (BertForSequenceClassification, LoRA r=8,alpha=16,dropout=0.1," in result.out
    assert f"{of_adapters + of_classifier:,} unique parameters; 10 of 10 names are stored" in result.out
    config = stored / "adapter_config.json"
    config.write_text(config.read_text().replace('"r": 8', '"r": 4'))
    result = cli("diff", str(stored), "--format", "json")
    assert result.code == 1
    assert {row["status"] for row in result.json["rows"] if row["is_wrong"]} == {"shape"}


def test_count_of_an_adapter_counts_the_model_and_of_its_file_the_stored_tensors(stored, cli):
    of_model = cli("count", str(stored), "--format", "json").json["totals"]
    assert of_model["distinct_params"] == 4_386_178 + 8_450
    assert of_model["trainable_params"] == 8_450
    of_file = cli("count", str(stored / "adapter_model.safetensors"), "--format", "json").json
    assert of_file["stored"]["distinct_params"] == 8_450
    assert cli("count", str(stored), "--stored", "--format", "json").json["stored"]["distinct_params"] == 8_450
