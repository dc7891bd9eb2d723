"""Damaged files of every kind, and the judgement of what a command does with them.

`tests/test_fuzz.py` runs a few with a fixed seed, `benchmarks/fuzz.py` any number. A command runs in this process.
"""

from __future__ import annotations

import contextlib
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
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from tests.conftest import ROOT, Result, run_cli

SECONDS, MEMORY_BYTES = 10, 1 << 30  # of the processor, and above the memory before, for one command
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
    "", "x", "12", "é" * 50, "../../etc/passwd", "\x1b[2J\u202e\x9b", "9 GiB", "5 %", "\ud800", [],
    [0], [-1], [1e9], [[[]]], {}, {"a": {}}, [None] * 50, "F32", "eager",
)  # fmt: skip
SIZES = (0, 1, 2, 3, 8, 24, 999, 70_000, 2**20, 2**24)
KEYS = ("", "x", "__metadata__", "num_labels", "id2label", "auto_map", "pruned_heads", "backbone", "<<", "\x1b\u202e",
        "attn_implementation", "trust_remote_code", "expected", "model")  # fmt: skip
NAMES = ("bert-tiny", "google-bert/bert-base-cased", "absent.module:build", "json:loads", "mine.yaml", "~nobody/x",
         "model.safetensors", "C:\\x", "https://example.com/x", "-", "a" * 300, "\u202ex\x1b[31m", "config.json/..",
         ".", "/", "/dev/null", "")  # fmt: skip
OUTPUTS = ("out", "out", "absent/out", ".", "loop", "/dev/full", "/dev/null", "o\x1b[31m\u202eut", "n" * 300, "-", "")
EXPECTED = """model: mine.yaml
architecture: BertForMaskedLM
expected:
  distinct_params: 4416698
  layers: {token: 3906816, layer.self_attention: 66048}
  ties: {cls.predictions.decoder.weight: bert.embeddings.word_embeddings.weight}
  flops:
    short: {batch: 1, seq: 8, mode: inference, matmul_flops: 70000000}
  memory:
    step: {batch: 1, seq: 8, mode: training, optimizer: adamw, peak_bytes: 90 MiB, tolerance: 5 %}
"""
ADAPTER = {
    "peft_type": "LORA", "base_model_name_or_path": "bert-tiny", "r": 8, "lora_alpha": 16, "lora_dropout": 0.1,
    "target_modules": ["query", "value"], "modules_to_save": ["classifier", "score"], "task_type": "SEQ_CLS",
    "bias": "none", "use_rslora": False, "auto_mapping": None, "rank_pattern": {}, "use_dora": False,
}  # fmt: skip
COMPRESSIONS = {"deflated": zipfile.ZIP_DEFLATED, "bzip2": zipfile.ZIP_BZIP2, "lzma": zipfile.ZIP_LZMA}
_ZIPS = ("zip", *COMPRESSIONS)
_SAFE = ("safetensors", "verified")
_YAML = ("preset", "expectations")
COUNT, FORMATS = ["count"], ("table", "json", "csv", "markdown")


@dataclass(frozen=True)
class Kind:
    """A kind of input: the file's name, its good contents, and the words of a command in front of the path."""

    name: str
    good: bytes
    command: list[str]
    formats: tuple[str, ...] = FORMATS


def kinds(folder: Path) -> dict[str, Kind]:
    """Return each kind by its name; without transformers, those that need none."""
    import torch

    import bertscope

    config = {"model_type": "bert", "architectures": ["BertForMaskedLM"], **SIZE}
    model = bertscope.build(bertscope.BertConfig(**SIZE), "BertForMaskedLM", device="cpu")  # type: ignore[arg-type]
    preset = (ROOT / "presets" / "bert-tiny.yaml").read_bytes()
    (folder / "good.yaml").write_bytes(preset)
    (folder / "shard.safetensors").write_bytes(_safetensors(model))
    zipped = _saved(model, True)
    made = {
        "preset": Kind("mine.yaml", preset, COUNT),
        "expectations": Kind("mine.bertscope.yaml", EXPECTED.replace("mine.yaml", str(folder / "good.yaml")).encode(),
                             ["check"], (*FORMATS, "github", "junit")),
        "config": Kind("config.json", json.dumps(config, indent=1).encode(), COUNT),
        "adapter": Kind("adapter_config.json", json.dumps(ADAPTER, indent=1).encode(), COUNT),
        "safetensors": Kind("model.safetensors", _safetensors(model), COUNT),
        "index": Kind("model.safetensors.index.json", _index(model), COUNT),
        "zip": Kind("pytorch_model.bin", zipped, COUNT),
        "legacy": Kind("old.bin", _saved(model, False), COUNT),
        "verified": Kind("model.safetensors", _safetensors(model), ["verify", str(folder / "good.yaml")]),
        "name": Kind("", b"", COUNT),
    }  # fmt: skip
    made |= {name: Kind("pytorch_model.bin", _compressed(zipped, how), COUNT) for name, how in COMPRESSIONS.items()}
    with contextlib.suppress(ImportError):
        import transformers  # noqa: F401

        torch.set_num_threads(1)
        for family, fields in FAMILIES.items():
            made[family] = Kind("config.json", json.dumps({"model_type": family, **fields}).encode(), COUNT)
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


