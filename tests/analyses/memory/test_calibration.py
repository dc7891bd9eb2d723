"""The use of a calibration by `estimate` and `fit`, and the files that are refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import bertscope.calibrations
from bertscope.calibrations import (
    Calibration,
    calibration_here,
    calibration_of,
    calibrations,
    read_calibration,
    user_folder,
)
from bertscope.errors import SourceError
from bertscope.gpus import find_device, find_gpu
from tests.analyses.memory.fake_card import H200, MIB, calibration

OF_FIT = (
    "fit",
    "bert-tiny",
    "--gpu",
    "h200",
    "--seq",
    "64",
    "--batch",
    "2",
    "--precision",
    "fp32",
    "--checkpointing",
    "none",
)
OF_ESTIMATE = ("estimate", "bert-tiny", "--gpu", "h200", "--format", "json")


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
    result = cli(*OF_FIT, "--format", "json")
    assert (result.json["context_low_bytes"], result.json["context_high_bytes"]) == (504 * MIB, 532 * MIB)
    assert result.json["overhead_bytes"] == (532 + 64) * MIB  # cuBLAS's workspaces of Hopper
    assert result.json["budget_bytes"] == H200.memory_bytes
    assert "calibrated on this machine, 2026-11-22 (driver 580.1, torch 2.11.0)" in cli(*OF_FIT).out
    inference = cli(*OF_FIT, "--mode", "inference", "--format", "json").json
    assert inference["overhead_bytes"] == (532 + 32) * MIB


def test_without_a_calibration_and_with_no_calibration_fit_prints_the_same(cli, home, stored):
    ignored = cli(*OF_FIT, "--no-calibration", "-v").out
    stored.unlink()
    assert cli(*OF_FIT, "-v").out == ignored
    assert "calibrat" not in ignored


def test_eager_attention_needs_no_margin_once_the_context_is_measured(cli, stored):
    assert cli(*OF_FIT, "--attention", "eager", "--format", "json").json["margin"] == 0


def test_estimate_uses_them_by_the_name_of_the_gpu_and_says_so(cli, stored):
    found = cli(*OF_ESTIMATE)
    device = found.json["variants"][0]["estimated"]["device"]
    assert (device["context_low_bytes"], device["context_high_bytes"]) == (504 * MIB, 532 * MIB)
    assert found.json["card"]["calibration"].startswith("calibrated on this machine")
    ignored = cli(*OF_ESTIMATE, "--no-calibration").json
    assert ignored["variants"][0]["estimated"]["device"]["context_low_bytes"] != 504 * MIB
    assert not ignored["card"]["calibration"]


def test_estimate_on_cuda_finds_the_card_of_this_machine(cli, stored, monkeypatch):
    here = [None, (H200.card, H200.memory_bytes), ("NVIDIA L4", 2**34)]
    notes = []
    for card in here:
        monkeypatch.setattr("bertscope.analyses.memory.calibration.this_card", lambda card=card: card)
        notes.append(cli("estimate", "bert-tiny", "--device", "cuda", "-v").out)
    assert ["calibrated on this machine" in note for note in notes] == [False, True, False]


def test_a_budget_is_the_memory_of_a_calibrated_card_that_is_not_named(cli, stored, monkeypatch):
    monkeypatch.setattr("bertscope.analyses.memory.calibration.this_card", lambda: (H200.card, H200.memory_bytes))
    step = ("bert-tiny", "--device", "cuda", "--budget", "2GiB")
    found = cli("fit", *step, "--seq", "8", "--checkpointing", "none", "--format", "json").json
    assert found["budget_bytes"] == 2**31
    assert found["rows"][0]["card_bytes"] <= 2**31
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
    other = calibration(replace(H200, card="NVIDIA Future 9", memory_bytes=2**34))
    in_user_folder(other)
    found = calibration_here("NVIDIA Future 9", 2**34)
    card = bertscope.calibrations.card_of(found)
    assert (card.name, card.memory_bytes, card.context_high_bytes) == ("nvidia-future-9", 2**34, 532 * MIB)
    assert calibration_here("NVIDIA Future 9", 2**35) is None
    assert isinstance(found, Calibration)


def test_doctor_names_the_calibrated_cards_and_their_folder(cli, stored):
    assert cli("doctor", "--format", "json").json["calibrations"][0].startswith("h200: calibrated on this machine")
    stored.unlink()
    assert f"no card, by a file in {stored.parent}" in cli("doctor").out


def test_a_named_file_is_used_instead_of_those_in_the_user_folder(cli, stored, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(calibration(replace(H200, date="2027-02-03")).to_json())
    for options in (("--gpu", "h200"), ()):  # without a GPU it is the card of the file
        found = cli("estimate", "bert-tiny", *options, "--calibration", path, "--time", "--format", "json").json
        assert found["card"]["name"] == "h200"
        assert found["card"]["calibration"].startswith("calibration of NVIDIA H200, 2027-02-03")
        assert found["variants"][0]["predicted"]["seconds"] > 0
    by_python = bertscope.estimate("bert-tiny", calibration=str(path), time=True)
    assert by_python.card.context_high_bytes == 532 * MIB
    fitted = cli(*OF_FIT, "--calibration", path, "--format", "json").json
    assert (fitted["context_high_bytes"], fitted["card"]["calibration"][:14]) == (532 * MIB, "calibration of")
    plan = cli("plan", "bert-tiny", "--gpu", "h200", "--calibration", path, "--format", "json").json
    assert plan["rows"][0]["predicted"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--calibration", "missing.json", "--gpu", "h200"), "missing.json"),
        (("--calibration", "card.json", "--gpu", "t4"), "card.json is a calibration of h200, not of t4; give that GPU"),
        (("--calibration", "card.json", "--device", "cpu"), "card.json is a calibration of a GPU"),
        (("--calibration", "card.json", "--no-calibration"), "--no-calibration uses none; give one"),
        (("--calibration", "presets.json", "--gpu", "h200"), "is a report of presets; a calibration is what"),
        (("--calibration", "notes.json", "--gpu", "h200"), "notes.json: the report is not JSON"),
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
        (lambda data: data["rates"].update(copy=-1.0), "number that no card has"),
        (lambda data: data["rates"].update(copy=float("nan")), "number that no card has"),
        (lambda data: data["steps"][2].update(context_bytes=2**70), "number that no card has"),
        (lambda data: data["steps"][2]["work"]["matmul_flops"].update(bf16=-1), "number that no card has"),
        (lambda data: data["steps"][2].update(context_bytes="many"), "must be"),
        (lambda data: data["machine"].update(memory_bytes=[9]), "must be"),
        (lambda data: data.update(kind="presets", rows=[]), "no field|presets"),
        (lambda data: data.update(more="x" * (2 << 20)), "larger than"),
    ],
)
def test_a_hostile_file_is_refused_and_passed_over(stored, change, words):
    data = json.loads(stored.read_text())
    change(data)
    stored.write_text(json.dumps(data))
    with pytest.raises(SourceError, match=words):
        read_calibration(stored)
    assert list(calibrations()) == []
