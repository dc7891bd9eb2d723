"""The laws of a sweep: its grid, no finished point lost or computed twice, and the same file in the end."""

import json
import os
import signal
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import dask
import distributed
import pytest
import torch

from bertscope.analyses.sweep import grid as grids
from bertscope.analyses.sweep import pool
from bertscope.analyses.sweep.grid import KEYS, Task, compute, read_grid, tasks_of
from bertscope.analyses.sweep.pool import local_rows
from bertscope.errors import SelectionError, WorkerError
from bertscope.processes import child
from bertscope.reports.memory import SweepRow
from bertscope.settings.run_config import RunConfig
from bertscope.tracing import cache
from tests.analyses.sweep.fake_points import FUNCTIONS
from tests.child_server import loaded

POINTS, LINES = 200, 30  # LINES: until the next end


def tasks(folder: Path, text: str) -> list[Task]:
    (folder / "grid.yaml").write_text(text)
    return tasks_of(read_grid(folder / "grid.yaml"))


class FakeSweep:
    """The command with a fake point function in a process that can be killed."""

    def __init__(self, folder: Path, workers: int) -> None:
        folder.mkdir()
        batches = ", ".join(map(str, range(1, POINTS + 1)))
        (folder / "grid.yaml").write_text(f"model: bert-tiny\nbatch: [{batches}]\n")
        self.folder, self.results, self.log = folder, folder / "results.jsonl", folder / "log"
        self.command = [*loaded("tests.analyses.sweep.fake_points"), "sweep", "grid.yaml", "-o", "results.jsonl",
                        "--workers", str(workers), "--rows", "1"]  # fmt: skip

    def start(self, seconds: float = 0.0) -> subprocess.Popen:
        environment = os.environ | {"LOG": str(self.log), "PID": str(self.folder / "pid"), "SECONDS": str(seconds)}
        return subprocess.Popen(self.command, cwd=self.folder, env=environment, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)  # fmt: skip

    def stop_at(self, lines: int, number: int) -> subprocess.Popen:
        """Run until the file has so many lines, and send the signal."""
        process = self.start(seconds=0.002)
        deadline = time.monotonic() + 300
        while len(self.lines()) < lines:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.002)
        os.kill(int((self.folder / "pid").read_text()), number)
        process.wait(300)
        return process

    def lines(self) -> list[bytes]:
        return self.results.read_bytes().splitlines(keepends=True) if self.results.exists() else []

    def computed(self) -> list[int]:
        return list(map(int, self.log.read_text().split()))


def test_a_sweep_that_is_killed_five_times_ends_with_the_bytes_of_one_run(tmp_path):
    whole, killed = FakeSweep(tmp_path / "whole", 1), FakeSweep(tmp_path / "killed", 2)
    assert whole.start().wait(300) == 0
    finished: set[int] = set()
    for number in range(1, 6):
        before = len(killed.computed()) if number > 1 else 0
        killed.stop_at(number * LINES, signal.SIGKILL)
        assert not finished & set(killed.computed()[before:])
        if number % 2:  # killed while it wrote the last line
            killed.results.write_bytes(killed.results.read_bytes()[:-9])
        finished = {json.loads(line)["cost"]["peak"]["peak_bytes"] for line in killed.lines() if line.endswith(b"\n")}
    assert POINTS > len(finished) >= 5 * LINES - 1
    last = killed.start()
    _, err = last.communicate(timeout=300)
    assert last.returncode == 0, err
    assert "is incomplete; its point is computed again" in err
    assert f"results.jsonl has {len(finished)} of {POINTS} points; {POINTS - len(finished)} are left" in err
    assert killed.results.read_bytes() == whole.results.read_bytes()
    assert len(whole.lines()) == len(whole.computed()) == POINTS
    assert len(killed.computed()) <= POINTS + 5 * 2 + 3  # what was running, and the torn lines


def test_an_interrupted_sweep_leaves_whole_lines_and_no_process(tmp_path):
    sweep = FakeSweep(tmp_path / "sweep", 2)
    process = sweep.stop_at(20, signal.SIGINT)
    assert process.returncode == 130
    assert all(json.loads(line) for line in sweep.lines())
    computed = sweep.computed()
    time.sleep(0.05)
    assert sweep.computed() == computed


