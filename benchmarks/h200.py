"""Measurements on an NVIDIA H200 (h200.csv), and the estimates of bertscope for them.

    python benchmarks/h200.py > table.md
    python benchmarks/h200.py --only gpt2

Prints Markdown tables for docs/accuracy.md. It runs nothing on a GPU and needs eight minutes and transformers; the
measurements were made with 5.17.0. A row's `measured by` is `loop`, a loop of forward, backward and step around the
class of transformers that records the allocator's history, or `profile`, `bertscope profile --device cuda`.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

ROWS = Path(__file__).parent / "h200.csv"
_WIDE = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
# The model of a row that is no preset: its class, and the fields in which its config differs from the class's own.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "albert-base": ("AlbertForMaskedLM", _WIDE),
    "bart-base": ("BartForConditionalGeneration", {
        "d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 12,
        "decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}),
    "biogpt": ("BioGptForCausalLM", {**_WIDE, "num_hidden_layers": 12}),
    "clip": ("CLIPModel", {}),
    "convnext-tiny": ("ConvNextForImageClassification", {}),
    "deberta-v3-base": ("DebertaV2ForSequenceClassification", {
        **_WIDE, "vocab_size": 128100, "num_hidden_layers": 12, "type_vocab_size": 0, "relative_attention": True,
        "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"], "position_biased_input": False, "max_relative_positions": -1}),
    "distilbert": ("DistilBertForMaskedLM", {}),
    "electra-base": ("ElectraForPreTraining", {**_WIDE, "embedding_size": 768}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "llama-300m": ("LlamaForCausalLM", {
        "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16,
        "num_attention_heads": 16, "num_key_value_heads": 4}),
    "modernbert-base": ("ModernBertForMaskedLM", {}),
    "mpnet": ("MPNetForMaskedLM", {}),
    "opt-125m": ("OPTForCausalLM", {
        "hidden_size": 768, "num_hidden_layers": 12, "ffn_dim": 3072, "num_attention_heads": 12,
        "word_embed_proj_dim": 768}),
    "pythia-160m": ("GPTNeoXForCausalLM", {**_WIDE, "vocab_size": 50304, "num_hidden_layers": 12}),
    "qwen3-600m": ("Qwen3ForCausalLM", {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 8,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}),
    "resnet50": ("ResNetForImageClassification", {}),
    "roberta-base": ("RobertaForMaskedLM", {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}),
    "swin-tiny": ("SwinForImageClassification", {}),
    "t5-small": ("T5ForConditionalGeneration", {}),
    "vit-base": ("ViTForImageClassification", {}),
    "whisper-tiny": ("WhisperForConditionalGeneration", {}),
    "xlnet": ("XLNetLMHeadModel", {"d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072}),
}  # fmt: skip


def written(name: str, folder: Path) -> str:
    """Return what names a row's model for bertscope: a preset, or the folder in which its config.json is written."""
    import transformers

    if name not in MODELS:
        return name
    architecture, fields = MODELS[name]
    config = getattr(transformers, architecture).config_class(**fields)
    config.architectures = [architecture]
    (folder / name).mkdir()
    config.to_json_file(folder / name / "config.json")
    return str(folder / name)


def errors(row: dict[str, str], model: str) -> tuple[float, float]:
    """Return how far the allocated and the reserved bytes of the estimate are from a row's, as shares."""
    command = [sys.executable, "-m", "bertscope", "estimate", model, *row["options"].split(), "--gpu", "h200",
               "--no-calibration", "--format", "json"]  # fmt: skip
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603  rows of a file
    cost = json.loads(answer)["variants"][0]["estimated"]["cost"]
    allocated = cost["max_allocated_bytes"] / int(row["allocated bytes"]) - 1
    return allocated, cost["reserved"]["low_bytes"] / int(row["reserved bytes"]) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="MODEL", help="only the rows of this model")
    only = parser.parse_args().only
    with ROWS.open() as file:
        rows = [row for row in csv.DictReader(file) if only in (None, row["model"])]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        models = {name: written(name, Path(folder)) for name in {row["model"] for row in rows}}
        found = list(pool.map(lambda row: errors(row, models[row["model"]]), rows))
    print("| model | options | measured by | allocated, MiB | error | reserved, MiB | error |")
    print("|---|---|---|---|---|---|---|")
    for row, pair in zip(rows, found, strict=True):
        measured = (int(row["allocated bytes"]), int(row["reserved bytes"]))
        shown = (f"{size / 2**20:,.1f} | {error:+.2%}" for size, error in zip(measured, pair, strict=True))
        print(f"| {row['model']} | `{row['options']}` | {row['measured by']} | {' | '.join(shown)} |")
    print("\n| measured by | runs | bytes | median error | within 0.1 % | within 1 % | largest |")
    print("|---|---|---|---|---|---|---|")
    for by in sorted({row["measured by"] for row in rows}):
        for at, kind in enumerate(("allocated", "reserved")):
            sizes = [abs(pair[at]) for row, pair in zip(rows, found, strict=True) if row["measured by"] == by]
            within = " | ".join(str(sum(size < limit for size in sizes)) for limit in (0.001, 0.01))
            print(f"| {by} | {len(sizes)} | {kind} | {median(sizes):.3%} | {within} | {max(sizes):.2%} |")


if __name__ == "__main__":
    main()
