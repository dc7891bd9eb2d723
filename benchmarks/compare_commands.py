"""The command lines, Python calls and files of benchmarks/compare.py.

A row is a text with `{}` for each of its choices. Sizes are small, so that all of them take minutes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

Rows = Sequence[str]


def lines(text: str) -> list[str]:
    """Return the lines of a text without indentation; the line `-` is no option at all."""
    return ["" if line.strip() == "-" else line.strip() for line in text.strip().splitlines()]


# ---- choices ----

HEADS = [
    f"-a {name}" for name in (
        "BertModel", "BertForPreTraining", "BertForMaskedLM", "BertLMHeadModel", "BertForNextSentencePrediction",
        "BertForSequenceClassification", "BertForMultipleChoice", "BertForTokenClassification",
        "BertForQuestionAnswering",
    )
]  # fmt: skip
FAMILIES = ["roberta", "distilbert", "electra", "albert", "gpt2", "vit", "t5"]  # folders with a config.json
OWN = ["own.py:mlp --input input=BxS:int64", "own.py:conv --input input=Bx3x8x8:float32"]
LORA = "--lora r=4,alpha=8,dropout=0.05,target=query+value"
# What a step computes and trains, on which device and on how many ranks: options of both `estimate` and `fit`.
STEPS = [
    *lines("""
        --mode inference
        --mode inference --padding 0.5
        --mode forward
        --mode forward --no-dropout --loop plain
        --mode forward --device cuda --padding 0.1
        --optimizer none
        --optimizer sgd
        --optimizer sgd --momentum 0.9 --optimizer-implementation loop
        --optimizer sgd --momentum 0.9 --device cuda --optimizer-implementation fused
        --optimizer rmsprop --momentum 0.5
        --optimizer adam --amsgrad
        --optimizer adamw --amsgrad --optimizer-implementation foreach
        --optimizer adamw --optimizer-implementation fused
        --optimizer adamw --device cuda --optimizer-implementation fused
        --optimizer adafactor
        --optimizer adagrad
        --optimizer lamb
        --optimizer lion
        --optimizer adamw-8bit
        --optimizer adamw-transformers
        --optimizer adafactor-transformers
        --implementation bertscope
        --implementation transformers-installed
        --padding 0.25
        --no-dropout
        --freeze embeddings
        --freeze *.bias --freeze encoder.layer.0
        --accumulate 4
        --accumulate 2 --keep-gradients --clip-grad-norm
        --keep-gradients
        --ema
        --ema --optimizer sgd --clip-grad-norm
        --clip-grad-norm
        --loop plain -a BertForMaskedLM
        --loop plain --grad-scaler --device cuda
        --grad-scaler --accumulate 2
        --device cuda
        --device cuda --sdpa-kernel efficient
        --device cuda --sdpa-kernel math
        --device cuda --expandable-segments
        --device cuda --max-split-size-mb 32
        --device cuda --attention eager
        --attention eager
        --no-pooler
        --from args.json
        --from args.json --optimizer sgd --no-clip-grad-norm
        --from fp16.json
        --from accelerate.yaml
        --strategy ddp --world-size 4
        --strategy ddp --world-size 4 --bucket-cap-mb 1 --gradient-as-bucket-view
        --strategy ddp --world-size 2 --gradient-as-bucket-view --accumulate 2
        --strategy zero1 --world-size 4 --rank 1
        --strategy zero1 --world-size 2 --bucket-cap-mb 50 --optimizer sgd
        --strategy fsdp --world-size 4
        --strategy fsdp --world-size 4 --param-dtype bf16 --reduce-dtype fp32
        --strategy fsdp --world-size 8 --param-dtype fp16 --reduce-dtype fp16 --rank 7
        --strategy fsdp-no-reshard --world-size 4
        --strategy hsdp --mesh 2x2
        --strategy tp --world-size 2
        --strategy tp+fsdp --mesh 2x2
        --strategy fsdp --world-size 2 --device cuda
    """),
    LORA,
    f"{LORA},save=classifier -a BertForSequenceClassification",
    *HEADS[1:],
]
CHECKPOINTING = lines("""
    none,full,selective
    every-2,layers:0,layers:0-1
    full --reentrant
    none,full --mode forward
