"""One corpus of hostile inputs for every reader: kinds of input with a good example, and what damages each of them.

Files of settings are not damaged but filled: every key of their table with every value that its row takes.

A kind is a row: the good file or words, their form, and the commands that read them. The mutators know forms, not
kinds. `tests/fuzzing.py` judges what a command does with an input.
"""

import contextlib
import copy
import io
import json
import pickle
import random
import struct
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from bertscope.config import RULES
from bertscope.errors import BertscopeError
from bertscope.settings.rows import Row, rows
from bertscope.settings.run_config import ESTIMATED, SWEPT, RunConfig
from bertscope.sources import adapters
from tests import hostile, stored_files
from tests.analyses.why.recording import documented
from tests.conftest import DATA, OOM, ROOT, TRAINING_ARGUMENTS, data, run_cli
from tests.memory.fake_card import calibration

SIZE, FAMILIES = data("corpus/families.yaml").values()
RAN = "RAN"  # the file that code leaves when it runs
CODE = ("./evil.py:build", "evil:build")  # only the command line and --allow-code may run it
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 3, 4, 24, 999, 70_000, 2**20, 2**24, 2**31, 2**63, 2**64, 10**30,
    -(2**63), 0.5, 1e308, -1e-320, float("nan"), float("inf"), 10**4000,
    "", "x", "12", "é" * 50, "../../etc/passwd", "\x1b[2J\u202e\x9b", "9 GiB", "5 %", "\ud800", [],
    [0], [-1], [1e9], [[[]]], {}, {"a": {}}, [None] * 50, "F32", "eager", "fsdp", "training", *CODE,
)  # fmt: skip
SIZES = (0, 1, 2, 3, 8, 24, 999, 70_000, 2**20, 2**24)
KEYS = ("", "x", "__metadata__", "num_labels", "id2label", "auto_map", "pruned_heads", "backbone", "<<", "\x1b\u202e",
        "attn_implementation", "trust_remote_code", "expected", "model", "parallelism", "strategy")  # fmt: skip
NAMES = ("bert-tiny", "google-bert/bert-base-cased", "absent.module:build", "json:loads", "mine.yaml", "~nobody/x",
         "model.safetensors", "C:\\x", "https://example.com/x", "-", "a" * 300, "\u202ex\x1b[31m", "config.json/..",
         ".", "/", "/dev/null", "")  # fmt: skip
PIECES = ("", ":", "/", "..", "\n", "\x1b", "\udcff", "é", "@", "=", "x", "B", "S", ",", "0", "-1", "9" * 20, "bool",
          "1")  # fmt: skip
INPUTS = ("input_ids=BxS:int64", "input_ids=Bx3x4:int64", "input_ids=BxS:float32", "x=B:float32", "x=Bx8:float32",
          "token_type_ids=BxS:int64", "attention_mask=BxS:int64", "labels=B:int64", "x=8:int8")  # fmt: skip
OPTIONS = ("--lora=r=8,target=query+value", "--context=300MiB", "--freeze=encoder.layer.0",
           "--checkpointing=layers:0-1,every-2", "--gpu=t4", "--architecture=BertForMaskedLM", "--attention=sdpa",
           "--strategy=fsdp", "--mesh=2x2", "--param-dtype=bf16", "--padding=0.5")  # fmt: skip
