"""The recipes of docs/run.md for packages that the tests do not install: `.ci/versions frameworks` runs them.

pytest does not collect this file by itself. Each script trains a small model; its dry run with a CPU's kernels holds
what the real run on the CPU holds, in each step and in the evaluation after the last one; but for the batch that a
loader has ready on the host.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bertscope
from tests.conftest import ROOT

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
SCRIPTS = {
    "lightning": """
import lightning
from torch.utils.data import DataLoader, TensorDataset
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = LlamaForCausalLM(LlamaConfig(**sizes))
    def training_step(self, batch, number):
        return self.model(input_ids=batch[0], labels=batch[0]).loss
    def validation_step(self, batch, number):
        self.log("loss", self.model(input_ids=batch[0], labels=batch[0]).loss)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
ids = TensorDataset(torch.randint(0, 64, (96, 32)))
trainer = lightning.Trainer(max_epochs=1, devices=1, logger=False, enable_checkpointing=False, gradient_clip_val=1.0,
                            limit_train_batches=3 if sys.argv[1:] else None, enable_progress_bar=False)
trainer.fit(Module(), DataLoader(ids, 4), DataLoader(ids, 32))
""",
    "sentence_transformers": """
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
BertModel(BertConfig(**sizes)).save_pretrained("model")
tokenizer.save_pretrained("model")
model = SentenceTransformer("model")
rows = Dataset.from_dict({"anchor": [text] * 64, "positive": [text] * 64})
args = SentenceTransformerTrainingArguments("out", max_steps=3, per_device_train_batch_size=8, report_to="none",
                                            per_device_eval_batch_size=32, eval_strategy="steps", eval_steps=3,
                                            save_strategy="no", disable_tqdm=True)
loss = MultipleNegativesRankingLoss(model)
SentenceTransformerTrainer(model, args, train_dataset=rows, eval_dataset=rows, loss=loss).train()
""",
    "trl": """
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
rows = Dataset.from_dict({"text": [text] * 64})
args = SFTConfig("out", max_steps=3, per_device_train_batch_size=8, report_to="none", save_strategy="no", bf16=False,
                 per_device_eval_batch_size=16, eval_strategy="steps", eval_steps=3, disable_tqdm=True)
model = LlamaForCausalLM(LlamaConfig(**sizes))
SFTTrainer(model, args, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer).train()
""",
}


def printed(folder: Path, *command: str) -> dict:
    """Return the line of JSON that a run of a script prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    words = [sys.executable, *command, "3", "train.py", "few"]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("DRY ", "REAL "))]
    assert lines, done.stderr[-4000:]
    return json.loads(lines[-1].partition(" ")[2])


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_a_framework_holds_what_its_real_run_holds(name, tmp_path, monkeypatch):
    pytest.importorskip(name)
    (tmp_path / "train.py").write_text(MODEL + SCRIPTS[name])
    dry = printed(tmp_path, "-m", "tests.dry_run.like_cpu")
    real = printed(tmp_path, str(ROOT / "tests/real_run.py"))
    dry["steps"].append((dry["after"], dry["steps"][2][1]))  # the evaluation
    real["steps"].append((real["after"], real["steps"][2][1]))
    for ours, theirs in zip(dry["steps"], real["steps"], strict=True):
        assert ours[0] - ours[1] == pytest.approx(theirs[0] - theirs[1], abs=theirs[0] / 1000)
    monkeypatch.chdir(tmp_path)
    report = bertscope.run("train.py", gpu="t4")
    assert report.updates >= 3
    assert any(phase.phase == "evaluation" and phase.step == 3 for phase in report.phases)