def _compressed(stored: bytes, compression: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(stored)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name), zipfile.ZIP_STORED if "/data/" in name else None)
    return out.getvalue()


def damaged(good: bytes, kind: str, source: random.Random) -> bytes:
    """Return the file with something wrong, most of the time."""
    how = source.choice(("bytes", "cut", "length", "twice", "pickle"))
    if kind not in (*_ZIPS, "legacy") and source.random() < 0.6:
        return _with_value(good, kind, source)
    if how == "cut":
        return good[: source.randrange(len(good))]
    if how == "length" and kind in _SAFE:
        length = source.choice((0, 1, 2**62, 2**64 - 1, len(good), source.randrange(len(good))))
        return struct.pack("<Q", length) + good[8:]
    if how == "twice" and good[:1] == b"{":
        return good[:-1] + b", " + good[1:]
    if how == "twice" and kind in _YAML:
        lines = good.splitlines(keepends=True)
        return b"".join(lines + source.sample(lines, 2))
    if how == "pickle" and kind == "legacy":
        return good[:40] + pickle.dumps(source.choice(VALUES)) + good[40:]
    return _with_bytes(good, kind, source)


def _with_bytes(good: bytes, kind: str, source: random.Random) -> bytes:
    raw = bytearray(good)
    # The structure is a header in front, and a zip's directory at the end.
    places = [(0, min(len(raw), 12_000))] + ([(max(0, len(raw) - 4000), len(raw))] if kind in _ZIPS else [])
    for _ in range(source.randint(1, 6)):
        low, high = source.choice(places)
        at = source.randrange(low, min(high, len(raw)) + 1) if low <= len(raw) else len(raw)
        new = source.choice(
            (b"", bytes(source.choices(range(256), k=4)), bytes(source.choices(b'{}[]",:0129.eE-\n \0&*!|<', k=3)))
        )
        raw[at : at + source.choice((0, 0, 1, 4, 40))] = new
    return bytes(raw)


