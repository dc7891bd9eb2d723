"""Published measurements on GPUs (published.csv), and the answers of bertscope to them.

    python benchmarks/published.py > tables.md
    python benchmarks/published.py --gpu t4

Prints Markdown tables for docs/accuracy.md: the runs of measured_runs.py, unless a GPU is named; batches that ran or
ran out of memory against `fit`, figures of nvidia-smi, and values of torch.cuda.max_memory_allocated and
max_memory_reserved. It runs nothing on a GPU and needs about ten minutes and transformers; the rows of ALBERT with sdpa
need transformers 4.45 or later, and the runs are those of 4.51.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from torch.distributed import fsdp

from bertscope import load
from bertscope.gpus import Gpu, find_gpu
from bertscope.memory.caching_allocator import Allocator, Requests, SegmentBlock, replayed, requests
from bertscope.memory.derived_traces import in_loop, with_copies
from bertscope.memory.estimate import module_trace
from bertscope.memory.fit import fit_row
from bertscope.memory.kernel_rules import (
    LT_WORKSPACE_BYTES,
    by_thread,
    workspace_bytes,
)
from bertscope.memory.simulator import Simulator
from bertscope.memory.step_time import PUBLISHED_RANGE, data_sheet_bound
from bertscope.memory.trace import MemoryTrace
from bertscope.reports.step import NO, UNCERTAIN, YES
from bertscope.settings.checkpointing import NONE
from bertscope.settings.request import Request, read_settings
from bertscope.settings.run_config import STORED, RunConfig
from bertscope.torch_access import torch
from bertscope.tracing import repeat
from bertscope.units import BF16, FP16, bytes_text

sys.path.append(str(Path(__file__).parent))
import measured_runs
import published_models

RAN, FAILED, NVIDIA_SMI, ALLOCATED, RESERVED, SECONDS = (
    "ran", "failed", "nvidia-smi", "allocated", "reserved", "step seconds",
)  # fmt: skip
TORCH, FUSED, TENSORFLOW, SCRIPT, OTHER = (
    "torch", "torch with fused kernels", "TensorFlow", "transformers script", "another program",
)  # fmt: skip
REPLAYED = "bert-base-uncased"  # by the whole script
WORDS = {YES: "yes", UNCERTAIN: "not certain", NO: "no"}
GPUS = {
    "gtx-1050-ti": Gpu(name="gtx-1050-ti", memory_bytes=int(3.94 * 2**30), source="out of memory, GitHub issue "
                       "Strawberry-Eat-Mango/PCT_Pytorch 27 (a card of 4 GB)"),
    "rtx-2070": Gpu(name="rtx-2070", memory_bytes=int(7.79 * 2**30), source="out of memory, GitHub issue "
                    "pkuxmq/Invertible-Image-Rescaling 8 (a card of 8 GB)"),
}  # fmt: skip
# Of the checkpoints of the script: the class and the fields of the configuration that differ, and the layers.
_OF_1024 = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert-base-uncased": ("BertConfig", {}, "bert.encoder.layer"),
    "distilbert-base-uncased": ("DistilBertConfig", {}, "distilbert.transformer.layer"),
    "microsoft/biogpt": ("BioGptConfig", {}, "biogpt.layers"),
    "openai-community/gpt2-large": ("GPT2Config", {"n_embd": 1280, "n_layer": 36, "n_head": 20}, "transformer.h"),
    "EleutherAI/pythia-410m-deduped": (
        "GPTNeoXConfig", {**_OF_1024, "vocab_size": 50304, "intermediate_size": 4096}, "gpt_neox.layers"),
    "facebook/opt-350m": (
        "OPTConfig", {**_OF_1024, "ffn_dim": 4096, "word_embed_proj_dim": 512, "do_layer_norm_before": False},
        "model.decoder.layers"),
    "albert-base-v2": (  # its layers are one
        "AlbertConfig", {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
                         "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, ""),
}  # fmt: skip
CAPABILITIES = {
    "rtx-2060-8gb": (7, 5),
    "rtx-3080-ti-laptop-16gb": (8, 6),
    "l40s": (8, 9),
    "h100-96gb": (9, 0),
}  # else that of an A100
# Loops before torch 2.0: zero_grad kept the gradients, and optimizers went over one parameter after the other.
OLD = ("keep_gradients", "optimizer_implementation", "torch")


@dataclass(frozen=True, kw_only=True)
class Published:
    """A row of published.csv."""

    quantity: str
    gpu: str
    program: str
    model: str
    architecture: str
    attention: str
    batch: int
    seq: int
    settings: dict[str, Any] = field(hash=False)  # of the run, by name
    value_bytes: int = 0  # of a figure
    source: str
    assumed: str
    value_seconds: float = 0.0  # of a step

    @property
    def run_config(self) -> RunConfig:
        """Return the run of the program."""
        values = read_settings({**self.settings, "batch": self.batch, "seq": self.seq, "device": "cuda"})
        return Request(question="estimate", sources=(values,)).resolved()[0][0]

    @property
    def run_text(self) -> str:
        """Return the settings in words."""
        shown = ", ".join(f"{name}={value}" for name, value in self.settings.items() if name not in OLD) or "fp32"
        return shown + (", kept gradients" if "keep_gradients" in self.settings else "")

    @property
    def card(self) -> Gpu:
        """Return the card."""
        return GPUS.get(self.gpu) or find_gpu(self.gpu)

    @property
    def capability(self) -> tuple[int, int]:
        """Return the compute capability of the card."""
        return CAPABILITIES.get(self.gpu, (8, 0))

    def _limited(self) -> Simulator:
        return _steps(self.model, self.architecture, self.attention).limited(self.run_config, self.card)

    def answer(self) -> str:
        """Return the answer of `fit` for this batch."""
        return self._limited().answer(self.run_config)

    def shown_bytes(self) -> tuple[int, int]:
        """Return the bytes of the tensors with the lower context, and those that `fit` reserves with the upper one."""
        simulator = self._limited()
        row = fit_row(simulator, self.run_config, self.batch)
        room = simulator.overhead
        return row.peak_bytes + room.workspace_bytes + room.context.low_bytes, row.cost.gpu_bytes


@cache
def _steps(model: str, architecture: str, attention: str) -> Simulator:
    return Simulator(load(model, architecture=architecture, attention=attention))


def pairs(text: str) -> list[list[str]]:
    """Return the names and values of settings in a cell."""
    return [item.split("=") for item in text.split()]


def published() -> list[Published]:
    """Return the rows of the file."""
    with Path(__file__).with_name("published.csv").open(encoding="utf-8", newline="") as file:
        return [
            Published(**row | {
                "batch": int(row["batch"]), "seq": int(row["seq"]), "value_bytes": int(row["value_bytes"] or 0),
                "value_seconds": float(row["value_seconds"] or 0),
                "settings": {name: int(value) if value.isdigit() else value == "true" or value
                             for name, value in pairs(row["settings"])},
            })
            for row in csv.DictReader(file, restval="")
        ]  # fmt: skip


# ---- the script of transformers' documentation (pull request 28802): a process with several models and batches ----


@cache
def script_trace(row: Published) -> MemoryTrace:
    """Return the trace of a step of the script: no optimizer, and the sum of the logits as loss.

    Raises ValueError if the installed transformers has not this attention for the model.
    """
    import transformers

    name, fields, layers = MODELS[row.model]
    config = getattr(transformers, name)(**fields)
    ran, wanted = repeat.RAN if layers else config.num_hidden_layers, config.num_hidden_layers
    config.num_hidden_layers = ran
    run_config = replace(
        row.run_config, precision=STORED, sdpa_kernel="auto" if row.capability >= (8, 0) else "efficient"
    )
    dtype = torch.float16 if row.run_config.precision == FP16.name else torch.float32
    with torch.device(
        "meta"
    ):  # as from_pretrained(torch_dtype=...), which leaves the buffers of rotary embeddings in fp32
        default = torch.get_default_dtype()
        try:
            model = getattr(transformers, row.architecture)._from_config(
                config, attn_implementation=row.attention, torch_dtype=dtype
            )
        finally:  # an error leaves the default of the model
            torch.set_default_dtype(default)
    ids = torch.zeros(row.batch, row.seq, dtype=torch.long, device="meta")
    freed = module_trace(model, {"input_ids": ids}, run_config, lambda built, given: built(**given).logits.sum())
    stack = repeat.LayerStack.of(layers, "num_hidden_layers", [()] * wanted)
    deep = with_copies(freed, layers, stack.copies(ran)) if layers else freed
    return in_loop(deep, run_config)


def workspaces(row: Published) -> list[tuple[str, int]]:
    """Return the cuBLAS workspaces of a row; torch 2.2 to 2.6 freed the cuBLASLt workspace after each call."""
    run_config = row.run_config
    found = by_thread(run_config, workspace_bytes(run_config, row.capability))
    return [(phase, size) for phase, size in found if size != LT_WORKSPACE_BYTES]


def _script_requests(row: Published) -> tuple[MemoryTrace, Requests]:
    trace = script_trace(row)
    return trace, requests(trace, workspaces(row))


def alone_bytes(row: Published) -> int:
    """Return the estimate of the row without the history of the process."""
    return replayed(_script_requests(row)[1]).peak_allocated_bytes


def checkpoint_bytes() -> list[int]:
    """Return the sizes of the fp32 checkpoint, which lies on the card while the model is made there."""
    from transformers import BertConfig, BertForPreTraining

    with torch.device("meta"):
        parameters = dict(BertForPreTraining(BertConfig()).named_parameters())
    return [4 * parameters[name].numel() for name in sorted(parameters)]


class ScriptProcess:
    """The process of the script: its allocator, and the workspaces that the first products laid down."""

    def __init__(self) -> None:
        self.allocator, self.workspaces = Allocator(), set[int]()
        self.gradients: list[SegmentBlock] = []  # until the next zero_grad

    def run(self, rows: Sequence[Published]) -> Iterator[tuple[Published, int]]:
        """Yield the peak of each row of one model: 10 steps to warm up, empty_cache, and 3 measured steps."""
        allocator = self.allocator
        trace, run = _script_requests(rows[0])
        checkpoint = [allocator.malloc(size) for size in checkpoint_bytes()]
        model = {n: allocator.malloc(run.sizes[n]) for n in run.start if trace.state[n][0].part != "inputs"}
        self._free(checkpoint)
        for row in rows:
            yield row, self._peak(*_script_requests(row))
        self._zero_grad()
        self._free(list(model.values()))

    def _peak(self, trace: MemoryTrace, run: Requests) -> int:
        used = {n: self.allocator.malloc(size) for n, (block, size) in enumerate(trace.state) if block.part == "inputs"}
        self._step(trace, run, used, run.first)
        for number in range(12):
            if number == 9:
                self.allocator.peak_allocated_bytes = self.allocator.allocated_bytes
                self.allocator.release_free_memory()
            used |= {before: used.pop(n) for n, before in run.renamed.items()}
            self._step(trace, run, used, run.step)
        self._free(list(used.values()))
        return self.allocator.peak_allocated_bytes

    def _step(self, trace: MemoryTrace, run: Requests, used: dict[int, SegmentBlock], numbers: Sequence[int]) -> None:
        self._zero_grad()
        events = len(trace.state) + len(trace.events)
        for number in numbers:
            if number < 0:
                block, n = used.pop(~number), ~number - len(trace.state)
                is_gradient = n >= 0 and trace.events[n].block.part == "gradients"
                self.gradients.append(block) if is_gradient else self.allocator.free(block)
            elif number < events:
                used[number] = self.allocator.malloc(run.sizes[number])
            elif number - events not in self.workspaces:
                self.workspaces.add(number - events)
                self.allocator.malloc(run.sizes[number])

    def _zero_grad(self) -> None:
        self._free(self.gradients)
        self.gradients = []

    def _free(self, blocks: Sequence[SegmentBlock]) -> None:
        for block in blocks:
            self.allocator.free(block)


def replays(rows: Sequence[Published]) -> Iterator[tuple[Published, int]]:
    """Yield the peak of each row of the script in the process that ran all of them, one model after the other."""
    process = ScriptProcess()
    for attention in dict.fromkeys(row.attention for row in rows):
        yield from process.run([row for row in rows if row.attention == attention])


# ---- programs whose model is in published_models.py ----


def reserved_bytes(row: Published) -> int:
    """Return the bytes that the simulated allocator reserves in three steps of the program."""
    run_config = row.run_config
    with torch.device("meta"):
        model = published_models.MODELS[row.model]()
    if run_config.precision == BF16.name:
        model, run_config = model.to(torch.bfloat16), replace(run_config, precision=STORED)
    if run_config.checkpointing != NONE:
        model.recompute(run_config.checkpointing)
    inputs = {name: torch.zeros(row.batch, row.seq, dtype=torch.long, device="meta") for name in ("words", "next")}
    in_fp32 = partial(fsdp.MixedPrecisionPolicy, reduce_dtype=torch.float32)  # as torchtitan; no setting of a run
    with patch.object(fsdp, "MixedPrecisionPolicy", in_fp32):
        trace = module_trace(model, inputs, run_config, published_models.loss_of, "layers")
    trace = in_loop(trace, run_config)
    run = requests(trace, workspaces(row))
    return replayed(run).peak_reserved_bytes


# ---- the tables ----


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", help="only the rows of this GPU")
    asked = parser.parse_args().gpu
    rows = [row for row in published() if asked in (None, row.gpu)]
    runs = measured_runs.measured_runs() if asked is None else []
    for lines in (
        measured_runs.tables(runs),
        answers(rows),
        figures(rows),
        allocated(rows),
        reserved(rows),
        seconds(rows),
    ):
        for line in lines:
            print(line, flush=True)
        print()


def answers(rows: Sequence[Published]) -> Iterator[str]:
    """Yield the table of what ran and what failed, and the number of right answers of each program."""
    yield "| GPU | program | model | batch x seq | run | published | `fit` | source | assumed |\n" + "|---" * 9 + "|"
    found: list[tuple[Published, str]] = []
    for row in rows:
        if row.quantity in (RAN, FAILED):
            found.append((row, row.answer()))
            cells = (row.gpu, row.program, f"{row.model}, {row.architecture}", f"{row.batch} x {row.seq}",
                     row.run_text, row.quantity, WORDS[found[-1][1]], row.source, row.assumed)  # fmt: skip
            yield f"| {' | '.join(cells)} |"
    for program in dict.fromkeys(row.program for row, _ in found):
        yield f"\n{program}: {summary([pair for pair in found if pair[0].program == program])}"


def summary(found: Sequence[tuple[Published, str]]) -> str:
    """Return the number of right, uncertain and wrong answers."""
    right = sum(answer == (YES if row.quantity == RAN else NO) for row, answer in found)
    unsure = sum(answer == UNCERTAIN for _, answer in found)
    no, yes = (sum((row.quantity, answer) == wrong for row, answer in found) for wrong in ((RAN, NO), (FAILED, YES)))
    return f"{right} right, {unsure} not certain, {no} ran and `fit` says no, {yes} failed and `fit` says yes"


def figures(rows: Sequence[Published]) -> Iterator[str]:
    """Yield the table of nvidia-smi's figures, and the range of `fit`."""
    yield "| GPU | model | batch x seq | run | nvidia-smi | `fit` | side |\n" + "|---" * 7 + "|"
    for row in rows:
        if row.quantity == NVIDIA_SMI:
            low, high = row.shown_bytes()
            side = "inside" if low <= row.value_bytes <= high else f"{high / row.value_bytes - 1:+.1%}"
            yield (f"| {row.gpu} | {row.model}, {row.architecture} | {row.batch} x {row.seq} | {row.run_text} | "
                   f"{bytes_text(row.value_bytes)} | {bytes_text(low)} to {bytes_text(high)} | {side} |")  # fmt: skip