""")
CARDS = lines("""
    --gpu t4
    --gpu a100-40gb
    --gpu p100-16gb --sdpa-kernel math
    --gpu h200 --no-calibration
    --gpu h200 --time
    --gpu t4 --strategy fsdp --world-size 4
    --gpu t4 --device cpu
    --gpu no-such-gpu
""")
WRONG = lines("""
    estimate bert-tiny --mode inference --checkpointing full
    estimate bert-tiny --mode forward --accumulate 2
    estimate bert-tiny --max-split-size-mb 32
    estimate bert-tiny --precision fp16 --grad-scaler
    estimate bert-tiny --strategy fsdp
    estimate bert-tiny --strategy ddp --world-size 2 --param-dtype bf16
    estimate bert-tiny --optimizer adamw --momentum 0.5
    estimate bert-tiny --optimizer lamb --optimizer-implementation fused
    estimate bert-tiny --freeze nothing.here
    estimate bert-tiny --seq 1024
    fit bert-tiny
    fit bert-tiny --budget 1GiB --gpu t4
    fit bert-tiny --budget 16
    fit bert-tiny --budget 1GiB --precision fp12
    fit bert-tiny --budget 1GiB --checkpointing most
    report bert-tiny --gpu t4 --budget 1GiB -f json
    count bert-tinny
    explain bert-tiny no.such.step
    flops bert-tiny --checkpointing full
    check wrong.bertscope.yaml
    check ranks.bertscope.yaml
    sweep wrong.yaml -o rows.jsonl
    estimate bert-tiny --from config.json
    estimate bert-tiny --lang zh --precision fp16 --grad-scaler
    fit bert-tiny --lang zh