OUTPUTS = ("out", "out", "absent/out", ".", "loop", "/dev/full", "/dev/null", "o\x1b[31m\u202eut", "n" * 300, "-", "")
EXPECTED, GRID = ((DATA / "corpus" / name).read_text() for name in ("expectations.yaml", "grid.yaml"))
OWN = """import os, signal, sys, time
import torch

RANKS, CALLS = "", 1

class Own(torch.nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x):
        Own.calls += 1
        if os.environ.get("RANK", "-") in RANKS and Own.calls >= CALLS:
            pass
        return self.linear(x)
"""
RANK_FAULTS = (
    *(f"os.kill(os.getpid(), signal.{name})" for name in ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGSEGV", "SIGINT")),
    "raise ValueError('\\x1b[2J\\u202e' * 99)", "raise KeyboardInterrupt", "raise SystemExit(0)", "raise MemoryError",
    "os._exit(0)", "os._exit(7)", "print('\\x1b[2J\\x9b' * 100_000, file=sys.stderr)", "time.sleep(1000)",
    "return self.linear(torch.zeros(3, 3))", "os.close(1), os.close(2)", "os.fork() or time.sleep(1000)",
    "torch.distributed.destroy_process_group()", "os.kill(os.getppid(), signal.SIGKILL)", "os.rmdir('.')",
)  # fmt: skip
COMPRESSIONS = {"deflated": zipfile.ZIP_DEFLATED, "bzip2": zipfile.ZIP_BZIP2, "lzma": zipfile.ZIP_LZMA}
FORMATS = ("table", "json", "csv", "markdown")
TINY = "small.json --batch 1 --seq 8"


def _none(given: Mapping[str, Any]) -> bytes:
    return b""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of input: a good file of a form (or words), and the commands that read it at `{}`."""

    name: str = ""  # of the file, from the working directory; empty: the input is a word
    good: bytes = b""
    form: str = "json"
    words: tuple[str, ...] = ()
    commands: tuple[str, ...] = ("count {}",)
    formats: tuple[str, ...] = FORMATS
    beside: Mapping[str, bytes] = field(default_factory=dict)  # files next to it
    rounds: int = 1  # it is one of the inputs of so many rounds
    keys: Mapping[str, list[Any]] = field(default_factory=dict)  # of a file of settings: the values of each
    write: Callable[[Mapping[str, Any]], bytes] = _none  # the file with some of them


@cache
def kinds() -> dict[str, Kind]:
    """Return each kind by its name; without transformers, those that need none."""
    import bertscope

    model = bertscope.build(bertscope.BertConfig(**SIZE), "BertForMaskedLM", device="cpu")  # type: ignore[arg-type]
    names = [name for name, _ in model.named_parameters()]
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "shard.safetensors")}
    stored, zipped = _safetensors(model), _saved(model, True)
    made = {
        "preset": Kind(name="mine.yaml", good=_beside()["good.yaml"], form="yaml",
                       commands=("count {}", "tree {}", "diff {} small.json --seq 8", "explain {}")),
        "expectations": Kind(name="mine.bertscope.yaml", good=EXPECTED.encode(), form="yaml", commands=("check {}",),
                             formats=(*FORMATS, "github", "junit")),
        "config": Kind(name="config.json", good=_beside()["small.json"],
                       commands=("count {}", "tree {}", "diff small.json {} --seq 8")),
        "page": Kind(name="config.json", good=_beside()["small.json"], rounds=4, formats=("json",),
                     commands=("report {} --no-fit --batch 1 --seq 8 --format json",)),
        "adapter": Kind(name="lora/adapter_config.json", good=_json(data("corpus/adapter_config.json")),
                        commands=("count {}", "count lora", "estimate lora --batch 1 --seq 8")),
        "lengths": Kind(name="rows.jsonl", good=b'{"length": 8}\n{"length": 4}\n', form="lines",
                        commands=("estimate small.json --batch 1 --lengths {}",)),
        "prices": Kind(name="prices.yaml", good=b"date: 2026-11-28\ncurrency: EUR\nprices: {t4: 0.3, l4: 0.7}\n",
                       form="yaml", commands=(f"estimate {TINY} --gpu t4 --sequences 9 --price {{}}",)),
        "safetensors": Kind(name="model.safetensors", good=stored, form="safetensors"),
        "index": Kind(name="model.safetensors.index.json", good=_json(index), beside={"shard.safetensors": stored}),
        "gguf": Kind(name="m.gguf", good=stored_files.gguf({"blk.0.a": ((32,), 2, 0), "b": ((2,), 0, 32)}, data=40),
                     form="binary", commands=("count {}", "tree {}", "diff good.yaml {}")),
        "onnx": Kind(name="m.onnx", good=_onnx(), form="binary", beside={"m.data": bytes(24)},
                     commands=("count {}", "diff {} m.onnx")),
        "modules": Kind(name="st/modules.json", good=_json([{"path": "", "type": "x.Transformer"}, {"path": "D"}]),
                        commands=("count st",),
                        beside={"st/model.safetensors": stored, "st/D/model.safetensors": stored}),
        "zip": Kind(name="pytorch_model.bin", good=zipped, form="zip"),
        "legacy": Kind(name="old.bin", good=_saved(model, False), form="pickle"),
        "verified": Kind(name="model.safetensors", good=stored, form="safetensors", commands=("diff good.yaml {}",)),
        "grid": Kind(name="mine.yaml", good=GRID.encode(), form="yaml",
                     commands=("sweep {} -o rows.jsonl --workers 1",)),
        "results": Kind(name="rows.jsonl", good=_rows(), form="lines", commands=("sweep grid.yaml -o {} --workers 1",)),
        "project": Kind(name="pyproject.toml", good=(DATA / "corpus" / "project.toml").read_bytes(), form="toml",
                        commands=("count small.json", f"estimate {TINY}", "check", "presets")),
        "training": Kind(name="args.json", good=_json(TRAINING_ARGUMENTS), rounds=4,
                         commands=("estimate small.json --seq 8 --from {}",
                                   "fit small.json --seq 8 --budget 9MiB --from {}")),
        "accelerate": Kind(name="accelerate.yaml", good=(DATA / "corpus" / "accelerate.yaml").read_bytes(), form="yaml",
                           commands=(f"estimate {TINY} --from {{}}",)),
        "calibration": Kind(name="bertscope/calibrations/card.json", good=calibration().to_json().encode(), rounds=4,
                            commands=(f"estimate {TINY} --gpu h200 --time", "fit small.json --seq 8 --gpu h200 --time "
                                      "--precision fp32 --checkpointing none", "read {}")),
        "report": Kind(name="report.json", good=bertscope.count("bert-tiny").to_json().encode(), commands=("read {}",)),
        "snapshot": Kind(name="snapshot.pickle", good=documented(), form="pickle", rounds=8, commands=("why {}",)),
        "log": Kind(name="oom.log", good=OOM.encode(), form="text", rounds=8, commands=("why {}",)),
        "name": Kind(words=NAMES,
                     commands=("count -- {}", "diff small.json --seq 8 -- {}", "schema -- {}", "tree -- {}")),
        "input": Kind(words=INPUTS, commands=(f"estimate {TINY} --input={{}}", f"flops {TINY} --input={{}}",
                                              "fit small.json --seq 8 --budget 9MiB --input={}",
                                              "estimate own.py:Own --batch 2 --input={}")),
        "option": Kind(words=OPTIONS, commands=(f"estimate {TINY} {{}}", f"estimate {TINY} --device cuda {{}}",
                                               f"estimate {TINY} --world-size 4 --strategy ddp {{}}")),
        "profiled": Kind(words=INPUTS, commands=(f"profile {TINY} --steps 1 --input={{}}",), rounds=8),
        "ranks": Kind(name="own.py", good=OWN.encode(), form="ranks", rounds=8, commands=(
            "profile own.py:Own --nproc 2 --strategy fsdp --input=x=Bx8:float32 --batch 2 --steps 1 --timeout 20",)),
    }  # fmt: skip
    made |= _of_settings()
    for name, how in COMPRESSIONS.items():
        made[name] = Kind(name="pytorch_model.bin", good=_compressed(zipped, how), form="zip")
    with contextlib.suppress(ImportError):
        import transformers  # noqa: F401

        for family, fields in FAMILIES.items():
            made[family] = Kind(
                name="config.json",
                good=_json({"model_type": family, **fields}),
                commands=("count {}", "count {}", "estimate {} --batch 1 --seq 8"),
            )
    return made


# ---- files of settings ----

TEXTS = (*CODE, "./evil.py", "evil", "../evil.py:build.__call__", "__import__('evil').build()", "{evil}", "$(evil)")


def values_of(own: Row) -> list[Any]:
    """Return values that a setting takes: its words and bounds, and texts that name code where it takes a text."""
    named = [f"{str(word).partition(':')[0]}:{text}" for word in own.choices for text in TEXTS]
    numbers = [
        True,
        False,
        own.low,
        own.below - 1,
        own.below / 2,
        1,
        2,
        8,
        0.5,
        1.0,
        -1,
        "1GiB",
        "1B",
        "2.1",
        "9" * 400,
    ]
    tried = [own.default, *numbers, *own.choices, *TEXTS, *named, ["embeddings", "evil:build"], "*", "2x2", "٣"]
    taken = [value for value in tried if _takes(own, value)]
    assert taken, f"give a value that {own.name} takes"
    return taken


def _takes(own: Row, value: Any) -> bool:
    try:
        own.read(value)
    except BertscopeError:
        return False
    return True


def _of_settings() -> dict[str, Kind]:
    """Return the files that give settings, each with the table of its keys."""
    run, swept, asked = ({name: values_of(own) for name, own in rows(*records).items()}
                         for records in ((RunConfig,), SWEPT, ESTIMATED))  # fmt: skip
    small = {"batch": 1, "seq": 8}
    model = {"model": [*TEXTS, "good.yaml", "small.json"], "architecture": [*TEXTS, "BertModel"], "attention": ["sdpa"],
             "add_pooling_layer": [True], "lora": [*TEXTS, "r=8,target=query"], "description": [*TEXTS]}  # fmt: skip
    step = {**small, "mode": "training", "peak_bytes": 1}
    of_peft = [0, 1, 2, 2**24, 0.5, True, "query", ["query"], {"query": 2}, [0], [[1]], *TEXTS]
    peft = dict.fromkeys((*adapters._KEYS, "task_type", "auto_mapping"), of_peft) | {adapters.TYPE: [*adapters._TYPES]}
    trainer = {key: [True, False, 1, 2, "no", "adamw_torch", "bf16", None, *TEXTS]
               for own in rows(*ESTIMATED).values() for key in own.trainer}  # fmt: skip
    hostile_texts = ["\x1b[2J\u202e", "x" * 10_000, "\u0663", "9" * 400, *TEXTS]
    tried = [0, 1, 2, 3, 2**31, 2**63, 0.5, 1e-300, 1e308, True, False, None, [], {}, {"0": [0]}, {"x": ["y"]},
             ["a"] * 9, *hostile_texts]  # fmt: skip
    of_config = {
        name: [value for value in (own.least, own.most, *own.choices, *tried) if own.accepts(value)]
        for name, own in RULES.items()
    } | {"id2label": [{"0": "x"}, {}], "model_type": ["bert"], "torch_dtype": hostile_texts, "auto_map": hostile_texts}
    preset = yaml.safe_load((ROOT / "presets" / "bert-tiny.yaml").read_text())

    def of_preset(given: Mapping[str, Any]) -> bytes:
        """Return a preset with these values in its configuration."""
        return yaml_of({"architecture": "BertForMaskedLM", "config": preset["config"] | dict(given)})

    plan = json.loads(run_cli("plan", "bert-tiny", *TINY.split()[1:], "--budget", "1GiB", "--emit", "json").out)
    estimate = f"estimate {TINY}"

    def of_plan(given: Mapping[str, Any]) -> bytes:
        """Return the plan of a run with these settings; the last is one that the plan changed."""
        data = copy.deepcopy(plan)
        parts = [part for part in (data["run"], *data["run"].values()) if isinstance(part, dict)]
        for name, value in given.items():
            next(part for part in parts if name in part)[name] = value
        data["rows"][0]["changes"] = dict(list(given.items())[-1:])
        return _json(data)

    def yaml_of(settings: Mapping[str, Any]) -> bytes:
        return _write_yaml(dict(settings))

    return {
        name: Kind(name=file, good=write({}), form="settings", keys=keys, write=write, commands=(command,), rounds=2)
        for name, file, keys, write, command in (
            ("grid of settings", "mine.yaml", swept, lambda own: yaml_of({"model": "good.yaml", **small, **own}),
             "sweep {} -o rows.jsonl --workers 1"),
            ("run of settings", "mine.bertscope.yaml", run, lambda own: yaml_of(
                {"model": "good.yaml", "expected": {"memory": {"step": step | dict(own)}}}), "check {}"),
            ("model of settings", "mine.bertscope.yaml", model, lambda own: yaml_of(
                {"model": "good.yaml", "expected": {"distinct_params": 1}} | dict(own)), "check {}"),
            ("project of settings", "pyproject.toml", asked | {"architecture": model["architecture"]},
             lambda own: _write_table({key: value for key, value in own.items() if value is not None}), estimate),
            ("plan of settings", "plan.json", run, of_plan, "estimate bert-tiny --seq 8 --plan {}"),
            ("training of settings", "args.json", trainer, lambda own: _json(
                {"output_dir": "x", "per_device_train_batch_size": 1} | dict(own)), estimate + " --from {}"),
            ("preset of settings", "mine.yaml", of_config, of_preset, "flops {} --batch 1 --seq 8"),
            ("adapter of settings", "adapter_config.json", peft, lambda own: _json(
                {"peft_type": "LORA", "target_modules": ["query"], "r": 2} | dict(own)), "count small.json --lora {}"),
        )
    }  # fmt: skip


def filled(made: Kind, home: Path, chosen: Mapping[str, Any]) -> list[str]:
    """Write the file of settings with these values; return the arguments of the command that reads it."""
    (home / made.name).write_bytes(made.write(chosen))
    return made.commands[0].replace("{}", made.name).split()


def prepared(made: Kind, home: Path) -> Path:
    """Make the working directory of a kind: what its commands name, a user's notes and code; return it."""
    (home / (made.name or "x")).parent.mkdir(parents=True, exist_ok=True)
    code = f"open({str(home / RAN)!r}, 'w').close()\n"
    for name, content in (_beside() | {"evil.py": code.encode(), **made.beside}).items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(content)
    return home


def _beside() -> dict[str, bytes]:
    return {
        "good.yaml": (ROOT / "presets" / "bert-tiny.yaml").read_bytes(),
        "small.json": _json({"model_type": "bert", "architectures": ["BertForMaskedLM"], **SIZE}),
        "grid.yaml": GRID.encode(),
        "own.py": OWN.encode(),
        "notes.txt": b"notes of the user",
    }


def _json(data: Any) -> bytes:
    return json.dumps(data, indent=1).encode()


def _safetensors(model: Any) -> bytes:
    header, place = {}, 0
    for name, tensor in model.named_parameters():
        end = place + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [place, end]}
        place = end
    return hostile.safetensors(header) + bytes(place)


