"""Published runs of BERT on GPUs, and the answers of `fit` to them: what ran must fit, what failed must not.

    python benchmarks/published.py > table.md
    python benchmarks/published.py --gpu t4

Prints two Markdown tables, for docs/accuracy.md: batches that ran or ran out of memory, and figures of nvidia-smi. It
runs nothing on a GPU and needs about a minute. The answers are those of `bertscope fit --gpu NAME --batch N`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from bertscope import load
from bertscope.analyses.memory.fit import Fitter, Steps
from bertscope.analyses.memory.kernels.cuda_kernels import EAGER, Overhead, overhead
from bertscope.gpus import find_gpu
from bertscope.reports.memory import NO, UNCERTAIN, YES, Gpu
from bertscope.settings.run_config import RunConfig
from bertscope.units import bytes_text

BASE, LARGE = "bert-base-uncased", "bert-large-uncased"
CLASSIFIER, QA, PRETRAINING = "BertForSequenceClassification", "BertForQuestionAnswering", "BertForPreTraining"
WORDS = {YES: "yes", UNCERTAIN: "not certain", NO: "no"}
MIB = 2**20
TORCH, FUSED, TENSORFLOW = "torch", "torch with fused kernels", "TensorFlow"
# Loops before torch 2.0: zero_grad kept the gradients, and optimizers went over one parameter after the other.
OLD: dict[str, Any] = {"keep_gradients": True, "optimizer_implementation": "loop"}
GPUS = {
    "gtx-1050-ti": Gpu(name="gtx-1050-ti", memory_bytes=int(3.94 * 2**30), source="out of memory, GitHub issue "
                       "Strawberry-Eat-Mango/PCT_Pytorch 27 (a card of 4 GB)"),
    "rtx-2070": Gpu(name="rtx-2070", memory_bytes=int(7.79 * 2**30), source="out of memory, GitHub issue "
                    "pkuxmq/Invertible-Image-Rescaling 8 (a card of 8 GB)"),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Run:
    """A published setup with the batches that ran and those that ran out of memory."""

    gpu: str
    model: str
    architecture: str
    seq: int
    ran: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    run: dict[str, Any] = field(default_factory=lambda: OLD)  # fields of RunConfig
    source: str
    assumed: str = ""
    software: str = TORCH

    def answer(self, batch: int) -> str:
        """Return the answer of `fit` for this batch."""
        return self._fitter().answer(replace(self._run_config(), batch=batch))

    def shown_bytes(self, batch: int) -> tuple[int, int]:
        """Return the bytes of the tensors with the lower context, and those that `fit` reserves with the upper one."""
        row = self._fitter().row(self._run_config(), batch)
        return row.peak_bytes - self._overhead.context_high_bytes + self._overhead.context_low_bytes, row.reserved_bytes

    def _run_config(self) -> RunConfig:
        return RunConfig(seq=self.seq, device="cuda", **self.run)

    @property
    def _card(self) -> Gpu:
        return GPUS.get(self.gpu) or find_gpu(self.gpu)

    @property
    def _overhead(self) -> Overhead:
        return overhead(self._run_config(), None, self._card, EAGER)

    def _fitter(self) -> Fitter:
        # Each of these programs is older than fused attention for BERT in transformers (pull request 28802, of 2024).
        source = load(self.model, architecture=self.architecture, attention=EAGER)
        return Fitter(Steps(source), self._card.memory_bytes, self._overhead)


_README = "README of google-research/bert"
_NVIDIA = "README of NVIDIA/DeepLearningExamples, BERT for PyTorch, 19.07"
_NVIDIA_TF = "README of NVIDIA/DeepLearningExamples, BERT for TensorFlow, 20.06 and 19.03"
_APEX = "apex O2: weights in fp16 with a copy in fp32, asked as autocast; LAMB's state is that of Adam"
_LAMB = "LAMB's state is that of Adam"
_FP16 = {"precision": "autocast-fp16", **OLD}
_SST2 = "bert-base-cased, SST-2 padded to 128, AdamW, a card of T4 class; the page is not recorded"
_ISSUE = "GitHub issue "


def _titan_x() -> Iterator[Run]:
    table = {
        BASE: {64: 64, 128: 32, 256: 16, 320: 14, 384: 12, 512: 6},
        LARGE: {64: 12, 128: 6, 256: 2, 320: 1},
    }
    for model, batches in table.items():
        for seq, batch in batches.items():
            yield Run(gpu="titan-x-12gb", model=model, architecture=CLASSIFIER, seq=seq, ran=(batch,), source=_README,
                      software=TENSORFLOW)  # fmt: skip
    for seq in (384, 512):
        yield Run(gpu="titan-x-12gb", model=LARGE, architecture=CLASSIFIER, seq=seq, failed=(1,), source=_README,
                  software=TENSORFLOW)  # fmt: skip


RUNS = (
    Run(gpu="t4", model="bert-base-cased", architecture=CLASSIFIER, seq=128, ran=(104,), failed=(120,), source=_SST2,
        assumed="kept gradients"),
    Run(gpu="t4", model="bert-base-cased", architecture=CLASSIFIER, seq=128, ran=(744,), failed=(776,), source=_SST2,
        run={"checkpointing": "full", **OLD}, assumed="kept gradients"),
    Run(gpu="v100-16gb", model=BASE, architecture=QA, seq=384, ran=(12,),
        source=_ISSUE + "huggingface/transformers 277 (2019)"),
    Run(gpu="v100-16gb", model=LARGE, architecture=CLASSIFIER, seq=512, ran=(4,),
        source="transformers documentation, model memory anatomy"),
    Run(gpu="v100-16gb", model=LARGE, architecture=QA, seq=384, failed=(12,), run=_FP16,
        source=_ISSUE + "huggingface/transformers 7704 (2020)",
        assumed="the batch of the example; apex O1 as autocast"),
    Run(gpu="v100-32gb", model=LARGE, architecture=QA, seq=384, failed=(24,),
        source=_ISSUE + "huggingface/transformers 2084 (2019)",
        assumed="8 GPUs, memory not given; without the buffers of DistributedDataParallel"),
    Run(gpu="gtx-1050-ti", model="bert-base-cased", architecture=QA, seq=384, ran=(1,), failed=(12,),
        source=_ISSUE + "huggingface/transformers 1469 (2019)"),
    Run(gpu="v100-16gb", model=LARGE, architecture=PRETRAINING, seq=128, ran=(8,), source=_NVIDIA, assumed=_LAMB),
    Run(gpu="v100-16gb", model=LARGE, architecture=PRETRAINING, seq=512, ran=(2,), source=_NVIDIA, assumed=_LAMB),
    Run(gpu="v100-16gb", model=LARGE, architecture=PRETRAINING, seq=128, ran=(16,), run=_FP16, source=_NVIDIA,
        assumed=_APEX),
    Run(gpu="v100-16gb", model=LARGE, architecture=PRETRAINING, seq=512, ran=(4,), run=_FP16, source=_NVIDIA,
        assumed=_APEX),
    Run(gpu="v100-16gb", model=LARGE, architecture=QA, seq=384, ran=(4,), source=_NVIDIA),
    Run(gpu="v100-16gb", model=LARGE, architecture=QA, seq=384, ran=(10,), run=_FP16, source=_NVIDIA, assumed=_APEX),
    Run(gpu="v100-32gb", model=LARGE, architecture=PRETRAINING, seq=128, ran=(32,), source=_NVIDIA, assumed=_LAMB),
    Run(gpu="v100-32gb", model=LARGE, architecture=PRETRAINING, seq=512, ran=(4,), source=_NVIDIA, assumed=_LAMB),
    Run(gpu="v100-32gb", model=LARGE, architecture=PRETRAINING, seq=128, ran=(64,), run=_FP16, source=_NVIDIA,
        assumed=_APEX),
    Run(gpu="v100-32gb", model=LARGE, architecture=QA, seq=384, ran=(8,), source=_NVIDIA),
    Run(gpu="a100-80gb", model=LARGE, architecture="BertForNextSentencePrediction", seq=128, ran=(480,), failed=(512,),
        run={"precision": "autocast-fp16"}, source=_ISSUE + "NVIDIA/DeepLearningExamples 1165 (2022)",
        software=FUSED, assumed="logits of 20 of 128 positions, asked without those of words; LAMB; its script fuses "
        "bias, GELU and dropout, which saves less"),
    Run(gpu="v100-16gb", model=LARGE, architecture=PRETRAINING, seq=128, ran=(8,), failed=(16,), source=_NVIDIA_TF,
        software=TENSORFLOW),
    Run(gpu="v100-16gb", model=LARGE, architecture=PRETRAINING, seq=512, ran=(2,), failed=(4,), source=_NVIDIA_TF,
        software=TENSORFLOW),
    Run(gpu="v100-16gb", model=LARGE, architecture=QA, seq=384, ran=(2,), failed=(3,), source=_NVIDIA_TF,
        software=TENSORFLOW),
    Run(gpu="v100-32gb", model=LARGE, architecture=PRETRAINING, seq=128, ran=(32,), failed=(64,), source=_NVIDIA_TF,
        software=TENSORFLOW),
    Run(gpu="rtx-2070", model=BASE, architecture=QA, seq=320, ran=(8,),
        source=_ISSUE + "google-research/bert 365 (2019)", software=TENSORFLOW),
    *_titan_x(),
)  # fmt: skip
# MiB that nvidia-smi showed, by batch and fields of the run.
FIGURES: tuple[tuple[int, dict[str, Any], int], ...] = (
    (1, OLD, 8681),
    (4, OLD, 14949),
    (1, {"checkpointing": "full", **OLD}, 6775),
    (4, {"optimizer": "adafactor", **OLD}, 12295),
    (4, _FP16, 13939),
)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", help="only the runs on this GPU")
    asked = parser.parse_args().gpu
    runs = [run for run in RUNS if asked in (None, run.gpu)]
    print("| GPU | model | seq | run | ran | `fit` | failed | `fit` | source | assumed |\n" + "|---" * 10 + "|")
    answers: list[tuple[Run, bool, str]] = []
    for run in runs:
        found = {batch: run.answer(batch) for batch in (*run.ran, *run.failed)}
        answers += [(run, batch in run.ran, answer) for batch, answer in found.items()]
        print(row(run, found), flush=True)
    for software in dict.fromkeys(run.software for run in runs):
        print(f"\n{software}: {summary([answer for answer in answers if answer[0].software == software])}")
    if asked in (None, "v100-16gb"):
        print("\n| batch | run | nvidia-smi | `fit` |\n|---|---|---:|---:|")
        for line in figures():
            print(line, flush=True)


def row(run: Run, found: dict[int, str]) -> str:
    """Return the line of a run in the first table."""
    fields = ", ".join(f"{name}={value}" for name, value in run.run.items() if name not in OLD) or "fp32"
    kept = ", kept gradients" if run.run.get("keep_gradients") else ""
    halves = (
        text
        for batches in (run.ran, run.failed)
        for text in (", ".join(map(str, batches)), ", ".join(WORDS[found[batch]] for batch in batches))
    )
    assumed = "another framework" if run.software == TENSORFLOW else run.assumed
    cells = (run.gpu, f"{run.model}, {run.architecture}", str(run.seq), fields + kept, *halves, run.source, assumed)
    return f"| {' | '.join(cells)} |"


def summary(answers: list[tuple[Run, bool, str]]) -> str:
    """Return the number of right, uncertain and wrong answers."""
    right = sum(answer == (YES if ran else NO) for _, ran, answer in answers)
    unsure = sum(answer == UNCERTAIN for _, _, answer in answers)
    wrong = {
        what: sum(is_ran is ran and answer == contrary for _, is_ran, answer in answers)
        for what, ran, contrary in (("ran and `fit` says no", True, NO), ("failed and `fit` says yes", False, YES))
    }
    return f"{right} right, {unsure} not certain, " + ", ".join(f"{count} {what}" for what, count in wrong.items())


def figures() -> Iterator[str]:
    """Yield a line for each figure of nvidia-smi: bert-large-uncased with a classifier, 512 tokens, V100 of 16 GB."""
    for batch, run, shown_mib in FIGURES:
        published = Run(gpu="v100-16gb", model=LARGE, architecture=CLASSIFIER, seq=512, run=run, source="")
        low, high = published.shown_bytes(batch)
        fields = ", ".join(f"{name}={value}" for name, value in run.items() if name not in OLD) or "fp32"
        yield f"| {batch} | {fields} | {bytes_text(shown_mib * MIB)} | {bytes_text(low)} to {bytes_text(high)} |"


if __name__ == "__main__":
    main()
