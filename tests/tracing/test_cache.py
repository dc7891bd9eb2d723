"""Results that commands share: the same with and without the cache, and kept for the same kind of run."""

import ast
import errno
import hashlib
import json
import os
import random
import re
import subprocess
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import bertscope
from bertscope.memory import estimate
from bertscope.memory.simulator import Simulator
from bertscope.memory.trace import MemoryTrace
from bertscope.settings.parallelism import Parallelism
from bertscope.settings.run_config import CACHE_VARIABLE, RunConfig
from bertscope.tracing import cache as module
from tests.child_server import loaded
from tests.conftest import EVERY_CASE, ROOT, run_python
from tests.memory.steps import small

RUN = RunConfig(batch=2, seq=8)
IS_ROOT = os.name == "posix" and os.getuid() == 0
TIDY = module._tidy  # conftest.py replaces it for all tests
POSIX = pytest.mark.skipif(os.name != "posix", reason="owners, modes and links of POSIX")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that does not exist yet, as the cache."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def traced(monkeypatch):
    """The runs that were traced, not read."""
    runs, real = [], estimate.source_trace
    monkeypatch.setattr(estimate, "source_trace", lambda source, run: runs.append(run) or real(source, run))
    return runs


def peak_bytes(run: RunConfig = RUN, **model) -> int:
    return Simulator(small(**model)).trace(run).peak_bytes


@pytest.mark.parametrize("run", [
    RUN, replace(RUN, batch=1), replace(RUN, mode="inference"),
    replace(RUN, device="cuda", precision="autocast-fp16", checkpointing="full"),
    replace(RUN, parallelism=Parallelism(strategy="fsdp", world_size=2)),
], ids=["plain", "one sequence", "inference", "cuda", "fsdp"])  # fmt: skip
def test_an_estimate_is_the_same_from_a_file_without_a_cache_and_at_another_batch(folder, traced, run, monkeypatch):
    def report(batch: int) -> str:
        return bertscope.to_json(Simulator(small()).report([replace(run, batch=batch)]))

    first, number = report(run.batch), len(traced)
    assert (report(run.batch), len(traced)) == (first, number)
    other = report(run.batch + 3)
    assert len(traced) == number or run.batch == 1
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv(CACHE_VARIABLE, "")
    assert (report(run.batch), report(run.batch + 3)) == (first, other)
    assert len(traced) > number


@pytest.mark.parametrize("command", ["estimate bert-tiny --seq 8 --checkpointing --precision autocast-bf16",
                                     "fit bert-tiny --seq 8 --gpu t4 --precision fp32 --optimizer sgd"])  # fmt: skip
def test_the_second_command_of_a_kind_prints_the_same_and_imports_no_torch(command, folder, cli, monkeypatch):
    monkeypatch.setattr(module, "_chosen", [torch.get_num_threads()])  # whichever test imported torch, and how
    first = cli(*command.split(), "--format", "json").out
    code = (
        f"import sys; from bertscope.tracing.cache import choose_threads; choose_threads({torch.get_num_threads()});"
        f"sys.argv[1:] = {[*command.split(), '--format', 'json']}; from bertscope import cli; cli.start();"
        "sys.exit('torch' in sys.modules)"
    )
    done = run_python(code, cwd=ROOT, env=os.environ)
    assert (done.returncode, done.stdout) == (0, first), done.stderr


def test_the_second_sweep_of_the_same_kinds_prints_the_same_and_imports_no_torch(folder, cli, tmp_path, monkeypatch):
    from bertscope.analyses.sweep import pool

    monkeypatch.chdir(tmp_path)
    Path("grid.yaml").write_text("model: bert-tiny\nseq: 8\nbatch: [2, 3, 4]\nthreads: 1\ngpu: t4\n")
    cli("sweep", "grid.yaml", "-o", "one.jsonl")
    loads, real = [], pool.starting
    monkeypatch.setattr(pool, "starting", lambda load, entry: loads.append(load) or real(load, entry))
    cli("sweep", "grid.yaml", "-o", "two.jsonl")
    assert loads == [pool.KEPT_POINT.load]
    assert Path("two.jsonl").read_bytes() == Path("one.jsonl").read_bytes()