@pytest.mark.parametrize("only_first", [True, False])
def test_a_worker_that_dies_loses_no_finished_point(tmp_path, monkeypatch, only_first):
    given = tasks(tmp_path, "batch: [1, 2, 3, 4, 5, 6]\nmodel: bert-tiny\n")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("DEADLY", "2 5:" if only_first else ":3")
    monkeypatch.chdir(tmp_path)
    rows = {row.point["batch"]: row for row in local_rows(given, 2, FUNCTIONS)}
    assert sorted(rows) == [1, 2, 3, 4, 5, 6]
    times = Counter((tmp_path / "log").read_text().split())
    again = {"2", "5"} if only_first else {"3"}
    assert times == {str(batch): 2 if str(batch) in again else 1 for batch in rows}
    failed = [row for row in rows.values() if row.outcome == "failed"]
    assert [(row.point["batch"], row.error) for row in failed] == (
        []
        if only_first
        else [(3, "its worker ended 2 times: it was killed by SIGKILL, as the system does when memory runs out")]
    )


def test_workers_that_cannot_start_end_the_sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        WorkerError, match=r"3 workers ended before .*, the last ended with exit code 1: .*no_such_module"
    ):
        list(
            local_rows(tasks(tmp_path, "batch: [1, 2]\n"), 2, type(FUNCTIONS)("no_such_module:compute", FUNCTIONS.load))
        )


@pytest.fixture
def threads(monkeypatch):
    """The number of threads is at the end what it was."""
    monkeypatch.setattr(cache, "_chosen", [])
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_a_point_has_the_temporaries_of_its_own_threads(tmp_path):
    """LayerNorm's backward has two sums of 128 numbers of 4 bytes for each thread."""
    points = tasks(tmp_path, "model: bert-tiny\nseq: 1\nbatch: 2\nfreeze: '*weight'\nthreads: [1, 100]\n")
    rows = [SweepRow.from_line(compute(point.to_json())) for point in points]
    assert len({point.group[0] for point in points}) == 2
    assert rows[1].cost.peak_bytes > rows[0].cost.peak_bytes


def test_two_workers_share_the_groups_so_that_they_trace_little_twice(tmp_path):
    from bertscope.analyses.sweep.pool import Queue

    grid = "model: bert-tiny\nprecision: [fp32, autocast-bf16]\ncheckpointing: [none, full]\nbatch: [1, 2]\n"
    queue = Queue(tasks(tmp_path, grid))
    order = [(worker, queue.next(worker).point) for worker in "abababab"]
    assert [(worker, point["precision"], point["checkpointing"]) for worker, point in order] == [
        ("a", "fp32", "none"), ("b", "autocast-bf16", "none"), ("a", "fp32", "none"), ("b", "autocast-bf16", "none"),
        ("a", "fp32", "full"), ("b", "autocast-bf16", "full"), ("a", "fp32", "full"), ("b", "autocast-bf16", "full"),
    ]  # fmt: skip


def test_a_killed_fork_server_is_replaced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    with child.starting(FUNCTIONS.load, pool.ENTRY) as start:
        first = start()
        first._server.process.kill()
        first._server.process.wait()
        again = start()
        assert again.pid
        again.kill_group()
        again.wait()
        assert again._server is not first._server


@pytest.fixture
def cluster():
    """The address of a cluster of one worker, in threads of this process; the system chooses the ports."""
    local = {"host": "127.0.0.1", "scheduler_port": 0, "dashboard_address": "127.0.0.1:0"}
    before = dict(os.environ)
    with distributed.LocalCluster(1, threads_per_worker=1, processes=False, protocol="tcp", **local) as found:
        for name in os.environ.keys() - before.keys():  # dask leaves OMP_NUM_THREADS=1 and others behind
            del os.environ[name]
        yield found.scheduler_address