""")

# ---- commands ----

COMMANDS: list[tuple[str | Rows, ...]] = [
    ("estimate bert-tiny --batch 2 --seq 32 {} -f json", STEPS),
    ("fit bert-tiny --budget 2GiB --seq 32 --precision fp32 --checkpointing none {} -f json", STEPS),
    ("estimate bert-tiny --batch 4 --seq 64 --checkpointing {} {} -f json", CHECKPOINTING, ["", "--gpu t4"]),
    ("estimate bert-tiny --batch 4 --seq 64 {} -f json",
     [*CARDS, "--checkpointing", "--gpu t4 --expandable-segments --checkpointing none,full"]),
    ("estimate bert-tiny --batch 2 --seq 32 {} {} -f json",
     ["--precision bf16", "--precision fp16", "--precision autocast-bf16", "--precision autocast-fp16"],
     ["", "--device cuda --grad-scaler", "--device cuda --sdpa-kernel flash"]),
    ("estimate {} --batch 2 --seq 16 {} -f json", [*FAMILIES, *OWN, "my-bert", "adapter"], ["", "--mode inference"]),
    ("estimate {} --batch 2 --seq 16 --precision autocast-bf16 -f json", ["roberta", OWN[0], "own.py:half", "my-bert"]),
    ("estimate own.py:half --batch 2 {} -f json", ["", "--precision fp32", "--optimizer sgd"]),
    ("estimate bert-tiny bert-mini --seq 32 {}", ["-f json", "-f csv", "-f markdown", ""]),
    ("estimate bert-tiny --batch 2 --seq 32 --checkpointing none,full {}",
     ["", "-v", "-f csv", "-f markdown", "--lang zh -v", "--gpu t4 --lang zh", "--timeline step.svg",
      "--timeline step.csv", "--timeline step.json", "--lang zh -f json", "--from args.json", "--rows 3"]),
    ("estimate bert-mini --batch 2 --seq 512 --gpu t4 {}", ["", "--precision autocast-fp16 --attention eager -f json"]),
    ("fit bert-tiny --budget 200MiB --seq 32 --precision {} --checkpointing {} -f json",
     ["fp32,bf16", "autocast-bf16,autocast-fp16", "fp16"], ["none,full"]),
    ("fit bert-tiny --seq 64 --precision fp32,autocast-fp16 --checkpointing none {} -f json", CARDS),
    ("fit bert-tiny --seq 64 --precision autocast-fp16 --checkpointing none {} -f json",
     ["--gpu t4 --batch-total 4096", "--gpu t4 --batch-total 4096 --strategy fsdp",
      "--budget 64MiB --batch-total 64 --world-size 8", "--gpu t4,a10,h100-80gb --batch 32",
      "--budget 300MiB --batch 16", "--gpu t4 --context 600MiB --expandable-segments",
      "--budget 2GiB --device cuda --grad-scaler", "--budget 2GiB --device cuda --sdpa-kernel flash"]),
    ("fit {} --budget 300MiB --seq 16 --checkpointing none -f json", [*FAMILIES, *OWN, "my-bert"]),
    ("fit bert-tiny --budget 256MiB --seq 32,64 {}", ["", "-v", "-f csv", "-f markdown", "-f json", "--lang zh"]),
    ("fit bert-tiny --gpu t4,a10 --seq 64 --precision fp32 --checkpointing none,selective {}",
     ["", "-v --lang zh", "-f csv", "-f json --lang zh"]),
    ("flops bert-tiny --seq 32 {} -f json",
     ["", *(f"--mode training {row}" for row in ("", "--checkpointing full", "--checkpointing every-2",
      "--checkpointing selective", "--freeze embeddings", LORA, "--implementation bertscope")),
      "--depth 1", "--attention eager", "--implementation transformers-installed", "--operators",
      "--batch 1,8 --depth 0", *HEADS[1:4]]),
    ("flops {} --seq 16 --mode training -f json", [*FAMILIES, *OWN, "adapter"]),
    ("flops bert-tiny --convention {}", ["torch", "macs", "calflops", "fvcore", "palm"]),
    ("flops bert-tiny bert-mini --seq 32,64 {}", ["", "-f csv", "-f markdown", "-f json"]),
    ("count bert-tiny --by {} {}", ["group", "layer", "module", "parameter"], ["-f json", "-f csv", "-v"]),
    ("count bert-tiny {} -f json", [*HEADS, LORA, "--no-pooler", "--freeze embeddings", "--dtype bf16", "--unfold",
     "--untie -a BertForMaskedLM", "--shapes --batch 2 --seq 16", "--sort params", "--expect 4,385,920"]),
    ("count {} -f json", [*FAMILIES, *OWN, "my-bert", "adapter", "my-bert --stored", "torch.bin --stored"]),
    ("count {}", ["", "bert-tiny --style torchinfo", "bert-tiny --lang zh",
     "bert-tiny bert-mini --by group -f markdown", "bert-tiny bert-mini bert-small -f csv", "bert-tiny --expect 5",
     "bert-tiny --style torchinfo --shapes"]),
    ("tree bert-tiny {}", ["", "--depth 2 -f json", "--unfold -f csv", "--shapes -f markdown", "--style torchinfo",
     "--freeze *.bias -f json", f"{LORA} -f json", "--lang zh"]),
    ("tree {} -f json", [*FAMILIES[:3], *OWN]),
    ("print bert-tiny {}", ["", "-a BertForMaskedLM", "--attention eager -f json", "-f markdown"]),
    ("presets {}", ["", "-v", "-f json", "-f csv", "-f markdown"]),
    ("explain bert-tiny {} -f json",
     ["", "encoder.layer.1", "Transformer-0-FeedForward", "inputs", "outputs --seq 64", "caches", "positions",
      "checkpointing", f"encoder {LORA}", "pooler -a BertModel", "-a BertForPreTraining --batch 2", "--lang zh"]),
    ("explain {}", ["bert-tiny", "bert-tiny --naming tf", "bert-tiny --lang zh", "bert-tiny -f markdown",
     "bert-tiny -f csv", *(f"{name} -f json" for name in ("roberta --seq 32", "vit", OWN[0]))]),
    ("diagram bert-tiny {}", ["", "--class BertAttention", "--kind forward", "--kind forward encoder.layer.0 -f json",
     "encoder.layer.0.attention.self --kind forward --position-embedding relative_key_query",
     "encoder.layer.0 --kind forward --cross-attention --cache 16 -f dot", "--kind tree --depth 2", "-f json",
     "--kind forward --attention sdpa --batch 2 --seq 8 -f json", "--nn-module -f dot"]),
    ("diagram {} {}", ["roberta", "own.py:mlp"], ["-f json", "--kind tree"]),
    ("diff {} -f json", ["bert-tiny bert-mini", "bert-base-cased bert-base-uncased", "bert-tiny my-bert --seq 32",
     "bert-tiny roberta --seq 32", "bert-tiny bert-tiny",
     "bert-tiny bert-mini -a BertForMaskedLM --seq 64 --exit-code"]),
    ("diff bert-tiny bert-mini {}", ["", "-f csv", "-f markdown", "--lang zh"]),
    ("verify {} -f json", ["my-bert", "bert-tiny my-bert", "my-bert torch.bin", "my-bert -a BertForMaskedLM",
     "my-bert -a BertModel --allow missing", "my-bert --dtype bf16", "my-bert --no-pooler"]),
    ("verify my-bert {}", ["", "-f csv", "-f markdown", "--lang zh"]),
    ("check {}", ["", "-f json", "models.bertscope.yaml -f json", "models.bertscope.yaml -f table",
     "models.bertscope.yaml -f github", "models.bertscope.yaml -f junit", "models.bertscope.yaml --lang zh",
     "--update models.bertscope.yaml", "--write unknown.yaml", "code.bertscope.yaml --allow-code -f json",
     "code.bertscope.yaml", "ranks.bertscope.yaml -f json",
     "bert-tiny -a BertForMaskedLM -f csv", "bert-tiny -f markdown"]),
    ("convert {}", ["bert-tiny", "config.json", "bert-tiny --lossless", "my-bert -o mine.yaml", "bert-large-zh"]),
    ("schema {}", ["", "config", "-f csv", "calibration", "check", "checkpoint", "comparison", "count", "diagram",
     "diff", "doctor", "explain", "fit", "flops", "memory", "presets", "print", "report", "sweep",
     "tree", "verify"]),
    ("sweep {} -o rows.jsonl --workers 1",
     ["loop.yaml -f json", "sizes.yaml --sort peak_bytes", "ranks.yaml -f csv", "cards.yaml -f markdown",
      "models.yaml -v", "heads.yaml -f json"]),
    ("profile bert-tiny --save card.json",),
    ("estimate bert-tiny --calibration data/bertscope/calibrations/nvidia-h200.json --time -f json",),
    ("report bert-tiny --batch 2 --seq 32 {} -f json",
     ["--no-fit", "--budget 256MiB --checkpointing none", "--gpu t4 --precision autocast-fp16 --checkpointing none",
      "--no-fit --precision autocast-bf16,fp32", "--no-fit --from args.json",
      "--no-fit --device cuda --sdpa-kernel math",
      "--no-fit --optimizer sgd --momentum 0.9 --accumulate 2 --clip-grad-norm", "--no-fit --freeze embeddings",
      "--no-fit --mode inference", f"--no-fit {LORA}", "--no-fit --loop plain --ema --checkpointing full",
      "--compare my-bert --no-fit"]),
    ("report {} --batch 2 --seq 16 --no-fit -f json", ["roberta", OWN[0], "own.py:half"]),
    ("report bert-tiny --batch 2 --seq 32 --gpu t4 --checkpointing none -o page.html {}", ["", "--lang zh"]),
    ("profile bert-tiny --batch 2 --seq 16 --steps 1 {} -f json",
     ["", "--optimizer sgd --momentum 0.9 --clip-grad-norm --checkpointing none,full", "--nproc 2 --strategy fsdp"]),
    ("@project {}", ["estimate bert-tiny --seq 16 -f json", "fit bert-tiny --seq 16 --checkpointing none -f json",
     "estimate bert-tiny --seq 16 --precision bf16 -f json", "fit bert-tiny --budget 128MiB --seq 16 --precision fp32",
     "flops bert-tiny --seq 16 -f json", "report bert-tiny --seq 16 --no-fit -f json", "check", "presets"]),
    ("{}", WRONG),
]  # fmt: skip

# Calls of the public functions, as expressions.
CALLS = lines("""
    count("bert-tiny")
    count("bert-tiny", by="parameter", dtype="bf16", sort="params")
    count(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)), input_size=(2, 3))
    count(BertConfig(num_hidden_layers=2), shapes=True, seq=16)
    tree("roberta", depth=2)
    flops("bert-tiny", seq=32)
    flops("bert-tiny", mode="training", seq=32, checkpointing="full", freeze=["embeddings"])
    flops(torch.nn.Linear(3, 4), input_size=(10, 3))
    estimate("bert-tiny", batch=2, seq=32)
    estimate("bert-tiny", batch=2, seq=32, precision="bf16", optimizer="sgd", momentum=0.9)
    estimate("bert-tiny", batch=2, seq=32, precision="autocast-fp16", grad_scaler=True, device="cuda")
    estimate("bert-tiny", batch=2, seq=32, checkpointing="none,full", reentrant=True)
    estimate("bert-tiny", batch=2, seq=32, freeze=["embeddings"], loop="freed", ema=True, accumulate=2)
    estimate("bert-tiny", batch=2, seq=32, gpu="t4", sdpa_kernel="math")
    estimate("bert-tiny", batch=2, seq=32, strategy="fsdp", world_size=4, param_dtype="bf16")
    estimate("own.py:half", batch=2)
    estimate(torch.nn.Linear(10, 10), input_size=(4, 10), optimizer="sgd")
    estimate(torch.nn.Linear(10, 10), torch.ones(4, 10), mode="forward", device="cpu")
    fit("bert-tiny", "128MiB", seq=32, checkpointing="none", precision="fp32,autocast-bf16")
    fit("bert-tiny", gpu="t4", seq=(32, 64), batch=8, checkpointing="none,full", precision="fp32", context="500MiB")
    fit("bert-tiny", gpu="t4", seq=64, batch_total=4096, strategy="fsdp", precision="fp32", checkpointing="none")
    fit("bert-tiny", "128MiB", seq=32, checkpointing="none", precision="fp32", optimizer="lion", clip_grad_norm=True)
    profile(torch.nn.Linear(10, 10), torch.ones(4, 10), steps=1)
    explain("bert-tiny", "pooler")
    explain("bert-tiny", seq=32)
    diagram("bert-tiny", "forward", "encoder.layer.0")
    diagram(torch.nn.Sequential(torch.nn.Linear(3, 4)), "tree")
    diff("bert-tiny", "bert-mini")
    report("bert-tiny", batch=2, seq=16, budget=None)
    report("bert-tiny", "my-bert", batch=2, seq=16, gpu="t4", precision="autocast-fp16", checkpointing="none")
    verify("my-bert")
    verify(load("my-bert", architecture="BertForMaskedLM"), "my-bert", allow=["missing"])
    check("models.bertscope.yaml")
    convert("bert-tiny")
    read_training_file("args.json")
    schema("memory")
    from_json(to_json(estimate("bert-tiny", batch=2, seq=16, checkpointing="none,full")))
    load("bert-tiny", architecture="BertForMaskedLM", lora="r=4,target=query")
