"""Calibrations: their use, the files refused, what `profile --save` measures on a fake card, and predicted times."""

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

import bertscope
import bertscope.calibrations
from bertscope.calibrations import (
    Calibration,
    calibration_here,
    calibration_of,
    calibrations,
    read_calibration,
    user_folder,
)
from bertscope.errors import BertscopeError, BertscopeWarning, SourceError
from bertscope.gpus import find_device, find_gpu, peak_flops
from bertscope.measure import profile
from bertscope.measure import profile_worker as measuring
from bertscope.measure.profile_job import Job, this_gpu
from bertscope.memory.step_time import Rates, _work, rates_of, step_work
from bertscope.reports.tool import COPY, CardWork
from bertscope.settings.run_config import RunConfig
from bertscope.sources.find import load
from bertscope.torch_access import torch
from bertscope.tracing.flops import step_flops
from tests.child_server import ForkedChild
from tests.memory.fake_card import ALLOCATED, CONTEXT, H200, MIB, RESERVED, calibration, calls_of_cuda

OF_FIT = ("fit", "bert-tiny", "--gpu", "h200", "--seq", "64", "--batch", "2")
OF_FIT += ("--precision", "fp32", "--checkpointing", "none")


@pytest.fixture
def home(monkeypatch, tmp_path):
    for name in ("XDG_DATA_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path))
    return tmp_path


@pytest.fixture
def stored(home):
    return in_user_folder(calibration())


def in_user_folder(report):
    path = user_folder() / "card.json"
    path.parent.mkdir(parents=True)
    path.write_text(report.to_json())
    return path


@pytest.mark.parametrize(
    ("name", "mib", "gpu"),
    [
        ("NVIDIA H200", 143771, "h200"),
        ("NVIDIA A100-SXM4-80GB", 81038, "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 40338, "a100-40gb"),
        ("Tesla T4", 14909, "t4"),
        ("Tesla P100-PCIE-16GB", 16281, "p100-16gb"),
        ("NVIDIA GeForce RTX 3080", 10014, "rtx-3080-10gb"),
        ("NVIDIA GeForce RTX 3080 Ti", 10014, None),
        ("NVIDIA H100 PCIe", 81559, None),  # its rates are other ones
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", 9856, None),
        ("NVIDIA GeForce GTX 1080 Ti", 11171, "gtx-1080-ti"),
    ],
)
def test_the_name_that_torch_gives_is_found_in_the_table(name, mib, gpu):
    found = find_device(name, mib * MIB)
    assert (found and found.name) == gpu


def test_fit_uses_the_measured_memory_and_context(cli, stored):
    cost = cli(*OF_FIT, "--format", "json").json["rows"][0]["cost"]
    assert cost["context"] == {"low_bytes": 504 * MIB, "high_bytes": 532 * MIB}
    assert cost["workspace_bytes"] == (64 + 1) * MIB  # cuBLAS's of Hopper, and cuBLASLt's
    assert cost["limit_bytes"] == H200.memory_bytes
    assert "calibrated on this machine, 2026-11-22 (driver 580.1, torch 2.11.0)" in cli(*OF_FIT, "-v").out
    ignored = cli(*OF_FIT, "--no-calibration", "--format", "json").json
    assert ignored["rows"][0]["cost"]["context"]["low_bytes"] != 504 * MIB
    assert not ignored["gpu"]["calibration"]
    inference = cli(*OF_FIT, "--mode", "inference", "--format", "json").json
    assert inference["rows"][0]["cost"]["workspace_bytes"] == (32 + 1) * MIB


def test_estimate_on_cuda_finds_the_card_of_this_machine(cli, stored, monkeypatch):
    here = [None, (H200.gpu, H200.memory_bytes), ("NVIDIA L4", 2**34)]
    notes = []
    for card in here:
        monkeypatch.setattr("bertscope.measure.profile_job.this_gpu", lambda card=card: card)
        notes.append(cli("estimate", "bert-tiny", "--device", "cuda", "-v").out)
    assert ["calibrated on this machine" in note for note in notes] == [False, True, False]


def test_a_budget_is_the_memory_of_a_calibrated_card_that_is_not_named(cli, stored, monkeypatch):
    monkeypatch.setattr("bertscope.measure.profile_job.this_gpu", lambda: (H200.gpu, H200.memory_bytes))
    step = ("bert-tiny", "--device", "cuda", "--budget", "2GiB")
    found = cli("fit", *step, "--seq", "8", "--checkpointing", "none", "--format", "json").json
    assert found["budget_bytes"] == 2**31
    assert found["rows"][0]["cost"]["gpu_bytes"] <= 2**31
    assert cli("plan", *step, "--batch", "8", "--format", "json").json["budget_bytes"] == 2**31


def test_one_that_the_project_ships_is_named_by_its_card_and_date(home, tmp_path, monkeypatch):
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / "h200.json").write_text(calibration().to_json())
    monkeypatch.setattr(bertscope.calibrations, "SHIPPED", shipped)
    found = calibration_of(find_gpu("h200"))
    assert found.text == "calibration of NVIDIA H200, 2026-11-22 (driver 580.1, torch 2.11.0)"
    in_user_folder(calibration(replace(H200, date="2027-02-03")))  # that of the user comes first
    assert calibration_of(find_gpu("h200")).text.startswith("calibrated on this machine, 2027-02-03")
    assert calibration_of(find_gpu("t4")) is None


def test_a_card_that_is_not_in_the_table_has_what_was_measured(home):
    other = calibration(replace(H200, gpu="NVIDIA Future 9", memory_bytes=2**34))
    in_user_folder(other)
    found = calibration_here("NVIDIA Future 9", 2**34)
    card = bertscope.calibrations.gpu_of(found)
    assert (card.name, card.memory_bytes, card.context_high_bytes) == ("nvidia-future-9", 2**34, 532 * MIB)
    assert calibration_here("NVIDIA Future 9", 2**35) is None
    assert isinstance(found, Calibration)


def test_doctor_names_the_calibrated_cards_and_their_folder(cli, stored):
    assert cli("doctor", "--format", "json").json["calibrations"][0].startswith("h200: calibrated on this machine")
    stored.unlink()
    assert f"no GPU; a file in {stored.parent} adds one" in cli("doctor").out


def test_a_named_file_is_used_instead_of_those_in_the_user_folder(cli, stored, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(calibration(replace(H200, date="2027-02-03")).to_json())
    for options in (("--gpu", "h200"), ()):  # without a GPU it is the card of the file
        found = cli("estimate", "bert-tiny", *options, "--calibration", path, "--time", "--format", "json").json
        assert found["gpu"]["name"] == "h200"
        assert found["gpu"]["calibration"].startswith("calibration of NVIDIA H200, 2027-02-03")
        assert found["variants"][0]["estimated"]["cost"]["time"]["step"]["low_seconds"] > 0
    by_python = bertscope.estimate("bert-tiny", calibration=str(path), time=True)
    assert by_python.gpu.context_high_bytes == 532 * MIB
    fitted = cli(*OF_FIT, "--calibration", path, "--format", "json").json
    assert fitted["rows"][0]["cost"]["context"]["high_bytes"] == 532 * MIB
    assert fitted["gpu"]["calibration"].startswith("calibration of")
    plan = cli("plan", "bert-tiny", "--gpu", "h200", "--calibration", path, "--format", "json").json
    assert plan["rows"][0]["cost"]["time"]["mfu"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--calibration", "missing.json", "--gpu", "h200"), "missing.json"),
        (("--calibration", "card.json", "--gpu", "t4"), "card.json is a calibration of h200, not of t4; give that GPU"),
        (("--calibration", "card.json", "--device", "cpu"), "card.json is a calibration of a GPU"),
        (("--calibration", "card.json", "--no-calibration"), "--no-calibration has no effect with --calibration"),
        (("--calibration", "presets.json", "--gpu", "h200"), "presets.json is not a calibration, which is what"),
        (("--calibration", "notes.json", "--gpu", "h200"), "notes.json is not a calibration, which is what"),
        (("--calibration", "/dev/zero", "--gpu", "h200"), "/dev/zero is not a calibration, which is what"),
    ],
)
def test_a_named_file_that_cannot_be_used_is_an_error(cli, home, monkeypatch, options, words):
    monkeypatch.chdir(home)
    (home / "card.json").write_text(calibration().to_json())
    (home / "presets.json").write_text(cli("presets", "--format", "json").out)
    (home / "notes.json").write_text("my notes")
    result = cli("estimate", "bert-tiny", *options)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert words in result.err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data["rates"].update(copy=-1.0), "number that no GPU has"),
        (lambda data: data["rates"].update(copy=float("nan")), "number that no GPU has"),
        (lambda data: data["steps"][2].update(context_bytes=2**70), "number that no GPU has"),
        (lambda data: data["steps"][2]["work"]["matmul_flops"].update(bf16=-1), "number that no GPU has"),
        (lambda data: data["steps"][2].update(context_bytes="many"), "must be"),
        (lambda data: data["machine"].update(memory_bytes=[9]), "must be"),
        (lambda data: data.update(kind="presets", rows=[]), "is not a calibration"),
        (lambda data: data.update(more="x" * (2 << 20)), "is not a calibration"),
    ],
)
def test_a_hostile_file_is_refused_and_passed_over(stored, change, words):
    data = json.loads(stored.read_text())
    change(data)
    stored.write_text(json.dumps(data))
    with pytest.raises(SourceError, match=words):
        read_calibration(stored)
    assert list(calibrations()) == []