def test_a_number_of_threads_that_somebody_chose_has_its_own_file():
    """A new process knows only that torch will take its default."""
    code = (
        "from bertscope.tracing.cache import choose_threads, threads; before = threads();"
        "from bertscope.torch_access import threads_of_import, torch; now, default = threads(), threads_of_import();"
        "torch.set_num_threads(default + 1); more = threads(); choose_threads(default);"
        "print([before, now, more, threads(), default])"
    )
    done = run_python(code, cwd=ROOT, check=True)
    before, now, more, chosen, default = ast.literal_eval(done.stdout)
    assert before == now
    assert (more, chosen) == (str(default + 1), str(default))


def test_a_report_of_flops_is_the_same_from_a_file(folder):
    first = bertscope.flops("bert-tiny", batch=2, seq=8)
    assert list(folder.iterdir()) != []
    assert bertscope.flops("bert-tiny", batch=2, seq=8) == first


def whole(text: bytes) -> bytes:
    packed = zlib.compress(text)
    return hashlib.sha256(packed).hexdigest().encode() + b"\n" + packed


DAMAGES = {
    "cut": lambda found: found[:-20],
    "empty": lambda found: b"",
    "a byte": lambda found: found[:70] + b"\0" + found[71:],
    "the digest": lambda found: bytes([found[0] ^ 1]) + found[1:],
    "no digest": lambda found: found.partition(b"\n")[2],
    "depth": lambda found: whole(b"[" * 100_000),
    "another list": lambda found: whole(b"[1, 2]"),
    "a dictionary": lambda found: whole(b'{"a": 1}'),
    "no events": lambda found: whole(b"[[], [], [], [], [], 1, [], [], [], []]"),
    "unknown kinds": lambda found: whole(b"[[], [], [3], [], [0], 1, [], [], [], []]"),
    "no text": lambda found: whole(b"\xff"),
    "not packed": lambda found: hashlib.sha256(b"plain").hexdigest().encode() + b"\nplain",
}


def test_a_file_that_is_not_whole_is_computed_again(folder, traced):
    first = peak_bytes()
    (path,) = folder.iterdir()
    before, number = path.read_bytes(), len(traced)
    for times, (name, change) in enumerate(DAMAGES.items(), start=2):
        path.write_bytes(change(before))
        assert (peak_bytes(), len(traced)) == (first, times * number), name
        assert path.read_bytes() == before, name


def leaves(data, path=()):
    """The paths of all numbers, texts and empty lists in data."""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    found = [leaf for key, value in inside for leaf in leaves(value, (*path, key))]
    return found or [path]


def with_value(data, path, value):
    if not path:
        return value
    copied = dict(data) if isinstance(data, dict) else list(data)
    copied[path[0]] = with_value(copied[path[0]], path[1:], value)
    return copied


WRONG = (-1, -(2**40), 2**63, 10**30, 0.5, True, None, "", "x\x1b[2J", [], {}, [1], [[]])


def test_an_entry_with_a_value_of_another_kind_or_range_is_not_believed(folder, monkeypatch, cli):
    """Its digest is right: whoever wrote the value could write the digest."""
    source = random.Random(7)
    first = {name: cli(*command).out for name, command in KINDS_OF_ENTRIES.items()}
    for path in folder.iterdir():
        good = json.loads(module._read(path))
        content = path.read_bytes()
        places = leaves(json.loads(good) if isinstance(good, str) else good)
        for place in source.sample(places, min(len(places), 4 if EVERY_CASE else 2)):
            value = source.choice(WRONG)
            bad = with_value(json.loads(good) if isinstance(good, str) else good, place, value)
            path.write_bytes(whole(json.dumps(json.dumps(bad) if isinstance(good, str) else bad).encode()))
            for name, command in KINDS_OF_ENTRIES.items():
                result = cli(*command)
                assert result.code == 0, (place, value, result)
                assert not re.search(r"[,\n]-[0-9]", result.out), (place, value, result.out)
                assert result.out.count("\n") == first[name].count("\n")
        path.write_bytes(content)


def test_a_shape_without_a_slope_for_each_of_its_sizes_is_not_believed():
    trace = Simulator(small()).scalable_trace(RunConfig(batch=2, seq=8))
    good = json.loads(json.dumps(trace.data()))
    assert MemoryTrace.read(good).peak_bytes == trace.peak_bytes
    grows = next(number for number, kind in enumerate(good[0]) if kind[-1])
    for shape in ([], good[0][grows][3][1:], [*good[0][grows][3], 1]):
        with pytest.raises(ValueError, match="slopes"):
            MemoryTrace.read(with_value(good, (0, grows, 3), shape))


