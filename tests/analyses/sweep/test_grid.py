"""The grid of a sweep: its points, its errors, and the content that a key identifies."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from bertscope.analyses.sweep import grid as grids
from bertscope.analyses.sweep.grid import KEYS, Task, read_grid, tasks_of
from bertscope.analyses.sweep.point import compute
from bertscope.errors import BertscopeError
from bertscope.reports.sweep import SweepRow
from bertscope.settings.run_config import RunConfig

TINY = "model: bert-tiny\nseq: 16\noptimizer: sgd\n"


@pytest.fixture
def points(tmp_path):
    """A function that returns the tasks of a grid."""

    def found(text: str) -> list:
        (tmp_path / "grid.yaml").write_text(text)
        return tasks_of(read_grid(tmp_path / "grid.yaml"))

    return found


def test_a_grid_is_the_product_of_its_settings_in_the_order_of_its_lines(points):
    found = points("seq: [8, 16]\nbatch: [4, 2, 4]\nmodel: bert-tiny\nprecision: autocast-bf16\n")
    assert [(task.run_config.seq, task.run_config.batch) for task in found] == [(8, 4), (8, 2), (16, 4), (16, 2)]
    assert {(task.run_config.dtype, task.run_config.autocast) for task in found} == {("stored", "bf16")}
    assert set(found[0].point) == set(KEYS)


def test_an_empty_grid_is_the_run_that_estimate_has_by_default(points):
    (task,) = points("{}")
    assert task.run_config == RunConfig(batch=8)
    assert task.point["model"] == "bert-base-cased"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batchsize: 8", "grid.yaml:1: there is no setting 'batchsize'; did you mean 'batch'?"),
        ("model: bert-tiny\nhead: BertModel", "grid.yaml:2: there is no setting 'head'; it is architecture now"),
        ("no_dropout: true", "grid.yaml:1: there is no setting 'no_dropout'; it is dropout now"),
        ("alloc_conf: a", "grid.yaml:1: there is no setting 'alloc_conf'; it is expandable_segments now"),
        ("model: bert-tiny\nbatch: [8, 0]", r"grid.yaml:2: batch takes a whole number from 1 to below 2\*\*31; got 0"),
        ("batch: true", "grid.yaml:1: batch takes a whole number from 1 .*; got True"),
        ("batch: []", "grid.yaml:1: batch has no value; it takes a whole number from 1"),
        ("mode: training\nmomentum: 0.9\noptimizer: adamw", "grid.yaml:2: momentum has no effect with optimizer adamw"),
        ("mode: inference\ncheckpointing: full", "grid.yaml:2: checkpointing has no effect with mode inference"),
        ("model: [bert-tiny, bert-tinny]", "grid.yaml:1: no preset or file named 'bert-tinny'; did you mean"),
        ("checkpointing: fulll", "grid.yaml:1: checkpointing: unknown checkpointing strategy 'fulll'; allowed: none"),
        ("gpu: t44", "grid.yaml:1: gpu: no GPU is known as 't44'; did you mean 't4'?"),
        ("mesh: 8by8", "grid.yaml:1: mesh: the form is 8 or 2x4; got '8by8'"),
        ("batch: [8", "grid.yaml:1: not valid YAML: .*; a grid is lines of 'key: value' or 'key: "),
        ("batch: [1, 2]\nseq: [1, 2]", "grid.yaml:1: 4 points \\(2 batch x 2 seq\\); a grid has at most 3"),
    ],
)
def test_a_wrong_grid_is_an_error_with_its_line(points, monkeypatch, text, message):
    monkeypatch.setattr(grids, "MAX_POINTS", 3)
    with pytest.raises(BertscopeError, match=message):
        points(text)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("world_size: 2", "2 ranks need strategy; choose one of ddp, zero1"),
        ("mesh: 2x2\nworld_size: 8\nstrategy: hsdp", "2x2 has 4 ranks"),
        ("gpu: t4\nbudget: 1GiB", "give either gpu or budget"),
    ],
)
def test_settings_that_exclude_each_other_are_rows_with_an_error(points, setting, message):
    (row,) = points(f"model: bert-tiny\n{setting}\n")
    assert isinstance(row, SweepRow)
    assert row.outcome == "refused"
    assert message in row.error


def test_a_key_identifies_settings_configuration_and_versions(points, monkeypatch, tmp_path):
    (task,) = points(TINY)
    assert points(f"{TINY}batch: 8\n")[0].key == task.key  # the default
    assert points(f"{TINY}batch: 9\n")[0].key != task.key
    monkeypatch.setattr("bertscope.__version__", "9.9")
    assert points(TINY)[0].key != task.key
    monkeypatch.undo()
    (tmp_path / "my.yaml").write_text((grids.find("bert-tiny").path).read_text())
    own = f"model: {tmp_path / 'my.yaml'}\n"
    first = points(own)[0].key
    from bertscope.analyses.sweep import grid as tasks

    tasks._source.cache_clear()
    (tmp_path / "my.yaml").write_text((tmp_path / "my.yaml").read_text().replace("hidden_size: 128", "hidden_size: 64"))
    assert points(own)[0].key != first


def test_a_task_and_a_row_are_the_same_after_a_journey_as_json(points):
    for task in points(f"{TINY}gpu: [t4, a100-40gb]\nfreeze: [[embeddings, pooler]]\nstrategy: hsdp\nmesh: 2x4\n"):
        assert Task.from_json(task.to_json()) == task
    row = task.row(peak_bytes=3, phases={"forward": 3})
    assert SweepRow.from_line(row.to_line()) == row


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("batch: 2\ncheckpointing: full", "--batch 2 --checkpointing full"),
        ("world_size: 2\nstrategy: fsdp", "--world-size 2 --strategy fsdp"),
        ("gpu: t4\nprecision: autocast-fp16", "--device cuda --precision autocast-fp16 --sdpa-kernel efficient"),
    ],
)
def test_a_row_has_the_numbers_of_estimate_and_fit(points, cli, setting, words):
    (task,) = points(f"{TINY}{setting}\n")
    row = SweepRow.from_line(compute(task.to_json()))
    options = f"bert-tiny --seq 16 --optimizer sgd {words}"
    (variant,) = cli("estimate", *options.split(), "--format", "json").json["variants"]
    phases = {phase["phase"]: phase["peak_bytes"] for phase in variant["estimated"]["phases"]}
    assert (row.outcome, row.phases, row.peak_bytes) == ("computed", phases, max(phases.values()))
    assert row.saved_bytes == variant["estimated"]["kept_bytes"]
    assert sum(asdict(row.parts).values()) == row.peak_bytes
    assert row.traffic == {
        kind: sum(call["full_bytes"] for call in variant["traffic"] if call["collective"] == kind)
        for kind in {call["collective"] for call in variant["traffic"]}
    }
    assert row.parameters == cli("count", "bert-tiny", "--format", "json").json["totals"]["distinct_params"]
    if task.card:
        assert row.reserved_bytes == variant["estimated"]["device"]["reserved_bytes"]
        fit = cli("fit", "bert-tiny", "--gpu", "t4", "--batch", "8", "--seq", "16", "--optimizer", "sgd",
                  "--precision", "autocast-fp16", "--checkpointing", "none", "--format", "json").json  # fmt: skip
        assert (row.fits, row.flops) == (fit["rows"][0]["answer"], fit["rows"][0]["step_flops"])


def test_a_worker_with_other_versions_does_not_compute(points):
    (task,) = points(TINY)
    row = SweepRow.from_line(compute(replace(task, versions=task.versions | {"torch": "1.0"}).to_json()))
    assert row.outcome == "failed"
    assert "the sweep began with bertscope 0.1.0, torch 1.0" in row.error