STEP = ("profile", "bert-tiny", "--device", "cuda", "--seq", "16", "--steps", "2", "--optimizer", "sgd")


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A function that says which child of `fake_card` the following commands start."""
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_DATA_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr("bertscope.api.memory.may_have_cuda", lambda: True)

    def use(entry: str = "main") -> None:
        start = partial(ForkedChild, f"tests.memory.fake_card:{entry}")
        monkeypatch.setattr(profile, "starting", lambda *_, **__: nullcontext(start))

    use()
    return use


def test_save_writes_the_card_its_rates_and_each_step_next_to_its_estimate(cli, card, tmp_path):
    path = tmp_path / "h200.json"
    result = cli(*STEP, "--batch", "2", "--checkpointing", "none,full", "--save", path, "--format", "json")
    assert result.code == 0, result.err
    assert f"note: wrote the calibration to {path}" in result.err
    found = read_calibration(path)
    assert (found.machine.gpu, found.machine.memory_bytes) == (H200.gpu, H200.memory_bytes)
    assert found.rates.keys() == {"fp32", COPY}
    assert [(step.precision, step.checkpointing) for step in found.steps] == [("fp32", "none"), ("fp32", "full")]
    assert found.context_bytes == (CONTEXT, CONTEXT)
    source = load("bert-tiny")
    for step, variant in zip(found.steps, result.json["variants"], strict=True):
        assert (step.model, step.batch, step.seq, step.mode) == ("bert-tiny", 2, 16, "training")
        assert (step.allocated_bytes, step.reserved_bytes) == (ALLOCATED, RESERVED)
        estimated = variant["estimated"]["cost"]
        assert step.estimated_allocated_bytes == estimated["max_allocated_bytes"]
        assert step.estimated_reserved_bytes == estimated["reserved"]["high_bytes"]
        assert list(step.step_seconds) == variant["timing"]["step_seconds"]
        run = RunConfig(batch=2, seq=16, device="cuda", optimizer="sgd", checkpointing=step.checkpointing)
        assert step.work.matmul_flops == {"fp32": step_flops(source, run)}
    assert bertscope.from_json(path.read_text()).to_markdown().count("bert-tiny 2x16 training fp32") == 2


def test_a_file_of_this_card_keeps_its_steps_and_one_of_another_card_is_replaced(cli, card, tmp_path):
    path = tmp_path / "h200.json"
    for batch, precision in ((2, "fp32"), (2, "autocast-bf16"), (1, "fp32"), (2, "fp32")):
        assert cli(*STEP, "--batch", batch, "--precision", precision, "--save", path).code == 0
    found = read_calibration(path)
    assert [(step.precision, step.batch) for step in found.steps] == [("fp32", 2), ("bf16", 2), ("fp32", 1)]
    assert found.rates.keys() == {"fp32", "bf16", COPY}
    path.write_text(found.to_json().replace("NVIDIA H200", "NVIDIA L4"))
    assert cli(*STEP, "--batch", "2", "--save", path).code == 0
    assert len(read_calibration(path).steps) == 1
    path.write_text("my notes")
    assert cli(*STEP, "--batch", "2", "--save", path).code == 0
    assert len(read_calibration(path).steps) == 1


def test_what_was_saved_predicts_the_time_of_the_same_step(cli, card):
    folder = user_folder()
    folder.mkdir(parents=True)
    step = ("bert-tiny", "--batch", "2", "--seq", "16", "--optimizer", "sgd", "--format", "json")
    assert cli(*STEP, "--batch", "2", "--save", folder / "mine.json").code == 0
    (measured,) = next(iter(calibrations())).report.steps
    by_folder = cli("estimate", *step, "--gpu", "h200", "--time").json["variants"]
    assert by_folder[0]["estimated"]["cost"]["time"]["step"]["low_seconds"] == pytest.approx(measured.median_seconds)
    (folder / "mine.json").rename(folder.parent / "mine.json")
    assert cli("estimate", *step, "--gpu", "h200", "--time").json["variants"][0]["estimated"]["cost"]["time"] is None
    file = ("--calibration", folder.parent / "mine.json")
    assert cli("estimate", *step, "--gpu", "h200", "--time", *file).json["variants"] == by_folder


def test_a_strategy_that_cannot_be_measured_is_named_and_the_others_are_saved(cli, card, tmp_path):
    card("main_full_in_an_error")
    result = cli(*STEP, "--checkpointing", "none,full", "--batch", "2", "--save", "h200.json")
    assert result.code == 3
    assert "full could not be measured: the child ran out of memory" in result.err
    assert [step.checkpointing for step in read_calibration(tmp_path / "h200.json").steps] == ["none"]


def test_rates_that_cannot_be_measured_are_named_and_the_step_is_saved(cli, card, tmp_path):
    card("main_without_rates")
    result = cli(*STEP, "--batch", "2", "--save", "h200.json")
    assert result.code == 3
    assert "an illegal memory access was encountered while measuring the rates of the GPU" in result.err
    found = read_calibration(tmp_path / "h200.json")
    assert (found.rates, len(found.steps), found.context_bytes) == ({}, 1, (CONTEXT, CONTEXT))


def test_save_without_a_cuda_card_is_an_error_that_says_what_to_do(cli, monkeypatch, tmp_path):
    monkeypatch.setattr("bertscope.api.memory.may_have_cuda", lambda: False)
    result = cli("profile", "bert-tiny", "--device", "cuda", "--save", tmp_path / "card.json")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "torch finds no CUDA device here" in result.err
    assert not (tmp_path / "card.json").exists()


def test_a_file_that_cannot_be_written_is_an_error_before_the_run(cli, card, tmp_path):
    card("main_without_rates")  # a run would be noticed
    result = cli(*STEP, "--save", tmp_path / "missing" / "card.json")
    assert result.code == 2
    assert "cannot be written" in result.err


def test_the_matrices_of_the_rates_fit_in_the_memory_that_is_left(monkeypatch):
    calls_of_cuda(monkeypatch.setattr)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**20, 2**37))
    sides, sent = [], {}
    monkeypatch.setattr(measuring, "_product_rate", lambda side, *_: sides.append(side) or 1.0)
    job = Job(source=load("bert-tiny"), run_config=RunConfig(batch=1, seq=8, device="cuda", optimizer="none"))
    measuring.measure_gpu(job, "cpu", sent.__setitem__)
    assert (sides, sent["rates"]["fp32"]) == ([128], 1.0)
    assert sent["rates"][COPY] > 0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**36, 2**37))
    limited = replace(job, memory_limit_bytes=RESERVED + 64 * MIB)
    measuring.measure_gpu(limited, "cpu", sent.__setitem__)
    assert sides[-1] == 1024  # of 64 MiB / 64


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
    step = ("bert-tiny", "-a", "BertForMaskedLM", "--gpu", "h200", "--seq", "16", "--batch", "2")
    words = (*step, "--time", "--format", "json")
    (variant,) = cli("estimate", *words, "--precision", "autocast-bf16").json["variants"]
    found = variant["estimated"]["cost"]["time"]
    seconds = found["step"]["low_seconds"]
    run = replace(RUN, precision="autocast-bf16", optimizer_implementation="default")
    work, flops = step_work(TINY, run), step_flops(TINY, run)
    assert seconds == found["step"]["high_seconds"]
    assert seconds == pytest.approx(work.calls / 100)  # this card starts 100 operators a second
    assert found["tokens_per_second"] == pytest.approx(32 / seconds)
    assert found["mfu"] == pytest.approx(flops / seconds / 989.5e12)
    (row,) = cli("fit", *words, "--precision", "autocast-bf16", "--checkpointing", "none").json["rows"]
    assert row["cost"]["time"] == found
    shown = cli("estimate", *words[:-2], "--precision", "autocast-bf16", "-v").out
    assert "by the dense peak, 989.5 TFLOP/s" in shown
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
    assert f"no time: {words[3]} has no calibration, " in timed.err
    assert "from 25 ms for training in one process, in a precision with a published peak" in timed.err


def test_a_time_is_predicted_for_cuda_only(cli):
    assert "predicted for CUDA only" in cli("estimate", "bert-tiny", "--time").err


def test_without_a_calibration_the_time_of_a_step_is_a_range_of_the_data_sheet(cli, home):
    """By hand: 8.1 TFLOP/s in fp32 and 320 GB/s, of the T4's product brief."""
    run = {"batch": 8, "seq": 64, "accumulate": 2}
    times = {"gpu": "t4", "time": True, "sequences": 20}
    variant, full = bertscope.estimate("bert-base-uncased", **run, **times, checkpointing="none,full").variants
    flops = 2 * bertscope.flops("bert-base-uncased", batch=8, seq=64, mode="training").rows[0].total.matmul_flops
    bound = flops / 8.1e12 + 4 * 2 * variant.estimated.cost.saved_bytes / 320e9
    time = variant.cost.time
    assert vars(time.step) == pytest.approx({"low_seconds": 1.2 * bound, "high_seconds": 2.5 * bound})
    assert time.epoch.low_seconds == pytest.approx(2 * 1.2 * bound)  # 20 sequences are two steps of 16
    assert full.cost.time.step.low_seconds > time.step.low_seconds  # it recomputes
    options = ("--gpu", "t4", "--time", "--batch", "16", "--seq", "64")
    timed = cli("estimate", "bert-base-uncased", *options, "-v")
    assert re.match(r".*, [\d.]+ to [\d.]+ ms a step \(data sheet\)", timed.out)
    assert "times FLOPs / peak + 4 x saved bytes / bandwidth" in timed.out
    (row,) = cli("fit", "bert-base-uncased", *options, "--sequences", "100", "--precision", "fp32", "--checkpointing",
                 "none", "--format", "json").json["rows"]  # fmt: skip
    time = row["cost"]["time"]
    assert time["mfu"] is None
    assert time["epoch"]["high_seconds"] == pytest.approx(7 * time["step"]["high_seconds"])  # batches of 16
    several = cli("estimate", "bert-base-uncased", "bert-tiny", *options, "--format", "csv").out.splitlines()
    assert "step_low_seconds,step_high_seconds" in several[0]
    assert cli("estimate", "bert-tiny", "--gpu", "t4", "--sequences", "1000").code == 2  # without --time


