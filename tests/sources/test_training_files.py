"""`--from FILE`: TrainingArguments of transformers, and the configuration of accelerate."""

import json
import os
from pathlib import Path

import pytest

import bertscope
from bertscope.errors import BertscopeError, ConfigError
from bertscope.sources.training_files import read_training_file
from tests.conftest import DATA, ROOT, TRAINING_ARGUMENTS, cases, data

TINY = ("estimate", "bert-tiny", "--seq", "16")


@pytest.fixture
def given(tmp_path):
    """A function that writes the TrainingArguments with other settings, and returns the path."""

    def write(**settings):
        path = tmp_path / "args.json"
        path.write_text(json.dumps(TRAINING_ARGUMENTS | settings, indent=2))
        return path

    return write


def keys(rows) -> list[str]:
    return [row.key for row in rows]


def test_each_key_is_in_one_of_four_lists(given):
    file = read_training_file(given())
    assert file.fields == {
        "loop": "trainer",
        "batch": 16, "accumulate": 4, "clip_grad_norm": True, "precision": "autocast-bf16", "optimizer": "adamw",
        "optimizer_implementation": "default", "checkpointing": "full", "reentrant": False,
    }  # fmt: skip
    assert keys(file.no_effect) == ["output_dir", "learning_rate"]
    assert keys(file.not_modelled) == ["full_determinism"]
    assert keys(file.unknown) == ["my_key"]
    used = {row.key: (row.value, row.effect) for row in file.used}
    assert used["per_device_train_batch_size"] == (16, "batch 16")
    assert used["bf16"] == (True, "precision autocast-bf16")
    assert used["gradient_checkpointing"] == (True, "checkpointing full, no reentrant")


@pytest.mark.parametrize(("settings", "fields"), cases("training_files.yaml", "settings"), ids=str)
def test_a_setting_sets_fields_of_the_run(given, settings, fields):
    found = read_training_file(given(**settings)).fields
    assert {name: found[name] for name in fields} == fields


@pytest.mark.parametrize(
    "settings",
    data("training_files.yaml")["not_modelled"],
    ids=str,
)  # fmt: skip
def test_what_changes_the_memory_and_is_not_modelled_is_said(given, settings):
    (key,) = settings
    file = read_training_file(given(full_determinism=False, **settings))
    assert keys(file.not_modelled) == [key]
    assert file.not_modelled[0].effect


@pytest.mark.parametrize(
    "settings",
    [{"fsdp": []}, {"past_index": -1}, {"torch_compile": False}, {"half_precision_backend": "auto"}],
    ids=str,
)
def test_a_feature_that_is_off_has_no_effect(given, settings):
    (key,) = settings
    assert key in keys(read_training_file(given(**settings)).no_effect)


@pytest.mark.parametrize(("optim", "is_setting"), [("adamw_torch", False), ("sgd", True), ("rmsprop", True)])
def test_weight_decay_is_a_setting_of_an_optimizer_that_copies_the_gradients(given, optim, is_setting):
    file = read_training_file(given(optim=optim, weight_decay=0.01))
    assert file.fields.get("weight_decay") == (0.01 if is_setting else None)
    assert ("weight_decay" in keys(file.no_effect)) != is_setting


def test_a_configuration_of_accelerate_is_read_as_yaml_and_as_json(tmp_path):
    (tmp_path / "default_config.yaml").write_text((DATA / "accelerate.yaml").read_text())
    plain = {"distributed_type": "MULTI_GPU", "mixed_precision": "fp16", "num_processes": 2, "use_cpu": False}
    (tmp_path / "default_config.json").write_text(json.dumps(plain))
    for name in ("default_config.yaml", "default_config.json"):
        file = read_training_file(tmp_path / name)
        assert (file.format, file.fields) == ("accelerate config", {"precision": "autocast-fp16", "grad_scaler": True})
        assert {"distributed_type", "num_processes"} <= set(keys(file.not_modelled))
        assert file.unknown == ()
    assert "dynamo_config" in keys(read_training_file(tmp_path / "default_config.yaml").not_modelled)


