"""`doctor`: what is there and what is missing, with any torch and with none."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import bertscope
from bertscope.analyses import doctor
from bertscope.analyses.doctor import EXTRAS, NEEDED, tell
from bertscope.sources.bert import preset_dir, preset_paths
from tests.conftest import ROOT

ASK = doctor._ask  # which a fixture replaces by one answer for all tests


def test_it_tells_versions_devices_extras_and_presets(cli):
    result = cli("doctor", "--format", "json")
    data = result.json
    assert (result.code, data["problems"]) == (0, [])
    assert data["torch_version"] == torch.__version__
    assert data["bertscope_version"] == bertscope.__version__
    assert data["python_version"] == ".".join(map(str, sys.version_info[:3]))
    assert (data["presets"], data["preset_path"]) == (len(preset_paths()), str(preset_dir()))
    assert 1 <= data["devices"][0]["threads"] <= (os.cpu_count() or 1)  # of a fresh process: tests set their own
    assert len(data["devices"]) == 1 + torch.cuda.device_count()
    assert data["devices"][0]["memory_bytes"] > 2**28
    assert {row["name"]: row["version"] for row in data["packages"]}["torch"] == torch.__version__


def test_its_tables_of_packages_are_those_of_the_project():
    text = (ROOT / "pyproject.toml").read_text()
    needed = re.search(r"\ndependencies = \[(.*)\]", text)[1]
    assert set(re.findall(r'"([\w.-]+)', needed)) == set(NEEDED)
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = {
        name: tuple(re.findall(r'"([\w.-]+)', packages))
        for name, packages in re.findall(r"^(\w+) = \[(.*?)\]$", section, re.MULTILINE | re.DOTALL)
        if name not in ("test", "dev", "docs", "all")  # those of developers
    }
    (everything,) = re.findall(r'^all = \["bertscope\[(.*)\]"\]$', section, re.MULTILINE)
    assert set(everything.split(",")) == set(EXTRAS) - {"dask", "mcp"}  # who needs them has a cluster with them
    assert extras == {name: packages for name, (packages, _) in EXTRAS.items()}


def test_a_missing_extra_has_the_command_that_installs_it(cli, monkeypatch):
    from importlib import metadata

    version = metadata.version

    def lacking(name: str) -> str:
        if name in ("transformers", "rich"):
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", lacking)
    rows = {row["name"]: row for row in cli("doctor", "--format", "json").json["packages"]}
    assert (rows["transformers"]["version"], rows["transformers"]["remedy"]) == (
        None, "pip install 'bertscope[transformers]'",
    )  # fmt: skip
    assert rows["rich"]["remedy"] == "pip install rich"
    assert "missing" in cli("doctor").out
    assert "to install" in cli("doctor", "--format", "markdown").out


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os.abort()", "it ended with -6"), ("raise SystemExit(3)", "it ended with 3"),
        ("__version__ = '9'; import sys; sys.stdout.write('hello'); 1 / 0", "ZeroDivisionError"),
    ],
)  # fmt: skip
def test_the_end_of_a_child_that_loads_torch_is_a_problem(monkeypatch, code, words):
    monkeypatch.setattr(doctor, "child_command", lambda entry: [sys.executable, "-c", code])
    answer, problem = ASK()
    assert answer == {}
    assert problem.startswith("torch does not load: ")
    assert words in problem


def test_without_torch_the_command_line_says_so_and_presets_are_listed(tmp_path):
    (tmp_path / "torch.py").write_text("raise ValueError('unknown log setting\\nvalid settings:\\n  all')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    for words in ("doctor", "doctor --format markdown", "presets"):
        done = subprocess.run([sys.executable, "-m", "bertscope", *words.split()], env=environment,
                              capture_output=True, text=True, check=False, timeout=120)  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
        assert words == "presets" or "torch does not load: ValueError: unknown log setting" in done.stdout


def test_cards_are_listed_and_a_driver_that_fails_is_a_problem(monkeypatch, capsys):
    card = SimpleNamespace(name="Some Gpu", major=9, minor=0, total_memory=2**37)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: card)
    tell()
    (found,) = json.loads(capsys.readouterr().out)["gpus"]
    assert found == {"name": "cuda:0", "description": "Some Gpu, compute capability 9.0", "memory_bytes": 2**37}

    def fail() -> int:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(torch.cuda, "device_count", fail)
    tell()
    assert json.loads(capsys.readouterr().out)["problems"] == ["CUDA does not answer: driver too old"]