PRICES = """date: 2020-02-02
currency: USD
prices:
  t4: 0.36
  NVIDIA L4: 0.72
"""


def test_an_epoch_costs_its_hours_by_the_price_and_the_cheapest_gpu_is_first(cli, home, tmp_path):
    """By hand: a second of an hour at 0.36 costs 0.0001."""
    (tmp_path / "prices.yaml").write_text(PRICES)
    run = {"batch": 32, "seq": 64, "precision": "fp32", "checkpointing": "none", "sequences": 3200}
    with pytest.warns(BertscopeWarning, match=r"the prices in .*prices.yaml are \d,\d\d\d days old"):
        known = bertscope.fits("bert-base-uncased", gpu="rtx-a5000,l4,t4", price=str(tmp_path / "prices.yaml"), **run)
    times = {report.gpu.name: report.rows[0].cost.time for report in known}
    assert list(times) == sorted(times, key=lambda name: times[name].epoch_cost_low if times[name] else 9)
    assert times["rtx-a5000"] is None  # without published rates nothing is made up
    assert times["t4"].epoch_cost_low == pytest.approx(100 * times["t4"].step.low_seconds * 0.0001)
    assert times["l4"].epoch_cost_high == pytest.approx(100 * times["l4"].step.high_seconds * 0.0002)
    words = ("fit", "bert-base-uncased", "--gpu", "rtx-a5000,l4,t4", "--price", "t4=.36", "--batch", "32",
             "--seq", "64", "--precision", "fp32", "--checkpointing", "none", "--sequences", "3200")  # fmt: skip
    printed = cli(*words).out
    assert printed.startswith("Cost of an epoch: t4, under 0.01; no price or time is known for rtx-a5000 and l4.\n")
    assert "epoch cost" in printed
    step = ("estimate", "bert-base-uncased", "--gpu", "t4", "--batch", "16", "--seq", "64", "--price", "t4=1")
    assert cli(*step).err.startswith("error: --price has no effect without --sequences")
    assert "epoch cost" in cli(*step, "--sequences", "100").out
    (tmp_path / "lengths.txt").write_text("64\n128\n" * 32)
    assert "epoch cost" in cli(*step, "--lengths", tmp_path / "lengths.txt").out