def test_a_step_that_frees_a_parameter_is_not_believed():
    """The replay of the next step would not find the block."""
    trace = Simulator(small()).scalable_trace(RunConfig(batch=2, seq=8))
    good = json.loads(json.dumps(trace.data()))
    allocated = next(place for place, number in enumerate(good[2]) if number >= 0 and ~number not in good[2])
    with pytest.raises(ValueError, match="the next step would begin with other blocks"):
        MemoryTrace.read(with_value(good, (2, allocated), -1))


KINDS_OF_ENTRIES = {
    "estimate": ("estimate", "bert-tiny", "--batch", 2, "--seq", 8, "--format", "csv"),
    "flops": ("flops", "bert-tiny", "--batch", 2, "--seq", 8, "--format", "csv"),
}


def test_a_check_reads_no_file_of_the_cache(folder, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.bertscope.yaml").write_text(
        "model: bert-tiny\nexpected:\n  memory:\n    step: {batch: 2, seq: 8, mode: training, peak_bytes: 1}\n"
    )
    before = cli("check", "own.bertscope.yaml")
    assert not folder.exists() or not list(folder.iterdir())
    monkeypatch.setattr(module, "_read", lambda path: 1 / 0)
    assert cli("check", "own.bertscope.yaml").err == before.err


def test_a_file_that_unpacks_to_more_than_a_result_is_not_unpacked(folder, traced, monkeypatch):
    peak_bytes()
    (path,) = folder.iterdir()
    monkeypatch.setattr(module, "_MOST_TEXT_BYTES", 2**20)
    number = len(traced)
    path.write_bytes(whole(b"0" * (2**20 + 1)))
    peak_bytes()
    assert len(traced) == 2 * number


def test_another_model_kind_of_run_or_version_has_its_own_file(folder, monkeypatch):
    peak_bytes()
    peak_bytes(replace(RUN, batch=3))  # of the same kind
    assert len(list(folder.iterdir())) == 1
    peak_bytes(replace(RUN, seq=9))
    peak_bytes(vocab_size=100)
    monkeypatch.setattr(module, "_versions", lambda is_own: ["another version"])
    peak_bytes()
    monkeypatch.setattr(module, "_processor", lambda: ["another processor"])
    peak_bytes()
    peak_bytes(replace(RUN, device="cuda"))
    monkeypatch.setattr(module, "_processor", lambda: ["a third one"])
    peak_bytes(replace(RUN, device="cuda"))
    assert len(list(folder.iterdir())) == 6
    for teacher in ("bert-tiny", "bert-tiny", "bert-mini"):
        Simulator(small("BertModel")).trace(replace(RUN, loss=f"distil:{teacher}"))
    assert len(list(folder.iterdir())) == 8


def test_an_input_of_which_a_large_batch_is_no_tensor_is_estimated_at_its_own(tmp_path):
    """At batch 1,021, of the growth, these images have 3.2 * 10**9 elements, more than 2**31."""
    pytest.importorskip("transformers")
    fields = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 1024,
              "patch_size": 512, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    report = bertscope.estimate(tmp_path / "config.json", batch=2, input=["pixel_values=Bx3x1024x1024:float32"])
    assert {phase.parts.inputs for phase in report.variants[0].estimated.phases} == {2 * 3 * 1024 * 1024 * 4}


def test_another_dtype_of_new_tensors_has_its_own_file(folder):
    peak_bytes()
    try:
        torch.set_default_dtype(torch.float64)
        peak_bytes()
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(list(folder.iterdir())) == 2


def test_a_model_of_own_code_is_computed_each_time(folder, tmp_path):
    (tmp_path / "own.py").write_text("import torch\n\n\ndef build():\n    return torch.nn.Linear(4, 4)\n")
    bertscope.estimate(f"{tmp_path / 'own.py'}:build", input=["input=2x4:float32"], precision="stored")
    assert not folder.exists()


def test_no_cache_reads_and_writes_nothing(folder, cli):
    result = cli("estimate", "bert-tiny", "--seq", "8", "--no-cache")
    assert (result.code, folder.exists()) == (0, False)
    assert os.environ[CACHE_VARIABLE] == str(folder)
    assert cli("--no-cache", "doctor", "--format", "json").json["no_cache"] == "BERTSCOPE_CACHE is empty"


