"""The recipes of docs/run.md for packages that the tests do not install: `.ci/versions frameworks` runs them.

pytest does not collect this file by itself. Each script trains a small model; its dry run with a CPU's kernels holds
what the real run on the CPU holds, in each step and in the evaluation after the last one.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bertscope
from bertscope.sources.find import source_of
from tests.conftest import DATA, ROOT, cases, data
from tests.memory.test_quantized import LLAMA

MODEL = """
import sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
import torch
words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *"abcdefghijklmnopqrstuvwxyz"])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", eos_token="[PAD]")
text = "a b c d e f g h i j k l m n o p"
sizes = {"hidden_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 768}
sizes["vocab_size"] = 64
"""
SCRIPTS, LOSSES = data("frameworks.yaml")["scripts"], data("frameworks.yaml")["losses"]
SCRIPTS |= {
    name: SCRIPTS["sentence_transformers"].replace("loss = MultipleNegativesRankingLoss(model)", f"loss = {loss}")
    for name, loss in LOSSES.items()
}


def printed(folder: Path, *command: str, script: tuple[str, ...] = ("train.py",), **variables: str) -> dict:
    """Return the line of JSON that a run of a script prints."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= variables
    words = [sys.executable, *command, "3", *script, "few"]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("DRY ", "REAL "))]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[-1].partition(" ")[2])


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_a_framework_holds_what_its_real_run_holds(name, tmp_path, monkeypatch):
    pytest.importorskip(name.partition(" ")[0])
    (tmp_path / "train.py").write_text(MODEL + SCRIPTS[name])
    dry = printed(tmp_path, "-m", "tests.dry_run.like_cpu")
    real = printed(tmp_path, str(ROOT / "tests/real_run.py"))
    for ours, theirs in zip([*dry["steps"], [dry["after"]]], [*real["steps"], [real["after"]]], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)  # the evaluation comes last
    monkeypatch.chdir(tmp_path)
    report = bertscope.run("train.py", gpu="t4")
    assert report.updates >= 3
    assert any(phase.phase == "evaluation" and phase.step == 3 for phase in report.phases)


PLANNED = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 400, "hidden_size": 64,
           "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 256,
           "max_position_embeddings": 64}  # fmt: skip
PLANS = (
    {},
    {"precision": "autocast-bf16", "clip_grad_norm": True},
    {"optimizer": "sgd", "momentum": 0.9, "accumulate": 3, "clip_grad_norm": True},
    {"freeze": ["embeddings"], "accumulate": 2},
    {"lora": "r=2,target=query+value", "precision": "autocast-bf16"},
)