@pytest.mark.parametrize(("wrong", "said"), [
    (PRICES.replace("2020", "2920"), "yaml:1: date is in the future"),
    (PRICES.replace("NVIDIA L4", "T4"), "yaml:5: t4 has two prices"),
    (PRICES.replace("NVIDIA L4", "l44"), "yaml:5: unknown GPU 'l44'"),
    (PRICES.replace("0.36", "-1"), "yaml:4: t4 must be the price of an hour"),
    (PRICES.split("  t4")[0].strip() + " {}", "yaml:3: prices is empty"),
    (PRICES.replace("date: 2020-02-02", ""), "yaml:1: lacks date"),
])  # fmt: skip
def test_a_wrong_file_of_prices_is_refused_at_its_line(wrong, said, tmp_path):
    (tmp_path / "prices.yaml").write_text(wrong)
    with pytest.raises(BertscopeError, match=said):
        bertscope.fit("bert-tiny", gpu="t4", sequences=10, price=str(tmp_path / "prices.yaml"))


def test_plan_shows_the_time_of_each_plan_on_a_calibrated_card_without_being_asked(cli, stored):
    words = ("bert-tiny", "--batch", "64", "--seq", "64", "--precision", "autocast-bf16")
    report = cli("plan", *words, "--gpu", "h200", "--format", "json").json
    found = cli("estimate", *words, "--gpu", "h200", "--time", "--format", "json").json["variants"][0]
    assert report["rows"][0]["cost"]["time"] == found["estimated"]["cost"]["time"]
    assert cli("plan", *words, "--gpu", "t4", "--format", "json").json["rows"][0]["cost"]["time"] is None
    assert "t4 has no calibration" in cli("plan", *words, "--gpu", "t4", "--time").err  # below 25 ms


def test_on_a_calibrated_card_the_order_of_plans_is_that_of_their_times(stored):
    """This card starts 100 operators a second: autocast needs more operators, and fewer recompute FLOPs than a plan."""
    context = f"{find_gpu('h200').memory_bytes - 202 * 2**20}B"
    run = {"gpu": "h200", "batch": 64, "seq": 64, "precision": "fp32", "context": context, "may_change": "precision",
           "margin": 0}  # fmt: skip
    timed, by_flops = (bertscope.plan("bert-tiny", **run, calibration=used) for used in (True, False))
    assert (timed.objective, by_flops.objective) == ("time", "recompute FLOPs")
    seconds = [row.cost.time.step.low_seconds for row in timed.rows]
    assert seconds == sorted(seconds)
    assert timed.rows[0].changes == by_flops.rows[0].changes == {}
    assert min(by_flops.rows, key=lambda row: row.cost.recompute_flops).changes == {"precision": "autocast-bf16"}


@pytest.mark.parametrize("count", [0, 1])
def test_the_card_is_the_first_device_or_none(monkeypatch, count):
    card = SimpleNamespace(name="Some Gpu", total_memory=2**37)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: card)
    assert this_gpu() == (("Some Gpu", 2**37) if count else None)