def opened(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)


def in_an_open_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    folder.parent.chmod(0o777)


def owned(folder: Path) -> None:
    folder.mkdir()
    os.chown(folder, 12345, 12345)


def linked(folder: Path) -> None:
    (folder.parent / "theirs").mkdir()
    folder.symlink_to(folder.parent / "theirs")


@POSIX
@pytest.mark.parametrize("prepare", [
    opened, linked, in_an_open_folder, lambda folder: folder.write_text("kept"),
    pytest.param(owned, marks=pytest.mark.skipif(not IS_ROOT, reason="only root can give a folder away")),
], ids=["open to others", "a link", "in an open folder", "a file", "of another user"])  # fmt: skip
def test_a_folder_that_another_user_may_choose_is_no_cache(folder, traced, prepare, cli):
    prepare(folder)
    before = sorted(folder.parent.rglob("*"))
    first, number = peak_bytes(), len(traced)
    assert (peak_bytes(), len(traced)) == (first, 2 * number)
    assert sorted(folder.parent.rglob("*")) == before
    found = cli("doctor", "--format", "json").json
    assert (found["cache_path"], found["no_cache"] != "") == ("", True)


@POSIX
def test_a_link_in_the_folder_is_not_followed(folder, traced, tmp_path):
    peak_bytes()
    (path,) = folder.iterdir()
    path.rename(tmp_path / "theirs")
    content = (tmp_path / "theirs").read_bytes()
    path.symlink_to(tmp_path / "theirs")
    number = len(traced)
    peak_bytes()
    assert len(traced) == 2 * number
    assert (path.is_symlink(), (tmp_path / "theirs").read_bytes()) == (False, content)


@pytest.mark.parametrize("name", ["mkstemp", "replace"])
def test_a_full_disk_means_no_cache_and_no_failure(folder, monkeypatch, name):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    first = peak_bytes()
    for path in folder.iterdir():
        path.unlink()
    monkeypatch.setattr(tempfile if name == "mkstemp" else os, name, full)
    assert peak_bytes() == first
    assert list(folder.iterdir()) == []


@POSIX
def test_without_a_home_there_is_no_cache(monkeypatch):
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(
        Path, "expanduser", lambda _: (_ for _ in ()).throw(RuntimeError("Could not determine home directory."))
    )
    assert module.cache_folder() == (None, "Could not determine home directory.")
    assert peak_bytes() > 0


def test_the_cache_of_a_user_is_in_xdg_cache_home(monkeypatch, tmp_path):
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert module.cache_folder() == (tmp_path / "bertscope", "")


def test_files_that_are_old_or_too_many_are_removed_and_foreign_ones_stay(folder, monkeypatch):
    monkeypatch.setattr(module, "MOST_FILES", 3)
    monkeypatch.setattr(module, "_tidy", TIDY)
    peak_bytes()
    (oldest,) = folder.iterdir()
    foreign = [folder / "notes.txt", folder / "mine.trace", folder / "tmp123", folder / f"{'0' * 64}.trace"]
    for path in foreign:
        path.write_text("kept")
        os.utime(path, (1, 1))
    os.utime(oldest, (1, 1))
    peak_bytes(replace(RUN, seq=9))
    assert not oldest.exists()
    for seq in range(10, 16):
        peak_bytes(replace(RUN, seq=seq))
    assert all(path.read_text() == "kept" for path in foreign)
    assert len(list(module.entries(folder))) == 4  # with the foreign one that has such a name


def test_several_processes_may_write_at_once(folder, tmp_path):
    (tmp_path / "writes.py").write_text(
        "from bertscope.memory.simulator import Simulator, Simulator\n"
        "from bertscope.settings.run_config import RunConfig; from bertscope import load; s = load('bert-tiny')\n"
        "print([Simulator(s).trace(RunConfig(batch=2, seq=n)).peak_bytes for n in (3, 4, 5)])\n"
    )
    processes = [subprocess.Popen(loaded("writes"), stdout=subprocess.PIPE, text=True, cwd=tmp_path) for _ in range(2)]
    printed = {process.communicate()[0] for process in processes}
    assert len(printed) == 1
    assert len(list(folder.iterdir())) == 3