def test_a_token_is_not_repeated(given):
    file = read_training_file(given(hub_token="hf_secret"))
    assert "hf_secret" not in str(file)


# ---- the command line ----


def test_the_run_is_that_of_the_file_and_the_report_has_its_lists(cli, given):
    result = cli(*TINY, "--from", given(), "--format", "json")
    report = result.json
    run = report["run"]
    assert (run["batch"], run["accumulate"], run["precision"], run["clip_grad_norm"]) == (16, 4, "autocast-bf16", True)
    assert [variant["checkpointing"] for variant in report["variants"]] == ["full"]
    assert [row["key"] for row in report["training_file"]["not_modelled"]] == ["full_determinism"]
    assert report["training_file"]["replaced"] == []
    assert bertscope.to_json(bertscope.from_json(result.out)) == result.out
    same = "--loop trainer --batch 16 --accumulate 4 --precision autocast-bf16 --clip-grad-norm --checkpointing full"
    by_hand = cli(*TINY, *same.split(), "--format", "json").json
    assert by_hand["training_file"] is None
    assert by_hand["variants"] == report["variants"]


def test_an_option_replaces_the_file_and_this_is_said(cli, given):
    result = cli(
        *TINY, "--from", given(), "--batch", "2", "--no-clip-grad-norm", "--optimizer", "sgd", "--format", "json"
    )
    run = result.json["run"]
    assert (run["batch"], run["clip_grad_norm"], run["optimizer"], run["accumulate"]) == (2, False, "sgd", 4)
    replaced = {row["key"]: row["effect"] for row in result.json["training_file"]["replaced"]}
    assert replaced == {
        "batch": "an option sets 2", "clip_grad_norm": "an option sets false", "optimizer": "an option sets sgd",
    }  # fmt: skip
    assert "batch 16: an option sets 2" in result.err


@pytest.mark.parametrize("place", ["before", "after"])
def test_an_option_for_the_precision_replaces_that_of_the_file_as_a_whole(cli, given, place):
    path = given(bf16=False, fp16=True)
    words = ("--precision", "fp16", "--from", path) if place == "before" else ("--from", path, "--precision", "fp16")
    run = cli(*TINY, *words, "--format", "json").json["run"]
    assert (run["precision"], run["grad_scaler"]) == ("fp16", False)


def test_another_optimizer_does_not_get_the_implementation_of_the_file_s(cli, given):
    result = cli(*TINY, "--from", given(optim="adamw_torch_fused"), "--optimizer", "rmsprop", "--format", "json")
    assert (result.code, result.json["run"]["optimizer_implementation"]) == (0, "default")


def test_fit_searches_the_batch_and_takes_the_rest(cli, given):
    result = cli("fit", "bert-tiny", "--budget", "1GiB", "--seq", "16", "--from", given(), "--format", "json")
    report = result.json
    assert [(row["precision"], row["checkpointing"]) for row in report["rows"]] == [("autocast-bf16", "full")]
    assert (report["asked_batch"], report["run"]["accumulate"]) == (None, 4)
    assert [(row["key"], row["effect"]) for row in report["training_file"]["replaced"]] == [("batch", "it is searched")]
    assert "batch 16: it is searched" in result.err


def test_plan_chooses_the_checkpointing_and_takes_the_rest(cli, given):
    path = given(gradient_checkpointing_kwargs={"use_reentrant": True})
    result = cli("plan", "bert-tiny", "--budget", "1GiB", "--seq", "16", "--from", path, "--format", "json")
    assert (result.code, result.json["run"]["accumulate"], result.json["run"]["reentrant"]) == (0, 4, False)
    replaced = {row["key"]: row["effect"] for row in result.json["training_file"]["replaced"]}
    assert replaced == dict.fromkeys(("checkpointing", "reentrant"), "it is searched")


