"""The error of `estimate` against the peak of the CPU allocator; each step runs under the profiler in a new process.

    python benchmarks/memory.py --models bert-tiny,bert-base-uncased --sizes 8x128,4x512 > rows.md
    python benchmarks/memory.py --summary rows.md
    python benchmarks/memory.py --plain bertscope,transformers --models bert-tiny,bert-base-uncased

Prints a Markdown table: the measured peak, the estimated peak and the error for every configuration and phase. A
summary has a line for each model, size, attention and precision, with the largest error among its peaks.
With --plain the step is the third of a plain training loop (tests/analyses/memory/plain_loop.py), which uses none of
the analyses, of the built-in model and of transformers' class; the table has one peak for each configuration.
BERT-large at 4 x 512 takes 14 GiB and about a minute for each row on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
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


TITLES = ("model", "batch x seq", "attention", "precision", "checkpointing", "mode", "phase", "measured bytes",
          "estimated bytes", "error")  # fmt: skip


def main() -> None:
    """Print one line for every configuration of the grid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="bert-tiny,bert-base-uncased,bert-large-zh")
    parser.add_argument("--sizes", default="8x128,4x512")
    parser.add_argument("--modes", default="forward,training")
    parser.add_argument("--summary", nargs="+", metavar="FILE", help="sum up rows printed before")
    parser.add_argument("--plain", metavar="IMPLEMENTATION[,...]", help="measure a plain loop of these implementations")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.summary:
        print("\n".join(summary("".join(Path(name).read_text() for name in arguments.summary))))
        return
    if arguments.one:
        print(json.dumps(one(json.loads(arguments.one))))
        return
    if arguments.plain:
        plain_table(arguments)
        return
    print(f"| {' | '.join(TITLES)} |\n|---|---|---|---|---|---|---|---:|---:|---:|")
    grid = itertools.product(
        arguments.models.split(","),
        arguments.sizes.split(","),
        ("eager", "sdpa"),
        (None, "bf16"),
        STRATEGIES,
        arguments.modes.split(","),
    )
    worst = 0.0
    for model, size, attention, autocast, strategy, mode in grid:
        asked = {"model": model, "size": size, "attention": attention, "autocast": autocast, "strategy": strategy,
                 "mode": mode}  # fmt: skip
        done = subprocess.run([sys.executable, __file__, "--one", json.dumps(asked)], capture_output=True, text=True)  # noqa: S603  this file
        if done.returncode:
            print(f"| {model} | {size} | {attention} | {autocast} | {strategy} | {mode} | not measured |")
            continue
        for phase, measured, estimated in json.loads(done.stdout.splitlines()[-1]):
            error = (estimated - measured) / measured
            worst = max(worst, abs(error))
            words = (model, size, attention, f"{autocast} autocast" if autocast else "fp32", strategy, mode, phase)
            print(f"| {' | '.join(words)} | {measured:,} | {estimated:,} | {error:+.1e} |", flush=True)
    print(f"\nworst error: {worst:.1e} of the phase's peak")


PLAIN_TITLES = ("model", "batch x seq", "attention", "precision", "checkpointing", "implementation",
                "measured bytes", "estimated bytes", "error")  # fmt: skip


def plain_table(arguments: argparse.Namespace) -> None:
    """Print one line for each configuration of the plain loop."""
    print(f"| {' | '.join(PLAIN_TITLES)} |\n|---|---|---|---|---|---|---:|---:|---:|")
    grid = itertools.product(
        arguments.models.split(","), arguments.sizes.split(","), ("sdpa", "eager"), (None, "bf16"), ("none", "full"),
        arguments.plain.split(","),
    )  # fmt: skip
    for model, size, attention, autocast, strategy, implementation in grid:
        asked = {"model": model, "size": size, "attention": attention, "autocast": autocast, "strategy": strategy,
                 "implementation": implementation}  # fmt: skip
        done = subprocess.run([sys.executable, __file__, "--one", json.dumps(asked)], capture_output=True, text=True)  # noqa: S603  this file
        words = (model, size, attention, f"{autocast} autocast" if autocast else "fp32", strategy, implementation)
        if done.returncode:
            print(f"| {' | '.join(words)} | not measured | | |", flush=True)
            continue
        ((_, measured, estimated),) = json.loads(done.stdout.splitlines()[-1])
        error = (estimated - measured) / measured
        print(f"| {' | '.join(words)} | {measured:,} | {estimated:,} | {100 * error:+.5f} % |", flush=True)


def plain(asked: dict[str, Any]) -> tuple[int, int]:
    """Return the measured peak of a plain loop, and the estimated one."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import torch

    from bertscope.analyses.memory.estimate import MemoryTraces
    from bertscope.model import build
    from bertscope.run_config import RunConfig
    from bertscope.sources.find import load
    from tests.analyses.memory.plain_loop import peak_bytes

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
        return {"input_ids": ids, "labels": ids.clone()}

    autocast = torch.bfloat16 if asked["autocast"] else None
    measured = peak_bytes(model, inputs, lambda params: torch.optim.AdamW(params, lr=0.0), autocast=autocast)
    run_config = RunConfig(batch=batch, seq=seq, autocast=asked["autocast"], checkpointing=asked["strategy"],
                           model_implementation=asked["implementation"])  # fmt: skip
    return measured, MemoryTraces(source).trace(run_config).peak_bytes


def summary(text: str) -> Iterator[str]:
    """Return one Markdown line for each model, size, attention and precision."""
    groups: dict[tuple[str, ...], list[tuple[float, str]]] = {}
    for line in text.splitlines():
        words = [word.strip() for word in line.strip("| ").split("|")]
        if len(words) == len(TITLES) and words[0] != TITLES[0] and "-" not in words[0][:1]:
            measured, estimated = (int(word.replace(",", "")) for word in words[7:9])
            where = ", ".join(words[4:7])
            groups.setdefault(tuple(words[:4]), []).append(((estimated - measured) / measured, where))
    yield "| model | batch x seq | attention | precision | peaks compared | worst error of a peak |"
    yield "|---|---|---|---|---:|---:|"
    for names, errors in groups.items():
        worst, where = max(errors, key=lambda pair: abs(pair[0]))
        yield f"| {' | '.join(names)} | {len(errors)} | {worst:+.1e} ({where}) |"


def one(asked: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Return the phases of one configuration: name, measured peak, estimated peak."""
    if "implementation" in asked:
        return [("step", *plain(asked))]
    from bertscope.analyses.memory.estimate import MemoryTraces
    from bertscope.analyses.memory.profiler_run import measured
    from bertscope.analyses.memory.step import ModelStep, bert_inputs, run_model
    from bertscope.run_config import RunConfig
    from bertscope.sources.find import load

    batch, _, seq = asked["size"].partition("x")
    checkpointing, reentrant = STRATEGIES[asked["strategy"]]
    run_config = RunConfig(batch=int(batch), seq=int(seq), mode=asked["mode"], autocast=asked["autocast"],
                   checkpointing=checkpointing, reentrant=reentrant)  # fmt: skip
    source = load(asked["model"], architecture="BertForMaskedLM", attention=asked["attention"])
    estimated = MemoryTraces(source).trace(run_config)
    model = run_model(source, run_config, "cpu")
    step = ModelStep(model, bert_inputs(model, run_config, "cpu"), run_config)
    step.run_first_steps()
    pairs = zip(measured(step).peaks(), estimated.peaks(), strict=True)
    return [(real.phase, real.live_bytes, guess.live_bytes) for real, guess in pairs]


if __name__ == "__main__":
    main()