def _onnx() -> bytes:
    tensors = (stored_files.onnx_tensor("a_quantized", (4,), bytes(4), 3),
               stored_files.onnx_tensor("a_scale", (), bytes(4)),
               stored_files.onnx_external("b", (2, 3), location="m.data", offset=0, length=24))  # fmt: skip
    return stored_files.onnx(*tensors)


def _saved(model: Any, as_zip: bool) -> bytes:
    import torch

    out = io.BytesIO()
    torch.save(model.state_dict(), out, _use_new_zipfile_serialization=as_zip)
    return out.getvalue()


def _compressed(stored: bytes, compression: int) -> bytes:
    return _with_records(stored, lambda name, content: content, compression)


def _with_records(
    stored: bytes, changed: Callable[[str, bytes], bytes], compression: int = zipfile.ZIP_STORED
) -> bytes:
    """Return a zip with other records, whose sizes and sums are right."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(stored)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, changed(name, old.read(name)), zipfile.ZIP_STORED if "/data/" in name else None)
    return out.getvalue()


def _rows() -> bytes:
    """Return the results file of the grid."""
    with tempfile.TemporaryDirectory() as name:
        grid, rows = Path(name, "grid.yaml"), Path(name, "rows.jsonl")
        grid.write_text(GRID)
        run_cli("sweep", grid, "-o", rows, "--workers", "1")
        return rows.read_bytes()


# ---- damage ----


def cases(kind: str, made: Kind, seed: int, home: Path) -> Iterator[list[str]]:
    """Write damaged files one after the other to the same place; yield the arguments of a command that reads it."""
    source = random.Random(f"{seed} {kind}")
    while True:
        name, *words = source.choice(made.commands).split()
        options = ["--format", source.choice(made.formats)] if source.random() < 0.5 else []
        if source.random() < 0.15 and "-o" not in words:
            options += ["--output", source.choice(OUTPUTS)]
        if made.name:
            (home / made.name).write_bytes(damaged(made, source))
        given = str(home / made.name) if made.name else _word(source, made.words)
        yield [name, *options, *(word.replace("{}", given) for word in words)]


def baits(made: Kind, home: Path) -> Iterator[list[str]]:
    """Write each file of BAIT, one after the other, and yield the arguments of a command that reads it."""
    for make in BAIT:
        (home / made.name).write_bytes(make())
        yield made.commands[0].replace("{}", str(home / made.name)).split()


def damaged(made: Kind, source: random.Random) -> bytes:
    """Return the file with something wrong, most of the time."""
    good, form = made.good, made.form
    if form == "settings":
        keys = source.sample(sorted(made.keys), source.choice((1, 1, 2, 3, 6)))
        return made.write({key: source.choice(made.keys[key]) for key in keys})
    if form == "ranks":
        ranks, calls, fault = source.choice(("0", "1", "01")), source.choice((1, 2, 4)), source.choice(RANK_FAULTS)
        return good.replace(b'"", 1', f'"{ranks}", {calls}'.encode()).replace(b"pass", fault.encode())
    if source.random() < 0.1:
        return source.choice(source.choice((BAIT, BAIT, HOSTILE)))()
    if form in FORMS and source.random() < 0.6:
        return _with_value(good, form, source)
    how = source.choice(("bytes", "cut", "length", "twice", "pickle", "record"))
    if how == "cut":
        return good[: source.randrange(len(good))]
    if how == "length" and form == "safetensors":
        length = source.choice((0, 1, 2**62, 2**64 - 1, len(good), source.randrange(len(good))))
        return struct.pack("<Q", length) + good[8:]
    if how == "twice" and good[:1] == b"{" and form == "json":
        return good[:-1] + b", " + good[1:]
    if how == "twice" and form in ("yaml", "toml", "lines"):
        lines = good.splitlines(keepends=True)
        return b"".join(lines + source.sample(lines, 2))
    if how == "pickle" and form == "pickle":
        return good[:40] + pickle.dumps(source.choice(VALUES)) + good[40:]
    if how == "record" and form == "zip":
        return _with_records(good, lambda name, old: _with_bytes(old, "", source) if name.endswith("pkl") else old)
    return _with_bytes(good, form, source)


def _with_bytes(good: bytes, form: str, source: random.Random) -> bytes:
    raw = bytearray(good)
    # The structure is a header in front, and a zip's directory at the end.
    places = [(0, min(len(raw), 12_000))] + ([(max(0, len(raw) - 4000), len(raw))] if form == "zip" else [])
    for _ in range(source.randint(1, 6)):
        low, high = source.choice(places)
        at = source.randrange(low, min(high, len(raw)) + 1) if low <= len(raw) else len(raw)
        new = source.choice(
            (b"", bytes(source.choices(range(256), k=4)), bytes(source.choices(b'{}[]",:0129.eE-\n \0&*!|<', k=3)))
        )
        raw[at : at + source.choice((0, 0, 1, 4, 40))] = new
    return bytes(raw)


def _with_value(good: bytes, form: str, source: random.Random) -> bytes:
    read, write = FORMS[form]
    data = read(good)
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        if not (places := _places(data)):
            break
        place, key = source.choice(places)
        inner = place[key]
        if source.random() < 0.2 and isinstance(place, dict):
            key = source.choice(KEYS)
        values = SIZES if type(inner) is int and source.random() < 0.5 else VALUES  # a size is refused later, or never
        other, name = source.choice(places)
        value = other[name] if source.random() < 0.2 else source.choice(values)
        place[key] = copy.deepcopy(value)  # a copy: the next round may damage it in its turn
    return write(data) + (good[8 + int.from_bytes(good[:8], "little") :] if form == "safetensors" else b"")


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container in a value with each of its keys or numbers."""
    keys = list(value) if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    return [place for key in keys for place in ((value, key), *_places(value[key]))]