def test_the_notes_on_the_page_are_those_of_the_command(printed):
    page = (ROOT / "docs" / "memory.md").read_text()
    command = "bertscope estimate bert-tiny --seq 512 --from args.json"
    assert f"$ {command}\n" in page
    assert page.partition("```text\nnote: args.json")[2].partition("```")[0] == printed(command).err.removeprefix(
        "note: args.json"
    )


# ---- files that are no training file; tests/corpus.py damages good ones ----

NO_FILES = [
    ("empty.json", b"", "the file is empty; give the output of TrainingArguments.to_json_string"),
    ("config.json", b'{"hidden_size": 8}', "it has none of .*per_device_train_batch_size"),
    ("training_args.bin", b"PK\x03\x04" + bytes(40), "is a pickle, which can run code"),
    ("old_args.bin", b"\x80\x02}q\x00.", r"save TrainingArguments.to_json_string\(\) to a .json file"),
    ("number.json", b'{"output_dir": "a", "per_device_train_batch_size": 1e999}', "must be an integer"),
    ("folder", None, "is a folder"),
    ("pipe", None, "not a regular file"),
    ("absent", None, "No such file"),
]


@pytest.mark.parametrize(("name", "content", "words"), NO_FILES, ids=lambda value: str(value)[:20])
def test_what_is_no_training_file_is_one_line_that_says_what_was_expected(tmp_path, name, content, words):
    path = tmp_path / name
    if name == "folder":
        path.mkdir()
    elif name == "pipe":
        os.mkfifo(path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(BertscopeError, match=words) as caught:
        read_training_file(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("settings", "words"), cases("training_files.yaml", "impossible"), ids=str)
def test_an_impossible_value_is_an_error_with_its_line(given, settings, words):
    path = given(**settings)
    (key,) = settings
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if f'"{key}"' in text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_training_file(path)
    assert caught.value.where == f"{path}:{line}"


# Files of other trainers, as their documentation writes them -> some of the settings, and keys that are not modelled.
OTHER_TRAINERS = {
    "axolotl": ("base_model: x\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\nsequence_len: 512\noutput_dir: o\n"
                "optimizer: adamw_bnb_8bit\nbf16: auto\ntf32: false\ngradient_checkpointing: true\nadapter: lora\n"
                "load_in_8bit: true\nresume_from_checkpoint:\n",
                {"batch": 2, "accumulate": 4, "seq": 512, "optimizer": "adamw-8bit", "precision": "bf16",
                 "checkpointing": "full", "quantize": "int8"}, set()),
    "axolotl in 4 bits": ("micro_batch_size: 2\nload_in_4bit: true\n", {"quantize": "nf4-dq"}, set()),
    "LLaMA-Factory in 4 bits": ("finetuning_type: full\ncutoff_len: 64\nquantization_bit: 4\n"
                                "double_quantization: false\n", {"quantize": "nf4"}, set()),
    "LLaMA-Factory in 3 bits": ("finetuning_type: full\ncutoff_len: 64\nquantization_bit: 3\n", {},
                                {"quantization_bit"}),
    "LLaMA-Factory": ("model_name_or_path: x\nstage: sft\ndo_train: true\nfinetuning_type: full\ncutoff_len: 2048\n"
                      "output_dir: out\nper_device_train_batch_size: 1\nbf16: true\n",
                      {"batch": 1, "seq": 2048, "precision": "autocast-bf16", "checkpointing": "full"}, set()),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_TRAINERS)
def test_a_file_of_another_trainer_is_read_by_its_own_words(tmp_path, name):
    text, settings, not_modelled = OTHER_TRAINERS[name]
    (tmp_path / "train.yaml").write_text(text)
    file = read_training_file(tmp_path / "train.yaml")
    assert file.format == name.partition(" in ")[0]
    assert settings.items() <= file.fields.items()
    assert set(keys(file.not_modelled)) == not_modelled
    assert keys(file.unknown) == []


# The LoRA of a file -> the adapters with which its model is built; or the key whose value they cannot have.
LORA = {
    "micro_batch_size: 2\nadapter: lora\nlora_r: 16\nlora_alpha: 32\nlora_target_modules: [query, value]":
        "r=16,alpha=32,target=query+value",
    "micro_batch_size: 2\nadapter: qlora\nlora_r: 8\nlora_target_linear: true": "r=8,alpha=8,target=all-linear",
    "finetuning_type: lora\nlora_rank: 4\nlora_target: query,value": "r=4,alpha=8,target=query+value",
    "finetuning_type: lora\nlora_target: all": "r=8,alpha=8,target=all-linear",
    "cutoff_len: 64\nlora_rank: 2": "r=2,alpha=8,target=all-linear",  # LLaMA-Factory's defaults
    "cutoff_len: 64\nfinetuning_type: full": None, "micro_batch_size: 2\nlora_r: 8": None,
    "cutoff_len: 64\nfinetuning_type: freeze": None,
    "micro_batch_size: 2\nadapter: lora": "r=8,alpha=8,target=query+value",
    "micro_batch_size: 2\nadapter: lora\nlora_r: x;y": "train.yaml:2",
    "micro_batch_size: 2\nadapter: lora\nlora_target_modules: {a: [1]}": "train.yaml:2",
    "micro_batch_size: 2\nadapter: lora\nlora_target_modules: 'layers.[\\d]+.(mlp|attn).(up|q)_proj'": "train.yaml:2",
    "micro_batch_size: 1\ncutoff_len: 64\nmodel: x\nmodel_class: llm\npeft_config: {name: lora, r: 16}": "train.yaml:1",
}  # fmt: skip


@pytest.mark.parametrize("text", LORA)
def test_the_model_of_a_training_file_has_its_adapters(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    Path("train.yaml").write_text(text)
    if str(LORA[text]).startswith("train.yaml"):
        with pytest.raises(BertscopeError) as caught:
            read_training_file("train.yaml")
        assert caught.value.where == LORA[text]
        return
    report = bertscope.estimate("bert-tiny", training_file="train.yaml", batch=1, seq=8, checkpointing="none")
    assert report.subject.lora == LORA[text]
    typed = bertscope.load("bert-tiny", lora="r=4,target=key")
    report = bertscope.estimate(typed, training_file="train.yaml", batch=1, seq=8, checkpointing="none")
    assert report.subject.lora == "r=4,alpha=8,target=key"
    assert ("lora" in keys(report.training_file.replaced)) == bool(LORA[text])


# What a file says of an evaluation -> its batch; none without held-out data or a strategy.
EVALUATED = {
    "output_dir: x\n": {
        "per_device_eval_batch_size: 32": None,
        "per_device_eval_batch_size: 32\neval_strategy: 'no'\ndo_eval: false": None,
        "per_device_eval_batch_size: 32\neval_strategy: epoch": 32,
        "per_gpu_eval_batch_size: 16\nevaluation_strategy: steps": 16, "do_eval: true": 8,
    },
    "micro_batch_size: 4\n": {  # axolotl
        "val_set_size: 0.1": 4, "val_set_size: 0.1\neval_batch_size: 16": 16, "test_datasets: [{path: x}]": 4,
        "val_set_size: 0\neval_batch_size: 16\neval_strategy: steps": None,
        "val_set_size: 0.1\neval_strategy: 'no'": None, "eval_steps: 10": None,
    },
    "finetuning_type: full\nval_size: 0.1\n": {  # LLaMA-Factory
        "": None, "eval_strategy: steps": 8, "eval_strategy: steps\nper_device_eval_batch_size: 1": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("start", EVALUATED)
def test_a_run_evaluates_if_its_file_says_so(tmp_path, start):
    for words, batch in EVALUATED[start].items():
        (tmp_path / "train.yaml").write_text(f"{start}{words}\n")
        assert read_training_file(tmp_path / "train.yaml").fields.get("eval_batch") == batch, words


def test_offloaded_checkpointing_is_taken_as_full(tmp_path):
    (tmp_path / "train.yml").write_text("micro_batch_size: 2\ngradient_checkpointing: offload\n")
    assert read_training_file(tmp_path / "train.yml").fields["checkpointing"] == "full"
