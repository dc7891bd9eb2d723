"""`bertscope why`: real files of torch, the command, the estimate of MODEL next to a file."""

from __future__ import annotations

import json

import pytest
import torch

import bertscope
from bertscope.errors import SelectionError
from tests.analyses.memory.why.recording import GIB, Loop, Recording, documented, forward, own
from tests.conftest import OOM


@pytest.fixture
def snapshot(tmp_path):
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(documented())
    return path


def test_torchs_own_viewer_reads_the_snapshots_of_these_tests():
    from torch.cuda._memory_viz import segsum, trace

    card = Recording()
    Loop(card).train(2)
    assert "segments: " in segsum(card.data())
    shown = trace(card.data())
    assert f"{len(card.events)} entries" in shown
    assert shown.count("free completed") == sum(event["action"] == "free_completed" for event in card.events)


@pytest.mark.parametrize("suffix", ["json", "raw.json.gz"])
def test_a_timeline_of_torchs_profiler_is_refused_with_the_kinds_that_are_read(cli, tmp_path, suffix):
    options = {"record_shapes": True, "profile_memory": True, "with_stack": True}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **options) as profiler:
        torch.nn.Linear(8, 8)(torch.ones(2, 8)).sum().backward()
    profiler.export_memory_timeline(str(tmp_path / f"timeline.{suffix}"), device="cpu")
    result = cli("why", tmp_path / f"timeline.{suffix}")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "such as a memory timeline of torch's profiler; 'why' reads a snapshot that torch" in result.err


def test_a_log_that_begins_like_a_timeline_is_read(tmp_path):
    (tmp_path / "log").write_text(f"[[0.5 0.25]]\n{OOM}")
    assert bertscope.why(tmp_path / "log").tried_bytes == 3 * GIB


def test_a_snapshot_of_estimate_has_the_parts_of_the_estimate(tmp_path, cli):
    path = tmp_path / "own.pickle"
    run = ("bert-tiny", "--batch", "8", "--device", "cuda")
    peak = max(cli("estimate", *run, "--snapshot", path, "--format", "json").json["variants"][0]["estimated"]["phases"],
               key=lambda phase: phase["peak_bytes"])  # fmt: skip
    data = cli("why", path, *run, "--format", "json").json
    for part in data["parts"]:  # sizes of the file are not rounded up to the allocator's 512 bytes
        assert part["held_bytes"] <= part["estimated_bytes"] <= part["held_bytes"] + 512 * part["blocks"]
    assert sum(part["estimated_bytes"] for part in data["parts"]) == peak["peak_bytes"]


def test_the_answer_names_the_fault_first_and_the_estimate_stands_next_to_it(cli, snapshot, tmp_path):
    result = cli("why", snapshot, "bert-tiny", "--plot", tmp_path / "history.svg")
    assert result.code == 0
    assert result.out.startswith("out of memory: a request of 4.00 MiB failed in a forward pass at train.py:31 (train)")
    assert "graphs of 4 earlier forward passes hold 252.00 MiB" in result.out.partition("\n\n")[0].replace("\n", " ")
    assert "estimate" in result.out
    picture = (tmp_path / "history.svg").read_text()
    assert picture.startswith("<svg") and "activations" in picture  # noqa: PT018 one picture


def test_the_rows_are_the_blocks_of_a_line_and_a_module(cli, snapshot):
    rows = cli("why", snapshot, "--format", "json").json["rows"]
    (row,) = (row for row in rows if row["module"] == "modeling_bert.py:431 (forward)")
    # Five passes of four layers, each with 8 x 128 x 1,024 activations in fp32.
    assert (row["part"], row["line"], row["blocks"], row["passes"]) == ("activations", "train.py:31 (train)", 20, 5)
    assert row["held_bytes"] == 20 * 4 * 8 * 128 * 1024
    assert cli("why", snapshot, "--format", "csv").out.startswith("line,module,part,blocks,passes,held_bytes")


def test_a_report_is_read_back(snapshot):
    report = bertscope.why(snapshot, "bert-tiny", batch=8, gpu="t4")
    assert bertscope.from_json(report.to_json()) == report


def test_another_process_is_what_the_card_has_and_this_process_does_not(tmp_path):
    card = Recording()
    Loop(card)
    card.oom(40 * 2**20, forward(431, own(31)), device_free=GIB)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(card.pickled())
    report = bertscope.why(path, "bert-tiny", gpu="t4")
    t4 = bertscope.estimate("bert-tiny", gpu="t4").card
    reserved = card.allocator.reserved_bytes
    assert report.other_bytes == t4.memory_bytes - GIB - reserved - t4.context_high_bytes
    assert "why_other" in [finding.key for finding in report.findings]


def test_a_message_with_a_model_says_which_batches_fit(tmp_path):
    path = tmp_path / "oom.log"
    path.write_text(
        "CUDA out of memory. Tried to allocate 514.00 MiB (GPU 0; 2.00 GiB total capacity; 1.40 GiB already allocated; "
        "106.81 MiB free; 1.50 GiB reserved in total by PyTorch)"
    )
    report = bertscope.why(path, "bert-tiny", batch=64, checkpointing="none", optimizer="sgd")
    found = {finding.values["checkpointing"]: finding.values["batch"]
             for finding in report.findings if finding.key == "why_fits"}  # fmt: skip
    fit = bertscope.fit("bert-tiny", 2 * GIB, device="cuda", seq=128, precision="fp32", checkpointing=["none", "full"],
                        optimizer="sgd")  # fmt: skip
    assert found == {row.checkpointing: row.batch for row in fit.rows}


def test_settings_without_a_model_are_refused(snapshot):
    with pytest.raises(SelectionError, match="name it after FILE"):
        bertscope.why(snapshot, batch=8)


def test_standard_input_is_a_text(cli, monkeypatch, tmp_path):
    (tmp_path / "log").write_text(OOM)
    with (tmp_path / "log").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert cli("why", "-", "--format", "json").json["tried_bytes"] == 3 * GIB


def test_the_bare_list_of_torchs_memory_snapshot_is_read(tmp_path):
    import pickle

    card = Recording()
    loop = Loop(card)
    path = tmp_path / "segments.pickle"
    path.write_bytes(pickle.dumps(card.segments()))
    report = bertscope.why(path)
    assert (report.moment, report.allocated_bytes) == ("end", sum(loop.sizes))
    assert json.loads(report.to_json())["parts"][0]["part"] == "parameters"
