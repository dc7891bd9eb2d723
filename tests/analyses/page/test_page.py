"""The page of a step: its batches are those of `fit`, at fewer runs, and its options reach every number."""

import shlex

import pytest

import bertscope
from bertscope.analyses.memory import estimate
from bertscope.analyses.memory.growth import FAR, SMALLEST
from bertscope.analyses.modules.repeat import RAN
from bertscope.analyses.page import page_report
from bertscope.errors import SelectionError
from bertscope.render.page.report import estimate_command, fit_command, flops_command, page_command
from bertscope.settings.run_config import RunConfig
from bertscope.sources.find import load

OPTIONS = ("--optimizer", "sgd", "--momentum", "0.5", "--accumulate", "2", "--freeze", "embeddings")


@pytest.mark.parametrize(
    ("device", "budget", "precision"), [("cpu", "128MiB", "fp32,autocast-bf16"), ("cuda", "2GiB", "fp32")]
)
def test_the_batches_of_the_page_are_those_of_fit(device, budget, precision):
    run = {"seq": 16, "device": device, "precision": precision, "optimizer": "sgd"}
    page = bertscope.report("bert-tiny", batch=3, budget=budget, **run)
    same = {**run, "checkpointing": "none,full"}
    fit = bertscope.fit("bert-tiny", budget, **same)
    assert page.models[0].fit.rows == fit.rows
    assert all(row.fits for row in fit.rows)
    assert page.models[0].asked.rows == bertscope.fit("bert-tiny", budget, batch=3, **same).rows


def test_a_deep_model_is_run_with_few_layers_and_few_batches(monkeypatch):
    traces = []
    traced = estimate.source_trace

    def counted(source, run_config):
        traces.append((source.layers, run_config.batch))
        return traced(source, run_config)

    monkeypatch.setattr(estimate, "source_trace", counted)
    runs = [RunConfig(batch=2, seq=16, optimizer="sgd", checkpointing=name) for name in ("none", "full")]
    page_report([load("bert-base-uncased")], [runs], 8 * 2**30)
    assert traces == 2 * [(RAN, SMALLEST), (RAN + 1, FAR)]  # for both strategies
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
    flops = said(flops_command(model, "--seq 16", is_training=True))
    assert flops["rows"] == part["training"]["rows"]
    assert said(page_command(report))["models"] == [part]


def test_a_page_has_one_limit_and_a_mode_of_inference_one_strategy(cli):
    result = cli("report", "bert-tiny", "--gpu", "t4", "--budget", "1GiB", "--format", "json")
    assert (result.code, "give either --gpu or --budget" in result.err) == (2, True)
    with pytest.raises(SelectionError, match="no GPU is known"):
        bertscope.report("bert-tiny", gpu="t5")
    data = cli("report", "bert-tiny", "--batch", 2, "--seq", 16, "--mode", "inference", "--format", "json").json
    assert [row["checkpointing"] for row in data["models"][0]["fit"]["rows"]] == ["none"]
