"""The page of a step: its batches are those of `fit`, its options reach every number, also of other models."""

import html
import re
import shlex

import pytest
from torch import nn

import bertscope
from bertscope.analyses.page import model_part
from bertscope.memory import estimate
from bertscope.memory.trace import LARGE_BATCH, SMALLEST
from bertscope.settings.run_config import RunConfig
from bertscope.sources.find import load
from bertscope.tracing.repeat import RAN
from bertscope.views.page.report import estimate_command, fit_command, flops_command, page_command

OPTIONS = ("--optimizer", "sgd", "--momentum", "0.5", "--accumulate", "2", "--freeze", "embeddings")


def test_a_deep_model_is_run_with_few_layers_and_few_batches(monkeypatch):
    traces = []
    traced = estimate.source_trace

    def counted(source, run_config):
        traces.append((source.layers, run_config.batch))
        return traced(source, run_config)

    monkeypatch.setattr(estimate, "source_trace", counted)
    runs = [RunConfig(batch=2, seq=16, optimizer="sgd", checkpointing=name) for name in ("none", "full")]
    model_part(load("bert-medium"), runs, 2**30, None, 0.0)
    assert traces == 2 * [(RAN, SMALLEST), (RAN + 1, LARGE_BATCH)]  # for both strategies
    assert max(layers for layers, _ in traces) == 4


def test_the_options_of_the_step_reach_every_part_and_every_command(cli):
    given = ("report", "bert-tiny", "--batch", 2, "--seq", 16, "--gpu", "t4", "--precision", "autocast-fp16",
             "--checkpointing", "full", *OPTIONS, "--format", "json")  # fmt: skip
    result = cli(*given)
    report, (part,) = bertscope.from_json(result.out), result.json["models"]
    (model,) = report.models
    assert [(row["precision"], row["checkpointing"]) for row in part["fit"]["rows"]] == [("autocast-fp16", "full")]
    run = part["memory"]["run"]
    assert (run["precision"], run["device"], run["sdpa_kernel"]) == ("autocast-fp16", "cuda", "efficient")
    assert (run["optimizer"], run["momentum"], run["accumulate"], run["freeze"]) == ("sgd", 0.5, 2, ["embeddings"])

    def said(line: str) -> dict:
        found = cli(*shlex.split(line)[1:], "--format", "json").json
        return {key: value for key, value in found.items() if key not in ("schema", "kind")}

    assert said(estimate_command(model)) == part["memory"]
    assert said(fit_command(model, model.fit)) == part["fit"]
    flops = said(flops_command(model, 16, is_training=True))
    assert flops["rows"] == part["training"]["rows"]
    assert said(page_command(report))["models"] == [part]


@pytest.mark.parametrize("name", ["bert-tiny", "albert-base-v2"])
def test_each_quantity_on_a_page_is_what_its_own_command_gives(cli, name):
    step, limit = ("--batch", 2, "--seq", 16), ("--gpu", "t4")
    (part,) = cli("report", name, *step, *limit, "--format", "json").json["models"]
    strategies = ",".join(row["checkpointing"] for row in part["memory"]["variants"])
    fit = ("fit", name, "--seq", 16, *limit, "--precision", "fp32", "--checkpointing", strategies)
    commands = {
        "tensors": ("count", name, "--by", "parameter"), "tree": ("tree", name),
        "flops": ("flops", name, "--batch", 2, "--seq", "16,64,128,256,384,512"),
        "training": ("flops", name, *step, "--mode", "training"),
        "memory": ("estimate", name, *step, *limit, "--checkpointing", strategies),
        "fit": fit, "batch_fit": (*fit, "--batch", 2),
    }  # fmt: skip
    for key, words in commands.items():
        found = cli(*words, "--format", "json").json
        assert {key: value for key, value in found.items() if key not in ("schema", "kind")} == part[key], key


def test_a_page_of_inference_has_one_strategy(cli):
    data = cli("report", "bert-tiny", "--batch", 2, "--seq", 16, "--mode", "inference", "--format", "json").json
    assert [row["checkpointing"] for row in data["models"][0]["fit"]["rows"]] == ["none"]


@pytest.mark.parametrize("limit", [
    {"gpu": "t4", "batch": 4}, {"gpu": "t4", "batch": 4, "context": "500MiB"}, {"budget": "2GiB", "batch": 4},
    {"budget": "2GiB", "batch": 1_100, "device": "cuda"},
], ids=str)  # fmt: skip
def test_each_part_of_a_page_has_the_same_cost_of_a_step(limit):
    """With a limit that binds, the allocator frees its cache and retries, so a part without it reserves more."""
    (part,) = bertscope.report("bert-tiny", seq=16, **limit).models
    costs = {row.checkpointing: vars(row.cost) for row in part.batch_fit.rows}
    plans = [("full", row) for row in (part.plan.rows if part.plan else ()) if row.checkpointing.endswith("=none")]
    assert len(plans) == (limit["batch"] > 1_000)
    for name, row in [(row.checkpointing, row) for row in part.memory.variants] + plans:
        shared = [field for field, value in vars(row.cost).items() if value and costs[name][field]]
        assert {"peak", *(["reserved"] if part.memory.run.device == "cuda" else [])} <= {*shared}
        assert {field: costs[name][field] for field in shared} == {field: vars(row.cost)[field] for field in shared}


SIZES = ("--batch", 2, "--seq", 16)


class Tagger(nn.Module):
    """Three classes for each of 50 words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(50, 6), nn.Linear(6, 3)

    def forward(self, input_ids):
        return self.out(self.words(input_ids))


class Scorer(nn.Linear):
    """A forward whose input has no usual name."""

    def __init__(self) -> None:
        super().__init__(5, 2)

    def forward(self, features):
        return super().forward(features)


GIVEN = ("--input", "features=Bx5:float32")


def test_an_input_that_nothing_describes_is_an_option_of_the_page(cli, tmp_path):
    name = f"{__name__}:Scorer"
    refused = cli("report", name, "--no-fit", "--format", "json")
    assert "add --input features=SHAPE:DTYPE, such as features=Bx5:float32" in refused.err.splitlines()[-1]
    (page,) = cli("report", name, *SIZES[:2], *GIVEN, "--budget", "4MiB", "--format", "json").json["models"]
    memory = cli("estimate", name, *SIZES[:2], *GIVEN, "--format", "json").json
    assert page["flops"]["rows"][0]["forward"]["matmul_flops"] == 2 * 2 * 5 * 2
    assert page["memory"]["variants"] == memory["variants"]
    assert cli("report", name, *SIZES[:2], *GIVEN, "--budget", "4MiB", "-o", tmp_path / "page.html").code == 0
    text = re.sub("</?span>", "", (tmp_path / "page.html").read_text())
    for command in ("flops", "estimate", "fit"):
        (line, *_) = re.findall(f"bertscope {command} [^<]*", text)
        found = cli(*shlex.split(html.unescape(line))[1:])
        assert found.code == 0, (line, found.err)


def test_diff_of_models_that_cannot_be_run_has_no_flops(cli):
    result = cli("diff", f"{__name__}:Scorer", f"{__name__}:Tagger", "--seq", 4)
    assert result.code == 0
    assert f"no FLOPs of {__name__}:Scorer: its forward pass did not run" in result.out
    data = cli("diff", f"{__name__}:Scorer", f"{__name__}:Tagger", "--seq", 4, "--format", "json").json
    assert (data["forward_flops_a"], data["forward_flops_b"]) == (None, 2 * 4 * 6 * 3)