""")


def commands() -> Iterator[str]:
    """Yield each command line once, without the name of the program, and each call as `python: EXPRESSION`."""
    expanded = (template.format(*choice) for template, *rest in COMMANDS for choice in product(*rest))
    yield from dict.fromkeys(" ".join(text.split()) for text in expanded)
    yield from (f"python: {call}" for call in CALLS)


# ---- files ----


def grid(text: str) -> str:
    """Return the lines of a grid that one text has."""
    return text.replace("; ", "\n") + "\n"


_SIZES = {"vocab_size": 96, "num_labels": 2, "max_position_embeddings": 64}
_BERT = {**_SIZES, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
CONFIGS: dict[str, dict[str, Any]] = {
    "my-bert": {**_BERT, "model_type": "bert"},
    "roberta": {**_BERT, "model_type": "roberta", "architectures": ["RobertaForMaskedLM"]},
    "distilbert": {**_SIZES, "model_type": "distilbert", "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48},
    "electra": {**_BERT, "model_type": "electra", "embedding_size": 16, "architectures": ["ElectraForPreTraining"]},
    "albert": {**_BERT, "model_type": "albert", "embedding_size": 16},
    "gpt2": {**_SIZES, "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "vit": {**_BERT, "model_type": "vit", "image_size": 32, "patch_size": 8},
    "t5": {**_SIZES, "model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2,
           "decoder_start_token_id": 0},
}  # fmt: skip
_ARGUMENTS = {
    "output_dir": "out", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0,
    "bf16": True, "optim": "adamw_torch_fused", "gradient_checkpointing": True, "label_smoothing_factor": 0.1, "x": 1,
}  # fmt: skip
_LOOP = "model: bert-tiny; batch: 2; seq: 16; "
_ADAPTER = {
    "peft_type": "LORA", "base_model_name_or_path": "bert-tiny", "task_type": "SEQ_CLS", "r": 8, "lora_alpha": 16,
    "lora_dropout": 0.1, "target_modules": ["query", "value"], "modules_to_save": ["classifier"], "bias": "none",
}  # fmt: skip
FILES = {
    "config.json": json.dumps(CONFIGS["my-bert"]),
    "args.json": json.dumps(_ARGUMENTS),
    "fp16.json": json.dumps(_ARGUMENTS | {"bf16": False, "fp16": True, "optim": "adafactor", "max_grad_norm": 0}),
    "accelerate.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\n"
    "gradient_accumulation_steps: 2\nnum_processes: 2\n",
    "adapter/adapter_config.json": json.dumps(_ADAPTER),
    "models.bertscope.yaml": """\
