"""`calibrate` on a fake card: files, interruptions and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

import bertscope
from bertscope.analyses.calibrate import session
from bertscope.calibrations import calibrations, paths_for, read_calibration
from bertscope.errors import SourceError
from bertscope.reports.base import FAILED
from bertscope.reports.calibration import CONTEXT, RATES, STEP, CalibrationPoint
from tests.analyses.calibrate.fakes import H200, MIB, calibration
from tests.analyses.calibrate.test_session import answering

COMPLETE = calibration()


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A folder of the user without calibrations, and a card with three points."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    monkeypatch.setattr("bertscope.commands.calibrate.may_have_cuda", lambda: True)
    rows = {row.point: row for row in calibration().rows}
    points = (
        CalibrationPoint(kind=CONTEXT),
        CalibrationPoint(kind=RATES),
        next(point for point in rows if point.kind == STEP),
    )
    monkeypatch.setattr(session, "points", lambda: points)
    monkeypatch.setattr(session, "_start", answering([], lambda point, read, say: say("row", rows[point])))
    return tmp_path


def test_without_cuda_it_says_so_in_one_line_and_loads_no_torch(cli, monkeypatch):
    monkeypatch.setattr("bertscope.commands.calibrate.may_have_cuda", lambda: False)
    result = cli("calibrate")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "no CUDA" in result.err


def test_the_plan_needs_neither_cuda_nor_torch(cli):
    result = cli("calibrate", "--dry-run", "--format", "json")
    assert result.code == 0
    report = bertscope.from_json(result.out)
    assert report.machine is None
    assert [row["point"]["kind"] for row in result.json["rows"]].count(STEP) > 40
    code = (
        "import sys; from bertscope.analyses.calibrate.session import planned_report; planned_report(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_it_stores_what_it_measured_and_writes_json_and_markdown(cli, home):
    result = cli("calibrate", "--output", home / "mine.json")
    assert result.code == 0, result.err
    path, unfinished = paths_for(H200.card)
    assert f"the calibration is in {path}" in result.err
    assert not unfinished.exists()
    assert read_calibration(path) == read_calibration(home / "mine.json")
    assert "NVIDIA H200" in (home / "mine.md").read_text()
    assert "+1.00 %" in result.out  # 101 of 100 bytes
    assert "-5.00 %" in result.out  # 190 of 200
    assert [item.is_own for item in calibrations()] == [True]


def test_it_continues_where_it_was_interrupted(cli, home, monkeypatch):
    rows = {row.point: row for row in calibration().rows}

    def interrupt(point, read, say):
        say("row", rows[point]) if point.kind == CONTEXT else read()

    monkeypatch.setattr(session, "_start", answering([], interrupt))
    stop = session.Session._measured

    def measured(self, row, worker):
        if row.point.kind == RATES:
            raise KeyboardInterrupt
        return stop(self, row, worker)

    with monkeypatch.context() as patch:
        patch.setattr(session.Session, "_measured", measured)
        assert cli("calibrate").code == 130
    _, unfinished = paths_for(H200.card)
    assert [row.outcome for row in read_calibration(unfinished).rows] == ["measured", "planned", "planned"]
    assert list(calibrations()) == []  # one that is not complete is not used
    seen: list[CalibrationPoint] = []
    monkeypatch.setattr(session, "_start", answering(seen, lambda point, read, say: say("row", rows[point])))
    result = cli("calibrate")
    assert (result.code, [point.kind for point in seen]) == (0, [RATES, STEP])
    assert "1 points of an interrupted run are kept" in result.err


def test_a_point_that_fails_is_named_and_the_exit_code_is_3(cli, home, monkeypatch):
    rows = {row.point: row for row in calibration().rows}

    def fail(point, read, say):
        say("row", replace(rows[point], outcome=FAILED, reason="no") if point.kind == RATES else rows[point])

    monkeypatch.setattr(session, "_start", answering([], fail))
    result = cli("calibrate")
    assert result.code == 3
    assert "rates could not be measured: no" in result.err
    assert paths_for(H200.card)[1].exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data["rows"][5]["rates"].update(copy=-1.0), "number that no card has"),
        (lambda data: data["rows"][5]["rates"].update(copy=float("nan")), "number that no card has"),
        (lambda data: data["rows"][6].update(context_bytes=2**70), "number that no card has"),
        (lambda data: data["rows"][6].update(context_bytes="many"), "must be"),
        (lambda data: data["machine"].update(capability=[9]), "must be"),
        (lambda data: data.update(kind="presets", rows=[]), "no field|presets"),
        (lambda data: data.update(more="x" * (2 << 20)), "larger than"),
    ],
)
def test_a_hostile_file_is_refused_and_passed_over(home, change, words):
    data = json.loads(COMPLETE.to_json())
    change(data)
    path, _ = paths_for(H200.card)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(data))
    with pytest.raises(SourceError, match=words):
        read_calibration(path)
    assert list(calibrations()) == []


def test_a_report_of_a_calibration_gives_its_ranges():
    report = calibration()
    assert report.context_bytes == (504 * MIB, 532 * MIB)
    assert report.workspace_bytes == (33 * MIB, 34 * MIB)
    assert report.is_complete
    assert "fit right at 6 of 6 limits" in report.to_markdown()
    assert report.to_csv().count("\n") == len(report.rows) + 1
