"""Results that commands share: a file of the cache is used only if it is whole and decides the same result."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

import bertscope
from bertscope.analyses import saved as module
from bertscope.analyses.memory import estimate
from bertscope.analyses.memory.events import MemoryTrace
from bertscope.errors import SourceError
from bertscope.settings.parallelism import Parallelism
from bertscope.settings.run_config import RunConfig

RUN = RunConfig(batch=2, seq=8)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that does not exist yet, as the cache."""
    monkeypatch.setenv(module.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def traced(monkeypatch):
    """The runs that were traced, not read."""
    runs, real = [], estimate._traced
    monkeypatch.setattr(estimate, "_traced", lambda source, run: runs.append(run) or real(source, run))
    return runs


def trace(run: RunConfig = RUN, model: str = "bert-tiny") -> MemoryTrace:
    return estimate.source_trace(bertscope.load(model), run)


@pytest.mark.parametrize("run", [
    RUN, replace(RUN, mode="inference"), replace(RUN, device="cuda", precision="autocast-fp16"),
    replace(RUN, parallelism=Parallelism(strategy="fsdp", world_size=2)),
])  # fmt: skip
def test_a_trace_is_the_same_from_a_file(folder, traced, run):
    first = trace(run)
    assert (trace(run), len(traced)) == (first, 1)
    assert MemoryTrace.from_data(first.to_data()) == first
    assert (folder.stat().st_mode & 0o777, len(list(folder.iterdir()))) == (0o700, 1)


def test_a_report_is_the_same_from_a_file(folder):
    first = bertscope.flops("bert-tiny", batch=2, seq=8)
    assert list(folder.iterdir()) != []
    assert bertscope.flops("bert-tiny", batch=2, seq=8) == first


@pytest.mark.parametrize("change", [
    lambda text: text[:-20], lambda text: "", lambda text: text.replace("forward", "backward", 1),
    lambda text: "0" + text[1:], lambda text: text.partition("\n")[2], lambda text: "[" * 100_000,
])  # fmt: skip
def test_a_file_that_is_not_whole_is_computed_again(folder, traced, change):
    first = trace()
    (path,) = folder.iterdir()
    whole = path.read_text()
    path.write_text(change(whole))
    assert (trace(), len(traced)) == (first, 2)
    assert path.read_text() == whole


def test_another_model_run_or_version_has_its_own_file(folder, traced, monkeypatch):
    trace()
    trace(replace(RUN, batch=3))
    trace(model="bert-mini")
    monkeypatch.setattr(module, "_surroundings", lambda: ["another version"])
    trace()
    assert len(traced) == len(list(folder.iterdir())) == 4


def test_a_model_of_own_code_is_computed_each_time(folder, tmp_path):
    (tmp_path / "own.py").write_text("import torch\n\n\ndef build():\n    return torch.nn.Linear(4, 4)\n")
    bertscope.estimate(f"{tmp_path / 'own.py'}:build", input=["input=2x4:float32"], precision="stored")
    assert not folder.exists()


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_a_folder_that_others_may_write_into_is_refused(folder, cli):
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    result = cli("estimate", "bert-tiny", "--batch", "1", "--seq", "8")
    assert (result.code, result.err.startswith("error: BERTSCOPE_CACHE: others may write into")) == (2, True)
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root can make a folder of another user")
def test_a_folder_of_another_user_is_refused(folder):
    folder.mkdir(mode=0o755)
    os.chown(folder, 12345, 12345)
    with pytest.raises(SourceError, match="others may write into"):
        trace()


def test_a_cache_that_is_a_file_is_an_error_of_one_line(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("kept")
    monkeypatch.setenv(module.VARIABLE, str(tmp_path / "file"))
    with pytest.raises(SourceError, match=r"BERTSCOPE_CACHE=.*file: File exists"):
        trace()
    assert Path(tmp_path / "file").read_text() == "kept"
