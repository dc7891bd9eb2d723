"""The error of `estimate` against the peak of the CPU allocator; each step runs under the profiler in a new process.

    python benchmarks/memory.py --models bert-tiny,bert-base-uncased --sizes 8x128,4x512 > rows.csv
    python benchmarks/memory.py --summary rows.csv
    python benchmarks/memory.py --plain bertscope,transformers --models bert-tiny,bert-base-uncased

Prints rows of docs/accuracy.csv: the measured peak, the estimated peak and the error for every configuration and
phase of the built-in model. A summary has a row for each model, size, attention and precision, with the largest error
among its peaks. With --plain the step is the third of a plain training loop (tests/memory/plain_loop.py),
which uses none of the analyses, of the built-in model and of transformers' class, with one peak for each
configuration. BERT-large at 4 x 512 takes 14 GiB and about a minute for each row on two cores.
`python docs/make_accuracy.py` writes the table and the picture of docs/accuracy.md from docs/accuracy.csv.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STRATEGIES = {
    "none": ("none", False),
    "full": ("full", False),
    "reentrant": ("full", True),
    "every-2": ("every-2", False),
    "selective": ("selective", False),
}


TITLES = ("loop", "implementation", "model", "batch", "seq", "attention", "precision", "checkpointing", "mode", "phase",
          "peaks", "measured_bytes", "estimated_bytes", "error", "date")  # fmt: skip


def main() -> None:
    """Print a row for every configuration of the grid and phase."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="bert-tiny,bert-base-uncased,bert-large-zh")
    parser.add_argument("--sizes", default="8x128,4x512")
    parser.add_argument("--modes", default="forward,training")
    parser.add_argument("--summary", nargs="+", metavar="FILE", help="sum up rows printed before")
    parser.add_argument("--plain", metavar="IMPLEMENTATION[,...]", help="measure a plain loop of these implementations")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(one(json.loads(arguments.one))))
        return
    writer = csv.DictWriter(sys.stdout, TITLES, lineterminator="\n", restval="")
    writer.writeheader()
    if arguments.summary:
        rows = [row for name in arguments.summary for row in csv.DictReader(Path(name).read_text().splitlines())]
        writer.writerows(summary(rows))
        return
    for row in measured_rows(arguments):
        writer.writerow(row)
        sys.stdout.flush()