model: bert-tiny
expected:
  distinct_params: 4385920
  layer_params: 4385921
  groups: {encoder: 396544}
  flops:
    forward: {batch: 1, seq: 128, mode: inference, matmul_flops: 1}
    step: {batch: 2, seq: 32, mode: training, checkpointing: full, freeze: [embeddings], matmul_flops: 1}
  memory:
    plain: {batch: 2, seq: 32, mode: training, peak_bytes: 100 MiB, tolerance: 5 %}
    loop: {batch: 2, seq: 32, mode: training, optimizer: sgd, momentum: 0.9, accumulate: 2, ema: true,
           clip_grad_norm: true, loop: trainer, keep_gradients: true, peak_bytes: 1}
    autocast: {batch: 2, seq: 32, mode: training, precision: autocast-fp16, grad_scaler: true, device: cuda,
               sdpa_kernel: math, peak_bytes: 1}
    half: {batch: 2, seq: 32, mode: training, precision: bf16, checkpointing: full, reentrant: true, padding: 0.1,
           peak_bytes: 1}
    frozen: {batch: 2, seq: 32, mode: training, freeze: [embeddings], dropout: false, optimizer: adam,
             optimizer_implementation: foreach, peak_bytes: 1}
""",
    "ranks.bertscope.yaml": "model: bert-tiny\nexpected:\n  memory:\n"
    "    ranks: {batch: 2, seq: 16, mode: training, strategy: fsdp, world_size: 2, peak_bytes: 9 GiB}\n",
    "wrong.bertscope.yaml": "model: bert-tiny\nexpected:\n  memory:\n    x: {batch: 2, seq: 1, mode: training, "
    "optimizer: adamx, peak_bytes: 9 GiB}\n",
    "code.bertscope.yaml": "model: own:mlp\nexpected: {distinct_params: 3}\n",
    "unknown.yaml": "architecture: BertModel\nconfig: {num_hidden_layers: 2, hidden_size: 32}\n",
    "loop.yaml": grid(
        f"{_LOOP}optimizer: [adamw, sgd]; clip_grad_norm: [false, true]; loop: [freed, plain]; ema: true; "
        "accumulate: [1, 2]; keep_gradients: true; dropout: false; freeze: [[embeddings, '*.bias']]; padding: 0.1"
    ),
    "sizes.yaml": grid(
        "model: [bert-tiny, my-bert]; batch: [2, 4]; seq: [16, 32]; budget: 64MiB; checkpointing: [none, full]; "
        "reentrant: true; precision: [fp32, autocast-bf16, fp16]; grad_scaler: [false, true]"
    ),
    "ranks.yaml": grid(
        f"{_LOOP}strategy: [ddp, zero1, fsdp, fsdp-no-reshard, none, tp]; world_size: [2, 4]; rank: [0, 1]"
    ),
    "cards.yaml": grid(
        f"{_LOOP}gpu: [t4, a100-40gb]; sdpa_kernel: [auto, math]; context: [null, 600MiB]; optimizer: adam; "
        "optimizer_implementation: [default, loop]"
    ),
    "models.yaml": grid(
        "model: [bert-tiny, roberta, 'own.py:half']; batch: 2; seq: 16; mode: [inference, forward, training]; "
        "precision: [null, fp32, autocast-bf16]; device: [null, cuda]"
    ),
    "heads.yaml": grid(
        f"{_LOOP}architecture: [null, BertForMaskedLM]; attention: [null, eager]; lora: [null, 'r=4,target=query']; "
        "threads: 1; pooler: [null, false]; optimizer: rmsprop; momentum: 0.5"
    ),
    "wrong.yaml": "model: bert-tiny\nbach: 2\n",
    "project/pyproject.toml": '[tool.bertscope]\ngpu = "t4"\nprecision = "autocast-fp16"\n'
    'architecture = "BertForSequenceClassification"\ncheck = ["../models.bertscope.yaml"]\n',
    "own.py": """\
from torch import nn, float16

def mlp():
    return nn.Sequential(nn.Embedding(96, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

def conv():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))

class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(96, 16), nn.Linear(16, 4)
        self.half()
    def forward(self, input_ids):
        return self.out(self.embed(input_ids))

def half():
    return Half()
""",
}


def write_files(folder: Path) -> None:
    """Write the files that the commands name, and the calibration of a card, below the folder."""
    import torch
    from safetensors.torch import save_file

    import bertscope
    from tests.memory.fake_card import calibration

    texts = FILES | {f"{name}/config.json": json.dumps(config) for name, config in CONFIGS.items()}
    texts["data/bertscope/calibrations/nvidia-h200.json"] = calibration().to_json()
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    model = bertscope.load(str(folder / "my-bert")).build()
    tensors = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "my-bert" / "model.safetensors", metadata={"format": "pt"})
    torch.save(tensors, folder / "torch.bin")
