"""Write docs/gallery.md, the output of every command in a terminal with 80 columns.

    python docs/make_gallery.py [COMMAND ...]

A test compares the page with the outputs of today, except those in NOT_COMPARED.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).resolve().parent / "gallery.md"
HEAD = """# Gallery

<!-- Written by `python docs/make_gallery.py`; do not edit. -->

One output for each command, in a terminal with 80 columns; `...` where a long one goes on. `-v` shows all rows and
notes. [Cookbook](cookbook.md): more tasks. [Glossary](glossary.md): the terms.

"""
GRID = "model: [bert-tiny, bert-mini]\nbatch: [8, 32]\nseq: 128\nbudget: 256MiB\n"  # as in tests/conftest.py
OOM = (  # as in tests/conftest.py
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 23.65 "
    "GiB of which 1.66 GiB is free. Including non-PyTorch memory, this process has 20.81 GiB memory in use. Of the "
    "allocated memory 12.09 GiB is allocated by PyTorch, and 4.84 GiB is reserved by PyTorch but unallocated.\n"
)
SHOWN_LINES = 14
COMMANDS = (
    "count bert-base-cased",
    "tree bert-base-uncased --depth 2 --shapes --batch 32",
    "flops bert-base-uncased --depth 1",
    "estimate bert-base-uncased --batch 8 --checkpointing",
    "profile bert-mini --batch 8 --checkpointing",
    "run --gpu t4 train.py",
    "fit bert-base-uncased -a BertForSequenceClassification --gpu t4 --seq 128 --precision autocast-fp16",
    "plan bert-mini --budget 1536MiB --batch 32 --seq 512",
    "why oom.log",
    "sweep grid.yaml -o results.jsonl",
    "report bert-tiny --no-fit -o report.html",
    "explain bert-tiny encoder.layer.0.attention",
    "diagram bert-tiny encoder.layer.0.attention.self --kind forward",
    "diff bert-base-cased bert-base-uncased",
    "presets deberta-v2",
    "check --presets",
    "schema diff",
    "doctor",
)
# A measurement; a page, which has its own tests; the machine.
NOT_COMPARED = ("profile", "report", "doctor")


def shown(command: str, folder: Path) -> str:
    """Return the first lines of what a command prints in that folder: on stdout, if nothing the notes on stderr."""
    environment = os.environ | {"COLUMNS": "80"}
    words = [sys.executable, "-I", "-m", "bertscope", *command.split()]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=True)  # noqa: S603
    notes = "".join(line for line in done.stderr.splitlines(keepends=True) if line.startswith("note:"))
    if command == "doctor":  # without the paths of this machine
        return cut(f"{done.stdout.partition(chr(10) + 'bertscope ')[0]}\n...")
    return cut(done.stdout or notes)


def cut(text: str) -> str:
    """Return the first lines of a text, without the spaces at their ends."""
    lines = [line.rstrip() for line in text.rstrip().splitlines()]
    return "\n".join(lines if len(lines) <= SHOWN_LINES else [*lines[:SHOWN_LINES], "..."]) + "\n"


def page(outputs: dict[str, str]) -> str:
    """Return the page."""
    blocks = (
        f"## {command.split()[0]}\n\n```text\n$ bertscope {command}\n{output}```\n"
        for command, output in outputs.items()
    )
    return HEAD + "\n".join(blocks)


def read(text: str) -> dict[str, str]:
    """Return the commands and outputs of a page."""
    return dict(re.findall(r"^\$ bertscope (.*)\n((?:.*\n)*?)```$", text, re.MULTILINE))


def main() -> None:
    """Run every command, or those whose names are given, and write the page."""
    import json

    from safetensors.torch import save_model

    import bertscope

    with tempfile.TemporaryDirectory() as name:
        checkpoint = Path(name) / "my-bert"
        checkpoint.mkdir()
        config = bertscope.load("bert-tiny").config
        (checkpoint / "config.json").write_text(json.dumps(config.to_dict()))
        (Path(name) / "grid.yaml").write_text(GRID)
        (Path(name) / "oom.log").write_text(OOM)
        shutil.copy(PAGE.parent.parent / "tests" / "data" / "scripts" / "train.py", name)
        save_model(bertscope.BertModel(config), checkpoint / "model.safetensors")
        outputs = read(PAGE.read_text(encoding="utf-8")) if sys.argv[1:] else {}
        for command in COMMANDS:
            subcommand = command.split()[0]
            if subcommand in (sys.argv[1:] or subcommand):
                outputs[command] = shown(command, Path(name))
    PAGE.write_text(page({command: outputs[command] for command in COMMANDS}), encoding="utf-8")


if __name__ == "__main__":
    main()
