"""Malformed configurations, presets, indexes and checkpoints: each must be one line and exit code 2, soon and small.

    python benchmarks/fuzz.py --runs 10000

Good files of every kind are damaged at random (bytes, values, structure, lengths), and `bertscope count` or
`verify` is asked about each, in this process. What counts as a failure: an exception that leaves the command line,
another exit code than 0 (the damage did no harm), 1 (verify says no) or 2, more than one line on stderr with 2,
more than 5 s of the processor for one (30 s of the clock), more than 1 GiB of memory for all of them together.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import pickle
import random
import resource
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECONDS, MEMORY_BYTES = 5, 1 << 30
SIZE = {"vocab_size": 60, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3,
        "intermediate_size": 20, "max_position_embeddings": 16}  # fmt: skip
FAMILIES = {
    "roberta": SIZE, "electra": SIZE | {"embedding_size": 8},
    "albert": SIZE | {"embedding_size": 8, "num_hidden_groups": 1},
    "distilbert": {"vocab_size": 60, "dim": 12, "n_layers": 2, "n_heads": 3, "hidden_dim": 20,
                   "max_position_embeddings": 16},
    "gpt2": {"vocab_size": 60, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 16},
    "t5": {"vocab_size": 60, "d_model": 12, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_heads": 3},
}  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 4, 24, 999, 70_000, 2**20, 2**24, 2**31, 2**63, 2**64, 10**30,
    -(2**63), 0.5, 1e308, -1e-320, float("nan"), float("inf"),
    "", "x", "12", "é" * 50, "../../etc/passwd", [],
    [0], [-1], [1e9], [[[]]], {}, {"a": {}}, [None] * 50, "F32", "eager",
)  # fmt: skip


def kinds(folder: Path) -> dict[str, tuple[str, bytes, list[str]]]:
    """Kind -> the file's name, its good contents, and what is asked of it."""
    import torch

    import bertscope

    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], **SIZE}
    model = bertscope.build(bertscope.BertConfig(**SIZE), "BertForMaskedLM", device="cpu")  # type: ignore[arg-type]
    made: dict[str, tuple[str, bytes, list[str]]] = {
        "preset": ("mine.yaml", (ROOT / "presets" / "bert-tiny.yaml").read_bytes(), ["count"]),
        "config": ("config.json", json.dumps(config, indent=1).encode(), ["count"]),
        "safetensors": ("model.safetensors", _safetensors(model), ["count"]),
        "index": ("model.safetensors.index.json", _index(model), ["count"]),
        "zip": ("pytorch_model.bin", _saved(model, True), ["count"]),
        "legacy": ("old.bin", _saved(model, False), ["count"]),
        "verified": ("model.safetensors", _safetensors(model), ["verify", str(folder / "good.yaml")]),
    }
    try:
        import transformers  # noqa: F401
    except ImportError:
        return made
    for family, fields in FAMILIES.items():
        made[family] = ("config.json", json.dumps({"model_type": family, **fields}).encode(), ["count"])
    torch.set_num_threads(1)
    return made


def _safetensors(model: Any) -> bytes:
    header, place = {}, 0
    for name, tensor in model.named_parameters():
        end = place + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [place, end]}
        place = end
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(place)


def _index(model: Any) -> bytes:
    places = {name: "shard.safetensors" for name, _ in model.named_parameters()}
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": places}).encode()


def _saved(model: Any, as_zip: bool) -> bytes:
    import torch

    out = io.BytesIO()
    torch.save(model.state_dict(), out, _use_new_zipfile_serialization=as_zip)
    return out.getvalue()


def damaged(good: bytes, kind: str, source: random.Random) -> bytes:
    """The file with something wrong, most of the time."""
    how = source.choice(("bytes", "cut", "length", "twice", "pickle"))
    if kind not in ("zip", "legacy", "preset") and source.random() < 0.6:
        return _with_value(good, kind, source)
    if how == "cut":
        return good[: source.randrange(len(good))]
    if how == "length" and kind in ("safetensors", "verified"):
        return (
            struct.pack("<Q", source.choice((0, 1, 2**62, 2**64 - 1, len(good), source.randrange(len(good)))))
            + good[8:]
        )
    if how == "twice" and good[:1] == b"{":
        return good[:-1] + b", " + good[1:]
    if how == "pickle" and kind == "legacy":
        return good[:40] + pickle.dumps(source.choice(VALUES)) + good[40:]
    return _with_bytes(good, kind, source)


