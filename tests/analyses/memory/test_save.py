"""`profile --save`: children with a fake card, whose messages are those of a real one."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest

import bertscope
from bertscope.analyses.memory import calibration, profile
from bertscope.analyses.memory.profile_job import Job
from bertscope.analyses.memory.step import step_flops
from bertscope.calibrations import calibrations, read_calibration, user_folder
from bertscope.reports.calibration import COPY
from bertscope.settings.run_config import RunConfig
from bertscope.sources.find import load
from bertscope.torch_access import torch
from tests.analyses.memory.fake_card import ALLOCATED, CONTEXT, H200, MIB, RESERVED, calls_of_cuda
from tests.child_server import ForkedChild

STEP = ("profile", "bert-tiny", "--device", "cuda", "--seq", "16", "--steps", "2", "--optimizer", "sgd")


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A function that says which child of `fake_card` the following commands start."""
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_DATA_HOME", "LOCALAPPDATA"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr("bertscope.api.memory.may_have_cuda", lambda: True)

    def use(entry: str = "main") -> None:
        start = partial(ForkedChild, f"tests.analyses.memory.fake_card:{entry}")
        monkeypatch.setattr(profile, "_starting", lambda jobs: nullcontext(start))

    use()
    return use


def test_save_writes_the_card_its_rates_and_each_step_next_to_its_estimate(cli, card, tmp_path):
    path = tmp_path / "h200.json"
    result = cli(*STEP, "--batch", "2", "--checkpointing", "none,full", "--save", path, "--format", "json")
    assert result.code == 0, result.err
    assert f"note: the calibration is in {path}" in result.err
    found = read_calibration(path)
    assert (found.machine.card, found.machine.memory_bytes) == (H200.card, H200.memory_bytes)
    assert found.rates.keys() == {"fp32", COPY}
    assert [(step.precision, step.checkpointing) for step in found.steps] == [("fp32", "none"), ("fp32", "full")]
    assert found.context_bytes == (CONTEXT, CONTEXT)
    source = load("bert-tiny")
    for step, variant in zip(found.steps, result.json["variants"], strict=True):
        assert (step.model, step.batch, step.seq, step.mode) == ("bert-tiny", 2, 16, "training")
        assert (step.allocated_bytes, step.reserved_bytes) == (ALLOCATED, RESERVED)
        estimated = variant["estimated"]["device"]
        assert step.estimated_allocated_bytes == estimated["allocated_bytes"]
        assert step.estimated_reserved_bytes == estimated["reserved_bytes"]
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
    assert by_folder[0]["predicted"]["seconds"] == pytest.approx(measured.median_seconds)
    (folder / "mine.json").rename(folder.parent / "mine.json")
    assert cli("estimate", *step, "--gpu", "h200", "--time").json["variants"][0]["predicted"] is None
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
    assert "an illegal memory access was encountered while measuring the rates of the card" in result.err
    found = read_calibration(tmp_path / "h200.json")
    assert (found.rates, len(found.steps), found.context_bytes) == ({}, 1, (CONTEXT, CONTEXT))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--save measures a CUDA card in one process: give --device cuda, and no --nproc"),
        (("--device", "cuda", "--nproc", "2", "--strategy", "ddp"), "--save measures a CUDA card in one process"),
        (("--device", "cuda"), "torch finds no CUDA device here"),
    ],
)
def test_save_without_a_cuda_card_is_an_error_that_says_what_to_do(cli, monkeypatch, tmp_path, options, words):
    monkeypatch.setattr("bertscope.api.memory.may_have_cuda", lambda: False)
    result = cli("profile", "bert-tiny", *options, "--save", tmp_path / "card.json")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert words in result.err
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
    monkeypatch.setattr(calibration, "_product_rate", lambda side, *_: sides.append(side) or 1.0)
    job = Job(source=load("bert-tiny"), run_config=RunConfig(batch=1, seq=8, device="cuda", optimizer="none"))
    calibration.measure_card(job, "cpu", sent.__setitem__)
    assert (sides, sent["rates"]["fp32"]) == ([128], 1.0)
    assert sent["rates"][COPY] > 0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**36, 2**37))
    limited = replace(job, memory_limit_bytes=RESERVED + 64 * MIB)
    calibration.measure_card(limited, "cpu", sent.__setitem__)
    assert sides[-1] == 1024  # of 64 MiB / 64
