"""The predicted time of a step, with the rates of a fake card: closed forms."""

from __future__ import annotations

import csv
import re
from dataclasses import replace

import pytest

import bertscope
from bertscope.analyses.memory.step import step_flops
from bertscope.analyses.memory.step_time import Rates, _work, rates_of, step_work
from bertscope.gpus import find_gpu, peak_flops
from bertscope.reports.calibration import CardWork
from bertscope.settings.run_config import RunConfig
from bertscope.sources.find import load
from tests.analyses.memory.fake_card import calibration
from tests.analyses.memory.test_calibration import home, stored

__all__ = ["home", "stored"]  # fixtures
RUN = RunConfig(batch=2, seq=16, device="cuda", optimizer_implementation="loop")
TINY = load("bert-tiny", architecture="BertForMaskedLM")


def test_the_time_of_a_step_is_flops_and_bytes_by_the_rates_or_the_start_of_its_operators():
    scale = {("fp32", "none"): 1.5, ("bf16", "none"): 1, ("fp32", "full"): 2}
    rates = Rates({"fp32": 10e12}, 2e12, calls=1e4, scale=scale)
    work = CardWork(matmul_flops={"fp32": 10**13}, moved_bytes=10**12, calls=10)
    assert rates.seconds(work, "fp32") == pytest.approx(1.5 * (1 + 0.5))
    assert rates.seconds(work, "bf16") == pytest.approx(1 + 0.5)  # its products are in fp32
    assert rates.seconds(work, "fp32", "full") == pytest.approx(2 * (1 + 0.5))
    assert rates.seconds(work, "fp32", "every-2") == pytest.approx(1.5 * (1 + 0.5))
    assert rates.seconds(replace(work, calls=10**5), "fp32") == pytest.approx(10)
    assert rates.seconds(work, "fp16") is None
    assert rates.seconds(replace(work, matmul_flops={"bf16": 10**13}), "bf16") is None


def test_the_longest_step_of_a_precision_corrects_it():
    rates = rates_of(calibration())  # each step took 1 s; the longest has 16 x 512 tokens with 10**9 FLOPs each
    assert rates.scale["fp32", "none"] == pytest.approx(1 / (8.192e12 / 100e12 + 1e9 / 1e12))
    assert rates.scale["bf16", "full"] == pytest.approx(1 / (8.192e12 / 500e12 + 1e9 / 1e12))
    assert rates.calls == 100
    assert rates_of(replace(calibration(), rates={})) is None


def test_an_optimizer_moves_the_bytes_of_its_formula():
    params = sum(param.numel() for param in TINY.build().parameters())
    without = _work(TINY, replace(RUN, optimizer="none"))
    sgd = _work(TINY, replace(RUN, optimizer="sgd"))
    assert sgd.moved_bytes - without.moved_bytes == 3 * 4 * params  # reads a parameter and its gradient, writes one
    assert sgd.matmul_flops == without.matmul_flops == {"fp32": step_flops(TINY, RUN)}
    foreach = _work(TINY, replace(RUN, optimizer="sgd", optimizer_implementation="foreach"))
    assert foreach.moved_bytes == sgd.moved_bytes
    assert foreach.calls < sgd.calls


def test_equal_layers_are_repeated_and_recomputation_moves_bytes():
    source = TINY.with_layers(6)
    run = replace(RUN, precision="autocast-bf16", checkpointing="full", optimizer="none")
    full = step_work(source, run)
    assert full == _work(source, run)
    plain = step_work(source, replace(run, checkpointing="none"))
    assert full.moved_bytes > plain.moved_bytes
    selective = step_work(source, replace(run, checkpointing="selective"))
    assert selective.matmul_flops == plain.matmul_flops
    assert selective.moved_bytes > plain.moved_bytes


def test_a_peak_is_that_of_the_data_sheet_and_of_the_precision():
    assert peak_flops(find_gpu("h200"), "bf16") == (989.5e12, "H200 data sheet (SXM), without sparsity")
    assert peak_flops(find_gpu("h200"), "fp32")[0] == 67e12
    assert peak_flops(find_gpu("v100-16gb"), "bf16") is None  # no tensor core has it
    assert peak_flops(find_gpu("b200"), "bf16") is None  # no source


def test_estimate_and_fit_give_times_with_a_calibration(cli, stored):
    words = [
        "bert-tiny",
        "-a",
        "BertForMaskedLM",
        "--gpu",
        "h200",
        "--seq",
        "16",
        "--batch",
        "2",
        "--time",
        "--format",
        "json",
    ]
    (variant,) = cli("estimate", *words, "--precision", "autocast-bf16").json["variants"]
    found = variant["predicted"]
    run = replace(RUN, precision="autocast-bf16", optimizer_implementation="default")
    work, flops = step_work(TINY, run), step_flops(TINY, run)
    assert found["seconds"] == pytest.approx(work.calls / 100)  # this card starts 100 operators a second
    assert found["tokens_per_second"] == pytest.approx(32 / found["seconds"])
    assert found["mfu"] == pytest.approx(flops / found["seconds"] / 989.5e12)
    (row,) = cli("fit", *words, "--precision", "autocast-bf16", "--checkpointing", "none").json["rows"]
    assert row["predicted"] == found
    shown = cli("estimate", *words[:-2], "--precision", "autocast-bf16", "-v").out
    assert "step time (predicted)" in shown
    assert "MFU of 989.5 TFLOP/s" in shown
    assert "H200 data sheet (SXM)" in shown


