"""Training runs that others measured on their GPUs, with what five estimators said of each (measured_runs.csv).

    python -m benchmarks.measured_runs [--rows] [--histories]

With --histories the runs below batch 20 get 100 random histories of four batches. Their lines have the lengths of
wikitext-2's, cut to 128 tokens: line_words.csv counts the words of its 8,118 lines for validation and test
(pytorch/examples, word_language_model/data/wikitext-2; the lines for training are not at hand). A word has 1.16 tokens:
GPT-2's tokenizer makes 287,644 of the 241,211 words for test (transformers' documentation, perplexity of fixed-length
models), of which 8,714 are the line breaks between the joined lines.

The bytes that torch reserved (NVML's peak less the value with the CUDA context alone) and the predictions of xMem,
DNNMem, SchedTune and LLMem are the data of xMem (Middleware 2025); the allocated bytes are train_results.json of models
on the Hub. A cap is a limit of the allocator under which the same run was tried again. Needs about five minutes and
transformers 4.51, with which they ran: T5 of 5.23 takes 15 % less, GPT-2 2 %. Nothing runs on a GPU. `configs/` holds
the models' configurations from public values.
"""

from __future__ import annotations

import csv
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from typer.testing import CliRunner

from bertscope.cli import app
from bertscope.gpus import find_gpu
from bertscope.memory.caching_allocator import STEPS, history, requests
from bertscope.memory.lengths import LengthSteps
from bertscope.memory.simulator import Simulator
from bertscope.memory.summary import for_gpu
from bertscope.reports.step import YES
from bertscope.settings.run_config import RunConfig
from bertscope.sources.find import source_of

HERE = Path(__file__).parent
OWN = "bertscope"
RIVALS = {"xMem": "xmem_bytes", "DNNMem": "dnnmem_bytes", "SchedTune": "schedtune_bytes", "LLMem": "llmem_bytes"}
LINE_TOKENS, SEEDS = 128, 100
TOKENS_PER_WORD = 1.16
# What the first run of a process takes on a GPU beyond an equal second one: local memory of the kernels, about 440 B
# for each thread that the GPU runs at once, which is no part of the allocator (runs of xMem, first and second).
FIRST_LAUNCH_BYTES = {"rtx-3060-12gb": 18 << 20, "rtx-4060": 14 << 20, "a100-40gb": 94 << 20}
PADDING = 0.4  # some: a collator pads to the longest line, and with any padding GPT-2 and OPT make a mask
KNOWN_LENGTH_FROM = 20  # a smaller batch may have no line of the full length, and its history decides


@dataclass(frozen=True)
class Run:
    """A row of measured_runs.csv."""

    cells: dict[str, str]

    def __getattr__(self, name: str) -> str:
        return self.cells[name]

    @property
    def measured_bytes(self) -> int:
        return int(self.cells["measured_bytes"])

    @property
    def caps(self) -> list[tuple[int, bool]]:
        """Return the limits under which the run was tried again, and if it ran."""
        pairs = (cap.split(":") for cap in self.cells["caps"].split())
        return [(int(size), outcome == "ran") for size, outcome in pairs]

    def answer(self, command: str, *words: str) -> dict[str, Any]:
        """Return the JSON of a command for the run."""
        path, *others = self.words.split()
        path = str(HERE / path / "config.json") if path.startswith("configs/") else path
        asked = [command, path, *others, "--batch", self.batch, "--seq", self.seq, "--optimizer", self.optimizer,
                 "--device", "cuda", "--checkpointing", "none", "--format", "json", *words]  # fmt: skip
        asked += [] if "--loop" in others else ["--loop", "plain"]
        done = CliRunner().invoke(app, asked)
        if done.exit_code > 1:  # 1: the answer is no
            raise SystemExit(f"{self.id}: {' '.join(asked)}: {done.output}")
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    @cached_property
    def range(self) -> tuple[int, int]:
        """Return the lowest and the highest bytes that bertscope says."""
        words: tuple[str, ...] = ("--torch", "1.8")  # about the version that trained the models on the Hub
        if self.gpu:
            context = f"{find_gpu(self.gpu).context_low_bytes}B"
            words = "--torch", "2.6", "--padding", f"{PADDING}", "--gpu", self.gpu, "--context", context
        cost = self.answer("estimate", *words)["variants"][0]["estimated"]["cost"]
        if self.quantity == "reserved":
            return cost["reserved"]["low_bytes"], cost["reserved"]["high_bytes"]
        return cost["max_allocated_bytes"], cost["max_allocated_bytes"]

    @property
    def predictions(self) -> dict[str, int]:
        """Return the bytes that each estimator says, where it says any; of a range those nearest to the measured."""
        low, high = self.range
        own = min(max(low, self.measured_bytes), high)
        rivals = {name: int(self.cells[field] or 0) for name, field in RIVALS.items()}
        return {OWN: own} | {name: size for name, size in rivals.items() if size > 0}

    def fits(self, cap_bytes: int) -> bool:
        """Return whether the step fits in a cap, which torch takes as a share of the GPU, of two decimals."""
        total = find_gpu(self.gpu).memory_bytes
        limit = round(cap_bytes / total, 2) * total
        words = "--torch", "2.6", "--padding", f"{PADDING}", "--budget", f"{limit:.0f}B", "--context", "0B"
        return bool(self.answer("fit", *words)["rows"][0]["cost"]["verdict"] == YES)