def allocated(rows: Sequence[Published]) -> Iterator[str]:
    """Yield the table of max_memory_allocated: the estimate alone, and the replay of the whole script."""
    chosen = [row for row in rows if row.quantity == ALLOCATED]
    replayed_bytes = {}
    for precision in dict.fromkeys(row.settings["precision"] for row in chosen):
        script = [row for row in chosen if (row.program, row.model) == (SCRIPT, REPLAYED)
                  and row.settings["precision"] == precision]  # fmt: skip
        replayed_bytes |= dict(replays(script)) if precision == FP16.name else {}
    heading = (
        "| attention | batch x seq | run | published, MB | estimate alone | replay of the script, MB |\n" + "|---" * 6
    )
    for model in dict.fromkeys(row.model for row in chosen):
        errors = []
        yield f"{model}\n\n{heading}|"
        for row in (row for row in chosen if row.model == model):
            again = f"{(replayed_bytes[row] - row.value_bytes) / 1e6:+.3f}" if row in replayed_bytes else ""
            try:
                error = alone_bytes(row) / row.value_bytes - 1
            except ValueError as missing:
                error, again = None, str(missing).split(".")[0]
            errors += [error] if row.program == SCRIPT and error is not None else []
            text = "" if error is None else f"{error:+.2%}" + (f" ({OTHER})" if row.program == OTHER else "")
            yield (f"| {row.attention} | {row.batch} x {row.seq} | {row.settings['precision']} | "
                   f"{row.value_bytes / 1e6:,.3f} | {text} | {again} |")  # fmt: skip
        sizes = sorted(map(abs, errors))
        if sizes:
            most = sizes[math.ceil(0.9 * len(sizes)) - 1]
            yield (f"\n{len(sizes)} steps: {min(errors):+.2%} to {max(errors):+.2%}; without the sign median "
                   f"{median(sizes):.2%}, 90 % of them at most {most:.2%}\n")  # fmt: skip


