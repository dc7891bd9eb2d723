"""The Trainer of transformers: its memory, and every key of its arguments and of accelerate's configuration."""

import dataclasses
import gc
import json

import pytest
import torch
import transformers
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.state import AcceleratorState
from torch.profiler import ProfilerActivity, profile, record_function
from transformers.training_args import OptimizerNames

import bertscope
from bertscope.settings.run_config import RunConfig
from bertscope.settings.training import OPTIMIZERS
from bertscope.sources.training_files import read_training_file
from tests.conftest import EVERY_CASE
from tests.memory.plain_loop import highest

BATCH, SEQ, STEPS = 4, 24, 3
CONFIG = {
    "vocab_size": 500, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256,
    "max_position_embeddings": 32,
}  # fmt: skip


DISTIL = {"vocab_size": 3000, "dim": 64, "n_layers": 1, "n_heads": 4, "hidden_dim": 256, "max_position_embeddings": 32}
WIDE = CONFIG | {"hidden_size": 256, "intermediate_size": 1024}  # 16-bit products of narrower matrices are copied


@pytest.fixture(autouse=True)
def _no_state_of_other_tests(monkeypatch):
    """TrainingArguments sets this variable for the process, and accelerate keeps one state."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    AcceleratorState._reset_state(reset_partial_state=True)


class Marks(transformers.TrainerCallback):
    """A mark in the profile around each optimizer step with its micro-batches."""

    def on_step_begin(self, *args, **kwargs):
        self.mark = record_function("trainer step")
        self.mark.__enter__()

    def on_step_end(self, *args, **kwargs):
        self.mark.__exit__(None, None, None)


def model(fields=CONFIG):
    return transformers.BertForSequenceClassification(transformers.BertConfig(**fields))


def arguments(folder, **settings):
    return transformers.TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[],
        disable_tqdm=True, save_strategy="no", logging_steps=1000, **settings,
    )  # fmt: skip


def example():
    ids = torch.randint(0, CONFIG["vocab_size"], (SEQ,))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": 0}


def trained(args, fields) -> int:
    """The peak of the last step of a Trainer; the profiler starts before the model is built, and after the data."""
    data = [example() for _ in range(BATCH * 4)]
    gc.collect()  # the Trainer of another test is a cycle; its memory must not be freed during this one
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        transformers.Trainer(model=model(fields), args=args, train_dataset=data, callbacks=[Marks()]).train()
    return highest(profiler, "trainer step")


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 2, "gradient_checkpointing": True, "optim": "rmsprop"},
        {"gradient_accumulation_steps": 4, "bf16": True},
        *EVERY_CASE
        * (
            {"gradient_accumulation_steps": 4},
            {"gradient_accumulation_steps": 4, "optim": "adafactor", "max_grad_norm": 0},
        ),
    ],
    ids=str,
)
def test_the_estimate_of_training_arguments_is_the_peak_of_the_trainer(tmp_path, settings):
    args = arguments(tmp_path, **settings)
    path = tmp_path / "args.json"
    path.write_text(args.to_json_string())
    file = bertscope.read_training_file(path)
    assert (file.fields["batch"], file.fields["accumulate"]) == (BATCH, settings["gradient_accumulation_steps"])
    fields = WIDE if settings.get("bf16") else CONFIG
    module = model(fields)
    if file.fields["checkpointing"] == "full":
        module.gradient_checkpointing_enable({"use_reentrant": file.fields["reentrant"]})
    rows = [example() for _ in range(file.fields["batch"])]
    inputs = {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}
    (variant,) = bertscope.estimate(module, inputs, training_file=file).variants
    peak, real = variant.estimated.peak.peak_bytes, trained(args, fields)
    # The Trainer of 4.43 has one micro-batch before its turn, that of 5 all of a step and for a moment those of two.
    waiting = sum(tensor.nbytes for tensor in inputs.values()) * file.fields["accumulate"]
    assert 0.999 * (peak - waiting) <= real <= 1.001 * (peak + waiting)


@pytest.mark.parametrize("keeps_logits", [True, False][: 1 + EVERY_CASE])
def test_the_estimate_of_an_evaluation_is_the_peak_of_the_trainer(tmp_path, keeps_logits):
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=6 * BATCH)
    (tmp_path / "args.json").write_text(args.to_json_string())
    config = tmp_path / "config.json"
    config.write_text(json.dumps(DISTIL | {"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"]}))
    data = [{"input_ids": torch.arange(SEQ), "attention_mask": torch.ones(SEQ, dtype=torch.long),
             "labels": torch.arange(SEQ)} for _ in range(18 * BATCH)]  # fmt: skip
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function("trainer"):
        metrics = (lambda predictions: {}) if keeps_logits else None
        module = transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**DISTIL))
        transformers.Trainer(model=module, args=args, train_dataset=data, eval_dataset=data,
                             compute_metrics=metrics).train()  # fmt: skip
    fields = bertscope.read_training_file(tmp_path / "args.json").fields
    report = bertscope.estimate(config, seq=SEQ, eval_samples=len(data) * keeps_logits, **fields)
    peak = report.variants[0].estimated.peak
    assert (fields["eval_batch"], peak.phase) == (6 * BATCH, "evaluation")
    assert peak.peak_bytes == pytest.approx(highest(profiler, "trainer"), rel=0.001)


def test_the_evaluation_of_a_decoder_in_the_trainer_has_no_cache(tmp_path):
    """From transformers 5 on the Trainer sets use_cache; in another loop the cache is there."""
    sizes = {"vocab_size": 300, "n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 32}
    config = tmp_path / "config.json"
    config.write_text(json.dumps(sizes | {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=16 * BATCH)
    data = [{"input_ids": torch.arange(SEQ), "attention_mask": torch.ones(SEQ, dtype=torch.long),
             "labels": torch.arange(SEQ)} for _ in range(32 * BATCH)]  # fmt: skip
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function("trainer"):
        module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
        transformers.Trainer(model=module, args=args, train_dataset=data, eval_dataset=data).train()
    fields: dict = {"batch": BATCH, "seq": SEQ, "eval_batch": 16 * BATCH}
    loops = {
        loop: bertscope.estimate(config, loop=loop, **fields).variants[0].estimated for loop in ("trainer", "freed")
    }
    assert loops["trainer"].peak.phase == "evaluation"
    assert loops["trainer"].peak.peak_bytes == pytest.approx(highest(profiler, "trainer"), rel=0.001)
    cache = 2 * sizes["n_layer"] * 16 * BATCH * SEQ * sizes["n_embd"] * 4
    assert loops["freed"].peak.peak_bytes - loops["trainer"].peak.peak_bytes == pytest.approx(cache, rel=0.2)


def test_every_key_of_training_arguments_is_known_and_the_defaults_are_all_modelled(tmp_path):
    path = tmp_path / "args.json"
    path.write_text(arguments("x", optim="adamw_torch").to_json_string())
    file = read_training_file(path)
    assert file.format == "TrainingArguments"
    assert (file.unknown, file.not_modelled) == ((), ())
    assert len(file.used) + len(file.no_effect) == len(json.loads(path.read_text()))
    assert file.fields == {
        "loop": "trainer", "batch": BATCH, "accumulate": 1, "optimizer": "adamw", "optimizer_implementation": "default",
        "clip_grad_norm": True,
        "checkpointing": "none", "device": "cpu",
    }  # fmt: skip


@pytest.mark.parametrize("word", [name.value for name in OptimizerNames])
def test_every_optim_is_the_table_s_optimizer_or_named_as_not_modelled(tmp_path, word):
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"output_dir": "x", "optim": word}))
    file = read_training_file(path)
    is_other = any(
        part in word for part in ("paged_lion", "paged_ademamix", "galore", "lomo", "npu", "xla", "anyprecision")
    )
    if is_other or word in ("lion_8bit", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit"):
        assert [row.key for row in file.not_modelled] == ["optim"]
        assert "optimizer" not in file.fields
    else:
        assert RunConfig(**file.fields).optimizer in OPTIMIZERS


def test_every_key_of_a_configuration_of_accelerate_is_known(tmp_path):
    path = tmp_path / "default_config.yaml"
    config = ClusterConfig(
        compute_environment="LOCAL_MACHINE", distributed_type="NO", mixed_precision="fp16", use_cpu=False, debug=False,
        num_processes=1,
    )  # fmt: skip
    config.to_yaml_file(path)
    file = read_training_file(path)
    assert file.fields == {"precision": "autocast-fp16", "grad_scaler": True}
    assert (file.format, file.unknown, file.not_modelled) == ("accelerate config", (), ())
    names = [field.name for field in dataclasses.fields(ClusterConfig)]
    path.write_text("".join(f"{name}: null\n" for name in names))
    assert read_training_file(path).unknown == ()
