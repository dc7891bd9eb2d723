"""`[tool.bertscope]` in pyproject.toml: defaults of the command line, which options replace."""

import sys
from pathlib import Path

import pytest

import bertscope
from bertscope.commands.call import _read
from bertscope.sources.bert import preset_paths

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no reader of TOML")
TABLE = """
[project]
name = "mine"

[tool.bertscope]
gpu = "t4"
precision = "autocast-bf16"
architecture = "BertForSequenceClassification"
check = ["models.bertscope.yaml"]
"""
SMALL = ("--seq", "8", "--checkpointing", "none", "--mode", "forward")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A project; the working directory is a folder in it."""
    (tmp_path / "pyproject.toml").write_text(TABLE)
    (tmp_path / "models.bertscope.yaml").write_text("model: bert-tiny\nexpected: {distinct_params: 4385920}\n")
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    return tmp_path


def test_fit_takes_gpu_precision_and_architecture_of_the_project_and_says_so(cli, folder):
    result = cli("fit", "bert-tiny", *SMALL, "--batch", "1", "--format", "json")
    assert result.code == 0, result.err
    assert (result.json["gpu"]["name"], result.json["rows"][0]["precision"]) == ("t4", "autocast-bf16")
    assert result.json["subject"]["architecture"] == "BertForSequenceClassification"
    for sets in ("architecture BertForSequenceClassification", "gpu t4, precision autocast-bf16"):
        assert f"note: {folder / 'pyproject.toml'} sets {sets}\n" in result.err


def test_options_replace_the_defaults_of_the_project(cli, folder):
    result = cli("fit", "bert-tiny", *SMALL, "--budget", "1GiB", "--precision", "fp32", "-a", "BertForMaskedLM",
                 "--batch", "1", "--format", "json")  # fmt: skip
    assert (result.json["gpu"], result.json["rows"][0]["precision"]) == (None, "fp32")
    assert result.json["subject"]["architecture"] == "BertForMaskedLM"
    assert "note:" not in result.err


def test_a_training_file_replaces_the_precision_of_the_project_only(cli, folder):
    Path("args.json").write_text('{"output_dir": "out", "per_device_train_batch_size": 2, "bf16": false}')
    result = cli("estimate", "bert-tiny", "--from", "args.json", "--seq", "8", "--format", "json")
    assert (result.json["run"]["precision"], result.json["run"]["batch"]) == ("fp32", 2)
    assert result.json["subject"]["architecture"] == "BertForSequenceClassification"


def test_check_takes_the_files_of_the_project_unless_some_are_given(cli, folder):
    assert cli("check").out == "1 file: 1 expectation passed, 0 failed\n"
    assert cli("check", "-a", "BertForMaskedLM").code == 1
    assert cli("check", "--presets").out.startswith(f"{len(preset_paths())} files: ")
    assert not cli("check", "bert-tiny").out.startswith("1 file: 1 expectation passed")
    (folder / "models.bertscope.yaml").unlink()
    assert cli("check").code == 2
    assert cli("check", "--help").code == 0


def test_the_head_of_the_project_is_not_for_counts_and_other_models(cli, folder):
    assert cli("count", "bert-tiny", "--format", "json").json["subject"]["architecture"] == "BertModel"
    Path("net.py").write_text("from torch import nn\nclass Net(nn.Linear):\n    def __init__(self):\n"
                              "        super().__init__(2, 3)\n")  # fmt: skip
    result = cli("flops", "net.py:Net", "--input", "input=Bx2:float32", "--format", "json")
    assert result.json["rows"][0]["forward"]["matmul_flops"] == 2 * 2 * 3


def test_the_table_is_for_the_command_line_only(folder):
    assert bertscope.estimate("bert-tiny", seq=8).run.precision == "fp32"


def test_a_file_that_is_too_large_is_one_line(cli, folder):
    (folder / "pyproject.toml").write_text("[tool.bertscope]\n#" + " " * 2**20)
    result = cli("count", "bert-tiny")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "has more than 1,048,576 bytes" in result.err


def test_a_project_without_the_table_is_not_parsed(cli, folder):
    (folder / "pyproject.toml").write_text("this is no TOML")
    assert cli("count", "bert-tiny").err == ""


def test_python_3_10_says_that_it_ignores_the_table(folder, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "version_info", (3, 10, 0))
        found = _read.__wrapped__(folder / "pyproject.toml")
    assert found is None
    assert "[tool.bertscope] needs Python 3.11; it is ignored" in capsys.readouterr().err


def test_code_that_the_command_line_names_is_recorded_and_then_needs_the_permit(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(3, 4)\n")
    assert cli("check", "small.py:build", "--write", "small.bertscope.yaml").code == 0
    assert cli("check", "small.bertscope.yaml").code == 2
    assert cli("check", "small.bertscope.yaml", "--allow-code").code == 0