@pytest.mark.parametrize("settings", PLANS, ids=str)
def test_lightning_trains_with_the_code_of_a_plan_in_the_memory_that_it_says(settings, tmp_path):
    pytest.importorskip("lightning")
    adapters = {"lora": settings["lora"]} if "lora" in settings else {}
    source, run = source_of(PLANNED).with_options(**adapters), {"batch": 16, "seq": 32, "loop": "lightning"}
    run |= {name: value for name, value in settings.items() if name != "lora"}
    none, full = (variant.estimated.cost.gpu_bytes
                  for variant in bertscope.estimate(source, checkpointing="none,full", **run).variants)  # fmt: skip
    planned = bertscope.plan(source, (none + full) // 2, margin=0, **run).first
    text = bertscope.plan(source, (none + full) // 2, margin=0, **run).emitted("lightning")
    sets = 4 * planned.batch * planned.accumulate  # of ids, masks, types and labels
    (tmp_path / "plan.py").write_text(text)
    (tmp_path / "train.py").write_text(
        "import lightning, peft, torch, transformers\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "from plan import *\n"
        f"model = transformers.BertForMaskedLM(transformers.BertConfig(**{PLANNED}))\n"
        "for name, param in model.named_parameters():\n"
        f"    param.requires_grad_('embeddings' not in name or {'freeze' not in settings})\n"
        + "model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=['query', 'value']))\n"
        * bool(adapters)
        + "class Module(lightning.LightningModule):\n    def __init__(self):\n        super().__init__()\n"
        "        self.model = model\n    def training_step(self, batch, number):\n"
        "        names = 'input_ids', 'attention_mask', 'token_type_ids', 'labels'\n"
        "        return self.model(**dict(zip(names, batch))).loss\n    def configure_optimizers(self):\n"
        "        trained = [param for param in self.parameters() if param.requires_grad]\n"
        f"        return torch.optim.{'SGD' if 'optimizer' in settings else 'AdamW'}(trained"
        f"{', 0.01, momentum=0.9' * ('optimizer' in settings)})\n"
        f"ids = torch.randint(0, 400, ({sets}, 32))\n"
        "rows = TensorDataset(ids, torch.ones_like(ids), torch.zeros_like(ids), ids.clone())\n"
        f"Trainer = lambda **options: lightning.Trainer(max_epochs=1, devices=1, accelerator='cpu', logger=False, "
        "enable_checkpointing=False, enable_progress_bar=False, **options)\n"
        f"trainer = {text.rpartition('# ')[2].partition(' with batches')[0]}\n"
        f"trainer.fit(Module(), DataLoader(rows, {planned.batch}))\n"
    )
    real = printed(tmp_path, str(ROOT / "tests/real_run.py"))
    data_bytes = 4 * sets * 32 * 8
    assert real["steps"][2][0] - data_bytes == pytest.approx(planned.peak_bytes, rel=3e-4)


def real_qlora_bytes(settings):
    """The peak of tests/data/scripts/qlora.py, a loop in which nothing of bertscope runs."""
    words = [sys.executable, str(DATA / "scripts" / "qlora.py"), json.dumps(settings)]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in out.splitlines() if line.startswith("REAL "))
    return int(line.split()[1])


@pytest.mark.parametrize("settings", [case[0] for case in cases("quantized.yaml", "loops")], ids=str)
def test_a_real_loop_with_bitsandbytes_has_the_estimated_peak(settings):
    """The recorded peak is of torch 2.13 and transformers 5.23; with 2.15 and 5.24 int8 with autocast has 3 % less."""
    pytest.importorskip("bitsandbytes")
    report = bertscope.estimate(source_of(LLAMA).with_options(lora="r=8,alpha=16"), batch=4, seq=64, **settings)
    assert real_qlora_bytes(settings) == pytest.approx(report.variants[0].estimated.cost.peak_bytes, rel=1e-4)


@pytest.mark.parametrize(("precision", "bytes_"), cases("quantized.yaml", "dora"))
def test_a_real_loop_with_dora_has_the_recorded_peak(precision, bytes_):
    pytest.importorskip("bitsandbytes")
    assert real_qlora_bytes({"quantize": "nf4", "precision": precision, "dora": True}) == bytes_


@pytest.mark.parametrize("precision", ["bf16", "autocast-bf16"])
def test_the_code_of_a_plan_for_a_quantized_model_saves_what_the_plan_says(precision):
    """bitsandbytes has one operator for a product, and so have the layers of bertscope/model/quantized.py."""
    pytest.importorskip("bitsandbytes")
    model, settings = source_of(LLAMA).with_options(lora="r=8,alpha=16"), {"quantize": "nf4", "precision": precision}
    full = (
        bertscope.estimate(model, batch=4, seq=64, checkpointing="full", **settings)
        .variants[0]
        .estimated.peak.peak_bytes
    )
    report = bertscope.plan(model, full * 5 // 4, batch=4, seq=64, margin=0, **settings)
    assert any(item.saved for item in report.first.lists)
    real_bytes = real_qlora_bytes({**settings, "code": report.emitted("torch")})
    assert real_bytes == pytest.approx(report.first.peak_bytes, rel=1e-4)


KERNELS = {
    "torchao": ["int8", "float8", "float8-training"],
    "liger_kernel": ["liger-loss", "liger-rms-norm", "liger-layer-norm", "liger-swiglu", "liger-rope"],
}


@pytest.mark.parametrize(("package", "kind"), [(name, kind) for name, kinds in KERNELS.items() for kind in kinds])
def test_layers_of_a_package_hold_in_a_dry_run_what_they_hold_in_a_real_one(package, kind, tmp_path):
    """The first step: from the second on Triton's interpreter holds the tensors of the kernel that ran last."""
    pytest.importorskip(package)
    script = (str(DATA / "scripts" / "kernels.py"), kind)
    dry = printed(tmp_path, "-m", "tests.dry_run.like_cpu", script=script)
    real = printed(tmp_path, str(ROOT / "tests/real_run.py"), script=script, TRITON_INTERPRET="1")
    assert dry["steps"][0][0] == pytest.approx(real["steps"][0][0], rel=1e-3)


@pytest.mark.parametrize("settings", [settings for settings, *_ in cases("quantized.yaml", "loops")])
def test_a_dry_run_of_bitsandbytes_on_a_gpu_has_the_peak_of_the_estimate(settings):
    """The package's Python code for CUDA, and the layers of bertscope/model/quantized.py."""
    pytest.importorskip("bitsandbytes")
    report = bertscope.run(str(DATA / "scripts" / "qlora.py"), args=[json.dumps(settings), "cuda"], gpu="a100-40gb")
    peak = max(phase.peak_bytes for phase in report.phases if phase.step == 3)
    model = source_of(LLAMA).with_options(lora="r=8,alpha=16")
    estimated = bertscope.estimate(model, batch=4, seq=64, gpu="a100-40gb", **settings).variants[0].estimated.cost
    assert peak == pytest.approx(estimated.peak_bytes, rel=2e-4)