def _word(source: random.Random, words: tuple[str, ...]) -> str:
    text = list(source.choice(words))
    for _ in range(source.randint(0, 3)):
        at = source.randint(0, len(text))
        text[at : at + source.choice((0, 1, 5))] = source.choice(PIECES)
    return "".join(text).replace("\0", "")


def _read_header(good: bytes) -> Any:
    return json.loads(good[8 : 8 + int.from_bytes(good[:8], "little")])


def _write_yaml(data: Any) -> bytes:
    return yaml.safe_dump(data, allow_unicode=True).encode("utf-8", "surrogatepass")


def _read_table(good: bytes) -> Any:
    pairs = (line.partition(" = ") for line in good.decode().splitlines()[1:])
    return {key: json.loads(value) for key, _, value in pairs}


def _write_table(data: Any) -> bytes:
    lines = (f"{key} = {json.dumps(value)}" for key, value in data.items())
    return "\n".join(("[tool.bertscope]", *lines, "")).encode()


def _write_lines(rows: Any) -> bytes:
    return b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows)


# Form -> how it is read and written; of a safetensors file its header.
FORMS: dict[str, tuple[Callable[[bytes], Any], Callable[[Any], bytes]]] = {
    "json": (json.loads, lambda data: json.dumps(data).encode()),
    "yaml": (yaml.safe_load, _write_yaml),
    "safetensors": (_read_header, lambda data: hostile.safetensors(data)),
    "toml": (_read_table, _write_table),
    "lines": (lambda good: [json.loads(line) for line in good.splitlines()], _write_lines),
}


