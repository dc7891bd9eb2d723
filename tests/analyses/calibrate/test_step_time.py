"""The predicted time of a step, with the rates of a fake card: closed forms."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import bertscope
from bertscope.analyses.calibrate.step_time import Rates, _work, rates_of, step_work
from bertscope.analyses.memory.step import step_flops
from bertscope.gpus import find_gpu, peak_flops
from bertscope.reports.calibration import CardWork
from bertscope.settings.run_config import RunConfig
from bertscope.sources.find import load
from tests.analyses.calibrate.fakes import calibration
from tests.analyses.calibrate.test_use import home, stored

__all__ = ["home", "stored"]  # fixtures
RUN = RunConfig(batch=2, seq=16, device="cuda", optimizer_implementation="loop")
TINY = load("bert-tiny", architecture="BertForMaskedLM")


def test_the_time_of_a_step_is_flops_and_bytes_by_the_rates_or_the_start_of_its_operators():
    rates = Rates({"fp32": 10e12, "tf32": 20e12}, 2e12, calls=1e4, scale={("fp32", "none"): 1.5, ("tf32", "none"): 1,
                                                                         ("fp32", "full"): 2})  # fmt: skip
    work = CardWork(matmul_flops={"fp32": 10**13}, moved_bytes=10**12, calls=10)
    assert rates.seconds(work, "fp32") == pytest.approx(1.5 * (1 + 0.5))
    assert rates.seconds(work, "tf32") == pytest.approx(0.5 + 0.5)
    assert rates.seconds(work, "fp32", "full") == pytest.approx(2 * (1 + 0.5))
    assert rates.seconds(work, "fp32", "every-2") == pytest.approx(1.5 * (1 + 0.5))
    assert rates.seconds(replace(work, calls=10**5), "fp32") == pytest.approx(10)
    assert rates.seconds(work, "bf16") is None


def test_the_longest_step_of_a_precision_corrects_it():
    rates = rates_of(calibration())  # each step took 1 s; the longest has 16 x 512 tokens with 10**9 FLOPs each
    assert rates.scale["fp32", "none"] == pytest.approx(1 / (8.192e12 / 100e12 + 1e9 / 1e12))
    assert rates.scale["bf16", "full"] == pytest.approx(1 / (8.192e12 / 500e12 + 1e9 / 1e12))
    assert rates.calls == 100
    assert rates_of(replace(calibration(), rows=())) is None


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


def test_without_a_calibration_there_is_no_time_and_a_note_says_why(cli, home):
    words = ["bert-tiny", "--gpu", "h200", "--seq", "16", "--batch", "2"]
    more = ("--precision", "fp32", "--checkpointing", "none")
    (row,) = cli("fit", *words, *more, "--time", "--sequences", "100", "--format", "json").json["rows"]
    assert row["predicted"] is None
    assert row["epoch"]["high_seconds"] == pytest.approx(50 * row["time_range"]["high_seconds"])  # batches of 2
    timed = cli("fit", "bert-tiny", "--gpu", "b200", *words[3:], *more, "--time")  # no rates are known of a B200
    assert timed.out == cli("fit", "bert-tiny", "--gpu", "b200", *words[3:], *more).out
    assert "no time: there is no calibration of b200; 'bertscope calibrate'" in timed.err
    assert "predicted for CUDA only" in cli("estimate", "bert-tiny", "--time").err


def test_without_a_calibration_the_time_of_a_step_is_a_range_of_the_data_sheet(cli, home):
    """By hand: 67 TFLOP/s in fp32 and 4.8 TB/s, of the H200's data sheet."""
    run = {"gpu": "h200", "batch": 8, "seq": 64, "time": True, "sequences": 20, "accumulate": 2}
    variant, full = bertscope.estimate(TINY, **run, checkpointing="none,full").variants
    flops = 2 * bertscope.flops(TINY, batch=8, seq=64, mode="training").rows[0].total.matmul_flops
    bound = flops / 67e12 + 4 * 2 * variant.estimated.kept_bytes / 4.8e12
    assert vars(variant.time_range) == pytest.approx({"low_seconds": 1.2 * bound, "high_seconds": 2.5 * bound})
    assert variant.epoch.low_seconds == pytest.approx(2 * 1.2 * bound)  # 20 sequences are two steps of 16
    assert full.time_range.low_seconds > variant.time_range.low_seconds  # it recomputes
    timed = cli("estimate", "bert-tiny", "--gpu", "h200", "--time", "--sequences", "1000", "-v")
    assert re.search(
        r"reserved .* MiB, [\d.]+ to [\d.]+ ms a step \(a bound from the data sheet", timed.out.splitlines()[0]
    )
    assert "times FLOPs / peak + 4 x saved bytes / bandwidth" in timed.out
    assert cli("estimate", "bert-tiny", "--gpu", "h200", "--sequences", "1000").code == 2  # without --time
