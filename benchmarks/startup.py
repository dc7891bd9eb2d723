"""The time of whole processes relative to `import torch`: bertscope's commands and torchinfo.

    python benchmarks/startup.py [--runs N]

The processes are interleaved, so that changes in the machine's speed affect all equally; each ratio is the median of
one command over the median of `python -c "import torch"`. torchinfo counts transformers' BERT-large of the same shape
on meta.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import subprocess
import sys
import time

TORCHINFO = """
import torch, torchinfo, transformers
config = transformers.BertConfig(vocab_size=21128, hidden_size=1024, num_hidden_layers=24,
                                 num_attention_heads=16, intermediate_size=4096)
with torch.device("meta"):
    model = transformers.BertModel(config, add_pooling_layer=False)
print(torchinfo.summary(model, depth=4, verbose=0))
"""
BERTSCOPE = [sys.executable, "-m", "bertscope"]
SUBJECTS = {
    "import torch": [sys.executable, "-c", "import torch"],
    "bertscope count bert-large-zh": [*BERTSCOPE, "count", "bert-large-zh"],
    "bertscope check (all presets)": [*BERTSCOPE, "check"],
    "bertscope --help": [*BERTSCOPE, "--help"],
    "bertscope presets": [*BERTSCOPE, "presets"],
    "torchinfo on transformers": [sys.executable, "-c", TORCHINFO],
}


def seconds(command: list[str]) -> float:
    """Return the wall time of one process."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603  our command
    return time.perf_counter() - start


def main() -> None:
    """Print one line for each command: median seconds, and the ratio to `import torch`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    subjects = dict(SUBJECTS)
    if not all(map(importlib.util.find_spec, ("torchinfo", "transformers"))):
        del subjects["torchinfo on transformers"]
        print("torchinfo or transformers is not installed: left out", file=sys.stderr)
    for command in subjects.values():
        seconds(command)  # fill the disk cache
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(runs):
        for name, command in subjects.items():
            times[name].append(seconds(command))
    floor = statistics.median(times["import torch"])
    print(f"{'':32}{'median s':>10}{'ratio':>8}   (ratio to `import torch`, {runs} runs)")
    for name, taken in times.items():
        median = statistics.median(taken)
        print(f"{name:32}{median:10.2f}{median / floor:8.2f}")


if __name__ == "__main__":
    main()
