"""The plan of `calibrate`, its processes with a fake card, and how it continues after an interruption."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from bertscope.analyses.calibrate import session, worker
from bertscope.analyses.calibrate.session import Session
from bertscope.analyses.memory.step import step_flops
from bertscope.errors import SelectionError
from bertscope.reports.base import FAILED
from bertscope.reports.calibration import (
    CONTEXT,
    LIMIT,
    MEASURED,
    PLANNED,
    RATES,
    SKIPPED,
    STEP,
    WORKSPACES,
    CalibrationPoint,
)
from bertscope.sources.find import load
from tests.analyses.calibrate.fakes import H200, MIB, FakeCard, FakeProcess, row

POINTS = session.points()
TINY = replace(next(point for point in POINTS if "tiny" in point.model), batch=2, seq=16)


def test_the_plan_has_every_value_of_every_factor_and_every_name_once():
    assert len({point.name for point in POINTS}) == len(POINTS)
    steps = [point for point in POINTS if point.kind == STEP]
    values = {
        "model": ["bert-tiny", "bert-base-uncased", "bert-large-uncased"], "attention": ["eager", "sdpa"],
        "kernel": ["flash", "efficient", "math", "cudnn"], "precision": ["fp32", "tf32", "fp16", "bf16"],
        "checkpointing": ["none", "full", "selective"], "optimizer": ["sgd", "adamw"], "expandable": [True, False],
        "implementation": ["loop", "foreach", "fused"], "mode": ["training", "inference"],
    }  # fmt: skip
    for name, wanted in values.items():
        assert {getattr(point, name) for point in steps} >= set(wanted), name
    assert [point.more for point in POINTS if point.kind == LIMIT] == [0, 1] * 3


def test_each_point_is_a_run_that_exists():
    for point in POINTS:
        if point.kind in (STEP, LIMIT):
            run = session.run_config(point)
            assert (run.device, run.seq) == ("cuda", point.seq)
            assert (run.autocast or "fp32") == ("fp32" if point.precision == "tf32" else point.precision)
            assert bool(run.expandable_segments) == point.expandable
    old = [point for point in POINTS if not session.why_not(point, (7, 5))]
    assert {point.precision for point in old} == {"", "fp32", "fp16"}
    steps = [point for point in old if point.kind == STEP]
    assert {session.run_config(point, (7, 5)).sdpa_kernel for point in steps} == {"efficient", "math"}


def test_the_process_of_a_step_measures_next_to_its_estimate():
    told, lines = [], [json.dumps({"point": vars(TINY), "capability": [9, 0], "memory_bytes": 10**10}).encode()]
    lines += [b"go %d" % (1000 * MIB)]
    worker.measure_point(lambda: lines.pop(0), lambda kind, content: told.append((kind, content)), FakeCard())
    (ready, _), (kind, found) = told
    assert (ready, kind, found.outcome) == ("ready", "row", MEASURED)
    assert (found.allocated_bytes, found.reserved_bytes) == (64 * MIB, 100 * MIB)
    assert found.context_bytes == 400 * MIB  # 1000 - 500 free - 100 reserved
    assert len(found.step_seconds) == worker.TIMED_STEPS
    source = load(TINY.model, architecture="BertForMaskedLM")
    assert sum(found.work.matmul_flops.values()) == step_flops(source, session.run_config(TINY))
    assert found.estimated_allocated_bytes > 64 * MIB  # the workspaces of Hopper
    assert found.estimated_reserved_bytes > found.estimated_allocated_bytes


def measured(point: CalibrationPoint, card: FakeCard, memory_bytes: int = 10**10):
    told, lines = [], [json.dumps({"point": vars(point), "capability": [9, 0], "memory_bytes": memory_bytes}).encode()]
    lines += [b"go 0"]
    worker.measure_point(lambda: lines.pop(0), lambda kind, content: told.append(content), card)
    return told[-1]


def test_a_limit_runs_the_batch_of_fit_and_says_if_memory_ran_out(monkeypatch):
    # half of what the allocator needs is the limit: a batch between 1 and 100
    limit = replace(TINY, kind=LIMIT, batch=0, limit_bytes=200 * MIB)
    card = FakeCard()
    found = measured(limit, card)
    assert (found.ran, found.is_right, card.limited) == (True, True, 200 * MIB)
    assert found.batch > 1

    def full(*_):
        raise RuntimeError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr("bertscope.analyses.memory.step.ModelStep.run", full)
    more = measured(replace(limit, more=1), FakeCard())
    assert (more.batch, more.ran, more.is_right) == (found.batch + 1, False, True)


def test_rates_and_workspaces_are_measured_on_small_matrices(monkeypatch):
    monkeypatch.setattr(worker, "_SIDE", 64)
    found = measured(CalibrationPoint(kind=WORKSPACES, precision="fp32"), FakeCard())
    assert set(found.workspaces) == {f"{name} {way}" for name in ("cuBLAS", "cuBLASLt")
                                     for way in ("forward", "backward")}  # fmt: skip
    rates = measured(CalibrationPoint(kind=RATES), FakeCard(), memory_bytes=2**20).rates
    assert set(rates) == {"fp32", "tf32", "fp16", "bf16", "copy"}
    assert min(rates.values()) > 0


def test_a_step_that_the_card_has_no_memory_for_is_skipped():
    assert measured(TINY, FakeCard(), memory_bytes=MIB).outcome == SKIPPED


def answering(points, behave=lambda point, read, say: say("row", row(point))):
    """A start of processes: an observer, and workers that `behave`."""

    def work(read, say):
        job = json.loads(read())
        if job["point"] is None:
            say("machine", H200)
            while read():
                say("free", 5)
            return
        point = CalibrationPoint(**job["point"])
        say("ready", None)
        if read():
            points.append(point)
            behave(point, read, say)

    return lambda environment: FakeProcess(work)


@pytest.fixture
def three(monkeypatch):
    points = (CalibrationPoint(kind=CONTEXT), CalibrationPoint(kind=RATES), TINY)
    monkeypatch.setattr(session, "points", lambda: points)
    return points


def test_points_are_measured_in_their_order_one_at_a_time(three):
    seen: list[CalibrationPoint] = []
    with Session(start=answering(seen)) as run:
        reports = list(run.results(run.begun(None)))
    assert seen == list(three)
    assert [sum(row.outcome == PLANNED for row in report.rows) for report in reports] == [2, 1, 0]
    assert [report.is_complete for report in reports] == [False, False, True]


def test_an_interrupted_calibration_continues_and_measures_failures_again(three):
    seen: list[CalibrationPoint] = []
    with Session(start=answering(seen)) as run:
        first = next(run.results(run.begun(None)))
        failed = first.with_row(replace(first.rows[1], outcome=FAILED, reason="it hung"))
        again = list(run.results(run.begun(failed)))[-1]
        assert seen == [three[0], three[1], three[2]]
        assert again.is_complete
        other = replace(failed, machine=replace(H200, driver="590.2"))  # another driver: nothing is kept
        assert all(row.outcome == PLANNED for row in run.begun(other).rows)
        later = replace(failed, machine=replace(H200, date="2027-01-01"))
        assert run.begun(later).rows[0].outcome == MEASURED


def test_a_hung_and_a_dead_process_are_failures_and_the_others_are_measured(three):
    def behave(point, read, say):
        if point.kind == CONTEXT:
            read()  # waits
        elif point.kind == RATES:
            return
        else:
            say("row", row(point))

    with Session(start=answering([], behave), timeout_seconds=0.5) as run:
        report = list(run.results(run.begun(None)))[-1]
    hung, dead, good = report.rows
    assert (hung.outcome, hung.reason) == (FAILED, "ran for longer than 0.5 s")
    assert (dead.outcome, "exit code 1" in dead.reason) == (FAILED, True)
    assert good.outcome == MEASURED
    assert [row.name for row in report.failed] == [hung.name, dead.name]


def test_processes_get_the_settings_of_the_allocator_and_no_other_ones(three, monkeypatch):
    environments = []
    start = answering([])
    monkeypatch.setattr(session, "points", lambda: (replace(TINY, expandable=True), TINY))
    with Session(start=lambda given: environments.append(given) or start(given)) as run:
        list(run.results(run.begun(None)))
    _, expandable, plain = environments
    assert expandable["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert plain["PYTORCH_CUDA_ALLOC_CONF"] is None
    assert plain["CUBLAS_WORKSPACE_CONFIG"] is None
    assert plain["TORCH_CUDNN_SDPA_DEPRIORITIZED"] is None


def test_a_card_that_no_longer_answers_fails_all_points_at_once(three):
    def work(read, say):
        if json.loads(read())["point"] is None:
            say("machine", H200)  # and ends, as after an error of the driver
        else:
            say("ready", None)
            read()

    started = time.monotonic()
    with Session(start=lambda environment: FakeProcess(work), timeout_seconds=20) as run:
        report = list(run.results(run.begun(None)))[-1]
    assert [row.outcome for row in report.rows] == [FAILED] * 3
    assert time.monotonic() - started < 10


def test_the_first_answer_may_take_longer_than_a_point(three):
    def work(read, say):
        read()
        time.sleep(0.5)
        say("machine", H200)

    with Session(start=lambda environment: FakeProcess(work), timeout_seconds=0.1) as run:
        assert run.machine == H200


def test_without_an_answer_of_the_card_there_is_one_error_and_no_process_is_left():
    started = []

    def work(read, say):
        read()
        say("failed", "torch finds no CUDA device here")

    with pytest.raises(SelectionError, match="torch finds no CUDA device"):
        Session(start=lambda given: started.append(FakeProcess(work)) or started[-1])
    assert all(process.killed for process in started)