def _with_value(good: bytes, kind: str, source: random.Random) -> bytes:
    length = int.from_bytes(good[:8], "little") if kind in _SAFE else 0
    text, rest = (good[8 : 8 + length], good[8 + length :]) if kind in _SAFE else (good, b"")
    data = yaml.safe_load(text) if kind in _YAML else json.loads(text)
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        place, key = source.choice(_places(data))
        inner = place[key]
        if source.random() < 0.2 and isinstance(place, dict):
            key = source.choice(KEYS)
        values = SIZES if type(inner) is int and source.random() < 0.5 else VALUES  # a size is refused later, or never
        place[key] = copy.deepcopy(source.choice(values))  # a copy: the next round may damage it in its turn
    if kind in _YAML:
        return yaml.safe_dump(data, allow_unicode=True).encode("utf-8", "surrogatepass")
    raw = json.dumps(data).encode()
    return struct.pack("<Q", len(raw)) + raw + rest if kind in _SAFE else raw


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container in a value with each of its keys or numbers."""
    keys = list(value) if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    return [place for key in keys for place in ((value, key), *_places(value[key]))]


def cases(kind: str, made: Kind, seed: int, folder: Path) -> Iterator[tuple[Path | None, list[str]]]:
    """Write damaged files one after the other to the same place; yield it (None: no file) and the arguments."""
    source = random.Random(f"{seed} {kind}")
    path = folder / made.name if kind == "index" else folder / kind / (made.name or "x")
    path.parent.mkdir(exist_ok=True)
    while True:
        options = ["--format", source.choice(made.formats)] if source.random() < 0.5 else []
        if source.random() < 0.15:
            options += ["--output", source.choice(OUTPUTS)]
        if kind == "name":
            yield None, [*made.command, *options, "--", _name(source)]
        else:
            path.write_bytes(damaged(made.good, kind, source))
            yield path, [*made.command, *options, str(path)]


def _name(source: random.Random) -> str:
    text = list(source.choice(NAMES))
    for _ in range(source.randint(0, 3)):
        at = source.randint(0, len(text))
        text[at : at + source.choice((0, 1, 5))] = source.choice(("", ":", "/", "..", "\n", "\x1b", "\udcff", "é", "@"))
    return "".join(text)


@dataclass(frozen=True)
class Verdict:
    """The result of one command, and its faults."""

    code: int
    err: str
    seconds: float
    grown: int
    faults: tuple[str, ...]


class _TooLong(BaseException):
    """More time of the processor than a command may take; no `except Exception` catches it."""


def judged(arguments: list[object], folder: Path) -> Verdict:
    """Run a command in `folder` and judge it: exit code, lines, text, time, memory, files and children."""
    (folder / "loop").unlink(missing_ok=True)
    (folder / "loop").symlink_to("loop")
    files, children, before, home = _files(folder), _children(), _memory(peak=False), os.getcwd()
    os.chdir(folder)
    began = time.process_time()
    result = Result(-1, "", "")  # of a command that is ended
    try:
        with contextlib.suppress(_TooLong), _limited():
            result = run_cli(*arguments)
    finally:
        seconds, grown = time.process_time() - began, _memory(peak=True) - before
        os.chdir(home)
    new = _files(folder) - files
    reports_errors = arguments[0] == "check"  # a file that cannot be checked is a row among the others
    faults = [
        *_faults_of_text(result.code, result.out, result.err, reports_errors),
        *([f"{seconds:.1f} s of the processor"] if seconds > SECONDS or result.code < 0 else []),
        *([f"{grown >> 20} MiB of memory"] if grown > MEMORY_BYTES else []),
        *([f"a child is left: {_children() - children}"] if _children() - children else []),
        *_faults_of_files(result.code, new, arguments, reports_errors),
    ]
    for name in new:
        (folder / name).unlink()
    return Verdict(result.code, result.err, seconds, grown, tuple(faults))


def _faults_of_text(code: int, out: str, err: str, reports_errors: bool) -> Iterator[str]:
    errors = [line for line in err.splitlines() if not line.startswith("note: ")]
    if code not in (0, 1, 2):
        yield f"exit code {code}"
    if "Traceback" in out + err or "unexpected error" in out + err:
        yield "a traceback, or an error that check reports for one file"
    if code == 2 and not (errors and all(line.startswith("error: ") for line in errors)):
        yield "an error without its line"
    if code == 2 and len(errors) > 1 and not reports_errors:
        yield f"{len(errors)} lines on stderr"
    if code == 2 and out and not reports_errors:
        yield "text on stdout and an error"
    if not (out + err).replace("\n", "").isprintable():
        yield "unprintable characters"


def _faults_of_files(code: int, new: set[str], arguments: list[object], reports_errors: bool) -> Iterator[str]:
    asked = {str(word) for option, word in pairwise(arguments) if option == "--output"}
    if left := {name for name in new if name not in asked and not name.endswith(".pyc")}:
        yield f"files are left: {left}"
    if code == 2 and new & asked and not reports_errors:
        yield f"an output file in spite of an error: {new & asked}"


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def _children() -> set[str]:
    """Return the process ids of this process's children; none where the system does not list them."""
    found: set[str] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended
            found.update(path.read_text().split())
    return found


def _memory(peak: bool) -> int:
    """Return the resident bytes now, from when on the peak counts, or the peak since then."""
    status = Path("/proc/self/status")
    try:
        if not peak:
            Path("/proc/self/clear_refs").write_text("5")
        name = "VmHWM:" if peak else "VmRSS:"
        return next(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith(name))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """End a command that takes more time of the processor than it may."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _TooLong

    old = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)