def histories(run: Run) -> Iterator[int]:
    """Yield what torch reserves in four steps, for 100 random orders of the lines and each place of the workspaces."""
    path, *others = run.words.split()
    gpu, batch = find_gpu(run.gpu), int(run.batch)
    config = RunConfig(batch=batch, seq=LINE_TOKENS, optimizer=run.optimizer, device="cuda", torch="2.6",
                       input=tuple(others[1:]), padding=PADDING)  # fmt: skip
    simulator = Simulator(source_of(str(HERE / path / "config.json"))).limited(config, gpu, gpu.context_low_bytes)
    config = for_gpu(config, gpu)
    steps = LengthSteps(simulator, config, dict.fromkeys(range(1, LINE_TOKENS + 1), 1))
    trace_of = cache(partial(steps.trace, batch))
    tokens, lines = line_lengths()
    generators = map(random.Random, range(SEEDS))
    orders = [tuple(max(one.choices(tokens, lines, k=batch)) for _ in range(STEPS)) for one in generators]
    for laid in simulator.placements(config):
        run_of = cache(lambda seq, laid=laid: requests(trace_of(seq), laid))
        reserved = {order: history(list(map(run_of, order))).reserved_bytes for order in set(orders)}
        yield from map(reserved.__getitem__, orders)


@cache
def line_lengths() -> tuple[list[int], list[int]]:
    """Return lengths in tokens and the number of lines that have each; an empty line still has a token."""
    with (HERE / "line_words.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    tokens = [min(max(round(TOKENS_PER_WORD * int(row["words"])), 1), LINE_TOKENS) for row in rows]
    return tokens, [int(row["lines"]) for row in rows]


def history_table(runs: Sequence[Run]) -> Iterator[str]:
    """Yield for each run of unknown lengths the range of its histories, and how many hold the measured bytes."""
    yield "| run | measured | lowest | median | highest | width |\n|---|---|---|---|---|---|"
    widths, inside = [], 0
    for run in runs:
        if run.quantity == "reserved" and not run.ran_out and int(run.batch) < KNOWN_LENGTH_FROM:
            sizes = sorted(histories(run))
            widths.append(sizes[-1] / sizes[0] - 1)
            measured = run.measured_bytes - FIRST_LAUNCH_BYTES[run.gpu]
            inside += sizes[0] <= measured <= sizes[-1]
            shown = (f"{size / 2**30:.3f}" for size in (measured, sizes[0], median(sizes), sizes[-1]))
            yield f"| {run.model} {run.optimizer} {run.batch} | {' | '.join(shown)} | {widths[-1]:.0%} |"
    yield f"\n{inside} of {len(widths)} lie between the lowest and the highest; median width {median(widths):.0%}."


def measured_runs() -> list[Run]:
    """Return the rows that name the words of a command."""
    with (HERE / "measured_runs.csv").open(encoding="utf-8", newline="") as file:
        return [Run(row) for row in csv.DictReader(file) if row["words"]]


def tables(runs: Sequence[Run]) -> Iterator[str]:
    """Yield the errors of all estimators, then bertscope's by model, optimizer and GPU, and its verdicts at caps."""
    if not runs:
        return
    reserved = [run for run in runs if run.quantity == "reserved" and not run.ran_out]
    yield _heading("estimator")
    for name in (OWN, *RIVALS):
        errors = [run.predictions[name] / run.measured_bytes - 1 for run in reserved if name in run.predictions]
        yield f"| {name} | {_summary(errors)} |"
    widths = [run.range[1] / run.range[0] - 1 for run in reserved]
    ranges = [run for run, width in zip(reserved, widths, strict=True) if width]
    inside = sum(run.range[0] <= run.measured_bytes <= run.range[1] for run in ranges)
    yield f"\n{OWN} says a range for {len(ranges)} runs, in which the measured bytes of {inside} lie; an error"
    yield f"is measured from its nearest end. Median width of all: {median(widths):.2%}, highest {max(widths):.1%}."
    known = [run for run in reserved if int(run.batch) >= KNOWN_LENGTH_FROM]
    kinds: dict[str, Callable[[Run], str]] = {
        "model": lambda run: run.model, "optimizer": lambda run: run.optimizer, "GPU": lambda run: run.gpu,
    }  # fmt: skip
    known_lengths = f"batch {KNOWN_LENGTH_FROM} and more"
    for kind, of in kinds.items():
        yield f"\n{_heading(f'{kind} ({known_lengths})')}"
        for name in sorted(set(map(of, known))):
            yield f"| {name} | {_summary([_error(run) for run in known if of(run) == name])} |"
    allocated = [run for run in runs if run.quantity == "allocated"]
    yield f"\n`max_memory_allocated` of models on the Hub, torch 1.8 to 1.10: {_summary(list(map(_error, allocated)))}"
    verdicts = [(run.fits(cap), ran) for run in known for cap, ran in run.caps]
    yield f"\n{sum(fits == ran for fits, ran in verdicts)} of {len(verdicts)} second runs under a cap are said right."


def _heading(rows: str) -> str:
    return f"| {rows} | runs | median error | within 1 % | largest |\n|---|---|---|---|---|"


def _error(run: Run) -> float:
    return run.predictions[OWN] / run.measured_bytes - 1


def _summary(errors: Sequence[float]) -> str:
    sizes = list(map(abs, errors))
    if not sizes:
        return "0 | | |"
    return f"{len(sizes)} | {median(sizes):.2%} | {sum(size <= 0.01 for size in sizes)} | {max(sizes):.1%}"


def main() -> None:
    """Print the tables, with --rows a line for each run first."""
    runs = measured_runs()
    print(f"transformers {version('transformers')}; the runs had 4.51", file=sys.stderr)
    for run in runs if "--rows" in sys.argv else ():
        error = "ran out" if run.ran_out else f"{_error(run):+.2%}"
        print(f"{run.id} {run.model} {run.optimizer} {run.batch} x {run.seq} {run.gpu}: {error}", flush=True)
    for line in history_table(runs) if "--histories" in sys.argv else tables(runs):
        print(line, flush=True)


if __name__ == "__main__":
    main()