class _Runs:
    """A pickle that runs code."""

    def __reduce__(self) -> Any:
        return exec, (f"open({RAN!r}, 'w').close()",)


# Files of one reader, given to all. These name code, or are notes of a user that resemble something else.
BAIT: tuple[Callable[[], bytes], ...] = (
    lambda: pickle.dumps(_Runs(), 2),
    lambda: hostile.torch_zip(pickle.dumps(_Runs(), 2)),
    lambda: hostile.torch_zip(b"\x80\x02cevil\nbuild\n)R."),
    lambda: f"!!python/object/apply:builtins.open [{RAN}, w]\n".encode(),
    lambda: b"model: [./evil.py:build, 'evil:build']\nbatch: 1\n",
    lambda: b"model: evil:build\nexpected: {distinct_params: 1}\n",
    lambda: b'{"model_type": "bert", "auto_map": {"AutoModel": "evil--evil.build"}, "_name_or_path": "evil:build"}',
    lambda: b'{"peft_type": "LORA", "base_model_name_or_path": "./evil.py:build", "target_modules": ["query"]}',
    lambda: b'{"output_dir": "x", "optim": "evil:build", "per_device_train_batch_size": "!!python/name:evil.build"}',
    lambda: b'{"key":"my secret notes","other":[1,2,3]}',
    lambda: b'{"key":"my secret notes","other":[1,2,3]}\n{',
    lambda: b"{",
    lambda: b"",
    lambda: b"\xef\xbb\xbf" + b"\0" * 99,
)
HOSTILE = (*hostile.REFUSED.values(), *hostile.ACCEPTED.values())