def test_a_sweep_on_a_cluster_has_the_rows_of_the_function(cli, tmp_path, monkeypatch, cluster):
    given = tasks(tmp_path, "batch: [1, 2, 3]\nmodel: bert-tiny\noptimizer: sgd\nseq: 8\n")
    monkeypatch.chdir(tmp_path)
    result = cli("sweep", "grid.yaml", "-o", "results.jsonl", "--engine", "dask", "--address", cluster)
    assert (result.code, "error" in result.err) == (0, False)
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert lines == [compute(task.to_json()) for task in given]


def test_a_point_whose_worker_on_the_cluster_ends_is_a_row_that_failed(tmp_path, monkeypatch):
    def end(text: str) -> str:
        raise BrokenPipeError if '"batch":1,' in text.replace(" ", "") else SystemExit

    class Client:
        """A client whose executor is that of threads of this process."""

        def __init__(self, address: str) -> None:
            self.address = address

        def get_executor(self, *, pure: bool) -> ThreadPoolExecutor:
            return ThreadPoolExecutor(1)

        def close(self) -> None:
            """Close nothing."""

    monkeypatch.setattr(distributed, "Client", Client)
    monkeypatch.setattr(pool, "compute_apart", end)
    rows = list(pool.dask_rows(tasks(tmp_path, "batch: [1, 2]\nmodel: bert-tiny\nseq: 8\n"), "tcp://a:1"))
    assert {row.outcome for row in rows} == {"failed"}
    assert {row.error for row in rows} == {"its worker ended: BrokenPipeError", "its worker ended: SystemExit"}


def test_a_cluster_that_does_not_answer_is_one_line():
    unreachable = r"dask cannot reach the cluster at tcp://127\.0\.0\.1:9: .*; check address"
    timeout = dask.config.set({"distributed.comm.timeouts.connect": "0.1s"})
    with timeout, pytest.raises(SelectionError, match=unreachable):
        list(pool.dask_rows([], "tcp://127.0.0.1:9"))


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
    row = task.row(sent_bytes=3, phases={"forward": 3})
    assert SweepRow.from_line(row.to_line()) == row


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "batch: 2\ncheckpointing: full\nworld_size: 2\nstrategy: fsdp",
            "--batch 2 --checkpointing full --world-size 2 --strategy fsdp",
        ),
        ("gpu: t4\nprecision: autocast-fp16", "--device cuda --precision autocast-fp16 --sdpa-kernel efficient"),
    ],
)
def test_a_row_has_the_numbers_of_estimate_and_fit(points, cli, setting, words):
    (task,) = points(f"{TINY}{setting}\n")
    row = SweepRow.from_line(compute(task.to_json()))
    options = f"bert-tiny --seq 16 --optimizer sgd {words}"
    (variant,) = cli("estimate", *options.split(), "--format", "json").json["variants"]
    phases = {phase["phase"]: phase["peak_bytes"] for phase in variant["estimated"]["phases"]}
    assert (row.outcome, row.phases, row.cost.peak_bytes) == ("computed", phases, max(phases.values()))
    assert row.cost.saved_bytes == variant["estimated"]["cost"]["saved_bytes"]
    assert row.cost.peak.parts.total == row.cost.peak_bytes
    assert row.traffic == {
        kind: sum(call["full_bytes"] for call in variant["traffic"] if call["collective"] == kind)
        for kind in {call["collective"] for call in variant["traffic"]}
    }
    assert row.parameters == cli("count", "bert-tiny", "--format", "json").json["totals"]["distinct_params"]
    if task.gpu:
        assert asdict(row.cost.reserved) == variant["estimated"]["cost"]["reserved"]
        fit = cli("fit", "bert-tiny", "--gpu", "t4", "--batch", "8", "--seq", "16", "--optimizer", "sgd",
                  "--precision", "autocast-fp16", "--checkpointing", "none", "--format", "json").json  # fmt: skip
        assert all(asdict(row.cost)[name] == fit["rows"][0]["cost"][name] for name in ("verdict", "step_flops"))


def test_a_worker_with_other_versions_does_not_compute(points):
    (task,) = points(TINY)
    row = SweepRow.from_line(compute(replace(task, versions=task.versions | {"torch": "1.0"}).to_json()))
    assert row.outcome == "failed"
    assert "the sweep began with bertscope 0.1.0, torch 1.0" in row.error
