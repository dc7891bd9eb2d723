"""The recipes of docs/run.md for packages that the tests do not install: `.ci/versions frameworks` runs them.

pytest does not collect this file by itself. Each script trains a small model; its dry run with a CPU's kernels holds
what the real run on the CPU holds, in each step and in the evaluation after the last one; but for the batch that a
loader has ready on the host.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bertscope
from bertscope.sources.find import source_of
from bertscope.torch_access import has_bf16_products
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
    dry["steps"].append((dry["after"], dry["steps"][2][1]))  # the evaluation
    real["steps"].append((real["after"], real["steps"][2][1]))
    for ours, theirs in zip(dry["steps"], real["steps"], strict=True):
        assert ours[0] - ours[1] == pytest.approx(theirs[0] - theirs[1], abs=theirs[0] / 1000)
    monkeypatch.chdir(tmp_path)
    report = bertscope.run("train.py", gpu="t4")
    assert report.updates >= 3
    assert any(phase.phase == "evaluation" and phase.step == 3 for phase in report.phases)


@pytest.mark.parametrize(("settings", "blas_bytes", "onednn_bytes"), cases("quantized.yaml", "loops"))
def test_a_real_loop_with_bitsandbytes_has_the_recorded_peak(settings, blas_bytes, onednn_bytes):
    pytest.importorskip("bitsandbytes")
    words = [sys.executable, str(DATA / "scripts" / "qlora.py"), json.dumps(settings)]
    out = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    (line,) = (line for line in out.splitlines() if line.startswith("REAL "))
    real_bytes = onednn_bytes if has_bf16_products() else blas_bytes
    assert int(line.split()[1]) == pytest.approx(real_bytes, rel=1e-4)


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