def measured_rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of the grid; a configuration that cannot be measured has no bytes."""
    plain_loop = arguments.plain is not None
    grid = itertools.product(
        arguments.models.split(","),
        arguments.sizes.split(","),
        ("sdpa", "eager"),
        (None, "bf16"),
        ("none", "full") if plain_loop else STRATEGIES,
        ("training",) if plain_loop else arguments.modes.split(","),
        arguments.plain.split(",") if plain_loop else ("bertscope",),
    )
    for model, size, attention, autocast, strategy, mode, implementation in grid:
        asked = {"model": model, "size": size, "attention": attention, "autocast": autocast, "strategy": strategy,
                 "mode": mode, "implementation": implementation,
                 "loop": "plain" if plain_loop else "profiler"}  # fmt: skip
        done = subprocess.run([sys.executable, __file__, "--one", json.dumps(asked)], capture_output=True, text=True)  # noqa: S603  this file
        batch, _, seq = size.partition("x")
        row = {"loop": asked["loop"], "implementation": implementation, "model": model, "batch": batch, "seq": seq,
               "attention": attention, "precision": f"autocast-{autocast}" if autocast else "fp32",
               "checkpointing": strategy, "mode": mode, "peaks": 1, "date": time.strftime("%Y-%m-%d")}  # fmt: skip
        peaks = [("not measured", "", "")] if done.returncode else json.loads(done.stdout.splitlines()[-1])
        for phase, measured, estimated in peaks:
            yield row | {"phase": phase, "measured_bytes": measured, "estimated_bytes": estimated,
                         "error": _error_text(measured, estimated) if measured else ""}  # fmt: skip


def _error_text(measured: int, estimated: int) -> str:
    return f"{(estimated - measured) / measured:+.1e}" if estimated != measured else "0"


def plain(asked: dict[str, Any]) -> tuple[int, int]:
    """Return the measured peak of a plain loop, and the estimated one."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import torch

    from bertscope.memory.estimate import MemoryTraces
    from bertscope.model import build
    from bertscope.settings.run_config import RunConfig
    from bertscope.sources.bert import BertSource
    from bertscope.sources.find import load
    from tests.memory.plain_loop import peak_bytes, tokenized

    batch, _, seq = (int(word) if word.isdigit() else word for word in asked["size"].partition("x"))
    source = load(asked["model"], architecture="BertForMaskedLM", attention=asked["attention"])

    def model() -> Any:
        if asked["implementation"] == "bertscope":
            built: Any = build(source.config, source.architecture, device="cpu")
        else:
            import transformers

            config = transformers.BertConfig(**source.config.to_dict())
            built = transformers.BertForMaskedLM._from_config(config, attn_implementation=asked["attention"])
        if asked["strategy"] == "full":
            built.gradient_checkpointing_enable({"use_reentrant": False})
        return built

    def inputs(built: Any) -> dict[str, torch.Tensor]:
        ids = torch.randint(1, source.config.vocab_size, (batch, seq))
        given = tokenized(ids) | {"labels": ids.clone()}
        if asked["implementation"] == "bertscope":  # which would add a mask of ones to the scores
            del given["attention_mask"]
        return given

    autocast = torch.bfloat16 if asked["autocast"] else None
    measured = peak_bytes(model, inputs, lambda params: torch.optim.AdamW(params, lr=0.0), autocast=autocast)
    if asked["implementation"] == "bertscope":
        BertSource.for_run = lambda self: self  # type: ignore[method-assign]  # without the masks of transformers
    run_config = RunConfig(batch=batch, seq=seq,
    precision=f"autocast-{asked['autocast']}" if asked["autocast"] else "fp32",
                           checkpointing=asked["strategy"])  # fmt: skip
    return measured, MemoryTraces(source).trace(run_config).peak_bytes


def summary(rows: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield a row for each model, size, attention and precision, with the largest error among its peaks."""
    same = ("loop", "implementation", "model", "batch", "seq", "attention", "precision")
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        if row["error"]:
            groups.setdefault(tuple(row[name] for name in same), []).append(row)
    for found in groups.values():
        worst = max(found, key=lambda row: abs(float(row["error"])))
        yield worst | {"peaks": len(found), "measured_bytes": "", "estimated_bytes": ""}


def one(asked: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Return the phases of one configuration: name, measured peak, estimated peak."""
    if asked["loop"] == "plain":
        return [("step", *plain(asked))]
    from bertscope.measure.profiler_run import measured
    from bertscope.memory.estimate import MemoryTraces
    from bertscope.memory.step import ModelStep, real_inputs, run_model
    from bertscope.settings.run_config import RunConfig
    from bertscope.sources.bert import BertSource
    from bertscope.sources.find import load

    BertSource.for_run = lambda self: self  # type: ignore[method-assign]  # without the masks of transformers
    batch, _, seq = asked["size"].partition("x")
    checkpointing, reentrant = STRATEGIES[asked["strategy"]]
    run_config = RunConfig(batch=int(batch), seq=int(seq), mode=asked["mode"],
    precision=f"autocast-{asked['autocast']}" if asked["autocast"] else "fp32",
                           checkpointing=checkpointing, reentrant=reentrant)  # fmt: skip
    source = load(asked["model"], architecture="BertForMaskedLM", attention=asked["attention"])
    estimated = MemoryTraces(source).trace(run_config)
    model = run_model(source, run_config, "cpu")
    step = ModelStep(model, real_inputs(model, run_config, "cpu"), run_config)
    step.run_first_steps()
    pairs = zip(measured(step).peaks(), estimated.peaks(), strict=True)
    return [(real.phase, real.live_bytes, guess.live_bytes) for real, guess in pairs]


if __name__ == "__main__":
    main()