def reserved(rows: Sequence[Published]) -> Iterator[str]:
    """Yield the table of max_memory_reserved of programs whose model is in published_models.py."""
    yield "| model | card | batch x seq | run | source | published | here | error |\n" + "|---" * 8 + "|"
    for row in rows:
        if row.quantity == RESERVED:
            found = reserved_bytes(row)
            yield (f"| {row.model} | {row.gpu} | {row.batch} x {row.seq} | {row.run_text} | {row.source} | "
                   f"{bytes_text(row.value_bytes)} | {bytes_text(found)} | "
                   f"{found / row.value_bytes - 1:+.2%} |")  # fmt: skip


def seconds(rows: Sequence[Published]) -> Iterator[str]:
    """Yield the times of steps as multiples of the bound of a data sheet, by model, precision and source."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row.quantity == SECONDS and (bound := _data_sheet(row)) is not None:
            kind = (row.source.split(",")[0].split("(")[0], row.model, row.run_config.compute_precision)
            found.setdefault(kind, []).append(row.value_seconds / bound)
    low, high = PUBLISHED_RANGE
    yield f"| source | model | precision | steps | least | median | most | from {low} to {high} |\n" + "|---" * 8 + "|"
    for kind, ratios in found.items():
        inside = sum(low <= ratio <= high for ratio in ratios)
        cells = (*kind, f"{len(ratios)}", *(f"{of(ratios):.2f}" for of in (min, median, max)), f"{inside}")
        yield f"| {' | '.join(cells)} |"


@cache
def _data_sheet(row: Published) -> float | None:
    source = load(row.model, architecture=row.architecture, attention=row.attention)
    (variant,) = Simulator(source).report([row.run_config]).variants
    return data_sheet_bound(source, row.run_config, variant.memory.cost.saved_bytes, row.card)


if __name__ == "__main__":
    main()