NO_TIME = [
    ("bert-tiny", "--gpu", "h200", "--precision", "fp32"),  # a step below 25 ms
    ("bert-tiny", "--gpu", "b200", "--precision", "fp32"),  # no rates are known of a B200
    ("bert-base-uncased", "--gpu", "t4", "--mode", "inference", "--precision", "fp32"),
]


@pytest.mark.parametrize("words", NO_TIME, ids=" ".join)
def test_without_a_calibration_there_is_no_time_and_a_note_says_why(cli, home, words):
    words = ["fit", *words, "--seq", "16", "--batch", "2", "--checkpointing", "none"]
    words = words[:-2] if "inference" in words else words
    timed = cli(*words, "--time")
    assert timed.out == cli(*words).out
    assert f"no time: there is no calibration of {words[3]}; 'bertscope " in timed.err
    assert "a published peak, for steps of 25 ms and more" in timed.err


def test_a_time_is_predicted_for_cuda_only(cli):
    assert "predicted for CUDA only" in cli("estimate", "bert-tiny", "--time").err


def test_without_a_calibration_the_time_of_a_step_is_a_range_of_the_data_sheet(cli, home):
    """By hand: 8.1 TFLOP/s in fp32 and 320 GB/s, of the T4's product brief."""
    run = {"batch": 8, "seq": 64, "accumulate": 2}
    times = {"gpu": "t4", "time": True, "sequences": 20}
    variant, full = bertscope.estimate("bert-base-uncased", **run, **times, checkpointing="none,full").variants
    flops = 2 * bertscope.flops("bert-base-uncased", batch=8, seq=64, mode="training").rows[0].total.matmul_flops
    bound = flops / 8.1e12 + 4 * 2 * variant.estimated.kept_bytes / 320e9
    assert vars(variant.time_range) == pytest.approx({"low_seconds": 1.2 * bound, "high_seconds": 2.5 * bound})
    assert variant.epoch.low_seconds == pytest.approx(2 * 1.2 * bound)  # 20 sequences are two steps of 16
    assert full.time_range.low_seconds > variant.time_range.low_seconds  # it recomputes
    options = ("--gpu", "t4", "--time", "--batch", "16", "--seq", "64")
    timed = cli("estimate", "bert-base-uncased", *options, "-v")
    assert re.match(r".*, [\d.]+ to [\d.]+ ms a step \(from the data sheet", timed.out)
    assert "times FLOPs / peak + 4 x saved bytes / bandwidth" in timed.out
    (row,) = cli("fit", "bert-base-uncased", *options, "--sequences", "100", "--precision", "fp32", "--checkpointing",
                 "none", "--format", "json").json["rows"]  # fmt: skip
    assert row["predicted"] is None
    assert row["epoch"]["high_seconds"] == pytest.approx(7 * row["time_range"]["high_seconds"])  # batches of 16
    several = cli("estimate", "bert-base-uncased", "bert-base-cased", *options, "--format", "csv").out.splitlines()
    assert "time_range_low_seconds,time_range_high_seconds" in several[0]
    assert cli("estimate", "bert-tiny", "--gpu", "t4", "--sequences", "1000").code == 2  # without --time


def test_plan_shows_the_time_of_each_plan_on_a_calibrated_card_without_being_asked(cli, stored):
    words = ("bert-tiny", "--batch", "64", "--seq", "64", "--precision", "autocast-bf16")
    report = cli("plan", *words, "--gpu", "h200", "--format", "json").json
    found = cli("estimate", *words, "--gpu", "h200", "--time", "--format", "json").json["variants"][0]["predicted"]
    assert report["rows"][0]["predicted"] == found
    assert cli("plan", *words, "--gpu", "t4", "--format", "json").json["rows"][0]["predicted"] is None
    assert "there is no calibration of t4" in cli("plan", *words, "--gpu", "t4", "--time").err  # below 25 ms


def test_on_a_calibrated_card_the_order_of_plans_is_that_of_their_times(stored):
    """This card starts 100 operators a second: autocast needs more operators, and fewer FLOPs again than a plan."""
    context = f"{find_gpu('h200').memory_bytes - 202 * 2**20}B"
    run = {"gpu": "h200", "batch": 64, "seq": 64, "precision": "fp32", "context": context, "may_change": "precision"}
    timed, by_flops = (bertscope.plan("bert-tiny", **run, calibration=used) for used in (True, False))
    assert (timed.objective, by_flops.objective) == ("time", "FLOPs again")
    seconds = [row.predicted.seconds for row in timed.rows]
    assert seconds == sorted(seconds)
    assert timed.rows[0].changes == {}
    assert by_flops.rows[0].changes == {"precision": "autocast-bf16"}
    assert timed.rows[0].flops_again > by_flops.rows[0].flops_again


def test_the_work_of_a_plan_has_the_products_that_it_computes_again(home):
    """Each row: the products of a step without recomputation and those that the plan says."""
    report = bertscope.plan("bert-tiny", "120MiB", batch=64, seq=128, device="cuda", precision="fp32")
    run = report.run.changed(checkpointing="none")
    plain = step_work(TINY, run).matmul_flops
    assert any(row.flops_again for row in report.rows)
    for row in report.rows:
        work = step_work(TINY, run.changed(checkpointing=row.checkpointing))
        assert work.matmul_flops == {"fp32": plain["fp32"] + row.flops_again}


def test_plan_has_the_range_of_the_data_sheet_on_request(cli, home):
    words = ("bert-tiny", "--gpu", "t4", "--batch", "2048", "--seq", "512", "--precision", "autocast-fp16")
    first, *_, last = csv.DictReader(cli("plan", *words, "--time", "--format", "csv").out.splitlines())
    assert 0 < float(first["time_range_low_seconds"]) < float(last["time_range_low_seconds"])
