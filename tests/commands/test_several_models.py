"""Several models, or several GPUs, in one call: the rows are those of single calls."""

import csv
import io
import json
import re

import pytest

import bertscope
from bertscope.units import count_text

# Published by google-research/bert: 4.4M and 11.3M.
MODELS = {"bert-tiny": 4_385_920, "bert-mini": 11_170_560}


def records(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.fixture
def own_model(tmp_path, monkeypatch) -> str:
    """A model in the user's own code: 3 x 5 weights and 5 biases."""
    (tmp_path / "own_of_several.py").write_text(
        "from torch import nn\n\ndef build():\n    return nn.Sequential(nn.Linear(3, 5))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_of_several:build"


def test_count_of_several_models_is_one_row_for_each(cli, own_model):
    rows = records(cli("count", *MODELS, own_model, "--format", "csv").out)
    assert [row["model"] for row in rows] == [*MODELS, own_model]
    assert [row["class"] for row in rows] == ["BertModel", "BertModel", "Sequential"]
    assert [int(row["distinct_params"]) for row in rows] == [*MODELS.values(), 20]
    assert [int(row["param_bytes"]) for row in rows] == [4 * params for params in (*MODELS.values(), 20)]


def test_by_group_the_models_are_columns_whose_groups_add_up(cli):
    result = cli("count", *MODELS, "--by", "group", "--format", "markdown")
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in result.out.splitlines() if "|" in line]
    head, _, *rows = table
    assert head == ["group", *MODELS]
    for place, params in enumerate(MODELS.values(), 1):
        column = {row[0]: int(row[place].replace(",", "")) for row in rows}
        assert column.pop("sum over layers") == column.pop("unique parameters") == params == sum(column.values())


def test_a_group_that_a_model_lacks_is_empty_there(cli, own_model):
    out = cli("count", "bert-tiny", own_model, "--by", "group").out
    (line,) = (line for line in out.splitlines() if line.startswith(" embeddings"))
    assert line.split()[1:] == ["3,972,864", "--"]  # (30,522 + 512 + 2) x 128, and a LayerNorm of 2 x 128


@pytest.mark.parametrize("command", ["count", "count --by group", "flops --seq 8,16", "estimate --batch 1 --seq 8"])
def test_the_json_of_several_models_contains_the_reports_of_single_calls(cli, command):
    text = cli(*command.split(), *MODELS, "--format", "json").out
    data = json.loads(text)
    singles = [cli(*command.split(), name, "--format", "json").json for name in MODELS]
    assert (data["kind"], data["of"]) == ("comparison", singles[0]["kind"])
    assert data["reports"] == [
        {key: value for key, value in single.items() if key not in ("schema", "kind")} for single in singles
    ]
    assert [report.kind for report in bertscope.from_json(text).reports] == [data["of"]] * len(MODELS)


# Several GPUs.

TINY = (
    "fit", "bert-tiny", "--seq", "64", "--checkpointing", "none,full", "--precision", "fp32", "--optimizer", "sgd",
)  # fmt: skip


def test_fit_on_several_gpus_has_the_rows_of_each(cli):
    rows = records(cli(*TINY, "--gpu", "t4,a10", "--format", "csv").out)
    for name in ("t4", "a10"):
        single = cli(*TINY, "--gpu", name, "--format", "csv")
        own = [{"gpu": name} | row for row in records(single.out)]
        assert own == [row for row in rows if row["gpu"] == name]


def test_fit_on_several_gpus_answers_for_each_gpu_first(cli):
    result = cli(*TINY, "--gpu", "t4,a10", "-v")
    rows = records(cli(*TINY, "--gpu", "t4,a10", "--format", "csv").out)
    answers = [line.split() for line in result.out.splitlines() if " yes " in line]
    most = {name: max(int(row["batch"]) for row in rows if row["gpu"] == name) for name in ("t4", "a10")}
    assert [words[0] for words in answers] == ["t4", "a10"]
    assert all(count_text(most[words[0]]) in words for words in answers)
    assert result.out.count("1 MiB = 2**20 B") == 1


def test_fit_of_a_batch_on_several_gpus_is_fine_if_it_fits_on_one(cli):
    plain = [word.removesuffix(",full") for word in TINY]
    few = cli(*plain, "--batch", "20000", "--gpu", "t4,h200")
    lines = [line for line in few.out.splitlines() if re.match(r" (t4|h200) +(yes|no)\b", line)]
    assert [line.split()[1].strip(",") for line in lines] == ["no", "yes"]
    assert few.code == 0
    assert cli(*plain, "--batch", "20000", "--gpu", "t4,t4").code == 1


def test_every_model_is_found_before_the_work_for_the_first_begins(cli, monkeypatch):
    monkeypatch.setattr("bertscope.memory.simulator.Simulator.report", None)
    result = cli("estimate", "bert-tiny", "bert-tinny")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "'bert-tinny'; did you mean 'bert-tiny'" in result.err