def _with_bytes(good: bytes, kind: str, source: random.Random) -> bytes:
    raw = bytearray(good)
    # Where the structure is: a header in front, a zip's directory at the end.
    places = [(0, min(len(raw), 12_000))] + ([(max(0, len(raw) - 4000), len(raw))] if kind == "zip" else [])
    for _ in range(source.randint(1, 6)):
        low, high = source.choice(places)
        at = source.randrange(low, min(high, len(raw)) + 1) if low <= len(raw) else len(raw)
        new = source.choice(
            (b"", bytes(source.choices(range(256), k=4)), bytes(source.choices(b'{}[]",:0129.eE-\n \0', k=3)))
        )
        raw[at : at + source.choice((0, 0, 1, 4, 40))] = new
    return bytes(raw)


def _with_value(good: bytes, kind: str, source: random.Random) -> bytes:
    is_safe = kind in ("safetensors", "verified")
    length = int.from_bytes(good[:8], "little") if is_safe else 0
    text, rest = (good[8 : 8 + length], good[8 + length :]) if is_safe else (good, b"")
    data = json.loads(text)
    for _ in range(source.randint(1, 3)):
        place = data
        while True:
            key = source.choice(list(place)) if isinstance(place, dict) else source.randrange(len(place))
            inner = place[key]
            if not isinstance(inner, (dict, list)) or not inner or source.random() < 0.3:
                break
            place = inner
        if source.random() < 0.2 and isinstance(place, dict):
            key = source.choice(("", "x", "__metadata__", "num_labels", "id2label", "auto_map", "pruned_heads"))
        place[key] = copy.deepcopy(source.choice(VALUES))  # a copy: the next round may damage it in its turn
    raw = json.dumps(data).encode()
    return struct.pack("<Q", len(raw)) + raw + rest if is_safe else raw


def ask(arguments: list[str]) -> tuple[int, str, float]:
    """Exit code, stderr and seconds of the processor of one command in this process."""
    from bertscope import cli

    out, err, began = io.StringIO(), io.StringIO(), time.process_time()
    sys.argv = ["bertscope", *arguments]
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code = cli._run()
        except SystemExit as stop:
            code = int(stop.code or 0)
    return code, err.getvalue(), time.process_time() - began


def _too_long(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def cases(runs: int, seed: int, folder: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """Damaged files, one after the other in the same places."""
    source, made = random.Random(seed), kinds(folder)  # noqa: S311  no secret
    (folder / "good.yaml").write_bytes(made["preset"][1])
    (folder / "shard.safetensors").write_bytes(made["safetensors"][1])
    for number in range(runs):
        kind = list(made)[number % len(made)]
        name, good, command = made[kind]
        path = folder / name if kind == "index" else folder / kind / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(damaged(good, kind, source))
        yield kind, path, command


def main() -> int:
    """Run, and print what happened; 1 when something failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=20261121)
    options = parser.parse_args()
    for stop in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(stop, _too_long)
    codes: Counter[tuple[str, int]] = Counter()
    failures, slowest = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for kind, path, command in cases(options.runs, options.seed, Path(folder)):
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.alarm(6 * SECONDS)
            try:
                code, err, seconds = ask([*command, str(path)])
            except BaseException:
                code, err, seconds = -1, traceback.format_exc(), 0.0
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
            codes[kind, code] += 1
            slowest = max(slowest, seconds)
            errors = [line for line in err.splitlines() if not line.startswith("note: ")]
            if code not in (0, 1, 2) or "Traceback" in err or (code == 2 and len(errors) != 1):
                failures += 1
                kept = Path(tempfile.gettempdir()) / f"bertscope-fuzz-{failures}-{path.name}"
                kept.write_bytes(path.read_bytes())
                print(f"FAILED {kind}: exit {code}, kept as {kept}\n{err[-1500:]}")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    for kind in dict.fromkeys(kind for kind, _ in codes):
        print(
            f"{kind:12s}"
            + ", ".join(f"exit {code}: {count}" for (which, code), count in sorted(codes.items()) if which == kind)
        )
    print(f"{options.runs} runs, {failures} failures, slowest {slowest:.2f} s, peak memory {memory / 2**20:.0f} MiB")
    return int(failures > 0 or memory > MEMORY_BYTES)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
